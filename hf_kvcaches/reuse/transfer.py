"""Copy stored tokens from host memory into layers' buffers; to a GPU one portion ahead, so that copying and writing overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.rotation import Layout
from hf_kvcaches.kernels.splice import splice


class Portion(NamedTuple):
    """Tokens of some layers of one row, and the slots that they are written to.

    Args:
        key_outs: The row of each layer's buffer of keys, (heads, capacity, dim), all on one device.
        slots: (tokens,).
        cos: Cosines of the angles by which keys are rotated, (tokens, pairs); None for no rotation.
    """

    keys: Packed
    values: Packed
    key_outs: Sequence[torch.Tensor]
    value_outs: Sequence[torch.Tensor]
    slots: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    layout: Layout


_streams: dict[torch.device, torch.cuda.Stream] = {}


def write_all(portions: Iterable[Portion]) -> None:
    """Write portions. While one is written on a GPU, the next one is copied there on another stream.

    Args:
        portions: Made one at a time, while the GPU works on earlier ones.
    """
    waiting: tuple[Portion, torch.cuda.Event | None] | None = None
    for portion in portions:
        sent = _send(portion)
        if waiting is not None:
            _write(*waiting)
        waiting = sent
    if waiting is not None:
        _write(*waiting)


def _send(portion: Portion) -> tuple[Portion, torch.cuda.Event | None]:
    """Send a portion to the device of its buffers; return it with the event to wait for before it is read."""
    device = portion.key_outs[0].device
    if device.type != "cuda":
        return _moved(portion, device), None
    stream = _streams.setdefault(device, torch.cuda.Stream(device))
    with torch.cuda.stream(stream):
        moved = _moved(portion, device, pin=True)
        return moved, stream.record_event()


def _moved(portion: Portion, device: torch.device, pin: bool = False) -> Portion:
    if device.type == "cpu":
        return portion

    return portion._replace(
        keys=moved(portion.keys, device, pin),
        values=moved(portion.values, device, pin),
        slots=_copied(portion.slots, device, pin),
        cos=None if portion.cos is None else _copied(portion.cos, device, pin),
        sin=None if portion.sin is None else _copied(portion.sin, device, pin),
    )


def moved(packed: Packed, device: torch.device, pin: bool = False) -> Packed:
    """Copy stored tokens to a device.

    Args:
        pin: Whether to copy through pinned memory, without waiting.
    """
    data, scale, zero = (None if part is None else _copied(part, device, pin) for part in packed[:3])
    assert data is not None
    return Packed(data, scale, zero, packed.group)


def _copied(tensor: torch.Tensor, device: torch.device, pin: bool) -> torch.Tensor:
    if pin and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=pin)


def _write(portion: Portion, arrived: torch.cuda.Event | None) -> None:
    if arrived is not None:
        current = torch.cuda.current_stream(portion.slots.device)
        current.wait_event(arrived)
        # These were allocated on the copying stream; their memory must not be reused before this one has read them.
        for tensor in (*portion.keys[:3], *portion.values[:3], portion.slots, portion.cos, portion.sin):
            if tensor is not None:
                tensor.record_stream(current)
    splice(portion.keys, portion.key_outs, portion.slots, cos=portion.cos, sin=portion.sin, layout=portion.layout)
    splice(portion.values, portion.value_outs, portion.slots)
