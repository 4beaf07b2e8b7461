"""Store the rows of a prompt that was computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.identity import Identity
from hf_kvcaches.reuse.storage import Buffers, NewPrompt, states_in
from hf_kvcaches.warmstart.library import WarmStartLibrary
from hf_kvcaches.warmstart.planning import ServedRow
from hf_kvcaches.warmstart.reading import PromptStates, last_token


def storing_job(library: WarmStartLibrary, model: PreTrainedModel, rows: Sequence[ServedRow], identity: Identity, slots: int) -> NewPrompt:
    """Return the job that stores the rows of a prompt in a library once their first `slots` slots are computed."""
    device = compat.input_device(model)

    def put(buffers: Buffers) -> None:
        if not identity.is_current():
            return
        for row in rows:
            layers = tuple(states_in(buffers, row.number, slice(row.padding, row.padding + len(row.ids))))
            if len(row.ids) > library.tail and library.entries.exact(ids := row.ids.tolist()) is None:
                states = PromptStates(layers, (), ())
                if library.slots:
                    last = last_token(library.model, torch.tensor([ids], device=device), layers)
                    states = PromptStates(layers, last.queries, last.scaling)
                library.keep(ids, states)

    return NewPrompt(slots, put)
