"""Uniform quantizers of coefficients, fitted to a sample for each direction and width, and how many bits each direction gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvcaches.kernels.code_format import WIDTHS, packed_bytes

# The step of a uniform quantizer that loses least of a normal distribution, in standard deviations.
_NORMAL_STEPS = {1: 1.596, 2: 0.9957, 3: 0.586, 4: 0.3352, 5: 0.1881, 6: 0.1041, 8: 0.0308}
# What it is multiplied with for distributions with heavier or lighter tails.
_MULTIPLES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
# These need no choice: they reach 32 and 16 standard deviations of the direction, or of the group in the mean where that is more, so that
# directions which the texts hardly use are not clipped either. Steps are of about float16's precision and of float32's.
_WIDE_STEPS = {16: 2.0**-10, 24: 2.0**-19}
# From so many bits on, steps reach all of the sample: that costs little, and a clipped coefficient costs much.
_REACHING = 6
# A direction that the texts do not use is taken to have this share of the group's mean deviation.
_LEAST_DEVIATION = 1e-4
_TINY = 1e-30
# Widths that take two parts are worth it only where bits are plenty.
_ALLOTTED = (1, 2, 4, 6, 8, 16, 24)


def quantizers(coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each direction and width the step with the smallest squared error, (groups, d, widths), and the errors, those of width 0 first.

    Args:
        coefficients: Of the sample, (groups, tokens, d).
    """
    energies, largest = coefficients.square().mean(1), coefficients.abs().amax(1)
    of_group = energies.mean(-1, keepdim=True).sqrt().clamp_min(_TINY)
    deviations = energies.sqrt().maximum(_LEAST_DEVIATION * of_group)
    steps, distortions = [], [energies]
    for width in WIDTHS:
        top = 2 ** (width - 1) - 0.5
        best_error, best_step = torch.full_like(deviations, torch.inf), deviations
        if width in _WIDE_STEPS:
            candidates = [_WIDE_STEPS[width] * deviations.maximum(of_group)]
        else:
            candidates = [_NORMAL_STEPS[width] * multiple * deviations for multiple in _MULTIPLES]
        for candidate in candidates:
            step = candidate.maximum(largest / top) if width >= _REACHING else candidate
            levels = ((coefficients / step[:, None]).floor() + 0.5).clamp(-top, top)
            error = (levels * step[:, None] - coefficients).square().mean(1)
            better = error < best_error
            best_error, best_step = torch.where(better, error, best_error), torch.where(better, step, best_step)
        steps.append(best_step)
        distortions.append(best_error)
    return torch.stack(steps, -1), torch.stack(distortions, -1)


def allot(
    distortions: Sequence[torch.Tensor], budget: float, copies: Sequence[int], widths: Sequence[int] = _ALLOTTED
) -> list[torch.Tensor]:
    """The bits of each direction with which a number of bytes loses least, (directions,) for each side.

    Args:
        distortions: For each side, which fills bytes of its own, what is lost of a direction at 0 bits and at each of `WIDTHS`,
            (directions, 1 + widths).
        budget: Bytes of a token.
        copies: How often a token has the bytes of each side.
        widths: The bits that directions may have.
    """
    lengths, levels = [len(side) for side in distortions], torch.tensor([0, *widths])
    lost = torch.cat(list(distortions)).double()[:, [0, *(1 + WIDTHS.index(width) for width in widths)]]
    times = torch.tensor(copies).repeat_interleave(torch.tensor(lengths))
    here, steps = torch.zeros(len(lost), dtype=torch.int64), []
    # The upgrades of a direction follow the lower convex hull of its distortions, so that each gains less than the one before.
    for _ in widths:
        price = levels - levels[here][:, None]
        gains = (lost.gather(1, here[:, None]) - lost) / price.clamp_min(1)
        gain, there = gains.masked_fill(price <= 0, -torch.inf).max(1)
        worth = gain > 0
        steps.append((gain[worth] / times[worth], levels[there[worth]], worth.nonzero()[:, 0]))
        here = torch.where(worth, there, here)
    gains, bits, directions = (torch.cat(parts) for parts in zip(*steps, strict=True))
    order = gains.argsort(descending=True, stable=True)

    def bought(count: int) -> Sequence[torch.Tensor]:
        chosen = order[:count]
        return torch.zeros_like(here).scatter_reduce(0, directions[chosen], bits[chosen], "amax").split(lengths)

    # Whole bytes of each plane count, so the price of a number of upgrades is only known when they are laid out.
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(count * packed_bytes(side) for count, side in zip(copies, bought(middle), strict=True)) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return list(bought(low))
