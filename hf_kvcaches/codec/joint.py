"""The packed form of a codec: one basis for keys and values of all heads of a layer, one step for the whole model, entropy coded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_kvcaches.codec.basis import Basis
from hf_kvcaches.codec.coefficients import pack, unpack
from hf_kvcaches.codec.entropy import Tables
from hf_kvcaches.codec.layer_packer import LayerPacker
from hf_kvcaches.codec.packing import Span, SpanTiles
from hf_kvcaches.codec.plan import TABLES, Plan
from hf_kvcaches.codec.rates import Sample, StepQuantizer, fit
from hf_kvcaches.codec.shape import States
from hf_kvcaches.codec.statistics import LayerStatistics
from hf_kvcaches.core.files import part_of
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.errors import ArtifactError
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
        for device in {keys.device for keys, _ in states.values()}:
            packers = self._on(device)

            def coefficients_of(layer: int, block: slice, packers: Mapping[int, LayerPacker] = packers) -> torch.Tensor:
                keys, values = (side[:, block] for side in states[layer])
                coefficients = packers[layer].transformed(keys, values)
                coefficients[:, : max(0, left_out - block.start)] = 0
                return coefficients

            tokens = {layer: keys.shape[1] for layer, (keys, _) in states.items() if keys.device == device}
            records |= pack(packers, tokens, coefficients_of)
        return records

    def unpack(self, spans: Sequence[Span], dtype: torch.dtype = torch.float32, backend: Backend = "auto") -> list[States]:
        """Keys and values of spans; anything but records is an `ArtifactError`.

        Args:
            spans: Of records from `pack`, on one device; of any layers.
            backend: "triton": one launch for many records; "torch": many operations; "auto": Triton for CUDA tensors.
        """
        if not spans:
            return []
        packers, found = self._on(spans[0].data.device), list[tuple[SpanTiles, list[torch.Tensor]]]()
        for part, block, digits in unpack(packers, spans, backend):
            if not block.start:
                heads, *dims, _ = packers[part.layer].shape
                found.append((part, [digits.new_empty(heads, part.tokens, dim, dtype=dtype) for dim in dims]))
            for side, states in zip(found[-1][1], packers[part.layer].states(digits), strict=True):
                side[:, block] = states
        return [(keys[:, part.wanted], values[:, part.wanted]) for part, (keys, values) in found]

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


def _elements(bases: Mapping[int, JointBasis]) -> int:
    return sum(joint.basis.shape.elements for joint in bases.values())
