"""The comparison of summaries runs as a user runs it; the gate's rules are left out one by one."""

from __future__ import annotations

import pytest

from hf_kvcaches.warmstart import words
from hf_kvcaches.warmstart.changes import changes
from tests.scripts.running import import_script, rows_of, run_script

pytest.importorskip("faiss")


@pytest.mark.full
def test_every_structure_and_encoder_has_a_row(tmp_path):
    done = run_script("compare_summaries", "--quick", "--device", "cpu", "--csv", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "warmstart-summaries.csv")
    structures = {(row["layout"], row["map"]) for row in rows if not row["encoder"]}
    maps = (
        "own",
        "none",
        "adapters, ridge",
        "adapters, trained",
        *(f"projector, {name}" for name in ("shared", "per_head", "block_diagonal")),
    )
    assert structures == {("", "cold"), *((layout, name) for layout in ("salient", "paper") for name in maps)}
    assert {(row["encoder"], row["map"]) for row in rows if row["encoder"]} == {
        (encoder, name) for encoder in ("model", "hidden", "bag of words") for name in ("none", "align")
    }
    assert all(0 <= float(row["right"]) <= 1 for row in rows)


@pytest.mark.full
def test_the_rules_and_lists_of_the_gate_are_left_out_one_by_one(tmp_path):
    done = run_script("ablate_warmstart_gate", "--pairs", "1")
    assert done.returncode == 0, done.stderr
    lines = {line.split("  ")[0]: line.split()[-4:] for line in done.stdout.splitlines() if line.startswith(("risk: ", "list: "))}
    assert "content=0: " in done.stdout
    assert ", 0 of them falsely" in done.stdout
    assert int(lines["risk: quotations"][1]) > 0 == int(lines["list: NUMBERS"][1])
    assert int(lines["list: LOGIC"][1]) > 0


def test_a_list_is_empty_while_it_is_left_out():
    script = import_script("ablate_warmstart_gate")
    source, target = "All guests must pay.", "All guests may pay."
    before = words.LOGIC
    with script.without("LOGIC"):
        assert not changes(source, target).risks
    assert words.LOGIC is before
    assert changes(source, target).risks
    assert not script.less(changes(source, target), "logic").risks
