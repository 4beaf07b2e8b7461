"""Policies made of others, and presses of kvpress."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache
from hf_kvcaches.equip.policies import BlockPolicy, ChunkPolicy, CriticalPolicy, KeyNormPolicy, Policy
from hf_kvcaches.equip.tokens import Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny
from tests.equip.cases import feed_all as feed
from tests.equip.cases import padded, positions_of

TOKENS = 48


@pytest.fixture(autouse=True)
def _no_grad() -> Iterable[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama()


class Last(Policy):
    """The last number of each key."""

    name = "last"

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.keys[..., -1].float()


def kept_alone(model: PreTrainedModel, policy: Any, budget: int, ids: torch.Tensor, **options: Any) -> list[list[list[int]]]:
    """What each layer and head keeps of one row."""
    cache = EquipCache(model, policy, budget, sinks=0, recent=0, positions="original", **options)
    feed(model, cache, ids)
    return [[positions_of(cache, layer, 0, head) for head in range(2)] for layer in range(4)]


def keys_of(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of each layer, (kv_heads, tokens, head_dim)."""
    past = DynamicCache(config=model.config)
    feed(model, past, ids)
    return [layer.keys[0] for layer in past.layers]


def test_every_chunk_keeps_the_same_share_chosen_within_it(model):
    ids = tiny.ids(1, TOKENS, seed=1)
    kept = kept_alone(model, ChunkPolicy(Last(), size=12), TOKENS // 3, ids)
    for layer, keys in enumerate(keys_of(model, ids)):
        for head in range(2):
            best = [start + keys[head, start : start + 12, -1].topk(4).indices for start in range(0, TOKENS, 12)]
            assert kept[layer][head] == sorted(torch.cat(best).tolist())


def test_blocks_are_pruned_as_they_come(model):
    ids, budget, size = tiny.ids(1, TOKENS, seed=2), 10, 8
    found = kept_alone(model, BlockPolicy("keydiff", size=size), budget, ids)
    for layer, keys in enumerate(keys_of(model, ids)):
        for head in range(2):
            kept = torch.arange(budget)
            for start in range(budget, TOKENS, size):
                kept = torch.cat([kept, torch.arange(start, min(start + size, TOKENS))])
                unit = functional.normalize(keys[head, kept], dim=-1)
                kept = kept[(-functional.cosine_similarity(unit, unit.mean(0, keepdim=True), dim=-1)).topk(budget).indices].sort().values
            assert found[layer][head] == kept.tolist()


def test_a_part_of_the_budget_goes_to_values_that_change_the_output_most(model):
    ids, budget = tiny.ids(1, TOKENS, seed=3), 12
    found = kept_alone(model, CriticalPolicy(KeyNormPolicy(), share=0.25, epsilon=20.0), budget, ids)
    past = DynamicCache(config=model.config)
    feed(model, past, ids)
    for index, layer in enumerate(past.layers):
        rows = model.model.layers[index].self_attn.o_proj.weight.T.unflatten(0, (2, 2, -1))  # (kv_heads, group, head_dim, hidden)
        for head in range(2):
            first = (-layer.keys[0, head].norm(dim=-1)).topk(budget // 4).indices
            lengths = (layer.values[0, head] @ rows[head]).abs().sum(-1).mean(0)
            # Lengths of keys are below 0, and count as 0.
            worth = (20.0 * lengths).scatter(0, first, torch.inf)
            assert found[index][head] == sorted(worth.topk(budget).indices.tolist())


@pytest.mark.parametrize(
    "policy", [ChunkPolicy("h2o", size=8), BlockPolicy("cur", size=8), "critical", CriticalPolicy("expected_attention")]
)
def test_composed_policies_decode_with_padding_and_after_a_copy(model, policy):
    ids, mask = padded(2, TOKENS + 6, 7, 0)
    cache = EquipCache(model, policy, 20, recent=4)
    feed(model, cache, ids[:, :TOKENS], mask[:, :TOKENS])
    other = copy.deepcopy(cache)
    for step in range(TOKENS, TOKENS + 6):
        one, two = (feed(model, c, ids[:, step : step + 1], mask[:, : step + 1]) for c in (cache, other))
        assert bool(one.isfinite().all())
        assert torch.equal(one, two)
    assert len(positions_of(cache, 1, 0, 1)) == len(positions_of(cache, 1, 1, 1)) == 20


@pytest.mark.parametrize("make", [ChunkPolicy, BlockPolicy, CriticalPolicy])
def test_policies_without_scores_cannot_be_composed(make):
    for inner in ("streaming", "kvzip"):
        with pytest.raises(UnsupportedError, match=inner):
            make(inner)
    with pytest.raises(ConfigError, match="policy"):
        make("no such policy")


# Presses


class WindowPress:
    """Keeps what the last tokens' queries, made of hidden states as kvpress makes them, look at."""

    compression_ratio = 0.75

    def __init__(self, window: int = 4) -> None:
        self.window = window
        self.seen: list[Any] = []

    def score(self, module: nn.Module, hidden_states: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attentions: Any, kwargs: Any):
        self.seen.append(SimpleNamespace(hidden=hidden_states.shape, keys=keys, attentions=attentions, kwargs=set(kwargs)))
        queries = module.q_proj(hidden_states[:, -self.window :]).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        grouped = queries.unflatten(1, (keys.shape[1], -1)).mean((2, 3))
        return (keys @ grouped[..., None])[..., 0]


def test_a_press_of_kvpress_chooses_what_stays(model):
    ids, press = tiny.ids(1, TOKENS, seed=4), WindowPress()
    cache = EquipCache.from_press(press, model, sinks=0, recent=0, positions="original")
    feed(model, cache, ids)
    assert [view.hidden for view in press.seen] == [(1, TOKENS, 32)] * 4
    assert all(view.attentions is None and "position_embeddings" in view.kwargs for view in press.seen)
    for layer, (view, keys) in enumerate(zip(press.seen, keys_of(model, ids), strict=True)):
        torch.testing.assert_close(view.keys[0], keys, atol=1e-5, rtol=1e-4)
        expected = [
            scores.topk(TOKENS // 4).indices.sort().values.tolist() for scores in self_scores(model, WindowPress(), layer, ids, keys)
        ]
        assert [positions_of(cache, layer, 0, head) for head in range(2)] == expected


def self_scores(model: PreTrainedModel, press: WindowPress, layer: int, ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What the press says where the plain model runs."""
    states = model(input_ids=ids, output_hidden_states=True).hidden_states[layer]
    block = model.model.layers[layer]
    return press.score(block.self_attn, block.input_layernorm(states), keys[None], keys[None], None, {})[0]


def test_a_press_decodes_and_is_copied_and_sees_blocks_that_follow(model):
    ids, press = tiny.ids(1, TOKENS + 8, seed=5), WindowPress()
    cache = EquipCache.from_press(press, model, 16)
    feed(model, cache, ids[:, :TOKENS])
    feed(model, cache, ids[:, TOKENS : TOKENS + 1])
    other = copy.deepcopy(cache)
    logits = [feed(model, each, ids[:, TOKENS + 1 :]) for each in (cache, other)]
    assert torch.equal(*logits)
    assert len(positions_of(cache)) == 16


def test_a_question_is_not_shown_to_a_press(model):
    press = WindowPress()
    cache = EquipCache.from_press(press, model, 16, question_start=-5)
    feed(model, cache, tiny.ids(1, TOKENS, seed=6))
    assert [view.hidden[1] for view in press.seen] == [TOKENS - 5, 5] * 4


@pytest.mark.parametrize("build", [tiny.llama, tiny.gemma2], ids=["llama", "hybrid"])
def test_no_hidden_states_are_kept_behind_a_pass(build):
    model = build()
    cache = EquipCache.from_press(WindowPress(), model, 16)
    alive: list[weakref.ref[torch.Tensor]] = []
    handles = [
        layer.self_attn.register_forward_pre_hook(
            tiny.observing(lambda _, args, kwargs: alive.append(weakref.ref(kwargs["hidden_states"]))), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    feed(model, cache, tiny.ids(1, TOKENS))
    feed(model, cache, tiny.ids(1, 1))
    if build is tiny.llama:
        with pytest.raises(UnsupportedError, match="press"):
            cache.edit(model, 2, 4, [5, 6, 7])
    for handle in handles:
        handle.remove()
    gc.collect()
    assert len(alive) >= 2 * len(model.model.layers)
    assert not any(reference() is not None for reference in alive)


def test_the_model_is_as_it_was_when_the_cache_is_gone(model):
    hooks = lambda: [len(layer.self_attn._forward_pre_hooks) for layer in model.model.layers]  # noqa: E731
    before = hooks()
    cache = EquipCache.from_press(WindowPress(), model)
    feed(model, cache, tiny.ids(1, TOKENS))
    del cache
    gc.collect()
    assert hooks() == before


def test_what_is_no_press_is_refused(model):
    with pytest.raises(ConfigError, match="score"):
        EquipCache.from_press(object(), model, 16)
    press = WindowPress()
    press.compression_ratio = None
    with pytest.raises(ConfigError, match="compression_ratio"):
        EquipCache.from_press(press, model)
    past = DynamicCache(config=model.config)
    feed(model, past, tiny.ids(1, TOKENS))
    with pytest.raises(UnsupportedError, match="press"):
        EquipCache.from_cache(past, model, EquipCache.from_press(press, model, 16).policy, 16)


def test_scores_of_a_wrong_shape_are_refused(model):
    press = WindowPress()
    press.score = lambda *arguments: torch.zeros(1, 2, 3)
    with pytest.raises(ConfigError, match="shape"):
        feed(model, EquipCache.from_press(press, model, 16), tiny.ids(1, TOKENS))


def test_a_policy_sees_its_budget_the_attention_and_what_that_is_called_with(model):
    seen: list[Tokens] = []

    class Looking(Policy):
        reads_inputs = True

        def score(self, tokens: Tokens) -> torch.Tensor:
            seen.append(replace(tokens))
            return tokens.keys[..., 0].float()

    cache = EquipCache(model, Looking(), 16, recent=2)
    feed(model, cache, tiny.ids(1, TOKENS))
    first = seen[0]
    assert first.budget == 16
    assert first.module is model.model.layers[0].self_attn
    assert first.inputs is not None
    assert first.inputs["hidden_states"].shape == (1, TOKENS, 32)


@pytest.mark.parametrize("policy", ["compactor", "leverage", "expected_attention", ChunkPolicy("leverage")], ids=repr)
def test_keys_whose_angles_are_not_known_are_scored_as_they_are(policy):
    model = tiny.llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
    cache = EquipCache(model, policy, 16, positions="original")
    feed(model, cache, tiny.ids(1, TOKENS))
    assert len(positions_of(cache)) == 16
