"""What the cases of all kernels share."""

from __future__ import annotations

import torch

NAN = float("nan")


class Draws:
    """Random tensors of one shape, from one seed.

    Args:
        batch: Rows.
        kv_heads: Key heads.
        count: Slots or tokens of a row.
        dtype: Of what is drawn.
        seed: Of everything random.
    """

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
