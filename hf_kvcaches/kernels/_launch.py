"""What the launchers of all Triton kernels have in common. None of it needs Triton."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def padded(dim: int) -> int:
    """The size of a block that holds `dim` numbers: a power of two, and no matrix product of a GPU takes less than 16."""
    return max(16, 1 << (dim - 1).bit_length())


def strided(tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> tuple[Any, ...]:
    """A tensor as kernels take it: itself and the strides of its first three dimensions, 0 where it is repeated to `shape`."""
    tensor = tensor if shape is None else tensor.expand(shape)
    return (tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, *tensor.stride()[:3])


def portions(count: int, block: int, rows: int, wanted: int | None, device: torch.device) -> tuple[int, int]:
    """How programs share the slots or tokens of a row and KV head.

    Args:
        count: Slots or tokens.
        block: That a program takes at a time.
        rows: Rows times KV heads.
        wanted: How many programs to share among; None: enough to fill the GPU.
        device: The GPU.

    Returns:
        How many slots or tokens each program has, whole blocks, and how many programs that makes.
    """
    wanted = wanted or -(-2 * _processors(device) // rows)
    chunk = -(-count // (wanted * block)) * block
    return chunk, -(-count // chunk)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
