"""Attention over slots that hold their tokens in any order, and writing tokens into them, in one buffer a row or in shared pages.

Softmax does not care for order, so a cache that evicts tokens can put a new one wherever one left, and nothing has to move.

Each function has a `backend`: `"torch"` (fast on CPUs, has gradients, can be compiled), `"triton"` (one pass over keys and values; CUDA,
no gradients), or `"auto"`: Triton for CUDA tensors where it can, else torch. Tensors are those of a cache, and are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvcaches.kernels.arguments import Attended, RotationTables, SlotOptions
from hf_kvcaches.kernels.launch import Backend, choose
from hf_kvcaches.kernels.rotation import rotate_, swap_pairs


def slot_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    *,
    tables: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    rotation: RotationTables | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    want_weights: bool = False,
    backend: Backend = "auto",
) -> Attended:
    """Attention of one query token a row over slots in any order.

    Invalid slots take no part, and their keys may hold anything; so may their values in pages. Without pages these must be finite numbers
    (buffers begin as zeros) for the torch back-end, which multiplies them by zero.

    Args:
        query: (batch, heads, 1, head_dim); consecutive heads share a key head.
        keys: (batch, kv_heads, slots, head_dim), or (pages, kv_heads, page, head_dim) with `tables`; the last dimension contiguous.
        values: Like `keys`, with value_dim.
        tables: The pages of each row, (batch, blocks), int32 or int64: slot s of row b lies in `keys[tables[b, s // page], :, s % page]`.
            -1 where a row has none, whose slots must be invalid. None: without pages. With pages `valid` says how many slots there are.
        valid: True for slots that take part, (batch or 1, kv_heads or 1, slots); None for all. A row without any gives zeros.
        rotation: For keys that are stored unrotated: the rotation to apply on the way.
        softcap: If given, scores are softcap * tanh(scores * scaling / softcap).
        sink_logits: A score for each head, (heads,), that takes a share of the weights and gives nothing: a learned sink.
        bias: Added to the scores, (batch, heads, 1, slots); the torch back-end alone knows it.
        backend: See the module.

    Returns:
        The output, (batch, 1, heads, value_dim), and None or float32 weights, (batch, kv_heads, slots): mean over the heads of a group.
    """
    options = SlotOptions(valid, rotation, softcap, sink_logits, want_weights)
    slots = keys.shape[2] if tables is None or valid is None else valid.shape[-1]
    if bias is None and choose(backend, query, keys, values) == "triton":
        from hf_kvcaches.kernels import slots_triton

        return slots_triton.attend(query, keys, values, tables, slots, scaling, options)
    if tables is not None and valid is not None:
        pages, heads = tables.long().clamp(min=0).unsqueeze(1), _range(keys.shape[1], tables).view(-1, 1)
        keys, values = (store[pages, heads].flatten(2, 3)[:, :, :slots] for store in (keys, values))
        values = values.masked_fill(~valid.unsqueeze(-1), 0)
    return _attention_torch(query, keys, values, scaling, options, bias)


def write_slots(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    *,
    tables: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Puts new tokens into slots, in place: `keys[b, h, slots[b, h, j]] = new_keys[b, h, j]`, and the same for values.

    Args:
        keys: As in `slot_attention`.
        values: Like `keys`.
        slots: (batch or 1, kv_heads or 1, tokens), int64, from 0 on, no slot of a row and head twice. With pages, -1 takes no token.
        new_keys: (batch, kv_heads, tokens, head_dim).
        new_values: (batch, kv_heads, tokens, value_dim).
        tables: As in `slot_attention`; where the page of a slot is -1, nothing is written.
        backend: See the module.
    """
    if choose(backend, keys, values, new_keys) == "triton":
        from hf_kvcaches.kernels import slots_triton

        return slots_triton.write(keys, values, tables, slots, new_keys, new_values)
    if tables is not None:
        return put_in_pages((keys, values), tables, slots, (new_keys, new_values))
    batch, heads, tokens = new_keys.shape[:3]
    if slots.shape[:2] == (1, 1):  # Half the time of the general way.
        keys.index_copy_(2, slots.view(tokens), new_keys)
        values.index_copy_(2, slots.view(tokens), new_values)
        return None
    # Not scatter_, which takes a thousand times as long in bfloat16.
    at = (_range(batch, slots).view(-1, 1, 1), _range(heads, slots).view(-1, 1), slots)
    keys.index_put_(at, new_keys)
    values.index_put_(at, new_values)
    return None


def put_in_pages(stores: Sequence[torch.Tensor], tables: torch.Tensor, slots: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
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


def _attention_torch(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, options: SlotOptions, bias: torch.Tensor | None
) -> Attended:
    valid, rotation, softcap, sink_logits, want_weights = options
    batch, kv_heads, slots, dim = keys.shape
    heads = query.shape[1]
    group = heads // kv_heads
    if rotation is not None:
        keys = rotated_keys(keys, rotation).to(query.dtype)
    # Scaled within the product: one operation, and nothing is rounded twice.
    query = query.reshape(batch * kv_heads, group, dim)
    scores = torch.baddbmm(query.narrow(2, 0, 1), query, keys.flatten(0, 1).transpose(1, 2), beta=0, alpha=scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.view(scores.shape).to(scores.dtype)
    exact = torch.float32 if want_weights and scores.dtype.itemsize < 4 else None
    sinks = None if sink_logits is None else sink_logits.to(scores.dtype).view(1, kv_heads, group, 1)
    if valid is None:
        weights = _softmax(scores.view(batch, kv_heads, group, slots), sinks, exact).flatten(0, 1)
    else:
        # A finite number, and zeros afterwards: a row without any valid slot gives zeros, and its gradient too.
        hidden = ~valid.unsqueeze(2)
        scores = scores.view(batch, kv_heads, group, slots).masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = _softmax(scores, sinks, exact).masked_fill(hidden, 0).flatten(0, 1)
    output = torch.bmm(weights if exact is None else weights.to(values.dtype), values.flatten(0, 1))
    output = output.view(batch, 1, heads, values.shape[-1])
    if not want_weights:
        return output, None
    weights = (weights if group == 1 else weights.mean(1)).view(batch, kv_heads, slots)
    return output, weights.float()


def rotated_keys(keys: torch.Tensor, rotation: RotationTables) -> torch.Tensor:
    """Keys, (batch, kv_heads, slots, head_dim), rotated to their positions."""
    if rotation.full is None:
        keys = keys.to(torch.promote_types(keys.dtype, rotation.cos.dtype), copy=True)
        return rotate_(keys, rotation.cos[rotation.positions], rotation.sin[rotation.positions], rotation.layout)
    dims = rotation.full.shape[1] // 2
    cos, sin = rotation.full[rotation.positions].split(dims, -1)
    pairs = keys if dims == keys.shape[-1] else keys[..., :dims]
    rotated = torch.addcmul(pairs * cos, swap_pairs(pairs, rotation.layout), sin)
    return rotated if dims == keys.shape[-1] else torch.cat([rotated, keys[..., dims:]], -1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor:
    """The weights of slots, (batch, kv_heads, group, slots), beside a sink that takes a share, (1, kv_heads, group, 1)."""
    if sinks is None:
        return scores.softmax(-1, dtype=dtype)
    return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1).softmax(-1, dtype=dtype)[..., :-1]


def _range(size: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(size, device=like.device)
