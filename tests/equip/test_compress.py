"""Pruning before the question is known: where a prompt's question begins, a budget for decoding, and `compress`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache
from hf_kvcaches.equip.pages import PagePool
from hf_kvcaches.equip.policies import KVZipPolicy, Policy, SnapKVPolicy
from hf_kvcaches.equip.policies.tokens import Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny
from tests.equip.cases import both_positions, padded, positions_of, stay
from tests.equip.cases import feed_all as feed

pytestmark = pytest.mark.usefixtures("no_grad")

CONTEXT, QUESTION = 40, 7


@pytest.mark.parametrize("policy", ["streaming", "future", "compactor", "keydiff", "expected_attention", "h2o", "tova"])
@pytest.mark.parametrize("budget", [0.5, 30])
@pytest.mark.parametrize("padding", [(), (5, 0)], ids=["whole", "padded"])
def test_a_question_is_read_behind_a_context_that_was_pruned_without_it(model, policy, budget, padding):
    ids, mask = padded(2, CONTEXT + QUESTION, *padding)
    one = EquipCache(model, policy, budget, question_start=-QUESTION)
    two = EquipCache(model, policy, budget, head_budgets="layer" if policy == "future" else None)
    together = feed(model, one, ids, mask)
    context = feed(model, two, ids[:, :CONTEXT], mask[:, :CONTEXT])
    question = feed(model, two, ids[:, CONTEXT:], mask)
    real = mask.bool()
    torch.testing.assert_close(together[real], torch.cat([context, question], 1)[real], atol=2e-4, rtol=1e-4)
    for layer in range(4):
        assert torch.equal(one.kept_positions(layer), two.kept_positions(layer))


def test_generate_with_a_question_goes_on_as_after_two_calls(model):
    ids = tiny.ids(1, CONTEXT + QUESTION, seed=4)
    two = EquipCache(model, "keydiff", 0.5)
    feed(model, two, ids[:, :CONTEXT])
    expected = model.generate(ids, past_key_values=two, max_new_tokens=6, do_sample=False)
    cache = EquipCache(model, "keydiff", 0.5, question_start=CONTEXT)
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize("start", [0, CONTEXT + 1, -CONTEXT - 1])
def test_a_question_that_begins_outside_of_the_prompt_is_refused(model, start):
    cache = EquipCache(model, "streaming", 20, question_start=start)
    with pytest.raises(ConfigError, match="question_start"):
        feed(model, cache, tiny.ids(1, CONTEXT))


@pytest.mark.parametrize("policy", ["streaming", "keydiff", "h2o"])
@pytest.mark.parametrize("decode_budget", [24, 0.6])
def test_decoding_fills_up_to_its_own_budget(model, policy, decode_budget):
    cache = EquipCache(model, policy, 12, decode_budget=decode_budget)
    ids = tiny.ids(1, CONTEXT + 20, seed=5)
    feed(model, cache, ids[:, :CONTEXT])
    assert len(positions_of(cache)) == 12
    before = positions_of(cache)
    for step in range(20):
        feed(model, cache, ids[:, CONTEXT + step : CONTEXT + step + 1])
        assert len(positions_of(cache)) == min(24, 13 + step)
        if step < 12:
            assert positions_of(cache) == [*before, *range(CONTEXT, CONTEXT + step + 1)]


def test_what_is_decoded_sees_the_pruned_prompt_and_all_that_came_since(model):
    cache, past = EquipCache(model, "streaming", 12, decode_budget=40, positions="original"), DynamicCache(config=model.config)
    ids = tiny.ids(2, CONTEXT + 10, seed=6)
    feed(model, cache, ids[:, :CONTEXT])
    feed(model, past, ids[:, :CONTEXT])
    kept = positions_of(cache)
    for layer in past.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    for step in range(CONTEXT, CONTEXT + 10):
        place = torch.full((2, 1), step)
        expected = model(input_ids=ids[:, step : step + 1], position_ids=place, past_key_values=past).logits
        torch.testing.assert_close(feed(model, cache, ids[:, step : step + 1]), expected, atol=2e-4, rtol=1e-4)


def test_a_decode_budget_below_the_budget_is_refused_and_a_share_of_the_prompt_is_no_less(model):
    cache = EquipCache(model, "streaming", 20, decode_budget=10)
    with pytest.raises(ConfigError, match="decode_budget"):
        feed(model, cache, tiny.ids(1, CONTEXT))
    share = EquipCache(model, "streaming", 20, decode_budget=0.25)
    feed(model, share, tiny.ids(1, CONTEXT))
    assert share.report().budget == (20,) * 4


# compress


@pytest.mark.parametrize("policy", ["streaming", "future", "compactor", "keydiff", "h2o", "snapkv"])
@both_positions
def test_compress_prunes_to_the_budget_again(model, policy, positions):
    chosen = SnapKVPolicy(window=4, kernel_size=3) if policy == "snapkv" else policy
    cache = EquipCache(model, chosen, 16, decode_budget=60, head_budgets=None, positions=positions)
    ids, mask = padded(2, CONTEXT + 30, 6, 0)
    feed(model, cache, ids[:, :CONTEXT], mask[:, :CONTEXT])
    for step in range(CONTEXT, CONTEXT + 20):
        feed(model, cache, ids[:, step : step + 1], mask[:, : step + 1])
    before = [set(positions_of(cache, row=row)) for row in range(2)]
    cache.compress(model)
    for row in range(2):
        kept = positions_of(cache, row=row)
        assert len(kept) == 16
        assert set(kept) <= before[row]
        assert set(kept) >= {6 * (row == 0), CONTEXT + 19}
    # and goes on
    logits = feed(model, cache, ids[:, CONTEXT + 20 :], mask)
    assert bool(logits.isfinite().all())


def test_compress_without_a_question_is_what_a_prefill_keeps(model):
    ids = tiny.ids(1, CONTEXT, seed=8)
    whole = EquipCache(model, "keydiff", 16, decode_budget=200)
    feed(model, whole, ids[:, :8])  # shorter than the budget: everything stays
    for part in ids[:, 8:].split(1, 1):
        feed(model, whole, part)
    assert len(positions_of(whole)) == CONTEXT
    whole.compress()
    past = DynamicCache(config=model.config)
    feed(model, past, ids)
    pruned = EquipCache.from_cache(past, model, "keydiff", 16)
    for layer in range(4):
        for head in range(2):
            assert positions_of(whole, layer, 0, head) == positions_of(pruned, layer, 0, head)


@pytest.mark.parametrize("policy", ["keydiff", "compactor", "expected_attention"])
def test_what_stands_behind_the_context_stays_and_changes_nothing(model, policy):
    ids, other = tiny.ids(1, CONTEXT + QUESTION, seed=9), tiny.ids(1, CONTEXT + QUESTION, seed=10)
    other[:, :CONTEXT] = ids[:, :CONTEXT]
    kept = []
    for text in (ids, other):
        cache = EquipCache(model, policy, 0.5, decode_budget=200)
        feed(model, cache, text[:, :CONTEXT])
        feed(model, cache, text[:, CONTEXT:])
        cache.compress(model, upto=CONTEXT)
        kept.append(positions_of(cache, 2, 0, 1))
        assert kept[-1][-QUESTION:] == list(range(CONTEXT, CONTEXT + QUESTION))
        assert len(kept[-1]) == CONTEXT // 2 + QUESTION
    assert kept[0] == kept[1]


def test_a_policy_that_has_seen_the_attention_of_the_question_cannot_forget_it(model):
    cache = EquipCache(model, "h2o", 16, decode_budget=60)
    feed(model, cache, tiny.ids(1, CONTEXT))
    with pytest.raises(UnsupportedError, match="question_start"):
        cache.compress(model, upto=30)


def test_compress_refuses_an_empty_cache_and_positions_that_are_not_there(model):
    cache = EquipCache(model, "keydiff", 16)
    with pytest.raises(ConfigError, match="context"):
        cache.compress(model)
    feed(model, cache, tiny.ids(1, CONTEXT))
    before = positions_of(cache)
    for upto in (0, CONTEXT + 1, 2.5):
        with pytest.raises(ConfigError, match="upto"):
            cache.compress(model, upto=upto)
    with pytest.raises(ConfigError, match="budget"):
        cache.compress(model, upto=2)  # 38 tokens behind, in a budget of 16
    assert positions_of(cache) == before


def test_compress_to_more_slots_than_heads_have_evicts_nothing(model):
    ids = tiny.ids(1, 3 * CONTEXT + 1, seed=21)
    cache = EquipCache(model, budget=0.5)
    feed(model, cache, ids[:, :CONTEXT])
    for step in range(CONTEXT, 3 * CONTEXT):
        feed(model, cache, ids[:, step : step + 1])
    before = kept_by(cache)
    cache.compress()  # to half of three times the tokens
    assert kept_by(cache) == before
    feed(model, cache, ids[:, -1:])
    assert kept_by(cache) == [[*head, 3 * CONTEXT] for head in before]


@pytest.mark.parametrize(("policy", "shared"), [("kvzip", "global"), ("h2o", "global"), ("h2o", "layer"), ("snapkv", "global")])
@pytest.mark.parametrize("change", ["compress", "edit"])
def test_recording_changes_nothing_about_what_stays(model, policy, shared, change):
    ids, kept = tiny.ids(1, CONTEXT + 40, seed=22), []
    for recording in (False, True):
        cache = EquipCache(model, SnapKVPolicy(window=4) if policy == "snapkv" else policy, 0.5, head_budgets=shared)
        feed(model, cache, ids[:, :CONTEXT])
        feed(model, cache, ids[:, CONTEXT : CONTEXT + 20])
        if recording:
            cache.activate_past_recording()
        if change == "edit":
            cache.edit(model, 30, 32, [5, 6, 7])
        else:
            cache.compress(model, input_ids=ids)
            for step in range(CONTEXT + 20, CONTEXT + 40):
                feed(model, cache, ids[:, step : step + 1])
        kept.append(kept_by(cache))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("policy", ["kvzip", "keydiff"])
def test_what_follows_the_context_outlives_it_while_decoding(model, policy):
    ids = tiny.ids(1, CONTEXT + QUESTION + 10, seed=23)
    cache = EquipCache(model, policy, 24, recent=1, head_budgets=None)
    feed(model, cache, ids[:, : CONTEXT + QUESTION])
    cache.compress(model, upto=CONTEXT, input_ids=ids)
    before = kept_by(cache)
    for step in range(CONTEXT + QUESTION, CONTEXT + QUESTION + 10):
        feed(model, cache, ids[:, step : step + 1])
    for old, new in zip(before, kept_by(cache), strict=True):
        assert {position for position in old if position >= CONTEXT} <= set(new)


class Failing(Policy):
    """Raises in the third layer that asks, as often as it is told to."""

    comparable = True

    def __init__(self) -> None:
        self.asked = self.failing = 0

    def score(self, tokens: Tokens) -> torch.Tensor:
        self.asked += 1
        if self.failing and self.asked % 4 == 3:
            raise KeyboardInterrupt
        return tokens.keys.float().norm(dim=-1)


def test_a_compress_that_failed_is_no_part_of_the_next_pass(model):
    ids, policies = tiny.ids(1, CONTEXT + 20, seed=24), (Failing(), Failing())
    caches = [EquipCache(model, policy, 16, head_budgets="global") for policy in policies]
    for cache in caches:
        feed(model, cache, ids[:, :CONTEXT])
    policies[0].failing = 1
    with pytest.raises(KeyboardInterrupt):
        caches[0].compress(model)
    policies[0].failing = 0
    logits = [feed(model, cache, ids[:, CONTEXT:]) for cache in caches]
    assert torch.equal(*logits)
    assert kept_by(caches[0]) == kept_by(caches[1])


def compressed(model: PreTrainedModel, ids: torch.Tensor) -> EquipCache:
    cache = EquipCache(model, "kvzip", 40)
    feed(model, cache, ids)
    cache.compress(model, input_ids=ids)
    return cache


def overflown(model: PreTrainedModel, ids: torch.Tensor) -> EquipCache:
    cache = EquipCache(model, "future", 100)
    feed(model, cache, ids[:, :90])
    feed(model, cache, ids[:, 90:])
    return cache


def evicted(model: PreTrainedModel, ids: torch.Tensor) -> EquipCache:
    cache = EquipCache(model, "streaming", 100)
    feed(model, cache, ids[:, :90])
    cache.evict(range(20, 30))
    return cache


@pytest.mark.parametrize("make", [compressed, overflown, evicted])
def test_no_memory_is_held_for_what_was_held_before(make):
    cache = make(tiny.llama(hidden_size=256), tiny.ids(1, 300, seed=25))
    for each in (cache, copy.deepcopy(cache)):
        assert len(pickle.dumps(each)) < 1.4 * cache.report().bytes


# kvzip


def reconstruction(model: PreTrainedModel, ids: torch.Tensor, chunk: int = 512) -> list[torch.Tensor]:
    """What each token of a context gets of its chunk's repetition, by the model's own attention: (kv_heads, tokens) of each layer."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    groups, tokens = model.config.num_attention_heads // model.config.num_key_value_heads, ids.shape[1]
    parts = []
    count = -(-tokens // chunk)  # chunks of about one length
    for number in range(count):
        start, stop = tokens * number // count, tokens * (number + 1) // count
        part, past = ids[:, start:stop], DynamicCache(config=model.config)
        eager(input_ids=ids[:, :stop], past_key_values=past)
        places = torch.arange(tokens, tokens + part.shape[1])[None]
        weights = eager(input_ids=part, position_ids=places, past_key_values=past, output_attentions=True).attentions
        shares = [
            (layer / (layer.sum(-1, keepdim=True) - layer[..., :start].sum(-1, keepdim=True)))[0, ..., start:stop] for layer in weights
        ]
        parts.append([share.amax(1).unflatten(0, (-1, groups)).amax(1) for share in shares])
    return [torch.cat(layer, 1) for layer in zip(*parts, strict=True)]


def kept_by(cache: EquipCache) -> list[list[int]]:
    """The positions that each head of each layer keeps."""
    return [positions_of(cache, layer, 0, head) for layer in range(4) for head in range(2)]


@pytest.mark.parametrize("parts", [(CONTEXT,), (16, 16, 8)], ids=["at once", "in parts"])
@both_positions
@pytest.mark.parametrize("chunk", [512, 15])
@pytest.mark.parametrize("shared", ["auto", None])
def test_kvzip_keeps_what_the_model_looks_at_when_it_reads_the_context_again(model, parts, positions, chunk, shared):
    ids = tiny.ids(1, CONTEXT, seed=11)
    cache = EquipCache(model, KVZipPolicy(deferred=chunk), 16, recent=3, head_budgets=shared, positions=positions)
    for part in ids.split(parts, 1):
        feed(model, cache, part)
    assert len(positions_of(cache)) == CONTEXT
    cache.compress(model, input_ids=ids)
    assert cache.seen == CONTEXT
    heads = [head.tolist() for layer in reconstruction(model, ids, chunk) for head in layer]
    groups = [[head] for head in heads] if shared is None else [heads]
    expected = [kept for group in groups for kept in stay(group, [list(range(CONTEXT))] * len(group), 16, 4, 3)]
    assert kept_by(cache) == expected


def test_kvzip_knows_a_context_that_generate_fed(model):
    ids = tiny.ids(1, CONTEXT, seed=20)
    fed, given = EquipCache(model, "kvzip", 16), EquipCache(model, "kvzip", 16)
    model.generate(ids, past_key_values=fed, max_new_tokens=1)
    fed.compress()
    feed(model, given, ids)
    given.compress(model, input_ids=ids)
    assert torch.equal(fed.kept_positions(3), given.kept_positions(3))


def test_what_kvzip_keeps_of_a_row_does_not_depend_on_padding(model):
    ids, mask = padded(2, CONTEXT, 9, 0)
    both = EquipCache(model, "kvzip", 12)
    feed(model, both, ids, mask)
    both.compress(model, input_ids=ids)
    for row, padding in enumerate((9, 0)):
        alone = EquipCache(model, "kvzip", 12)
        feed(model, alone, ids[row : row + 1, padding:])
        alone.compress(input_ids=ids[row : row + 1, padding:])
        assert [position - padding for position in positions_of(both, 1, row, 1)] == positions_of(alone, 1, 0, 1)


def test_kvzip_answers_many_questions_from_one_context(model):
    ids = tiny.ids(1, CONTEXT, seed=12)
    cache = EquipCache(model, "kvzip", 0.5)
    feed(model, cache, ids)
    cache.compress(model, input_ids=ids)
    assert sum(map(len, kept_by(cache))) == 8 * CONTEXT // 2
    for seed in (13, 14):
        question = tiny.ids(1, QUESTION, seed=seed)
        answering = copy.deepcopy(cache)
        output = model.generate(torch.cat([ids, question], 1), past_key_values=answering, min_new_tokens=5, max_new_tokens=5)
        assert output.shape[1] == CONTEXT + QUESTION + 5
        assert set(positions_of(answering)) >= set(range(CONTEXT + 1, CONTEXT + QUESTION + 4))
    assert cache.seen == CONTEXT


def test_kvzip_refuses_to_decode_before_it_has_compressed(model):
    ids = tiny.ids(1, CONTEXT)
    cache = EquipCache(model, "kvzip", 16)
    with pytest.raises(UnsupportedError, match="compress"):
        model.generate(ids, past_key_values=cache, max_new_tokens=3)
    assert len(positions_of(cache)) == CONTEXT


def test_kvzip_refuses_drafts_behind_a_context_before_it_takes_either(model):
    ids = tiny.ids(1, CONTEXT)
    cache, other = (EquipCache(model, "kvzip", 16, head_budgets="layer") for _ in range(2))
    cache.activate_past_recording()
    with pytest.raises(UnsupportedError, match="compress"):
        model(input_ids=ids, past_key_values=cache, logits_to_keep=4)  # as in assisted generation with three drafts
    assert cache.seen == 0
    for each in (cache, other):
        model(input_ids=ids, past_key_values=each)
        each.compress(model, input_ids=ids)
    assert positions_of(cache) == positions_of(other)


def test_kvzip_reads_a_context_again_once(model):
    ids = tiny.ids(1, CONTEXT, seed=26)
    cache = EquipCache(model, "kvzip", 16)
    feed(model, cache, ids)
    cache.compress(model, input_ids=ids)
    before = kept_by(cache)
    with pytest.raises(UnsupportedError, match="new cache"):
        cache.compress(model, input_ids=ids)
    assert kept_by(cache) == before


def test_kvzip_reads_a_context_again_behind_it_whatever_was_evicted(model):
    cache, ids, passes = EquipCache(model, "kvzip", 12), tiny.ids(1, CONTEXT, seed=17), []
    feed(model, cache, ids)
    cache.evict(range(6, 12))
    with model.model.register_forward_pre_hook(lambda module, args, options: passes.append(options), with_kwargs=True):
        cache.compress(model, input_ids=ids)
    (again,) = passes
    assert again["attention_mask"] is None
    assert again["position_ids"][0].tolist() == list(range(CONTEXT, 2 * CONTEXT))
    assert not set(range(6, 12)) & set(positions_of(cache))


def test_kvzip_says_which_ids_it_needs(model):
    cache = EquipCache(model, "kvzip", 16)
    feed(model, cache, tiny.ids(1, CONTEXT))
    for wrong in (None, tiny.ids(1, CONTEXT - 1), tiny.ids(2, CONTEXT)):
        with pytest.raises(ConfigError, match="input_ids"):
            cache.compress(model, input_ids=wrong)
    assert cache.seen == CONTEXT


def test_kvzip_leaves_sliding_layers_as_they_were():
    model = tiny.gemma2()
    ids, more = tiny.ids(1, CONTEXT, seed=15), tiny.ids(1, 5, seed=16)
    cache = EquipCache(model, "kvzip", CONTEXT)  # nothing goes
    feed(model, cache, ids)
    cache.compress(model, input_ids=ids)
    past = DynamicCache(config=model.config)
    feed(model, past, ids)
    torch.testing.assert_close(feed(model, cache, more), feed(model, past, more), atol=2e-4, rtol=1e-4)


def test_a_failure_while_the_context_is_read_again_leaves_everything_as_it_was(model):
    ids = tiny.ids(1, CONTEXT, seed=17)
    cache = EquipCache(model, "kvzip", 16)
    feed(model, cache, ids)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[2].mlp.register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            cache.compress(model, input_ids=ids)
    finally:
        handle.remove()
    assert len(positions_of(cache)) == CONTEXT
    cache.compress(model, input_ids=ids)
    untroubled = EquipCache(model, "kvzip", 16)
    feed(model, untroubled, ids)
    untroubled.compress(model, input_ids=ids)
    assert kept_by(cache) == kept_by(untroubled)


def test_a_context_that_waits_can_be_saved_and_compressed_after_loading(model, tmp_path: Path):
    ids = tiny.ids(1, CONTEXT, seed=18)
    cache = EquipCache(model, "kvzip", 16)
    feed(model, cache, ids)
    cache.save(tmp_path / "cache.safetensors")
    loaded = EquipCache.load(tmp_path / "cache.safetensors", model)
    for one in (cache, loaded):
        one.compress(model, input_ids=ids)
    assert torch.equal(loaded.kept_positions(2), cache.kept_positions(2))


def test_reset_waits_for_another_context(model):
    ids = tiny.ids(1, CONTEXT, seed=19)
    cache = EquipCache(model, "kvzip", 16)
    for _ in range(2):
        feed(model, cache, ids)
        assert len(positions_of(cache)) == CONTEXT
        cache.compress(model, input_ids=ids)
        assert sum(map(len, kept_by(cache))) == 8 * 16
        cache.reset()


@pytest.mark.parametrize("options", [{"policy": "kvzip"}, {"decode_budget": 64}, {"question_start": -3}], ids=str)
def test_pages_are_refused_with_more_than_one_budget(model, options):
    for pages in ({"page_size": 16}, {"pool": PagePool(model, pages=8, page_size=16)}):
        with pytest.raises(UnsupportedError, match="pages"):
            EquipCache(model, **{"policy": "streaming", "budget": 32, **options, **pages})


WRONG = {"decode_budget": (0, "64", 1.5, True, [64, 64]), "question_start": (1.5, "end", True)}


@pytest.mark.parametrize("options", [{name: value} for name, values in WRONG.items() for value in values], ids=str)
def test_options_of_a_wrong_kind_are_refused_when_the_cache_is_made(model, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        EquipCache(model, "streaming", 32, **options)
