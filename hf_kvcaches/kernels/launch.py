"""Which back-end computes, and what the launchers of all Triton kernels have in common. None of it needs Triton."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hf_kvcaches.errors import ConfigError, UnsupportedError, require, require_choice

Backend = Literal["auto", "triton", "torch"]
BACKENDS: tuple[str, ...] = get_args(Backend)


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def choose(backend: Backend, *tensors: Tensor) -> Backend:
    """The back-end that computes, never `"auto"`, for tensors that a gradient could be wanted for."""
    if backend == "torch":
        return backend
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    supported = tensors[0].dtype in (torch.float32, torch.bfloat16, torch.float16) and not needs_gradient
    if backend == "auto":
        if not tensors[0].is_cuda or not supported:
            return "torch"
        if not has_triton():
            _warn_slow()
        return "triton" if has_triton() else "torch"
    require_choice("backend", backend, BACKENDS)
    triton = require("triton", "triton", "backend='triton'")
    if not supported:
        raise UnsupportedError("backend='triton': the kernels have no gradients and no float64. Use backend='torch', or torch.no_grad().")
    if not tensors[0].is_cuda and not triton.knobs.runtime.interpret:
        raise ConfigError.of("backend", "'torch' for tensors that are not on a CUDA device", backend, "backend='auto' chooses by itself.")
    return backend


@cache
def _warn_slow() -> None:
    warnings.warn("Triton is not installed, and kernels of hf_kvcaches run as many PyTorch operations. pip install triton.", stacklevel=4)


def padded(dim: int) -> int:
    """The size of a block that holds `dim` numbers: a power of two, and no matrix product of a GPU takes less than 16."""
    return max(16, 1 << (dim - 1).bit_length())


def strided(tensor: Tensor | None, shape: tuple[int, ...] | None = None) -> tuple[Any, ...] | None:
    """A tensor as kernels take it: itself and the strides of its first three dimensions, 0 where it is repeated to `shape`; or None."""
    if tensor is None:
        return None
    tensor = tensor if shape is None else tensor.expand(shape)
    return (tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, *tensor.stride()[:3])


def split_tokens(count: int, block: int, rows: int, splits: int | None, device: torch.device) -> tuple[int, int]:
    """Slots or tokens of a row per program, in whole blocks, and the number of programs; `splits` None: enough programs to fill the GPU."""
    splits = splits or -(-2 * _processors(device) // rows)
    chunk = -(-count // (splits * block)) * block
    return chunk, -(-count // chunk)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
