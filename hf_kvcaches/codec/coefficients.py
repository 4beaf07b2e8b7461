"""Coefficients in steps as records, and back: what is left of packing once a transform has made coefficients of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby

import torch
from torch.nn.functional import pad

from hf_kvcaches.codec import entropy
from hf_kvcaches.codec.entropy import LANES, LARGEST, SIZES, TILE, CodedTiles, Tables, side_of
from hf_kvcaches.codec.packing import DAMAGED, Span, SpanTiles, read, record, tiles_for, tiles_of
from hf_kvcaches.codec.plan import TABLES, Plan, rounded, token_levels, token_weights
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.kernels.launch import Backend, choose

# Tokens whose intervals are found at a time: their numbers stay in the cache, and a long prompt needs no more memory.
_PIECE = 16 * TILE
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
        self._values = ((table + plain * TABLES) * entropy.SYMBOLS)[1:, None], (follows * entropy.SYMBOLS)[1:, None]
        digit = torch.arange(4, device=device)
        self._digits_of = torch.where(digit < count[:, None], first[:, None] + stride[:, None] * digit, -1)[1 + plan.split :]

    def coefficients(self, digits: torch.Tensor) -> torch.Tensor:
        """Coefficients in steps, (integers, tokens), of digits, (digits, tokens), in whose place they are written."""
        split = self.plan.split
        digits[split : 2 * split].mul_(2.0 ** self._low_bits[:, None]).add_(digits[:split])
        return digits[split:]

    def intervals(self, coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The intervals of all symbols, (symbols, tokens), the integers that have none, and how many of these each tile has.

        Coefficients are in steps, (integers, tokens), of whole tiles.
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
        tile, digit, token = self._escaped(entropy.is_escape(intervals[1 + plan.split :]))
        return intervals, integers[digit - plan.split, token], torch.bincount(tile, minlength=len(levels) // TILE)

    def digits(self, symbols: torch.Tensor, escaped: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What symbols stand for, (digits, tokens), float32.

        Args:
            symbols: (symbols, tokens), uint8, of whole tiles.
            escaped: The integers that have no symbol.
            counts: How many of these each tile has, on the CPU.
        """
        plan, (tables, follows) = self.plan, self._values
        index = torch.addcmul(tables, follows, entropy.levels_of(symbols[0])).add_(symbols[1:])
        digits = torch.empty(plan.digits, index.shape[1], device=index.device)
        start, (ones, *others) = 0, plan.counts
        for size, own in zip(SIZES, index.split([plan.split + ones, *others]), strict=True):
            for values in self.tables.values[:size]:
                torch.index_select(values, 0, own.flatten(), out=digits[start : start + len(own)].view(-1))
                start += len(own)
        tile, digit, token = self._escaped(symbols[1 + plan.split :] == entropy.ESCAPE)
        if not torch.equal(torch.bincount(tile, minlength=len(counts)).cpu(), counts.long()):
            raise ArtifactError(DAMAGED)
        digits[digit, token] = escaped.float()
        return digits

    def _escaped(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tile, the digit and the token of each integer of groups that are escaped, (groups, tokens), in the order of storage."""
        tile, group, place = mask.unflatten(1, (-1, TILE)).transpose(0, 1).nonzero().unbind(1)
        digits = self._digits_of[group]
        inside = digits >= 0
        tile, token = (each[:, None].expand_as(digits)[inside] for each in (tile, tile * TILE + place))
        return tile, digits[inside].long(), token


CoefficientsOf = Callable[[int, slice], torch.Tensor]
"""From a layer and some of its tokens to coefficients, (integers, tokens), float32."""


def pack(packers: Mapping[int, CoefficientPacker], tokens: Mapping[int, int], coefficients_of: CoefficientsOf) -> dict[int, torch.Tensor]:
    """Return records, (bytes,) uint8, by layer, of so many tokens of each."""
    layers, records = list(tokens), dict[int, torch.Tensor]()
    for batch in _batches([tiles_for(count) for count in tokens.values()]):
        own = {layers[place]: tokens[layers[place]] for place in batch}
        records |= _pack([packers[layer] for layer in own], own, coefficients_of)
    return records


def _pack(packers: Sequence[CoefficientPacker], tokens: Mapping[int, int], coefficients_of: CoefficientsOf) -> dict[int, torch.Tensor]:
    """The records of some layers, whose lanes take their steps together."""
    tiles, device = [tiles_for(count) for count in tokens.values()], packers[0].symbols.device
    # Lanes without tokens code nothing, and neither do layers that have fewer symbols than others.
    most = max(len(packer.symbols) for packer in packers)
    intervals = torch.full((most, 2, sum(tiles), LANES), entropy.SLOTS, dtype=torch.int32, device=device)
    sums, escaped, counts = torch.zeros(len(packers), device=device), list[torch.Tensor](), list[torch.Tensor]()
    for place, (layer, packer, own) in enumerate(zip(tokens, packers, intervals.split(tiles, 2), strict=True)):
        integers, found_counts = [own.new_empty(0, dtype=torch.int16)], [own.new_empty(0)]
        for start in range(0, tokens[layer], _PIECE):
            coefficients = coefficients_of(layer, slice(start, start + _PIECE))
            sums[place] += coefficients.sum()
            count, padded = coefficients.shape[1], _into_lanes(coefficients)
            found, escapes, of_tiles = packer.intervals(padded)
            found = found.unflatten(1, (-1, 2, LANES)).transpose(1, 2)  # [symbols, 2, tiles, lanes]
            own[: len(found), :, start // TILE : start // TILE + found.shape[2]] = found
            last = count % TILE
            if last:
                own[:, 0, -1, (last + 1) // 2 :] = own[:, 1, -1, last // 2 :] = entropy.SLOTS
            integers.append(escapes)
            found_counts.append(of_tiles)
        escaped.append(torch.cat(integers))
        counts.append(torch.cat(found_counts))
    for layer, finite in zip(tokens, sums.isfinite().tolist(), strict=True):
        if not finite:
            raise ConfigError.of(f"layers[{layer}]", "finite numbers", "infinities or NaN")
    parts = zip(tokens.items(), entropy.encode(intervals, tiles), escaped, counts, strict=True)
    return {
        layer: record(count, states, words, own, torch.stack([of_words, of_tiles.int()], 1))
        for (layer, count), (states, words, of_words), own, of_tiles in parts
    }


def unpack(
    packers: Mapping[int, CoefficientPacker], spans: Sequence[Span], backend: Backend = "auto"
) -> Iterator[tuple[SpanTiles, torch.Tensor]]:
    """Yield for each of some records on one device its tiles and their digits, (digits, tokens); else raise an `ArtifactError`.

    Whether codes are whole is known once all are decoded, so an error may come last.
    """
    if not spans:
        return
    valid = []
    found = read(spans, [(len(packers[span.layer].symbols), packers[span.layer].plan.digits) for span in spans])
    backend = choose(backend, packers[spans[0].layer].tables.values)
    for batch in _batches([len(part.counts) for part in found]):
        parts = [found[place] for place in batch]
        digits_of = _digits_by_triton if backend == "triton" else _digits
        digits, whole = digits_of(tiles_of(parts), parts, [packers[part.layer] for part in parts])
        valid.append(whole)
        for part, own in zip(parts, digits, strict=True):
            yield part, _out_of_lanes(own, part.tokens)
    if not bool(torch.stack(valid).all()):
        raise ArtifactError(DAMAGED)


def _digits(
    coded: CodedTiles, parts: Sequence[SpanTiles], packers: Sequence[CoefficientPacker]
) -> tuple[Iterator[torch.Tensor], torch.Tensor]:
    """The digits of each part, (digits, tokens of its tiles), and whether the codes are whole."""
    tiles, device = [len(part.counts) for part in parts], coded.states.device
    most = max(len(packer.symbols) for packer in packers)
    # Layers that have fewer symbols than others code nothing in the last ones.
    layers = [pad(packer.symbols[:, :2], (0, 0, 0, most - len(packer.symbols))) for packer in packers]
    tables = torch.stack(layers, 2).repeat_interleave(torch.tensor(tiles, device=device), 2)
    symbols, valid = entropy.decode(coded, tables[:, 0], tables[:, 1], packers[0].tables)
    escaped = coded.escaped.split([int(part.counts[:, 1].sum()) for part in parts])
    by_part = zip(packers, parts, symbols.split(tiles, 2), escaped, strict=True)
    digits = (
        packer.digits(own[: len(packer.symbols)].transpose(1, 2).flatten(1), integers, part.counts[:, 1])
        for packer, part, own, integers in by_part
    )
    return digits, valid


def _digits_by_triton(
    coded: CodedTiles, parts: Sequence[SpanTiles], packers: Sequence[CoefficientPacker]
) -> tuple[Iterator[torch.Tensor], torch.Tensor]:
    """Like `_digits`."""
    from hf_kvcaches.kernels.rans_triton import decode_tiles

    tables, places = packers[0].tables, list[tuple[int, int, int, int]]()
    shapes = [(packer.plan.digits, TILE * len(part.counts)) for part, packer in zip(parts, packers, strict=True)]
    first, size = 0, 0
    for packer, (digits, tokens) in zip(packers, shapes, strict=True):
        places += [(first, len(packer.symbols), size + token, tokens) for token in range(0, tokens, TILE)]
        first, size = first + len(packer.symbols), size + digits * tokens
    at = torch.tensor(places, dtype=torch.int64).view(-1, 4).to(coded.states.device)
    symbols = torch.cat([packer.symbols for packer in packers])
    flat, valid = decode_tiles(coded, at, symbols, tables.slots, tables.values, size, entropy.PRECISION, entropy.TOKEN_LEVELS)
    parts_of = flat.split([digits * tokens for digits, tokens in shapes])
    return (own.view(shape) for own, shape in zip(parts_of, shapes, strict=True)), valid


def _into_lanes(numbers: torch.Tensor) -> torch.Tensor:
    """(directions, tokens) as whole tiles, with zeros where lanes of the last one have no token."""
    whole, last = divmod(numbers.shape[1], TILE)
    if not last:
        return numbers
    middle = whole * TILE + (last + 1) // 2
    return torch.cat([pad(numbers[:, :middle], (0, LANES - (last + 1) // 2)), pad(numbers[:, middle:], (0, LANES - last // 2))], 1)


def _out_of_lanes(numbers: torch.Tensor, tokens: int) -> torch.Tensor:
    """The inverse."""
    whole, last = divmod(tokens, TILE)
    if not last:
        return numbers
    middle, second = whole * TILE + (last + 1) // 2, whole * TILE + LANES
    return torch.cat([numbers[:, :middle], numbers[:, second : second + last // 2]], 1)


def _batches(tiles: Sequence[int]) -> Iterator[list[int]]:
    """Which items, in their order, have about as many tiles together as should take their steps at once."""
    before = list(accumulate(tiles, initial=0))
    for _, places in groupby(range(len(tiles)), key=lambda place: before[place] // _TOGETHER):
        yield list(places)
