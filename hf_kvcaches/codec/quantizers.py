"""Uniform quantizers of coefficients, one for each direction and width, fitted to a sample."""

from __future__ import annotations

import torch

from hf_kvcaches.kernels.code_format import WIDTHS

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


def quantizers(
    coefficients: torch.Tensor, reaching: int = _REACHING, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each direction and width the step with the smallest squared error, (groups, d, widths), and the errors, those of width 0 first.

    Args:
        coefficients: Of the sample, (groups, tokens, d).
        reaching: From so many bits on, no coefficient of the sample is clipped.
        weights: By which errors of each token count, (tokens,); None for 1.
    """
    counts = coefficients.new_ones(coefficients.shape[1], 1) if weights is None else weights[:, None]
    energies = (coefficients.square() * counts).mean(1)
    of_group = energies.mean(-1, keepdim=True).sqrt().clamp_min(_TINY)
    deviations = energies.sqrt().maximum(_LEAST_DEVIATION * of_group)
    largest = coefficients.abs().amax(1)
    steps, distortions = [], [energies]
    for width in WIDTHS:
        top = 2 ** (width - 1) - 0.5
        best_error, best_step = torch.full_like(deviations, torch.inf), deviations
        if width in _WIDE_STEPS:
            candidates = [_WIDE_STEPS[width] * deviations.maximum(of_group)]
        else:
            candidates = [_NORMAL_STEPS[width] * multiple * deviations for multiple in _MULTIPLES]
        for candidate in candidates:
            step = candidate.maximum(largest / top) if width >= reaching else candidate
            levels = ((coefficients / step[:, None]).floor() + 0.5).clamp(-top, top)
            error = ((levels * step[:, None] - coefficients).square() * counts).mean(1)
            better = error < best_error
            best_error, best_step = torch.where(better, error, best_error), torch.where(better, step, best_step)
        steps.append(best_step)
        distortions.append(best_error)
    return torch.stack(steps, -1), torch.stack(distortions, -1)
