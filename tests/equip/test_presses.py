"""Presses of kvpress as policies, and what a policy is shown."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache
from hf_kvcaches.equip.policies import Policy
from hf_kvcaches.equip.policies.tokens import Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny
from tests.equip.cases import both_positions, positions_of
from tests.equip.cases import feed_all as feed

pytestmark = pytest.mark.usefixtures("no_grad")

TOKENS = 48


def keys_of(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of each layer, (kv_heads, tokens, head_dim)."""
    past = DynamicCache(config=model.config)
    feed(model, past, ids)
    return [layer.keys[0] for layer in past.layers]


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


class Looking(Policy):
    """Asks for all there is, and remembers what it was shown."""

    reads_inputs = True
    interval, observes, reads_queries = 4, 4, True

    def __init__(self) -> None:
        self.shown: list[Tokens] = []

    def score(self, tokens: Tokens) -> torch.Tensor:
        self.shown.append(replace(tokens, attention=tokens.observed.clone()))
        return tokens.keys[..., 0].float()


@both_positions
def test_a_policy_is_shown_what_it_asks_for(model, positions):
    cache, ids, past = EquipCache(model, Looking(), 16, recent=2, positions=positions), tiny.ids(1, TOKENS + 4), DynamicCache()
    feed(model, cache, ids[:, :TOKENS])
    first = cache.policy.shown[0]
    assert (first.budget, first.count, first.sinks, first.scores) == (16, TOKENS, 4, None)
    assert first.module is model.model.layers[0].self_attn
    assert first.inputs is not None
    assert first.inputs["hidden_states"].shape == (1, TOKENS, 32)
    assert first.queries is not None
    assert first.queries.shape == (1, 4, TOKENS, 8)
    feed(model, past, ids)
    keys = past.layers[0].keys
    torch.testing.assert_close(first.keys, keys[:, :, :TOKENS], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(first.attention.sum(-1), torch.full((1, 2), 4.0))
    for step in range(4):
        feed(model, cache, ids[:, TOKENS + step : TOKENS + step + 1])
    again = cache.policy.shown[4]
    assert (again.count, again.inputs, again.queries.shape) == (TOKENS + 4, None, (1, 4, 4, 8))
    assert (again.attention.sum(-1) > 2).all()  # evicted tokens take theirs along
    positions = again.positions.long()
    given = keys[..., 0].gather(-1, positions).masked_fill(positions >= TOKENS, -torch.inf)
    torch.testing.assert_close(again.scores[positions >= 4], given[positions >= 4])
    unrotated = first.geometry.unrotate(keys, torch.arange(TOKENS + 4))
    torch.testing.assert_close(again.unrotated_keys(), unrotated.take_along_dim(positions[..., None], 2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", ["future", "compactor", "expected_attention"])
def test_keys_whose_angles_are_not_known_are_scored_as_they_are(policy):
    model = tiny.llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
    cache = EquipCache(model, policy, 16, positions="original", head_budgets=None)
    feed(model, cache, tiny.ids(1, TOKENS))
    assert len(positions_of(cache)) == 16
