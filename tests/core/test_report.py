"""What a report tells people: how many layers the method applies to, what the others keep, and what was decided for them."""

import json

import pytest
import torch

from hf_kvcaches import AdaptiveSubspace, CacheReport, EquipCache, GrowingCache, SegmentReuseCache, SegmentStore, SubspaceCache
from tests import tiny


@torch.no_grad()
def filled(model, cache, tokens=30):
    model(input_ids=tiny.ids(1, tokens), past_key_values=cache)
    return cache


def row(report, name):
    rows = [line.strip() for line in str(report).splitlines() if line.strip().startswith(name + "  ")]
    assert len(rows) == 1, str(report)
    return rows[0][len(name) :].strip()


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (GrowingCache, "30"),
        (lambda model: EquipCache(model, "streaming", 12), "12"),
        (lambda model: SubspaceCache(model, adaptive=AdaptiveSubspace(rank=4, warmup=16), sinks=1, recent=2), "30"),
    ],
    ids=["growing", "equip", "subspace"],
)
def test_layers_that_the_model_keeps_to_itself_are_named_and_not_counted_among_the_kept(make, kept):
    model = tiny.gemma2(num_hidden_layers=6)
    cache = filled(model, make(model))
    report = cache.report()
    assert row(report, "layers") == f"3 of 6; 3 keep the model's windows of {model.config.sliding_window}"
    assert row(report, "slots kept") == kept
    assert report.own_kept == (int(kept),) * 3
    assert set(report.others) == {0, 2, 4}
    assert f"(3 of 6 layers, seen=30, kept={kept}," in repr(cache)
    json.dumps(report.as_dict())


def test_layers_of_other_kinds_are_named_too():
    model = tiny.lfm2()
    assert row(filled(model, GrowingCache(model)).report(), "layers") == "1 of 3; 2 keep a state of the model's own"


@pytest.mark.parametrize("make", [GrowingCache, lambda model: SegmentReuseCache(model, SegmentStore("memory"), mode="exact")])
def test_where_the_method_applies_to_all_layers_nothing_is_said(make):
    for build in (tiny.llama, tiny.gemma2):
        model = build()
        cache = make(model)
        report = filled(model, cache).report()
        if not any(type(layer).__module__.startswith("transformers") for layer in cache.layers):
            assert not report.others
            assert "others" not in report.as_dict()
            assert "\n  layers" not in str(report)


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({}, "512", "512"),
        ({"budget": 16}, "16", "16"),
        ({"budget": 0.5}, "0.5", "15"),
        ({"budget": [8, 10, 12, 14]}, "8 to 14", "8 to 14"),
        ({"budget": 10, "decode_budget": 20}, "10", "20"),
    ],
    ids=str,
)
def test_the_budget_of_a_pruned_cache_is_reported(options, before, after):
    model = tiny.llama()
    cache = EquipCache(model, "streaming", **options)
    assert (row(cache.report(), "policy"), row(cache.report(), "budget")) == ("streaming", before)
    assert row(filled(model, cache).report(), "budget") == after
    assert isinstance(cache.report(), CacheReport)
    json.dumps(cache.report().as_dict())


def test_a_policy_that_waits_reports_the_budget_it_was_given():
    model = tiny.llama()
    cache = filled(model, EquipCache(model, "kvzip", 16))
    assert cache.report().budget == (16,) * 4
    assert cache.report().kept == (30,) * 4
