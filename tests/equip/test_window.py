"""By default positions are the text's within the window that the model was trained with, and counted within the cache beyond it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import PreTrainedModel

from hf_kvcaches import EquipCache, Policy
from hf_kvcaches.equip.policies.tokens import Tokens
from tests.conformance import models
from tests.conformance.driving import left_padded
from tests.equip.cases import text

WINDOW, BUDGET = 48, 16
STEPS, BLOCK, LONG = [30, *[1] * 30], [30, 10, 16, *[1] * 4], [52, *[1] * 8]


@dataclass(frozen=True)
class Large(Policy):
    """Keeps large values, which a model of one layer has wherever its tokens stand."""

    interval = None
    comparable = True

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.values.float().norm(dim=-1)

    def score_new(self, inputs: dict[str, Any], module: Any) -> torch.Tensor:
        values = module.v_proj(inputs["hidden_states"])
        return values.unflatten(-1, (-1, module.head_dim)).transpose(1, 2).float().norm(dim=-1)

    reads_inputs = True


def model(**settings: Any) -> PreTrainedModel:
    return models.build("llama", max_position_embeddings=WINDOW, num_hidden_layers=1, **settings)


def cache_of(of: PreTrainedModel, positions: str = "auto", **settings: Any) -> EquipCache:
    return EquipCache(of, Large(), BUDGET, recent=4, positions=positions, **{"head_budgets": None, **settings})


@torch.no_grad()
def feed(of: PreTrainedModel, cache: EquipCache, ids: torch.Tensor, chunks: list[int], **more: Any) -> torch.Tensor:
    """The logits of all tokens."""
    logits, start = [], cache.seen
    for part in ids.split(chunks, 1):
        stop = start + part.shape[1]
        told = {name: value[:, :stop] if name == "attention_mask" else value[:, start:stop] for name, value in more.items()}
        logits.append(of(part, cache=cache, **told).logits)
        start = stop
    return torch.cat(logits, 1)


def unrotated(cache: EquipCache) -> bool:
    return all(layer.rotation.unrotated for layer in cache.layers)


@pytest.mark.parametrize("policy", ["h2o", "keydiff", "future", "tova", "snapkv"])
def test_within_the_window_positions_are_those_of_the_text(policy: str) -> None:
    made, chunks = models.build("llama", max_position_embeddings=WINDOW), [30, 10, *[1] * 8]
    auto, original = (EquipCache(made, policy, BUDGET, recent=4, positions=positions) for positions in ("auto", "original"))
    assert torch.equal(feed(made, auto, text(WINDOW), chunks), feed(made, original, text(WINDOW), chunks))


@pytest.mark.parametrize("settings", [{}, {"head_budgets": "layer"}, {"page_size": 4}, {"storage": "int8"}], ids=str)
@pytest.mark.parametrize("chunks", [STEPS, BLOCK, LONG], ids=["steps", "block", "prompt"])
def test_beyond_it_tokens_stand_where_a_compact_cache_has_them(chunks: list[int], settings: dict[str, Any]) -> None:
    made = model()
    auto, compact = cache_of(made, **settings), cache_of(made, "compact", **settings)
    got, expected = (feed(made, cache, text(sum(chunks)), chunks)[:, -4:] for cache in (auto, compact))
    assert unrotated(auto)
    assert torch.equal(auto.kept_positions(0), compact.kept_positions(0))
    assert_close(got, expected, rtol=0, atol=0.2 if "storage" in settings else 1e-5)


@pytest.mark.parametrize("aware", [True, False], ids=["counted", "with padding"])
def test_padded_rows_whatever_the_model_counts(aware: bool) -> None:
    """`generate` counts real tokens; a forward pass without positions counts padding, too."""
    made, total = model(), WINDOW + 12
    ids, mask = left_padded([text(total), text(total - 17, 20)])
    told = {"attention_mask": mask} | ({"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if aware else {})
    auto, compact = cache_of(made), cache_of(made, "compact")
    got, expected = (feed(made, cache, ids, [30, *[1] * (total - 30)], **told)[:, -4:] for cache in (auto, compact))
    assert unrotated(auto)
    assert_close(got, expected, rtol=0, atol=1e-5)


def test_a_text_that_does_not_begin_at_the_first_position() -> None:
    made, total = model(), WINDOW + 8
    places = torch.arange(7, 7 + total)[None]
    auto, compact = cache_of(made), cache_of(made, "compact")
    got, expected = (feed(made, cache, text(total), STEPS[:1] + [1] * (total - 30), position_ids=places) for cache in (auto, compact))
    assert_close(got[:, -4:], expected[:, -4:], rtol=0, atol=1e-5)


def test_what_is_taken_back_goes_back_within_the_window() -> None:
    made = model()
    cache, other = cache_of(made), cache_of(made)
    for each in (cache, other):
        feed(made, each, text(WINDOW - 2), [30, *[1] * 16])
    cache.activate_past_recording()
    feed(made, cache, text(6, 60), [1] * 6)
    assert unrotated(cache)
    cache.crop(-6)
    assert not unrotated(cache)
    assert_close(feed(made, cache, text(6, 70), [1] * 6), feed(made, other, text(6, 70), [1] * 6), rtol=0, atol=1e-5)


def test_a_saved_cache_goes_on_beyond_the_window(tmp_path: Path) -> None:
    made = models.build("llama", max_position_embeddings=WINDOW)
    cache = EquipCache(made, "h2o", BUDGET, recent=4)
    feed(made, cache, text(WINDOW + 4), [30, *[1] * (WINDOW - 26)])
    cache.save(tmp_path / "cache.safetensors")
    again = EquipCache.load(tmp_path / "cache.safetensors", made)
    assert unrotated(again)
    assert torch.equal(feed(made, again, text(4, 60), [1] * 4), feed(made, cache, text(4, 60), [1] * 4))


@pytest.mark.parametrize("name", ["longrope", "window unknown"])
def test_positions_stay_where_they_can_not_be_counted_otherwise(name: str) -> None:
    made = model()
    if name == "longrope":
        scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        made = models.build("llama", max_position_embeddings=WINDOW, num_hidden_layers=1, rope_parameters=scaling)
    else:
        del made.config.max_position_embeddings
    auto, original = cache_of(made), cache_of(made, "original")
    assert torch.equal(feed(made, auto, text(60), STEPS), feed(made, original, text(60), STEPS))


def test_streams_are_compact_from_the_start() -> None:
    made = models.build("llama")
    auto, compact = EquipCache(made, "streaming", BUDGET), EquipCache(made, "streaming", BUDGET, positions="compact")
    assert torch.equal(feed(made, auto, text(40), [20, *[1] * 20]), feed(made, compact, text(40), [20, *[1] * 20]))


def test_a_context_that_outgrows_the_window_before_it_is_pruned() -> None:
    made, total = models.build("llama", max_position_embeddings=WINDOW), WINDOW + 20
    logits = []
    for positions in ("auto", "compact"):
        cache = EquipCache(made, "kvzip", BUDGET, positions=positions, refit=True)
        feed(made, cache, text(total), [30, 20, total - 50])
        cache.compress(made, input_ids=text(total))
        logits.append(feed(made, cache, text(6, 80), [1] * 6))
    assert_close(*logits, rtol=0, atol=1e-4)
