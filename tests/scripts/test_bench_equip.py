"""The benchmark of EquipCache runs as a user runs it, in its smallest grid."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.scripts.running import rows_of, run_script


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("bench_equip", "--device", "cpu", *arguments)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "new"
    return folder, bench("--quick", "--csv", folder / "equip.csv", "--plot", folder / "equip.png")


@pytest.mark.full
def test_its_numbers_stand_in_a_file_with_what_they_depend_on(quick):
    folder, done = quick
    assert done.returncode == 0, done.stderr
    rows = rows_of(folder / "equip.csv")
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
