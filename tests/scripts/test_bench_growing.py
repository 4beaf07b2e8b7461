"""The benchmark runs as a user runs it, in its smallest grid."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.scripts.running import rows_of, run_script


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("bench_growing", "--device", "cpu", *arguments)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "new"
    return folder, bench("--quick", "--csv", folder / "growing.csv", "--plot", folder / "growing.png")


def test_it_prints_a_row_for_each_cell(quick):
    _, done = quick
    assert done.returncode == 0, done.stderr
    assert "float32 gqa 1 x 32" in done.stdout
    assert "float32 gqa 2 x 32" in done.stdout


def test_its_numbers_stand_in_a_file_with_what_they_depend_on(quick):
    folder, _ = quick
    rows = rows_of(folder / "growing.csv")
    assert [(row["batch"], row["tokens"]) for row in rows] == [("1", "32"), ("2", "32")]
    for row in rows:
        assert all(row[name] for name in ("hardware", "device", "threads", "python", "torch", "transformers", "hf_kvcaches"))
        assert float(row["max_logit_error"]) <= 1e-4
        for kind in ("step", "update"):
            assert 0 < float(row[f"{kind}_ratio_q1"]) <= float(row[f"{kind}_ratio"]) <= float(row[f"{kind}_ratio_q3"])
            for side in ("dynamic", "growing"):
                assert 0 < float(row[f"{kind}_{side}_q1_ms"]) <= float(row[f"{kind}_{side}_ms"]) <= float(row[f"{kind}_{side}_q3_ms"])


def test_it_draws_a_picture(quick):
    folder, _ = quick
    assert (folder / "growing.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_option_ends_it_before_anything_is_timed():
    done = bench("--fast")
    assert done.returncode == 2
    assert "--fast" in done.stderr
