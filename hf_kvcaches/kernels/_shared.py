"""What `slots.py` and `coefficients.py` have in common: the choice of a back-end, masks, and rotating."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal, get_args

import torch

from hf_kvcaches.errors import ConfigError, UnsupportedError, require, require_choice

Backend = Literal["auto", "triton", "torch", "reference"]
BACKENDS: tuple[str, ...] = get_args(Backend)
Layout = Literal["half", "interleaved"]


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def choose(backend: Backend, *tensors: torch.Tensor) -> Backend:
    """The back-end that computes: never `"auto"`.

    Args:
        backend: What the caller asked for.
        *tensors: All that a gradient could be wanted for.
    """
    if backend in ("torch", "reference"):
        return backend
    learning = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    able = tensors[0].dtype in (torch.float32, torch.bfloat16, torch.float16) and not learning
    if backend == "auto":
        return "triton" if tensors[0].is_cuda and able and has_triton() else "torch"
    require_choice("backend", backend, BACKENDS)
    triton = require("triton", "triton", "backend='triton'")
    if not able:
        raise UnsupportedError("backend='triton': the kernels have no gradients and no float64. Use backend='torch', or torch.no_grad().")
    if not tensors[0].is_cuda and not triton.knobs.runtime.interpret:
        raise ConfigError.of("backend", "'torch' for tensors that are not on a CUDA device", backend, "backend='auto' chooses by itself.")
    return backend


def fits(tensor: torch.Tensor, wanted: tuple[int, int, int]) -> bool:
    """Whether a tensor has this shape, or 1 instead of its first or second size."""
    shape = tensor.shape
    return len(shape) == 3 and shape[2] == wanted[2] and shape[0] in (1, wanted[0]) and shape[1] in (1, wanted[1])


def check_mask(name: str, mask: torch.Tensor, wanted: tuple[int, int, int]) -> None:
    """Refuses a mask that does not say something of each slot or token."""
    if not fits(mask, wanted) or mask.dtype != torch.bool:
        raise ConfigError.of(name, f"bool of shape {wanted}, with 1 for batch or heads", (mask.dtype, tuple(mask.shape)))


def check_layout(name: str, layout: str) -> None:
    """Refuses what is no layout."""
    if layout not in ("half", "interleaved"):
        raise ConfigError.of(name, "'half' or 'interleaved'", layout)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Rotates the first dimensions of `x`, (..., dim), by tables (..., rotary_dim / 2), in the finer precision of both."""
    rotary = 2 * cos.shape[-1]
    part = x[..., :rotary].to(torch.promote_types(x.dtype, cos.dtype))
    first, second = (part[..., ::2], part[..., 1::2]) if layout == "interleaved" else part.chunk(2, -1)
    pair = [first * cos - second * sin, second * cos + first * sin]
    result = torch.stack(pair, -1).flatten(-2) if layout == "interleaved" else torch.cat(pair, -1)
    result = result.to(x.dtype)
    return result if rotary == x.shape[-1] else torch.cat([result, x[..., rotary:]], -1)
