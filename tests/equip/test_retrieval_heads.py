"""`RetrievalHeads` finds the heads that need all tokens; a cache keeps all of them in those heads, and a budget in the others."""

from __future__ import annotations

import copy
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache, FingerprintMismatch, RetrievalHeads
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import testbed, tiny
from tests.conformance.driving import left_padded
from tests.equip.cases import BUDGET, each_way
from tests.equip.cases import feed_all as feed
from tests.testbed.documents import Filler, fit_document

SINKS = 4
# Of 4 layers with 2 KV heads each: one head of the first two layers, both of the third, none of the last.
WHOLE = {0: [True, False], 1: [False, True], 2: [True, True], 3: [False, False]}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.llama()


def heads_of(whole: dict[int, list[bool]]) -> RetrievalHeads:
    costs = {layer: torch.tensor([1.0 if keeps else 0.0 for keeps in heads]) for layer, heads in whole.items()}
    keeping = sum(map(sum, whole.values()))
    return RetrievalHeads(costs, tokens=1, share=keeping / sum(map(len, whole.values())))


def cache_of(model: Any, policy: Any = "streaming", whole: dict[int, list[bool]] = WHOLE, **options: Any) -> EquipCache:
    return EquipCache(model, policy, BUDGET, sinks=SINKS, head_budgets=heads_of(whole), **options)


def kept(cache: EquipCache, layer: int, row: int = 0) -> list[list[int]]:
    return [sorted(p for p in head if p >= 0) for head in cache.kept_positions(layer)[row].tolist()]


def masked_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    """Attention of one decoded token, in which heads that do not keep all tokens see sinks and the newest ones."""
    group, tokens = query.shape[1] // key.shape[1], key.shape[2]
    scores = query @ key.repeat_interleave(group, 1).mT * scaling
    order = torch.arange(tokens)
    if query.shape[2] == 1:
        hidden = (order >= SINKS) & (order < tokens - (BUDGET - SINKS))
        streams = ~torch.tensor(WHOLE[module.layer_idx]).repeat_interleave(group)
        scores = scores.masked_fill(streams[:, None, None] & hidden, -torch.inf)
    else:
        scores = scores.masked_fill(order[:, None] < order, -torch.inf)
    return (scores.softmax(-1) @ value.repeat_interleave(group, 1)).transpose(1, 2), None


def test_the_others_see_sinks_and_recent_tokens_and_these_see_all(model: PreTrainedModel) -> None:
    AttentionInterface.register("whole_and_streaming", masked_attention)
    reference = tiny.llama()
    reference.set_attn_implementation("whole_and_streaming")
    ids = tiny.ids(1, 60)
    cache, past = cache_of(model, positions="original"), DynamicCache()
    for part in (ids[:, :30], *ids[:, 30:].split(1, 1)):
        torch.testing.assert_close(feed(model, cache, part), feed(reference, past, part), atol=1e-4, rtol=1e-4)


@each_way
def test_all_heads_whole_are_the_full_cache_and_none_the_policy_alone(model: PreTrainedModel, way: dict[str, Any]) -> None:
    ids = tiny.ids(2, 160)
    for keeps, other in ((True, DynamicCache(config=model.config)), (False, EquipCache(model, "streaming", BUDGET, sinks=SINKS, **way))):
        cache = cache_of(model, whole={layer: [keeps, keeps] for layer in range(4)}, **way)
        for part in (ids[:, :40], *ids[:, 40:150].split(1, 1), ids[:, 150:]):
            torch.testing.assert_close(feed(model, cache, part), feed(model, other, part), atol=1e-4, rtol=1e-4)


@each_way
@pytest.mark.parametrize("policy", ["streaming", "h2o", "keydiff"])
def test_whole_heads_grow_and_the_others_keep_the_budget(model: PreTrainedModel, policy: str, way: dict[str, Any]) -> None:
    cache = cache_of(model, policy, **way)
    feed(model, cache, tiny.ids(1, 30))
    full = cache.report().bytes
    for step in range(120):
        feed(model, cache, tiny.ids(1, 1, seed=step))
    feed(model, cache, tiny.ids(1, 7))
    for layer, heads in WHOLE.items():
        for keeps, positions in zip(heads, kept(cache, layer), strict=True):
            assert len(positions) == (157 if keeps else BUDGET)
            assert positions[:SINKS] == [0, 1, 2, 3]
    assert cache.report().bytes > full
    everything = EquipCache(model, policy, 512, sinks=SINKS, recent=1, **way)
    feed(model, everything, tiny.ids(1, 157))
    assert cache.report().bytes < 0.9 * everything.report().bytes


def test_rows_with_padding_keep_all_of_their_own_tokens(model: PreTrainedModel) -> None:
    ids, mask = left_padded([tiny.ids(1, 40), tiny.ids(1, 26, seed=1)])
    cache = cache_of(model)
    model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    single = cache_of(model)
    feed(model, single, ids[1:, 14:])
    for step in range(9):
        new = tiny.ids(2, 1, seed=step)
        mask = torch.cat([mask, torch.ones_like(new)], 1)
        logits = model(input_ids=new, attention_mask=mask, past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(logits[1:], feed(model, single, new[1:]), atol=1e-4, rtol=1e-4)
    assert [len(head) for head in kept(cache, 0, 1)] == [35, BUDGET]


def test_generate_goes_on_with_beams_drafts_a_file_and_a_copy(model: PreTrainedModel, tmp_path: Path) -> None:
    ids, options = tiny.ids(1, 40, seed=7), {"max_new_tokens": 12, "do_sample": False}
    cache = cache_of(model)
    first = model.generate(ids, past_key_values=cache, **options)
    drafted = model.generate(ids, past_key_values=cache_of(model), prompt_lookup_num_tokens=3, **options)
    assert torch.equal(first, drafted)
    assert model.generate(ids, past_key_values=cache_of(model), num_beams=3, **options).shape[0] == 1
    cache.save(tmp_path / "cache.safetensors")
    loaded = EquipCache.load(tmp_path / "cache.safetensors", model)
    assert loaded.settings() == cache.settings()
    for other in (loaded, copy.deepcopy(cache)):
        twin = copy.deepcopy(cache)
        for step in range(90):
            new = tiny.ids(1, 1, seed=step)
            assert torch.equal(feed(model, other, new), feed(model, twin, new))


@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_drafts_that_outgrow_a_head_are_taken_back(model: PreTrainedModel, policy: str) -> None:
    cache = cache_of(model, policy)
    feed(model, cache, tiny.ids(1, 30))
    cache.activate_past_recording()
    plain = copy.deepcopy(cache)
    feed(model, cache, tiny.ids(1, 100, seed=3))
    cache.crop(-100)
    for step in range(80):
        new = tiny.ids(1, 1, seed=step)
        torch.testing.assert_close(feed(model, cache, new), feed(model, plain, new), atol=1e-4, rtol=1e-4)
    assert len(kept(cache, 0)[0]) == 110
    assert [kept(cache, layer) for layer in range(4)] == [kept(plain, layer) for layer in range(4)]


def test_compress_and_evict_leave_whole_heads_their_tokens(model: PreTrainedModel) -> None:
    cache = cache_of(model, "keydiff", decode_budget=30)
    ids = tiny.ids(1, 50)
    feed(model, cache, ids)
    cache.compress(model)
    assert [len(head) for head in kept(cache, 0)] == [50, BUDGET]
    cache.evict([10, 11])
    assert len(kept(cache, 0)[0]) == 48
    for step in range(100):
        feed(model, cache, tiny.ids(1, 1, seed=step))
    assert [len(head) for head in kept(cache, 0)] == [148, 30]


# Calibration.


def test_the_cost_of_a_head_is_the_divergence_without_its_middle() -> None:
    model, answer, recent = tiny.llama(num_hidden_layers=1), 5, 6
    ids = tiny.ids(1, 40)
    found = RetrievalHeads.calibrate(model, None, ids.tolist(), answer=answer, recent=recent, progress=False)
    causal, queries = torch.ones(40, 40).tril().bool(), model.config.num_attention_heads
    expected = model(ids).logits[:, -answer:].log_softmax(-1)
    for head in range(2):
        mask = causal.repeat(1, queries, 1, 1)
        mask.unflatten(1, (2, -1))[:, head, :, -answer:, 4 : 40 - answer - recent] = False
        other = model(ids, attention_mask=mask).logits[:, -answer:].log_softmax(-1)
        cost = (expected.exp() * (expected - other)).sum(-1).mean()
        assert found.costs[0][head].item() == pytest.approx(cost.item(), rel=1e-3, abs=1e-7)


def test_the_head_that_recalls_is_found_and_brings_the_facts_back() -> None:
    model, tokenizer = testbed.load("base")
    encode = partial(tokenizer.encode, add_special_tokens=False)
    count = lambda text: len(encode(text))  # noqa: E731
    document = fit_document(random.Random(5), Filler(testbed.held_out("prose")), count, 400, facts=4)
    asked = [document.facts[index] for index in document.asked[:3]]
    context = encode(document.context())
    questions = [(encode(fact.question), encode(fact.answer)) for fact in asked]
    texts = [context + question + answer for question, answer in questions]
    heads = RetrievalHeads.calibrate(model, None, texts, answer=8, share=1 / 8, progress=False)
    recalled = {}
    for name, budgets in (("streaming", None), ("whole", heads)):
        read = EquipCache(model, "streaming", 48, head_budgets=budgets)
        model(input_ids=torch.tensor([context]), past_key_values=read)
        right = []
        for question, answer in questions:
            cache = copy.deepcopy(read)
            for token in question + answer[:-1]:
                logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits
            right.append(int(logits.argmax()) == answer[-1])
        recalled[name] = sum(right)
    assert recalled["whole"] == 3 > recalled["streaming"]
    assert sum(map(sum, heads.whole().values())) == 1


def test_saved_heads_are_loaded_for_their_model_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    heads = RetrievalHeads.calibrate(model, None, tiny.ids(1, 40).tolist(), answer=4, recent=8, share=0.25, progress=False)
    heads.save_pretrained(tmp_path)
    loaded = RetrievalHeads.from_pretrained(tmp_path, model=model)
    assert (loaded.whole(), loaded.tokens, loaded.share) == (heads.whole(), 40, 0.25)
    assert loaded.at(0.5).whole() == heads.at(0.5).whole() != heads.whole()
    with pytest.raises(FingerprintMismatch, match="retrieval-heads"):
        RetrievalHeads.from_pretrained(tmp_path, model=tiny.llama(seed=1))


def test_what_can_not_work_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"head_budgets: .*RetrievalHeads.calibrate"):
        EquipCache(model, head_budgets="duo")
    with pytest.raises(ConfigError, match=r"head_budgets: .*same tokens"):
        cache_of(model, "tova")
    with pytest.raises(UnsupportedError, match=r"head_budgets: .*page"):
        cache_of(model, page_size=8)
    for wrong in ({0: [True]}, {layer: [True] for layer in range(4)}):
        with pytest.raises(ConfigError, match=r"head_budgets: .*this model"):
            feed(model, cache_of(model, whole=wrong), tiny.ids(1, 40))
    for share in (-0.1, 1.5, "half", True):
        with pytest.raises(ConfigError, match="share"):
            heads_of(WHOLE).at(share)
    with pytest.raises(ConfigError, match=r"texts: .*more than 100"):
        RetrievalHeads.calibrate(model, None, tiny.ids(1, 40).tolist(), progress=False)
