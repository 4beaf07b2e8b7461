"""Quantization of coefficients: a calibrated step and width for each direction, and a gain of four bits for each token and part.

With the gain, rare tokens, whose coefficients are several times as large as most tokens', have the same relative precision as the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hf_kvcaches.codec.allocation import allot
from hf_kvcaches.codec.quantizers import quantizers
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.kernels.code_format import WIDTHS, CodeLayout, packed_bytes

# A gain is 2 ** (0.4 * (code - 6)), from a fifth of the mean size of a token to 12 times as much. It is packed like a coefficient with the
# step 1, of which 4 bits stand for -7.5 to 7.5.
_GAIN_BITS, _GAIN_STEP, _GAIN_MIDDLE = 4, 0.4, 6 - 7.5
# The size of a token is that of its strongest directions; weak ones are noise.
_GAIN_DIRECTIONS = 64
# From so many bits on, no coefficient of the sample is clipped.
_UNCLIPPED_BITS = 4
_TINY = 1e-20


@dataclass(frozen=True, eq=False)
class Quantizer:
    """Quantizes the coefficients of a part.

    Args:
        steps: The step of each direction at gain 1, (rank,), float32.
        widths: Bits of each direction, (rank,), uint8, above 0.
        sizes: Root mean square of each direction, by which gains are chosen, (rank,), float32.
    """

    steps: torch.Tensor
    widths: torch.Tensor
    sizes: torch.Tensor

    def __post_init__(self) -> None:
        shapes = {part.shape for part in (self.steps, self.widths, self.sizes)}
        valid = self.widths.dtype == torch.uint8 and bool(torch.isin(self.widths.long(), torch.tensor(WIDTHS)).all())
        if len(shapes) > 1 or self.widths.ndim != 1 or not valid or not bool((self.steps > 0).all() and (self.sizes > 0).all()):
            raise ArtifactError("The stored steps and widths of a code don't fit each other. Fit the translator anew.")

    @property
    def rows(self) -> int:
        """Bytes of a token."""
        return packed_bytes(self._layout.widths)

    def encode(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Pack coefficients, (tokens, rank), into codes, (bytes of a token, tokens), uint8, on the CPU."""
        coefficients = coefficients.float().cpu()
        gains = gain_coefficients(coefficients, self.sizes)
        steps = torch.cat([coefficients / gains_of(gains)[:, None] / self.steps, gains[:, None]], dim=1).mT
        widths = self._layout.widths[:, None]
        # What is no number counts as 0.
        integers = (steps + 2.0 ** (widths - 1)).nan_to_num_(0.0).floor_().clamp_min_(0.0).minimum(2.0**widths - 1)
        return self._layout.pack(integers.int())

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the coefficients of packed codes, (tokens, rank), float32, on their device."""
        layout = self._layout.to(codes.device)
        steps = (layout.unpack(codes).float() + (0.5 - 2.0 ** (layout.widths - 1))[:, None]).mT
        return steps[:, :-1] * self.steps.to(codes.device) * gains_of(steps[:, -1:])

    @cached_property
    def _layout(self) -> CodeLayout:
        return CodeLayout.of(torch.cat([self.widths.long(), torch.tensor([_GAIN_BITS])]))


def gains_of(coefficients: torch.Tensor) -> torch.Tensor:
    """Return the gains that `gain_coefficients` stand for."""
    return torch.exp2((coefficients - _GAIN_MIDDLE) * _GAIN_STEP)


def gain_coefficients(coefficients: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return the quantized logarithm of each token's size, (tokens,), float32; strong directions come first."""
    relative = (coefficients[:, :_GAIN_DIRECTIONS] / sizes[:_GAIN_DIRECTIONS]).square().mean(1).sqrt()
    largest = 2.0 ** (_GAIN_BITS - 1) - 0.5
    codes = (relative.clamp_min(_TINY).log2() / _GAIN_STEP + _GAIN_MIDDLE + largest).round()
    return codes.clamp(0, 2**_GAIN_BITS - 1) - largest


def fit_quantizers(
    samples: Sequence[torch.Tensor], strengths: Sequence[torch.Tensor], budget: float, widths: Sequence[int]
) -> list[tuple[torch.Tensor, Quantizer | None]]:
    """Allot bits to the directions of all parts; return for each part the directions with bits, and their quantizer if there are any.

    Args:
        samples: Coefficients of some tokens, (tokens, directions), in units in which errors of all parts cost alike.
        strengths: By how much each direction reduces the error in that unit, as square roots, (directions,).
        budget: Bytes of a token, of all parts together.
        widths: The bits that directions may have.
    """
    sizes, steps, distortions = [], [], []
    for sample, strength in zip(samples, strengths, strict=True):
        sample = sample.float()
        sizes.append(sample.square().mean(0).sqrt().clamp_min(_TINY))
        gains = gains_of(gain_coefficients(sample, sizes[-1]))
        step, errors = (part[0].cpu() for part in quantizers((sample / gains[:, None])[None], _UNCLIPPED_BITS, gains.square()))
        steps.append(step)
        distortions.append(torch.cat([strength.cpu().double().square()[:, None], errors[:, 1:].double()], 1))
    # The gain takes at most a byte of each part.
    bits = allot(distortions, budget - len(samples), widths) if samples else []
    parts: list[tuple[torch.Tensor, Quantizer | None]] = []
    for size, step, width in zip(sizes, steps, bits, strict=True):
        directions = width.nonzero()[:, 0]
        columns = torch.tensor([WIDTHS.index(bits) for bits in width[directions].tolist()], dtype=torch.int64)
        chosen = step[directions].gather(1, columns[:, None])[:, 0]
        quantizer = Quantizer(chosen, width[directions].to(torch.uint8), size.cpu()[directions]) if len(directions) else None
        parts.append((directions, quantizer))
    return parts
