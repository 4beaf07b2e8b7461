"""Divergences, losses and perplexities are those of the definitions."""

import math

import pytest
import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.measures import agreement, divergence, losses


def test_divergence_is_zero_for_the_same_logits_and_the_formula_for_others() -> None:
    full, other = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.5, 0.25, 0.25]).log()
    assert float(divergence(full, full + 3)) == pytest.approx(0, abs=1e-12)
    expected = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.25) + 0.1 * math.log(0.1 / 0.25)
    assert float(divergence(full, other)) == pytest.approx(expected, rel=1e-6)


def test_divergence_of_a_token_that_only_the_other_gives_a_chance_is_finite() -> None:
    full = torch.tensor([0.0, 0.0, -torch.inf])
    assert float(divergence(full, torch.zeros(3))) == pytest.approx(math.log(1.5), rel=1e-6)


def test_divergence_of_not_a_number_or_of_a_token_without_a_chance_is_infinite() -> None:
    assert float(divergence(torch.zeros(3), torch.tensor([0.0, 0.0, torch.nan]))) == math.inf
    assert float(divergence(torch.zeros(3), torch.tensor([0.0, 0.0, -torch.inf]))) == math.inf


def test_logits_of_other_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="logits"):
        divergence(torch.zeros(2, 3), torch.zeros(1, 3))


def test_positions_agree_where_the_most_likely_token_is_the_same() -> None:
    full, other = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[0.5, 0.6], [0.6, 0.5]])
    assert agreement(full, other).tolist() == [True, False]


def test_the_loss_of_even_logits_is_that_of_the_vocabulary() -> None:
    assert losses(torch.zeros(4, 8), torch.arange(4)).exp().tolist() == pytest.approx([8] * 4)
