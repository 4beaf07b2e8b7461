"""What the functions of `coefficients.py` take: types, checks of the arguments, and dtypes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels._shared import Layout, check_layout, check_mask

Part = tuple[torch.Tensor, torch.Tensor]

TILE = 16  # Tokens that share a scale and a basis: no matrix product of a GPU takes fewer.


class Coefficients(NamedTuple):
    """Keys or values that are kept by their coefficients: token t is decode @ (data[t] * scale[t // TILE]).

    Args:
        data: (batch, kv_heads, tokens, rank), floating point or int8, the last dimension contiguous.
        decode: (kv_heads, dim, rank): one basis a head; or (batch, kv_heads, bases, dim, rank): a bank, from which tiles choose.
        scale: For int8, and only then: (batch, kv_heads, tiles), floating point. The last tile may be shorter than TILE tokens.
    """

    data: torch.Tensor
    decode: torch.Tensor
    scale: torch.Tensor | None = None


class Rotation(NamedTuple):
    """Rotary positions for coefficients of keys that were not rotated.

    Args:
        inv_freq: Angle per position of each pair, (rotary_dim / 2,), float64. Dimensions from rotary_dim on pass unchanged.
        layout: Which dimensions form a pair: `"half"`: i and i + rotary_dim / 2; `"interleaved"`: 2i and 2i + 1.
        positions: Of the tokens, from 0 on, (batch or 1, tokens), int32 or int64. Those of invalid tokens may be anything. Where they
            count up by one in each row, this is as fast as `start`.
        start: Without `positions`: where the first token stands, and the others behind it one by one; a number, or one a row, (batch,).
        attention_scaling: What the model multiplies cosines and sines with (yarn).
    """

    inv_freq: torch.Tensor
    layout: Layout = "half"
    positions: torch.Tensor | None = None
    start: int | torch.Tensor = 0
    attention_scaling: float = 1.0


class Options(NamedTuple):
    """What `coefficient_attention` may be given by name, which is described there."""

    valid: torch.Tensor | None = None
    rotation: Rotation | None = None
    key_basis_of: torch.Tensor | None = None
    value_basis_of: torch.Tensor | None = None
    softcap: float | None = None


def check_coefficient_attention(query: torch.Tensor, keys: Coefficients, values: Coefficients, options: Options) -> None:
    """Refuses arguments of `coefficient_attention` that don't fit together."""
    _check_side("keys", keys, keys.data.shape[:3], options.key_basis_of)
    _check_side("values", values, keys.data.shape[:3], options.value_basis_of)
    batch, kv_heads, tokens = keys.data.shape[:3]
    dim = keys.decode.shape[-2]
    _check_query(query, batch, kv_heads, dim)
    if not query.is_floating_point():
        raise ConfigError.of("query", "floating point", query.dtype)
    if options.valid is not None:
        check_mask("valid", options.valid, (batch, kv_heads, tokens))
    if options.rotation is not None:
        _check_rotation(options.rotation, batch, tokens, dim)


def check_exact(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None) -> None:
    """Refuses arguments of `exact_attention` that don't fit together."""
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ConfigError.of("keys and values", "four dimensions, equal but for the last one", (tuple(keys.shape), tuple(values.shape)))
    batch, kv_heads, tokens, dim = keys.shape
    _check_query(query, batch, kv_heads, dim)
    if valid is not None:
        check_mask("valid", valid, (batch, kv_heads, tokens))


def _check_query(query: torch.Tensor, batch: int, kv_heads: int, dim: int) -> None:
    if query.ndim != 4 or (query.shape[0], *query.shape[2:]) != (batch, 1, dim) or query.shape[1] % kv_heads or not query.shape[1]:
        raise ConfigError.of("query", f"shape ({batch}, a multiple of {kv_heads}, 1, {dim})", tuple(query.shape))


def _check_side(name: str, side: Coefficients, rows: torch.Size, basis_of: torch.Tensor | None) -> None:
    data, decode, scale = side
    if data.ndim != 4 or data.shape[:3] != rows:
        raise ConfigError.of(f"{name}.data", "shape (batch, kv_heads, tokens, rank), equal but for the rank", tuple(data.shape))
    if data.dtype != torch.int8 and not data.is_floating_point():
        raise ConfigError.of(f"{name}.data", "floating point or int8", data.dtype)
    if data.stride(3) != 1 and data.shape[3] > 1:
        raise ConfigError.of(f"{name}.data", "a contiguous last dimension", data.stride(), "Call .contiguous() on it.")
    batch, kv_heads, tokens, rank = data.shape
    bank = decode.ndim == 5
    if tuple(decode.shape[: -2 - bank]) != ((batch, kv_heads) if bank else (kv_heads,)) or decode.shape[-1] != rank:
        wanted = f"shape ({kv_heads}, dim, {rank}) or ({batch}, {kv_heads}, bases, dim, {rank})"
        raise ConfigError.of(f"{name}.decode", wanted, tuple(decode.shape))
    tiles = (batch, kv_heads, -(-tokens // TILE))
    if (scale is not None) != (data.dtype == torch.int8):
        raise ConfigError.of(f"{name}.scale", "to be given exactly when data is int8", None if scale is None else tuple(scale.shape))
    if scale is not None and (tuple(scale.shape) != tiles or not scale.is_floating_point()):
        raise ConfigError.of(f"{name}.scale", f"floating point of shape {tiles}", (scale.dtype, tuple(scale.shape)))
    basis_name = name.removesuffix("s") + "_basis_of"
    if basis_of is None:
        if bank and decode.shape[2] != 1:
            raise ConfigError.of(basis_name, f"which of {decode.shape[2]} bases each tile is in", None)
    elif not bank or tuple(basis_of.shape) != tiles or basis_of.dtype not in (torch.int16, torch.int32, torch.int64):
        got = (basis_of.dtype, tuple(basis_of.shape))
        raise ConfigError.of(basis_name, f"a bank of bases and int16, int32 or int64 of shape {tiles}", got)


def _check_rotation(rotation: Rotation, batch: int, tokens: int, dim: int) -> None:
    frequencies, layout, positions, start, _ = rotation
    if frequencies.ndim != 1 or frequencies.dtype != torch.float64 or not 0 < 2 * len(frequencies) <= dim:
        got = (frequencies.dtype, tuple(frequencies.shape))
        raise ConfigError.of("rotation.inv_freq", f"1 to {dim // 2} numbers in float64, which keeps large positions exact", got)
    check_layout("rotation.layout", layout)
    if positions is not None:
        fits = positions.ndim == 2 and positions.shape[0] in (1, batch) and positions.shape[1] == tokens
        if not fits or positions.dtype not in (torch.int32, torch.int64):
            got = (positions.dtype, tuple(positions.shape))
            raise ConfigError.of("rotation.positions", f"int32 or int64 of shape ({batch} or 1, {tokens})", got)
    if isinstance(start, torch.Tensor) and (tuple(start.shape) != (batch,) or start.dtype not in (torch.int32, torch.int64)):
        raise ConfigError.of("rotation.start", f"a number, or integers of shape ({batch},)", (start.dtype, tuple(start.shape)))


def computing(tensor: torch.Tensor) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def nothing(query: torch.Tensor, value_dim: int) -> Part:
    """Attention over no tokens at all."""
    batch, heads = query.shape[:2]
    lse = torch.full((batch, heads), -torch.inf, dtype=precise(query.device), device=query.device)
    return query.new_zeros(batch, 1, heads, value_dim), lse


def precise(device: torch.device) -> torch.dtype:
    """The dtype of a log sum exp."""
    return torch.float32 if device.type == "mps" else torch.float64
