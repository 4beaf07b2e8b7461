"""The hot tier: tensors of blobs in memory or on a device, where they are used."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes of a cache line, of which tensors in a slab begin at multiples


def slab(tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return copies of tensors in one allocation on a device; on the CPU in pinned memory if there is CUDA, for asynchronous transfers."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    if memory.device.type == "cpu" and torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # no more memory can be pinned: transfers are synchronous
            memory = memory.pin_memory()
    copies = {}
    for (name, tensor), block in zip(tensors.items(), memory.split(sizes), strict=True):
        copies[name] = block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return copies


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return other tensors on the same memory, which a reader may reshape in place."""
    return {name: tensor.detach() for name, tensor in tensors.items()}


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


class HotTier:
    """The tensors of the blobs that were used last, at most `max_bytes` of them; 0 keeps none. The caller locks it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self.device: torch.device | None = None  # of all tensors; the first reader names it
        self._blobs: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._blobs

    def get(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors of a blob, which are read-only, or None."""
        if key not in self._blobs:
            return None
        self._blobs.move_to_end(key)
        return aliases(self._blobs[key])

    def to_device(self, tensors: dict[str, Tensor], device: torch.device | None) -> dict[str, Tensor]:
        """Return a blob's tensors on the tier's device if they fit into the tier. It copies, so it is called without a lock."""
        if bytes_of(tensors) > self.max_bytes:
            return tensors
        self.device = self.device or device or torch.device("cpu")
        # Without CUDA no memory is pinned, and tensors on the CPU need no copy.
        return slab(tensors, self.device) if self.device.type != "cpu" or torch.cuda.is_available() else tensors

    def keep(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep the tensors of a blob if they fit into the tier, and evict those used longest ago."""
        if bytes_of(tensors) > self.max_bytes or key in self._blobs:
            return
        self._blobs[key] = aliases(tensors)
        self.bytes += bytes_of(tensors)
        while self.bytes > self.max_bytes:
            self.remove([next(iter(self._blobs))])

    def remove(self, keys: Iterable[str]) -> None:
        """Remove blobs; ignore unknown keys."""
        for key in keys:
            self.bytes -= bytes_of(self._blobs.pop(key, {}))
