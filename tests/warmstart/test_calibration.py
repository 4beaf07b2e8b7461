"""A calibrated gate lets through as much as a budget of false hits allows, by measurements that are those of plain runs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import WarmStartCache, WarmStartGate, WarmStartLibrary
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.errors import ConfigError, FingerprintMismatch
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.warmstart.calibration import CLOSED, FALSE, ServedDivergence, calibrate_gate, limit, measure_pair
from hf_kvcaches.warmstart.changes import changes
from tests import testbed
from tests.testbed.pairs import make_pairs

LENGTH = 128


@pytest.fixture(scope="module")
def loaded():
    return testbed.load()


@pytest.fixture(scope="module")
def library(loaded):
    return WarmStartLibrary(*loaded, slots=16)


def pair_of(tokenizer, kind, **options):
    (pair,) = make_pairs(tokenizer, kind, 1, length=LENGTH, **options)
    return pair.source.prompt, pair.target.prompt


def kl(p, q):
    """By definition, one token at a time."""
    p, q = (each.double().softmax(-1).tolist() for each in (p, q))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


@given(st.integers(0, 2**32 - 1))
def test_divergence_is_that_of_the_definition(seed):
    made = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, 3, 7, generator=made)
    assert divergence(p, q).tolist() == pytest.approx([kl(a, b) for a, b in zip(p, q, strict=True)], rel=1e-4, abs=1e-6)


kls = st.sampled_from([0.0, 0.01, FALSE, 0.06, 2.0])
divergences = st.builds(ServedDivergence, kls, kls, st.sampled_from([0.0, 0.5, 1.0]))
seen = st.lists(st.tuples(st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9, 1.0]), divergences), max_size=12)


@given(seen, st.sampled_from([0.0, 0.1, 0.25, 0.5]), st.sampled_from([0.0, 0.4, 0.95]))
def test_the_limit_is_the_lowest_of_those_that_keep_the_budget(seen, budget, standing):
    found, rows = limit(seen, budget, standing)

    def false(each):
        return each.first > FALSE or each.following > FALSE

    def admitted(value):
        return [divergence for each, divergence in seen if each >= value]

    def keeps(value):
        return sum(false(each) for each in admitted(value)) <= budget * len(admitted(value))

    good = [value for value, _ in seen if keeps(value)]
    if not good:
        assert found == CLOSED
    elif min(good) == min(value for value, _ in seen):
        assert found == min(min(good), standing)
    else:
        assert found == min(good)
    assert sum(row["chosen"] for row in rows) == bool(good)
    for row in rows:
        own = admitted(row["value"])
        assert (row["admitted"], row["pairs"], row["false"]) == (len(own), len(seen), sum(map(false, own)))
        assert row["worst"] == max(max(each.first, each.following) for each in own)
        for name in ("first", "following", "right"):
            assert row[name] == pytest.approx(sum(getattr(each, name) for each in own) / len(own))


def test_of_many_values_few_rows_are_kept_and_the_chosen_one_is_among_them():
    seen = [(number / 1000, ServedDivergence(0.0, 0.0 if number > 503 else 1.0)) for number in range(1000)]
    found, rows = limit(seen, 0.0, 0.0)
    assert found == 0.504
    assert [row["value"] for row in rows if row["chosen"]] == [0.504]
    assert len(rows) <= 42


def test_a_cosine_that_rounding_brought_above_one_is_no_limit_that_refuses_the_same_prompt():
    found, _ = limit([(1.0000002, ServedDivergence(0.0)), (0.9, ServedDivergence(1.0))], 0.0, 0.5)
    assert found == 1.0


@pytest.mark.parametrize(
    ("kind", "asks"), [("no_content", "same"), ("few_words", "other"), ("changed_fact", "same"), ("unrelated", "same")]
)
def test_a_pair_is_measured_as_if_it_were_served_by_hand(loaded, library, kind, asks):
    model, tokenizer = loaded
    source, target = pair_of(tokenizer, kind, asks=asks)
    found = measure_pair(library, source, target, WarmStartGate(), following=5)
    assert len(library) == 0
    vectors = library.encoder.encode([tokenizer.decode(each) for each in (source, target)], [source, target])
    assert found.similarity == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)
    assert bool(found.refused) == (not WarmStartGate().decide(changes=changes(tokenizer.decode(source), tokenizer.decode(target))).admitted)
    (key,) = library.add([source])
    ids = torch.tensor([target])
    with torch.no_grad():
        chosen = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)[:, ids.shape[1] :]
        cold = model(input_ids=torch.cat([ids, chosen], 1)).logits[0, -6:]
        for strategy, own in (("slots", found.slots), ("align", found.align)):
            gate = WarmStartGate(tau=-1.0, lengths=(0, 99), reusable=0.01, content=None, lexical=False)
            cache = WarmStartCache(model, library, strategy=strategy, gate=gate)
            warm = [model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]]
            warm += [model(input_ids=token[None, None], past_key_values=cache).logits[0, -1] for token in chosen[0]]
            if own is None:
                assert source[-16:] != target[-16:] if strategy == "slots" else cache.report().strategy != strategy
                continue
            assert cache.report().strategy == strategy
            first, *following = (kl(expected, logits) for expected, logits in zip(cold, warm, strict=True))
            assert own.first == pytest.approx(first, rel=1e-2, abs=1e-5)
            assert own.following == pytest.approx(sum(following) / 5, rel=1e-2, abs=1e-5)
            assert own.right == pytest.approx(sum(int(a.argmax()) == int(b.argmax()) for a, b in zip(cold[1:], warm[1:], strict=True)) / 5)
            if strategy == "align":
                assert found.reusable == cache.report().reused_tokens / len(target)
    library.delete(key)


def test_a_changed_fact_is_a_false_hit_of_the_summary_and_none_of_stretches(loaded, library):
    _, tokenizer = loaded
    found = measure_pair(library, *pair_of(tokenizer, "changed_fact"), WarmStartGate())
    assert found.slots.first > FALSE > found.align.worst
    assert found.refused


def test_prompts_that_do_not_end_alike_are_not_measured_from_a_summary(loaded, library):
    _, tokenizer = loaded
    source, target = pair_of(tokenizer, "no_content")
    assert measure_pair(library, source, target, WarmStartGate()).slots is not None
    assert measure_pair(library, [*source[:-1], target[-1] + 1], target, WarmStartGate()).slots is None


@pytest.fixture(scope="module")
def pairs(loaded):
    _, tokenizer = loaded
    kinds = ("identical", "no_content", "few_words", "changed_fact", "unrelated")
    return [pair_of(tokenizer, kind, seed=seed) for kind in kinds for seed in range(2)]


def test_the_gate_keeps_its_budget_on_the_pairs_that_it_was_made_from(loaded, library, pairs):
    # Nothing but the similarity can hold a changed fact back here.
    blind = WarmStartGate(tau=-1.0, reusable=0.0, content=None, lexical=False)
    gate = calibrate_gate(*loaded, {"slots": 16}, pairs, budget=0.0, gate=blind, following=0, progress=False)
    measured = [measure_pair(library, *pair, blind, following=0) for pair in pairs]
    false = [each.similarity for each in measured if each.slots is not None and each.slots.worst > FALSE]
    assert false
    assert max(false) < gate.tau
    assert not any(each.align.worst > FALSE for each in measured if each.align is not None and each.reusable >= gate.reusable)
    assert {row["limit"] for row in gate.measured} == {"tau", "reusable"}
    assert [sum(row["chosen"] for row in gate.measured if row["limit"] == name) for name in ("tau", "reusable")] == [1, 1]
    loose = calibrate_gate(*loaded, {"slots": 16}, pairs, budget=0.9, gate=blind, following=0, progress=False)
    assert loose.tau < gate.tau


def test_summaries_answer_the_first_token_and_not_the_following_ones_so_that_the_gate_closes_for_them(loaded, pairs):
    gates = [calibrate_gate(*loaded, {"slots": 16}, pairs, budget=0.0, following=following, progress=False) for following in (0, 16)]
    assert gates[0].tau <= 0.9
    assert gates[1].tau == CLOSED
    assert gates[0].reusable == gates[1].reusable <= 0.5
    summaries, alignments = ([row for row in gates[1].measured if row["limit"] == name] for name in ("tau", "reusable"))
    assert all(row["first"] < FALSE < row["following"] and row["right"] < 1 for row in summaries)
    assert all(row["worst"] <= FALSE and row["false"] == 0 for row in alignments)


def test_what_the_lexical_check_refuses_does_not_count(loaded, pairs):
    gate = calibrate_gate(*loaded, {"slots": 16}, pairs, budget=0.0, following=0, progress=False)
    assert gate.tau <= 0.9
    assert all(row["false"] == 0 for row in gate.measured if row["limit"] == "tau")


def test_limits_of_what_the_library_does_not_hold_stay_as_they_were(loaded, pairs):
    base = WarmStartGate(tau=0.77, reusable=0.44)
    only_stretches = calibrate_gate(*loaded, {"slots": 0}, pairs[:2], gate=base, progress=False)
    assert only_stretches.tau == 0.77
    assert {row["limit"] for row in only_stretches.measured} <= {"reusable"}
    only_slots = calibrate_gate(*loaded, {"slots": 16, "full": False}, pairs[:2], gate=base, progress=False)
    assert only_slots.reusable == 0.44
    assert {row["limit"] for row in only_slots.measured} == {"tau"}


def test_the_gate_names_its_encoder_and_is_for_this_model(loaded, pairs, tmp_path):
    model, tokenizer = loaded
    gate = calibrate_gate(model, tokenizer, None, pairs[:3], progress=False)
    assert gate.encoder == WarmStartLibrary(model, tokenizer).encoder.name
    assert gate.fingerprint == ModelFingerprint.of(model, tokenizer)
    gate.save_pretrained(tmp_path / "gate")
    again = WarmStartGate.from_pretrained(tmp_path / "gate", model=model, tokenizer=tokenizer)
    assert (again.tau, again.reusable, again.measured) == (gate.tau, gate.reusable, gate.measured)
    other, _ = testbed.load("tuned")
    with pytest.raises(FingerprintMismatch):
        WarmStartGate.from_pretrained(tmp_path / "gate", model=other, tokenizer=tokenizer)


def test_texts_do_as_well_as_tokens(loaded):
    model, tokenizer = loaded
    source, target = "The road was long and the day was cold. The men", "The road was long, and the day was cold. The men"
    library = WarmStartLibrary(model, tokenizer, slots=4)
    ids = [tokenizer(each)["input_ids"] for each in (source, target)]
    assert measure_pair(library, source, target, WarmStartGate()) == measure_pair(library, *ids, WarmStartGate())


@pytest.mark.parametrize("budget", [-0.1, 1.0, True, "much", float("nan")])
def test_a_budget_that_is_no_share_is_refused(loaded, budget):
    with pytest.raises(ConfigError, match="budget"):
        calibrate_gate(*loaded, None, [([1, 2], [1, 3])], budget=budget)


def test_no_pairs_and_a_library_elsewhere_are_refused(loaded):
    with pytest.raises(ConfigError, match="pairs"):
        calibrate_gate(*loaded, None, [])
    for options in ({"location": "memory"}, {"max_bytes": 5}):
        with pytest.raises(ConfigError, match="library_options"):
            calibrate_gate(*loaded, options, [([1, 2], [1, 3])])
