"""From which caches a prompt is taken over, and what is refused."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer

from hf_kvcaches import EquipCache, GrowingCache, SegmentReuseCache, SegmentStore
from hf_kvcaches.core.source import Stage
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.reuse.layout import LayerStates
from hf_kvcaches.warmstart.paper.slots import SummaryLayer
from tests.conformance import models
from tests.conformance.driving import feed, tokens
from tests.families import models as families
from tests.helpers.prompts import left_padded

PROMPT = 37


@pytest.fixture(autouse=True)
def _no_grad() -> Iterable[None]:
    with torch.no_grad():
        yield


def prefilled(family: str = "llama", cache: Any = None, rows: int = 1) -> Any:
    model = models.twin_of(models.tiny(family)) if cache is None else models.tiny(family)
    cache = DynamicCache(config=model.config) if cache is None else cache
    feed(model, cache, tokens(PROMPT, rows=rows), [PROMPT])
    return cache


class HalvedLayer(DynamicLayer):
    """Like transformers' quantized layers: a subclass whose tensors are not the keys."""


def test_caches_that_have_lost_something_are_refused() -> None:
    model = models.tiny("llama")
    halved = prefilled()
    halved.layers[1].__class__ = HalvedLayer
    static = StaticCache(config=model.config, max_cache_len=64)
    feed(models.twin_of(model), static, tokens(PROMPT), [PROMPT])
    for past in (halved, static, prefilled(cache=EquipCache(model, "streaming", 16)), prefilled(cache=EquipCache(model, "streaming", 64))):
        with pytest.raises(ConfigError, match=r"past.layers\[[01]\]: expected a layer with every key and value"):
            EquipCache.from_cache(past, model, "keydiff")


def test_a_summary_of_a_prompt_is_refused() -> None:
    model, past = models.tiny("llama"), prefilled(cache=GrowingCache(models.tiny("llama")))
    states = torch.zeros(2, PROMPT, 16)
    past.layers[1] = SummaryLayer()
    past.layers[1].take_slots(LayerStates(states, states), PROMPT)
    with pytest.raises(ConfigError, match=r"past.layers\[1\]: expected a layer with every key and value, got 'SummaryLayer'"):
        EquipCache.from_cache(past, model, "keydiff")


def test_what_is_no_source_is_refused() -> None:
    model = models.tiny("llama")
    past = prefilled()
    for nothing in (None, past.layers, model, past.layers[0].keys, EncoderDecoderCache(past, DynamicCache())):
        with pytest.raises(ConfigError, match="past: expected a DynamicCache"):
            EquipCache.from_cache(nothing, model, "keydiff")
    for empty in (DynamicCache(), DynamicCache(config=model.config), GrowingCache(model)):
        with pytest.raises(ConfigError, match="past: expected a cache that holds a prompt"):
            EquipCache.from_cache(empty, model, "keydiff")


def test_a_prefill_that_failed_is_refused() -> None:
    model = models.tiny("llama")
    broken = prefilled(cache=SegmentReuseCache(model, SegmentStore("memory")))
    broken.stage = Stage.FILLING
    with pytest.raises(ConfigError, match="reset"):
        EquipCache.from_cache(broken, model, "keydiff")
    past = prefilled(cache=GrowingCache(model))
    past.layers[1].crop(-2)
    with pytest.raises(ConfigError, match="keys of 37 tokens"):
        EquipCache.from_cache(past, model, "keydiff")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 3}, "with 3 layers"),
        ({"num_key_value_heads": 4}, r"4 heads of 16 and 16, as the model has, got \(2, 16, 16\)"),
        ({"head_dim": 8}, "2 heads of 8 and 8"),
    ],
)
def test_another_models_cache_is_refused(changes: dict[str, int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EquipCache.from_cache(prefilled(), models.build("llama", **changes), "keydiff")


def test_layers_of_another_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"past.layers\[0\].*DynamicSlidingWindowLayer"):
        EquipCache.from_cache(prefilled("gemma2"), models.tiny("llama"), "keydiff")
    with pytest.raises(ConfigError, match=r"past.layers\[0\]"):
        EquipCache.from_cache(prefilled("gemma2"), models.build("gemma2", sliding_window=4), "keydiff")


def test_masks_and_queries_are_of_all_tokens_and_layers() -> None:
    model, past = models.tiny("llama"), prefilled(rows=2)
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"attention_mask: expected \(batch, 37\)"):
        EquipCache.from_cache(past, model, "keydiff", attention_mask=mask[:, 1:])
    with pytest.raises(ConfigError, match="positions"):
        EquipCache.from_cache(past, model, "keydiff", position_ids=torch.arange(5)[None])
    with pytest.raises(ConfigError, match="queries: expected one value for each of 2 layers"):
        EquipCache.from_cache(past, model, "keydiff", queries=[None])
    with pytest.raises(ConfigError, match="padding"):
        EquipCache.from_cache(past, model, "keydiff", attention_mask=(torch.arange(PROMPT) > 2).long()[None])
    mask[0, -1] = 0
    with pytest.raises(ConfigError, match="padding at the start"):
        EquipCache.from_cache(past, model, "keydiff", attention_mask=mask)


def test_segments_that_were_reused_are_pruned(tmp_path: Path) -> None:
    model, store = models.tiny("llama"), SegmentStore("memory")
    past = SegmentReuseCache(model, store, mode="auto")
    ids, mask = left_padded([tokens(PROMPT), tokens(20, seed=1)])
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    text = model.generate(ids, past_key_values=past, **options)
    mask = torch.nn.functional.pad(mask, (0, past.seen - PROMPT), value=1)
    cache, plain = EquipCache.from_cache(past, model, "keydiff", 12, attention_mask=mask), EquipCache(model, "keydiff", 12)
    feed(model, plain, text[:, : past.seen], [past.seen], mask)
    assert cache.seen == past.seen
    for layer in range(2):
        assert torch.equal(cache.kept_positions(layer), plain.kept_positions(layer))
    mask = torch.nn.functional.pad(mask, (0, 3), value=1)
    more = tokens(3, seed=2, rows=2)
    torch.testing.assert_close(feed(model, cache, more, mask=mask), feed(model, plain, more, mask=mask), rtol=0, atol=1e-3)
    cache.save(tmp_path / "cache.safetensors")  # a pass of the same model behind them changes nothing
    # What generate fed is known of the new cache, too.
    assert torch.equal(cache.log.ids, past.log.ids)


@pytest.mark.parametrize("name", ["qwen3_next", "paligemma@image"])
def test_states_of_linear_layers_and_positions_from_one_are_taken_over(name: str) -> None:
    model = families.build(next(family for family in families.families() if family.name == name))
    past, plain = DynamicCache(config=model.config), EquipCache(model, "keydiff", 12)
    ids, more = tokens(26) % 40 + 5, tokens(6, seed=1) % 40 + 5
    for cache in (past, plain):
        model(ids, past_key_values=cache)
    adopted = EquipCache.from_cache(past, model, "keydiff", 12)
    model(more, past_key_values=past)  # its states move on by themselves
    got, expected = (torch.cat([model(token, past_key_values=cache).logits for token in more.split(1, 1)], 1) for cache in (adopted, plain))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_a_model_without_attention_has_nothing_to_adopt() -> None:
    model = families.build(next(family for family in families.families() if family.name == "mamba"))
    past = DynamicCache(config=model.config)
    model(tokens(8) % 40 + 5, past_key_values=past)
    with pytest.raises(ConfigError, match="past: expected a cache with layers of attention"):
        EquipCache.from_cache(past, model, "keydiff")
