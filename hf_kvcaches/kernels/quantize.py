"""Floating-point tensors in 8 or 4 bits, with a bound on what is lost.

Affine, not symmetric: each group of elements stores its minimum (`zero`) and a step (`scale`), and `x ≈ zero + scale * level`. Channels
of cached keys sit far off 0, where a symmetric grid leaves half of its levels unused; and a group of equal elements comes back exactly.

**Bytes per element**, for groups of g elements: 1 (8 bits) or 1/2 (4 bits), plus 4/g for half types, 8/g for float32, 16/g for float64.
Half types have a bfloat16 scale: float16 has no small ones (steps below 6e-5 lose digits). Rounding the scale up, which keeps the top of
the group in reach, makes it at most 1.2% larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.kernels.quantization import dequantize

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_TOP_LEVEL = {8: 254, 4: 15}


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantised tensor. Made by `quantize`; stored with `tensors` and `meta`.

    Args:
        data: The levels, with `axis` moved last. 8 bits: int8, level - 127, so -127 to 127. 4 bits: uint8, two levels of 0 to 15 in
            a byte, the first in the low half; the last byte of an odd axis is half used.
        scale: The step between levels, per group: the other dimensions in order, then the groups.
        zero: The value of level 0, in the dtype of the original.
        bits: 8 or 4.
        group: Consecutive elements along `axis` that share a scale; the last group may be shorter. None: the whole axis is one group.
        axis: The axis along which elements share a scale, as an index from 0.
    """

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int
    group: int | None
    axis: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor in its original shape.

        Args:
            dtype: Floating-point type of the result; the original's if None.
        """
        dtype = _output_dtype(dtype or self.dtype)
        compute = _compute_dtype(self.dtype)
        out = dequantize(self.data, self.scale, self.zero, self.shape[self.axis], self.group, compute)
        # The top level may lie up to half a step above the largest element, and so beyond what a narrow type can hold.
        limit = min(torch.finfo(dtype).max, torch.finfo(compute).max)
        return out.clamp_(-limit, limit).to(dtype).movedim(-1, self.axis).contiguous()

    def error_bound(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """How far each element of `dequantize(dtype)` can be from the original, in the original's shape.

        Half a step, `scale / 2`, plus the roundings: `(2 e + d / 2) * (|zero| + top level * scale)`, where e is the machine epsilon of the
        arithmetic (float32, or float64 for a float64 original) and d that of `dtype`, and half of the smallest number of `dtype`. Holds
        while the original is within the range of `dtype`.

        Args:
            dtype: That of the `dequantize` call; the original's if None.
        """
        dtype = _output_dtype(dtype or self.dtype)
        compute, kind = torch.finfo(_compute_dtype(self.dtype)), torch.finfo(dtype)
        scale, zero = self.scale.double(), self.zero.double()
        largest = zero.abs() + _TOP_LEVEL[self.bits] * scale
        bound = scale / 2 + (2 * compute.eps + kind.eps / 2) * largest + kind.smallest_normal * kind.eps / 2
        spread = bound.unsqueeze(-1).expand(*bound.shape, self._group_size())
        return _join(spread, self.shape[self.axis]).movedim(-1, self.axis).contiguous()

    def to(self, device: torch.device | str) -> Quantized:
        """The same on another device."""
        return replace(self, data=self.data.to(device), scale=self.scale.to(device), zero=self.zero.to(device))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by name, as safetensors wants them."""
        return {"data": self.data, "scale": self.scale, "zero": self.zero}

    def meta(self) -> dict[str, Any]:
        """All the rest, as JSON can hold it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"shape": list(self.shape), "dtype": dtype, "bits": self.bits, "group": self.group, "axis": self.axis}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> Quantized:
        """Puts together what `tensors` and `meta` took apart, and refuses what doesn't fit together.

        Args:
            meta: "shape", "dtype", "bits", "group" and "axis"; others are ignored.
        """
        try:
            shape, dtype = tuple(meta["shape"]), _DTYPES[meta["dtype"]]
            bits, group, axis = meta["bits"], meta["group"], meta["axis"]
            data, scale, zero = tensors["data"], tensors["scale"], tensors["zero"]
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"A quantised tensor is stored incompletely: {error!r}. Store all of tensors() and meta().") from error
        counts = [*shape, axis, *(() if group is None else (group,))]
        if any(type(count) is not int or count < 0 for count in counts) or bits not in _TOP_LEVEL or axis >= len(shape) or group == 0:
            raise ArtifactError(f"A quantised tensor is stored with meta data that make no sense: {dict(meta)!r}.")
        others = (*shape[:axis], *shape[axis + 1 :])
        length = shape[axis]
        groups = -(-length // (group or max(length, 1)))
        expected = {
            "data": ((*others, length if bits == 8 else -(-length // 2)), torch.int8 if bits == 8 else torch.uint8),
            "scale": ((*others, groups), _scale_dtype(dtype)),
            "zero": ((*others, groups), dtype),
        }
        for name, tensor in (("data", data), ("scale", scale), ("zero", zero)):
            if (tuple(tensor.shape), tensor.dtype) != expected[name]:
                raise ArtifactError(f"A quantised tensor's {name!r} is {(tuple(tensor.shape), tensor.dtype)}, expected {expected[name]}.")
        return cls(data, scale, zero, shape, dtype, bits, group, axis)

    def _group_size(self) -> int:
        return self.group or max(self.shape[self.axis], 1)


def quantize(x: torch.Tensor, bits: int = 8, group: int | None = None, axis: int = -1, check_finite: bool = True) -> Quantized:
    """Quantises a tensor, group by group along one axis.

    For keys `(batch, heads, seq, head_dim)`, `axis=-2` gives each channel a scale over the tokens, `axis=-1` each token one over its
    channels.

    Args:
        x: float16, bfloat16, float32 or float64, of at least one dimension.
        bits: 8 or 4.
        group: How many consecutive elements along `axis` share a scale. None: all.
        axis: The axis along which elements share scales.
        check_finite: Whether to look for infinities and NaN, which makes the CPU wait for a GPU. Without the check they spoil their group.
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in _DTYPES.values():
        raise ConfigError.of("x", f"a tensor of {', '.join(_DTYPES)}", getattr(x, "dtype", type(x).__name__))
    if isinstance(bits, bool) or bits not in _TOP_LEVEL:
        raise ConfigError.of("bits", "8 or 4", bits)
    if group is not None and (not isinstance(group, int) or isinstance(group, bool) or group <= 0):
        raise ConfigError.of("group", "a number of elements above 0, or None", group)
    if not isinstance(axis, int) or isinstance(axis, bool) or not -x.ndim <= axis < x.ndim:
        raise ConfigError.of("axis", f"an axis of a tensor with {x.ndim} dimensions", axis)
    axis %= x.ndim
    length, top = x.shape[axis], _TOP_LEVEL[bits]
    compute, scale_type = _compute_dtype(x.dtype), _scale_dtype(x.dtype)
    grouped = _split(x.detach().movedim(axis, -1), group or max(length, 1))
    zero, highest = grouped.amin(-1), grouped.amax(-1)
    spread = highest.to(compute) - zero.to(compute)
    if check_finite and not bool(spread.isfinite().all()):
        raise ConfigError.of("x", "finite values, with a finite difference between any two", "infinities, NaN or a wider range")
    # Rounded up, so that the highest level is never below the highest element; 4 covers the roundings on the way in the same type.
    margin = torch.finfo(scale_type).eps * (1 if scale_type == torch.bfloat16 else 4)
    scale = (spread / top * (1 + margin)).clamp_min(torch.finfo(scale_type).smallest_normal).to(scale_type)
    scale = torch.where(spread > 0, scale, torch.zeros_like(scale))
    step = torch.where(scale > 0, scale, torch.ones_like(scale)).to(compute)
    levels = (grouped.to(compute) - zero.to(compute).unsqueeze(-1)).div_(step.unsqueeze(-1)).round_().clamp_(0, top)
    levels = _join(levels, length)
    data = (levels - 127).to(torch.int8) if bits == 8 else _pack(levels.to(torch.uint8))
    return Quantized(data, scale, zero, tuple(x.shape), x.dtype, bits, group, axis)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype in (torch.float16, torch.bfloat16) else dtype


def _output_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _DTYPES.values():
        raise ConfigError.of("dtype", f"one of {', '.join(_DTYPES)}", dtype)
    return dtype


def _split(x: torch.Tensor, group: int) -> torch.Tensor:
    """`(..., length)` to `(..., groups, group)`; a short last group is filled with its last element, which leaves its range as it is."""
    length = x.shape[-1]
    missing = -length % group
    if missing:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), dim=-1)
    return x.reshape(*x.shape[:-1], -(-length // group), group)


def _join(grouped: torch.Tensor, length: int) -> torch.Tensor:
    """The inverse of `_split`."""
    return grouped.flatten(-2)[..., :length]


def _pack(levels: torch.Tensor) -> torch.Tensor:
    """Two levels of 4 bits to a byte, the first in the low half."""
    if levels.shape[-1] % 2:
        levels = torch.cat((levels, torch.zeros_like(levels[..., :1])), dim=-1)
    # The mask keeps what became of a NaN out of the neighbour's half.
    return (levels[..., ::2] & 15) | (levels[..., 1::2] << 4)
