"""Rebuilding a layer's keys and values from codes: decoded, multiplied, turned and written into the cache in one go.

What one model computed for a prompt reaches another model as a few numbers a token. A linear map makes that model's keys and values of
them, and of what it knows of each token for nothing; the keys are turned to their positions, and all goes where the cache holds it.

`rebuild` has a `backend`: `"torch"` (fast on CPUs), `"triton"` (one launch a layer; CUDA, no float64), `"reference"` (loops in float64
that are easy to read), or `"auto"`: Triton for CUDA tensors where it can, else torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hf_kvcaches.kernels._shared import Backend, Layout, choose, turned

__all__ = ["Codes", "Decoder", "Span", "rebuild", "rebuild_reference", "write_states"]

# Numbers that are made at a time before they are written: 32 MB in float32. Matrix products of fewer tokens take longer for each, as the
# weights are read again.
BLOCK = 2**23


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
    rows: torch.Tensor | None = None,
    backend: Backend = "auto",
    check: bool = True,
) -> None:
    """Writes `side @ decoder.side + codes @ decoder.codes + decoder.bias`, keys turned, to the slots of `spans`. Nothing else is written.

    It is summed up in float32, or in float64 for float64 buffers, and cast once. Numbers beyond the range of float16 buffers become the
    largest that these hold. There are no gradients.

    The torch back-end multiplies in that same type, whatever was given, and converts weights of another type at each call: on CPUs keep
    them in float32. Triton multiplies bfloat16 or float16 as it is where both factors are of that type, and the rest in float32.

    Args:
        side: What is known of each of the N tokens beside its codes, (N, d), floating point, or fewer with `rows`; or None.
        codes: What was sent of each token; or None.
        decoder: The weights, on the device of the buffers.
        key_out: The cache's buffer, (batch, kv_heads, capacity, key_dim), the last dimension contiguous.
        value_out: Likewise for values; only the last size may be another.
        spans: Where the N tokens go, in their order. No slot twice.
        cos: Of the angle by which each key is turned, times what the model scales it with, (N, rotary_dim / 2), float32 or float64.
            Dimensions from rotary_dim on pass unchanged. None for keys that are not turned.
        sin: Like `cos`.
        layout: Which dimensions form a pair: `"half"`: i and i + rotary_dim / 2; `"interleaved"`: 2i and 2i + 1.
        rows: The row of `side` that each token has, (N,), int64. None: each its own. On CPUs a row is multiplied once, however many
            tokens have it.
        backend: See the module.
        check: Whether to look at the arguments first. Not for those that fit by construction.
    """
    if check:
        from hf_kvcaches.kernels._rebuild_checks import check_rebuild

        check_rebuild(side, codes, decoder, key_out, value_out, spans, cos, sin, layout, rows)
    backend = choose(backend, key_out)
    if not any(span.tokens for span in spans):
        return None
    if backend == "reference":
        return rebuild_reference(side, codes, decoder, key_out, value_out, spans, cos=cos, sin=sin, layout=layout, rows=rows)
    tables = None if cos is None or sin is None else (cos, sin)
    if backend == "torch":
        return _rebuild_torch(side, codes, decoder, key_out, value_out, spans, tables, layout, rows)
    from hf_kvcaches.kernels import _rebuild_triton

    side = side if side is None or rows is None else side[rows]
    return _rebuild_triton.rebuild(side, codes, decoder, key_out, value_out, spans, tables, layout)


@torch.no_grad()
def write_states(
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    spans: Sequence[Span],
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    layout: Layout = "half",
) -> None:
    """What `rebuild` does with the keys and values of each token once it has them. Nothing is checked.

    Args:
        keys: (kv_heads, distinct tokens, key_dim).
        values: Likewise.
        rows: Which of them each of the N tokens has, (N,), int64.
        key_out: As for `rebuild`, and so are all others.
        value_out: Likewise.
        spans: Likewise.
        cos: Likewise.
        sin: Likewise.
        layout: Likewise.
    """
    exact = torch.promote_types(key_out.dtype, torch.float32)
    tables = None if cos is None or sin is None else (cos.to(exact), sin.to(exact))
    for row, slots, own, here in _placed(spans, tables):
        _write_keys(keys.index_select(1, rows[own]).to(exact), key_out[row, :, slots], here, layout)
        value_out[row, :, slots] = values.index_select(1, rows[own])


def _rebuild_torch(
    side: torch.Tensor | None,
    codes: Codes | None,
    decoder: Decoder,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    spans: Sequence[Span],
    tables: Tables | None,
    layout: Layout,
    rows: torch.Tensor | None,
) -> None:
    exact = torch.promote_types(key_out.dtype, torch.float32)
    tokens = sum(span.tokens for span in spans)
    width = key_out.shape[1] * (key_out.shape[3] + value_out.shape[3])
    factors, known = [], None
    if side is not None and decoder.side is not None:
        if rows is None:
            factors.append((side, decoder.side.to(exact)))
        else:
            known = torch.empty(len(side), width, dtype=exact, device=key_out.device)
            _products([(side.to(exact), decoder.side.to(exact))], decoder.bias, known)
    if codes is not None and decoder.codes is not None:
        factors.append((_decoded(codes, tokens, exact), decoder.codes.to(exact)))
    if tables is not None:
        tables = tables[0].to(exact), tables[1].to(exact)
    many = min(tokens, max(1, BLOCK // max(1, width)))
    numbers = torch.empty(many, width, dtype=exact, device=key_out.device)
    for begin, block in _blocks(spans, many):
        end = begin + sum(span.tokens for span in block)
        made = numbers[: end - begin]
        if known is not None and rows is not None:
            torch.index_select(known, 0, rows[begin:end], out=made)
        _products([(x[begin:end].to(exact), weights) for x, weights in factors], decoder.bias, made, more=known is not None)
        here = None if tables is None else (tables[0][begin:end], tables[1][begin:end])
        _write_spans(made, key_out, value_out, block, here, layout)


def _decoded(codes: Codes, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of codes, (N, rank)."""
    data, scale, zero, group = codes
    if scale is None or zero is None:
        return data
    # Whole groups and whole bytes; what is too much is never looked at.
    of = tokens + tokens % 2 if group is None else group
    width = -(-tokens // of) * of
    width += width % 2 * of
    levels = torch.empty(len(data), width, dtype=dtype, device=data.device)
    if data.dtype == torch.int8:
        levels[:, :tokens].copy_(data).add_(127)
    else:
        pairs = levels.view(len(data), width // 2, 2)[:, : data.shape[1]]
        pairs[..., 0], pairs[..., 1] = data & 15, data >> 4
    grouped = levels.view(len(data), width // of, of)[:, : scale.shape[1]]
    grouped.mul_(scale.to(dtype).unsqueeze(2)).add_(zero.to(dtype).unsqueeze(2))
    return levels[:, :tokens].t()


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


def _products(factors: list[tuple[torch.Tensor, torch.Tensor]], bias: torch.Tensor | None, out: torch.Tensor, more: bool = False) -> None:
    """Overwrites `out` with the sum of all products and the bias; with `more`, adds the products alone."""
    for x, weights in factors:
        if bias is not None and not more:
            torch.addmm(bias.to(out.dtype), x, weights, out=out)
        else:
            out.addmm_(x, weights, beta=1 if more else 0)
        more = True
    if bias is not None and not more:
        out.copy_(bias)


def _write_spans(
    numbers: torch.Tensor,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    spans: Sequence[Span],
    tables: Tables | None,
    layout: Layout,
) -> None:
    """Turns the keys of some tokens, and puts all where it belongs."""
    heads, key_dim, value_dim = key_out.shape[1], key_out.shape[3], value_out.shape[3]
    for row, slots, own, here in _placed(spans, tables):
        parts = numbers[own].split([heads * key_dim, heads * value_dim], 1)
        keys, values = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in parts)
        _write_keys(keys, key_out[row, :, slots], here, layout)
        _write(values, value_out[row, :, slots])


def _placed(spans: Sequence[Span], tables: Tables | None) -> Iterator[tuple[int, slice, slice, Tables | None]]:
    """Row and slots of each span, which of the tokens go there, and how these turn."""
    at = 0
    for row, first, count in spans:
        own = slice(at, at + count)
        yield row, slice(first, first + count), own, None if tables is None else (tables[0][own], tables[1][own])
        at += count


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
    rows: torch.Tensor | None = None,
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
            numbers += side[token if rows is None else int(rows[token])].double() @ decoder.side.double()
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
