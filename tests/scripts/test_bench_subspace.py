"""The benchmark of SubspaceCache runs as a user runs it, in its smallest size, and its numbers are what they are said to be."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from hf_kvcaches.errors import ConfigError
from tests.scripts.running import ROOT, quick_bench, rows_of


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "new"
    return folder, quick_bench("bench_subspace", folder, "subspace")


@pytest.fixture(scope="module")
def rows(quick) -> list[dict[str, str]]:
    return rows_of(quick[0] / "subspace.csv")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("bench_subspace")


@pytest.fixture
def bench(script):
    return script.Bench(script.QUICK, "float32", torch.device("cpu"))


def test_it_proves_equality_first_then_prints_a_line_for_each_side_and_bar(quick):
    _, done = quick
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "threads 1" in out
    assert out.count("same logits as DynamicCache") >= 2
    assert out.index("same logits as") < out.index("\nfloat32 2 layers 1 x 96")
    assert out.count("\nfloat32 2 layers 2 x 96") == 2
    assert out.count("\nbfloat16 2 layers 1 x 80") == 2
    for dtype in ("float32", "bfloat16"):
        for bar in ("steps of 4 rows faster", "steps of one row at most 1.2x", "encoding takes at most 5% more"):
            assert f"{dtype}, {bar}" in out


def test_its_numbers_stand_in_a_file_with_what_they_depend_on(rows):
    assert {row["section"] for row in rows} == {"step", "prefill", "roofline"}
    rows = [row for row in rows if row["section"] != "roofline"]
    assert len(rows) == 2 * (2 * 2 + 2)
    assert all(row[name] for row in rows for name in ("hardware", "device", "threads", "python", "torch", "transformers", "layers"))
    for row in rows:
        for name in ("time{}_ms", "ratio{}"):
            low, middle, high = (float(row[name.format(quartile)]) for quartile in ("_q1", "", "_q3"))
            assert 0 < low <= middle <= high
        assert float(row["layer_ms"]) == pytest.approx(float(row["time_ms"]) / 2, abs=1e-4)
        assert float(row["processor_ms"]) > 0
    step = [row for row in rows if row["section"] == "step"]
    assert all(float(row["bytes_share"]) == 1 for row in step if row["side"] == "DynamicCache")
    assert all(float(row["bytes_share"]) < 1 for row in step if row["side"] == "codec 0.125")


def test_it_draws_a_picture(quick):
    assert (quick[0] / "subspace.png").read_bytes().startswith(b"\x89PNG")


@torch.no_grad()
def test_a_wrong_result_is_not_timed(bench):
    assert "same logits" in bench.prove()
    with pytest.raises(SystemExit, match="float32: logits differ by"):
        bench.prove(bench.codec)


@torch.no_grad()
def test_bytes_are_those_of_codes_and_exact_tokens(bench, script):
    caches = bench.filled(2, 500)
    whole, owned = (script.cache_bytes(cache) for cache in caches.values())
    assert whole == 2 * 2 * 2 * 500 * 2 * 16 * 4
    codes = 2 * (500 - 68) * bench.codec.bytes_per_token
    assert whole * 68 / 500 + codes <= owned < whole / 2
    assert {cache.get_seq_length() for cache in caches.values()} == {500}


def test_the_roofline_is_of_what_a_step_reads(rows, bench):
    full, codec = [row for row in rows if row["section"] == "roofline" and row["tokens"] == "131072"]
    exact = 2 * 2 * 2 * 2 * 16  # of a token, in 16 bits
    assert int(full["bytes"]) == 131072 * exact
    assert int(codec["bytes"]) == pytest.approx(131072 * bench.codec.bytes_per_token + 68 * exact, rel=0.01)
    assert int(full["operations"]) == 131072 * 2 * 2 * 4 * 2 * 16
    assert float(codec["h100_ms"]) < float(full["h100_ms"])


def row_of(**values: object) -> dict[str, object]:
    return {"section": "step", "dtype": "float32", "batch": 4, "tokens": 8192, "side": "codec 0.125", "ratio": 1.0} | values


def verdict(script, word: str, *rows: dict[str, object]) -> str:
    return next(bar for bar in script.bars(["float32"]) if word in bar.claim).verdict(rows)


def test_bars_are_on_the_times_of_steps_and_prompts(script):
    slow = row_of(batch=1, ratio=0.84)
    assert ": met" in verdict(script, "4 rows", slow, row_of(ratio=1.01))
    assert ": NOT met" in verdict(script, "4 rows", row_of(ratio=0.99))
    assert ": met" in verdict(script, "one row", slow)
    assert ": NOT met" in verdict(script, "one row", row_of(batch=1, ratio=0.83))
    assert ": met" in verdict(script, "prefill", row_of(section="prefill", batch=1, ratio=0.953))
    assert ": NOT met" in verdict(script, "prefill", row_of(section="prefill", batch=1, ratio=0.95))
    assert verdict(script, "prefill", slow).endswith(": not measured")


@pytest.fixture
def main(script, monkeypatch, capsys):
    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bench_subspace.py", "--device", "cpu", "--quick", *arguments])
        script.main()
        return capsys.readouterr().out

    return call


def test_only_the_named_part_is_measured(main):
    out = main("--sections", "step", "--tokens", "80", "--batches", "1", "--dtypes", "bfloat16", "--layers", "3")
    assert "\nbfloat16 3 layers 1 x 80" in out
    assert "float32" not in out
    assert "at most 5% more of a prefill (0.952x): not measured" in out


def test_numbers_that_make_no_sense_are_refused(main):
    for option in ("--tokens", "--batches", "--layers", "--threads"):
        with pytest.raises(ConfigError, match=f"{option}: expected at least 1"):
            main(option, "0")


def test_what_was_measured_is_kept_when_a_later_section_fails(script, main, monkeypatch, tmp_path):
    def fails(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script.Run, "prefill", fails)
    with pytest.raises(KeyboardInterrupt):
        main("--csv", str(tmp_path / "some.csv"))
    assert {row["section"] for row in rows_of(tmp_path / "some.csv")} == {"step"}
