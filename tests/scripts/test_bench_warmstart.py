"""The benchmark of WarmStartCache runs as a user runs it, in its smallest size, and its numbers are what they are said to be."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from hf_kvcaches import WarmStartLibrary
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.stores.vectors import VectorIndex
from tests.scripts.running import ROOT, quick_bench, rows_of

pytest.importorskip("faiss")

SECTIONS = ("hits", "misses", "larger", "look-up")
SIDES = {"cold", "exact prefix", "align", "auto"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "new"
    return folder, quick_bench("bench_warmstart", folder, "warm")


@pytest.fixture(scope="module")
def rows(quick) -> list[dict[str, str]]:
    assert quick[1].returncode == 0, quick[1].stderr
    return rows_of(quick[0] / "warm.csv")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("bench_warmstart")


@pytest.fixture
def timing(script):
    return importlib.import_module("_warmstart_timing")


@pytest.fixture
def small(script):
    """A model of random weights, a library with one prompt, and that prompt."""
    torch.manual_seed(0)
    pair = script.Pair.random(script.Shape(32, 2, 4, 48, 64), "gqa", torch.device("cpu"))
    library = WarmStartLibrary(pair.switched, script.word_tokenizer(64))
    ids = torch.randint(1, 64, (200,), generator=torch.Generator().manual_seed(1))
    library.add(ids)
    return pair, library, ids[None]


@pytest.mark.full
def test_it_compares_answers_first_then_prints_a_table_for_each_part_and_a_line_for_each_bar(quick):
    _, done = quick
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "threads 1" in out
    for length in (128, 800):
        assert out.index(f"the model of this repository, {length} tokens, auto against cold: the same first token") < out.index("\nhits ")
    assert out.index("the larger model, 300 tokens, align against cold") < out.index("\nlarger ")
    assert all(f"\n{section} " in out for section in SECTIONS)
    lines = out.splitlines()
    for bar in (
        "hits at 800 tokens, all kinds:",
        "hits at 800 tokens, all kinds but identical:",
        "ms more, unrelated:",
        "ms more, other text:",
    ):
        (line,) = (line for line in lines if bar in line)
        assert ": met (" in line or ": NOT met (" in line
    assert "  look-up among 100000 prompts in at most 5 ms: not measured" in lines


@pytest.mark.full
def test_its_numbers_stand_in_a_file_with_what_they_depend_on(rows):
    assert {row["section"] for row in rows} == set(SECTIONS)
    assert all(
        row[name]
        for row in rows
        for name in ("hardware", "device", "threads", "python", "torch", "transformers", "tokens", "count", "length")
    )
    for row in rows:
        low, middle, high = (float(row[f"time{quartile}_ms"]) for quartile in ("_q1", "", "_q3"))
        assert 0 <= low <= middle <= high
    own = [row for row in rows if (row["section"], row["workload"], row["length"]) == ("hits", "all kinds", "800")]
    every = {row["side"]: row for row in own if row["group"] == "all"}
    assert set(every) == SIDES
    assert float(every["cold"]["ratio"]) == 1
    assert float(every["cold"]["reused"]) == 0 < float(every["exact prefix"]["reused"]) < float(every["auto"]["reused"])
    assert {row["side"] for row in own if row["group"] == "hits"} == SIDES - {"cold"}


@pytest.mark.full
def test_each_kind_is_served_as_its_side_says(rows):
    own = [row for row in rows if row["section"] == "hits" and row["group"] == "all" and row["length"] == "800"]
    served = {(row["workload"], row["side"]): row["served"] for row in own}
    assert served["identical", "exact prefix"] == served["identical", "auto"] == "exact 2"
    assert served["changed_fact", "align"] == served["changed_fact", "auto"] == "align 2"
    misses = {row["workload"]: row["served"] for row in rows if row["section"] == "misses" and row["side"] == "auto"}
    assert set(misses) == {"unrelated", "other text"}
    assert not any(how in text for text in misses.values() for how in ("align", "exact"))


@pytest.mark.full
def test_it_draws_a_picture(quick):
    assert (quick[0] / "warm.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_and_differences_are_taken_within_a_prompt_and_hits_are_of_each_side(timing):
    cold = [timing.Answer(seconds, 10, 0, "", 1) for seconds in (2.0, 4.0, 9.0)]
    ways = (("align", 1.0), ("prefix", 8.0), ("exact", 3.0))
    auto = [timing.Answer(seconds, 10, 5, served, int(served == "exact")) for served, seconds in ways]
    base, ours = timing.rows_of({"cold": cold, "auto": auto}, workload="a", length=10)
    assert base["ratio"] == 1
    assert (ours["ratio"], ours["extra_ms"], ours["time_ms"]) == (2.0, -1000.0, 3000.0), "of 2, 0.5 and 3; of -1, 4 and -6; of 1, 8 and 3"
    assert (ours["served"], ours["reused"], ours["same"], ours["count"]) == ("align 1, exact 1, prefix 1", 0.5, 0.3333, 3)
    (hits,) = timing.rows_of({"cold": cold, "auto": auto}, "hits", workload="a", length=10)
    assert (hits["side"], hits["count"], hits["asked"], hits["ratio"]) == ("auto", 2, 3, 2.5), "of 2 and 3"
    assert list(timing.rows_of({"cold": cold[:2], "auto": auto[:2]}, "hits")) == [], "one has no quartiles"


def test_sides_take_turns_and_each_prompt_is_asked_of_all_before_the_next(timing):
    log = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def ask(self, ids):
            log.append((self.name, ids))
            return timing.Answer(1.0, 1, 0, "", 0)

    answers = timing.ask_in_turns([Fake("a"), Fake("b")], [timing.Asked("kind", 1), timing.Asked("kind", 2)])
    assert log == [("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert {name: len(own) for name, own in answers.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize("name", ["cold", "auto"])
def test_a_request_tells_its_time_and_what_served_it(timing, small, name):
    pair, library, ids = small
    answer = timing.Side(name, pair, library).ask(ids)
    assert answer.seconds > 0
    assert (answer.served, answer.reused) == (("", 0) if name == "cold" else ("exact", 199))


def test_wrong_answers_are_not_timed(timing, small):
    pair, library, ids = small
    sides = [timing.Side(name, pair, library) for name in ("cold", "auto")]
    prompts = [timing.Asked("identical", ids)]
    found = timing.prove(sides, prompts, "a model")
    assert found.startswith("a model, auto against cold: the same first token for 1 of 1 prompts (exact 1), KL on hits mean")
    with pytest.raises(SystemExit, match="nothing was admitted"):
        timing.prove(sides, [timing.Asked("other", torch.full((1, 50), 3))], "a model")
    # Of one of the two models, which share their weights.
    pair.plain.lm_head.weight = torch.nn.Parameter(pair.plain.lm_head.weight.flip(0) * 9)
    with pytest.raises(SystemExit, match="an identical prompt diverges"):
        timing.prove(sides, prompts, "a model")
    with pytest.raises(SystemExit, match="0 of 1 prompts have cold's first token"):
        timing.prove(sides, [timing.Asked("few_words", ids)], "a model")


def test_look_ups_find_what_is_stored_and_a_wrong_library_is_not_timed(timing, small, monkeypatch):
    pair, library, _ = small
    rows = list(timing.lookups(pair.switched, library.tokenizer, 60, 5))
    assert [(row["measure"], row["length"], row["tokens"], row["count"]) for row in rows] == [("all", 60, 300, 5)]
    right = WarmStartLibrary.beginning
    monkeypatch.setattr(WarmStartLibrary, "beginning", lambda self, ids: (right(self, ids)[0], 3))
    with pytest.raises(SystemExit, match="look-up among 60: a stored prompt begins like it for longer"):
        list(timing.lookups(pair.switched, library.tokenizer, 60, 2))


def test_a_nearest_prompt_that_is_another_one_is_not_timed(timing, small, monkeypatch):
    pair, library, _ = small
    right = VectorIndex.search
    monkeypatch.setattr(VectorIndex, "search", lambda self, vector, k=1: right(self, -vector, k))
    with pytest.raises(SystemExit, match="the nearest is the right one in 0 of 4"):
        list(timing.lookups(pair.switched, library.tokenizer, 60, 4))


def test_changed_prompts_differ_in_as_many_words_as_are_said_and_end_alike(script):
    ids = torch.randint(1, 64, (300,), generator=torch.Generator().manual_seed(2))
    other = script.changed(ids, 7, 64, seed=0)
    assert int((other != ids).sum()) == 7
    assert (other[-32:] == ids[-32:]).all()
    assert 1 <= int(other.min()) <= int(other.max()) < 64, "0 is padding"


def a_row(**columns: object) -> dict[str, object]:
    row = {"section": "hits", "workload": "all kinds", "measure": "first token", "group": "hits", "side": "auto", "length": 800}
    row |= {"tokens": 795, "count": 9, "asked": 9, "time_ms": 1.0, "time_q1_ms": 1.0, "time_q3_ms": 1.0}
    return row | {"ratio": 4.0, "ratio_q1": 2.0, "ratio_q3": 5.0, "extra_ms": -3.0, "extra_q1_ms": -4.0, "extra_q3_ms": -2.0} | columns


MISS = {"section": "misses", "workload": "unrelated", "group": "all"}


@pytest.mark.parametrize(
    ("word", "row", "met"),
    [
        ("all kinds", {}, True),
        ("all kinds", {"ratio": 3.99}, False),
        ("all kinds", {"ratio": float("nan")}, False),
        ("but identical", {"workload": "all kinds but identical", "ratio": 3.0}, False),
        ("unrelated", MISS | {"ratio": 0.98, "extra_ms": 6.0}, True),
        ("unrelated", MISS | {"ratio": 0.9, "extra_ms": 5.0}, True),
        ("unrelated", MISS | {"ratio": 0.9, "extra_ms": 5.1}, False),
        ("look-up", {"section": "look-up", "measure": "all", "length": 100_000, "time_ms": 5.0}, True),
        ("look-up", {"section": "look-up", "measure": "all", "length": 100_000, "time_ms": 5.01}, False),
    ],
)
def test_a_bar_is_met_from_its_number_on(script, word, row, met):
    (bar,) = (bar for bar in script.bars() if word in bar.claim and (word != "all kinds" or bar.claim.endswith(word)))
    assert (": met (" in bar.verdict([a_row(**row)])) is met
    assert (": NOT met (" in bar.verdict([a_row(**row)])) is not met
    assert bar.verdict([]).endswith("not measured")


def test_a_miss_that_costs_too_much_at_one_length_misses_the_bar(script):
    (bar,) = (bar for bar in script.bars() if bar.claim.endswith("unrelated"))
    own = [a_row(**MISS, length=length, ratio=ratio, extra_ms=extra) for length, ratio, extra in ((128, 1.0, 0.0), (800, 0.5, 9.0))]
    assert bar.verdict(own).endswith("unrelated: NOT met (128 1x, 800 2x)")


def test_fewer_than_two_pairs_are_refused(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_warmstart.py", "--pairs", "1"])
    with pytest.raises(ConfigError, match="at least 2"):
        script.main()
