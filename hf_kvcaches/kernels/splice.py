"""Writing stored keys and values into a running cache at new positions: decoded, turned and written in one go.

What was computed for a passage of text at some positions can be used at others once its keys are turned by the difference. It is stored
in 8 or 4 bits or plainly, and this happens at the start of a request, so nothing as large as the passage is made on the way.

`splice` has a `backend`: `"torch"` (fast on CPUs), `"triton"` (one launch a layer; CUDA, no float64), `"reference"` (loops in float64
that are easy to read), or `"auto"`: Triton for CUDA tensors where it can, else torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels._shared import Backend, Layout, check_layout, choose, turned

__all__ = ["Packed", "splice", "splice_reference"]

# Numbers that are decoded at a time: 1 MB in float32 and at most twice as much besides. A quarter or four times as many take a seventh
# longer or more, for 32 layers of 8 heads of 128 on a CPU with 2 MB of second-level cache.
BLOCK = 2**18

_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Packed(NamedTuple):
    """Tokens of several layers as they are stored, the last dimension of each tensor contiguous.

    The number of level n is `n * scale + zero`, which is how `core.quantize` stores with `axis=-1`.

    Args:
        data: (layers, heads, tokens, width). int8: level - 127, width = dim. uint8: levels of 4 bits, two to a byte, the first in the low
            half, width = ceil(dim / 2). Floating point: the numbers themselves, width = dim.
        scale: (layers, heads, tokens, groups), floating point; None for plain data.
        zero: Like `scale`.
        group: Consecutive channels that share a scale; the last group may be shorter. None: all.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    group: int | None = None


Tables = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def splice(
    packed: Packed,
    outs: Sequence[torch.Tensor],
    slots: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    layout: Layout = "half",
    backend: Backend = "auto",
    check: bool = True,
) -> None:
    """Decodes tokens, turns them, and writes them in place: `outs[l][h, slots[t]]` from `packed.data[l, h, t]`. Nothing else is written.

    It is computed in float32, or in float64 for float64 `outs`, and cast once. Plain data that are not turned are copied bit for bit where
    dtypes agree. Decoded numbers beyond the range of float16 `outs` become the largest that these hold. There are no gradients.

    Args:
        packed: The tokens, on the device of `outs`.
        outs: One (heads, capacity, dim) a layer, of one dtype, the last dimension contiguous: one row of the buffers.
        slots: (tokens,), int64, from 0 on, none of them twice.
        cos: Of the angle by which each token is turned, (tokens, rotary_dim / 2), float32 or float64. Dimensions from rotary_dim on pass
            unchanged. None for values, and for keys that stay where they were.
        sin: Like `cos`.
        layout: Which dimensions form a pair: `"half"`: i and i + rotary_dim / 2; `"interleaved"`: 2i and 2i + 1.
        backend: See the module.
        check: Whether to look at the arguments first. The numbers in `slots` are looked at on the CPU only: a GPU would have to be waited
            for.
    """
    if check:
        check_splice(packed, outs, slots, cos, sin, layout)
    if not outs:
        return None
    backend = choose(backend, outs[0])
    if slots.numel() == 0:
        return None
    if backend == "reference":
        return splice_reference(packed, outs, slots, cos=cos, sin=sin, layout=layout)
    tables = None if cos is None or sin is None else (cos, sin)
    if backend == "torch":
        return _splice_torch(packed, outs, slots, tables, layout)
    from hf_kvcaches.kernels import _splice_triton

    return _splice_triton.splice(packed, outs, slots, tables, layout)


def _splice_torch(packed: Packed, outs: Sequence[torch.Tensor], slots: torch.Tensor, tables: Tables | None, layout: Layout) -> None:
    layers, heads, tokens, _ = packed.data.shape
    dim, dtype = outs[0].shape[2], outs[0].dtype
    exact = torch.promote_types(dtype, torch.float32)
    if tables is not None:
        tables = tables[0].to(exact), tables[1].to(exact)
    start = _start_of_run(slots)
    many = max(1, min(tokens, BLOCK // max(1, heads * dim)))
    some = max(1, BLOCK // max(1, heads * dim * many))
    for layer, token in product(range(0, layers, some), range(0, tokens, many)):
        here = slice(token, token + many)
        block = (slice(layer, layer + some), slice(None), here)
        numbers = packed.data[block]
        if packed.scale is not None and packed.zero is not None:
            numbers = _decoded(numbers, packed.scale[block].to(exact), packed.zero[block].to(exact), packed.group, dim)
        elif tables is not None:
            numbers = numbers.to(exact, copy=True)  # what is stored must stay as it is
        if tables is not None:
            _turn(numbers, tables[0][here], tables[1][here], layout)
        if packed.scale is not None and dtype == torch.float16:
            numbers.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        for out, new in zip(outs[layer : layer + some], numbers, strict=True):
            if start is None:
                out.index_copy_(1, slots[here], new.to(dtype))
            else:
                out[:, start + token : start + token + new.shape[1]] = new


def _start_of_run(slots: torch.Tensor) -> int | None:
    """The first slot if the slots are consecutive, which are written faster. None on a GPU, which would have to be waited for."""
    if slots.device.type != "cpu":
        return None
    start = int(slots[0])
    return start if torch.equal(slots, torch.arange(start, start + len(slots))) else None


def _decoded(data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int | None, dim: int) -> torch.Tensor:
    """The numbers of quantised tokens, in a tensor of their own and the dtype of `scale` and `zero`."""
    if data.dtype == torch.int8:
        numbers = data.to(scale.dtype)
        zero = torch.add(zero, scale, alpha=127)  # levels are stored less 127, which is added once a group here
    else:
        numbers = _halves(data)[..., :dim].to(scale.dtype)
    if group is None or group >= dim:
        return numbers.mul_(scale).add_(zero)
    whole = dim // group
    grouped = numbers[..., : whole * group].unflatten(3, (whole, group))
    grouped.mul_(scale[..., :whole, None]).add_(zero[..., :whole, None])
    if whole < scale.shape[3]:
        numbers[..., whole * group :].mul_(scale[..., whole:]).add_(zero[..., whole:])
    return numbers


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Both halves of each byte, the low one first: a third of the time of putting two tensors together."""
    assert sys.byteorder == "little"
    pairs = data.to(torch.int16)
    return (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.uint8)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout) -> None:
    """Rotates in place, in a fifth of the time of `turned`, which makes new tensors for every step. (layers, heads, tokens, dim)."""
    part = x[..., : 2 * cos.shape[1]]
    if layout == "interleaved" and x.shape[3] % 2 == 0:
        torch.view_as_complex(part.unflatten(3, (-1, 2))).mul_(torch.complex(cos, sin))
        return
    first, second = (part[..., ::2], part[..., 1::2]) if layout == "interleaved" else part.chunk(2, -1)
    across = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(across)


def splice_reference(
    packed: Packed,
    outs: Sequence[torch.Tensor],
    slots: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    layout: Layout = "half",
) -> None:
    """What `splice` does, written down plainly. Arguments are the same."""
    data, scale, zero, group = packed
    for layer, head, token in product(*map(range, data.shape[:3])):
        dim, dtype = outs[layer].shape[2], outs[layer].dtype
        stored = data[layer, head, token]
        if scale is None or zero is None:
            numbers = stored if stored.dtype == dtype and cos is None else stored.double()
        else:
            if stored.dtype == torch.int8:
                levels = [int(level) + 127 for level in stored]
            else:
                levels = [int(stored[c // 2]) >> 4 if c % 2 else int(stored[c // 2]) & 15 for c in range(dim)]
            steps, lowest = (part[layer, head, token].double() for part in (scale, zero))
            groups = [c // (group or dim) for c in range(dim)]
            numbers = torch.tensor(levels, dtype=torch.float64, device=steps.device) * steps[groups] + lowest[groups]
        if cos is not None and sin is not None:
            numbers = turned(numbers, cos[token].double(), sin[token].double(), layout)
        if scale is not None and dtype == torch.float16:
            numbers = numbers.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        outs[layer][head, int(slots[token])] = numbers.to(dtype)


def check_splice(
    packed: Packed,
    outs: Sequence[torch.Tensor],
    slots: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    layout: str,
) -> None:
    """Refuses arguments of `splice` that don't fit together."""
    check_layout("layout", layout)
    data = packed.data
    if data.ndim != 4:
        raise ConfigError.of("packed.data", "shape (layers, heads, tokens, width)", tuple(data.shape))
    if len(outs) != len(data):
        raise ConfigError.of("outs", f"one tensor for each of {len(data)} layers", len(outs))
    if not outs:
        return
    _, heads, tokens, _ = data.shape
    dim, dtype = outs[0].shape[-1], outs[0].dtype
    if dtype not in _OUT_DTYPES:
        raise ConfigError.of("outs", f"one of {', '.join(map(str, _OUT_DTYPES))}", dtype)
    for out in outs:
        if out.ndim != 3 or (out.shape[0], out.shape[2]) != (heads, dim) or out.dtype != dtype:
            raise ConfigError.of("outs", f"each to be {dtype} of shape ({heads}, capacity, {dim})", (out.dtype, tuple(out.shape)))
        if out.stride(2) != 1 and dim > 1:
            raise ConfigError.of("outs", "a contiguous last dimension", out.stride())
    _check_packed(packed, dim)
    if slots.shape != (tokens,) or slots.dtype != torch.int64:
        raise ConfigError.of("slots", f"int64 of shape ({tokens},)", (slots.dtype, tuple(slots.shape)))
    if (cos is None) != (sin is None):
        raise ConfigError.of("cos and sin", "both or neither", (type(cos).__name__, type(sin).__name__))
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None or cos is None:
            continue
        if table.ndim != 2 or len(table) != tokens or not 0 < 2 * table.shape[1] <= dim or table.shape != cos.shape:
            wanted = f"shape ({tokens}, rotary_dim / 2), both alike, with a rotary_dim of at most {dim}"
            raise ConfigError.of(name, wanted, tuple(table.shape))
        if table.dtype not in (torch.float32, torch.float64) or table.dtype != cos.dtype:
            raise ConfigError.of(name, "float32 or float64, both alike", table.dtype)
    for name, tensor in (("slots", slots), ("cos", cos), ("sin", sin), *(("outs", out) for out in outs)):
        if tensor is not None and tensor.device != data.device:
            raise ConfigError.of(name, f"a tensor on {data.device}, where the data are", str(tensor.device))
    if slots.device.type == "cpu" and tokens:
        capacity = min(out.shape[1] for out in outs)
        lowest, highest = (int(end) for end in slots.aminmax())
        if lowest < 0 or highest >= capacity:
            raise ConfigError.of("slots", f"numbers from 0 to {capacity - 1}", f"numbers from {lowest} to {highest}")


def _check_packed(packed: Packed, dim: int) -> None:
    data, scale, zero, group = packed
    plain = data.is_floating_point()
    if data.dtype not in (torch.int8, torch.uint8) and not plain:
        raise ConfigError.of("packed.data", "int8, uint8 or a floating-point type", data.dtype)
    width = -(-dim // 2) if data.dtype == torch.uint8 else dim
    if data.shape[3] != width:
        raise ConfigError.of("packed.data", f"a width of {width} for {dim} dimensions in {data.dtype}", data.shape[3])
    if group is not None and (not isinstance(group, int) or isinstance(group, bool) or group <= 0):
        raise ConfigError.of("packed.group", "a number of channels above 0, or None", group)
    wanted = (*data.shape[:3], -(-dim // (group or max(dim, 1))))
    for name, part in (("scale", scale), ("zero", zero)):
        if (part is None) != plain:
            raise ConfigError.of(f"packed.{name}", f"{'None' if plain else 'a tensor'} for data in {data.dtype}", type(part).__name__)
        if part is not None and (part.shape != wanted or not part.is_floating_point() or part.device != data.device):
            got = (part.dtype, tuple(part.shape), str(part.device))
            raise ConfigError.of(f"packed.{name}", f"floating point of shape {wanted} on {data.device}", got)
    for name, part in (("data", data), ("scale", scale), ("zero", zero)):
        if part is not None and part.stride(3) != 1 and part.shape[3] > 1:
            raise ConfigError.of(f"packed.{name}", "a contiguous last dimension", part.stride(), "Call .contiguous() on it.")
