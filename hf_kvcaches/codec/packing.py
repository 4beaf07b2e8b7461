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
    """Tokens of a record.

    Args:
        layer: Whose it is.
        data: (bytes,), uint8.
        start: The first of the tokens that are wanted.
        stop: The one behind the last; None for all.
    """

    layer: int
    data: torch.Tensor
    start: int = 0
    stop: int | None = None


class SpanTiles(NamedTuple):
    """The tiles of a record that have the tokens of a span.

    Args:
        layer: Whose they are.
        tokens: How many are in the tiles.
        wanted: Which of these the span has.
        counts: Words and escaped integers of each tile, (tiles, 2), int32, on the CPU.
        sections: The bytes of states, words and escaped integers.
    """

    layer: int
    tokens: int
    wanted: slice
    counts: torch.Tensor
    sections: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def lanes_of(tokens: int) -> tuple[int, int]:
    """How many lanes of a tile have a first token, and how many a second one."""
    return -(-tokens // 2), tokens // 2


def bytes_beside(tokens: int) -> int:
    """What a record takes besides its words and escaped integers."""
    return _TOKENS + -(-tokens // TILE) * _HEAD + _STATE * _lanes_before(tokens)


def record(tokens: int, states: torch.Tensor, words: torch.Tensor, escaped: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """A record, (bytes,), uint8.

    Args:
        states: (tiles, 32), int32.
        words: Of all tiles, int16; and the escaped integers.
        counts: Of both in each tile, (tiles, 2).
    """
    parts = (torch.tensor([tokens], device=states.device).int(), counts.int(), states.flatten()[: _lanes_before(tokens)], words, escaped)
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts if part.numel()])


def read(spans: Sequence[Span], limits: Sequence[tuple[int, int]]) -> list[SpanTiles]:
    """The tiles of spans of records on one device. Sizes are bounded before they are believed; `ArtifactError` if they make no sense.

    Args:
        limits: For each span the most words and escaped integers that a token can have.
    """
    if any(span.data.ndim != 1 or span.data.dtype != torch.uint8 or len(span.data) < _TOKENS for span in spans):
        raise ArtifactError(DAMAGED)
    tokens = torch.cat([span.data[:_TOKENS] for span in spans]).view(torch.int32).tolist()
    tiles = [-(-count // TILE) for count in tokens]
    if any(count < 0 or len(span.data) < _TOKENS + _HEAD * number for span, count, number in zip(spans, tokens, tiles, strict=True)):
        raise ArtifactError(DAMAGED)
    heads = torch.cat([span.data[_TOKENS : _TOKENS + _HEAD * number] for span, number in zip(spans, tiles, strict=True)]).cpu()
    counts = heads.view(torch.int32).view(-1, 2).split(tiles)
    return [_part(*parts) for parts in zip(spans, tokens, counts, limits, strict=True)]


def _part(span: Span, tokens: int, counts: torch.Tensor, limits: tuple[int, int]) -> SpanTiles:
    if bool(((counts < 0) | (counts > torch.tensor(limits) * TILE)).any()):
        raise ArtifactError(DAMAGED)
    ends = torch.nn.functional.pad(counts.long().cumsum(0), (0, 0, 1, 0)).tolist()
    states = _TOKENS + _HEAD * len(counts)
    words = states + _STATE * _lanes_before(tokens)
    escaped = words + _INTEGER * ends[-1][0]
    if escaped + _INTEGER * ends[-1][1] != len(span.data):
        raise ArtifactError(DAMAGED)
    start, stop, _ = slice(span.start, span.stop).indices(tokens)
    first, last = start // TILE, max(start // TILE, -(-stop // TILE))
    inside = [min(tokens, tile * TILE) for tile in (first, last)]
    sections = (
        span.data[states + _STATE * _lanes_before(inside[0]) : states + _STATE * _lanes_before(inside[1])],
        span.data[words + _INTEGER * ends[first][0] : words + _INTEGER * ends[last][0]],
        span.data[escaped + _INTEGER * ends[first][1] : escaped + _INTEGER * ends[last][1]],
    )
    return SpanTiles(span.layer, inside[1] - inside[0], slice(start - inside[0], stop - inside[0]), counts[first:last], sections)


def tiles_of(parts: Sequence[SpanTiles]) -> CodedTiles:
    """The tiles of parts, on their device."""
    device, lanes, states = parts[0].sections[0].device, [], []
    for part in parts:
        own = [lanes_of(min(TILE, part.tokens - TILE * tile)) for tile in range(len(part.counts))]
        lanes += own
        states.append(part.sections[0])
        # What lanes without tokens have for a state.
        missing = LANES - own[-1][0] if own else 0
        states.append(torch.full((missing,), LOWEST, dtype=torch.int32, device=device).view(torch.uint8))
    words, escaped = (torch.cat([part.sections[place] for part in parts]).view(torch.int16) for place in (1, 2))
    counts = torch.cat([part.counts for part in parts]).to(device)
    of_lanes = torch.tensor(lanes, dtype=torch.int32).view(-1, 2).to(device)
    return CodedTiles(of_lanes, torch.cat(states).view(torch.int32).view(-1, LANES), words, escaped, counts)


def _lanes_before(tokens: int) -> int:
    """Lanes of the tiles of so many tokens."""
    return tokens // TILE * LANES + lanes_of(tokens % TILE)[0]


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
        first, last = start // TILE, -(-stop // TILE)
        sections = (
            heads[_HEAD * first : _HEAD * last],
            states[_STATE * _lanes_before(start) : _STATE * _lanes_before(stop)],
            *(side[_INTEGER * ends[first, column] : _INTEGER * ends[last, column]] for column, side in enumerate((words, escaped))),
        )
        records.append(_joined(stop - start, [[section] for section in sections]))
    return records


def _sections(record: torch.Tensor) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, and the bytes of heads, states, words and escaped integers of a record on the CPU."""
    data = record.numpy()
    tokens = int(data[:_TOKENS].view("<i4")[0]) if len(data) >= _TOKENS else -1
    heads = data[_TOKENS : _TOKENS + _HEAD * -(-tokens // TILE)]
    if tokens < 0 or len(heads) % _HEAD:
        raise ArtifactError(DAMAGED)
    counts = heads.view("<i4").reshape(-1, 2)
    sizes = [_TOKENS, len(heads), _STATE * _lanes_before(tokens), *(_INTEGER * counts.sum(0, dtype=np.int64))]
    if (counts < 0).any() or sum(sizes) != len(data):
        raise ArtifactError(DAMAGED)
    _, heads, states, words, escaped, _ = np.split(data, np.cumsum(sizes))
    return tokens, heads, states, words, escaped


def _joined(tokens: int, sections: Iterable[Sequence[np.ndarray]]) -> torch.Tensor:
    """A record of so many tokens, whose sections come in parts."""
    return torch.from_numpy(np.concatenate([np.array([tokens], "<i4").view(np.uint8), *itertools.chain.from_iterable(sections)]))
