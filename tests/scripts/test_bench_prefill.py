"""The benchmark of prompts of which nothing is reused, at its smallest size."""

from __future__ import annotations

from tests.scripts.running import rows_of, run_script


def test_it_times_every_cache_and_judges_its_promise(tmp_path):
    done = run_script("bench_prefill", "--quick", "--device", "cpu", "--tokens", "80", "--rounds", "2", "--csv", tmp_path / "prefill.csv")
    assert done.returncode == 0, done.stderr
    assert "at most 1% of the time over DynamicCache" in done.stdout
    rows = rows_of(tmp_path / "prefill.csv")
    assert [row["side"] for row in rows] == ["dynamic", "growing", "segments", "warmstart"]
    assert all(float(row["ratio"]) > 0 and 0 <= float(row["own"]) <= 1 and row["hardware"] for row in rows)


def test_a_prompt_of_one_token_is_refused():
    done = run_script("bench_prefill", "--quick", "--device", "cpu", "--tokens", "1")
    assert done.returncode == 1
    assert "at least 2" in done.stderr
