"""Codes of few bits: a gain for each token, a calibrated step for each direction, and bits where they count.

Nothing is stored for a token and part besides its codes and four bits of gain. The gain makes rare tokens, names and numbers among them,
whose coefficients are several times as large as most tokens', as precise in proportion as the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hf_kvcaches.core.codec.allocation import allot
from hf_kvcaches.core.codec.coder import Levels
from hf_kvcaches.core.codec.layout import packed_bytes
from hf_kvcaches.core.codec.sides import WIDTHS
from hf_kvcaches.core.metering.fitting import quantizers
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.kernels.codes import CodeMap, decode_codes

GAIN_BITS = 4
# Gains are 2 ** ((number - 6) * 0.4): from a fifth of the mean size of a token to 12 times as much.
_GAIN_STEP, _GAIN_MIDDLE = 0.4, 6
# Directions by which the size of a token is measured: weak ones are noise.
_STRONG = 64
# From so many bits on, no coefficient of the sample is clipped.
_REACHING = 4
_TINY = 1e-20


@dataclass(frozen=True, eq=False)
class Quantizer:
    """How the coefficients of a part become bytes.

    Args:
        steps: Of each direction at gain 1, (rank,), float32.
        widths: Bits of each direction, (rank,), uint8, none of them 0.
        sizes: Root mean square of each direction, by which gains are chosen, (rank,), float32.
    """

    steps: torch.Tensor
    widths: torch.Tensor
    sizes: torch.Tensor

    def __post_init__(self) -> None:
        shapes = {part.shape for part in (self.steps, self.widths, self.sizes)}
        known = self.widths.dtype == torch.uint8 and bool(torch.isin(self.widths.long(), torch.tensor(WIDTHS)).all())
        if len(shapes) > 1 or self.widths.ndim != 1 or not known or not bool((self.steps > 0).all() and (self.sizes > 0).all()):
            raise ArtifactError("The stored steps and widths of a code don't fit each other. Fit the translator anew.")

    @property
    def rows(self) -> int:
        """Bytes of a token."""
        return packed_bytes(self._all_widths)

    def encode(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Packed codes, (bytes of a token, tokens), uint8, on the CPU.

        Args:
            coefficients: (tokens, rank).
        """
        coefficients = coefficients.float().cpu()
        numbers = gain_numbers(coefficients, self.sizes)
        steps = (coefficients / gains_of(numbers)[:, None] / self.steps).mT
        together = torch.cat([steps, numbers[None] - 2.0 ** (GAIN_BITS - 1) + 0.5])[None, None]
        return self._levels.pack(together + self._levels.middle.float()[..., None])[0].contiguous()

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Coefficients, (tokens, rank), float32, on the device of the codes.

        Args:
            codes: Packed, (bytes of a token, tokens).
        """
        counts, *tables = self._code_map
        code_map = CodeMap(counts, *(table.to(codes.device) for table in tables))
        numbers = decode_codes(codes[None].contiguous(), code_map, check=False)[0, 0]
        return numbers[:, :-1] * gains_of(numbers[:, -1:] + 2.0 ** (GAIN_BITS - 1) - 0.5)

    @property
    def _all_widths(self) -> torch.Tensor:
        return torch.cat([self.widths.long(), torch.tensor([GAIN_BITS])])

    @cached_property
    def _levels(self) -> Levels:
        return Levels(self._all_widths[None], torch.device("cpu"))

    @cached_property
    def _code_map(self) -> CodeMap:
        steps = torch.cat([self.steps.double(), torch.ones(1, dtype=torch.float64)])
        columns, offset = self._levels.decoding(
            torch.eye(len(steps), dtype=torch.float64)[None], steps[None], torch.zeros_like(steps)[None]
        )
        return CodeMap(self._levels.counts, self._levels.index, columns.float(), offset.float())


def gains_of(numbers: torch.Tensor) -> torch.Tensor:
    """Gains by their numbers."""
    return torch.exp2((numbers - _GAIN_MIDDLE) * _GAIN_STEP)


def gain_numbers(coefficients: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """The number of the gain nearest to each token's size, (tokens,), float32.

    Args:
        coefficients: (tokens, rank), strong directions first.
        sizes: (rank,).
    """
    relative = (coefficients[:, :_STRONG] / sizes[:_STRONG]).square().mean(1).sqrt()
    numbers = relative.clamp_min(_TINY).log2() / _GAIN_STEP + _GAIN_MIDDLE
    return numbers.round().clamp(0, 2**GAIN_BITS - 1)


def fit_quantizers(
    samples: Sequence[torch.Tensor], strengths: Sequence[torch.Tensor], budget: float, widths: Sequence[int]
) -> list[tuple[torch.Tensor, Quantizer] | None]:
    """The directions of each part that have bits, and their quantizer; None for a part without bits.

    Args:
        samples: Coefficients of some tokens, (tokens, directions), in units in which errors of all parts cost alike.
        strengths: What each direction takes off the error in that unit, (directions,); errors add up as squares.
        budget: Bytes of a token, of all parts together.
        widths: The bits that directions may have.
    """
    sizes, steps, distortions = [], [], []
    for sample, strength in zip(samples, strengths, strict=True):
        sample = sample.float()
        sizes.append(sample.square().mean(0).sqrt().clamp_min(_TINY))
        gains = gains_of(gain_numbers(sample, sizes[-1]))
        found, lost = (part[0].cpu() for part in quantizers((sample / gains[:, None])[None], _REACHING, gains.square()))
        steps.append(found)
        distortions.append(torch.cat([strength.cpu().double().square()[:, None], lost[:, 1:].double()], 1))
    # Gains take a byte of each part where they find no other half.
    bits = allot(distortions, budget - len(samples), widths)
    fitted: list[tuple[torch.Tensor, Quantizer] | None] = []
    for size, step, width in zip(sizes, steps, bits, strict=True):
        kept = width.nonzero()[:, 0]
        places = torch.tensor([WIDTHS.index(int(each)) for each in width[kept]], dtype=torch.int64)
        chosen = step[kept].gather(1, places[:, None])[:, 0]
        fitted.append((kept, Quantizer(chosen, width[kept].to(torch.uint8), size.cpu()[kept])) if len(kept) else None)
    return fitted


def fixed_quantizer(sample: torch.Tensor, width: int) -> Quantizer:
    """A quantizer that gives all directions as many bits.

    Args:
        sample: Coefficients of some tokens, (tokens, directions).
    """
    sizes = sample.float().square().mean(0).sqrt().clamp_min(_TINY)
    gains = gains_of(gain_numbers(sample.float(), sizes))
    steps = quantizers((sample.float() / gains[:, None])[None], _REACHING)[0][0, :, WIDTHS.index(width)]
    return Quantizer(steps.cpu(), torch.full((len(steps),), width, dtype=torch.uint8), sizes.cpu())
