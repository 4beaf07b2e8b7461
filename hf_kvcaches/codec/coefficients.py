"""Coefficients in steps as records, and back: what is left of packing once a transform has made coefficients of keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from hf_kvcaches.codec.entropy import (
    ESCAPE,
    LANES,
    LARGEST,
    PRECISION,
    SIZES,
    SLOTS,
    SYMBOLS,
    TILE,
    TOKEN_LEVELS,
    CodedTiles,
    Tables,
    decode,
    encode,
    is_escape,
    levels_of,
    side_of,
)
from hf_kvcaches.codec.packing import DAMAGED, Span, SpanTiles, lanes_of, read, record, tiles_of
from hf_kvcaches.codec.plan import TABLES, Plan, token_levels, token_weights
from hf_kvcaches.codec.rates import rounded
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.kernels.launch import Backend, choose
from hf_kvcaches.kernels.rans import decode_tiles

# Tokens that are coded at a time: their numbers stay in a processor's second-level cache.
_BLOCK = 4 * TILE
# Tiles whose lanes take their steps together: enough that operations take longer than calling them, few enough for the cache.
_TOGETHER = 512


class CoefficientPacker:
    """The coefficients of one layer on a device. They are in the order of `Plan.integers`; digits are the low bits and then the integers.

    Args:
        plan: How they are coded.
        deviations: In steps, in the order of the plan's directions.
        tables: Of all layers, on the device.
    """

    def __init__(self, plan: Plan, deviations: torch.Tensor, tables: Tables) -> None:
        device = tables.shifts.device
        self.plan, self.tables = plan, tables
        self._weights = token_weights(deviations)[plan.ranks].to(device)
        self._low_bits, self.symbols = plan.low_bits.to(device), plan.symbols.to(device)
        table, follows, plain, count, first, stride = self.symbols.T
        self._centers = tables.boxes[1].index_select(0, table)[:, None]
        # Where the values of a symbol's table begin, and those of the next table, for all but the first symbol.
        self._values = ((table + plain * TABLES) * SYMBOLS)[1:, None], (follows * SYMBOLS)[1:, None]
        digit = torch.arange(4, device=device)
        self._digits_of = torch.where(digit < count[:, None], first[:, None] + stride[:, None] * digit, -1)

    def coefficients(self, digits: torch.Tensor) -> torch.Tensor:
        """Coefficients in steps, (integers, tokens), of digits, (digits, tokens), in whose place they are written."""
        split = self.plan.split
        digits[split : 2 * split].mul_(2.0 ** self._low_bits[:, None]).add_(digits[:split])
        return digits[split:]

    def intervals(self, coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The intervals of all symbols, (symbols, tokens), the integers that have none, and how many of these each tile has.

        Args:
            coefficients: In steps, (integers, tokens), of whole tiles.
        """
        plan, (boxes, _) = self.plan, self.tables.boxes
        levels = token_levels(self._weights @ coefficients.square())
        integers, low = rounded(coefficients, self._low_bits)
        fixed, *centers = self._centers.split([1 + plan.split, *plan.counts])
        index = [torch.cat([levels[None], low.int()]).add_(fixed)]
        for size, own, center in zip(SIZES, integers.split(plan.lengths), centers, strict=True):
            box, *others = own.clamp(-LARGEST[size] - 1, LARGEST[size] + 1).view(size, len(center), own.shape[1])
            for other in others:
                box = (box * side_of(size)).add_(other)
            index.append((levels * side_of(size) ** size + center).add_(box))
        intervals = boxes.index_select(0, torch.cat(index).flatten()).view(-1, len(levels))
        # Few symbols have groups without an interval among so few tokens, and comparing all numbers takes long.
        escaping = 1 + plan.split + is_escape(intervals[1 + plan.split :].amin(1)).nonzero()[:, 0]
        tile, digit, token = self._escaped(is_escape(intervals[escaping]), escaping)
        return intervals, integers[digit - plan.split, token], torch.bincount(tile, minlength=len(levels) // TILE)

    def digits(self, symbols: torch.Tensor, escaped: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What symbols stand for, (digits, tokens), float32.

        Args:
            symbols: (symbols, tokens), uint8, of whole tiles.
            escaped: The integers that have no symbol.
            counts: How many of these each tile has, on the CPU.
        """
        plan, (tables, follows) = self.plan, self._values
        index = torch.addcmul(tables, follows, levels_of(symbols[0])).add_(symbols[1:])
        digits = torch.empty(plan.digits, index.shape[1], device=index.device)
        start, (ones, *others) = 0, plan.counts
        for size, own in zip(SIZES, index.split([plan.split + ones, *others]), strict=True):
            for values in self.tables.values[:size]:
                torch.index_select(values, 0, own.flatten(), out=digits[start : start + len(own)].view(-1))
                start += len(own)
        escaping = (symbols.amin(1) == ESCAPE).nonzero()[:, 0]
        tile, digit, token = self._escaped(symbols[escaping] == ESCAPE, escaping)
        if not torch.equal(torch.bincount(tile, minlength=len(counts)).cpu(), counts.long()):
            raise ArtifactError(DAMAGED)
        digits[digit, token] = escaped.float()
        return digits

    def _escaped(self, mask: torch.Tensor, symbols: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tile, the digit and the token of each integer of escaped groups, in the order in which they are stored.

        Args:
            mask: Whether a group is escaped, (symbols, tokens).
            symbols: Which of all symbols these are.
        """
        tile, symbol, place = mask.unflatten(1, (-1, TILE)).transpose(0, 1).nonzero().unbind(1)
        digits = self._digits_of[symbols[symbol]]
        inside = digits >= 0
        tile, token = (each[:, None].expand_as(digits)[inside] for each in (tile, tile * TILE + place))
        return tile, digits[inside].long(), token


class CodedBlock(NamedTuple):
    """Tokens of a record that are decoded together.

    Args:
        part: The record.
        tokens: Which of the tokens in the record's tiles these are.
        digits: (digits, tokens), float32.
    """

    part: SpanTiles
    tokens: slice
    digits: torch.Tensor


CoefficientsOf = Callable[[int, slice], torch.Tensor]
"""From a layer and some of its tokens to coefficients, (integers, tokens), float32."""


def pack(packers: Mapping[int, CoefficientPacker], tokens: Mapping[int, int], coefficients_of: CoefficientsOf) -> dict[int, torch.Tensor]:
    """Return records, (bytes,) uint8, by layer.

    Args:
        packers: On one device.
        tokens: Of each layer that is packed.
    """
    records: dict[int, torch.Tensor] = {}
    for batch in _batches(list(tokens), [-(-count // TILE) for count in tokens.values()]):
        records |= _pack({layer: packers[layer] for layer in batch}, {layer: tokens[layer] for layer in batch}, coefficients_of)
    return records


def unpack(packers: Mapping[int, CoefficientPacker], spans: Sequence[Span], backend: Backend = "auto") -> Iterator[CodedBlock]:
    """Yield the blocks of some records on one device, one record after the other; anything but records is an `ArtifactError`.

    Whether codes are whole is known once all are decoded, so an error may come last.
    """
    if not spans:
        return
    valid = []
    parts = read(spans, [(len(packers[span.layer].symbols), packers[span.layer].plan.digits) for span in spans])
    backend = choose(backend, packers[spans[0].layer].tables.values)
    for batch in _batches(parts, [len(part.counts) for part in parts]):
        own, coded = [packers[part.layer] for part in batch], tiles_of(batch)
        digits_of, whole = (_digits_by_triton if backend == "triton" else _digits)(coded, batch, own)
        valid.append(whole)
        for number, (part, packer) in enumerate(zip(batch, own, strict=True)):
            if not part.tokens:
                yield CodedBlock(part, slice(0, 0), torch.empty(packer.plan.digits, 0, device=coded.states.device))
            for block in _blocks(part.tokens, coded.states.device):
                digits = digits_of(number, slice(block.start // TILE, -(-block.stop // TILE)))
                yield CodedBlock(part, block, _out_of_lanes(digits, block.stop - block.start))
    if not bool(torch.stack(valid).all()):
        raise ArtifactError(DAMAGED)


def _pack(packers: Mapping[int, CoefficientPacker], tokens: Mapping[int, int], coefficients_of: CoefficientsOf) -> dict[int, torch.Tensor]:
    """The records of some layers, whose lanes take their steps together."""
    tiles = [-(-count // TILE) for count in tokens.values()]
    device = next(iter(packers.values())).symbols.device
    # Lanes without tokens code nothing, and neither do layers that have fewer symbols than others.
    most = max(len(packer.symbols) for packer in packers.values())
    intervals = torch.full((most, 2, sum(tiles), LANES), SLOTS, dtype=torch.int32, device=device)
    escaped: dict[int, list[torch.Tensor]] = {}
    counts: dict[int, list[torch.Tensor]] = {}
    sums = torch.zeros(len(packers), device=device)
    for place, ((layer, packer), own) in enumerate(zip(packers.items(), intervals.split(tiles, 2), strict=True)):
        escaped[layer], counts[layer], first = [own.new_empty(0, dtype=torch.int16)], [own.new_empty(0, dtype=torch.int64)], 0
        for block in _blocks(tokens[layer], device):
            coefficients = coefficients_of(layer, block)
            sums[place] += coefficients.sum()
            inside = block.stop - block.start
            found, integers, count = packer.intervals(_into_lanes(coefficients, inside))
            # [symbols, 2, tiles, lanes]
            in_lanes = found.unflatten(1, (-1, 2, LANES)).transpose(1, 2)
            for half, lanes in enumerate(lanes_of(min(inside, TILE))):
                own[: len(found), half, first : first + len(count), :lanes] = in_lanes[:, half, :, :lanes]
            escaped[layer].append(integers)
            counts[layer].append(count)
            first += len(count)
    for layer, finite in zip(packers, sums.isfinite().tolist(), strict=True):
        if not finite:
            raise ConfigError.of(f"layers[{layer}]", "finite numbers", "infinities or NaN")
    records = {}
    for layer, coded in zip(packers, encode(intervals, tiles), strict=True):
        both = torch.stack([coded.counts, torch.cat(counts[layer]).int()], 1)
        records[layer] = record(tokens[layer], coded.states, coded.words, torch.cat(escaped[layer]), both)
    return records


DigitsOf = Callable[[int, slice], torch.Tensor]
"""From the number of a part and some of its tiles to the digits of their tokens."""


def _digits(coded: CodedTiles, parts: Sequence[SpanTiles], packers: Sequence[CoefficientPacker]) -> tuple[DigitsOf, torch.Tensor]:
    tiles, device = [len(part.counts) for part in parts], coded.states.device
    most = max(len(packer.symbols) for packer in packers)
    # Layers that have fewer symbols than others code nothing in the last ones.
    layers = {
        part.layer: torch.nn.functional.pad(packer.symbols, (0, 0, 0, most - len(packer.symbols)))
        for part, packer in zip(parts, packers, strict=True)
    }
    tables = torch.stack([layers[part.layer][:, :2] for part in parts], 2).repeat_interleave(torch.tensor(tiles, device=device), 2)
    symbols, valid = decode(coded, tables[:, 0], tables[:, 1], packers[0].tables)
    of_parts = symbols.split(tiles, 2)
    escaped = coded.escaped.split([int(part.counts[:, 1].sum()) for part in parts])

    def digits_of(number: int, block: slice) -> torch.Tensor:
        packer, counts = packers[number], parts[number].counts[:, 1]
        own = of_parts[number][: len(packer.symbols), :, block].transpose(1, 2).flatten(1)
        first, count = int(counts[: block.start].sum()), int(counts[block].sum())
        return packer.digits(own, escaped[number][first : first + count], counts[block])

    return digits_of, valid


def _digits_by_triton(coded: CodedTiles, parts: Sequence[SpanTiles], packers: Sequence[CoefficientPacker]) -> tuple[DigitsOf, torch.Tensor]:
    device, tables, places, size = coded.states.device, packers[0].tables, [], 0
    shapes, symbols, first = [], [], 0
    for part, packer in zip(parts, packers, strict=True):
        tokens = TILE * len(part.counts)
        places += [(first, len(packer.symbols), size + TILE * tile, tokens) for tile in range(len(part.counts))]
        symbols.append(packer.symbols)
        shapes.append((packer.plan.digits, tokens))
        first, size = first + len(packer.symbols), size + packer.plan.digits * tokens
    at = torch.tensor(places, dtype=torch.int64).view(-1, 4).to(device)
    flat, valid = decode_tiles(coded, at, torch.cat(symbols), tables.slots, tables.values, size, PRECISION, TOKEN_LEVELS)
    of_parts = [own.view(shape) for own, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True)]
    return lambda number, block: of_parts[number][:, block.start * TILE : block.stop * TILE], valid


def _blocks(tokens: int, device: torch.device) -> Iterator[slice]:
    """Whole tiles, and what is left."""
    whole = tokens // TILE * TILE
    block = _BLOCK if device.type == "cpu" else max(TILE, whole)
    yield from (slice(start, min(start + block, whole)) for start in range(0, whole, block))
    if whole < tokens:
        yield slice(whole, tokens)


def _into_lanes(numbers: torch.Tensor, tokens: int) -> torch.Tensor:
    """(directions, tokens), whole tiles or less than one, as whole tiles, with zeros where lanes have no token."""
    if not tokens % TILE:
        return numbers
    first, second = lanes_of(tokens)
    pad = torch.nn.functional.pad
    return torch.cat([pad(numbers[:, :first], (0, LANES - first)), pad(numbers[:, first:], (0, LANES - second))], 1)


def _out_of_lanes(numbers: torch.Tensor, tokens: int) -> torch.Tensor:
    """The inverse."""
    if not tokens % TILE:
        return numbers
    first, second = lanes_of(tokens)
    return torch.cat([numbers[:, :first], numbers[:, LANES : LANES + second]], 1)


Item = TypeVar("Item")


def _batches(items: Sequence[Item], tiles: Sequence[int]) -> Iterator[list[Item]]:
    """Items in their order, with about as many tiles as should take their steps together."""
    waiting: list[Item] = []
    count = 0
    for item, own in zip(items, tiles, strict=True):
        waiting.append(item)
        count += own
        if count >= _TOGETHER:
            yield waiting
            waiting, count = [], 0
    if waiting:
        yield waiting
