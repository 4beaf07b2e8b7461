"""The benchmark of EquipCache runs as a user runs it, in its smallest grid."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest

from tests.scripts.running import ROOT, rows_of, run_script


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("bench_equip", "--device", "cpu", *arguments)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "new"
    return folder, bench("--quick", "--csv", folder / "equip.csv", "--plot", folder / "equip.png")


@pytest.mark.full
def test_it_proves_equality_first_then_prints_a_row_for_each_cell_and_a_line_for_each_bar(quick):
    _, done = quick
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same logits as") == 12
    assert done.stdout.index("same logits as") < done.stdout.index("ours/floor")
    assert done.stdout.count("float32 gqa 1 x 32") >= 5, "one in each table: streaming and h2o with both positions, and future"
    assert "float32 mha, batch >= 8 (paper: 1.62x on 60 cores): not measured" in done.stdout
    lines = done.stdout.splitlines()
    for claim, verdict in {"1.15x the floor, float32 gqa": "met (", "at least 25x": "met ("}.items():
        assert any(claim in line and verdict in line for line in lines), claim


@pytest.mark.full
def test_its_numbers_stand_in_a_file_with_what_they_depend_on(quick):
    rows = rows_of(quick[0] / "equip.csv")
    assert {row["measure"] for row in rows} == {"decode", "write", "flat", "drafts", "prune"}
    assert all(row[name] for row in rows for name in ("hardware", "device", "threads", "python", "torch", "transformers", "hf_kvcaches"))
    for policy, positions, sides in (
        ("streaming", "compact", 9),
        ("streaming", "original", 7),
        ("h2o", "compact", 7),
        ("future", "compact", 5),
    ):
        cell = {"measure": "decode", "policy": policy, "positions": positions, "batch": "2"}
        measured = [row["side"] for row in rows if cell.items() <= row.items()]
        assert len(measured) == len(set(measured)) == sides, (policy, positions)
    for row in [row for row in rows if row["measure"] == "decode"]:
        for name in ("round{}_ms", "step{}_ms", "ratio{}"):
            low, middle, high = (float(row[name.format(quartile)]) for quartile in ("_q1", "", "_q3"))
            assert 0 < low <= middle <= high
    errors = [float(row["error"]) for row in rows if row["error"]]
    assert len(errors) == 10, "one for each cell"
    assert max(errors) <= 1e-4


@pytest.mark.full
def test_it_draws_a_picture(quick):
    assert (quick[0] / "equip.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("bench_equip")


@pytest.mark.full
def test_what_its_file_has_already_is_not_measured_again(quick, tmp_path):
    path = tmp_path / "equip.csv"
    lines = (quick[0] / "equip.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if ",flat,h2o,compact," not in line), encoding="utf-8")
    done = bench("--quick", "--csv", path)
    assert "/1 [" in done.stderr, "one of the cells is missing"
    found = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(found) == len(lines)
    assert {line for line in lines if ",flat,h2o,compact," not in line} <= set(found)


@pytest.mark.full
def test_one_part_is_measured_alone(tmp_path):
    done = bench("--quick", "--part", "prune", "--csv", tmp_path / "equip.csv")
    assert done.returncode == 0, done.stderr
    measured = {(row["measure"], row["policy"], row["side"]) for row in rows_of(tmp_path / "equip.csv")}
    policies = ("future", "compactor", "KeepProbe", "kvzip")
    assert measured == {("prune", policy, side) for policy in policies for side in ("whole", "pruned")}
    assert "reading and pruning 4,096 tokens at most 2.2x their prefill, kvzip" in done.stdout


def test_a_bar_is_judged_by_the_geometric_mean_over_the_cells_of_large_batches(script):
    where = {"measure": "decode", "policy": "streaming", "positions": "compact", "dtype": "float32", "kv": "mha"}
    where["side"] = "re-rotate all (published formula)"
    rows = [where | {"batch": batch, "ratio": ratio} for batch, ratio in ((8, 2.0), (32, 3.2), (1, 0.1))]
    judged = [bar.verdict(rows) for bar in script.bars() if "streaming at least" in bar.claim and "float32" in bar.claim]
    assert judged[0].endswith(": met (2.53x in geometric mean, 2.00 to 3.20 in 2 cells)")
    assert judged[1].endswith(": not measured")


def test_the_floor_is_the_fastest_way_to_attend_to_what_never_changes(script):
    cell = {"measure": "decode", "policy": "h2o", "positions": "compact", "dtype": "float32", "kv": "mha", "batch": 8, "budget": 32}
    times = {"EquipCache": 3.0, "gather and append": 9.0, "floor, sdpa": 2.0, "floor, dense": 2.5, "floor, slots": 4.0}
    rows = [cell | {"side": side, "step_ms": time, "ratio": 1, "ratio_q1": 1, "ratio_q3": 1, "error": 0} for side, time in times.items()]
    (summary,) = script.summaries(rows)
    assert (summary["floor_ms"], summary["overhead"]) == (2.0, 1.5)
    assert summary["ours_ms"] == 3.0
