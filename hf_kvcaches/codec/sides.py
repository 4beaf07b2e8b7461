"""The calibrated part of a codec: for each layer and side a transform, quantisers, and the bits of each direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.errors import ArtifactError

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 16, 24)
"""The bits that a direction can have; 0 besides."""
EXACT = 4
"""First tokens of a text that caches keep exactly: they are unlike all others."""
_TENSORS = ("mean", "encode", "energies", "tails", "steps", "distortions", "widths")


@dataclass(frozen=True, eq=False)
class CalibratedSide:
    """The keys, or the values, of one layer: all tensors on the CPU and float32, but for the widths.

    A vector x has the coefficients `encode @ (x - mean)`. That of a direction with `w` bits is kept as the code
    `floor(coefficient / step) + 2^(w - 1)`, clipped to w bits.

    Args:
        mean: (kv_heads, d).
        encode: (kv_heads, d, d); the directions with the largest coefficients first.
        energies: Mean squares of the coefficients, (kv_heads, d).
        tails: What one token in twenty has behind the first so many directions, as a share of its energy, (kv_heads, 1 + d).
        steps: (kv_heads, d, widths), for each of `WIDTHS`.
        distortions: What is lost of a direction at 0 bits and at each of `WIDTHS`, (kv_heads, d, 1 + widths). With the metric "loss" these
            are twice the divergence of a token's prediction, with "attention" squared errors of the layer's output.
        widths: Bits of each direction, (kv_heads, d), uint8.
    """

    mean: torch.Tensor
    encode: torch.Tensor
    energies: torch.Tensor
    tails: torch.Tensor
    steps: torch.Tensor
    distortions: torch.Tensor
    widths: torch.Tensor

    @cached_property
    def decode(self) -> torch.Tensor:
        """The inverse of `encode`, (kv_heads, d, d), float64."""
        return torch.linalg.inv(self.encode.double())

    @property
    def shape(self) -> tuple[int, int]:
        """KV heads and the dimensions of each."""
        return self.mean.shape[0], self.mean.shape[1]

    @property
    def chosen_steps(self) -> torch.Tensor:
        """The step of each direction at its width, (kv_heads, d); any where it has no bits."""
        return self.steps.gather(-1, self._places[..., None].sub(1).clamp(min=0))[..., 0]

    @property
    def chosen_distortions(self) -> torch.Tensor:
        """What is lost of each direction at its width, as a share of its energy, (kv_heads, d)."""
        lost = self.distortions.double()
        chosen = lost.gather(-1, self._places[..., None])[..., 0]
        return torch.where(lost[..., 0] > 0, chosen / lost[..., 0].clamp_min(torch.finfo(torch.float64).tiny), 0.0)

    @property
    def _places(self) -> torch.Tensor:
        """Which of the distortions is that of each direction's width, (kv_heads, d)."""
        places = torch.zeros(max(WIDTHS) + 1, dtype=torch.int64)
        places[list(WIDTHS)] = torch.arange(1, 1 + len(WIDTHS))
        return places[self.widths.long()]

    @property
    def kept(self) -> float:
        """The share of the energy in directions that have bits."""
        energies = self.distortions[..., 0].double()
        whole = float(energies.sum())
        return float(energies[self.widths > 0].sum()) / whole if whole else 1.0

    def with_widths(self, widths: torch.Tensor) -> CalibratedSide:
        """The same with other bits, (kv_heads, d)."""
        return replace(self, widths=widths.to(torch.uint8))

    def of_heads(self, shard: HeadShard) -> CalibratedSide:
        """The heads that a process has under tensor parallelism."""
        return replace(self, **{name: shard.own(tensor) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        return {name: getattr(self, name) for name in _TENSORS}

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], where: str) -> CalibratedSide:
        """From `tensors`, if they fit each other.

        Args:
            where: In which part of an artifact, for the error.
        """
        side = cls(*(tensors[name] for name in _TENSORS))
        heads, dim = side.shape
        own = (heads, dim)
        shapes = (own, (*own, dim), own, (heads, 1 + dim), (*own, len(WIDTHS)), (*own, 1 + len(WIDTHS)), own)
        known = torch.tensor([0, *WIDTHS])
        fits = all(tensors[name].shape == shape for name, shape in zip(_TENSORS, shapes, strict=True))
        if not fits or side.widths.dtype != torch.uint8 or not bool(torch.isin(side.widths.long(), known).all()):
            raise ArtifactError(f"{where}*: its tensors don't fit each other. Calibrate anew.")
        return side


class CalibratedLayer(NamedTuple):
    """Both sides of a layer."""

    keys: CalibratedSide
    values: CalibratedSide

    @property
    def elements(self) -> int:
        """Numbers of a token's exact keys and values."""
        return self.keys.mean.numel() + self.values.mean.numel()

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        sides = (("keys", self.keys), ("values", self.values))
        return {f"{kind}.{name}": tensor for kind, side in sides for name, tensor in side.tensors().items()}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], where: str) -> CalibratedLayer | None:
        """From `tensors`, under a prefix, if they fit each other; None where there are none."""
        keys, values = (
            {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            for prefix in (f"{where}keys.", f"{where}values.")
        )
        if not keys and not values:
            return None
        sides = (CalibratedSide.of(own, f"{where}{kind}.") if own else None for kind, own in (("keys", keys), ("values", values)))
        key_side, value_side = sides
        if key_side is None or value_side is None or len(key_side.mean) != len(value_side.mean):
            raise ArtifactError(f"{where}*: keys and values don't fit each other. Calibrate anew.")
        return cls(key_side, value_side)
