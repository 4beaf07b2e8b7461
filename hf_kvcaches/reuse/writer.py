"""Write stored tokens into the slots where a prompt has them: dequantized, and rotated to their new positions.

On a GPU the layers are written in order on a stream of their own, with one copy for each layer and side, and the model's pass waits for
each layer when it gets there: the next ones are sent while it runs. On a CPU all layers of a blob are written at once.
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
from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.splice import splice
from hf_kvcaches.reuse.index import Piece
from hf_kvcaches.reuse.layer import SplicedLayer, SplicingCache
from hf_kvcaches.reuse.layout import DTYPES, TokenCodec, group_of
from hf_kvcaches.reuse.plan import PromptPlan, PromptRow

Blobs = Mapping[str, Mapping[str, torch.Tensor]]

PORTION = 2**25  # bytes in a cache that are decoded at a time on a CPU


def write_plan(cache: SplicingCache, plan: PromptPlan, blobs: Blobs, codec: TokenCodec | None) -> None:
    """Make room for a prompt, and write the tokens that its plan reuses into a cache's layers; none counts as seen."""
    form = next(iter(plan.records.values())).form
    shapes = dict(sorted((index, dims) for members, dims in zip(form["piles"], form["dims"], strict=True) for index in members))
    for layer, module, (heads, *dims) in zip(cache.layers, decoder_layers(cache.model)[2], shapes.values(), strict=True):
        device = compat.layer_device(module)
        keys, values = (torch.empty(1, heads, 0, dim, dtype=DTYPES[form["dtype"]], device=device) for dim in dims)
        layer.open(len(plan.rows), plan.total, keys, values, max(plan.padding))
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
    buffers = [layer.buffers for layer in layers]
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
        step = max(1, PORTION // (largest * max(len(group.indices) for group in groups)))
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
        self.row, self.geometries, self.codec, self.form = row, geometries, codec, pieces[0].record.form
        # The tensors of each piece, and its tokens in them.
        self.spans = [(blobs[piece.record.key], slice(piece.offset, piece.offset + piece.stop - piece.start)) for piece in pieces]
        self.indices = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
        before = np.concatenate([np.arange(piece.stop - piece.start) + piece.position for piece in pieces])
        # By how many positions keys are rotated: codes are of unrotated ones.
        self.moves = self.indices if codec is not None else self.indices - before
        self._rotates = codec is not None or bool(self.moves.any())
        self._on_device: dict[Any, Any] = {}

    def write(self, buffers: Sequence[Sequence[torch.Tensor]], first: int, last: int) -> None:
        """Write the layers from `first` to before `last`."""
        for number, pile in enumerate(self.form["piles"]):
            chosen = slice(bisect_left(pile, first), bisect_left(pile, last))
            if not (members := pile[chosen]):
                continue
            key_outs, value_outs = zip(*([side[self.row.number] for side in buffers[index]] for index in members), strict=True)
            device = key_outs[0].device
            keys, values = (_joined(parts, device) for parts in zip(*self._states(number, chosen), strict=True))
            slots, start = self._slots(device), 0
            # Layers that are rotated alike are written together.
            for _, alike in groupby([id(self.geometries[index]) if self._rotates else 0 for index in members]):
                stop = start + len(list(alike))
                rotation = self._rotation(self.geometries[members[start]], device) if self._rotates else {}
                parts = [None if part is None else part[start:stop] for part in keys[:3]]
                splice(Packed(*parts, keys.group), key_outs[start:stop], slots, **rotation)
                start = stop
            splice(values, value_outs, slots)

    def _states(self, number: int, chosen: slice) -> Iterator[tuple[Packed, Packed]]:
        """Yield keys and values of each piece in some layers of a pile, as they are stored; codes are decoded."""
        if self.codec is None:
            for tensors, tokens in self.spans:
                yield self._stored(tensors, f"keys.{number}", chosen, tokens), self._stored(tensors, f"values.{number}", chosen, tokens)
            return
        members = self.form["piles"][number][chosen]
        asked = [(index, tensors[f"codes.{index}"], tokens.start, tokens.stop) for tensors, tokens in self.spans for index in members]
        states = self.codec.unpack(asked, DTYPES[self.form["dtype"]])
        for place, (tensors, tokens) in enumerate(self.spans):
            keys, values = map(torch.stack, zip(*states[place * len(members) : (place + 1) * len(members)], strict=True))
            for stacked, name in ((keys, f"keys.{number}"), (values, f"values.{number}")):
                exact = tensors[name][chosen, :, tokens]
                stacked[:, :, : exact.shape[2]] = exact
            yield Packed(keys), Packed(values)

    def _stored(self, tensors: Mapping[str, torch.Tensor], name: str, chosen: slice, tokens: slice) -> Packed:
        names = [name] if self.form["quantization"] is None else [name, f"{name}.scale", f"{name}.zero"]
        data, *scales = (tensors[part][chosen, :, tokens] for part in names)
        dim = data.shape[-1] * (2 if data.dtype == torch.uint8 else 1)
        return Packed(data, *scales, group=group_of(str(self.form["quantization"]), dim)) if scales else Packed(data)

    def _slots(self, device: torch.device) -> torch.Tensor:
        if device not in self._on_device:
            self._on_device[device] = _to_device(torch.from_numpy(self.indices + self.row.padding), device)
        slots: torch.Tensor = self._on_device[device]
        return slots

    def _rotation(self, geometry: RotaryGeometry, device: torch.device) -> dict[str, Any]:
        """Return by which angles keys are rotated, as arguments of `splice`; nothing for no rotation."""
        if geometry.kind != "rope":
            return {}
        if (geometry, device) not in self._on_device:
            scaling = 1.0 if self.codec is None else geometry.attention_scaling
            tables = geometry.cos_sin(torch.from_numpy(self.moves), torch.float32)
            cos, sin = (_to_device(table * scaling, device) for table in tables)
            self._on_device[geometry, device] = {"cos": cos, "sin": sin, "layout": geometry.layout}
        rotation: dict[str, Any] = self._on_device[geometry, device]
        return rotation


def _joined(parts: Sequence[Packed], device: torch.device) -> Packed:
    """The tokens of several pieces on a device, one behind the other, in one copy for each tensor."""
    sides = [[side for side in sides if side is not None] for sides in zip(*(part[:3] for part in parts), strict=True)]
    data, *scales = (_to_device(torch.cat(side, 2) if len(side) > 1 else side[0], device) for side in sides if side)
    return Packed(data, *scales, group=parts[0].group)


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device; to a GPU from pinned memory, without waiting."""
    if tensor.device == device or device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    tensor = tensor.contiguous()
    if not tensor.is_pinned():
        with contextlib.suppress(RuntimeError):  # no more memory can be pinned: the copy is waited for
            tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
