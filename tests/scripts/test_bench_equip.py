"""The benchmark of EquipCache runs as a user runs it, in its smallest grid."""

from __future__ import annotations

import csv
import importlib
import subprocess
from pathlib import Path

import pytest
import torch

from hf_kvcaches.errors import ConfigError
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
    assert done.stdout.count("float32 gqa 1 x 32") >= 3, "one in each table: streaming, and h2o with both positions"
    assert "mha, batch >= 8: not measured" in done.stdout
    for bar in ("bar 1.15: ", "bar 25x: ", "bar 1.02: met", "bar 1.10: ", "bar 1e-3: met"):
        assert bar in done.stdout


@pytest.mark.full
def test_its_numbers_stand_in_a_file_with_what_they_depend_on(quick):
    rows = rows_of(quick[0] / "equip.csv")
    assert {row["measure"] for row in rows} == {"decode", "write", "memory", "flat", "far"}
    assert all(row[name] for row in rows for name in ("hardware", "device", "threads", "python", "torch", "transformers", "hf_kvcaches"))
    streaming = [row for row in rows if (row["measure"], row["policy"], row["batch"]) == ("decode", "streaming", "2")]
    assert len(streaming) == 9
    assert len({row["side"] for row in streaming}) == 9
    for row in [row for row in rows if row["measure"] == "decode"]:
        for name in ("round{}_ms", "step{}_ms", "ratio{}"):
            low, middle, high = (float(row[name.format(quartile)]) for quartile in ("_q1", "", "_q3"))
            assert 0 < low <= middle <= high
    errors = [float(row["error"]) for row in rows if row["error"]]
    assert len(errors) == 7, "one for each of six cells, and one for the far end of a text"
    assert max(errors) <= 1e-4


@pytest.mark.full
def test_it_draws_a_picture(quick):
    assert (quick[0] / "equip.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("bench_equip")


@pytest.mark.full
def test_what_its_file_has_already_is_not_measured_again(quick, script, tmp_path):
    path = tmp_path / "equip.csv"
    lines = (quick[0] / "equip.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if ",memory,h2o,original," not in line]
    assert len(kept) == len(lines) - 1
    path.write_text("".join(kept), encoding="utf-8")
    fixed = next(csv.DictReader(lines))
    jobs = script.Run(script.QUICK, torch.device("cpu"), script.Table(path, fixed)).jobs()
    missing = [(name, point, work) for name, point, work in jobs if not script.Table(path, fixed).has(point)]
    assert [name for name, _, _ in missing] == ["memory h2o original float32 gqa 2 x 32"]
    with torch.no_grad():
        script.Table(path, fixed).add(missing[0][1], missing[0][2]())
    assert all(script.Table(path, fixed).has(point) for _, point, _ in jobs)
    assert path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1] == kept


@pytest.mark.full
def test_numbers_of_another_computer_stay_in_the_file_and_out_of_the_tables(quick, script):
    path = quick[0] / "equip.csv"
    fixed = next(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert script.Table(path, {**fixed, "hardware": "another"}).rows == []
    assert script.Table(path, fixed).rows


def test_a_file_of_another_script_is_refused_and_left_alone(script, tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="--csv: expected a file that this script wrote"):
        script.Table(path, {})
    assert path.read_text(encoding="utf-8") == "a,b\n1,2\n"


@pytest.mark.parametrize(("way", "expected"), [("mha", True), ("gqa", False)])
def test_a_bar_is_judged_by_the_geometric_mean_over_its_cells(script, way, expected):
    from _equip_report import bars

    rows = []
    for batch, ratio in (("8", 2.0), ("32", 3.2), ("1", 0.1)):  # a batch of 1 has no bar
        cell = {"measure": "decode", "policy": "streaming", "positions": "compact", "dtype": "float32", "kv": "mha", "batch": batch}
        cell |= {"budget": "256", "step_ms": "1.0", "ratio_q1": "1", "ratio_q3": "1"}
        rows += [cell | {"side": side, "ratio": str(ratio)} for side in ("EquipCache", "floor, sdpa", "re-rotate all (published formula)")]
        rows += [cell | {"side": side, "ratio": str(ratio)} for side in ("re-rotate all (fused)",)]
    line = next(line for line in bars(rows) if line.startswith(f"streaming over re-rotate all (published formula), {way}"))
    assert ("2.53x in geometric mean" in line and "bar 2.5x: met" in line) == expected
    assert line.endswith("not measured") == (not expected)
