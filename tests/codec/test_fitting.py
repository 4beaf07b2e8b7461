"""Quantisers and tails equal plain computations, measured or taken from a normal distribution."""

from __future__ import annotations

import torch

from hf_kvcaches.codec.calibrate import LayerSums
from hf_kvcaches.codec.fit import fit_layer, unmeasured
from hf_kvcaches.codec.joint import Shape
from hf_kvcaches.codec.sides import WIDTHS, CalibratedSide


def fitted(sample: torch.Tensor) -> CalibratedSide:
    """What is made of a sample of tokens, (heads, tokens, d)."""
    heads, tokens, dim = sample.shape
    sums = LayerSums(Shape(heads, dim, dim), torch.device("cpu"))
    whole = torch.nn.functional.pad(sample, (0, 0, 4, 0))[None]
    sums.observe(whole, whole, torch.rand(1, tokens + 4))
    half = torch.randn(heads, dim, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.linalg.cholesky(half @ half.mT + torch.eye(dim)).mT
    sums.observe_gradients(*[torch.nn.functional.pad(gradients, (0, 0, 4, 0))[None]] * 2)
    return fit_layer(sums, "loss").keys


def test_tails_are_what_one_token_in_twenty_has_behind_the_first_directions() -> None:
    sample = torch.randn(2, 200, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2.0 ** -torch.arange(6) + 0.2
    side = fitted(sample)
    for head in range(2):
        coefficients = [side.encode[head].double() @ (token - side.mean[head]) for token in sample[head]]
        for first in range(7):
            shares = sorted(float(token[first:].square().sum() / token.square().sum()) for token in coefficients)
            torch.testing.assert_close(float(side.tails[head, first]), shares[189], rtol=1e-4, atol=1e-5)
    assert torch.equal(side.tails[:, 0], torch.ones(2))
    assert torch.equal(side.tails[:, 6], torch.zeros(2))


def test_a_side_without_measurements_has_the_distortions_of_a_normal_distribution() -> None:
    side = unmeasured(2, 3)
    drawn = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert bool((side.distortions[..., 0] == 1).all())
    for place, width in enumerate(WIDTHS):
        step, top = float(side.steps[0, 0, place]), 2.0 ** (width - 1) - 0.5
        lost = (((drawn / step).floor() + 0.5).clamp(-top, top) * step - drawn).square().mean()
        expected = float(side.distortions[0, 0, 1 + place])
        assert abs(float(lost) - expected) <= 0.03 * expected, width
    assert torch.equal(side.encode, torch.eye(3).expand(2, 3, 3))
    assert not side.widths.any()
