"""The packed form of a codec: one basis for keys and values of all heads of a layer, one step for the whole model, entropy coded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_kvcaches.codec.basis import Basis, Maker, States, in_shapes
from hf_kvcaches.codec.coefficients import CoefficientPacker, pack, unpack
from hf_kvcaches.codec.entropy import Tables
from hf_kvcaches.codec.packing import Span
from hf_kvcaches.codec.plan import TABLES, Plan, Sample, StepQuantizer, fit
from hf_kvcaches.codec.statistics import LayerStatistics
from hf_kvcaches.core.files import part_of
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.kernels.launch import Backend

# Numbers of all layers of which an artifact keeps a sample, to choose steps and tables from.
_SAMPLED = 1 << 22
_TINY = 1e-30
# Shares of the bytes between which integers have at most 16 bits.
_LEAST_RATIO, _LARGEST_RATIO = 0.005, 0.75


@dataclass(frozen=True, eq=False)
class JointBasis:
    """The transform of a layer, and coefficients of some tokens.

    Args:
        deviations: Of the coefficients, (groups * size,), float32.
        sample: Coefficients in deviations, (tokens, groups * size), float16.
    """

    basis: Basis
    deviations: torch.Tensor
    sample: torch.Tensor

    @classmethod
    def fit(cls, statistics: LayerStatistics, layers: int) -> JointBasis:
        basis, coefficients = statistics.basis()
        coefficients = coefficients.transpose(0, 1).flatten(1)
        deviations = coefficients.square().mean(0).sqrt().clamp_min(_TINY)
        sample = (coefficients / deviations)[: max(1, _SAMPLED // (layers * coefficients.shape[1]))]
        return cls(basis, deviations.float().cpu(), sample.half().cpu().contiguous())

    def sorted(self) -> Sample:
        """The sample with the largest deviations first."""
        order = self.deviations.argsort(descending=True, stable=True)
        return Sample(order, self.deviations[order], self.sample[:, order].T.float().contiguous())

    def directions_of(self, shard: HeadShard) -> slice:
        """The directions of the heads that a process has under tensor parallelism."""
        groups, size = self.basis.groups_of(shard), self.basis.shape.size
        return slice(groups.start * size, groups.stop * size)

    def of_heads(self, shard: HeadShard) -> JointBasis:
        own = self.directions_of(shard)
        return JointBasis(self.basis.of_heads(shard), self.deviations[own], self.sample[:, own])

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.basis.tensors() | {"deviations": self.deviations, "sample": self.sample}

    @classmethod
    def of(cls, sizes: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> JointBasis:
        basis = Basis.of(sizes, tensors)
        numbers = basis.shape.elements
        return cls(basis, *in_shapes(tensors, deviations=(numbers,), sample=(len(tensors["sample"]), numbers)))


class LayerPacker(CoefficientPacker):
    """What packs one layer on a device: between its keys and values, their coefficients in steps, and records of these."""

    def __init__(self, joint: JointBasis, plan: Plan, step: float, tables: Tables) -> None:
        super().__init__(plan, joint.deviations[plan.order] / step, tables)
        basis, device, split = joint.basis, tables.shifts.device, plan.split
        self.shape, size = basis.shape, basis.shape.size
        of_digits = torch.cat([plan.order[:split], plan.integers])
        # Integers without their low bits count as many steps more.
        scales = torch.cat([torch.ones(split), 2.0**plan.low_bits, torch.ones(len(plan.order) - split)]).double() * step
        self._encode, self._decode, self._digits, places = [], [], [], []
        for group, (mean, transform, inverse) in enumerate(zip(basis.mean.double(), basis.transform, basis.inverse, strict=True)):
            integers, digits = ((own // size == group).nonzero()[:, 0] for own in (plan.integers, of_digits))
            rows = transform[plan.integers[integers] % size] / step
            columns = inverse[:, of_digits[digits] % size] * scales[digits]
            self._encode.append([own.float().to(device) for own in ((-rows @ mean)[:, None], rows)])
            self._decode.append([own.float().contiguous().to(device) for own in (mean, columns.T)])
            self._digits.append(digits.to(device))
            places.append(integers)
        self._order = torch.cat(places).argsort().to(device)

    def transformed(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """In steps, (integers, tokens)."""
        vectors = self.shape.join(keys, values, torch.float32)
        parts = [torch.addmm(offset, rows, own.T) for (offset, rows), own in zip(self._encode, vectors, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts).index_select(0, self._order)

    def states(self, digits: torch.Tensor) -> States:
        """Keys and values, float32, of what digits stand for, (digits, tokens)."""
        parts = [digits] if len(self._decode) == 1 else [digits.index_select(0, own) for own in self._digits]
        vectors = [torch.addmm(mean, own.T, rows) for (mean, rows), own in zip(self._decode, parts, strict=True)]
        return self.shape.split(torch.stack(vectors))


@dataclass(frozen=True, eq=False)
class PackedForm(Maker):
    """How all layers are packed: their bases, and a quantizer whose plans are in the order of these."""

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
            bases[layer], directions = joint.of_heads(shard), joint.directions_of(shard)
            order = plan.order[(plan.order >= directions.start) & (plan.order < directions.stop)] - directions.start
            plans.append(Plan.of_deviations(order, bases[layer].deviations[order] / own.step))
        return PackedForm(bases, replace(own, plans=tuple(plans), bits=own.bits / shard.size, loss=own.loss / shard.size))

    def pack(self, states: Mapping[int, States], left_out: int = 0) -> dict[int, torch.Tensor]:
        """Records, (bytes,) uint8 on the device of each layer's states, by layer; first tokens that are left out are coded as the mean."""
        records: dict[int, torch.Tensor] = {}
        for device in {keys.device for keys, _ in states.values()}:
            packers = self._packers(device)

            def coefficients_of(layer: int, tokens: slice, packers: Mapping[int, LayerPacker] = packers) -> torch.Tensor:
                keys, values = (side[:, tokens] for side in states[layer])
                coefficients = packers[layer].transformed(keys, values)
                coefficients[:, : max(0, left_out - tokens.start)] = 0
                return coefficients

            records |= pack(
                packers, {layer: keys.shape[1] for layer, (keys, _) in states.items() if keys.device == device}, coefficients_of
            )
        return records

    def unpack(self, spans: Sequence[Span], dtype: torch.dtype = torch.float32, backend: Backend = "auto") -> list[States]:
        """Keys and values of spans; anything but records is an `ArtifactError`.

        Args:
            spans: Of records from `pack`, on one device; of any layers.
            backend: "triton": one launch for many records; "torch": many operations; "auto": Triton for CUDA tensors.
        """
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
                self._made[device] = {layer: LayerPacker(joint, plan, own.step, tables) for (layer, joint), plan in layers}
        packers: dict[int, LayerPacker] = self._made[device]
        return packers

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"tables.{name}": tensor for name, tensor in self.quantizer.tables.tensors().items()}
        for (layer, joint), plan in zip(self.bases.items(), self.quantizer.plans, strict=True):
            found |= {f"{layer}.{name}": tensor for name, tensor in (joint.tensors() | plan.tensors()).items()}
        return found

    def metadata(self) -> dict[str, Any]:
        own = self.quantizer
        shapes = {str(layer): list(joint.basis.shape) for layer, joint in self.bases.items()}
        return {"shapes": shapes, "step": own.step, "bits": own.bits, "loss": own.loss}

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> PackedForm:
        tables = Tables(**part_of(tensors, "tables"))
        tables.require_valid(TABLES)
        bases, plans = {}, []
        for layer, shape in metadata["shapes"].items():
            own = part_of(tensors, layer)
            bases[int(layer)] = JointBasis.of(shape, own)
            plans.append(Plan.of(own, len(bases[int(layer)].deviations)))
        step, bits, loss = (float(metadata[name]) for name in ("step", "bits", "loss"))
        return cls(bases, StepQuantizer(step, tables, tuple(plans), bits, loss))


def _elements(bases: Mapping[int, JointBasis]) -> int:
    return sum(joint.basis.shape.elements for joint in bases.values())
