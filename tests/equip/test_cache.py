"""What `EquipCache` promises besides the tokens that it keeps: settings, refusals, memory, other models, copies and files."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import enable
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.view import _attend
from hf_kvcaches.equip.budgets import pyramid_budgets
from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.equip.policies import KeyDiffPolicy, Policy, SnapKVPolicy, policy_from_settings
from hf_kvcaches.equip.policies.tokens import Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import testbed
from tests.conformance import models
from tests.conformance.driving import feed, left_padded
from tests.equip.cases import BUDGET, both_positions, build, build_reference, held, steps, text

pytestmark = pytest.mark.usefixtures("no_grad")


# Settings.


WRONG: dict[str, tuple[Any, ...]] = {
    "budget": (4, 0, 0.0, 1.5, True, [16, 16, 16], [16, 0], [16, 4]),
    "policy": ("lru", KeyDiffPolicy),
    "positions": ("relative",),
    "head_budgets": ("adakv",),
    "backend": ("cuda",),
    "sinks": (-1, 2.0),
    "recent": (True,),
}
TOO_SMALL = [{"budget": 3, "policy": "streaming"}, {"budget": 3, "policy": "h2o"}, {"budget": 60, "policy": SnapKVPolicy(window=64)}]


@pytest.mark.parametrize("settings", [{name: value} for name, values in WRONG.items() for value in values] + TOO_SMALL, ids=str)
def test_settings_that_can_not_work_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(settings))}(\[1\])?:"):
        EquipCache(models.tiny("llama"), **settings)


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_the_smallest_budget_keeps_the_sinks_and_the_newest_token(policy: str) -> None:
    model = models.tiny("llama")
    cache = build(model, policy, 5, recent=1)
    feed(model, cache, text(20), [12, *[1] * 8])
    assert held(cache)[1].tolist() == [[[0, 1, 2, 3, 19]] * 2]


def test_a_share_is_of_the_prompt_and_of_the_next_one_after_a_reset() -> None:
    model = models.tiny("llama")
    cache = EquipCache(model, "h2o", 0.5)
    for prompt in (40, 60):
        feed(model, cache, text(prompt + 10), steps(prompt, prompt + 10))
        assert cache.report().kept == (prompt // 2,) * 2
        cache.reset()
    ids, mask = left_padded([text(20), text(40)])
    feed(model, cache, ids, [40], mask)
    assert cache.report().kept == (20, 20)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "tova", "snapkv", "keydiff", "future"])
@pytest.mark.parametrize("options", [{}, {"page_size": 4}, {"recent": 9}, {"sinks": 0}, {"decode_budget": 0.5}], ids=str)
def test_a_share_of_a_short_prompt_holds_what_always_stays_and_one_token(policy: str, options: Any) -> None:
    model = models.tiny("llama")
    for prompt in (1, 4, 12):
        cache = EquipCache(model, policy, 0.25, **options)
        feed(model, cache, text(prompt + 20), steps(prompt, prompt + 20))
        sinks = options.get("sinks", 4)
        assert all(set(range(sinks)) <= set(head) for head in cache.kept_positions(0)[0].tolist())
        assert min(cache.report().kept) > sinks


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_layers_may_have_budgets_of_their_own(policy: str) -> None:
    model = models.tiny("llama")
    for budget, kept in (([20, 12], (20, 12)), ([0.5, 10], (15, 10)), (pyramid_budgets(model, 16), (24, 8))):
        cache = build(model, policy, budget)
        logits = feed(model, cache, text(60), steps(30, 60))
        assert logits.isfinite().all()
        assert cache.report().kept == kept
        assert [cache.kept_positions(layer).shape[-1] for layer in range(2)] == list(kept)


class SmallValues(Policy):
    """Of the user's own: one method."""

    interval = 10

    def score(self, tokens: Tokens) -> torch.Tensor:
        return -tokens.values.float().norm(dim=-1)


@both_positions
def test_a_policy_of_ones_own_needs_one_method(positions: Any) -> None:
    model, ids = models.build("llama", num_hidden_layers=1), text(70)
    layer = model.model.layers[0]
    values = layer.self_attn.v_proj(layer.input_layernorm(model.model.embed_tokens(ids))).unflatten(-1, (2, 16))
    worth = (-values.norm(dim=-1))[0].T.tolist()
    cache = EquipCache(model, SmallValues(), BUDGET, sinks=2, positions=positions)
    feed(model, cache, ids, steps(30, 70))
    for head, expected in enumerate(worth):  # three recent tokens are a quarter of the slots that no sink takes
        kept = [0, 1, *sorted(range(2, 27), key=lambda t: expected[t])[-(BUDGET - 5) :], 27, 28, 29]
        scored = set(range(30))
        for new in range(30, 70):
            # Tokens that came since the last scoring stay longest, and among them the newest.
            kept.remove(min((t for t in kept if 2 <= t < new - 2), key=lambda t: (t not in scored, expected[t] if t in scored else t)))
            kept.append(new)
            if (new - 29) % 10 == 0:
                scored.update(kept)
        assert held(cache)[0][0, head].tolist() == sorted(kept)


@dataclass(frozen=True)
class Failing(SmallValues):
    """Fails at the last of two layers' second blocks."""

    asked: list[None] = field(default_factory=list)

    def score(self, tokens: Tokens) -> torch.Tensor:
        self.asked.append(None)
        if len(self.asked) == 4:
            raise RuntimeError("no score")
        return super().score(tokens)


@pytest.mark.parametrize("head_budgets", [None, "layer"])
def test_a_block_that_can_not_be_scored_leaves_the_last_layer_behind_and_the_next_pass_is_refused(head_budgets: Any) -> None:
    model, ids = models.build("llama", num_hidden_layers=2), text(40)
    cache = EquipCache(model, Failing(), BUDGET, head_budgets=head_budgets)
    feed(model, cache, ids[:, :20], [20])
    used = cache.layers[1].table.used
    with pytest.raises(RuntimeError, match="no score"):
        model(input_ids=ids[:, 20:30], cache=cache)
    assert (cache.layers[1].seen, cache.layers[1].table.used) == (20, used)
    with pytest.raises(UnsupportedError, match="a forward pass or a crop failed"):
        model(input_ids=ids[:, 30:31], cache=cache)
    cache.reset()
    feed(model, cache, ids, [20, 20])
    assert cache.seen == 40


# A config in place of the model.


@pytest.mark.parametrize("policy", ["streaming", "keydiff"])
@both_positions
def test_a_cache_built_with_a_config_equals_one_built_with_the_model(policy: str, positions: str) -> None:
    model = models.tiny("llama")
    twin = models.twin_of(model)
    plain, own = build(twin.config, policy, positions=positions), build(model, policy, positions=positions)
    ids, spans = torch.cat([text(50), text(28, 60)], 1), [30, *[1] * 20, 7, *[1] * 21]
    found = feed(twin, plain, ids, spans, keep=0)
    torch.testing.assert_close(found, feed(model, own, ids, spans, keep=0), rtol=0, atol=1e-4)
    for one, other in zip(held(plain), held(own), strict=True):
        assert torch.equal(one, other)


def test_with_another_copy_of_the_config_the_model_has_to_be_enabled() -> None:
    model = models.build("llama")
    cache = build(copy.deepcopy(model.config), "h2o")
    with pytest.raises(UnsupportedError, match=r"hf_kvcaches\.enable\(model\)"):
        feed(model, cache, text(30), [30])
    assert cache.seen == 0
    enable(model)
    ids = torch.cat([text(50), text(50, 9)])
    cache.reset()
    found = feed(model, cache, ids, steps(30, 50))
    torch.testing.assert_close(found, feed(model, build(model, "h2o"), ids, steps(30, 50)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_cache_built_with_another_model_is_refused(enabled: bool) -> None:
    mine, other = models.build("llama"), models.build("llama")
    cache = build(mine, "h2o")
    for model in (mine, other) if enabled else ():
        enable(model)
    with pytest.raises((ConfigError, UnsupportedError), match=r"built (with another|without this) model"):
        feed(other, cache, text(30), [30])
    assert cache.seen == 0
    assert mine.config._attn_implementation == ("hf_kvcaches" if enabled else "sdpa")


def test_a_padded_batch_takes_no_more_memory_than_its_tokens_need() -> None:
    model = models.tiny("llama")
    ids, mask = left_padded([text(10), text(6, 9)])
    alone, batch = build(model, "streaming", budget=32768), build(model, "streaming", budget=32768)
    feed(model, alone, text(10), [10])
    feed(model, batch, ids, [10], mask)
    assert batch.report().bytes <= 3 * alone.report().bytes
    more = torch.nn.functional.pad(mask, (0, 80), value=1)
    found = feed(model, batch, text(80, 5).expand(2, -1), mask=more)
    torch.testing.assert_close(found[:1], feed(model, alone, text(80, 5)), rtol=0, atol=1e-4)
    assert batch.kept_positions(0).shape[-1] == 32768


# Whose the slots are.


def test_slots_name_their_tokens_and_empty_ones_say_so() -> None:
    model = models.tiny("llama")
    for policy in ("streaming", "h2o"):
        cache = build(model, policy)
        assert cache.kept_positions(0).numel() == 0
        feed(model, cache, text(7), [5, 1, 1])
        assert cache.kept_positions(1).tolist() == [[[*range(7), *[-1] * 9]] * 2]
    cache = build(model, "streaming")
    feed(model, cache, text(40), [20, *[1] * 20])
    before = cache.kept_positions(0)
    feed(model, cache, text(1, 50))
    changed = (cache.kept_positions(0) != before).sum(-1)
    assert changed.tolist() == [[1, 1]], "a new token takes one slot, and no other moves"


def test_a_layer_without_slots_of_ours_has_no_kept_positions() -> None:
    cache = build(models.tiny("gemma2"), "streaming")
    with pytest.raises(ConfigError, match="layer_idx: expected a layer with full attention"):
        cache.kept_positions(0)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "keydiff"])
def test_positions_count_padding_also_where_it_comes_in_the_middle(policy: str) -> None:
    model = models.tiny("llama")
    prompts = [text(12), text(20, 30), text(7, 60)]
    questions = [text(2 + row, 80 + 3 * row) for row in range(3)]
    replies = torch.cat([text(4, 70 + 5 * row) for row in range(3)])
    ids, mask = left_padded(prompts)
    asked, asked_mask = left_padded(questions)
    real = torch.cat([mask, torch.ones_like(replies), asked_mask, torch.ones_like(replies)], 1)
    whole = torch.cat([ids, replies, asked, replies.roll(1, 0)], 1)
    cache = build(model, policy, 10, sinks=2)
    start = 0
    alone = [build(model, policy, 10, sinks=2) for _ in range(3)]
    for span in [20, 1, 1, 1, 1, 4, 1, 1, 1, 1]:
        stop = start + span
        logits = feed(model, cache, whole[:, start:stop], [span], real[:, :stop])
        for row, single in enumerate(alone):
            new = whole[row, start:stop][real[row, start:stop].bool()][None]
            expected = feed(model, single, new, [new.shape[1]])
            torch.testing.assert_close(logits[row], expected[0], rtol=0, atol=1e-4)
            # From a row's own count to the batch's, and -1 stays.
            places = torch.cat([real[row].nonzero()[:, 0], torch.tensor([-1])])
            for ours, theirs in zip(held(cache), held(single), strict=True):
                assert torch.equal(ours[row], places[theirs[0]])
        start = stop


# Other models.


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_models_without_rotary_positions_have_nothing_to_compact(family: str, policy: str) -> None:
    model = models.tiny(family)
    expected = feed(model, build_reference(model, policy, positions="original"), text(70), steps(20, 70))
    for positions in ("compact", "original"):
        found = feed(model, build(model, policy, positions=positions), text(70), steps(20, 70))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_neox", "phi3"])
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_softcaps_windows_and_partly_rotated_keys_equal_the_reference(family: str, policy: str) -> None:
    model, spans = models.tiny(family), [30, *[1] * 20, 8, *[1] * 10]
    expected = feed(model, build_reference(model, policy), text(68), spans)
    torch.testing.assert_close(feed(model, build(model, policy, positions="compact"), text(68), spans), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "tova"])
@both_positions
def test_a_position_bias_goes_with_its_tokens(policy: str, positions: Any) -> None:
    torch.manual_seed(0)
    model = models.build("llama", num_hidden_layers=1)
    module, cache = model.model.layers[0].self_attn, build(model, policy, positions=positions)
    total, spans = 45, [24, *[1] * 12, 5, 1, 1, 1, 1]
    query, (keys, values) = torch.randn(1, 4, total, 16), torch.randn(2, 1, 2, total, 16)
    # Any bias at all, which a wrong column would show; by distance within the cache it has to be a function of the distance.
    by_distance = torch.randn(4, total)
    bias = by_distance[:, (torch.arange(total)[:, None] - torch.arange(total)).clamp(min=0)][None]
    geometry = RotaryGeometry.from_config(model.config, layer_idx=0)
    start = 0
    for span in spans:
        stop, new = start + span, torch.arange(start, start + span)
        before = held(cache)[0] if start else torch.empty(1, 2, 0, dtype=torch.long)
        turned = [geometry.rotate(x[:, :, start:stop], new) for x in (query, keys)]
        view, _ = cache.update(turned[1], values[:, :, start:stop], 0)
        found, _ = _attend(module, turned[0], view, view, None, scaling=0.3, position_bias=bias[:, :, start:stop, :stop])
        seen = held(cache)[0] if span == 1 else torch.cat([before, new.expand(1, 2, -1)], -1)
        seen = seen[seen >= 0].view(1, 2, -1)
        expected = attention_by_hand(query, keys, values, by_distance, seen, span, geometry, positions == "compact")
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        start = stop


def attention_by_hand(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    by_distance: torch.Tensor,
    seen: torch.Tensor,
    span: int,
    geometry: Any,
    compact: bool,
) -> torch.Tensor:
    """(1, span, 4, 16): each head over the tokens `seen` by its key head, in order, of which the last `span` ask."""
    output = torch.empty(1, span, 4, 16)
    for head in range(4):
        tokens = seen[0, head // 2]
        places = torch.arange(tokens.numel()) if compact else tokens
        turn = lambda x, at: geometry.rotate(x[None, None], at)[0, 0]  # noqa: E731
        asking = turn(query[0, head, tokens[-span:]], places[-span:])
        distance = places[-span:, None] - places
        scores = asking @ turn(keys[0, head // 2, tokens], places).T * 0.3 + by_distance[head][distance.clamp(min=0)]
        output[0, :, head] = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ values[0, head // 2, tokens]
    return output


def test_the_torch_backend_is_what_auto_takes_on_a_cpu() -> None:
    model = models.tiny("llama")
    expected = feed(model, build(model, "h2o"), text(60), steps(30, 60))
    found = feed(model, build(model, "h2o", backend="torch"), text(60), steps(30, 60))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# Memory, copies, files.


@pytest.mark.parametrize("prompt", [300, 20])
@both_positions
def test_streaming_takes_the_memory_of_its_budget_and_no_more(prompt: int, positions: str) -> None:
    model = models.build("llama", head_dim=64, num_hidden_layers=1)
    cache, budget = build(model, "streaming", 128, positions=positions), 128
    ids = torch.randint(1, models.VOCABULARY, (2, prompt + 130))
    feed(model, cache, ids, steps(prompt, prompt + 130))
    a_token = 2 * 2 * 64 * 4  # keys and values, two heads, float32
    assert cache.report().kept == (budget,)
    assert cache.report().bytes <= (1.01 * budget + 4 / 2) * 2 * a_token  # and once more the keys of the sinks


def test_a_policy_with_scores_takes_a_few_bytes_a_slot_beside() -> None:
    model = models.build("llama", head_dim=64, num_hidden_layers=1)
    cache = build(model, "h2o", 128)
    feed(model, cache, torch.randint(1, models.VOCABULARY, (1, 200)), steps(150, 200))
    assert cache.report().bytes <= 128 * 2 * (2 * 64 * 4 + 16)


@pytest.mark.parametrize("indices", [[2, 0], [True, False, True], slice(0, 3, 2), [0], [1], [2]], ids=str)
@pytest.mark.parametrize("options", [{}, {"page_size": 4}, {"storage": "int8"}, {"head_budgets": "layer"}], ids=str)
def test_picked_rows_go_on(options: Any, indices: Any) -> None:
    model, ids = models.tiny("llama"), torch.cat([text(45, 20 * row) for row in range(3)])
    cache = EquipCache(model, "h2o", BUDGET, **options)
    feed(model, cache, ids[:, :30], [30])
    whole, rows = copy.deepcopy(cache), torch.arange(3)[indices]
    cache.batch_select_indices(indices)
    found, expected = feed(model, cache, ids[rows, 30:]), feed(model, whole, ids[:, 30:])
    torch.testing.assert_close(found, expected[rows], rtol=0, atol=1e-4)


@pytest.mark.parametrize("head_budgets", [None, "layer", "global"])
def test_rows_are_picked_outside_of_inference_mode(head_budgets: Any) -> None:
    model, ids = models.tiny("llama"), torch.cat([text(45, 20 * row) for row in range(3)])
    cache = EquipCache(model, SnapKVPolicy(window=8), BUDGET, head_budgets=head_budgets)
    with torch.inference_mode():
        feed(model, cache, ids[:, :40], [40])
        whole = copy.deepcopy(cache)
        expected = feed(model, whole, ids[:, 40:])
    cache.batch_select_indices(slice(0, 2))
    torch.testing.assert_close(feed(model, cache, ids[:2, 40:]), expected[:2], rtol=0, atol=1e-4)


def test_a_second_turn_with_guidance_goes_on_where_the_first_ended() -> None:
    model, talks = models.tiny("llama"), []
    for cache in (build(model, "h2o", 64), DynamicCache(config=model.config)):
        ids = text(12)
        for turn in range(2):
            options = {"guidance_scale": 1.5, "negative_prompt_ids": text(5, 40), "do_sample": False, "eos_token_id": []}
            ids = model.generate(torch.cat([ids, text(4, 30 + turn)], 1), past_key_values=cache, max_new_tokens=3, **options)
        talks.append(ids)
    assert torch.equal(*talks)


# Against the published presses.


PUBLISHED = json.loads((Path(__file__).parent / "kvpress_kept.json").read_text())


def listed(spans: str) -> list[int]:
    """`0-3 7` as 0, 1, 2, 3, 7."""
    ends = [[int(end) for end in span.split("-")] for span in spans.split()]
    return [position for span in ends for position in range(span[0], span[-1] + 1)]


@pytest.fixture(scope="module")
def base() -> Any:
    return testbed.load("base")[0]


@pytest.mark.parametrize("name", sorted(set(PUBLISHED["kept"]) - {"h2o"}))  # that press takes a mean where the paper sums
def test_a_prompt_is_pruned_to_the_tokens_that_the_press_of_that_name_keeps(base: Any, name: str) -> None:
    parameters = dict(PUBLISHED["settings"].get(name, {}))
    sinks = parameters.pop("sinks", 0)
    policy = policy_from_settings({"policy": name, **parameters})
    for budget, layers in PUBLISHED["kept"][name].items():
        cache = EquipCache(base, policy, int(budget), sinks=sinks, recent=0, positions="original", head_budgets=None)
        base(torch.tensor([PUBLISHED["ids"]]), past_key_values=cache, logits_to_keep=1)
        compared = 0
        for layer, expected in enumerate(layers):
            if expected is not None:  # else a choice between equals
                assert cache.kept_positions(layer)[0].tolist() == [listed(head) for head in expected]
                compared += 1
        assert compared >= 3


@pytest.mark.parametrize("step", [1, 6])
def test_a_ready_mask_hides_tokens_in_each_head_that_keeps_them(step: int) -> None:
    model, ids = models.tiny("llama"), text(46)
    masked, evicted = (EquipCache(model, "h2o", 24, decode_budget=32, positions="original") for _ in range(2))
    for cache in (masked, evicted):
        model(input_ids=ids[:, :40], past_key_values=cache)
    hidden = range(5, 10)
    evicted.evict(hidden)
    seen = torch.ones(1, 1, step, 40 + step).bool()
    seen[..., -step:] = torch.ones(step, step).tril().bool()
    seen[..., hidden] = False
    new = ids[:, 40 : 40 + step]
    logits = model(input_ids=new, past_key_values=masked, attention_mask=seen).logits
    torch.testing.assert_close(logits, model(input_ids=new, past_key_values=evicted).logits, atol=1e-4, rtol=1e-4)
