"""What the functions of `slots.py` do, written down plainly, with loops and in float64. Arguments and results are theirs."""

from itertools import product

import torch

from hf_kvcaches.kernels.arguments import Attended, RotationTables
from hf_kvcaches.kernels.rotation import rotate_


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
    """Attention, one query head and slot at a time."""
    batch, kv_heads, slots, _ = keys.shape
    heads, shape = query.shape[1], (batch, kv_heads, slots)
    shown = torch.ones(shape, dtype=torch.bool) if valid is None else valid.expand(shape)
    output = torch.zeros(batch, 1, heads, values.shape[-1], dtype=torch.float64, device=query.device)
    weights = torch.zeros(shape, dtype=torch.float64, device=query.device)
    for b, head in product(range(batch), range(heads)):
        h = head // (heads // kv_heads)
        visible = [s for s in range(slots) if shown[b, h, s]]
        scores = []
        for s in visible:
            key = keys[b, h, s].to(torch.float64, copy=True)
            if rotation is not None:
                row = rotation.positions.expand(shape)[b, h, s]
                rotate_(key, rotation.cos[row], rotation.sin[row], rotation.layout)
            score = query[b, head, 0].double() @ key * scaling
            scores.append(score if softcap is None else softcap * torch.tanh(score / softcap))
        if visible:
            sink = [] if sink_logits is None else [sink_logits[head].double()]
            share = torch.stack(scores + sink).softmax(0)[: len(scores)]
            output[b, 0, head] = share @ values[b, h, visible].double()
            weights[b, h, visible] += share / (heads // kv_heads)
    return output.to(query.dtype), weights.float() if want_weights else None


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
