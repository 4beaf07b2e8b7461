"""Divergences, losses and answers are those of the definitions."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import EquipCache
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate import measure
from hf_kvcaches.evaluate.past import PastCoding
from tests import tiny


class Rounded(PastCoding):
    def read(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys.round(decimals=1), values.round(decimals=1)


def test_kl_is_zero_for_the_same_logits_and_the_formula_for_others() -> None:
    full, other = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.5, 0.25, 0.25]).log()
    assert float(measure.kl(full, full + 3)) == pytest.approx(0, abs=1e-12)
    expected = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.25) + 0.1 * math.log(0.1 / 0.25)
    assert float(measure.kl(full, other)) == pytest.approx(expected, rel=1e-6)


def test_kl_of_a_token_that_only_the_other_gives_a_chance_is_finite() -> None:
    full = torch.tensor([0.0, 0.0, -torch.inf])
    assert float(measure.kl(full, torch.zeros(3))) == pytest.approx(math.log(1.5), rel=1e-6)


def test_logits_of_other_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="logits"):
        measure.kl(torch.zeros(2, 3), torch.zeros(1, 3))


def test_perplexity_of_even_logits_is_the_size_of_the_vocabulary() -> None:
    assert measure.perplexity(torch.zeros(4, 8), torch.arange(4)) == pytest.approx(8)


def test_text_quality_is_the_mean_over_all_positions_behind_the_prompt() -> None:
    model, ids = tiny.llama(), tiny.ids(2, 150)
    full, coded = measure.read_rows(model, ids), measure.read_rows(model, ids, Rounded(), 5)
    found, full, coded = measure.compare(full, coded, ids, 5), full[:, 5:-1], coded[:, 5:-1]
    assert found.tokens == 2 * 144
    assert found.kl == pytest.approx(float(measure.kl(full, coded).mean()), rel=1e-4)
    assert found.perplexity == pytest.approx(measure.perplexity(coded, ids[:, 6:]), rel=1e-5)
    assert found.change == pytest.approx(found.perplexity / measure.perplexity(full, ids[:, 6:]) - 1, abs=1e-5)


@pytest.mark.parametrize("step", [None, 1, 3])
def test_an_answer_matches_exactly_if_greedy_decoding_writes_it(step: int | None) -> None:
    model, context, question = tiny.llama(), tiny.ids(20).tolist(), tiny.ids(5, seed=1).tolist()
    prompt = torch.tensor([[*context, *question]])
    written = model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)[0, -4:].tolist()
    other = [*written[:3], (written[3] + 1) % tiny.VOCABULARY]
    cache = measure.prefill(model, DynamicCache(config=model.config), context)
    right, wrong = measure.answers(model, cache, [(question, written), (question, other)], step)
    assert right.matches
    assert not wrong.matches
    assert right.log_probability > wrong.log_probability
    assert right.loss == pytest.approx(-right.log_probability / 4)
    assert cache.get_seq_length() == 20


def test_a_context_is_pruned_before_its_questions_are_known() -> None:
    model = tiny.llama()
    cache = measure.prefill(model, EquipCache(model, "kvzip", 0.25), tiny.ids(80).tolist())
    assert max(cache.report().kept) <= 20


def test_a_question_without_tokens_is_refused() -> None:
    model = tiny.llama()
    with pytest.raises(ConfigError, match="questions"):
        measure.answers(model, measure.prefill(model, DynamicCache(config=model.config), [3, 4, 5]), [([], [6])])
