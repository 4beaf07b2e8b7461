"""Decode steps under `torch.compile(fullgraph=True)`.

A compiled graph takes a number in Python that it reads for a constant, and is compiled anew when it changes. So it reads `SlotTable.clock`
in place of `seen`, looks for a victim also where there is room, and masks empty slots. The numbers in Python are read from the clock when
the next uncompiled pass begins.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.call import Call
from hf_kvcaches.errors import UnsupportedError


def require_compileable(layer: Any, call: Call, tokens: int) -> None:
    """Refuse what a graph can't do.

    Args:
        layer: An `EquipLayer`.
        tokens: How many are new in each row.
    """
    if not layer.is_compileable or layer.table.clock is None:
        raise UnsupportedError(
            "torch.compile: of EquipCache only decoding steps can be compiled, with a policy that says so and without recording. "
            "Ask cache.is_compileable, and leave the model uncompiled where it says False."
        )
    if tokens > 1:
        raise UnsupportedError("torch.compile: several tokens at once can't be compiled. Feed them to the uncompiled model, or singly.")
    if call.bias is not None or (call.mask is not None and call.mask.shape[-1] != tokens):
        raise UnsupportedError(
            "torch.compile: EquipCache can't compile steps with a position bias or a mask over more than the new tokens."
        )
    if call.mask is not None:
        newest = call.mask[:, 0, -1]  # the last query's row
        compat.assert_in_graph(
            (newest if newest.dtype == torch.bool else newest == 0).all(),
            "EquipCache: padding among the new tokens of a compiled call. Feed them to the uncompiled model. If no new token is padding, "
            "call hf_kvcaches.enable(model) before the model is compiled.",
        )
