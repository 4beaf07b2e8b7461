"""Write stored tokens into the slots where a prompt has them: dequantized, and rotated to their new positions.

On a GPU the layers are written in order on a stream of their own, with one copy to the device for each layer and side, and the model's
pass waits for each layer when it gets there: the next layers are sent while it runs. On a CPU all layers of a blob are written at once.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.kernels.quantization import Packed
from hf_kvcaches.kernels.splice import splice
from hf_kvcaches.reuse.index import Piece
from hf_kvcaches.reuse.layer import SplicedLayer, SplicingCache
from hf_kvcaches.reuse.layout import DTYPES, TokenCodec, group_of
from hf_kvcaches.reuse.plan import PromptPlan, PromptRow

Blobs = Mapping[str, Mapping[str, torch.Tensor]]

# Bytes in a cache that are decoded at a time on a CPU.
PORTION = 2**25


def write_plan(cache: SplicingCache, plan: PromptPlan, blobs: Blobs, codec: TokenCodec | None) -> None:
    """Make room for a prompt, and write the tokens that its plan reuses into a cache's layers; none counts as seen."""
    form = next(iter(plan.records.values())).form
    shapes = dict(sorted((index, dims) for members, dims in zip(form["piles"], form["dims"], strict=True) for index in members))
    padding = max(plan.padding)
    for layer, module, (heads, *dims) in zip(cache.layers, decoder_layers(cache.model)[2], shapes.values(), strict=True):
        device = compat.layer_device(module)
        keys, values = (torch.empty(1, heads, 0, dim, dtype=DTYPES[form["dtype"]], device=device) for dim in dims)
        layer.open(len(plan.rows), plan.total, keys, values, padding)
    write_rows(cache.layers, plan.rows, blobs, cache.rotation.layers, codec)


def write_rows(
    layers: Sequence[SplicedLayer],
    rows: Iterable[PromptRow],
    blobs: Blobs,
    geometries: Sequence[RotaryGeometry],
    codec: TokenCodec | None,
) -> None:
    """Write the tokens that rows reuse into the layers' buffers.

    Args:
        geometries: How each layer's keys are rotated.
        codec: What all stored tokens are the codes of; None where they are no codes.
    """
    sides = ((layer.key_buffer, layer.value_buffer) for layer in layers)
    buffers = [(keys, values) for keys, values in sides if keys is not None and values is not None]
    devices = {keys.device for keys, _ in buffers}
    on_cpu = {device.type for device in devices} == {"cpu"}
    groups = list[_Group]()
    for row in rows:
        pieces = list(row.sources)
        # A GPU gets all pieces of a row in one copy, and a codec decodes them together.
        together = [[piece] for piece in pieces] if on_cpu and codec is None else [pieces]
        groups += [_Group(row, some, blobs, geometries, codec) for some in together if some]
    streams = {device: _stream(device) for device in devices if device.type == "cuda"}
    for device, stream in streams.items():
        stream.wait_stream(torch.cuda.current_stream(device))
        for tensor in (tensor for tensors in blobs.values() for tensor in tensors.values() if tensor.device == device):
            tensor.record_stream(stream)  # the hot tier may evict it before it is read
    step = len(layers) if on_cpu else 1
    if on_cpu and codec is not None and groups:
        largest = max(keys[0, :, 0].nbytes + values[0, :, 0].nbytes for keys, values in buffers)
        step = max(1, PORTION // (largest * max(group.tokens for group in groups)))
    for first in range(0, len(layers), step):
        own = streams.get(buffers[first][0].device)
        with torch.cuda.stream(own):  # None changes nothing
            for group in groups:
                group.write(buffers, first, first + step)
        if own is not None:
            for buffer in buffers[first]:
                buffer.record_stream(own)
            layers[first].arrived = own.record_event()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Group:
    """Tokens of one row that are written together."""

    def __init__(
        self, row: PromptRow, pieces: Sequence[Piece], blobs: Blobs, geometries: Sequence[RotaryGeometry], codec: TokenCodec | None
    ) -> None:
        self.row, self.pieces, self.geometries, self.codec, self.form = row, pieces, geometries, codec, pieces[0].record.form
        self.tokens = sum(piece.stop - piece.start for piece in pieces)
        # The tensors of each piece, and its tokens in them.
        self._spans = [(blobs[piece.record.key], slice(piece.offset, piece.offset + piece.stop - piece.start)) for piece in pieces]
        # Codes are not rotated. Others are rotated by how far they moved.
        self._rotates = codec is not None or any(piece.start != piece.position for piece in pieces)
        self._rotations: dict[Any, dict[str, Any]] = {}
        self._slots: dict[torch.device, torch.Tensor] = {}

    def write(self, buffers: Sequence[Sequence[torch.Tensor]], first: int, last: int) -> None:
        """Write the layers from `first` to before `last`."""
        for number, pile in enumerate(self.form["piles"]):
            chosen = slice(bisect_left(pile, first), bisect_left(pile, last))
            if not (members := pile[chosen]):
                continue
            key_outs, value_outs = zip(*([side[self.row.number] for side in buffers[index]] for index in members), strict=True)
            device = key_outs[0].device
            sides = zip(*self._states(number, chosen), strict=True)
            keys, values = (parts[0] if len(parts) == 1 and parts[0].data.device == device else _sent(parts, device) for parts in sides)
            slots, start = self._slots_on(device), 0
            # Layers that are rotated alike are written together.
            for _, alike in groupby([id(self.geometries[index]) if self._rotates else 0 for index in members]):
                stop = start + len(list(alike))
                rotation = self._rotation(self.geometries[members[start]], device) if self._rotates else {}
                some = keys if stop - start == len(members) else _of_layers(keys, slice(start, stop))
                splice(some, key_outs[start:stop], slots, **rotation)
                start = stop
            splice(values, value_outs, slots)

    def _states(self, number: int, chosen: slice) -> Iterator[tuple[Packed, Packed]]:
        """Yield keys and values of each piece in some layers of a pile, as they are stored; codes are decoded."""
        if self.codec is None:
            for tensors, tokens in self._spans:
                yield self._stored(tensors, f"keys.{number}", chosen, tokens), self._stored(tensors, f"values.{number}", chosen, tokens)
            return
        members = self.form["piles"][number][chosen]
        asked = [(index, tensors[f"codes.{index}"], tokens.start, tokens.stop) for tensors, tokens in self._spans for index in members]
        states = self.codec.unpack(asked, DTYPES[self.form["dtype"]])
        for place, (tensors, tokens) in enumerate(self._spans):
            keys, values = map(torch.stack, zip(*states[place * len(members) : (place + 1) * len(members)], strict=True))
            for stacked, name in ((keys, f"keys.{number}"), (values, f"values.{number}")):
                exact = tensors[name][chosen, :, tokens]
                stacked[:, :, : exact.shape[2]] = exact
            yield Packed(keys), Packed(values)

    def _stored(self, tensors: Mapping[str, torch.Tensor], name: str, chosen: slice, tokens: slice) -> Packed:
        data, quantization = tensors[name][chosen, :, tokens], self.form["quantization"]
        if quantization is None:
            return Packed(data)
        scale, zero = (tensors[f"{name}.{part}"][chosen, :, tokens] for part in ("scale", "zero"))
        return Packed(data, scale, zero, group_of(quantization, data.shape[-1] * (2 if data.dtype == torch.uint8 else 1)))

    def _slots_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._slots:
            slots = np.concatenate([np.arange(piece.start, piece.stop) for piece in self.pieces]) + self.row.padding
            self._slots[device] = _to_device(torch.from_numpy(slots), device)
        return self._slots[device]

    def _rotation(self, geometry: RotaryGeometry, device: torch.device) -> dict[str, Any]:
        """Return by which angles keys are rotated, as arguments of `splice`; nothing for no rotation."""
        if geometry.kind != "rope":
            return {}
        key = id(geometry), device
        if key not in self._rotations:
            if self.codec is not None:
                positions = torch.from_numpy(np.concatenate([np.arange(piece.start, piece.stop) for piece in self.pieces]))
                tables = [table * geometry.attention_scaling for table in geometry.cos_sin(positions, torch.float32)]
            else:
                moves = torch.tensor([piece.start - piece.position for piece in self.pieces])
                lengths = torch.tensor([piece.stop - piece.start for piece in self.pieces])
                tables = [table.repeat_interleave(lengths, dim=0) for table in geometry.cos_sin(moves, torch.float32)]
            cos, sin = (_to_device(table, device) for table in tables)
            self._rotations[key] = {"cos": cos, "sin": sin, "layout": geometry.layout}
        return self._rotations[key]


def _of_layers(packed: Packed, layers: slice) -> Packed:
    scale, zero = (None if part is None else part[layers] for part in (packed.scale, packed.zero))
    return packed._replace(data=packed.data[layers], scale=scale, zero=zero)


def _sent(parts: Sequence[Packed], device: torch.device) -> Packed:
    """Send the tokens of several pieces to a device, one behind the other, in one copy for each tensor."""
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
