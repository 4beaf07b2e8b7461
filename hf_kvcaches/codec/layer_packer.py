"""What packs one layer on a device: between its keys and values, their coefficients in steps, and records of these."""

from __future__ import annotations

import torch

from hf_kvcaches.codec.basis import Basis
from hf_kvcaches.codec.coefficients import CoefficientPacker
from hf_kvcaches.codec.entropy import Tables
from hf_kvcaches.codec.plan import Plan
from hf_kvcaches.codec.shape import States


class LayerPacker(CoefficientPacker):
    """One layer on a device.

    Args:
        deviations: Of the coefficients of all directions.
        step: Of all coefficients.
    """

    def __init__(self, basis: Basis, deviations: torch.Tensor, plan: Plan, step: float, tables: Tables) -> None:
        super().__init__(plan, deviations[plan.order] / step, tables)
        device, split, size = tables.shifts.device, plan.split, basis.shape.size
        self.shape = basis.shape
        of_integers = plan.integers
        of_digits = torch.cat([plan.order[:split], of_integers])
        # Integers without their low bits count as many steps more.
        scales = torch.cat([torch.ones(split), 2.0**plan.low_bits, torch.ones(len(of_integers) - split)]).double() * step
        self._encode, self._decode, self._integers, self._digits = [], [], [], []
        for group, (mean, transform, inverse) in enumerate(zip(basis.mean.double(), basis.transform, basis.inverse, strict=True)):
            integers, digits = ((own // size == group).nonzero()[:, 0] for own in (of_integers, of_digits))
            rows = transform[of_integers[integers] % size] / step
            columns = inverse[:, of_digits[digits] % size] * scales[digits]
            self._encode.append(((-rows @ mean)[:, None].float().to(device), rows.float().to(device)))
            self._decode.append((mean.float().to(device), columns.T.float().contiguous().to(device)))
            self._integers.append(integers.to(device))
            self._digits.append(digits.to(device))

    def transformed(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """In steps, (integers, tokens)."""
        vectors = self.shape.join(keys, values, torch.float32)
        parts = [torch.addmm(offset, rows, own.T) for (offset, rows), own in zip(self._encode, vectors, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts).index_select(0, torch.cat(self._integers).argsort())

    def states(self, digits: torch.Tensor) -> States:
        """Keys and values, float32, of what digits stand for, (digits, tokens)."""
        parts = [digits] if len(self._decode) == 1 else [digits.index_select(0, own) for own in self._digits]
        return self.shape.split(
            torch.stack([torch.addmm(mean, own.T, rows) for (mean, rows), own in zip(self._decode, parts, strict=True)])
        )
