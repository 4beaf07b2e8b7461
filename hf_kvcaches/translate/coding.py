"""Coefficients as entropy-coded records: what translators share with `KVCodec`.

The coefficients of all codes of a translator have one step, because their errors cost the same. To the codec a code is a layer whose basis
is the identity: coefficients in steps are its keys, and one unused number is its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from hf_kvcaches.codec.basis import Basis
from hf_kvcaches.codec.joint import JointBasis, PackedForm
from hf_kvcaches.codec.packing import Span
from hf_kvcaches.codec.rates import Sample, fit
from hf_kvcaches.codec.shape import Shape

_TINY, _LARGEST = 1e-30, float(2**15 - 1)


@dataclass(frozen=True, eq=False)
class Coding:
    """How the coefficients of all codes become records.

    Args:
        form: Of coefficients in steps.
        step: Of all coefficients.
        orders: Of each code the directions that are sent, in the order of its coefficients.
    """

    form: PackedForm
    step: float
    orders: tuple[torch.Tensor, ...]

    @classmethod
    def fit(cls, samples: Sequence[torch.Tensor], bits: float) -> Self:
        """The coding that takes so many bits of a token in all codes.

        Args:
            samples: Coefficients, (tokens, directions) for each code.
        """
        deviations, parts = [own.square().mean(0).sqrt().clamp_min(_TINY) for own in samples], []
        for own, sizes in zip(samples, deviations, strict=True):
            order = sizes.argsort(descending=True, stable=True)
            parts.append(Sample(order, sizes[order], (own / sizes)[:, order].T.contiguous()))
        quantizer = fit(parts, bits)
        orders = tuple(plan.order for plan in quantizer.plans)
        bases = {code: _identity(deviations[code][order] / quantizer.step) for code, order in enumerate(orders)}
        plans = tuple(replace(plan, order=torch.arange(len(plan.order))) for plan in quantizer.plans)
        return cls(PackedForm(bases, replace(quantizer, step=1.0, plans=plans)), quantizer.step, orders)

    @property
    def bits(self) -> float:
        """Of a token in all codes, expected."""
        return self.form.quantizer.bits

    def directions(self, code: int) -> torch.Tensor:
        """The directions of a code that are sent, in the order of its coefficients."""
        return self.orders[code]

    def integers(self, code: int, steps: torch.Tensor) -> torch.Tensor:
        """Coefficients in steps, (tokens, directions), as they are packed; what is no number counts as 0. Nothing waits for the device."""
        return steps.nan_to_num(0.0, _LARGEST, -_LARGEST).clamp(-_LARGEST, _LARGEST)

    def steps(self, code: int, integers: torch.Tensor) -> torch.Tensor:
        """Return what is decoded of coefficients in steps, (tokens, directions)."""
        return self.unpack(self.pack({code: integers}))[code]

    def only(self, codes: Sequence[int]) -> Self:
        """The coding of some of the codes, numbered anew."""
        bases = {number: self.form.bases[code] for number, code in enumerate(codes)}
        plans = tuple(self.form.quantizer.plans[code] for code in codes)
        form = PackedForm(bases, replace(self.form.quantizer, plans=plans))
        return replace(self, form=form, orders=tuple(self.orders[code] for code in codes))

    def pack(self, integers: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the record of each code, (bytes,), uint8, on the device of its coefficients."""
        return self.form.pack({code: (own[None], own.new_zeros(1, len(own), 1)) for code, own in integers.items()})

    def unpack(self, records: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return coefficients in steps, (tokens, directions), float32, of records on one device; others are an `ArtifactError`."""
        states = self.form.unpack([Span(*record) for record in records.items()])
        return {code: keys[0] for code, (keys, _) in zip(records, states, strict=True)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        found = {f"tables.{name}": tensor for name, tensor in self.form.quantizer.tables.tensors().items()}
        for code, plan in enumerate(self.form.quantizer.plans):
            sizes = self.form.bases[code].deviations[:-1]
            found |= {f"{code}.{name}": tensor for name, tensor in (plan.tensors() | {"deviations": sizes}).items()}
        return found

    def metadata(self) -> dict[str, Any]:
        """All else, as JSON values."""
        own = self.form.quantizer
        return {"step": self.step, "bits": own.bits, "loss": own.loss, "codes": len(own.plans)}

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> Self:
        """From `tensors` and `metadata`."""
        bases, found = {code: _identity(tensors[f"{code}.deviations"]) for code in range(metadata["codes"])}, dict(tensors)
        for code, basis in bases.items():
            found |= {f"{code}.{name}": tensor for name, tensor in basis.tensors().items()}
        shapes = {str(code): list(basis.basis.shape) for code, basis in bases.items()}
        form = PackedForm.restore(found, {"shapes": shapes, "step": 1.0, "bits": metadata["bits"], "loss": metadata["loss"]})
        return cls(form, float(metadata["step"]), tuple(plan.order for plan in form.quantizer.plans))


def _identity(deviations: torch.Tensor) -> JointBasis:
    """A basis in which coefficients are what they are; the last one is not used."""
    size = len(deviations) + 1
    basis = Basis.rounded(Shape(1, size - 1, 1), torch.zeros(1, size), torch.eye(size, dtype=torch.float64)[None])
    return JointBasis(basis, torch.cat([deviations.float(), torch.full((1,), _TINY)]), torch.zeros(0, size, dtype=torch.float16))
