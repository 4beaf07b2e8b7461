"""`--json` prints one document on stdout, and nothing else."""

from __future__ import annotations

import csv
import json

import pytest

from tests import testbed
from tests.cli.running import BASE, run

PROSE = testbed.FOLDER / "prose.txt"
CACHE = ("--cache", "EquipCache('streaming', budget=16)")


def document(capsys, *options, code=0):
    done = run(capsys, *options, "--json")
    assert done.code == code, done.err
    return json.loads(done.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_recommend_has_the_rows_of_its_table_and_the_code_of_its_choice(capsys, tmp_path):
    found = document(capsys, "recommend", "--model", BASE, "--context", "2k", "--memory", "1GiB", "--csv", tmp_path / "rows.csv")
    assert (found["family"], found["layers"], found["full_attention_layers"], found["context"]) == ("llama", 4, 4, 2048)
    assert found["memory_bytes"] == 2**30
    with (tmp_path / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["cache"] for row in found["caches"]] == [row["cache"] for row in rows]
    assert [row["gib"] for row in found["caches"]] == [float(row["gib"]) for row in rows]
    assert found["choice"]["cache"] == "GrowingCache()"
    assert "per_call(GrowingCache)" in found["choice"]["code"]


def test_recommend_has_no_choice_and_ends_with_1_where_nothing_fits(capsys):
    assert document(capsys, "recommend", "--model", BASE, "--memory", "1MiB", code=1)["choice"] is None


def test_verify_has_the_report(capsys):
    lengths = ("--context", 40, "--max-new-tokens", 4)
    found = document(capsys, "verify", "--model", BASE, *CACHE, "--file", PROSE, *lengths)
    assert (found["cache"], found["prompt_tokens"], found["steps"]) == ("EquipCache('streaming', budget=16)", 40, 4)
    assert len(found["kl"]) == 4
    assert found["seconds"]["prefill"] > 0
    assert found["environment"]["device"] == "cpu"


def test_where_the_text_differs_verify_says_so_on_stderr(capsys):
    cache = ("--cache", "EquipCache('streaming', budget=8, sinks=0)")
    options = ("--file", PROSE, "--context", 64, "--max-new-tokens", 12, "--exact", "--json")
    done = run(capsys, "verify", "--model", BASE, *cache, *options)
    assert done.code == 1
    assert json.loads(done.out)["first_divergence"] is not None
    assert "The text differs from step" in done.err


def test_eval_has_the_means_and_each_text(capsys, tmp_path):
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps(testbed.held_out()[start : start + 900]) for start in (0, 3000)))
    lengths = ("--context", 48, "--following", 8)
    found = document(capsys, "eval", "--model", BASE, *CACHE, *lengths, "--texts", tmp_path / "some.jsonl")
    assert [row["text"] for row in found["rows"]] == [0, 1]
    assert found["caches"][0]["mean_kl"] == pytest.approx(sum(row["mean_kl"] for row in found["rows"]) / 2)


def test_a_suite_has_its_summaries(capsys):
    found = document(capsys, "eval", "--model", BASE, *CACHE, "--suite", "needles", "--context", 100, "--limit", 1)
    assert {row["cache"] for row in found["caches"]} == {"full cache", "EquipCache('streaming', budget=16)"}
    assert all("right" in row for row in found["caches"])


def test_bench_has_a_row_for_each_cache(capsys):
    found = document(capsys, "bench", "--model", BASE, *CACHE, "--context", 20, "--steps", 2, "--rounds", 2)
    assert [row["cache"] for row in found["caches"]] == ["DynamicCache", "EquipCache"]
    assert all(row["prefill_s"] > 0 and row["decode_ms"] > 0 for row in found["caches"])
    assert found["environment"]["threads"] >= 1
