"""Models that learned a sink for each head (gpt-oss) keep their sinks when tokens are pruned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GptOssConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_kvcaches import EquipCache
from hf_kvcaches.equip.policies import SnapKVPolicy
from tests import tiny
from tests.equip.cases import feed_all as feed
from tests.equip.cases import padded, positions_of, with_queries

pytestmark = pytest.mark.usefixtures("no_grad")

PROMPT, STEPS = 30, 8


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = tiny.build(
        GptOssConfig(
            vocab_size=tiny.VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            max_position_embeddings=256,
            initializer_range=0.3,
            pad_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
    )
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([2.0, -1.0, 3.0, 0.5]))
    return made


def steps(model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The logits after a prompt and after each token behind it."""
    parts = [feed(model, cache, ids[:, :PROMPT], None if mask is None else mask[:, :PROMPT])[:, -1:]]
    for step in range(PROMPT, ids.shape[1]):
        parts.append(feed(model, cache, ids[:, step : step + 1], None if mask is None else mask[:, : step + 1]))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "compactor", "tova", "future"])
@pytest.mark.parametrize("padding", [(), (7, 0)], ids=["whole", "padded"])
@pytest.mark.parametrize("paged", [False, True])
def test_with_room_for_all_the_logits_are_those_of_the_full_cache(model, policy, padding, paged):
    ids, mask = padded(2, PROMPT + STEPS, *padding)
    cache = EquipCache(model, policy, 64, page_size=8 if paged else None)
    torch.testing.assert_close(
        steps(model, cache, ids, mask), steps(model, DynamicCache(config=model.config), ids, mask), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_pruned_slots_are_attended_beside_the_sinks(model, policy):
    ids = tiny.ids(1, PROMPT + 1, seed=2)
    cache, past = EquipCache(model, policy, 12, positions="original"), DynamicCache(config=model.config)
    for one in (cache, past):
        feed(model, one, ids[:, :PROMPT])
    found = feed(model, cache, ids[:, PROMPT:])
    for index, layer in enumerate(past.layers):
        if type(layer) is DynamicLayer:
            # The token that came is in the kept ones, and the full cache takes it itself.
            rows = [torch.tensor(positions_of(cache, index, 0, head)[:-1])[None, :, None].expand(-1, -1, 16) for head in range(2)]
            index_of = torch.stack(rows, 1)
            layer.keys, layer.values = layer.keys.gather(2, index_of), layer.values.gather(2, index_of)
    eager = copy.deepcopy(model)
    # A single query sees every slot, whatever the mask for all tokens says.
    mask = {"full_attention": None, "sliding_attention": None}
    expected = eager(input_ids=ids[:, PROMPT:], attention_mask=mask, position_ids=torch.tensor([[PROMPT]]), past_key_values=past).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", ["snapkv", "tova"])
def test_an_adopted_prompt_is_scored_as_a_prefill(model, policy, monkeypatch):
    chosen = SnapKVPolicy(window=4, kernel_size=3) if policy == "snapkv" else policy
    ids, past = tiny.ids(1, PROMPT, seed=3), DynamicCache(config=model.config)
    prefilled, queries = with_queries(model, ids, None, monkeypatch, policy=chosen, budget=12)
    feed(model, past, ids)
    adopted = EquipCache.from_cache(past, model, chosen, 12, queries=queries)
    for layer in (1, 3):
        for head in range(2):
            assert positions_of(adopted, layer, 0, head) == positions_of(prefilled, layer, 0, head)


def test_kvzip_and_generate_work_too(model):
    ids = tiny.ids(1, PROMPT, seed=4)
    cache = EquipCache(model, "kvzip", 12)
    feed(model, cache, ids)
    cache.compress(model, input_ids=ids)
    output = model.generate(torch.cat([ids, tiny.ids(1, 3, seed=5)], 1), past_key_values=cache, max_new_tokens=4)
    assert output.shape[1] == PROMPT + 7
    beams = model.generate(ids, past_key_values=EquipCache(model, "h2o", 12), max_new_tokens=4, num_beams=2, do_sample=False)
    assert beams.shape[1] == PROMPT + 4


def test_drafts_leave_the_sinks_their_share(model: PreTrainedModel) -> None:
    caches = [EquipCache(model, "streaming", 16) for _ in range(2)]
    for cache in caches:
        feed(model, cache, tiny.ids(1, PROMPT, seed=1))
        cache.activate_past_recording()
    drafts = tiny.ids(1, 6, seed=2)
    single = torch.cat([feed(model, caches[1], part) for part in drafts.split(1, 1)], 1)
    torch.testing.assert_close(feed(model, caches[0], drafts), single, rtol=0, atol=1e-4)
