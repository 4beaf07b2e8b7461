"""Stored tokens, written into a cache's layers where a prompt has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_kvcaches.core.codec.codec import KVCodec
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.splicing import packing
from hf_kvcaches.core.splicing.layer import SplicedLayer
from hf_kvcaches.core.splicing.packing import Pile
from hf_kvcaches.core.splicing.transfer import Portion, write_all
from hf_kvcaches.kernels.rotation import Layout
from hf_kvcaches.kernels.splice import Packed

# Bytes in a cache. Pieces are put together up to so many of all layers: below, calls take longer than the copy.
JOINED = 2**22
# So many of some layers are decoded, or go to a GPU, at a time: while one portion is written, the next one is on its way.
PORTION = 2**25


class Loaded(NamedTuple):
    """Stored tokens, and where they go in a row.

    Args:
        position: Where the first of them stood when it was stored.
        stored: What `packing.encode` gave with the tensors.
        depth: Only of layers below this one; None: of all.
        codec: What reads them, where they are codes.
    """

    start: int
    stop: int
    offset: int
    position: int
    stored: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    depth: int | None = None
    codec: KVCodec | None = None

    @property
    def tokens(self) -> int:
        """How many."""
        return self.stop - self.start


def like_stored(loaded: Loaded, layers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each layer an empty tensor of its keys' heads, head_dim and type, and one of its values'; all layers are taken to be alike."""
    stored = loaded.stored
    dtype = packing.dtype_of(stored)
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for number, members in enumerate(stored["piles"]):
        pair = []
        for name in ("keys", "values"):
            data = loaded.tensors[f"{name}.{number}"]
            dim = stored["dims"][number][name == "values"]
            pair.append(torch.empty(1, data.shape[1], 0, dim, dtype=dtype))
        found |= dict.fromkeys(members, (pair[0], pair[1]))
    return [found.get(index, found[max(found)]) for index in range(layers)]


def splice_row(
    layers: Sequence[SplicedLayer], row: int, padding: int, pieces: Sequence[Loaded], geometries: Sequence[RotaryGeometry | None]
) -> None:
    """Writes pieces into one row of the layers' buffers, their keys turned to where they now stand.

    Args:
        padding: Slots at the start of the row that hold no token.
        geometries: How each layer's keys are turned; None where they can't be, and are where they were.
    """
    write_all(portion for together in _portions(pieces) for portion in _portions_of(layers, row, padding, together, geometries))


def _portions(pieces: Sequence[Loaded]) -> list[list[Loaded]]:
    """Pieces that are stored alike, small ones together."""
    portions: list[list[Loaded]] = []
    size = 0
    for loaded in sorted(pieces, key=lambda each: (each.depth or 0, str(each.stored["dtype"]))):
        needed = loaded.tokens * sum(map(len, loaded.stored["piles"])) * packing.bytes_per_token(loaded.tensors, loaded.stored)
        before = portions[-1][-1] if portions else None
        alike = (
            before is not None
            and before.depth == loaded.depth
            and all(before.stored[name] == loaded.stored[name] for name in ("dtype", "piles", "quantization"))
        )
        if not alike or size + needed > JOINED:
            portions.append([])
            size = 0
        portions[-1].append(loaded)
        size += needed
    return portions


def _portions_of(
    layers: Sequence[SplicedLayer],
    row: int,
    padding: int,
    pieces: Sequence[Loaded],
    geometries: Sequence[RotaryGeometry | None],
) -> Iterator[Portion]:
    """Pieces that are stored alike, for some layers at a time that are treated alike, the lowest first."""
    tokens = sum(each.tokens for each in pieces)
    together = max(1, PORTION // (tokens * packing.bytes_per_token(pieces[0].tensors, pieces[0].stored)))
    cut = [
        packing.piles(each.tensors, each.stored, each.offset, each.offset + each.tokens, each.depth, each.codec, together)
        for each in pieces
    ]
    slots = torch.from_numpy(np.concatenate([np.arange(each.start, each.stop) for each in pieces]) + padding)
    coded = packing.is_coded(pieces[0].stored)
    # Those that stay where they were are turned by nothing, exactly, which is quicker than to treat them apart. Codes have no rotation yet.
    distances = [np.arange(each.start, each.stop) if coded else np.full(each.tokens, each.start - each.position) for each in pieces]
    shifts, of_tokens = np.unique(np.concatenate(distances), return_inverse=True)
    turning, which = coded or bool(shifts.any()), torch.from_numpy(of_tokens)
    for pile in (_joined(parts) for parts in zip(*cut, strict=True)):
        for members, geometry in _treated_alike(pile.layers, layers, geometries):
            cos = sin = None
            layout: Layout = "half"
            if turning and geometry is not None and geometry.kind == "rope":
                scaling = geometry.attention_scaling if coded else 1.0
                cos, sin = (table[which] * scaling for table in geometry.cos_sin(torch.from_numpy(shifts), torch.float32))
                layout = geometry.layout
            inside = [pile.layers.index(index) for index in members]
            buffers = [(layers[index].key_buffer, layers[index].value_buffer) for index in members]
            yield Portion(
                _of_layers(pile.keys, inside),
                _of_layers(pile.values, inside),
                [keys[row] for keys, _ in buffers if keys is not None],
                [values[row] for _, values in buffers if values is not None],
                slots,
                cos,
                sin,
                layout,
            )


def _joined(parts: Sequence[Pile]) -> Pile:
    if len(parts) == 1:
        return parts[0]
    return Pile(parts[0].layers, _cat([part.keys for part in parts]), _cat([part.values for part in parts]))


def _cat(packed: Sequence[Packed]) -> Packed:
    data = torch.cat([each.data for each in packed], 2)
    if packed[0].scale is None:
        return Packed(data)
    scale = torch.cat([each.scale for each in packed if each.scale is not None], 2)
    zero = torch.cat([each.zero for each in packed if each.zero is not None], 2)
    return Packed(data, scale, zero, packed[0].group)


def _treated_alike(
    members: Sequence[int], layers: Sequence[SplicedLayer], geometries: Sequence[RotaryGeometry | None]
) -> list[tuple[list[int], RotaryGeometry | None]]:
    """Layers with one geometry on one device, and that geometry."""
    groups: dict[tuple[int, torch.device | None], tuple[list[int], RotaryGeometry | None]] = {}
    for index in members:
        buffer = layers[index].key_buffer
        key = (id(geometries[index]), None if buffer is None else buffer.device)
        groups.setdefault(key, ([], geometries[index]))[0].append(index)
    return list(groups.values())


def _of_layers(packed: Packed, members: Sequence[int]) -> Packed:
    """Some layers of a pile."""
    if list(members) == list(range(packed.data.shape[0])):
        return packed
    data, scale, zero = (None if part is None else part[list(members)] for part in packed[:3])
    assert data is not None
    return Packed(data, scale, zero, packed.group)
