"""The evaluation of WarmStartCache runs as a user runs it, and its numbers are those of plain computations."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from hf_kvcaches import WarmStartCache, WarmStartLibrary
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.evaluate.runner import next_tokens
from hf_kvcaches.warmstart.reading import read_prompt
from tests import testbed
from tests.scripts.running import ROOT, rows_of, run_script
from tests.testbed.pairs import KINDS, make_pairs


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


@pytest.fixture(scope="module")
def loaded():
    return testbed.load()


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    done = run_script("eval_warmstart", "--quick", "--device", "cpu", "--csv", folder, "--plot", folder)
    assert done.returncode == 0, done.stderr
    files = {}
    for name in ("quality", "pairs"):
        files[name] = rows_of(folder / f"warmstart-{name}.csv")
    return folder, done.stdout, files


@pytest.mark.full
def test_each_side_has_a_row_for_each_kind_in_the_table_and_in_the_file(evaluated, script):
    _, printed, files = evaluated
    sides = [side.name for side in script("_warmstart_quality").SIDES]
    assert len(set(sides)) == len(sides)
    for kind in KINDS:
        assert [row["side"] for row in files["quality"] if row["kind"] == kind] == sides
        assert f"{kind}: 2 pairs" in printed
    assert all(row["torch"] and row["model"] == "base" and row["encoder"] for row in files["quality"])
    assert len(files["pairs"]) == 2 * len(KINDS) * len(sides)


@pytest.mark.full
def test_rows_agree_with_each_other(evaluated):
    _, _, files = evaluated
    for row in files["quality"]:
        own = [each for each in files["pairs"] if (each["kind"], each["side"]) == (row["kind"], row["side"])]
        shares = [int(each["forwarded"]) / int(each["tokens"]) for each in own]
        assert float(row["forwarded"]) == pytest.approx(sum(shares) / len(shares))
        assert float(row["kl_first_all"]) == pytest.approx(sum(float(each["kl_first"]) for each in own) / len(own))
        if row["side"] == "cold":
            assert (float(row["kl_first_all"]), float(row["forwarded"]), float(row["admitted"])) == (0, 1, 0)
            assert row["right"] == row["right_cold"]
        if row["side"] in ("tail only", "mismatched source"):
            assert (row["served"], row["admitted"]) == ("control 2", "0.0")
    by_name = {(row["kind"], row["side"]): row for row in files["quality"]}
    assert float(by_name["changed_fact", "auto"]["forwarded"]) < 0.3
    assert (
        float(by_name["changed_fact", "auto"]["kl_first_all"])
        < 0.05
        < float(by_name["changed_fact", "slots salient, m=64"]["kl_following_same"])
    )


@pytest.mark.full
def test_controls_and_every_bar_are_printed_and_a_picture_is_drawn(evaluated):
    folder, printed, _ = evaluated
    controls = printed.partition("Controls\n")[2].partition("\n\n")[0].splitlines()
    bars = printed.partition("Bars\n")[2].partition("\n\n")[0].splitlines()
    assert (len(controls), len(bars)) == (2, 10)
    assert all((": met (" in bar) != (": NOT met (" in bar) for bar in (*controls, *bars))
    assert (folder / "warmstart-quality.png").stat().st_size > 10_000


def test_a_number_below_one_is_refused(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval_warmstart.py", "--swaps", "0"])
    with pytest.raises(ConfigError, match="--swaps: expected at least 1"):
        script("eval_warmstart").parse()


# Summaries.


def test_a_summary_of_all_tokens_answers_as_the_model_alone_and_is_shifted_to_the_end_of_a_longer_prompt(script, loaded):
    model, tokenizer = loaded
    quality, library = script("_warmstart_quality"), WarmStartLibrary(model, tokenizer, slots=64)
    (pair,) = make_pairs(tokenizer, "identical", 1, length=128)
    ids = pair.source.prompt
    states = read_prompt(model, torch.tensor([ids]))
    for layout in ("salient", "paper"):
        summary = quality.summarise(states, len(ids), layout, len(ids))
        for before in (0, 40):
            cache = quality.SummaryCache(model, library, summary)
            with torch.no_grad():
                warm, cold = next_tokens(model, [*[3] * before, *ids], [5, 6, 7], cache), next_tokens(model, ids, [5, 6, 7])
            assert (warm - cold).abs().max() < 1e-3
            assert cache.seen == len(ids) + before + 2


# Pairs and answers.


def test_pairs_are_spread_over_lengths_and_ways_to_ask(script, loaded):
    _, tokenizer = loaded
    pairs = script("eval_warmstart").spread(tokenizer, "few_words", 7, 0, [128, 300])
    assert [pair.asks for pair in pairs] == ["same"] * 2 + ["other"] * 2 + ["same"] * 2 + ["other"]
    assert [len(pair.source.prompt) <= 128 for pair in pairs] == [True] * 4 + [False] * 3


def test_risky_pairs_are_as_many_as_asked_for_and_all_have_another_answer(script, loaded):
    _, tokenizer = loaded
    pairs = script("eval_warmstart").risky_pairs(tokenizer, 20, 0, [128, 300])
    assert [sum(pair.kind == kind for pair in pairs) for kind in ("changed_fact", "changed_digit", "negated")] == [7, 7, 6]
    assert all(pair.changes_answer for pair in pairs)


def bench_of(script, loaded, args=()):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["eval_warmstart.py", "--quick", "--device", "cpu", *args])
        return script("eval_warmstart").Bench(script("eval_warmstart").parse(), torch.device("cpu"))


def test_answers_are_those_of_the_same_prompts_served_by_hand(script, loaded):
    model, tokenizer = loaded
    sides = script("_warmstart_quality")
    pairs = make_pairs(tokenizer, "reordered_notes", 2, 5, 128)
    with torch.no_grad():
        bench = bench_of(script, loaded)
        before = len(bench.library)
        from tqdm import tqdm

        with tqdm(disable=True) as bar:
            found = bench.ask(pairs, (sides.AUTO, sides.TAIL_ONLY, sides.MISMATCH), bar)
        assert len(bench.library) == before
        bench.library.add([pair.source.prompt for pair in pairs])
        for number, pair in enumerate(pairs):
            prompt, then = pair.target.prompt, pair.target.continuation
            cache = WarmStartCache(model, bench.library)
            cold, other = next_tokens(model, prompt, then), pairs[number - 1].source.prompt
            texts = {
                sides.AUTO: next_tokens(model, prompt, then, cache),
                sides.TAIL_ONLY: next_tokens(model, prompt[-16:], then),
                sides.MISMATCH: next_tokens(model, [*other[:-16], *prompt[-16:]], then),
            }
            for side, logits in texts.items():
                answer = found[side][number]
                assert answer.kls == pytest.approx(divergence(cold, logits).tolist(), rel=1e-3, abs=1e-6)
                assert list(answer.right) == pair.target.right(logits.argmax(-1).tolist())
                assert list(answer.right_cold) == pair.target.right(cold.argmax(-1).tolist())
            report = cache.report()
            assert (found[sides.AUTO][number].served, found[sides.AUTO][number].forwarded) == (report.strategy, report.computed_tokens)


def test_an_answer_is_stale_where_the_first_differing_token_is_the_sources(script, loaded):
    _, tokenizer = loaded
    quality = script("_warmstart_quality")
    (pair,) = make_pairs(tokenizer, "changed_digit", 1, length=128)
    start, stop = pair.target.answers[0]
    answer, stale = pair.target.continuation[start:stop], pair.stale[0]
    differ = next(i for i, (a, b) in enumerate(zip(answer, stale, strict=True)) if a != b)
    for guess, expected in ((answer, False), (stale, True), ([*stale[:differ], 0, *stale[differ + 1 :]], False)):
        logits = torch.nn.functional.one_hot(torch.tensor([*guess, *pair.target.continuation[stop:]]), len(tokenizer)).float()
        flags = quality.judged(pair, logits, logits)["stale"]
        assert flags[0] is expected
        assert set(flags[1:]) <= {None}


# Bars.


def answer(script, **changes: Any):
    plain = {
        "kind": "identical",
        "asks": "same",
        "served": "align",
        "refused": "",
        "cosine": 0.99,
        "tokens": 100,
        "forwarded": 10,
        "kls": (0.001, 0.0),
        "right": (True, True),
        "right_cold": (True, True),
        "stale": (False, None),
        "stale_cold": (False, None),
    }
    return script("_warmstart_quality").Answer(**{**plain, **changes})


def judged(script, side: str = "", extra: str = "", number: float = 0.0, **changes: Any) -> list[str]:
    """The claims that are not met, where all answers are good but one of a side or among those of more pairs."""
    quality = sides = script("_warmstart_quality")
    found = {each: [answer(script) for _ in range(20)] for each in sides.SIDES}
    unrelated = {each: [answer(script, served="prefix")] for each in (sides.AUTO, sides.ALIGN)}
    more = {"risky": [answer(script) for _ in range(4)], "unrelated": unrelated}
    if side:
        own = next(each for each in sides.SIDES if each.name == side)
        found[own] = [*found[own][:-1], answer(script, **changes)]
    if extra == "risky":
        more["risky"][-1] = answer(script, **changes)
    if extra == "unrelated":
        more["unrelated"][sides.ALIGN].append(answer(script, **changes))
    lines = list(quality.bars(found, quality.Extra(**more, swapped=[1e-5, number])))
    return [line.strip() for line in lines if ": NOT met (" in line]


def test_all_bars_are_met_by_good_answers(script):
    assert judged(script) == []


@pytest.mark.parametrize(
    ("side", "extra", "number", "changes", "claim"),
    [
        ("auto", "", 0, {"kls": (0.3, 0.0)}, "auto, admitted: mean KL"),
        ("auto", "", 0, {"kls": (0.0, 0.3)}, "auto, admitted: mean KL"),
        ("auto", "", 0, {"right": (True, False)}, "auto, admitted: all answers right as often as cold"),
        ("auto", "", 0, {"forwarded": 520}, "auto, admitted: at most 0.35"),
        ("slots salient, m=64", "", 0, {"kls": (1.1, 0.0)}, "slots salient, m=64, same tail"),
        ("slots salient, m=64", "", 0, {"kls": (0.0, 1.1)}, "slots salient, m=64, same tail"),
        ("", "risky", 0, {"stale": (True, None), "stale_cold": (False, None)}, "auto: no stale answers"),
        ("", "unrelated", 0, {"served": "align"}, "align: no false hits"),
        ("", "", 2e-3, {}, "after the swap"),
    ],
)
def test_one_bad_answer_misses_its_bar_and_no_other(script, side, extra, number, changes, claim):
    (found,) = judged(script, side, extra, number, **changes)
    assert found.startswith(claim)


def test_what_was_not_admitted_counts_for_no_divergence(script):
    assert judged(script, "auto", kls=(9.0, 0.0), served="prefix", forwarded=100) == []
    assert judged(script, "slots salient, m=64", kls=(9.0, 0.0), kind="few_words") == []
    assert judged(script, "slots salient, m=64", kls=(9.0, 0.0), asks="other") == []


def test_pairs_that_can_be_answered_without_their_source_prove_nothing(script):
    quality = sides = script("_warmstart_quality")
    high, low = [answer(script, kls=(0.6,))], [answer(script, kls=(0.4,))]
    assert len(quality.controls({sides.TAIL_ONLY: high, sides.MISMATCH: high})) == 3
    lines = quality.controls({sides.TAIL_ONLY: high, sides.MISMATCH: low})
    assert "prove nothing" in lines[-1]
    assert [": met (" in line for line in lines[1:3]] == [True, False]
