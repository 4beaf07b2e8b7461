"""Rebuilding a layer's keys and values from codes: multiplied, rotated and written into the cache in one go.

What one model computed for a prompt reaches another model as a few numbers a token. A linear map makes that model's keys and values from
them, and from what it knows of each token for nothing; the keys are rotated to their positions, and all is written into the cache.

`rebuild` has a `backend`: `"torch"` (fast on CPUs), `"triton"` (one launch a layer; CUDA, no float64), or `"auto"`: Triton for CUDA tensors
where it can, else torch. Arguments are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hf_kvcaches.kernels.arguments import Decoder, RowSpan
from hf_kvcaches.kernels.launch import Backend, choose
from hf_kvcaches.kernels.rotation import Layout, Tables, rotate_

# Numbers that are made at a time before they are written: 32 MB in float32. Matrix products of fewer tokens take longer for each, as the
# weights are read again.
BLOCK = 2**23


def product_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return in which type to multiply for buffers of a type: where that is as fast, in float32.

    float16 does not have the range. CPUs without instructions for bfloat16 multiply it more slowly.
    """
    if device.type == "cpu" and dtype == torch.bfloat16:
        found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        return dtype if found.get("avx512_bf16") or found.get("amx_bf16") else torch.float32
    return torch.float32 if dtype == torch.float16 else dtype


@torch.no_grad()
def rebuild(
    side: torch.Tensor | None,
    codes: torch.Tensor | None,
    decoder: Decoder,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    spans: Sequence[RowSpan],
    *,
    side_rows: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    layout: Layout = "half",
    product: torch.dtype | None = None,
    backend: Backend = "auto",
) -> None:
    """Writes `side @ decoder.side + codes @ decoder.codes + decoder.bias`, keys rotated, to the slots of `spans`. Nothing else is written.

    It is summed up in float32, or in float64 for float64 buffers, and cast once. Numbers beyond the range of float16 buffers become the
    largest that these hold. There are no gradients.

    The torch back-end multiplies in that same type or in `product`, and converts weights of another type at each call. Triton multiplies
    bfloat16 or float16 as it is where both factors are of that type, and the rest in float32.

    Args:
        side: What is known of each of the N tokens beside its codes, (N, d), floating point; or None.
        codes: What was sent of each token, (N, rank), floating point; or None.
        key_out: The cache's buffer, (batch, kv_heads, capacity, key_dim), the last dimension contiguous.
        value_out: (batch, kv_heads, capacity, value_dim), the last dimension contiguous.
        spans: Where the N tokens go, in their order. No slot twice.
        side_rows: Which row of `side` each token has, (N,), int64, where several have the same one; None for a row each.
        cos: Of the angle by which each key is rotated, times what the model scales it with, (N, rotary_dim / 2), float32 or float64.
            Dimensions from rotary_dim on pass unchanged. None for keys that are not rotated.
        sin: Like `cos`.
        layout: Which dimensions form a pair: `"half"`: i and i + rotary_dim / 2; `"interleaved"`: 2i and 2i + 1.
        product: The type in which the torch back-end multiplies; each of the two products is rounded to it. With bfloat16, processors that
            have it take a fourth of the time. None: the type that is summed up in.
        backend: See the module.
    """
    backend = choose(backend, key_out)
    if not any(span.tokens for span in spans):
        return None
    tables = None if cos is None or sin is None else (cos, sin)
    if backend == "torch":
        return _rebuild_torch(side, codes, decoder, key_out, value_out, spans, side_rows, tables, layout, product)
    if side is not None and side_rows is not None:
        side = side[side_rows]
    from hf_kvcaches.kernels import rebuild_triton

    return rebuild_triton.rebuild(side, codes, decoder, key_out, value_out, spans, tables, layout)


def _rebuild_torch(
    side: torch.Tensor | None,
    codes: torch.Tensor | None,
    decoder: Decoder,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    spans: Sequence[RowSpan],
    side_rows: torch.Tensor | None,
    tables: Tables | None,
    layout: Layout,
    product: torch.dtype | None,
) -> None:
    exact = torch.promote_types(key_out.dtype, torch.float32)
    tokens, heads = sum(span.tokens for span in spans), key_out.shape[1]
    widths = [heads * key_out.shape[3], heads * value_out.shape[3]]
    initial = torch.zeros(1, sum(widths), dtype=exact, device=key_out.device)  # of each token, before codes are added
    if decoder.bias is not None:
        initial += decoder.bias
    product, factors = product or exact, []
    if side is not None and decoder.side is not None:
        if side_rows is None:
            factors.append((side, decoder.side.to(product)))
        else:
            initial = _add_product(initial.repeat(len(side), 1), side, decoder.side.to(product))
    if codes is not None and decoder.codes is not None:
        factors.append((codes, decoder.codes.to(product)))
    most = max(1, min(tokens, BLOCK // max(1, sum(widths))))
    buffer = torch.empty(most, sum(widths), dtype=exact, device=key_out.device)
    for here, row, slots in _pieces(spans, most):
        numbers = buffer[: here.stop - here.start]
        if len(initial) == 1 or side_rows is None:
            numbers.copy_(initial)
        else:
            torch.index_select(initial, 0, side_rows[here], out=numbers)
        for x, weights in factors:
            _add_product(numbers, x[here], weights)
        keys, values = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in numbers.split(widths, 1))
        if tables is not None:
            rotate_(keys, tables[0][here], tables[1][here], layout)
        if key_out.dtype == torch.float16:
            numbers.clamp_(-torch.finfo(torch.float16).max, torch.finfo(torch.float16).max)
        key_out[row, :, slots] = keys
        value_out[row, :, slots] = values


def _add_product(total: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Add `x @ weights`, in the type of the weights, in place."""
    return total.addmm_(x.to(total), weights) if weights.dtype == total.dtype else total.add_(x.to(weights) @ weights)


def _pieces(spans: Sequence[RowSpan], most: int) -> Iterator[tuple[slice, int, slice]]:
    """Spans in pieces of at most so many tokens: which of all tokens, their row, and their slots."""
    begin = 0
    for row, first, count in spans:
        for done in range(0, count, most):
            some = min(most, count - done)
            yield slice(begin + done, begin + done + some), row, slice(first + done, first + done + some)
        begin += count
