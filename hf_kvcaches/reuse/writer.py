"""Write stored tokens into the slots where a prompt has them: dequantized, and rotated to their new positions.

On a GPU the layers are written in order on a stream of their own, with one copy to the device for each layer and side, and the model's
pass waits for each layer when it gets there: the next layers are sent while it runs. On a CPU all layers of a blob are written at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.rotation import Layout
from hf_kvcaches.kernels.splice import splice
from hf_kvcaches.reuse import layout
from hf_kvcaches.reuse.index import Piece
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.plan import PromptRow

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
    groups = [_Group(row, pieces, blobs, geometries, codec) for row in rows for pieces in _alike(row.sources)]
    devices = {layer.key_buffer.device for layer in layers if layer.key_buffer is not None}
    if len(devices) == 1 and not any(device.type == "cuda" for device in devices):
        for group in groups:
            # All, unless they are decoded first.
            step = len(layers) if group.codec is None else max(1, PORTION // (group.tokens * layout.bytes_per_token(group.form)))
            for number, members in enumerate(group.form["piles"]):
                for start in range(0, len(members), step):
                    group.write(layers, number, slice(start, start + step))
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


def _alike(sources: Iterable[Piece]) -> list[list[Piece]]:
    """Group pieces that are stored in the same form."""
    groups: list[list[Piece]] = []
    for piece in sources:
        group = next((group for group in groups if group[0].record.form == piece.record.form), None)
        if group is None:
            groups.append(group := [])
        group.append(piece)
    return groups


class _Group:
    """The tokens of one row that are stored in one form.

    Attributes:
        codec: What they are the codes of; None where they are no codes.
    """

    def __init__(
        self,
        row: PromptRow,
        pieces: Sequence[Piece],
        blobs: Mapping[str, Mapping[str, torch.Tensor]],
        geometries: Sequence[RotaryGeometry | None],
        codec: layout.TokenCodec | None,
    ) -> None:
        self.row, self.pieces, self.geometries, self.form = row, pieces, geometries, pieces[0].record.form
        self.codec = codec if layout.is_coded(self.form) else None
        spans = [(blobs[each.record.key], self.form, each.offset, each.offset + each.stop - each.start) for each in pieces]
        self.spans = [layout.BlobSpan(*span) for span in spans]
        self.tokens = sum(each.stop - each.start for each in pieces)
        # Codes are not rotated. Others are rotated by how far they moved.
        self._rotates = self.codec is not None or any(each.start != each.position for each in pieces)
        self._angles: dict[Any, _Angles] = {}
        self._slots: dict[Any, torch.Tensor] = {}

    def write(self, layers: Sequence[SplicedLayer], number: int, chosen: slice) -> None:
        """Write some layers of a pile."""
        members = self.form["piles"][number][chosen]
        buffers = [(layers[index].key_buffer, layers[index].value_buffer) for index in members]
        outs = [[side[self.row.number] for side in sides if side is not None] for sides in zip(*buffers, strict=True)]
        device = outs[0][0].device
        parts = layout.parts(self.spans, number, chosen, self.codec)
        places: Sequence[int | None] = range(len(parts))
        if device.type != "cpu":  # all in one
            key_parts, value_parts = zip(*parts, strict=True)
            parts, places = [(_sent(key_parts, device), _sent(value_parts, device))], [None]
        for place, (keys, values) in zip(places, parts, strict=True):
            slots = self._slots_of(place, device)
            for positions, angles in self._rotations(members, place, device):
                every = len(positions) == len(members)
                taken = keys if every else _of_layers(keys, positions)
                splice(taken, [outs[0][each] for each in positions], slots, cos=angles.cos, sin=angles.sin, layout=angles.layout)
            splice(values, outs[1], slots)

    def _slots_of(self, place: int | None, device: torch.device) -> torch.Tensor:
        """Return the slots of one piece, or of all."""
        key = place, device
        if key not in self._slots:
            chosen = self.pieces if place is None else [self.pieces[place]]
            slots = np.concatenate([np.arange(piece.start, piece.stop) for piece in chosen]) + self.row.padding
            self._slots[key] = _to_device(torch.from_numpy(slots), device)
        return self._slots[key]

    def _rotations(self, members: Sequence[int], place: int | None, device: torch.device) -> Iterator[tuple[list[int], _Angles]]:
        """Yield layers that rotate alike, as places in `members`, with the angles of one piece or of all."""
        if not self._rotates:
            yield list(range(len(members))), _Angles()
            return
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
        pieces = self.pieces if place is None else [self.pieces[place]]
        moved = self.codec is not None or any(piece.start != piece.position for piece in pieces)
        if geometry is None or geometry.kind != "rope" or not moved:
            return _Angles()
        if self.codec is not None:
            positions = torch.from_numpy(np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces]))
            cos, sin = (table * geometry.attention_scaling for table in geometry.cos_sin(positions, torch.float32))
        else:
            moves = torch.tensor([piece.start - piece.position for piece in pieces])
            lengths = torch.tensor([piece.stop - piece.start for piece in pieces])
            cos, sin = (table.repeat_interleave(lengths, dim=0) for table in geometry.cos_sin(moves, torch.float32))
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
