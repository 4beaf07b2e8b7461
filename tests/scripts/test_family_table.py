"""The table of families is written from what was run, and a run goes on where it was interrupted."""

from __future__ import annotations

import json
import re

import pytest

from tests.scripts.running import ROOT, rows_of, run_script

MARKS = "# Families\n<!-- families: begin -->\nold\n<!-- families: end -->\nbehind\n"


def outcome(family, cache, scenario, verdict, detail=""):
    return json.dumps({"family": family, "cache": cache, "scenario": scenario, "verdict": verdict, "detail": detail}) + "\n"


@pytest.fixture
def files(tmp_path):
    page = tmp_path / "families.md"
    page.write_text(MARKS)
    return tmp_path / "results.jsonl", page


def test_families_that_get_the_same_share_a_row_and_reasons_are_numbered(files):
    results, page = files
    refusals = [outcome(name, "equip", "single", "refused", "No positions. Use GrowingCache.") for name in ("bloom", "mpt")]
    results.write_text("".join([*refusals, *(outcome(name, "growing", "single", "equal") for name in ("bloom", "mpt", "llama"))]))
    done = run_script("family_table", "--write", "--results", results, "--page", page, "--support", page.with_suffix(".csv"))
    text = page.read_text()
    assert done.returncode == 0, done.stderr
    assert text.startswith("# Families\n")
    assert text.endswith("-->\nbehind\n")
    assert "old" not in text
    assert "| `bloom`, `mpt` | yes | no (1) |" in text
    assert "| `llama` | yes | - |" in text
    assert "1. No positions. Use GrowingCache." in text
    rows = {row["families"]: row for row in rows_of(page.with_suffix(".csv"))}
    assert rows["bloom mpt"]["EquipCache"] == "no (No positions. Use GrowingCache.)"
    assert rows["llama"] == dict.fromkeys(rows["llama"], "-") | {"families": "llama", "GrowingCache": "yes"}
    assert {'EquipCache, positions="original"', "SegmentReuseCache, moved segments"} < set(rows["llama"])


def test_what_a_cache_refuses_alone_is_named(files):
    results, page = files
    results.write_text(outcome("llama", "growing", "single", "equal") + outcome("llama", "growing", "beams", "refused", "No beams."))
    run_script("family_table", "--write", "--results", results, "--page", page, "--support", page.with_suffix(".csv"))
    assert "yes, but no beams (1)" in page.read_text()


def test_a_failure_stands_in_the_table_and_ends_the_script(files):
    results, page = files
    results.write_text(outcome("llama", "growing", "single", "wrong", "1.0e+00"))
    done = run_script("family_table", "--write", "--results", results, "--page", page, "--support", page.with_suffix(".csv"))
    assert done.returncode == 1
    assert "llama: growing, single: wrong: 1.0e+00" in done.stdout
    assert "**fails**" in page.read_text()


def test_a_run_adds_what_is_missing_and_leaves_the_table_alone(files):
    results, page = files
    results.write_text(outcome("gpt2", "growing", "single", "equal", "from before"))
    options = (
        "--families",
        "gpt2",
        "llama",
        "--caches",
        "growing",
        "--results",
        results,
        "--page",
        page,
        "--support",
        page.with_suffix(".csv"),
    )
    run_script("family_table", *options)
    lines = results.read_text().splitlines()
    assert [line for line in lines if '"gpt2"' in line] == lines[:1]
    assert {json.loads(line)["family"] for line in lines[1:]} == {"llama"}
    assert page.read_text() == MARKS


def test_the_command_line_knows_the_table_of_the_page():
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    notes = dict(re.findall(r"^(\d+)\. (.*)$", page, re.M))
    cite = lambda numbers: f"({', '.join(notes[number] for number in numbers[1].split(', '))})"  # noqa: E731
    expected = []
    for line in page.splitlines():
        if line.startswith("| `"):
            names, *cells = line.strip("|").split(" | ")
            expected.append([" ".join(re.findall("`([^`]+)`", names)), *(re.sub(r"\(([\d, ]+)\)", cite, cell.strip()) for cell in cells)])
    assert [list(row.values()) for row in rows_of(ROOT / "hf_kvcaches" / "cli" / "families.csv")] == expected
