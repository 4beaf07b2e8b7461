"""What the cases of all kernels share."""

import torch

from hf_kvcaches.kernels.quantization import dequantize, quantize
from hf_kvcaches.kernels.rotation import Layout, RotationTables

NAN = float("nan")
TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-6, torch.bfloat16: 4e-2, torch.float16: 6e-3}


class Draws:
    """Random tensors of one shape, from one seed."""

    def __init__(self, batch: int, kv_heads: int, count: int, dtype: torch.dtype, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.shape = (batch, kv_heads, count)
        self.dtype = dtype

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def some(self) -> torch.Tensor:
        """Which slots or tokens are valid: the last always, and none of the first row and head, unless there is only one."""
        valid = torch.rand(self.shape, generator=self.generator) < 0.6
        valid[..., -1] = True
        valid[0, 0] = self.shape[2] == 1
        return valid


def rotation_tables(positions: torch.Tensor, angles: torch.Tensor, layout: Layout = "half") -> RotationTables:
    """Tables of angles, (rows, rotary_dim / 2)."""
    cos, sin, axis = angles.cos(), angles.sin(), 1 if layout == "half" else 2
    full = torch.cat([torch.stack(pair, axis).flatten(1) for pair in ([cos, cos], [-sin, sin])], 1)
    return RotationTables(positions, cos, sin, layout, full)


def within(x: torch.Tensor, filling: float = NAN) -> torch.Tensor:
    """The same numbers as part of a larger tensor of others."""
    larger = torch.full(tuple(size + 3 for size in x.shape), filling, dtype=x.dtype)
    part = larger[tuple(slice(1, size + 1) for size in x.shape)]
    part.copy_(x)
    return part


def restored(x: torch.Tensor, bits: int, group: int | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What is left of a tensor that was quantized, in its dtype or another one, whose range it keeps to."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    numbers, dtype = dequantize(*quantize(x, bits, group), x.shape[-1], group, compute), dtype or x.dtype
    limit = min(torch.finfo(dtype).max, torch.finfo(compute).max)
    return numbers.clamp(-limit, limit).to(dtype)
