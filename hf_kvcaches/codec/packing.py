"""Records: the packed form of one layer of one row of tokens, for files, stores and wires.

    int32 tokens
    for each tile of up to 64 tokens: int32 words, int32 escaped integers
    the states of all lanes, int32; the words of all tiles, int16; the escaped integers, int16

Numbers are little-endian. A tile of n tokens has ceil(n / 2) lanes. Lane i codes token i and, if there is one, token ceil(n / 2) + i.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_kvcaches.codec.entropy import LANES, LOWEST, TILE, CodedTiles
from hf_kvcaches.errors import ArtifactError

DAMAGED = "Packed codes are damaged. Have them made again."
_TOKENS, _HEAD, _STATE, _INTEGER = 4, 8, 4, 2  # bytes


class Span(NamedTuple):
    """Tokens of a layer's record, (bytes,), uint8: from `start` to the one before `stop`, or to the last."""

    layer: int
    data: torch.Tensor
    start: int = 0
    stop: int | None = None


class SpanTiles(NamedTuple):
    """The tiles of a record that have the tokens of a span."""

    layer: int
    tokens: int  # in the tiles
    wanted: slice  # those of the span
    counts: torch.Tensor  # words and escaped integers of each tile, (tiles, 2), int32, on the CPU
    sections: Sequence[torch.Tensor]  # bytes of states, words and escaped integers


def tiles_for(tokens: int) -> int:
    return -(-tokens // TILE)


def lanes_of(tokens: int) -> int:
    return tokens // TILE * LANES + (tokens % TILE + 1) // 2


def bytes_beside(tokens: int) -> int:
    """What a record takes besides its words and escaped integers."""
    return _TOKENS + tiles_for(tokens) * _HEAD + _STATE * lanes_of(tokens)


def record(tokens: int, states: torch.Tensor, words: torch.Tensor, escaped: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """A record, (bytes,), uint8, of states (tiles, 32), words and escaped integers of all tiles, and the counts of both in each."""
    parts = (torch.tensor([tokens], device=states.device).int(), counts.int(), states.flatten()[: lanes_of(tokens)], words, escaped)
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts if part.numel()])


def read(spans: Sequence[Span], limits: Sequence[tuple[int, int]]) -> list[SpanTiles]:
    """The tiles of spans of records on one device; an `ArtifactError` where sizes make no sense.

    `limits` are the most words and escaped integers that a token of each span can have: sizes are bounded before they are believed.
    """
    if any(span.data.ndim != 1 or span.data.dtype != torch.uint8 or len(span.data) < _TOKENS for span in spans):
        raise ArtifactError(DAMAGED)
    tokens = torch.cat([span.data[:_TOKENS] for span in spans]).view(torch.int32).tolist()
    if any(count < 0 or len(span.data) < _TOKENS + _HEAD * tiles_for(count) for span, count in zip(spans, tokens, strict=True)):
        raise ArtifactError(DAMAGED)
    tiles = [tiles_for(count) for count in tokens]
    heads = torch.cat([span.data[_TOKENS : _TOKENS + _HEAD * number] for span, number in zip(spans, tiles, strict=True)]).cpu()
    counts = heads.view(torch.int32).view(-1, 2).split(tiles)
    return [_span_tiles(*parts) for parts in zip(spans, tokens, counts, limits, strict=True)]


def _span_tiles(span: Span, tokens: int, counts: torch.Tensor, limits: tuple[int, int]) -> SpanTiles:
    if bool(((counts < 0) | (counts > torch.tensor(limits) * TILE)).any()):
        raise ArtifactError(DAMAGED)
    ends = torch.nn.functional.pad(counts.long().cumsum(0), (0, 0, 1, 0))
    sizes = [_STATE * lanes_of(tokens), *(_INTEGER * ends[-1]).tolist()]
    content = span.data[_TOKENS + _HEAD * len(counts) :]
    if sum(sizes) != len(content) or (span.stop is not None and span.stop > tokens):
        raise ArtifactError(DAMAGED)
    start, stop, _ = slice(span.start, span.stop).indices(tokens)
    first, last = start // TILE, max(start // TILE, tiles_for(stop))
    before, behind = (min(tokens, tile * TILE) for tile in (first, last))
    bounds = [(_STATE * lanes_of(before), _STATE * lanes_of(behind)), *(_INTEGER * ends[[first, last]]).T.tolist()]
    sections = [part[low:high] for part, (low, high) in zip(content.split(sizes), bounds, strict=True)]
    return SpanTiles(span.layer, behind - before, slice(start - before, stop - before), counts[first:last], sections)


def tiles_of(parts: Sequence[SpanTiles]) -> CodedTiles:
    """The tiles of parts, on their device."""
    device = parts[0].sections[0].device
    tokens = torch.cat([(part.tokens - TILE * torch.arange(len(part.counts))).clamp_max(TILE) for part in parts])
    lanes = torch.stack([(tokens + 1) // 2, tokens // 2], 1).int().to(device)
    own, words, escaped = (torch.cat(sections) for sections in zip(*(part.sections for part in parts), strict=True))
    # Lanes without tokens have what codes nothing for a state.
    states = torch.full((len(tokens), LANES), LOWEST, dtype=torch.int32, device=device)
    states.masked_scatter_(torch.arange(LANES, device=device) < lanes[:, :1], own.view(torch.int32))
    counts = torch.cat([part.counts for part in parts]).to(device)
    return CodedTiles(lanes, states, words.view(torch.int16), escaped.view(torch.int16), counts)


def join(records: Sequence[torch.Tensor]) -> torch.Tensor:
    """One record of consecutive ones of a layer, on the CPU, all but the last of whole tiles."""
    parts = [_sections(record) for record in records]
    if any(tokens % TILE for tokens, *_ in parts[:-1]):
        raise ArtifactError(DAMAGED)
    return _joined(sum(tokens for tokens, *_ in parts), zip(*(sections for _, *sections in parts), strict=True))


def cut(record: torch.Tensor, tokens: int) -> list[torch.Tensor]:
    """The inverse: records of so many tokens each, a multiple of 64, the last one of what is left."""
    whole, heads, states, words, escaped = _sections(record)
    ends = np.concatenate([np.zeros((1, 2), np.int64), heads.view("<i4").reshape(-1, 2).cumsum(0, dtype=np.int64)])
    records = []
    for start in range(0, whole, tokens):
        stop = min(start + tokens, whole)
        first, last = start // TILE, tiles_for(stop)
        sections = (
            heads[_HEAD * first : _HEAD * last],
            states[_STATE * lanes_of(start) : _STATE * lanes_of(stop)],
            *(side[_INTEGER * ends[first, column] : _INTEGER * ends[last, column]] for column, side in enumerate((words, escaped))),
        )
        records.append(_joined(stop - start, [[section] for section in sections]))
    return records


def _sections(record: torch.Tensor) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, and the bytes of heads, states, words and escaped integers of a record on the CPU."""
    data = record.numpy()
    tokens = int(data[:_TOKENS].view("<i4")[0]) if len(data) >= _TOKENS else -1
    heads = data[_TOKENS : _TOKENS + _HEAD * tiles_for(tokens)]
    if tokens < 0 or len(heads) % _HEAD:
        raise ArtifactError(DAMAGED)
    counts = heads.view("<i4").reshape(-1, 2)
    sizes = [_TOKENS, len(heads), _STATE * lanes_of(tokens), *(_INTEGER * counts.sum(0, dtype=np.int64))]
    if (counts < 0).any() or sum(sizes) != len(data):
        raise ArtifactError(DAMAGED)
    _, heads, states, words, escaped, _ = np.split(data, np.cumsum(sizes))
    return tokens, heads, states, words, escaped


def _joined(tokens: int, sections: Iterable[Sequence[np.ndarray]]) -> torch.Tensor:
    """A record of so many tokens, whose sections come in parts."""
    return torch.from_numpy(np.concatenate([np.array([tokens], "<i4").view(np.uint8), *itertools.chain.from_iterable(sections)]))
