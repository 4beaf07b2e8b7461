"""Tensors of blobs that stay where they are used: in memory, or on a device."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

# Bytes. Tensors in a slab begin at multiples of it: a cache line.
_ALIGNMENT = 64


def slab(tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Copies of tensors in one allocation on a device; on the CPU in pinned memory where there is CUDA, so that copies to it don't wait."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    if _pins(memory.device):
        with contextlib.suppress(RuntimeError):  # no more memory can be pinned: copies wait, then
            memory = memory.pin_memory()
    copies = {}
    for (name, tensor), part in zip(tensors.items(), memory.split(sizes), strict=True):
        copies[name] = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return copies


def _pins(device: torch.device) -> bool:
    return device.type == "cpu" and torch.cuda.is_available()


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same memory as other objects, which a reader may reshape in place."""
    return {name: tensor.detach() for name, tensor in tensors.items()}


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """The bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


class HotTier:
    """The tensors of the blobs that were used last, up to a number of bytes, of which 0 keeps none. The caller locks it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self.device: torch.device | None = None  # of all tensors; the first reader names it
        self._blobs: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._blobs

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The tensors of a blob, not to be written to, or None."""
        if key not in self._blobs:
            return None
        self._blobs.move_to_end(key)
        return aliases(self._blobs[key])

    def placed(self, tensors: dict[str, Tensor], device: torch.device | None) -> dict[str, Tensor]:
        """A blob's tensors where the tier keeps them, if they fit. It copies, so it is called without a lock."""
        if bytes_of(tensors) > self.max_bytes:
            return tensors
        self.device = self.device or device or torch.device("cpu")
        # On the CPU, unless memory can be pinned, they are where they are used.
        return slab(tensors, self.device) if self.device.type != "cpu" or _pins(self.device) else tensors

    def keep(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keeps the tensors of a blob that was read, if they fit."""
        if bytes_of(tensors) > self.max_bytes or key in self._blobs:
            return
        self._blobs[key] = aliases(tensors)
        self.bytes += bytes_of(tensors)
        while self.bytes > self.max_bytes:
            self.remove([next(iter(self._blobs))])

    def remove(self, keys: Iterable[str]) -> None:
        """Forgets blobs; unknown keys are ignored."""
        for key in keys:
            self.bytes -= bytes_of(self._blobs.pop(key, {}))
