"""The benchmark of SegmentReuseCache runs as a user runs it, in its smallest size, and its numbers are what they are said to be."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from hf_kvcaches.errors import ConfigError
from tests.scripts.running import ROOT, quick_bench, rows_of

SIDES = {"no reuse", "prefix caching", "auto", "approximate"}
PARTS = ("requests", "no repeats", "larger", "look-up")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "new"
    return folder, quick_bench("bench_segments", folder, "segments", "--sections", *PARTS)


@pytest.fixture(scope="module")
def rows(quick) -> list[dict[str, str]]:
    return rows_of(quick[0] / "segments.csv")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("bench_segments")


@pytest.fixture
def sides(script):
    return importlib.import_module("_segments_sides")


@pytest.fixture
def parts(script):
    return importlib.import_module("_segments_parts")


@pytest.fixture
def small(script):
    """A model of random weights, in seconds."""
    torch.manual_seed(0)
    return script.Pair.random(script.Shape(32, 2, 4, 48, 64), "gqa", torch.device("cpu"))


@pytest.fixture
def policy(parts):
    return parts.POLICY


@pytest.mark.full
def test_it_proves_equality_first_then_prints_a_table_for_each_part_and_a_line_for_each_bar(quick):
    _, done = quick
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "threads 1" in out
    assert out.index("the model of this repository: prefix caching gives the logits of no reuse") < out.index("\nrequests ")
    assert out.index("the larger model: prefix caching gives the logits of no reuse") < out.index("\nlarger ")
    assert all(f"\n{part} " in out for part in PARTS)
    lines = out.splitlines()
    for bar in ("auto at least 2.5x", "where nothing repeats, first token", "where nothing repeats, whole request", "below 1 ms, runs"):
        (line,) = (line for line in lines if bar in line and ": " in line)
        assert ": met (" in line or ": NOT met (" in line
    assert sum(line.startswith("  a second process reuses as much") and line.endswith("not measured") for line in lines) == 2


@pytest.mark.full
def test_its_numbers_stand_in_a_file_with_what_they_depend_on(rows):
    assert {row["section"] for row in rows} == set(PARTS)
    assert all(
        row[name] for row in rows for name in ("hardware", "device", "threads", "python", "torch", "transformers", "tokens", "count")
    )
    for row in rows:
        low, middle, high = (float(row[f"time{quartile}_ms"]) for quartile in ("_q1", "", "_q3"))
        assert 0 < low <= middle <= high
    for section in ("requests", "larger"):
        first = {row["side"]: row for row in rows if (row["section"], row["measure"]) == (section, "first token")}
        assert set(first) == SIDES
        assert float(first["no reuse"]["ratio"]) == 1
        assert 0 == float(first["no reuse"]["reused"]) < float(first["auto"]["reused"]) <= float(first["approximate"]["reused"])
    stored = {row["side"] for row in rows if row["measure"] == "storing after whole request" and row["section"] == "requests"}
    assert stored == SIDES - {"no reuse"}
    assert {row["side"] for row in rows if row["section"] == "no repeats"} == {"no reuse", "auto"}


@pytest.mark.full
def test_it_draws_a_picture(quick):
    assert (quick[0] / "segments.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_a_second_process_finds_what_the_first_one_stored(script, parts, tmp_path):
    pair, prompts = parts.agents(4, torch.device("cpu"))
    rows = [{"section": "sharing", **row} for row in parts.sharing("disk", f"disk:{tmp_path}/store", pair, prompts)]
    assert [row["side"] for row in rows] == ["one process", "the second of two processes", ""]
    assert rows[1]["reused"] > 0.2, "of the second half, by a process that had not seen the first"
    (line,) = (bar.verdict(rows) for bar in script.bars() if bar.claim.endswith("disk"))
    assert ": met (" in line


def test_a_ratio_is_taken_within_a_prompt_over_no_reuse(sides):
    asked = {
        "no reuse": [sides.Answer(seconds, 0.0, 10, 0) for seconds in (2.0, 4.0, 9.0)],
        "auto": [sides.Answer(seconds, 0.5, 10, 4) for seconds in (2.0, 1.0, 3.0)],
    }
    base, ours, storing = sides.rows_of(asked, "first token", workload="agents")
    assert base["ratio"] == 1
    assert (ours["ratio_q1"], ours["ratio"], ours["ratio_q3"]) == (2.0, 3.0, 3.5), "of 1, 4 and 3"
    assert (ours["time_ms"], ours["reused"], ours["tokens"], ours["count"]) == (2000.0, 0.4, 10, 3)
    assert (storing["measure"], storing["time_ms"]) == ("storing after first token", 500.0)
    assert "ratio" not in storing


def test_sides_take_turns_and_each_prompt_is_asked_of_all_before_the_next(sides):
    log = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def ask(self, ids, new_tokens):
            log.append((self.name, ids))
            return sides.Answer(1.0, 0.0, 1, 0)

    asked = sides.ask_in_turns([Fake("a"), Fake("b")], [1, 2])
    assert log == [("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert {name: len(answers) for name, answers in asked.items()} == {"a": 2, "b": 2}


def test_every_pass_begins_with_empty_stores_and_the_first_prompts_do_not_count(sides, small, policy):
    (prompt,) = sides.moved(200, 1, 64, torch.device("cpu"))
    asked = sides.passes(("no reuse", "approximate"), small, policy, [prompt, prompt], count=2, first=[prompt])
    assert [answer.reused for answer in asked["approximate"]] == [0, 199, 0, 199]
    assert [answer.reused for answer in asked["no reuse"]] == [0] * 4


def test_a_request_for_more_tokens_takes_all_of_them_and_its_storing_is_done_after(sides, small, policy):
    (prompt,) = sides.moved(200, 1, 64, torch.device("cpu"))
    side = sides.Side("auto", small, policy)
    seen = []
    generate = small.switched.generate
    small.switched.generate = lambda *args, **kwargs: seen.append(generate(*args, **kwargs))
    answer = side.ask(prompt, 5)
    assert seen[0].shape[1] == 205
    assert answer.tokens == 200
    assert side.store.report().written > 0
    side.close()


def test_moved_prompts_share_four_fifths_in_other_orders(sides):
    one, two = sides.moved(1000, 2, 2048, torch.device("cpu"))
    assert one.shape == two.shape == (1, 1000)
    rows = [row[0].tolist() for row in (one, two)]
    windows = [{tuple(row[place : place + 100]) for place in range(901)} for row in rows]
    assert len(windows[0] & windows[1]) >= 8
    assert rows[0][:20] != rows[1][:20]
    assert rows[0][-20:] != rows[1][-20:]


def test_wrong_logits_are_not_timed(sides, small):
    (prompt,) = sides.moved(200, 1, 64, torch.device("cpu"))
    assert "with 199 tokens reused" in sides.prove(small, [prompt], "a model")
    # Of one of the two models, which share their weights.
    small.plain.lm_head.weight = torch.nn.Parameter(small.plain.lm_head.weight * 1.1)
    with pytest.raises(SystemExit, match="a model: logits differ"):
        sides.prove(small, [prompt], "a model")


def test_look_ups_find_what_is_stored_and_a_wrong_index_is_not_timed(parts, monkeypatch):
    rows = list(parts.lookups(160, 16))
    assert [row["measure"] for row in rows] == ["prefix", "prefix", "runs", "runs"]
    assert all(row["value"] == 160 and row["tokens"] == 800 for row in rows)
    monkeypatch.setattr(parts.TokenIndex, "runs", lambda *args: [])
    with pytest.raises(SystemExit, match="runs, all moved: found 0 where there are 800"):
        list(parts.lookups(160, 16))


def asked_row(**columns: object) -> dict[str, object]:
    row = {"section": "requests", "workload": "agents", "measure": "first token", "side": "auto", "tokens": 800, "count": 9}
    return row | {"time_ms": 1.0, "ratio": 2.5} | columns


@pytest.mark.parametrize(
    ("word", "row", "met"),
    [
        ("2.5x", {}, True),
        ("2.5x", {"ratio": 2.49}, False),
        ("repeats, first token", {"section": "no repeats", "ratio": 0.971}, True),
        ("repeats, first token", {"section": "no repeats", "ratio": 0.970}, False),
        ("repeats, whole request", {"section": "no repeats", "measure": "whole request", "ratio": 0.9}, False),
        ("1 ms, runs", {"section": "look-up", "measure": "runs", "time_ms": 0.99}, True),
        ("1 ms, runs", {"section": "look-up", "measure": "runs", "time_ms": 1.0}, False),
    ],
)
def test_a_bar_is_met_from_its_number_on(script, word, row, met):
    (bar,) = (bar for bar in script.bars() if word in bar.claim)
    assert (": met (" in bar.verdict([asked_row(**row)])) is met
    assert (": NOT met (" in bar.verdict([asked_row(**row)])) is not met


@pytest.mark.parametrize(("lost", "met"), [(0.0, True), (0.01, False)])
def test_hit_rates_are_equal_or_not(script, lost, met):
    (bar,) = (bar for bar in script.bars() if bar.claim.endswith("disk"))
    row = asked_row(section="sharing", workload="disk", measure="hit rate lost", side="", value=lost)
    assert (": met (" in bar.verdict([row])) is met
    assert bar.verdict([]).endswith("not measured")


def test_fewer_than_two_requests_are_refused(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_segments.py", "--requests", "1"])
    with pytest.raises(ConfigError, match="at least 2"):
        script.main()
