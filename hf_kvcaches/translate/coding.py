"""Coefficients of a translator's codes as entropy-coded records, by the codec's packer without a transform of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from hf_kvcaches.codec.coefficients import CoefficientPacker, pack, unpack
from hf_kvcaches.codec.entropy import Tables
from hf_kvcaches.codec.packing import Span
from hf_kvcaches.codec.plan import TABLES, Plan, Sample, fit
from hf_kvcaches.core.files import part_of
from hf_kvcaches.errors import ArtifactError

_TINY, _LARGEST = 1e-30, float(2**15 - 1)
# Directions that take fewer bits are worth less than these bits, and each costs time in every token.
_LEAST_BITS = 0.2


@dataclass(frozen=True, eq=False)
class Coding:
    """How the coefficients of all codes become records. All have one step, because their errors cost the same.

    Args:
        tables: Of all codes.
        plans: Of each code; the order of its directions is that of its deviations.
        deviations: Of each code, in steps, in the order of its plan.
        bits: Of a token in all codes, expected.
    """

    tables: Tables
    plans: tuple[Plan, ...]
    deviations: tuple[torch.Tensor, ...]
    bits: float

    @classmethod
    def fit(cls, samples: Sequence[torch.Tensor], bits: float) -> tuple[Self, float, list[torch.Tensor]]:
        """Return the coding that takes so many bits of a token in all codes, its step, and the directions of each code that are sent.

        Args:
            samples: Coefficients, (tokens, directions) for each code.
        """
        sorted_samples, sizes = [], [own.square().mean(0).sqrt().clamp_min(_TINY) for own in samples]
        for own, size in zip(samples, sizes, strict=True):
            order = size.argsort(descending=True, stable=True)
            sorted_samples.append(Sample(order, size[order], (own / size)[:, order].T.contiguous()))
        quantizer = fit(sorted_samples, bits, _LEAST_BITS)
        plans = tuple(replace(plan, order=torch.arange(len(plan.order))) for plan in quantizer.plans)
        deviations = tuple(size[plan.order] / quantizer.step for size, plan in zip(sizes, quantizer.plans, strict=True))
        return cls(quantizer.tables, plans, deviations, quantizer.bits), quantizer.step, [plan.integers for plan in quantizer.plans]

    def only(self, codes: Sequence[int]) -> Self:
        """The coding of some of the codes, numbered anew."""
        return replace(self, plans=tuple(self.plans[code] for code in codes), deviations=tuple(self.deviations[code] for code in codes))

    def pack(self, steps: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the record of each code, (bytes,), uint8, on the device of its coefficients; what is no number counts as 0.

        Args:
            steps: Coefficients in steps, (tokens, directions), by code.
        """
        records: dict[int, torch.Tensor] = {}
        for device in {own.device for own in steps.values()}:
            tokens = {code: len(own) for code, own in steps.items() if own.device == device}
            records |= pack(self._on(device), tokens, lambda code, block: _bounded(steps[code][block].T))
        return records

    def unpack(self, records: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return coefficients in steps, (tokens, directions), float32, of records on one device; others are an `ArtifactError`."""
        found: dict[int, torch.Tensor] = {}
        packers = {} if not records else self._on(next(iter(records.values())).device)
        for part, digits in unpack(packers, [Span(*record) for record in records.items()]):
            found[part.layer] = packers[part.layer].coefficients(digits).T
        return found

    def rounded(self, code: int, steps: torch.Tensor) -> torch.Tensor:
        """Return what is decoded of coefficients in steps, (tokens, directions)."""
        return self.unpack(self.pack({code: steps}))[code]

    def _on(self, device: torch.device) -> dict[int, CoefficientPacker]:
        packers: dict[torch.device, dict[int, CoefficientPacker]] = self.__dict__.setdefault("_packers", {})
        if device not in packers:
            with torch.inference_mode(False), torch.no_grad():
                tables, parts = self.tables.to(device), zip(self.plans, self.deviations, strict=True)
                packers[device] = {code: CoefficientPacker(*part, tables) for code, part in enumerate(parts)}
        return packers[device]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_packers"}

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"tables.{name}": tensor for name, tensor in self.tables.tensors().items()}
        for code, (plan, deviations) in enumerate(zip(self.plans, self.deviations, strict=True)):
            found |= {f"{code}.{name}": tensor for name, tensor in (plan.tensors() | {"deviations": deviations}).items()}
        return found

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], codes: int, bits: float) -> Self:
        tables = Tables(**part_of(tensors, "tables"))
        tables.require_valid(TABLES)
        parts = [part_of(tensors, str(code)) for code in range(codes)]
        deviations = tuple(part["deviations"] for part in parts)
        plans = tuple(Plan.of(part, len(own)) for part, own in zip(parts, deviations, strict=True))
        if any(own.shape != plan.order.shape for own, plan in zip(deviations, plans, strict=True)):
            raise ArtifactError("The deviations of a code don't fit its directions. Fit the translator anew.")
        return cls(tables, plans, deviations, bits)


def _bounded(steps: torch.Tensor) -> torch.Tensor:
    return steps.nan_to_num(0.0, _LARGEST, -_LARGEST).clamp_(-_LARGEST, _LARGEST)
