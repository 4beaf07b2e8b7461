"""Write stored tokens into the slots where a prompt has them: dequantized, and rotated to their new positions.

On a GPU the layers are written in order on a stream of their own, with one copy to the device for each layer and side, and the model's
pass waits for each layer when it gets there: the next layers are sent while it runs. On a CPU all layers of a blob are written at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.rotation import Layout
from hf_kvcaches.kernels.splice import splice
from hf_kvcaches.reuse import layout
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.plan import PromptRow, SourceTokens

# Bytes in a cache that are decoded at a time on a CPU.
PORTION = 2**25

_streams: dict[torch.device, torch.cuda.Stream] = {}


class _Angles(NamedTuple):
    """By which angles the keys of some layers are rotated; no tables for no rotation."""

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    layout: Layout = "half"


def write_rows(
    layers: Sequence[SplicedLayer],
    rows: Sequence[PromptRow],
    blobs: Mapping[str, Mapping[str, torch.Tensor]],
    geometries: Sequence[RotaryGeometry | None],
    codec: layout.TokenCodec | None,
) -> None:
    """Write the tokens that the rows of a plan reuse into the layers' buffers.

    Args:
        blobs: Tensors by the keys of the plan.
        geometries: How each layer's keys are rotated; None where they can't be, and keep their positions.
    """
    groups = [_Group(row, sources, blobs, geometries, codec) for row in rows for sources in _alike(list(row.sources))]
    devices = {layer.key_buffer.device for layer in layers if layer.key_buffer is not None}
    if len(devices) == 1 and not any(device.type == "cuda" for device in devices):
        for group in groups:
            for number, members in enumerate(group.form["piles"]):
                for start in range(0, len(members), group.layers_at_once):
                    group.write(layers, number, slice(start, start + group.layers_at_once))
        return
    places = [_places(group.form) for group in groups]
    streams = {device: _stream(device) for device in devices if device.type == "cuda"}
    for device, stream in streams.items():
        stream.wait_stream(torch.cuda.current_stream(device))
    for index, layer in enumerate(layers):
        if layer.key_buffer is None or layer.value_buffer is None:
            continue
        own = streams.get(layer.key_buffer.device)
        with torch.cuda.stream(own):  # None changes nothing
            for group, found in zip(groups, places, strict=True):
                if index in found:
                    number, place = found[index]
                    group.write(layers, number, slice(place, place + 1))
        if own is not None:
            layer.key_buffer.record_stream(own)
            layer.value_buffer.record_stream(own)
            layer.arrived = own.record_event()


def _places(form: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """Return the pile of each layer, and its place there."""
    return {index: (number, place) for number, pile in enumerate(form["piles"]) for place, index in enumerate(pile)}


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _alike(sources: Sequence[SourceTokens]) -> list[list[SourceTokens]]:
    """Group sources that are stored in the same form."""
    groups: list[list[SourceTokens]] = []
    for source in sources:
        group = next((group for group in groups if group[0].form == source.form), None)
        if group is None:
            groups.append(group := [])
        group.append(source)
    return groups


class _Group:
    """The tokens of one row that are stored in one form."""

    def __init__(
        self,
        row: PromptRow,
        sources: Sequence[SourceTokens],
        blobs: Mapping[str, Mapping[str, torch.Tensor]],
        geometries: Sequence[RotaryGeometry | None],
        codec: layout.TokenCodec | None,
    ) -> None:
        self.row, self.sources, self.geometries, self.codec = row, sources, geometries, codec
        self.form: Mapping[str, Any] = sources[0].form
        self.coded = layout.is_coded(self.form)
        self.spans = [layout.BlobSpan(blobs[each.key], each.form, each.offset, each.offset + each.stop - each.start) for each in sources]
        self._angles: dict[Any, _Angles] = {}
        self._slots: dict[Any, torch.Tensor] = {}

    @property
    def layers_at_once(self) -> int:
        """How many layers are written at once on a CPU: all, unless they are decoded first."""
        tokens = sum(span.stop - span.start for span in self.spans)
        return max(1, PORTION // (tokens * layout.bytes_per_token(self.form))) if self.coded else len(self.geometries)

    def write(self, layers: Sequence[SplicedLayer], number: int, chosen: slice) -> None:
        """Write some layers of a pile."""
        members = self.form["piles"][number][chosen]
        buffers = [(layers[index].key_buffer, layers[index].value_buffer) for index in members]
        outs = [[side[self.row.number] for side in sides if side is not None] for sides in zip(*buffers, strict=True)]
        device = outs[0][0].device
        parts: Iterator[tuple[Packed, Packed]] = layout.parts(self.spans, number, chosen, self.codec)
        pieces: list[tuple[Packed, Packed, int | None]]
        if device.type != "cpu":
            sides = zip(*parts, strict=True)
            pieces = [(_sent(next(sides), device), _sent(next(sides), device), None)]
        else:
            pieces = [(keys, values, place) for place, (keys, values) in enumerate(parts)]
        for keys, values, place in pieces:
            slots = self._slots_of(place, device)
            for positions, angles in self._rotations(members, place, device):
                every = len(positions) == len(members)
                taken = keys if every else _of_layers(keys, positions)
                splice(taken, [outs[0][each] for each in positions], slots, cos=angles.cos, sin=angles.sin, layout=angles.layout)
            splice(values, outs[1], slots)

    def _slots_of(self, place: int | None, device: torch.device) -> torch.Tensor:
        """Return the slots of one source, or of all."""
        key = place, device
        if key not in self._slots:
            chosen = self.sources if place is None else [self.sources[place]]
            slots = np.concatenate([np.arange(source.start, source.stop) for source in chosen]) + self.row.padding
            self._slots[key] = _to_device(torch.from_numpy(slots), device)
        return self._slots[key]

    def _rotations(self, members: Sequence[int], place: int | None, device: torch.device) -> Iterator[tuple[list[int], _Angles]]:
        """Yield layers that rotate alike, as places in `members`, with the angles of one source or of all."""
        groups: dict[int, list[int]] = {}
        for position, index in enumerate(members):
            groups.setdefault(id(self.geometries[index]), []).append(position)
        for positions in groups.values():
            geometry = self.geometries[members[positions[0]]]
            key = id(geometry), place, device
            if key not in self._angles:
                self._angles[key] = self._tables(geometry, place, device)
            yield positions, self._angles[key]

    def _tables(self, geometry: RotaryGeometry | None, place: int | None, device: torch.device) -> _Angles:
        sources = self.sources if place is None else [self.sources[place]]
        # Codes are not rotated. Others are rotated by how far they moved.
        moves = [source.start - source.position for source in sources]
        if geometry is None or geometry.kind != "rope" or not (self.coded or any(moves)):
            return _Angles()
        if self.coded:
            angles = torch.from_numpy(np.concatenate([np.arange(source.start, source.stop) for source in sources]))
            tables = geometry.cos_sin(angles, torch.float32)
            cos, sin = (table * geometry.attention_scaling for table in tables)
        else:
            lengths = torch.tensor([source.stop - source.start for source in sources])
            tables = geometry.cos_sin(torch.tensor(moves), torch.float32)
            cos, sin = (table.repeat_interleave(lengths, dim=0) for table in tables)
        return _Angles(_to_device(cos, device), _to_device(sin, device), geometry.layout)


def _of_layers(packed: Packed, positions: Sequence[int]) -> Packed:
    scale, zero = (None if part is None else part[positions] for part in (packed.scale, packed.zero))
    return packed._replace(data=packed.data[positions], scale=scale, zero=zero)


def _sent(parts: Sequence[Packed], device: torch.device) -> Packed:
    """Send the tokens of several sources to a GPU, one behind the other, in one copy for each tensor."""
    joined = []
    for tensors in zip(*(part[:3] for part in parts), strict=True):
        present = [tensor for tensor in tensors if tensor is not None]
        joined.append(_to_device(torch.cat(present, 2) if len(present) > 1 else present[0], device) if present else None)
    data, scale, zero = joined
    assert data is not None
    return Packed(data, scale, zero, parts[0].group)


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device; to a GPU from pinned memory, without waiting."""
    if tensor.device == device or device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    tensor = tensor.contiguous()
    if not tensor.is_pinned():
        with contextlib.suppress(RuntimeError):  # no more memory can be pinned: the copy is waited for
            tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
