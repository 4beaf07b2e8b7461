"""`stress_segments.py` runs, and says what it found."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.scripts.running import run_script


def test_processes_that_share_a_store_answer_rightly_and_one_of_them_is_killed(tmp_path: Path) -> None:
    result = run_script("stress_segments", "--quick", "--csv", tmp_path / "stress.csv")
    assert result.returncode == 0, result.stderr
    assert "NOT met" not in result.stdout.replace("hit rate of the second half at least that of the first: NOT met", "")
    with open(tmp_path / "stress.csv", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["place"], row["requests"], row["compared"]) == ("disk", "8", "2")
