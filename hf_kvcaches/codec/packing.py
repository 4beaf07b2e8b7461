"""The packed form of a codec: integers of a joint basis, entropy coded, for files, stores and wires.

A record holds one layer of one row of tokens:

    int32 tokens
    for each tile of up to 64 tokens: int32 words, int32 escaped groups
    the states of all lanes, int32; the words of all tiles, int16; the integers of escaped groups, int16

Numbers are little-endian. A lane codes two tokens of its tile; an odd token has a lane of its own, with zeros for a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from hf_kvcaches.codec import entropy
from hf_kvcaches.codec.entropy import ESCAPE, GROUP, SYMBOLS, TILE, CodedTiles, Tables, TileDecoder
from hf_kvcaches.codec.programs import NOTHING, TOKEN_LEVELS, Program
from hf_kvcaches.errors import ArtifactError

# Lanes that take their steps together: their tensors stay in a processor's cache.
_TOGETHER = 1 << 14
_TOKENS, _HEAD, _STATE, _WORD, _ESCAPED = 4, 8, 4, 2, 2 * GROUP  # bytes
_FIRST = 1  # symbol of a table whose integers all have one probability: that of 0
_DAMAGED = "Packed codes are damaged. Have them made again."


class PackedRecord(NamedTuple):
    """The sections of a record; see the module.

    Args:
        tokens: How many are in it.
        heads: (tiles, 2), int64.
        states: (lanes,), int32.
        words: int16.
        escaped: (groups, 4), int16.
    """

    tokens: int
    heads: torch.Tensor
    states: torch.Tensor
    words: torch.Tensor
    escaped: torch.Tensor

    @classmethod
    def of(cls, data: torch.Tensor, steps: int) -> PackedRecord:
        """Read the sections, whose sizes are bounded before they are believed.

        Args:
            data: (bytes,), uint8.
            steps: Of each token.
        """
        tokens = int(data[:_TOKENS].clone().view(torch.int32)) if len(data) >= _TOKENS and data.dtype == torch.uint8 else -1
        tiles, lanes = -(-tokens // TILE), tokens // TILE * (TILE // 2) + -(-(tokens % TILE) // 2)
        start = _TOKENS + _HEAD * tiles
        if tokens < 0 or len(data) < start + _STATE * lanes:
            raise ArtifactError(_DAMAGED)
        heads = data[_TOKENS:start].clone().view(torch.int32).view(tiles, 2).long()
        words, escaped = heads.sum(0).tolist() if bool(((heads >= 0) & (heads <= steps * TILE)).all()) else (-1, 0)
        sizes = [start, _STATE * lanes, _WORD * words, _ESCAPED * escaped]
        if words < 0 or sum(sizes) != len(data):
            raise ArtifactError(_DAMAGED)
        _, states, found, groups = (part.clone() for part in data.split(sizes))
        return cls(tokens, heads, states.view(torch.int32), found.view(torch.int16), groups.view(torch.int16).view(-1, GROUP))

    def data(self) -> torch.Tensor:
        """(bytes,), uint8."""
        parts = (self.heads.new_tensor([self.tokens]).int(), self.heads.int(), self.states, self.words, self.escaped)
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])

    def part(self, span: slice) -> CodedTiles:
        """The tiles of some tokens, which are all whole, or one that is not."""
        first, tokens = span.start // TILE, span.stop - span.start
        own = self.tiles(first, first + max(1, tokens // TILE))
        return CodedTiles(own.states.view(len(own.heads), -1), own.words, own.heads[:, 0])

    def tiles(self, start: int, stop: int) -> PackedRecord:
        """Some of the tiles."""
        ends = torch.nn.functional.pad(self.heads.cumsum(0), (0, 0, 1, 0))[[start, stop]].tolist()
        lanes = slice(start * TILE // 2, stop * TILE // 2)
        (word, group), (last_word, last_group) = ends
        inside = min(self.tokens, stop * TILE) - start * TILE
        return PackedRecord(inside, self.heads[start:stop], self.states[lanes], self.words[word:last_word], self.escaped[group:last_group])


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


@dataclass(frozen=True, eq=False)
class Packer:
    """Packs integers, of many layers and spans at a time.

    Args:
        programs: Of each layer.
        tables: Of all.
    """

    programs: Mapping[int, Program]
    tables: Tables

    def pack(self, layers: Sequence[int], integers: Sequence[torch.Tensor], token_levels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Records, (bytes,), uint8.

        Args:
            layers: Of each record.
            integers: (kept, tokens) each, int32.
            token_levels: (tokens,) each, int32.
        """
        blocks: list[_Uncoded] = []
        escaped: list[list[torch.Tensor]] = []
        for number, (layer, own, levels) in enumerate(zip(layers, integers, token_levels, strict=True)):
            program = self.programs[layer]
            groups, rows = program.groups_of(own, levels), program.rows.index_select(1, levels)
            symbols = self.tables.symbols_of(groups, rows, program.step_sizes)
            masks = (symbols == ESCAPE).split(TILE, 1)
            escaped.append([part.permute(1, 2, 0)[mask] for part, mask in zip(groups.split(TILE, 2), masks, strict=True)])
            blocks += [
                _Uncoded(number, _by_lane(symbols[:, span], _FIRST), _by_lane(rows[:, span], NOTHING)) for span in _spans(own.shape[1])
            ]
        coded: dict[int, list[CodedTiles]] = {}
        for batch in _batches(blocks):
            # Layers with fewer steps have some that code nothing.
            rows = torch.cat(_padded([block.rows for block in batch], NOTHING), 1)
            found = entropy.encode(torch.cat(_padded([block.symbols for block in batch], _FIRST), 1), rows, self.tables)
            tiles = [block.symbols.shape[1] for block in batch]
            counts = found.counts.split(tiles)
            words = found.words.split([int(each) for each in torch.stack([each.sum() for each in counts]).tolist()])
            for block, *parts in zip(batch, found.states.split(tiles), words, counts, strict=True):
                coded.setdefault(block.number, []).append(CodedTiles(*parts))
        lengths = [len(levels) for levels in token_levels]
        return [_record(lengths[number], coded.get(number, []), groups).data() for number, groups in enumerate(escaped)]

    def unpack(self, spans: Sequence[Span]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The integers of each span, (kept, tokens), int16, and the levels of its tokens, (tokens,), int32.

        Anything but records is an `ArtifactError`.
        """
        records, wanted, blocks = [], [], []
        for number, span in enumerate(spans):
            whole = PackedRecord.of(span.data, len(self.programs[span.layer].step_sizes))
            start, stop, _ = slice(span.start, span.stop).indices(whole.tokens)
            first = start // TILE
            records.append(whole.tiles(first, max(first, -(-stop // TILE))))
            wanted.append(slice(start - first * TILE, stop - first * TILE))
            blocks += [_Coded(number, span.layer, part.stop - part.start, records[-1].part(part)) for part in _spans(records[-1].tokens)]
        symbols: dict[int, list[torch.Tensor]] = {}
        for batch in _batches(blocks):
            for block, found in zip(batch, self._symbols(batch), strict=True):
                symbols.setdefault(block.number, []).append(found)
        return [
            self._integers(span.layer, record, symbols.get(number, []), own)
            for number, (span, record, own) in enumerate(zip(spans, records, wanted, strict=True))
        ]

    def _symbols(self, batch: Sequence[_Coded]) -> Iterator[torch.Tensor]:
        """The symbols of blocks of tiles with as many lanes, (steps, tokens) each, uint8."""
        rows = _padded([self.programs[block.layer].rows for block in batch], NOTHING)
        tiles = [len(block.coded.states) for block in batch]
        all_rows = torch.cat([row[:, None].expand(-1, count, -1) for row, count in zip(rows, tiles, strict=True)], 1)
        decoder = TileDecoder(CodedTiles(*map(torch.cat, zip(*(block.coded for block in batch), strict=True))), self.tables)
        lanes = decoder.state.shape[1]
        symbols = torch.empty(len(all_rows), 2, *decoder.state.shape, dtype=torch.uint8, device=decoder.state.device)
        odd = torch.cat([torch.full((count,), block.tokens % 2 == 1) for block, count in zip(batch, tiles, strict=True)])
        # Where tokens are odd, the last lane has no second one.
        absent = (odd[:, None] & (torch.arange(lanes) == lanes - 1)).to(symbols.device) if bool(odd.any()) else None
        levels: list[torch.Tensor] = []
        for step, row in enumerate(all_rows):
            for half in range(2):
                table = row.gather(1, levels[half]) if step else row[:, :1]
                if half and absent is not None:
                    table = torch.where(absent, NOTHING, table)
                entry = decoder.step(table)
                symbols[step, half] = entry
                if not step:
                    levels.append(_levels_of(entry & (SYMBOLS - 1)).long())
        if not decoder.ended():
            raise ArtifactError(_DAMAGED)
        for block, own in zip(batch, symbols.split(tiles, 2), strict=True):
            yield own.transpose(1, 2).flatten(1)[:, : block.tokens]

    def _integers(self, layer: int, record: PackedRecord, parts: list[torch.Tensor], wanted: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Some of the integers, and of the tokens' levels, of a record whose symbols are decoded."""
        program = self.programs[layer]
        steps = len(program.step_sizes)
        symbols = torch.cat([part[:steps] for part in parts], 1) if parts else record.heads.new_empty(steps, 0, dtype=torch.uint8)
        token_levels = _levels_of(symbols[0].int())
        groups = self.tables.groups_of(symbols, program.rows.index_select(1, token_levels))
        masks = (symbols == ESCAPE).split(TILE, 1) if parts else ()
        counts = torch.tensor([int(mask.sum()) for mask in masks], dtype=torch.int64, device=symbols.device)
        if not torch.equal(counts, record.heads[:, 1]):
            raise ArtifactError(_DAMAGED)
        for part, mask, escaped in zip(groups.split(TILE, 1), masks, record.escaped.split(counts.tolist()), strict=bool(parts)):
            part[mask] = escaped
        return program.integers_of(groups)[:, wanted], token_levels[wanted]


def _levels_of(symbols: torch.Tensor) -> torch.Tensor:
    """The levels of tokens from the symbols of the first step, int32; damaged ones are brought into range."""
    return (symbols - _FIRST).clamp_(0, TOKEN_LEVELS - 1)


class _Uncoded(NamedTuple):
    """Tiles of one record to code, (steps, tiles, lanes) each."""

    number: int
    symbols: torch.Tensor
    rows: torch.Tensor

    @property
    def lanes(self) -> tuple[int, int]:
        """Tiles, and lanes of each."""
        return self.symbols.shape[1], self.symbols.shape[2]


class _Coded(NamedTuple):
    """Tiles of one record to decode."""

    number: int
    layer: int
    tokens: int
    coded: CodedTiles

    @property
    def lanes(self) -> tuple[int, int]:
        """Tiles, and lanes of each."""
        return self.coded.states.shape[0], self.coded.states.shape[1]


SomeBlock = TypeVar("SomeBlock", _Uncoded, _Coded)


def _batches(blocks: Sequence[SomeBlock]) -> Iterator[list[SomeBlock]]:
    """Blocks whose tiles have as many lanes, about as many as should take their steps together."""
    groups: dict[int, list[SomeBlock]] = {}
    for block in blocks:
        _, lanes = block.lanes
        waiting = groups.setdefault(lanes, [])
        waiting.append(block)
        if sum(each.lanes[0] for each in waiting) * lanes >= _TOGETHER:
            yield groups.pop(lanes)
    yield from groups.values()


def _padded(parts: Sequence[torch.Tensor], value: int) -> list[torch.Tensor]:
    """Parts with as many steps, their first dimension."""
    steps = max(len(part) for part in parts)
    return [part if len(part) == steps else torch.cat([part, part.new_full((steps - len(part), *part.shape[1:]), value)]) for part in parts]


def _by_lane(each: torch.Tensor, value: int) -> torch.Tensor:
    """Two steps in place of one, for the two tokens of a lane: (steps, tiles, lanes) of tiles of one length, (steps, tokens)."""
    if each.shape[1] % 2:
        each = torch.nn.functional.pad(each, (0, 1), value=value)
    return each.unflatten(1, (-1, 2, min(TILE, each.shape[1]) // 2)).transpose(1, 2).flatten(0, 1)


def _record(tokens: int, coded: Sequence[CodedTiles], escaped: Sequence[torch.Tensor]) -> PackedRecord:
    """The record of a span.

    Args:
        tokens: How many it has.
        coded: Its whole tiles, and the last one.
        escaped: The integers of each tile that have no symbol, (groups, 4).
    """
    if not coded:
        nothing = torch.zeros(0, dtype=torch.int16)
        return PackedRecord(0, torch.zeros(0, 2, dtype=torch.int64), nothing.int(), nothing, nothing.view(0, GROUP))
    counts = torch.cat([part.counts for part in coded])
    lengths = torch.tensor([len(part) for part in escaped], device=counts.device)
    states, words = torch.cat([part.states.flatten() for part in coded]), torch.cat([part.words for part in coded])
    return PackedRecord(tokens, torch.stack([counts, lengths], 1), states, words, torch.cat(list(escaped)).short())


def _spans(tokens: int) -> list[slice]:
    """Whole tiles, and what is left."""
    whole = tokens // TILE * TILE
    return [span for span in (slice(0, whole), slice(whole, tokens)) if span.stop > span.start]
