"""What a report tells people: how many layers the method applies to, what the others keep, and what was decided for them."""

import json
from dataclasses import dataclass

import pytest
import torch

from hf_kvcaches import AdaptiveSubspace, CacheReport, EquipCache, GrowingCache, SubspaceCache
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


# Texts

ID = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Report(CacheReport):
    """Fields of all kinds."""

    flops_saved: float = 0.0
    loss: float = 0.0
    tiers: dict | None = None
    neighbour: str | None = None
    spans: tuple = ()
    reason: str = ""


def rows(**fields):
    text = str(Report("A", 1234, (1234,), 2**20, **fields))
    return {line[:15].strip(): line[15:].strip() for line in text.splitlines()[1:]}


def test_what_is_empty_has_no_row():
    assert set(rows()) == {"tokens seen", "slots kept", "memory", "flops saved", "loss"}


def test_values_are_printed_as_people_read_them():
    shown = rows(flops_saved=0.9908349105059777, loss=0.0123456, tiers={"exact": 1640, "computed": 2}, neighbour=ID, reason="A hook.")
    assert shown["flops saved"] == "99.1%"
    assert shown["loss"] == "0.01235"
    assert shown["tiers"] == "exact 1,640, computed 2"
    assert shown["neighbour"] == "01234567…"
    assert shown["reason"] == "A hook."


def test_of_a_long_list_the_beginning_is_printed():
    assert rows(spans=tuple(range(1, 12)))["spans"] == "1, 2, 3, 4, 5, 6, 7, 8, 3 more"
    assert rows(spans=("", None)).get("spans") is None
