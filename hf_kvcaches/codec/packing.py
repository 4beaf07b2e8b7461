"""Records: the packed form of one layer of one row of tokens, for files, stores and wires.

    int32 tokens
    for each tile of up to 64 tokens: int32 words, int32 escaped integers
    the states of all lanes, int32; the words of all tiles, int16; the escaped integers, int16

Numbers are little-endian. A tile of n tokens has ceil(n / 2) lanes. Lane i codes token i and, if there is one, token ceil(n / 2) + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
