"""What the functions of `slots.py` take: types, and checks of the arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels._shared import Layout, check_layout, check_mask, fits

WriteTurn = tuple[torch.Tensor, torch.Tensor, Layout]


class Turn(NamedTuple):
    """Rotary positions for keys that are stored without any.

    Args:
        positions: Row of the tables for each slot, (batch or 1, kv_heads or 1, slots), integers; an invalid slot may have -1.
        cos: (rows, rotary_dim / 2), with the model's `attention_scaling`, if it has one. Dimensions from rotary_dim on pass unchanged.
        sin: Like `cos`.
        layout: Which dimensions form a pair: `"half"`: i and i + rotary_dim / 2; `"interleaved"`: 2i and 2i + 1.
    """

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    layout: Layout = "half"


class Options(NamedTuple):
    """What `slot_attention` and `paged_attention` may be given by name, which is described there."""

    valid: torch.Tensor | None = None
    far: int | torch.Tensor | None = None
    far_query: torch.Tensor | None = None
    turn: Turn | None = None
    softcap: float | None = None
    want_weights: bool = False


def check_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    options: Options,
) -> int:
    """Refuses arguments of `slot_attention` or, with `tables`, `paged_attention` that don't fit together. Returns the number of slots."""
    check_buffers(keys, values, tables)
    valid, far, far_query, turn, *_ = options
    batch, kv_heads = (len(keys) if tables is None else len(tables)), keys.shape[1]
    slots = keys.shape[2] if valid is None or tables is None else valid.shape[-1]
    if query.ndim != 4 or (query.shape[0], *query.shape[2:]) != (batch, 1, keys.shape[3]) or query.shape[1] % kv_heads:
        raise ConfigError.of("query", f"shape ({batch}, a multiple of {kv_heads}, 1, {keys.shape[3]})", tuple(query.shape))
    if query.dtype != keys.dtype:
        raise ConfigError.of("query", f"the keys' dtype, {keys.dtype}", query.dtype)
    if tables is not None and slots > tables.shape[1] * keys.shape[2]:
        raise ConfigError.of("valid", f"at most {tables.shape[1] * keys.shape[2]} slots, as many as the tables have", slots)
    wanted = (batch, kv_heads, slots)
    if valid is not None:
        check_mask("valid", valid, wanted)
    if (far is None) != (far_query is None):
        raise ConfigError.of("far_query", "to be given exactly when `far` is", None if far_query is None else tuple(far_query.shape))
    if isinstance(far, torch.Tensor):
        check_mask("far", far, wanted)
    elif far is not None and not 0 <= far <= slots:
        raise ConfigError.of("far", f"a mask or a number from 0 to {slots}", far)
    if far_query is not None and (far_query.shape != query.shape or far_query.dtype != query.dtype):
        raise ConfigError.of("far_query", f"shape {tuple(query.shape)} and {query.dtype}", (tuple(far_query.shape), far_query.dtype))
    if turn is not None:
        if not fits(turn.positions, wanted) or turn.positions.is_floating_point():
            raise ConfigError.of("turn.positions", f"integers of shape {wanted}, with 1 for batch or heads", tuple(turn.positions.shape))
        _check_tables("turn", turn.cos, turn.sin, turn.layout, keys.shape[3])
    return slots


def check_write(
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    turn: WriteTurn | None,
) -> None:
    """Refuses arguments of `write_slots` or, with `tables`, `write_pages` that don't fit together."""
    check_buffers(keys, values, tables)
    batch, kv_heads = (len(keys) if tables is None else len(tables)), keys.shape[1]
    for name, new, buffer in (("new_keys", new_keys, keys), ("new_values", new_values, values)):
        if new.ndim != 4 or (*new.shape[:2], new.shape[3]) != (batch, kv_heads, buffer.shape[3]) or new.shape[2] != new_keys.shape[2]:
            raise ConfigError.of(name, f"shape ({batch}, {kv_heads}, tokens, {buffer.shape[3]})", tuple(new.shape))
        if new.dtype != buffer.dtype:
            raise ConfigError.of(name, f"the buffer's dtype, {buffer.dtype}", new.dtype)
    wanted = (batch, kv_heads, new_keys.shape[2])
    if not fits(slots, wanted) or slots.dtype != torch.int64:
        raise ConfigError.of("slots", f"int64 of shape {wanted}, with 1 for batch or heads", (slots.dtype, tuple(slots.shape)))
    if turn is not None:
        _check_tables("turn", *turn, keys.shape[3])
        if not fits(turn[0][..., 0], wanted):
            raise ConfigError.of("turn", f"tables of shape {wanted} and pairs, with 1 for batch or heads", tuple(turn[0].shape))


def check_buffers(keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor | None) -> None:
    """Refuses buffers (or pages, with `tables`) that don't belong together."""
    kind = ("keys", "values") if tables is None else ("key_pages", "value_pages")
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
        got = (tuple(keys.shape), keys.dtype), (tuple(values.shape), values.dtype)
        raise ConfigError.of(f"{kind[0]} and {kind[1]}", "four dimensions, equal but for the last one, and one dtype", got)
    for name, tensor in zip(kind, (keys, values), strict=True):
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
            raise ConfigError.of(name, "a contiguous last dimension", tensor.stride(), "Call .contiguous() on it.")
    if tables is not None and (tables.ndim != 2 or tables.dtype not in (torch.int32, torch.int64)):
        raise ConfigError.of("tables", "int32 or int64 of shape (batch, blocks)", (tables.dtype, tuple(tables.shape)))


def _check_tables(name: str, cos: torch.Tensor, sin: torch.Tensor, layout: str, dim: int) -> None:
    if cos.shape != sin.shape or cos.dtype != sin.dtype or 2 * cos.shape[-1] > dim:
        raise ConfigError.of(name, f"cos and sin of one shape, with at most {dim // 2} pairs", (tuple(cos.shape), tuple(sin.shape)))
    check_layout(f"{name} layout", layout)
