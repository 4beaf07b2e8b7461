"""Attention over slots that hold their tokens in any order, and writing tokens into them, in one buffer a row or in shared pages.

Tensors are those of a cache, and are not checked. Keys are (batch, kv_heads, slots, head_dim), values the same with value_dim. With
`tables`, (batch, blocks), both are (pages, kv_heads, page, dim): slot s of row b lies in `keys[tables[b, s // page], :, s % page]`, and the
page -1 is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_kvcaches.kernels.attention import attention
from hf_kvcaches.kernels.launch import Backend, choose
from hf_kvcaches.kernels.rotation import RotationTables, rotated_by

Attended = tuple[Tensor, Tensor | None]
"""The output, and the weights if they were asked for."""


def slot_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    *,
    tables: Tensor | None = None,
    valid: Tensor | None = None,
    rotation: RotationTables | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    bias: Tensor | None = None,
    want_weights: bool = False,
    backend: Backend = "auto",
) -> Attended:
    """Attention of one query token a row, (batch, heads, 1, head_dim), over slots in any order; consecutive heads share a key head.

    Keys of invalid slots may hold anything. Without pages their values must be finite (buffers begin as zeros): the torch back-end
    multiplies them by zero.

    Args:
        valid: True for slots that take part, (batch or 1, kv_heads or 1, slots); None for all. A row without any gives zeros. With pages it
            says how many slots there are, and slots without a page must be invalid.
        rotation: For keys that are stored unrotated.
        bias: As in `attention`, which the torch back-end alone knows.

    Returns:
        The output, (batch, 1, heads, value_dim), and None or float32 weights, (batch, kv_heads, slots): mean over the heads of a group.
    """
    slots = keys.shape[2] if tables is None or valid is None else valid.shape[-1]
    if bias is None and choose(backend, query, keys, values) == "triton":
        from hf_kvcaches.kernels import slots_triton

        return slots_triton.attend(query, keys, values, tables, slots, scaling, valid, rotation, softcap, sink_logits, want_weights)
    if tables is not None and valid is not None:
        pages, heads = tables.long().clamp(min=0).unsqueeze(1), _range(keys.shape[1], tables).view(-1, 1)
        keys, values = (store[pages, heads].flatten(2, 3)[:, :, :slots] for store in (keys, values))
        values = values.masked_fill(~valid.unsqueeze(-1), 0)
    keys = keys if rotation is None else rotated_keys(keys, rotation).to(query.dtype)
    allowed = None if valid is None else valid.unsqueeze(2)
    output, weights = attention(query, keys, values, scaling, allowed, softcap=softcap, bias=bias, sink_logits=sink_logits)
    assert output is not None
    return output, weights.mean(2).squeeze(2).float() if want_weights else None


def write_slots(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    tables: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Puts new tokens into slots, in place: `keys[b, h, slots[b, h, j]] = new_keys[b, h, j]`, and the same for values.

    Args:
        slots: (batch or 1, kv_heads or 1, tokens), int64, no slot of a row and head twice. With pages, -1 takes no token.
    """
    if choose(backend, keys, values, new_keys) == "triton":
        from hf_kvcaches.kernels import slots_triton

        return slots_triton.write(keys, values, tables, slots, new_keys, new_values)
    if tables is not None:
        return put_in_pages((keys, values), tables, slots, (new_keys, new_values))
    # Not scatter_, which takes a thousand times as long in bfloat16.
    at = (_range(keys.shape[0], slots).view(-1, 1, 1), _range(keys.shape[1], slots).view(-1, 1), slots)
    keys.index_put_(at, new_keys)
    values.index_put_(at, new_values)
    return None


def put_in_pages(stores: Sequence[Tensor], tables: Tensor, slots: Tensor, states: Sequence[Tensor]) -> None:
    """`write_slots` through `tables`, for any number of stores of any dtype."""
    if not states[0].shape[2]:
        return
    slots = slots.expand(states[0].shape[:3])
    size = stores[0].shape[2]
    page = tables[_range(len(tables), slots).view(-1, 1, 1), slots.clamp(min=0) // size].long()
    head = _range(slots.shape[1], slots).view(1, -1, 1).expand_as(slots)
    live = ((slots >= 0) & (page >= 0)).flatten()
    # A token without a slot repeats the write of the first token that has one; if there is none, all write what is there already.
    # So every shape is known beforehand, and nothing waits for a number.
    source = torch.where(live, _range(live.numel(), live), live.long().argmax())
    at = tuple(index.reshape(-1)[source] for index in (page.clamp(min=0), head, slots.clamp(min=0) % size))
    for store, new in zip(stores, states, strict=True):
        store.index_put_(at, torch.where(live.any(), new.reshape(-1, new.shape[-1])[source], store[at]))


def rotated_keys(keys: Tensor, rotation: RotationTables) -> Tensor:
    """Keys, (batch, kv_heads, slots, head_dim), rotated to their positions."""
    cos, sin = rotation.full[rotation.positions].chunk(2, -1)
    return rotated_by(keys, cos, sin, rotation.layout)


def _range(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device)
