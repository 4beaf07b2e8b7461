"""Run what a plan does not reuse: the tokens between reused ones, and those that are repaired."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.prompt import PrefillCall, Remaining
from hf_kvcaches.reuse.layer import SplicingCache
from hf_kvcaches.reuse.partial import LayerPass, run_layers, run_module
from hf_kvcaches.reuse.plan import PromptPlan
from hf_kvcaches.reuse.sparse import SparsePass

# Tokens whose attention is averaged before repaired tokens are picked.
_NEIGHBOURS = 7
# The most tokens at the end of a prompt, such as a question, that run again once the tokens that they attend to are repaired.
_QUESTION = 64


def hand_over(cache: SplicingCache, call: PrefillCall, plan: PromptPlan) -> tuple[PromptPlan, int | Remaining]:
    """Take a prefix if nothing else is reused; else have the model run the tokens between reused ones. Return the executed plan, too."""
    # Where all tokens of a span are recomputed, or none, there is nothing to pick.
    if any(span.repaired and span.reused for row in plan.rows for span in row.spans):
        plan = _picking(cache, call, plan)
    if (prefix := plan.only_prefix) is not None:
        return plan, cache.take(prefix)
    if plan.repair_depths:
        _run_in_parts(cache, call, plan)
        return plan, cache.take(plan.total - 1)
    # The prompt's last token runs, and those whose queries the holder needs.
    window = 1 if cache.holder is None else max(1, cache.holder.adopt_window or 0)
    last = [np.arange(max(row.begin, len(row.ids) - window), len(row.ids)) for row in plan.rows]
    indices = [np.union1d(row.running(), ends) for row, ends in zip(plan.rows, last, strict=True)]
    cache.sparse_pass = sparse = SparsePass.of(call, indices, plan.padding, plan.total)
    return plan, Remaining(sparse.ids, sparse.positions)


def _picking(cache: SplicingCache, call: PrefillCall, plan: PromptPlan) -> PromptPlan:
    """Run the new tokens of a prompt, and pick the tokens that are repaired: those that its last tokens attend to most, with neighbours.

    A token that is attended to is often the first of several, such as the digits of a number, and the next ones follow in decode steps.
    """
    last = [min(_QUESTION, row.behind) for row in plan.rows]
    indices = [np.union1d(row.new, np.arange(len(row.ids) - count, len(row.ids))) for row, count in zip(plan.rows, last, strict=True)]
    by_layer = list[torch.Tensor]()
    probing = SparsePass.of(call, indices, plan.padding, plan.total, by_layer)
    run_module(cache.model.base_model, _SplicingPass(cache, probing), probing.ids, probing.positions)
    shares = torch.stack([share.to(call.input_ids.device) for share in by_layer])
    if cache.shard is not None:
        shares = cache.shard.gather(shares[None], 0).amax(0)
    pooled = functional.avg_pool1d(shares.mean(0), _NEIGHBOURS, 1, _NEIGHBOURS // 2).cpu().numpy()
    picking = zip(plan.rows, pooled, last, strict=True)
    return PromptPlan(tuple(row.picking(shares[row.padding :], count) for row, shares, count in picking), plan.total)


def _run_in_parts(cache: SplicingCache, call: PrefillCall, plan: PromptPlan) -> None:
    """Run all tokens but the last, some layers at a time: between them, repaired tokens leave, whose higher layers are reused."""
    hidden: torch.Tensor | None = None
    before: SparsePass | None = None
    for start, stop in pairwise([0, *plan.repair_depths, len(cache.layers)]):
        indices = [row.running(start) for row in plan.rows]
        if not any(map(len, indices)):
            return
        sparse = SparsePass.of(call, indices, plan.padding, plan.total)
        if hidden is not None and before is not None:
            hidden = hidden.gather(1, _places(before, sparse).to(hidden.device)[..., None].expand(-1, -1, hidden.shape[-1]))
        splicing = _SplicingPass(cache, sparse, start)
        hidden = run_layers(cache.model, start, stop, sparse.ids, splicing, sparse.positions, hidden=hidden)
        before = sparse


def _places(before: SparsePass, sparse: SparsePass) -> torch.Tensor:
    """Where a pass's tokens are among those of the pass before, (batch, tokens); fillers are anywhere."""
    pairs = zip(before.host_slots, sparse.host_slots, strict=True)
    places = [np.searchsorted(np.where(old < before.total, old, -1), np.where(new < before.total, new, -1)) for old, new in pairs]
    return torch.from_numpy(np.stack(places))


class _SplicingPass(LayerPass):
    """A layer pass that writes the tokens of a sparse pass into their slots."""

    def __init__(self, cache: KVCache, sparse: SparsePass, start: int = 0) -> None:
        super().__init__(cache, start)
        self.sparse = sparse

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        view = self.sparse.write(self.layers[layer_idx], layer_idx, key_states, value_states)
        self.cache.answer_next(view)
        return view, view

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.sparse.total, 0
