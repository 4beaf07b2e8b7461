"""Coefficients in steps as records, and back: the packed form of one layer of one row of tokens, for files, stores and wires.

    int32 tokens
    for each tile of up to 64 tokens: int32 words, int32 escaped integers
    the states of all lanes, int32; the words of all tiles, int16; the escaped integers, int16

Numbers are little-endian. A tile of n tokens has ceil(n / 2) lanes. Lane i codes token i and, if there is one, token ceil(n / 2) + i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from hf_kvcaches.codec import entropy
from hf_kvcaches.codec.entropy import LANES, LARGEST, SIDES, SIZES, SLOTS, TILE, CodedTiles, Tables
from hf_kvcaches.codec.plan import TABLES, Plan, rounded, token_levels, token_weights
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.kernels.launch import Backend, choose

_DAMAGED = "Packed codes are damaged. Have them made again."
_TOKENS, _HEAD, _STATE, _INTEGER = 4, 8, 4, 2  # bytes
_MOST_WORDS = 2**31 - 2  # that are decoded together: their places are int32
# Tokens whose intervals are found at a time: their numbers stay in the cache, and a long prompt needs no more memory.
_PIECE = 16 * TILE
# Tiles whose lanes take their steps together: enough that operations take longer than calling them, few enough for the cache.
_TOGETHER = 512


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


def _tiles_for(tokens: int) -> int:
    return -(-tokens // TILE)


def _lanes_of(tokens: int) -> int:
    return tokens // TILE * LANES + (tokens % TILE + 1) // 2


def bytes_beside(tokens: int) -> int:
    """What a record takes besides its words and escaped integers."""
    return _TOKENS + _tiles_for(tokens) * _HEAD + _STATE * _lanes_of(tokens)


def _record(tokens: int, counts: torch.Tensor, *sections: torch.Tensor) -> torch.Tensor:
    parts = torch.tensor([tokens], dtype=torch.int32, device=counts.device), counts.int(), *sections
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts if part.numel()])


def join(records: Sequence[torch.Tensor]) -> torch.Tensor:
    """One record of consecutive ones of a layer, on the CPU, all but the last of whole tiles."""
    parts = _read([Span(0, record) for record in records])
    if any(part.tokens % TILE for part in parts[:-1]):
        raise ArtifactError(_DAMAGED)
    sections = zip(*([part.counts, *part.sections] for part in parts), strict=True)
    return _record(sum(part.tokens for part in parts), *map(torch.cat, sections))


def cut(record: torch.Tensor, tokens: int) -> list[torch.Tensor]:
    """The inverse: records of so many tokens each, a multiple of 64, the last one of what is left."""
    [whole] = _read([Span(0, record)])
    sizes = [min(tokens, whole.tokens - start) for start in range(0, whole.tokens, tokens)]
    integers = np.add.reduceat(whole.counts.numpy(), np.arange(0, len(whole.counts), tokens // TILE), 0, np.int64)
    nbytes = [_STATE * _lanes_of(size) for size in sizes], *(_INTEGER * integers).T.tolist()
    parts = whole.counts.split(tokens // TILE), *map(torch.split, whole.sections, nbytes)
    return [_record(*part) for part in zip(sizes, *parts, strict=True)] if sizes else []


def _read(spans: Sequence[Span]) -> list[SpanTiles]:
    """The tiles of spans of records on one device; an `ArtifactError` where sizes make no sense."""
    if any(span.data.ndim != 1 or span.data.dtype != torch.uint8 or len(span.data) < _TOKENS for span in spans):
        raise ArtifactError(_DAMAGED)
    if not spans:
        return []
    tokens = torch.cat([span.data[:_TOKENS] for span in spans]).view(torch.int32).tolist()
    tiles = [_tiles_for(count) for count in tokens]
    if any(count < 0 or len(span.data) < _TOKENS + _HEAD * number for span, count, number in zip(spans, tokens, tiles, strict=True)):
        raise ArtifactError(_DAMAGED)
    heads = torch.cat([span.data[_TOKENS : _TOKENS + _HEAD * number] for span, number in zip(spans, tiles, strict=True)]).cpu()
    counts = heads.view(torch.int32).view(-1, 2)
    # NumPy takes a fraction of PyTorch's time for so few numbers.
    ends = np.concatenate([np.zeros((1, 2), np.int64), counts.numpy().cumsum(0, dtype=np.int64)])
    if bool((counts < 0).any()):
        raise ArtifactError(_DAMAGED)
    parts, tile = [], 0
    for span, whole, number in zip(spans, tokens, tiles, strict=True):
        start, stop, _ = slice(span.start, span.stop).indices(whole)
        first, last = start // TILE, max(start // TILE, _tiles_for(stop))
        before, behind = min(whole, first * TILE), min(whole, last * TILE)
        lanes = [_STATE * _lanes_of(count) for count in (0, before, behind, whole)]
        sections, offset = [], _TOKENS + _HEAD * number
        for begin, low, high, end in (lanes, *(_INTEGER * ends[[tile, tile + first, tile + last, tile + number]]).T.tolist()):
            sections.append(span.data[offset + low - begin : offset + high - begin])
            offset += end - begin
        if offset != len(span.data) or (span.stop is not None and span.stop > whole):
            raise ArtifactError(_DAMAGED)
        wanted = slice(start - before, stop - before)
        parts.append(SpanTiles(span.layer, behind - before, wanted, counts[tile + first : tile + last], sections))
        tile += number
    return parts


def _coded(parts: Sequence[SpanTiles]) -> CodedTiles:
    """The tiles of parts, on their device."""
    if sum(len(words) for _, words, _ in (part.sections for part in parts)) > _INTEGER * _MOST_WORDS:
        raise ArtifactError(_DAMAGED)
    device = parts[0].sections[0].device
    tokens = torch.cat([(part.tokens - TILE * torch.arange(len(part.counts))).clamp_max(TILE) for part in parts])
    lanes = torch.stack([(tokens + 1) // 2, tokens // 2], 1).int().to(device)
    own, words, escaped = (torch.cat(sections) for sections in zip(*(part.sections for part in parts), strict=True))
    # Lanes without tokens have what codes nothing for a state.
    states = torch.full((len(tokens), LANES), entropy.LOWEST, dtype=torch.int32, device=device)
    states.masked_scatter_(torch.arange(LANES, device=device) < lanes[:, :1], own.view(torch.int32))
    counts = torch.cat([part.counts for part in parts]).to(device)
    return CodedTiles(lanes, states, words.view(torch.int16), escaped.view(torch.int16), counts)


class CoefficientPacker:
    """The coefficients of one layer in steps, in the order of `Plan.integers`, on the tables' device; digits are low bits, then integers.

    Deviations are in the order of the plan's directions.
    """

    def __init__(self, plan: Plan, deviations: torch.Tensor, tables: Tables) -> None:
        device = tables.shifts.device
        self.plan, self.tables = plan, tables
        self._weights = token_weights(deviations)[plan.ranks].to(device)
        self._low_bits, self.symbols = plan.low_bits.to(device), plan.symbols.to(device)
        table, follows, plain, count, first, stride = self.symbols.T
        self._centers = tables.boxes[1].index_select(0, table)[:, None]
        # Where the values of a symbol's table begin, and those of the next table, for all but the first symbol.
        self._values = ((table + plain * TABLES) * entropy.SYMBOLS)[1:, None], (follows * entropy.SYMBOLS)[1:, None]
        digit = torch.arange(4, device=device)
        self._digits_of = torch.where(digit < count[:, None], first[:, None] + stride[:, None] * digit, -1)[1 + plan.split :]

    def coefficients(self, digits: torch.Tensor) -> torch.Tensor:
        """Coefficients in steps, (integers, tokens), of digits, (digits, tokens), in whose place they are written."""
        split = self.plan.split
        digits[split : 2 * split].mul_(2.0 ** self._low_bits[:, None]).add_(digits[:split])
        return digits[split:]

    def intervals(self, coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The intervals, (symbols, tokens), of (integers, tokens) of whole tiles; integers that have none; how many of these a tile has."""
        plan, (boxes, _) = self.plan, self.tables.boxes
        levels = token_levels(self._weights @ coefficients.square())
        integers, low = rounded(coefficients, self._low_bits)
        fixed, *centers = self._centers.split([1 + plan.split, *plan.counts])
        index = [torch.cat([levels[None], low.int()]).add_(fixed)]
        for size, own, center in zip(SIZES, integers.split(plan.lengths), centers, strict=True):
            box, *others = own.clamp(-LARGEST[size] - 1, LARGEST[size] + 1).view(size, len(center), own.shape[1])
            for other in others:
                box = (box * SIDES[size]).add_(other)
            index.append((levels * SIDES[size] ** size + center).add_(box))
        intervals = boxes.index_select(0, torch.cat(index).flatten()).view(-1, len(levels))
        tile, digit, token = self._escaped(intervals[1 + plan.split :] < 1 << (entropy.PRECISION + 1))  # begin with slot 0
        return intervals, integers[digit - plan.split, token], torch.bincount(tile, minlength=len(levels) // TILE)

    def digits(self, symbols: torch.Tensor, escaped: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What symbols, (symbols, tokens), uint8, of whole tiles stand for, (digits, tokens), float32.

        Escaped integers have no symbol; `counts` says how many each tile has, on the CPU.
        """
        plan, (tables, follows) = self.plan, self._values
        index = torch.addcmul(tables, follows, entropy.levels_of(symbols[0])).add_(symbols[1:])
        digits = torch.empty(plan.split + len(plan.order), index.shape[1], device=index.device)
        start, (ones, *others) = 0, plan.counts
        for size, own in zip(SIZES, index.split([plan.split + ones, *others]), strict=True):
            for values in self.tables.values[:size]:
                torch.index_select(values, 0, own.flatten(), out=digits[start : start + len(own)].view(-1))
                start += len(own)
        tile, digit, token = self._escaped(symbols[1 + plan.split :] == entropy.ESCAPE)
        if not torch.equal(torch.bincount(tile, minlength=len(counts)).cpu(), counts.long()):
            raise ArtifactError(_DAMAGED)
        digits[digit, token] = escaped.float()
        return digits

    def _escaped(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tile, the digit and the token of each integer of groups that are escaped, (groups, tokens), in the order of storage."""
        tile, group, place = mask.unflatten(1, (-1, TILE)).transpose(0, 1).nonzero().unbind(1)
        digits = self._digits_of[group]
        inside = digits >= 0
        tile, token = (each[:, None].expand_as(digits)[inside] for each in (tile, tile * TILE + place))
        return tile, digits[inside].long(), token


def pack(
    packers: Mapping[int, CoefficientPacker], tokens: Mapping[int, int], coefficients_of: Callable[[int, slice], torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Records, (bytes,) uint8, by layer, of so many tokens of each, whose coefficients, (integers, tokens), float32, are asked for."""
    records: dict[int, torch.Tensor] = {}
    for layers in _batches({layer: _tiles_for(count) for layer, count in tokens.items()}):
        tiles, device = [_tiles_for(tokens[layer]) for layer in layers], packers[layers[0]].symbols.device
        # Lanes without tokens code nothing, and neither do layers that have fewer symbols than others.
        most = max(len(packers[layer].symbols) for layer in layers)
        intervals = torch.full((most, 2, sum(tiles), LANES), SLOTS, dtype=torch.int32, device=device)
        parts = zip(layers, intervals.split(tiles, 2), strict=True)
        filled = [_fill(own, packers[layer], tokens[layer], partial(coefficients_of, layer)) for layer, own in parts]
        for layer, finite in zip(layers, torch.stack([total for *_, total in filled]).isfinite().tolist(), strict=True):
            if not finite:
                raise ConfigError.of(f"layers[{layer}]", "finite numbers", "infinities or NaN")
        for layer, coded, (escaped, of_escaped, _) in zip(layers, entropy.encode(intervals, tiles), filled, strict=True):
            states, words, of_words = coded
            counts = torch.stack([of_words, of_escaped.int()], 1)
            records[layer] = _record(tokens[layer], counts, states.flatten()[: _lanes_of(tokens[layer])], words, escaped)
    return records


def _fill(
    intervals: torch.Tensor, packer: CoefficientPacker, tokens: int, coefficients_of: Callable[[slice], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write a layer's intervals, (symbols, 2, tiles, lanes); return integers that have none, how many each tile has, and the sum of all."""
    total, escaped, counts = torch.zeros((), device=intervals.device), [intervals.new_empty(0, dtype=torch.int16)], [intervals.new_empty(0)]
    for start in range(0, tokens, _PIECE):
        coefficients = coefficients_of(slice(start, start + _PIECE))
        total += coefficients.sum()
        if (count := coefficients.shape[1]) % TILE:  # lanes without a token have zeros
            whole = coefficients.new_zeros(len(coefficients), TILE * _tiles_for(count))
            coefficients = whole.index_copy_(1, _lane_order(count, whole.device), coefficients)
        found, *beside = packer.intervals(coefficients)
        found = found.unflatten(1, (-1, 2, LANES)).transpose(1, 2)
        intervals[: len(found), :, start // TILE : start // TILE + found.shape[2]] = found
        escaped.append(beside[0])
        counts.append(beside[1])
    if last := tokens % TILE:
        intervals[:, 0, -1, (last + 1) // 2 :] = intervals[:, 1, -1, last // 2 :] = SLOTS
    return torch.cat(escaped), torch.cat(counts), total


def unpack(
    packers: Mapping[int, CoefficientPacker], spans: Sequence[Span], backend: Backend = "auto"
) -> Iterator[tuple[SpanTiles, torch.Tensor]]:
    """Yield the tiles of each span and their digits, (digits, tokens), float32; an `ArtifactError` for damage may come after the last."""
    if not spans:
        return
    found, valid = _read(spans), []
    digits_of = _digits_by_triton if choose(backend, packers[spans[0].layer].tables.values) == "triton" else _digits
    for batch in _batches({place: len(part.counts) for place, part in enumerate(found)}):
        parts = [found[place] for place in batch]
        digits, whole = digits_of(_coded(parts), parts, [packers[part.layer] for part in parts])
        valid.append(whole)
        for part, own in zip(parts, digits, strict=True):
            yield part, own.index_select(1, _lane_order(part.tokens, own.device)) if part.tokens % TILE else own
    if not bool(torch.stack(valid).all()):
        raise ArtifactError(_DAMAGED)


Digits = tuple[Iterator[torch.Tensor], torch.Tensor]  # of each part, (digits, tokens of its tiles), and whether the codes are whole


def _digits(coded: CodedTiles, parts: Sequence[SpanTiles], packers: Sequence[CoefficientPacker]) -> Digits:
    tiles, device = [len(part.counts) for part in parts], coded.states.device
    most = max(len(packer.symbols) for packer in packers)
    # Layers that have fewer symbols than others code nothing in the last ones.
    layers = [pad(packer.symbols[:, :2], (0, 0, 0, most - len(packer.symbols))) for packer in packers]
    tables = torch.stack(layers, 2).repeat_interleave(torch.tensor(tiles, device=device), 2)
    symbols, valid = entropy.decode(coded, tables[:, 0], tables[:, 1], packers[0].tables)
    escaped = coded.escaped.split([int(part.counts[:, 1].sum()) for part in parts])
    by_part = zip(packers, (own.transpose(1, 2).flatten(1) for own in symbols.split(tiles, 2)), escaped, parts, strict=True)
    return (packer.digits(own[: len(packer.symbols)], integers, part.counts[:, 1]) for packer, own, integers, part in by_part), valid


def _digits_by_triton(coded: CodedTiles, parts: Sequence[SpanTiles], packers: Sequence[CoefficientPacker]) -> Digits:
    from hf_kvcaches.kernels.rans_triton import decode_tiles

    tables, places = packers[0].tables, list[tuple[int, int, int, int]]()
    plans = [packer.plan for packer in packers]
    shapes = [(plan.split + len(plan.order), TILE * len(part.counts)) for plan, part in zip(plans, parts, strict=True)]
    first, size = 0, 0
    for packer, (digits, tokens) in zip(packers, shapes, strict=True):
        places += [(first, len(packer.symbols), size + token, tokens) for token in range(0, tokens, TILE)]
        first, size = first + len(packer.symbols), size + digits * tokens
    at = torch.tensor(places, dtype=torch.int64).view(-1, 4).to(coded.states.device)
    symbols = torch.cat([packer.symbols for packer in packers])
    flat, valid = decode_tiles(coded, at, symbols, tables.slots, tables.values, size, entropy.PRECISION, entropy.TOKEN_LEVELS)
    parts_of = flat.split([digits * tokens for digits, tokens in shapes])
    return (own.view(shape) for own, shape in zip(parts_of, shapes, strict=True)), valid


def _lane_order(tokens: int, device: torch.device) -> torch.Tensor:
    """Where in whole tiles each token lies: the second half of the last tile's tokens is coded by its first lanes."""
    order, last = torch.arange(tokens, device=device), tokens % TILE
    order[tokens - last // 2 :] += LANES - (last + 1) // 2
    return order


def _batches(tiles: Mapping[int, int]) -> Iterator[list[int]]:
    """Which items, in their order, have about as many tiles together as should take their steps at once."""
    before = dict(zip(tiles, accumulate(tiles.values(), initial=0), strict=False))
    for _, items in groupby(tiles, key=lambda item: before[item] // _TOGETHER):
        yield list(items)
