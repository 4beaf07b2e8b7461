"""The table of families is written from what the suite found."""

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


def write(files):
    results, page = files
    done = run_script("family_table", results, "--page", page, "--support", page.with_suffix(".csv"))
    return done, page.read_text()


def test_families_that_get_the_same_share_a_row_and_reasons_are_numbered(files):
    refusals = [outcome(name, "equip", "single", "refused", "No positions. Use GrowingCache.") for name in ("mpt", "bloom")]
    equal = [outcome(name, "growing", "single", "equal") for name in ("bloom", "mpt", "llama")]
    files[0].write_text("".join([*refusals, *equal, outcome("t5", "", "", "left out", "it has an encoder")]))
    done, text = write(files)
    assert done.returncode == 0, done.stderr
    assert text.startswith("# Families\n")
    assert text.endswith("-->\nbehind\n")
    assert "old" not in text
    assert "| `bloom`, `mpt` | yes | no (1) |" in text
    assert "| `llama` | yes | - |" in text
    assert "1. No positions. Use GrowingCache." in text
    assert "- `t5`: it has an encoder" in text
    rows = {row["families"]: row for row in rows_of(files[1].with_suffix(".csv"))}
    assert rows["bloom mpt"]["EquipCache"] == "no (No positions. Use GrowingCache.)"
    assert rows["llama"] == dict.fromkeys(rows["llama"], "-") | {"families": "llama", "GrowingCache": "yes"}
    assert {'EquipCache, positions="original"', "SegmentReuseCache, moved segments"} < set(rows["llama"])


def test_what_a_cache_refuses_alone_is_named(files):
    files[0].write_text(outcome("llama", "growing", "single", "equal") + outcome("llama", "growing", "beams", "refused", "No beams."))
    assert "yes, but no beams (1)" in write(files)[1]


def test_the_last_outcome_counts_and_a_failure_ends_the_script(files):
    files[0].write_text(outcome("llama", "growing", "single", "equal") + outcome("llama", "growing", "single", "wrong", "1.0e+00"))
    done, text = write(files)
    assert done.returncode == 1
    assert "llama: growing, single: wrong: 1.0e+00" in done.stdout
    assert "**fails**" in text


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
