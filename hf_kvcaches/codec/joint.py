"""The packed form of a codec: one basis for keys and values of all heads of a layer, one step for the whole model, entropy coded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from hf_kvcaches.codec.basis import Basis
from hf_kvcaches.codec.entropy import LANES, PRECISION, SLOTS, TILE, TOKEN_LEVELS, CodedTiles, Tables, decode, encode
from hf_kvcaches.codec.layer_packer import LayerPacker
from hf_kvcaches.codec.packing import DAMAGED, Span, SpanTiles, lanes_of, read, record, tiles_of
from hf_kvcaches.codec.plan import TABLES, Plan
from hf_kvcaches.codec.rates import Sample, StepQuantizer, fit
from hf_kvcaches.codec.shape import States
from hf_kvcaches.codec.statistics import LayerStatistics
from hf_kvcaches.core.files import part_of
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.kernels.launch import Backend, choose
from hf_kvcaches.kernels.rans import decode_tiles

# Numbers of all layers of which an artifact keeps a sample, to choose steps and tables from.
_SAMPLED = 1 << 22
# Tokens that are transformed at a time: their numbers stay in a processor's second-level cache.
_BLOCK = 4 * TILE
# Tiles whose lanes take their steps together: enough that operations take longer than calling them, few enough for the cache.
_TOGETHER = 512
_TINY = 1e-30
# Shares of the bytes between which integers have at most 16 bits.
_LEAST_RATIO, _LARGEST_RATIO = 0.005, 0.75


@dataclass(frozen=True, eq=False)
class JointBasis:
    """The transform of a layer, and coefficients of some tokens.

    Args:
        basis: Of the layer.
        deviations: Of the coefficients, (groups * size,), float32.
        sample: Coefficients in deviations, (tokens, groups * size), float16.
    """

    basis: Basis
    deviations: torch.Tensor
    sample: torch.Tensor

    @classmethod
    def fit(cls, statistics: LayerStatistics, layers: int) -> JointBasis:
        """The basis of a layer, one of so many."""
        basis, coefficients = statistics.basis()
        coefficients = coefficients.transpose(0, 1).flatten(1)
        deviations = coefficients.square().mean(0).sqrt().clamp_min(_TINY)
        sample = (coefficients / deviations)[: max(1, _SAMPLED // (layers * coefficients.shape[1]))]
        return cls(basis, deviations.float().cpu(), sample.half().cpu().contiguous())

    def sorted(self) -> Sample:
        """The sample with the largest deviations first."""
        order = self.deviations.argsort(descending=True, stable=True)
        return Sample(order, self.deviations[order], self.sample[:, order].T.float().contiguous())

    def of_heads(self, shard: HeadShard) -> JointBasis:
        """That of the heads that a process has under tensor parallelism."""
        groups, size = self.basis.groups_of(shard), self.basis.shape.size
        own = slice(groups.start * size, groups.stop * size)
        return JointBasis(self.basis.of_heads(shard), self.deviations[own], self.sample[:, own])

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        return self.basis.tensors() | {"deviations": self.deviations, "sample": self.sample}

    @classmethod
    def of(cls, shape: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> JointBasis:
        """From `tensors`, if they fit each other."""
        joint = cls(Basis.of(shape, tensors), tensors["deviations"], tensors["sample"])
        numbers = joint.basis.shape.elements
        if joint.deviations.shape != (numbers,) or joint.sample.shape[1:] != (numbers,):
            raise ArtifactError("The sample of a joint basis does not fit it. Calibrate anew.")
        return joint


@dataclass(frozen=True, eq=False)
class PackedForm:
    """How all layers are packed.

    Args:
        bases: Of the layers that are coded, by index.
        quantizer: Of their coefficients; its plans are in the order of the bases.
    """

    bases: Mapping[int, JointBasis]
    quantizer: StepQuantizer

    @classmethod
    def fit(cls, bases: Mapping[int, JointBasis], bytes_ratio: float) -> PackedForm:
        """The form that takes a share of the bytes of keys and values in 16 bits, or as near to it as integers of 16 bits come."""
        ratio = min(max(bytes_ratio, _LEAST_RATIO), _LARGEST_RATIO)
        return cls(bases, fit([joint.sorted() for joint in bases.values()], ratio * 16 * _elements(bases)))

    @property
    def ratio(self) -> float:
        """The bytes that are expected of a long text, as a share of those of keys and values in 16 bits."""
        return self.quantizer.bits / (16 * _elements(self.bases))

    @property
    def divergence(self) -> float:
        """What is expected of a prediction to change, in nats, where errors of layers do not add up."""
        return self.quantizer.loss / 2

    def of_heads(self, shard: HeadShard) -> PackedForm:
        """The form of the heads that a process has under tensor parallelism, with the same step and tables."""
        own, bases, plans = self.quantizer, {}, []
        for (layer, joint), plan in zip(self.bases.items(), own.plans, strict=True):
            bases[layer] = joint.of_heads(shard)
            first = joint.basis.groups_of(shard).start * joint.basis.shape.size
            order = plan.order[(plan.order >= first) & (plan.order < first + len(bases[layer].deviations))] - first
            plans.append(Plan.of_deviations(order, bases[layer].deviations[order] / own.step))
        return PackedForm(bases, replace(own, plans=tuple(plans), bits=own.bits / shard.size, loss=own.loss / shard.size))

    def pack(self, states: Mapping[int, States], left_out: int = 0) -> dict[int, torch.Tensor]:
        """Records, (bytes,) uint8 on the device of each layer's states, by layer.

        Args:
            left_out: First tokens that are kept elsewhere, and are coded as the mean.
        """
        records: dict[int, torch.Tensor] = {}
        devices: dict[torch.device, list[int]] = {}
        for layer, (keys, _) in states.items():
            devices.setdefault(keys.device, []).append(layer)
        for device, layers in devices.items():
            packers = self._on(device)
            for batch in _batches(layers, [-(-states[layer][0].shape[1] // TILE) for layer in layers]):
                records |= _pack({layer: packers[layer] for layer in batch}, states, left_out)
        return records

    def unpack(self, spans: Sequence[Span], dtype: torch.dtype = torch.float32, backend: Backend = "auto") -> list[States]:
        """Keys and values of spans; anything but records is an `ArtifactError`.

        Args:
            spans: Of records from `pack`, on one device; of any layers.
            backend: "triton": one launch for many records; "torch": many operations; "auto": Triton for CUDA tensors.
        """
        if not spans:
            return []
        packers, found, valid = self._on(spans[0].data.device), [], []
        parts = read(spans, [(len(packers[span.layer].symbols), packers[span.layer].plan.digits) for span in spans])
        backend = choose(backend, packers[spans[0].layer].tables.values)
        for batch in _batches(parts, [len(part.counts) for part in parts]):
            states, good = _unpack(packers, batch, dtype, backend)
            found += states
            valid.append(good)
        if not bool(torch.stack(valid).all()):
            raise ArtifactError(DAMAGED)
        return found

    def _on(self, device: torch.device) -> dict[int, LayerPacker]:
        held: dict[torch.device, dict[int, LayerPacker]] = self.__dict__.setdefault("_devices", {})
        if device not in held:
            # A later pass may need gradients, which tensors of the caller's inference mode refuse.
            with torch.inference_mode(False), torch.no_grad():
                own = self.quantizer
                tables = own.tables.to(device)
                layers = zip(self.bases.items(), own.plans, strict=True)
                held[device] = {
                    layer: LayerPacker(joint.basis, joint.deviations, plan, own.step, tables) for (layer, joint), plan in layers
                }
        return held[device]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_devices"}

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        found = {f"tables.{name}": tensor for name, tensor in self.quantizer.tables.tensors().items()}
        for (layer, joint), plan in zip(self.bases.items(), self.quantizer.plans, strict=True):
            found |= {f"{layer}.{name}": tensor for name, tensor in (joint.tensors() | plan.tensors()).items()}
        return found

    def metadata(self) -> dict[str, Any]:
        """All else."""
        own = self.quantizer
        shapes = {str(layer): list(joint.basis.shape) for layer, joint in self.bases.items()}
        return {"shapes": shapes, "step": own.step, "bits": own.bits, "loss": own.loss}

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> PackedForm:
        """From `tensors` and `metadata`."""
        tables = Tables(*(tensors[f"tables.{name}"] for name in ("integers", "frequencies", "sizes", "shifts")))
        tables.require_valid(TABLES)
        bases, plans = {}, []
        for layer, shape in metadata["shapes"].items():
            own = part_of(tensors, layer)
            bases[int(layer)] = JointBasis.of(shape, own)
            plans.append(Plan.of(own, len(bases[int(layer)].deviations)))
        numbers = (float(metadata[name]) for name in ("bits", "loss"))
        return cls(bases, StepQuantizer(float(metadata["step"]), tables, tuple(plans), *numbers))


def _pack(packers: Mapping[int, LayerPacker], states: Mapping[int, States], left_out: int) -> dict[int, torch.Tensor]:
    """The records of some layers, whose lanes take their steps together."""
    tokens = {layer: states[layer][0].shape[1] for layer in packers}
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
            keys, values = (side[:, block] for side in states[layer])
            coefficients = packer.coefficients(keys, values)
            coefficients[:, : max(0, left_out - block.start)] = 0
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


def _unpack(
    packers: Mapping[int, LayerPacker], parts: Sequence[SpanTiles], dtype: torch.dtype, backend: Backend
) -> tuple[list[States], torch.Tensor]:
    """Keys and values of some parts, whose lanes take their steps together, and whether their codes are whole."""
    coded, found = tiles_of(parts), []
    of_parts = [packers[part.layer] for part in parts]
    digits_of, valid = (_digits_by_triton if backend == "triton" else _digits)(coded, parts, of_parts)
    for number, (part, packer) in enumerate(zip(parts, of_parts, strict=True)):
        dims = (packer.shape.key_dim, packer.shape.value_dim)
        sides = [coded.states.new_empty(packer.shape.heads, part.tokens, dim, dtype=dtype) for dim in dims]
        for block in _blocks(part.tokens, coded.states.device):
            digits = digits_of(number, slice(block.start // TILE, -(-block.stop // TILE)))
            for side, states in zip(sides, packer.states(_out_of_lanes(digits, block.stop - block.start)), strict=True):
                side[:, block] = states
        found.append((sides[0][:, part.wanted], sides[1][:, part.wanted]))
    return found, valid


DigitsOf = Callable[[int, slice], torch.Tensor]
"""From the number of a part and some of its tiles to the digits of their tokens."""


def _digits(coded: CodedTiles, parts: Sequence[SpanTiles], packers: Sequence[LayerPacker]) -> tuple[DigitsOf, torch.Tensor]:
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


def _digits_by_triton(coded: CodedTiles, parts: Sequence[SpanTiles], packers: Sequence[LayerPacker]) -> tuple[DigitsOf, torch.Tensor]:
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


def _elements(bases: Mapping[int, JointBasis]) -> int:
    return sum(joint.basis.shape.elements for joint in bases.values())
