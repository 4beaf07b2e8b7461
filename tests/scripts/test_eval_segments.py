"""Evaluation and calibration of SegmentReuseCache run as a user runs them, and their numbers are those of plain computations."""

from __future__ import annotations

import csv
import importlib
import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_kvcaches import SegmentPolicy, SegmentReuseCache, SegmentStore
from hf_kvcaches.errors import ConfigError
from tests import testbed
from tests.scripts.running import ROOT, rows_of, run_script
from tests.testbed.agents import prefix_share

REQUESTS = 4
POLICY = SegmentPolicy(check_layer=2, probe=0.9, similarity=0.5, bound=0.05)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    POLICY.save_pretrained(folder / "policy")
    new = folder / "new"
    options = ["--requests", str(REQUESTS), "--drifting", "1", "--policy", folder / "policy", "--csv", new, "--plot", new]
    done = run_script("eval_segments", "--device", "cpu", *options)
    assert done.returncode == 0, done.stderr
    return new, done.stdout, rows_of(new / "segments-quality.csv")


@pytest.mark.full
def test_each_side_has_a_row_for_each_workload_in_the_table_and_in_the_file(evaluated):
    _, printed, rows = evaluated
    for workload in ("agents", "hanging", "adversarial", "templates", "no repeats"):
        sides = [(row["side"], row["quantization"], row["cap"]) for row in rows if row["workload"] == workload]
        assert len(sides) == len(set(sides)) == (13 if workload == "agents" else 8)
        assert f"{workload}: " in printed
    assert all(row["torch"] and row["model"] == "base" and row["probe"] == "0.9" for row in rows)


@pytest.mark.full
def test_rows_agree_with_each_other(evaluated):
    _, _, rows = evaluated
    for row in rows:
        shares = {name: float(value) for name, value in row.items() if name.startswith("share_")}
        assert sum(shares.values()) - shares["share_partial"] == pytest.approx(1, abs=0.01)
        assert row["recall_alone"] == next(each["recall"] for each in rows if each["workload"] == row["workload"])
    by_name = {(row["workload"], row["side"], row["quantization"], row["cap"]): row for row in rows}
    assert float(by_name["agents", "no reuse", "", ""]["kl_max"]) == 0
    exact, auto = by_name["agents", "prefix caching", "none", ""], by_name["agents", "auto", "none", ""]
    assert float(exact["logits_max"]) < 1e-4
    assert float(exact["saved"]) < float(auto["saved"])
    for side in ("auto", "prefix caching", "approximate"):
        capped = by_name["agents", side, "none", "0.5"]
        assert 0 < float(capped["mib"]) <= float(by_name["agents", side, "none", ""]["mib"]) / 2
    assert all((float(row["share_partial"]) > 0) <= row["side"].endswith("cuts") for row in rows)


@pytest.mark.full
def test_every_bar_is_printed_with_its_number_and_a_picture_is_drawn(evaluated):
    folder, printed, _ = evaluated
    bars = printed.partition("Bars\n")[2].strip().splitlines()
    assert len(bars) == 15
    assert all((": met (" in bar) != (": NOT met (" in bar) for bar in bars)
    assert (folder / "segments-quality.png").stat().st_size > 10_000
    with (folder / "segments-drift.csv").open(encoding="utf-8") as file:
        drifts = [float(row["drift"]) for row in csv.DictReader(file)]
    assert drifts == sorted(drifts)
    assert (len(drifts), drifts[0], drifts[-1]) == (4, 0, 1)


def test_stores_of_codes_have_a_row_for_each_mode_and_their_bars(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script("_segments_codecs"), "TOKENS", 600)
    POLICY.save_pretrained(tmp_path / "policy")
    options = ["--requests", "3", "--policy", tmp_path / "policy", "--csv", tmp_path, "--codecs", "0.125", "0.25", "--codec-documents", "0"]
    done = run_script("eval_segments", "--device", "cpu", *options)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "segments-codecs.csv")
    stores, modes = ("codec 0.125", "codec 0.25"), ("prefix caching", "auto", "approximate")
    assert [(row["quantization"], row["side"]) for row in rows] == [(store, mode) for store in stores for mode in modes]
    eighth, quarter = (float(row["mib"]) for row in rows if row["side"] == "auto")
    assert eighth < quarter
    assert all(row["hardware"] and row["probe"] == "0.9" and row["requests"] == "3" for row in rows)
    assert done.stdout.count("codec 0.125: ") == 3


def test_bars_of_stores_of_codes_are_beside_no_reuse(script):
    codecs = script("_segments_codecs")
    good = {"side": "auto", "quantization": "codec 0.125", "recall": 0.99, "recall_alone": 1.0, "saved": 0.6, "kl_mean": 1e-5}
    assert missed(dict(line.strip().rsplit(": ", 1) for line in codecs.bars([good]))) == []
    bad = {"saves": {"saved": 0.59}, "recall": {"recall": 0.97}, "mean KL": {"kl_mean": 0.1}}
    for claim, changes in bad.items():
        (found,) = missed(dict(line.strip().rsplit(": ", 1) for line in codecs.bars([good | changes])))
        assert found.startswith(f"codec 0.125: {claim}")


def test_texts_of_the_default_mode_are_counted_where_they_are_equal_and_something_was_reused(script):
    defaults, quality = script("_segments_defaults"), script("_segments_quality")
    model, tokenizer = testbed.load()
    agents = quality.make_workloads(tokenizer, 3, 1, 0)[0].series[0]
    texts = defaults.default_texts(model, tokenizer, quality.Workload("twice", ((agents[0], agents[0]),)), 2, 8)
    assert (texts.prompts, texts.equal, texts.reusing) == (2, 2, 1)
    assert texts.reused == pytest.approx(0.5, abs=0.01)
    assert ": met (" in defaults.verdict(texts)
    assert all(": NOT met (" in defaults.verdict(texts._replace(**change)) for change in ({"equal": 1}, {"reusing": 0}))


def test_templates_differ_in_dates_and_ids_alone(script):
    quality = script("_segments_quality")
    _, tokenizer = testbed.load()
    requests = quality.template_workload(tokenizer, quality.TEMPLATES + 1, 0)
    first, again = (tokenizer.decode(requests[number].prompt) for number in (0, quality.TEMPLATES))
    assert first != again
    assert re.sub("[0-9]", "0", first) == re.sub("[0-9]", "0", again)
    assert all(len(request.prompt) + len(request.continuation) <= 1000 for request in requests)


def test_the_calibration_writes_a_policy_for_this_model(tmp_path):
    lines = [f'{{"prompt": "{"The road was long and the day was cold. " * 6} Number {number}."}}' for number in range(3)]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    done = run_script(
        "calibrate_segments", "--device", "cpu", "--out", tmp_path / "policy", "--prompts", tmp_path / "some.jsonl", "--asked", "3"
    )
    assert done.returncode == 0, done.stderr
    model, tokenizer = testbed.load()
    policy = SegmentPolicy.from_pretrained(tmp_path / "policy", model=model, tokenizer=tokenizer)
    assert policy.bound == 0.05
    assert sum(row["chosen"] for row in policy.measured) == 1
    assert f"probe={policy.probe}" in done.stdout


def test_prompts_are_read_as_text_as_ids_and_as_objects(script, tmp_path):
    _, tokenizer = testbed.load()
    file = tmp_path / "prompts.jsonl"
    file.write_text('"The day"\n\n[5, 6, 7]\n{"prompt": [8]}\n{"prompt": "The day"}\n')
    read = script("shared.texts").read_prompts
    text = tokenizer("The day")["input_ids"]
    assert read(file, tokenizer) == [text, [5, 6, 7], [8], text]
    for line in ('{"text": 1}', "[1, 2", '["a"]'):
        file.write_text(f"[1]\n{line}\n")
        with pytest.raises(ConfigError, match="line 2"):
            read(file, tokenizer)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=6))
def test_prefixes_are_the_longest_shared_with_any_earlier_prompt(prompts):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        found = importlib.import_module("_segments_quality").prefix_lengths(prompts)
    for number, (prompt, length) in enumerate(zip(prompts, found, strict=True)):
        earlier = {tuple(each[:stop]) for each in prompts[:number] for stop in range(len(each) + 1)}
        assert length == max((stop for stop in range(len(prompt)) if tuple(prompt[:stop]) in earlier), default=0)


def test_prefixes_add_up_to_the_share_that_the_testbed_counts(script):
    quality = script("_segments_quality")
    _, tokenizer = testbed.load()
    requests = quality.make_workloads(tokenizer, 12, 1, 0)[0].series[0]
    lengths = quality.prefix_lengths([request.prompt for request in requests])
    assert sum(lengths) / sum(len(request.prompt) for request in requests) == pytest.approx(prefix_share(requests), abs=1e-3)


def test_calibration_is_on_other_requests_than_the_evaluation(script):
    quality = script("_segments_quality")
    _, tokenizer = testbed.load()
    prompts, asked = quality.calibration_prompts(tokenizer, 3)
    measured = [tuple(r.prompt) for workload in quality.make_workloads(tokenizer, 6, 2, 0) for own in workload.series for r in own]
    assert set(prompts) == {"agents", "hanging", "adversarial"}
    assert asked >= 16
    for own in prompts.values():
        for ids in own:
            assert not any(tuple(ids[: len(prompt)]) == prompt for prompt in measured)


def test_answers_are_those_of_the_same_requests_sent_by_hand(script):
    quality = script("_segments_quality")
    model, tokenizer = testbed.load()
    workload = quality.Workload("adversarial", (quality.make_workloads(tokenizer, 6, 1, 3)[2].series[0][:3],))
    answers = list(quality.Bench(model, tokenizer, POLICY).run(workload, quality.Side("auto", "auto", None)))
    store = SegmentStore("memory", quantization=None)
    for answer, request in zip(answers, workload.series[0], strict=True):
        cache, full = SegmentReuseCache(model, store, tokenizer, "auto", POLICY), DynamicCache(config=model.config)
        with torch.no_grad():
            ids, more = torch.tensor([request.prompt]), torch.tensor([request.continuation])
            logits = [
                torch.cat(
                    [
                        model(input_ids=ids, past_key_values=each, logits_to_keep=1).logits,
                        model(input_ids=more, past_key_values=each).logits,
                    ],
                    1,
                )[0, :-1]
                for each in (full, cache)
            ]
        guesses = [each.argmax(-1).tolist() for each in logits]
        assert (answer.right_alone, answer.right) == tuple(sum(request.right(each)) for each in guesses)
        p, q = (each.double().softmax(-1) for each in logits)
        assert sum(answer.kls) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-2, abs=1e-5)
        assert answer.difference == pytest.approx(float((logits[0] - logits[1]).abs().max()), rel=0.05, abs=1e-4)
        report = cache.report()
        assert (answer.tiers, answer.reused) == (report.tiers, report.reused_tokens)
        page = next(part for part in request.parts if part.kind == "document")
        taken = {place for span in report.spans if span.tier != "computed" for place in range(span.start, span.stop)}
        assert answer.page == pytest.approx(sum(place in taken for place in range(page.start, page.stop)) / (page.stop - page.start))
        del cache
    store.close()
    assert answers[1].page == pytest.approx(1, abs=0.1)


def answer(script, **changes: Any):
    plain = {
        "series": 0,
        "number": 1,
        "drift": 0.0,
        "tokens": 100,
        "prefix": 20,
        "reused": 80,
        "saved": 0.8,
        "tiers": {"exact": 20, "probed": 60, "computed": 20},
        "partial": 0,
        "seconds": 0.1,
        "page": 1.0,
        "score": 1.0,
        "kls": (0.0, 0.02),
        "difference": 0.0,
        "right": 4,
        "right_alone": 4,
        "asked": 4,
        "bytes": 10,
    }
    return script("_segments_quality").Answer(**{**plain, **changes})


def judged(script, side: str = "AUTO", workload: str = "", **changes: Any) -> dict[str, str]:
    """The bars by their claims, where all answers are good but the last of one side."""
    report = script("_segments_verdicts")
    sides = [report.PREFIX, report.AUTO, script("_segments_quality").Side("auto", "auto", cap=0.5)]
    found = {
        (name, each): [answer(script, number=number, drift=number / 9, page=1 - number / 90) for number in range(10)]
        for name in ("agents", "hanging", "adversarial")
        for each in sides
        if each.cap is None or name == "agents"
    }
    for (name, each), answers in found.items():
        if each == (sides[-1] if side == "CAPPED" else getattr(report, side)) and workload in ("", name) and changes:
            answers[-1] = answer(script, number=9, drift=1.0, **{"page": 0.5, **changes})
    return dict(line.strip().rsplit(": ", 1) for line in list(report.bars(found, 0.05))[1:])


def missed(bars: dict[str, str]) -> list[str]:
    return [claim for claim, verdict in bars.items() if verdict.startswith("NOT met")]


def test_all_bars_are_met_by_good_answers(script):
    assert missed(judged(script)) == []


@pytest.mark.parametrize(
    ("side", "workload", "changes", "claim"),
    [
        ("PREFIX", "hanging", {"difference": 2e-4}, "exact: logits"),
        ("PREFIX", "agents", {"reused": 19}, "exact: never fewer tokens"),
        ("AUTO", "agents", {"saved": -1.3}, "auto saves 60%"),
        ("AUTO", "agents", {"kls": (1.1, 0.0)}, "auto, agents: mean KL"),
        ("AUTO", "agents", {"right": 3}, "auto, agents: recall"),
        ("AUTO", "hanging", {"right": 3}, "auto, hanging: recall"),
        ("CAPPED", "agents", {"reused": 79}, "auto none, 0.5 of the bytes"),
        ("AUTO", "adversarial", {"page": 11.0}, "auto, adversarial: less of the page"),
    ],
)
def test_one_bad_answer_misses_its_bar_and_no_other(script, side, workload, changes, claim):
    (found,) = missed(judged(script, side, workload, **changes))
    assert found.startswith(claim)


def test_only_what_stood_behind_another_text_counts_for_the_bound(script):
    report = script("_segments_verdicts")
    touched, untouched = answer(script, kls=(0.4,)), answer(script, kls=(0.0,), tiers={"exact": 80, "computed": 20})
    assert report.touched_kl([touched, untouched]) == pytest.approx(0.4)
    assert report.touched_kl([untouched]) == 0.0


def test_hit_rates_are_those_of_the_halves_of_each_series(script):
    series = [answer(script, series=number, reused=reused) for number in (0, 1) for reused in (10, 20, 60, 70)]
    assert script("_segments_verdicts").hit_rates(series) == pytest.approx((0.15, 0.65))


def test_a_number_below_one_is_refused(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval_segments.py", "--drifting", "0"])
    with pytest.raises(ConfigError, match="--drifting: expected at least 1"):
        script("eval_segments").parse()


@pytest.mark.full
def test_repair_in_fewer_layers_saves_more(tmp_path):
    options = ["--requests", "4", "--drifting", "1", "--repair-depths", "0.5", "1", "--csv", tmp_path]
    done = run_script("eval_segments", "--device", "cpu", *options)
    assert done.returncode == 0, done.stderr
    saved = {(row["workload"], row["side"]): float(row["saved"]) for row in rows_of(tmp_path / "segments-repair-base.csv")}
    for workload in ("agents", "hanging", "adversarial"):
        assert saved[workload, "approximate, 0.5 of the layers"] > saved[workload, "approximate, 1 of the layers"]
