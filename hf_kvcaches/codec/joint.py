"""The packed form of a codec: one basis for keys and values of all heads of a layer, one step for the whole model, entropy coded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_kvcaches.codec.entropy import Tables
from hf_kvcaches.codec.moments import Basis, LayerStatistics, Maker, States
from hf_kvcaches.codec.packing import CoefficientPacker, Span, pack, unpack
from hf_kvcaches.codec.plan import TABLES, Plan, Sample, StepQuantizer, fit
from hf_kvcaches.core.files import part_of
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.launch import Backend

# Numbers of all layers of which an artifact keeps a sample, to choose steps and tables from.
_SAMPLED = 1 << 22
_TINY = 1e-30
# Shares of the bytes between which integers have at most 16 bits.
_LEAST_RATIO, _LARGEST_RATIO = 0.005, 0.75


@dataclass(frozen=True, eq=False)
class JointBasis(Basis):
    """The transform of a layer, and coefficients of some tokens."""

    deviations: torch.Tensor  # of the coefficients, (groups * size,), float32
    sample: torch.Tensor  # coefficients in deviations, (tokens, groups * size), float16

    @classmethod
    def fit(cls, statistics: LayerStatistics, layers: int) -> JointBasis:
        basis, coefficients = statistics.basis()
        coefficients = coefficients.transpose(0, 1).flatten(1)
        deviations = coefficients.square().mean(0).sqrt().clamp_min(_TINY)
        sample = (coefficients / deviations)[: max(1, _SAMPLED // (layers * coefficients.shape[1]))]
        return cls(**vars(basis), deviations=deviations.float().cpu(), sample=sample.half().cpu().contiguous())

    def sorted(self) -> Sample:
        """The sample with the largest deviations first."""
        order = self.deviations.argsort(descending=True, stable=True)
        return Sample(order, self.deviations[order], self.sample[:, order].T.float().contiguous())

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return super().sizes() | {"deviations": (self.shape.elements,), "sample": (len(self.sample), self.shape.elements)}


class LayerPacker(CoefficientPacker):
    """What packs one layer on a device: keys and values, their coefficients in steps, and records of these."""

    def __init__(self, basis: JointBasis, plan: Plan, step: float, tables: Tables) -> None:
        super().__init__(plan, basis.deviations[plan.order] / step, tables)
        device, self.shape, size = tables.shifts.device, basis.shape, basis.shape.size
        # Of each group: which integers are its own, offsets and rows to encode with, the mean and columns to decode with.
        self._groups = list[list[torch.Tensor]]()
        for group, (mean, transform, inverse) in enumerate(zip(basis.mean.double(), basis.transform, basis.inverse, strict=True)):
            own = (plan.integers // size == group).nonzero()[:, 0]
            rows, columns = transform[plan.integers[own] % size] / step, inverse[:, plan.integers[own] % size] * step
            parts = (-rows @ mean)[:, None], rows, mean, columns.T
            self._groups.append([own.to(device), *(part.float().contiguous().to(device) for part in parts)])
        self._order = torch.cat([own for own, *_ in self._groups]).argsort()

    def transformed(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """In steps, (integers, tokens)."""
        vectors = self.shape.join(keys, values, torch.float32)
        parts = [torch.addmm(offset, rows, own.T) for (_, offset, rows, *_), own in zip(self._groups, vectors, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts).index_select(0, self._order)

    def states(self, digits: torch.Tensor) -> States:
        """Keys and values, float32, of what digits stand for, (digits, tokens)."""
        coefficients, one = self.coefficients(digits), len(self._groups) == 1
        parts = [(coefficients if one else coefficients.index_select(0, own), *decode) for own, _, _, *decode in self._groups]
        return self.shape.split(torch.stack([torch.addmm(mean, own.T, columns) for own, mean, columns in parts]))


@dataclass(frozen=True, eq=False)
class PackedForm(Maker):
    """How all layers are packed: their bases, and a quantizer whose plans are in the order of these."""

    bases: Mapping[int, JointBasis]
    quantizer: StepQuantizer

    @classmethod
    def fit(cls, bases: Mapping[int, JointBasis], bytes_ratio: float) -> PackedForm:
        """The form that takes a share of the bytes of keys and values in 16 bits, or as near to it as integers of 16 bits come."""
        ratio = min(max(bytes_ratio, _LEAST_RATIO), _LARGEST_RATIO)
        return cls(bases, fit([basis.sorted() for basis in bases.values()], ratio * 16 * _elements(bases)))

    def at(self, bytes_ratio: float) -> PackedForm:
        return self.fit(self.bases, bytes_ratio)

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
        own, plans = self.quantizer, []
        bases = {layer: basis.of_heads(shard) for layer, basis in self.bases.items()}
        for basis, plan in zip(bases.values(), own.plans, strict=True):
            order = plan.order - shard.rank * basis.shape.elements
            order = order[(order >= 0) & (order < basis.shape.elements)]
            plans.append(Plan.of_deviations(order, basis.deviations[order] / own.step))
        return PackedForm(bases, own._replace(plans=tuple(plans), bits=own.bits / shard.size, loss=own.loss / shard.size))

    def pack(self, states: Mapping[int, States], left_out: int = 0) -> dict[int, torch.Tensor]:
        """Records, (bytes,) uint8 on the device of each layer's states, by layer; first tokens that are left out are coded as the mean."""
        records: dict[int, torch.Tensor] = {}
        for layer, (keys, values) in states.items():
            if layer not in self.bases:
                raise ConfigError.of("keys", f"layers of {sorted(self.bases)}", f"layer {layer}")
            shape, got = self.bases[layer].shape, [tuple(keys.shape), tuple(values.shape)]
            if got != [(shape.heads, keys.shape[1], dim) for dim in (shape.key_dim, shape.value_dim)]:
                raise ConfigError.of(f"layer {layer}", f"keys and values of {shape}, of the same tokens", got)

        def coefficients_of(layer: int, tokens: slice) -> torch.Tensor:
            keys, values = (side[:, tokens] for side in states[layer])
            coefficients = self._packers(keys.device)[layer].transformed(keys, values)
            coefficients[:, : max(0, left_out - tokens.start)] = 0
            return coefficients

        for device in {keys.device for keys, _ in states.values()}:
            tokens = {layer: keys.shape[1] for layer, (keys, _) in states.items() if keys.device == device}
            records |= pack(self._packers(device), tokens, coefficients_of)
        return records

    def unpack(self, spans: Sequence[Span], dtype: torch.dtype = torch.float32, backend: Backend = "auto") -> list[States]:
        """Keys and values of spans of records from `pack`, on one device; anything but records is an `ArtifactError`."""
        packers, found = self._packers(spans[0].data.device) if spans else {}, list[States]()
        for part, digits in unpack(packers, spans, backend):
            keys, values = (side[:, part.wanted].to(dtype).contiguous() for side in packers[part.layer].states(digits))
            found.append((keys, values))
        return found

    def _packers(self, device: torch.device) -> dict[int, LayerPacker]:
        if device not in self._made:
            with torch.inference_mode(False), torch.no_grad():
                own = self.quantizer
                layers, tables = zip(self.bases.items(), own.plans, strict=True), own.tables.to(device)
                self._made[device] = {layer: LayerPacker(basis, plan, own.step, tables) for (layer, basis), plan in layers}
        return self._made[device]

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"tables.{name}": tensor for name, tensor in self.quantizer.tables.tensors().items()}
        for (layer, basis), plan in zip(self.bases.items(), self.quantizer.plans, strict=True):
            found |= {f"{layer}.{name}": tensor for name, tensor in (basis.tensors() | plan.tensors()).items()}
        return found

    def metadata(self) -> dict[str, Any]:
        own, shapes = self.quantizer, {str(layer): list(basis.shape) for layer, basis in self.bases.items()}
        return {"shapes": shapes, "step": own.step, "bits": own.bits, "loss": own.loss}

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> PackedForm:
        tables = Tables(**part_of(tensors, "tables"))
        tables.require_valid(TABLES)
        bases = {int(layer): JointBasis.of(shape, part_of(tensors, layer)) for layer, shape in metadata["shapes"].items()}
        plans = tuple(Plan.of(part_of(tensors, str(layer)), len(basis.deviations)) for layer, basis in bases.items())
        step, bits, loss = (float(metadata[name]) for name in ("step", "bits", "loss"))
        return cls(bases, StepQuantizer(step, tables, plans, bits, loss))


def _elements(bases: Mapping[int, JointBasis]) -> int:
    return sum(basis.shape.elements for basis in bases.values())
