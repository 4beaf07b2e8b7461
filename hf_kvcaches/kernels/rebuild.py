"""Rebuilding a layer's keys and values from codes: decoded, multiplied, turned and written into the cache in one go.

What one model computed for a prompt reaches another model as a few numbers a token. A linear map makes that model's keys and values of
them, and of what it knows of each token for nothing; the keys are turned to their positions, and all goes where the cache holds it.

`rebuild` has a `backend`: `"torch"` (fast on CPUs), `"triton"` (one launch a layer; CUDA, no float64), `"reference"` (loops in float64
that are easy to read), or `"auto"`: Triton for CUDA tensors where it can, else torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels._shared import Backend, Layout, check_layout, choose, turned

__all__ = ["Codes", "Decoder", "Span", "rebuild", "rebuild_reference"]

# Numbers that are made at a time before they are written: 32 MB in float32. Matrix products of fewer tokens take longer for each, as the
# weights are read again.
BLOCK = 2**23

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Codes(NamedTuple):
    """What was sent of N tokens, plainly or as `core.quantize` stores it with `axis=0`: token by token along the last dimension.

    The number of level n is `n * scale + zero`.

    Args:
        data: Floating point: the numbers themselves, (N, rank). int8: level - 127, (rank, N). uint8: levels of 4 bits, two tokens to a
            byte, the first in the low half, (rank, ceil(N / 2)).
        scale: (rank, groups), floating point; None for plain data.
        zero: Like `scale`.
        group: Consecutive tokens that share a scale; the last group may be shorter. None: all.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    group: int | None = None

    @property
    def rank(self) -> int:
        """Numbers of each token."""
        return self.data.shape[1 if self.data.is_floating_point() else 0]


class Decoder(NamedTuple):
    """The linear map to C numbers a token: [keys of head 0, keys of head 1, ..., values of head 0, ...].

    Args:
        side: (d, C), floating point; None where nothing but codes is given.
        codes: (rank, C), floating point; None where there are no codes.
        bias: (C,), floating point, or None.
    """

    side: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class Span(NamedTuple):
    """Consecutive tokens and the consecutive slots of a row that they go to.

    Args:
        row: Of the buffers.
        first: Slot of the first token.
        tokens: How many.
    """

    row: int
    first: int
    tokens: int


Tables = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def rebuild(
    side: torch.Tensor | None,
    codes: Codes | None,
    decoder: Decoder,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    spans: Sequence[Span],
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    layout: Layout = "half",
    backend: Backend = "auto",
    check: bool = True,
) -> None:
    """Writes `side @ decoder.side + codes @ decoder.codes + decoder.bias`, keys turned, to the slots of `spans`. Nothing else is written.

    It is summed up in float32, or in float64 for float64 buffers, and cast once. Numbers beyond the range of float16 buffers become the
    largest that these hold. There are no gradients.

    The torch back-end multiplies in that same type, whatever was given, and converts weights of another type at each call: on CPUs keep
    them in float32. Triton multiplies bfloat16 or float16 as it is where both factors are of that type, and the rest in float32.

    Args:
        side: What is known of each of the N tokens beside its codes, (N, d), floating point; or None.
        codes: What was sent of each token; or None.
        decoder: The weights, on the device of the buffers.
        key_out: The cache's buffer, (batch, kv_heads, capacity, key_dim), the last dimension contiguous.
        value_out: Likewise for values; only the last size may be another.
        spans: Where the N tokens go, in their order. No slot twice.
        cos: Of the angle by which each key is turned, times what the model scales it with, (N, rotary_dim / 2), float32 or float64.
            Dimensions from rotary_dim on pass unchanged. None for keys that are not turned.
        sin: Like `cos`.
        layout: Which dimensions form a pair: `"half"`: i and i + rotary_dim / 2; `"interleaved"`: 2i and 2i + 1.
        backend: See the module.
        check: Whether to look at the arguments first. Not for those that fit by construction.
    """
    if check:
        check_rebuild(side, codes, decoder, key_out, value_out, spans, cos, sin, layout)
    backend = choose(backend, key_out)
    if not any(span.tokens for span in spans):
        return None
    if backend == "reference":
        return rebuild_reference(side, codes, decoder, key_out, value_out, spans, cos=cos, sin=sin, layout=layout)
    tables = None if cos is None or sin is None else (cos, sin)
    if backend == "torch":
        return _rebuild_torch(side, codes, decoder, key_out, value_out, spans, tables, layout)
    from hf_kvcaches.kernels import _rebuild_triton

    return _rebuild_triton.rebuild(side, codes, decoder, key_out, value_out, spans, tables, layout)


def _rebuild_torch(
    side: torch.Tensor | None,
    codes: Codes | None,
    decoder: Decoder,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    spans: Sequence[Span],
    tables: Tables | None,
    layout: Layout,
) -> None:
    exact = torch.promote_types(key_out.dtype, torch.float32)
    tokens = sum(span.tokens for span in spans)
    heads, key_dim, value_dim = key_out.shape[1], key_out.shape[3], value_out.shape[3]
    factors = []
    if side is not None and decoder.side is not None:
        factors.append((side, decoder.side.to(exact)))
    if codes is not None and decoder.codes is not None:
        factors.append((_decoded(codes, tokens, exact), decoder.codes.to(exact)))
    if tables is not None:
        tables = tables[0].to(exact), tables[1].to(exact)
    width = heads * (key_dim + value_dim)
    many = min(tokens, max(1, BLOCK // max(1, width)))
    numbers = torch.empty(many, width, dtype=exact, device=key_out.device)
    for begin, block in _blocks(spans, many):
        end = begin + sum(span.tokens for span in block)
        _products([(x[begin:end].to(exact), weights) for x, weights in factors], decoder.bias, numbers[: end - begin])
        at = begin
        for row, first, count in block:
            made, slots = numbers[at - begin : at - begin + count], slice(first, first + count)
            keys, values = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in made.split([heads * key_dim, heads * value_dim], 1))
            here = None if tables is None else (tables[0][at : at + count], tables[1][at : at + count])
            _write_keys(keys, key_out[row, :, slots], here, layout)
            _write(values, value_out[row, :, slots])
            at += count


def _decoded(codes: Codes, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of codes, (N, rank)."""
    data, scale, zero, group = codes
    if scale is None or zero is None:
        return data
    if data.dtype == torch.int8:
        levels = data.to(dtype).add_(127)
    else:
        levels = torch.stack([data & 15, data >> 4], 2).flatten(1)[:, :tokens].to(dtype)
    steps, lowest = scale.to(dtype), zero.to(dtype)
    if group is not None and group < tokens:
        steps, lowest = (part.unsqueeze(2).expand(-1, -1, group).flatten(1)[:, :tokens] for part in (steps, lowest))
    return levels.mul_(steps).add_(lowest).t()


def _blocks(spans: Sequence[Span], many: int) -> Iterator[tuple[int, list[Span]]]:
    """Spans cut so that blocks of at most `many` tokens are whole: the first token of each block, and what it consists of."""
    begin, room, block = 0, many, list[Span]()
    for row, first, count in spans:
        done = 0
        while done < count:
            some = min(count - done, room)
            block.append(Span(row, first + done, some))
            done, room = done + some, room - some
            if room == 0:
                yield begin, block
                begin, room, block = begin + many, many, []
    if block:
        yield begin, block


def _products(factors: list[tuple[torch.Tensor, torch.Tensor]], bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Overwrites `out` with the sum of all products and the bias."""
    if bias is not None:
        out.copy_(bias)
    for index, (x, weights) in enumerate(factors):
        out.addmm_(x, weights, beta=1 if index or bias is not None else 0)


def _write_keys(keys: torch.Tensor, out: torch.Tensor, tables: Tables | None, layout: Layout) -> None:
    """Turns keys, (heads, tokens, key_dim), on their way into a part of the cache."""
    if tables is None:
        return _write(keys, out)
    cos, sin = tables
    rotary = 2 * cos.shape[1]
    whole = out.dtype == keys.dtype  # Then they are turned in the cache itself: nothing is rounded on the way.
    target = out[..., :rotary] if whole else torch.empty_like(keys[..., :rotary])
    (first, second), (one, two) = (
        (x[..., ::2], x[..., 1::2]) if layout == "interleaved" else x.chunk(2, -1) for x in (keys[..., :rotary], target)
    )
    torch.mul(first, cos, out=one).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=two).addcmul_(first, sin)
    if not whole:
        _write(target, out[..., :rotary])
    if rotary < keys.shape[2]:
        _write(keys[..., rotary:], out[..., rotary:])
    return None


def _write(numbers: torch.Tensor, out: torch.Tensor) -> None:
    if out.dtype == torch.float16:
        numbers = numbers.clamp(-torch.finfo(out.dtype).max, torch.finfo(out.dtype).max)
    out.copy_(numbers)


def rebuild_reference(
    side: torch.Tensor | None,
    codes: Codes | None,
    decoder: Decoder,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    spans: Sequence[Span],
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    layout: Layout = "half",
) -> None:
    """What `rebuild` does, written down plainly. Arguments are the same."""
    heads, key_dim, value_dim = key_out.shape[1], key_out.shape[3], value_out.shape[3]
    largest = torch.finfo(key_out.dtype).max
    places = [(row, first + offset) for row, first, tokens in spans for offset in range(tokens)]
    for token, (row, slot) in enumerate(places):
        numbers = torch.zeros(heads * (key_dim + value_dim), dtype=torch.float64, device=key_out.device)
        if decoder.bias is not None:
            numbers += decoder.bias.double()
        if side is not None and decoder.side is not None:
            numbers += side[token].double() @ decoder.side.double()
        if codes is not None and decoder.codes is not None:
            numbers += _code_of(codes, token) @ decoder.codes.double()
        for head in range(heads):
            key = numbers[head * key_dim : (head + 1) * key_dim]
            value = numbers[heads * key_dim + head * value_dim : heads * key_dim + (head + 1) * value_dim]
            if cos is not None and sin is not None:
                key = turned(key, cos[token].double(), sin[token].double(), layout)
            if key_out.dtype == torch.float16:
                key, value = key.clamp(-largest, largest), value.clamp(-largest, largest)
            key_out[row, head, slot] = key.to(key_out.dtype)
            value_out[row, head, slot] = value.to(value_out.dtype)


def _code_of(codes: Codes, token: int) -> torch.Tensor:
    """The numbers of one token, (rank,), in float64."""
    data, scale, zero, group = codes
    if scale is None or zero is None:
        return data[token].double()
    if data.dtype == torch.int8:
        levels = [int(level) + 127 for level in data[:, token]]
    else:
        levels = [int(byte) >> 4 if token % 2 else int(byte) & 15 for byte in data[:, token // 2]]
    of = token // group if group else 0
    return torch.tensor(levels, dtype=torch.float64, device=data.device) * scale[:, of].double() + zero[:, of].double()


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
    if side is not None and decoder.side is not None:
        _check_tensor("side", side, (tokens, None))
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
