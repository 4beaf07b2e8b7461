"""A prompt's keys and values from another cache leave `EquipCache` as a prefill of its own does."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache, GrowingCache
from hf_kvcaches.core.holder import LastQueries
from hf_kvcaches.equip.budgets import pyramid_budgets
from hf_kvcaches.equip.layer import EquipLayer
from hf_kvcaches.equip.pages import PagePool
from hf_kvcaches.equip.policies import KeyDiffPolicy, Policy, SnapKVPolicy
from hf_kvcaches.equip.policies.tokens import Tokens
from hf_kvcaches.errors import ConfigError, FingerprintMismatch, PoolExhausted, UnsupportedError
from tests.conformance import models
from tests.conformance.driving import TOLERANCES, feed, left_padded, tokens
from tests.equip.cases import BUDGET, POSITIONS, SINKS, text, with_queries

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_grad")]

PROMPT, STEPS = 37, 12
LAYOUTS = [(positions, page_size) for positions in POSITIONS for page_size in (None, 5)]


class BroadKeys(Policy):
    """Of the user's own."""

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.keys.float().std(-1)


POLICIES: dict[str, Any] = {"streaming": "streaming", "keydiff": KeyDiffPolicy(interval=5), "own": BroadKeys()}
OBSERVING: dict[str, Any] = {
    "snapkv": SnapKVPolicy(window=6, kernel_size=3),
    "snapkv_longer_than_the_prompt": SnapKVPolicy(window=41, kernel_size=3),
    "tova": "tova",
    "h2o": "h2o",
    "future": "future",
    "compactor": "compactor",
}


def prefilled(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, source: Any = None) -> Any:
    """A cache that keeps everything, after a prompt."""
    past = DynamicCache(config=model.config) if source is None else source
    feed(model, past, ids, [ids.shape[1]], None if mask is None else mask[:, : ids.shape[1]])
    return past


def compare(
    model: PreTrainedModel,
    policy: Any,
    budget: Any = BUDGET,
    *,
    ids: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    source: Any = None,
    **options: Any,
) -> EquipCache:
    """Decodes behind a prefill and behind an adopted prompt, and asserts that nothing differs."""
    ids = text(PROMPT + STEPS) if ids is None else ids
    prompt = ids.shape[1] - STEPS
    settings = {"policy": policy, "budget": budget, "sinks": SINKS, **options}
    plain = EquipCache(model, **settings)
    feed(model, plain, ids[:, :prompt], [prompt], None if mask is None else mask[:, :prompt])
    past = prefilled(models.twin_of(model) if source is None else model, ids[:, :prompt], mask, source)
    part = None if mask is None else mask[:, :prompt]
    adopted = EquipCache.from_cache(past, model, attention_mask=part, **settings)
    same_slots(adopted, plain)
    same_tensors(adopted, plain)
    more = ids[:, prompt:]
    expected, got = (feed(model, cache, more, mask=mask) for cache in (plain, adopted))
    assert float((got.float() - expected.float()).abs().max()) <= TOLERANCES[dtype]
    same_slots(adopted, plain)
    return adopted


def same_slots(cache: EquipCache, other: EquipCache) -> None:
    assert cache.seen == other.seen
    assert cache.report().kept == other.report().kept
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, EquipLayer):
            assert torch.equal(cache.kept_positions(index), other.kept_positions(index))


def same_tensors(cache: EquipCache, other: EquipCache) -> None:
    """Asserts that all that is kept is the same, the clocks of compiled steps included."""
    got, expected = cache.owned_tensors(), other.owned_tensors()
    assert set(got) == set(expected)
    for name, tensor in got.items():
        if not name.endswith("_sliding_window_tensor"):
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4, msg=lambda message, name=name: f"{name}: {message}")


@pytest.mark.parametrize(("positions", "page_size"), LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_decoding_goes_on_as_behind_a_prefill(policy: str, positions: Any, page_size: int | None) -> None:
    compare(models.tiny("llama"), POLICIES[policy], positions=positions, page_size=page_size)


@pytest.mark.parametrize(("positions", "page_size"), LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_padded_rows_go_on_as_behind_a_prefill(policy: str, positions: Any, page_size: int | None) -> None:
    ids, mask = left_padded([text(49), text(31, 7), text(17, 40)])  # the last row's prompt is 5 tokens
    compare(models.tiny("llama"), POLICIES[policy], ids=ids, mask=mask, positions=positions, page_size=page_size)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [0.35, 60, [24, 0.3], "pyramid", SINKS + 1 + 8])
def test_any_budget(policy: str, budget: Any) -> None:
    model = models.tiny("llama")
    compare(model, POLICIES[policy], pyramid_budgets(model, 16) if budget == "pyramid" else budget)


def test_a_share_is_of_the_longest_row() -> None:
    ids, mask = left_padded([text(52), text(30, 7)])
    cache = compare(models.tiny("llama"), "keydiff", 0.5, ids=ids, mask=mask)
    assert cache.report().kept == (20, 20)


@pytest.mark.parametrize(
    "family", ["llama_mha", "llama_mqa", "qwen3", "gemma2", "gemma3", "phi3", "gpt_neox", "gpt2", "opt", "qwen2_mixed"]
)
def test_any_model(family: str) -> None:
    compare(models.tiny(family), "keydiff")


@pytest.mark.parametrize("prompt", [1, 4, 5, 63])
@pytest.mark.parametrize("policy", POLICIES)
def test_awkward_sizes(policy: str, prompt: int) -> None:
    model = models.build("llama", num_attention_heads=6, num_key_value_heads=2, head_dim=10)
    compare(model, POLICIES[policy], 17, ids=text(prompt + STEPS), source=DynamicCache(config=model.config))


def test_a_model_with_windows_only() -> None:
    model = models.tiny("mistral_sliding")
    past = prefilled(models.twin_of(model), text(PROMPT))
    cache, plain = EquipCache.from_cache(past, model, "keydiff"), EquipCache(model, "keydiff")
    feed(model, plain, text(PROMPT), [PROMPT])
    more = tokens(STEPS, seed=1)
    torch.testing.assert_close(feed(model, cache, more), feed(model, plain, more), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
@pytest.mark.parametrize("prompt", [5, PROMPT])
def test_sliding_layers_of_a_cache_that_kept_everything(family: str, prompt: int) -> None:
    model, ids = models.tiny(family), text(prompt + STEPS)
    past = DynamicCache()
    compare(model, "streaming", ids=ids, source=past)
    assert past.get_seq_length(0) == prompt


# Policies that look at queries.


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", OBSERVING)
def test_policies_that_observe_queries_are_given_them(policy: str, padded: bool, family: str, monkeypatch: Any) -> None:
    model = models.tiny(family)
    ids, mask = left_padded([text(49), text(31, 7), text(17, 40)]) if padded else (text(49), None)
    prompt = ids.shape[1] - STEPS
    part = None if mask is None else mask[:, :prompt]
    settings = {"policy": OBSERVING[policy], "budget": 48 if "longer" in policy else BUDGET, "sinks": SINKS}
    plain, queries = with_queries(model, ids[:, :prompt], part, monkeypatch, **settings)
    past = prefilled(models.twin_of(model), ids[:, :prompt], mask)
    window = plain.adopt_window
    if window is not None:  # no more than is needed
        queries = [each and LastQueries(each.states[:, :, -window:], each.scaling, each.softcap) for each in queries]
    adopted = EquipCache.from_cache(past, model, attention_mask=part, queries=queries, **settings)
    same_slots(adopted, plain)
    more = ids[:, prompt:]
    torch.testing.assert_close(feed(model, adopted, more, mask=mask), feed(model, plain, more, mask=mask), rtol=0, atol=1e-4)
    same_slots(adopted, plain)


@pytest.mark.parametrize("policy", ["h2o", "tova", "snapkv", "future"])
def test_policies_that_observe_queries_are_refused_without(policy: str) -> None:
    model = models.tiny("llama")
    past = prefilled(models.twin_of(model), text(PROMPT))
    with pytest.raises(UnsupportedError, match=r"queries, which stored keys and values don't have. Use .*'keydiff' or 'streaming'"):
        EquipCache.from_cache(past, model, policy)
    assert EquipCache(model, policy).adopt_refused()
    assert not EquipCache(model, "keydiff").adopt_refused()
    assert not EquipCache(model, "snapkv").adopt_refused(with_queries=True)
    assert EquipCache(model, "h2o").adopt_refused(with_queries=True)


@pytest.mark.parametrize("policy", ["streaming", "keydiff", "own"])
@pytest.mark.parametrize("padding", [0, 5])
def test_a_question_that_is_adopted_changes_nothing_about_its_context(policy: str, padding: int) -> None:
    model, question = models.tiny("llama"), 7
    ids, mask = left_padded([text(PROMPT), text(PROMPT - padding, 7)])
    past, settings = prefilled(models.twin_of(model), ids, mask), {"policy": POLICIES[policy], "budget": 0.5, "decode_budget": 1.0}
    whole = EquipCache.from_cache(past, model, attention_mask=mask, question_start=-question, **settings)
    past.crop(-question)
    context = EquipCache.from_cache(past, model, attention_mask=mask[:, :-question], **settings)
    for layer in range(2):
        old, new = (cache.kept_positions(layer)[..., : (PROMPT - question) // 2 + question] for cache in (context, whole))
        assert torch.equal(old[..., :-question], new[..., :-question])
        assert torch.equal(new[..., -question:], torch.arange(PROMPT - question, PROMPT).expand(2, new.shape[1], -1))
    assert feed(model, whole, tokens(STEPS, rows=2), mask=torch.nn.functional.pad(mask, (0, STEPS), value=1)).isfinite().all()


def test_a_question_that_is_adopted_with_its_queries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, past = models.tiny("llama"), prefilled(models.tiny("llama"), text(PROMPT))
    _, queries = with_queries(model, text(PROMPT), None, monkeypatch, policy="future")
    with pytest.raises(UnsupportedError, match=r"^question_start: .*context alone"):
        EquipCache.from_cache(past, model, "future", question_start=-5, queries=queries)


def test_a_refit_needs_queries_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model, past = models.tiny("llama"), prefilled(models.tiny("llama"), text(PROMPT))
    with pytest.raises(UnsupportedError, match="with refit looks at a prompt's last 64 queries"):
        EquipCache.from_cache(past, model, "keydiff", BUDGET, refit=True)
    _, queries = with_queries(model, text(PROMPT), None, monkeypatch, policy="keydiff")
    refitted, plain = (EquipCache.from_cache(past, model, "keydiff", BUDGET, refit=refit, queries=queries) for refit in (True, False))
    same_slots(refitted, plain)
    assert not torch.allclose(refitted.layers[0].storage.values, plain.layers[0].storage.values)


def test_too_few_queries_are_refused() -> None:
    model = models.tiny("llama")
    past = prefilled(models.twin_of(model), text(PROMPT))
    queries = [LastQueries(torch.zeros(1, 4, 5, 16), 0.25)] * 2
    with pytest.raises(UnsupportedError, match=r"37 tokens by its last 6 queries, and got 5"):
        EquipCache.from_cache(past, model, SnapKVPolicy(window=6, kernel_size=3), BUDGET, queries=queries)


# Sources.


def test_the_source_goes_on_and_shares_nothing() -> None:
    model = models.tiny("llama")
    past, untouched = (prefilled(models.twin_of(model), text(PROMPT)) for _ in range(2))
    before = [layer.keys.clone() for layer in past.layers]
    cache = EquipCache.from_cache(past, model, "keydiff", 60)
    blocks = {layer.keys.untyped_storage().data_ptr() for layer in past.layers}
    assert not blocks & {tensor.untyped_storage().data_ptr() for tensor in cache.owned_tensors().values()}
    feed(model, cache, tokens(STEPS, seed=1))
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(past.layers, before, strict=True))
    more = tokens(5, seed=2)
    assert torch.equal(feed(models.twin_of(model), past, more), feed(models.twin_of(model), untouched, more))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_sources_tensors_are_free(policy: str) -> None:
    model = models.tiny("llama")
    past = prefilled(models.twin_of(model), text(PROMPT))
    held = [weakref.ref(tensor) for layer in past.layers for tensor in (layer.keys, layer.values)]
    cache = EquipCache.from_cache(past, model, POLICIES[policy], 60)
    del past
    gc.collect()
    assert not any(each() is not None for each in held)
    assert cache.seen == PROMPT


def test_a_source_with_gradients_lends_its_numbers() -> None:
    model = models.tiny("llama")
    with torch.enable_grad():
        past = DynamicCache(config=model.config)
        models.twin_of(model)(text(PROMPT), past_key_values=past)
        assert past.layers[0].keys.requires_grad
        cache = EquipCache.from_cache(past, model, "keydiff", 60)
    assert not any(tensor.requires_grad for tensor in cache.owned_tensors().values())


def test_a_source_from_inference_mode() -> None:
    model = models.tiny("llama")
    with torch.inference_mode():
        past = DynamicCache(config=model.config)
        models.twin_of(model)(text(PROMPT), past_key_values=past)
    compare_to = EquipCache(model, "keydiff", BUDGET)
    feed(model, compare_to, text(PROMPT), [PROMPT])
    cache = EquipCache.from_cache(past, model, "keydiff", BUDGET)
    more = tokens(STEPS, seed=1)
    torch.testing.assert_close(feed(model, cache, more), feed(model, compare_to, more), rtol=0, atol=1e-4)


def test_a_source_that_was_cropped_counts_what_is_left() -> None:
    model = models.tiny("llama")
    past = prefilled(model, text(PROMPT), source=GrowingCache(model))
    past.crop(-10)
    cache, plain = EquipCache.from_cache(past, model, "keydiff", BUDGET), EquipCache(model, "keydiff", BUDGET)
    feed(model, plain, text(PROMPT)[:, :-10], [PROMPT - 10])
    same_slots(cache, plain)


def test_positions_of_a_caller_who_counts_padding() -> None:
    model = models.tiny("llama")
    ids, mask = left_padded([text(37), text(19, 7)])
    positions = torch.arange(37)[None]
    plain, past = EquipCache(model, "keydiff", BUDGET), DynamicCache(config=model.config)
    for cache in (plain, past):
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    adopted = EquipCache.from_cache(past, model, "keydiff", BUDGET, attention_mask=mask, position_ids=positions)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    step = {"input_ids": tokens(1, rows=2), "attention_mask": mask, "position_ids": torch.tensor([[37]])}
    got, expected = (model(**step, past_key_values=cache).logits for cache in (adopted, plain))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


# What comes after.


def pair(policy: str = "keydiff", budget: Any = BUDGET, rows: int = 1, **options: Any) -> tuple[PreTrainedModel, EquipCache, EquipCache]:
    """An adopted cache, and one with a prefill of its own."""
    model, ids = models.tiny("llama"), text(PROMPT).expand(rows, -1)
    past = prefilled(model, ids, source=GrowingCache(model))
    adopted, plain = EquipCache.from_cache(past, model, policy, budget, **options), EquipCache(model, policy, budget, **options)
    feed(model, plain, ids, [PROMPT])
    return model, adopted, plain


def go_on(model: Any, adopted: EquipCache, plain: EquipCache, spans: list[int] | None = None, rows: int = 1) -> None:
    more = tokens(STEPS, seed=3, rows=rows)
    got, expected = (feed(model, cache, more, spans) for cache in (adopted, plain))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    same_slots(adopted, plain)


@pytest.mark.parametrize("page_size", [None, 5])
@pytest.mark.parametrize("policy", ["streaming", "keydiff"])
def test_the_next_prompt_of_a_chat(policy: str, page_size: int | None) -> None:
    go_on(*pair(policy, page_size=page_size), spans=[9, 1, 2])


def test_drafts_are_taken_back_to_the_adopted_prompt_and_no_further() -> None:
    model, adopted, plain = pair()
    for cache in (adopted, plain):
        cache.activate_past_recording()
        cache.crop(0)
        feed(model, cache, tokens(5, seed=1), [5])
        cache.crop(-5)
    same_slots(adopted, plain)
    with pytest.raises(UnsupportedError, match="crop"):
        adopted.crop(-1)
    go_on(model, adopted, plain)


def test_saved_it_comes_back_if_it_is_known_who_computed_it(tmp_path: Path) -> None:
    model, adopted, plain = pair()
    adopted.save(tmp_path / "cache.safetensors")
    go_on(model, EquipCache.load(tmp_path / "cache.safetensors", model), plain)
    foreign = EquipCache.from_cache(prefilled(models.twin_of(model), text(PROMPT)), model, "keydiff", BUDGET)
    for _ in range(2):
        with pytest.raises(FingerprintMismatch, match="does not say which model"):
            foreign.save(tmp_path / "foreign.safetensors")
        feed(model, foreign, tokens(9), [9])  # a pass of the model's own says nothing about what was before


def test_a_source_of_another_model_is_not_saved_as_this_ones(tmp_path: Path) -> None:
    model, other = models.tiny("llama"), models.build("llama")
    other.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    cache = EquipCache.from_cache(prefilled(other, text(PROMPT), source=GrowingCache(other)), model, "keydiff", BUDGET)
    with pytest.raises(FingerprintMismatch, match="changed"):
        cache.save(tmp_path / "cache.safetensors")


# One layer at a time.


def test_layers_adopt_one_by_one() -> None:
    model, past = models.tiny("llama"), prefilled(models.tiny("llama"), text(PROMPT))
    plain, cache = EquipCache(model, "keydiff", BUDGET), EquipCache(model, "keydiff", BUDGET)
    feed(model, plain, text(PROMPT), [PROMPT])
    for index, layer in enumerate(past.layers):
        cache.adopt_layer(index, layer.keys, layer.values, torch.arange(PROMPT)[None])
    go_on(model, cache, plain)
    with pytest.raises(ConfigError, match="empty layer, got one that has seen 49 tokens"):
        cache.adopt_layer(0, layer.keys, layer.values, torch.arange(PROMPT)[None])


def test_what_does_not_fit_is_refused_and_the_layer_stays_empty() -> None:
    model = models.tiny("gemma2")
    cache, keys, positions = EquipCache(model, "h2o", 0.2), torch.zeros(2, 2, 10, 16), torch.arange(10)[None]
    for wrong in ((1, keys[:, :, 1:], keys, positions), (1, keys, keys[:, :, 1:], positions), (1, keys, keys, positions[:, 1:])):
        with pytest.raises(ConfigError):
            cache.adopt_layer(*wrong)
    with pytest.raises(ConfigError, match="padding"):
        cache.adopt_layer(1, keys, keys, positions, torch.tensor([1]))
    with pytest.raises(UnsupportedError, match="queries"):
        cache.adopt_layer(1, keys, keys, positions)
    small = EquipCache(model, "keydiff", 0.2)
    small.adopt_layer(0, keys, keys, positions)
    with pytest.raises(ConfigError, match="empty layer, got one that has seen 10"):
        small.adopt_layer(0, keys, keys, positions)
    small.reset()
    assert cache.seen == small.seen == small.layers[1].seen == 0
    feed(model, small, tokens(40, rows=2), [40])


def test_a_pool_that_is_too_small_gives_back_what_was_taken() -> None:
    model = models.tiny("llama")
    past, pool = prefilled(models.twin_of(model), text(PROMPT)), PagePool(model, pages=7, page_size=4)
    with pytest.raises(PoolExhausted):
        EquipCache.from_cache(past, model, "keydiff", BUDGET, pool=pool)
    gc.collect()
    assert pool.free_pages == 7
    assert EquipCache.from_cache(past, model, "keydiff", 12, pool=pool).report().kept == (12, 12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("source", ["DynamicCache", "GrowingCache"])
def test_layers_are_offloaded(source: str) -> None:
    model = models.build("llama").cuda()
    past = DynamicCache(config=model.config, offloading=True) if source == "DynamicCache" else GrowingCache(model, offloading=True)
    ids = text(PROMPT).cuda()
    feed(model, past, ids, [PROMPT])
    adopted, plain = EquipCache.from_cache(past, model, "keydiff", BUDGET, offloading=True), EquipCache(model, "keydiff", BUDGET)
    feed(model, plain, ids, [PROMPT])
    more = tokens(STEPS, seed=3).cuda()
    torch.testing.assert_close(feed(model, adopted, more), feed(model, plain, more), rtol=0, atol=1e-3)
    assert not any(tensor.is_cuda for tensor in adopted.layers[1].owned_tensors().values())
