"""What `rebuild.py` asks of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels._shared import check_layout
from hf_kvcaches.kernels.rebuild import Codes, Decoder, Span

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_rebuild(
    side: torch.Tensor | None,
    codes: Codes | None,
    decoder: Decoder,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    spans: Sequence[Span],
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    layout: str,
    rows: torch.Tensor | None,
) -> None:
    """Refuses arguments of `rebuild` that don't fit together."""
    check_layout("layout", layout)
    if key_out.ndim != 4 or key_out.dtype not in _DTYPES:
        wanted = f"shape (batch, kv_heads, capacity, key_dim) in one of {', '.join(map(str, _DTYPES))}"
        raise ConfigError.of("key_out", wanted, (key_out.dtype, tuple(key_out.shape)))
    if value_out.ndim != 4 or value_out.shape[:3] != key_out.shape[:3] or value_out.dtype != key_out.dtype:
        wanted = f"{key_out.dtype} of shape {(*key_out.shape[:3], 'value_dim')}"
        raise ConfigError.of("value_out", wanted, (value_out.dtype, tuple(value_out.shape)))
    for name, out in (("key_out", key_out), ("value_out", value_out)):
        if out.stride(3) != 1 and out.shape[3] > 1:
            raise ConfigError.of(name, "a contiguous last dimension", out.stride())
    tokens = _check_spans(spans, key_out.shape[0], key_out.shape[2])
    width = key_out.shape[1] * (key_out.shape[3] + value_out.shape[3])
    if side is None and codes is None and decoder.bias is None:
        raise ConfigError.of("side, codes and decoder.bias", "at least one of them", None)
    for name, given, weights in (("side", side, decoder.side), ("codes", codes, decoder.codes)):
        if (given is None) != (weights is None):
            raise ConfigError.of(f"decoder.{name}", f"{'None' if given is None else 'a tensor'} for these {name}", type(weights).__name__)
    if rows is not None:
        if rows.shape != (tokens,) or rows.dtype != torch.int64:
            raise ConfigError.of("rows", f"{tokens} numbers of rows of side in int64", (rows.dtype, tuple(rows.shape)))
        if rows.device != key_out.device:
            raise ConfigError.of("rows", f"a tensor on {key_out.device}, where the buffers are", str(rows.device))
        if side is None or (tokens and not 0 <= int(rows.min()) <= int(rows.max()) < len(side)):
            raise ConfigError.of("rows", "rows of side", None if side is None else f"{rows.min()} to {rows.max()} of {len(side)}")
    if side is not None and decoder.side is not None:
        _check_tensor("side", side, (tokens if rows is None else None, None))
        _check_tensor("decoder.side", decoder.side, (side.shape[1], width))
    if codes is not None and decoder.codes is not None:
        _check_codes(codes, tokens)
        _check_tensor("decoder.codes", decoder.codes, (codes.rank, width))
    if decoder.bias is not None:
        _check_tensor("decoder.bias", decoder.bias, (width,))
    if (cos is None) != (sin is None):
        raise ConfigError.of("cos and sin", "both or neither", (type(cos).__name__, type(sin).__name__))
    if cos is not None and sin is not None:
        _check_tables(cos, sin, tokens, key_out.shape[3])
    tensors = {"side": side, "value_out": value_out, "cos": cos, "sin": sin}
    tensors |= {f"decoder.{name}": part for name, part in decoder._asdict().items()}
    tensors |= {} if codes is None else {"codes.data": codes.data, "codes.scale": codes.scale, "codes.zero": codes.zero}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != key_out.device:
            raise ConfigError.of(name, f"a tensor on {key_out.device}, where the buffers are", str(tensor.device))


def _check_spans(spans: Sequence[Span], batch: int, capacity: int) -> int:
    """The tokens of all spans."""
    for span in spans:
        if not isinstance(span, Span) or any(type(number) is not int for number in span):
            raise ConfigError.of("spans", "each a Span of three integers", span)
        if not (0 <= span.row < batch and 0 <= span.first <= span.first + span.tokens <= capacity):
            raise ConfigError.of("spans", f"each within {batch} rows of {capacity} slots", span)
    for before, after in pairwise(sorted(span for span in spans if span.tokens)):
        if before.row == after.row and before.first + before.tokens > after.first:
            raise ConfigError.of("spans", "no slot twice", (before, after))
    return sum(span.tokens for span in spans)


def _check_tensor(name: str, tensor: torch.Tensor, wanted: tuple[int | None, ...]) -> None:
    fits = tensor.ndim == len(wanted) and all(want in (None, have) for have, want in zip(tensor.shape, wanted, strict=True))
    if not fits or tensor.dtype not in _DTYPES:
        shape = ", ".join("any" if want is None else str(want) for want in wanted)
        raise ConfigError.of(name, f"shape ({shape}) in one of {', '.join(map(str, _DTYPES))}", (tensor.dtype, tuple(tensor.shape)))


def _check_codes(codes: Codes, tokens: int) -> None:
    data, scale, zero, group = codes
    plain = data.is_floating_point()
    if group is not None and (not isinstance(group, int) or isinstance(group, bool) or group <= 0):
        raise ConfigError.of("codes.group", "a number of tokens above 0, or None", group)
    for name, part in (("scale", scale), ("zero", zero)):
        if (part is None) != plain:
            raise ConfigError.of(f"codes.{name}", f"{'None' if plain else 'a tensor'} for data in {data.dtype}", type(part).__name__)
    if scale is None or zero is None:
        return _check_tensor("codes.data", data, (tokens, None))
    if data.dtype not in (torch.int8, torch.uint8):
        raise ConfigError.of("codes.data", "int8, uint8 or a floating-point type", data.dtype)
    width = tokens if data.dtype == torch.int8 else -(-tokens // 2)
    if data.ndim != 2 or data.shape[1] != width:
        raise ConfigError.of("codes.data", f"shape (any, {width}) for {tokens} tokens in {data.dtype}", tuple(data.shape))
    groups = -(-tokens // (group or max(tokens, 1)))
    _check_tensor("codes.scale", scale, (len(data), groups))
    return _check_tensor("codes.zero", zero, (len(data), groups))


def _check_tables(cos: torch.Tensor, sin: torch.Tensor, tokens: int, key_dim: int) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        if table.ndim != 2 or len(table) != tokens or not 0 < 2 * table.shape[1] <= key_dim or table.shape != cos.shape:
            wanted = f"shape ({tokens}, rotary_dim / 2), both alike, with a rotary_dim of at most {key_dim}"
            raise ConfigError.of(name, wanted, tuple(table.shape))
        if table.dtype not in (torch.float32, torch.float64) or table.dtype != cos.dtype:
            raise ConfigError.of(name, "float32 or float64, both alike", table.dtype)
