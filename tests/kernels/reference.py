"""What kernels do, written down plainly, with loops and in float64. Arguments and results are theirs where they have their names."""

import math
from itertools import product

import torch

from hf_kvcaches.kernels.rotation import RotationTables, rotate_
from hf_kvcaches.kernels.slots import Attended


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    visible: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention, one query at a time.

    Args:
        visible: Which tokens a query sees, (batch or 1, kv_heads or 1, queries or 1, tokens), or None for all.

    Returns:
        Output, (batch, queries, heads, value_dim); log sum exp, (batch, heads, queries); weights, (batch, kv_heads, queries, tokens).
    """
    (batch, heads, queries, _), (kv_heads, tokens) = query.shape, keys.shape[1:3]
    shape, group = (batch, kv_heads, queries, tokens), heads // kv_heads
    shown = torch.ones(shape, dtype=torch.bool) if visible is None else visible.expand(shape)
    output, weights = (torch.zeros(size, dtype=torch.float64) for size in ((batch, queries, heads, values.shape[3]), shape))
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    for b, head, q in product(range(batch), range(heads), range(queries)):
        seen = [token for token in range(tokens) if shown[b, head // group, q, token]]
        if seen:
            scores = keys[b, head // group, seen].double() @ query[b, head, q].double() * scaling
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            lse[b, head, q] = scores.logsumexp(0)
            sink = [] if sink_logits is None else [sink_logits[head : head + 1].double()]
            share = torch.cat([scores, *sink]).softmax(0)[: len(seen)]
            output[b, q, head] = share @ values[b, head // group, seen].double()
            weights[b, head // group, q, seen] += share / group
    return output, lse, weights


def slot_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    *,
    valid: torch.Tensor | None = None,
    rotation: RotationTables | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    want_weights: bool = False,
) -> Attended:
    if rotation is not None:
        rows = rotation.positions.expand(keys.shape[:3])
        keys = rotate_(keys.to(torch.float64, copy=True), rotation.cos[rows], rotation.sin[rows], rotation.layout)
    visible = None if valid is None else valid.unsqueeze(2)
    output, _, weights = attention(query, keys, values, scaling, visible, softcap, sink_logits)
    return output.to(query.dtype), weights.squeeze(2).float() if want_weights else None


def write_slots(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, *new: torch.Tensor) -> None:
    """`write_pages` with one page a row, as large as the row."""
    write_pages(keys, values, torch.arange(len(keys)).unsqueeze(1), slots, *new)


def write_pages(key_pages: torch.Tensor, value_pages: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, *new: torch.Tensor) -> None:
    """Writes one token of one head at a time."""
    size, shape = key_pages.shape[2], new[0].shape[:3]
    for b, h, j in product(*map(range, shape)):
        slot = int(slots.expand(shape)[b, h, j])
        if slot >= 0 and tables[b, slot // size] >= 0:
            for pages, states in zip((key_pages, value_pages), new, strict=True):
                pages[tables[b, slot // size], h, slot % size] = states[b, h, j]
