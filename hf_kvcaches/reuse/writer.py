"""Write stored tokens into the slots where a prompt has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.rotation import Layout
from hf_kvcaches.reuse import layout
from hf_kvcaches.reuse.codec import TokenCodec
from hf_kvcaches.reuse.layer import SplicedLayer
from hf_kvcaches.reuse.transfer import Portion, write_all

# Small spans are joined up to this many bytes in a cache, in all layers: below, calls take longer than the copy.
JOINED = 2**22
# Bytes in a cache that are decoded, or sent to a GPU, at a time: while one portion is written, the next one is sent.
PORTION = 2**25


class Loaded(NamedTuple):
    """A stored span, and the indices of a row that it is written to.

    Args:
        offset: The first token's index in the tensors.
        position: The first token's position when it was computed.
        stored: What `layout.encode` returned with the tensors.
        depth: Write the layers below this one; None: all.
        codec: The codec of the tensors, if they are codes.
    """

    start: int
    stop: int
    offset: int
    position: int
    stored: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    depth: int | None = None
    codec: TokenCodec | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.stop - self.start


def like_stored(loaded: Loaded, layers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return an empty tensor with the heads, head_dim and dtype of each layer's keys, and one for its values.

    Layers that are not stored are taken to have the shapes of the highest stored one.
    """
    stored = loaded.stored
    dtype = layout.dtype_of(stored)
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for number, members in enumerate(stored["piles"]):
        pair = []
        for name in ("keys", "values"):
            data = loaded.tensors[f"{name}.{number}"]
            dim = stored["dims"][number][name == "values"]
            pair.append(torch.empty(1, data.shape[1], 0, dim, dtype=dtype))
        pairs |= dict.fromkeys(members, (pair[0], pair[1]))
    return [pairs.get(index, pairs[max(pairs)]) for index in range(layers)]


def splice_row(
    layers: Sequence[SplicedLayer], row: int, padding: int, spans: Sequence[Loaded], geometries: Sequence[RotaryGeometry | None]
) -> None:
    """Write spans into one row of the layers' buffers, and rotate their keys to the new positions.

    Args:
        padding: Slots at the start of the row that hold no token.
        geometries: How each layer's keys are rotated; None where they can't be, and keep their positions.
    """
    write_all(portion for group in _grouped(spans) for portion in _portions(layers, row, padding, group, geometries))


def _grouped(spans: Sequence[Loaded]) -> list[list[Loaded]]:
    """Group spans that are stored in the same way, small ones together."""
    groups: list[list[Loaded]] = []
    size = 0
    for span in sorted(spans, key=lambda span: (span.depth or 0, str(span.stored["dtype"]))):
        added = span.tokens * sum(map(len, span.stored["piles"])) * layout.bytes_per_token(span.tensors, span.stored)
        last = groups[-1][-1] if groups else None
        alike = (
            last is not None
            and last.depth == span.depth
            and all(last.stored[name] == span.stored[name] for name in ("dtype", "piles", "quantization"))
        )
        # The steps of decoding take as long for many spans as for one.
        if not alike or size + added > (PORTION if layout.is_coded(span.stored) else JOINED):
            groups.append([])
            size = 0
        groups[-1].append(span)
        size += added
    return groups


def _portions(
    layers: Sequence[SplicedLayer],
    row: int,
    padding: int,
    spans: Sequence[Loaded],
    geometries: Sequence[RotaryGeometry | None],
) -> Iterator[Portion]:
    """Yield the portions of spans that are stored in the same way, the lowest layers first; a portion's layers rotate in the same way."""
    tokens = sum(span.tokens for span in spans)
    count = max(1, PORTION // (tokens * layout.bytes_per_token(spans[0].tensors, spans[0].stored)))
    stored = [layout.BlobSpan(span.tensors, span.stored, span.offset, span.offset + span.tokens) for span in spans]
    slots = torch.from_numpy(np.concatenate([np.arange(span.start, span.stop) for span in spans]) + padding)
    coded = layout.is_coded(spans[0].stored)
    # Codes are not rotated. Tokens at their old position are rotated by 0: this is exact, and faster than a portion of their own.
    offsets = [np.arange(span.start, span.stop) if coded else np.full(span.tokens, span.start - span.position) for span in spans]
    shifts, shift_indices = np.unique(np.concatenate(offsets), return_inverse=True)
    rotates, table_rows = coded or bool(shifts.any()), torch.from_numpy(shift_indices)
    for pile in layout.piles(stored, spans[0].depth, spans[0].codec, count):
        for members, geometry in _alike(pile.layers, layers, geometries):
            cos = sin = None
            pairing: Layout = "half"
            if rotates and geometry is not None and geometry.kind == "rope":
                scaling = geometry.attention_scaling if coded else 1.0
                cos, sin = (table[table_rows] * scaling for table in geometry.cos_sin(torch.from_numpy(shifts), torch.float32))
                pairing = geometry.layout
            rows_of_pile = [pile.layers.index(index) for index in members]
            buffers = [(layers[index].key_buffer, layers[index].value_buffer) for index in members]
            yield Portion(
                _layers_of(pile.keys, rows_of_pile),
                _layers_of(pile.values, rows_of_pile),
                [keys[row] for keys, _ in buffers if keys is not None],
                [values[row] for _, values in buffers if values is not None],
                slots,
                cos,
                sin,
                pairing,
            )


def _alike(
    members: Sequence[int], layers: Sequence[SplicedLayer], geometries: Sequence[RotaryGeometry | None]
) -> list[tuple[list[int], RotaryGeometry | None]]:
    """Group layers by geometry and device; return each group with its geometry."""
    groups: dict[tuple[int, torch.device | None], tuple[list[int], RotaryGeometry | None]] = {}
    for index in members:
        buffer = layers[index].key_buffer
        key = (id(geometries[index]), None if buffer is None else buffer.device)
        groups.setdefault(key, ([], geometries[index]))[0].append(index)
    return list(groups.values())


def _layers_of(packed: Packed, members: Sequence[int]) -> Packed:
    """Select layers of a pile."""
    if list(members) == list(range(packed.data.shape[0])):
        return packed
    data, scale, zero = (None if part is None else part[list(members)] for part in packed[:3])
    assert data is not None
    return Packed(data, scale, zero, packed.group)
