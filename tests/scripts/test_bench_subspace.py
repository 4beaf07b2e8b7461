"""The benchmark of SubspaceCache runs as a user runs it, in its smallest grid, and its numbers are what they are said to be."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_kvcaches.errors import ConfigError
from tests.scripts.running import ROOT, rows_of, run_script

VARIANTS = ("post", "aware", "post int8", "aware int8")


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("bench_subspace", "--device", "cpu", "--threads", "1", *arguments)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "new"
    return folder, bench("--quick", "--csv", folder / "subspace.csv", "--plot", folder / "subspace.png")


@pytest.fixture(scope="module")
def rows(quick) -> list[dict[str, str]]:
    return rows_of(quick[0] / "subspace.csv")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("bench_subspace")


@pytest.fixture
def sides(script):
    return importlib.import_module("_subspace_sides")


def test_it_proves_equality_first_then_prints_a_line_for_each_side_and_bar(quick):
    _, done = quick
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "threads 1" in out
    assert "GB/s" in out
    assert out.count("same logits as DynamicCache") == 4
    assert out.index("same logits as") < out.index("\nstep float32")
    assert out.count("\nattention float32 gqa 16 2 x 96") == 7, "three ways of SDPA and four of ours"
    assert out.count("\nattention float32 mha 16 1 x 96") == 5
    for bar in ("post at least 3x", "post int8 at least 3x", "aware at most 1.5x", "aware int8 at most 1.5x"):
        assert f"float32, {bar}" in out
    assert "8 x 32768" not in out, "only GPUs are asked for that"
    assert "cell/s" in done.stderr


def test_adaptive_bases_are_measured(rows):
    assert {row["measure"] for row in rows if row["section"] == "adaptive"} == {"prefill", "step"}


def test_its_numbers_stand_in_a_file_with_what_they_depend_on(rows):
    assert {"decode", "step"} <= {row["section"] for row in rows}
    assert all(row[name] for row in rows for name in ("hardware", "device", "threads", "python", "torch", "transformers", "gb_per_second"))
    for row in rows:
        for name in ("time{}_ms", "ratio{}"):
            low, middle, high = (float(row[name.format(quartile)]) for quartile in ("_q1", "", "_q3"))
            assert 0 < low <= middle <= high
    decode = [row for row in rows if row["section"] == "decode"]
    assert max(float(row["error"]) for row in decode) <= 1e-4
    assert {row["caches"] for row in decode} == {"cold"}
    assert all(float(row["floor_share"]) >= 0 for row in decode)
    assert {row["side"] for row in rows if row["section"] == "step"} == {"DynamicCache", "GrowingCache", "post", "aware", "aware int8"}
    one = {row["side"]: row for row in decode if (row["kv"], row["batch"]) == ("gqa", "2")}
    assert len({row["baseline"] for row in one.values()}) == 1
    best = one[one["post"]["baseline"]]
    assert float(best["ratio"]) == 1
    ways = ("SDPA", "SDPA, enable_gqa", "SDPA, repeated")
    assert float(best["time_ms"]) == min(float(row["time_ms"]) for name, row in one.items() if name in ways)


def test_it_draws_a_picture(quick):
    assert (quick[0] / "subspace.png").read_bytes().startswith(b"\x89PNG")


def test_the_share_of_the_floor_is_the_time_of_reading_over_the_time_measured(sides):
    class Fake:
        bandwidth = 2e9

    assert sides.floor(4_000_000, 8.0, Fake())["floor_share"] == 0.25


@pytest.mark.parametrize("kv", ["mha", "gqa"])
def test_a_wrong_result_is_not_timed(sides, monkeypatch, kv):
    cell = sides.Cell("float32", kv, 16, 2, 48)
    assert sides.Kernels(cell, torch.device("cpu")).prove() <= 1e-4
    attend = sides.coefficient_attention

    def wrong(*args, **kwargs):
        output, lse = attend(*args, **kwargs)
        return output * (1.01 if kwargs["rotation"] is not None else 1.0), lse

    monkeypatch.setattr(sides, "coefficient_attention", wrong)
    with pytest.raises(SystemExit, match=f"{kv} 16 2 x 48 aware: outputs differ"):
        sides.Kernels(cell, torch.device("cpu")).prove()


def test_bytes_are_those_of_coefficients_bases_scales_and_the_query(sides):
    kernels = sides.Kernels(sides.Cell("float32", "gqa", 16, 2, 48), torch.device("cpu"))
    query, bases = 2 * 8 * 16 * 4, 2 * 2 * 16 * 4 * 4
    assert kernels.bytes_of("aware") == query + bases + 2 * 2 * 2 * 48 * 4 * 4
    assert kernels.bytes_of("post int8") == query + bases + 2 * 2 * 2 * (48 * 4 + 3 * 4)


def test_rows_are_fewer_where_memory_is_short(sides):
    cell = sides.Cell("float32", "gqa", 64, 8, 16384)
    assert sides.that_fits(cell, 1e12) == cell
    most = sides.needed(sides.Cell("float32", "gqa", 64, 4, 16384))
    assert sides.that_fits(cell, most).batch == 4
    assert sides.that_fits(cell, 1).batch == 1


def row_of(side: str, tokens: int, ratio: float, **more: object) -> dict[str, object]:
    row = {"section": "decode", "measure": "attention", "dtype": "float32", "kv": "mha", "head_dim": 64, "batch": 1, "tokens": tokens}
    row |= {"side": side, "baseline": "SDPA", "time_ms": 1 / ratio, "ratio": ratio, "ratio_q1": ratio, "ratio_q3": ratio}
    return row | {"total_ratio": ratio, "floor_share": 0.25 * ratio} | more


def bar_of(script, device, word):
    return next(bar for bar in script.bars(torch.device(device), ["float32"]) if word in bar.claim)


def test_a_bar_is_met_only_in_all_cells(script):
    rows = [row_of("SDPA", 4096, 1.0), row_of("post", 4096, 2.0), row_of("SDPA", 8192, 1.0), row_of("post", 8192, 8.0)]
    bar = bar_of(script, "cpu", "post at least")
    assert bar.verdict(rows).endswith("float32, post at least 3x as fast as SDPA: NOT met (mha 2x, mha 8x)")
    assert bar.verdict(rows[2:]).endswith(": met (8x)")
    assert bar.verdict([]).endswith(": not measured")


def test_gpus_have_a_bar_of_their_own_at_32768_tokens(script):
    rows = [row_of("aware int8", 32768, 2.5, batch=8), row_of("aware int8", 4096, 0.1, batch=8)]
    assert bar_of(script, "cuda", "8 x 32768").verdict(rows).endswith(": met (2.5x)")


def test_decoding_with_sketches_is_judged_by_all_steps_together(script):
    bar = bar_of(script, "cpu", "of decoding")
    slow = row_of("adaptive", 4096, 1.0, section="adaptive", measure="step", baseline="static", total_ratio=0.94)
    assert ": NOT met" in bar.verdict([slow])
    assert ": met" in bar.verdict([slow | {"total_ratio": 0.953}])


@torch.no_grad()
def test_what_sketching_adds_is_measured_with_any_two_caches(script, sides):
    shape = script.QUICK.shape
    pair = script.Pair.random(shape, "gqa", torch.device("cpu"))
    make = sides.step_makers(pair, 256)["aware"]
    makers = {sides.STATIC: make, sides.ADAPTIVE: make}
    cell = sides.Cell("float32", "gqa", shape.head_dim, 2, 96)
    clock = sides.Clock(torch.device("cpu"), small=True)
    for rows in (
        sides.prefills(cell, pair, makers, 2),
        list(sides.Stepping(pair, makers).measure(cell, clock, 2, 2, sides.STATIC)),
    ):
        assert [(row["side"], row["baseline"]) for row in rows] == [("static", "static"), ("adaptive", "static")]
        assert all(row["total_ratio"] > 0 for row in rows)


@torch.no_grad()
def test_caches_read_on_for_the_next_cell_and_steps_leave_what_was_filled(script, sides):
    pair = script.Pair.random(script.QUICK.shape, "gqa", torch.device("cpu"))
    stepping = sides.Stepping(pair, sides.step_makers(pair, 256))
    clock = sides.Clock(torch.device("cpu"), small=True)
    for tokens in (80, 96):
        list(stepping.measure(sides.Cell("float32", "gqa", 16, 2, tokens), clock, 2, 2, sides.FULL))
        assert {cache.get_seq_length() for cache in stepping.caches.values()} == {tokens}


@pytest.fixture
def main(script, monkeypatch, capsys):
    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bench_subspace.py", "--device", "cpu", "--quick", *arguments])
        script.main()
        return capsys.readouterr().out

    return call


def test_only_the_named_part_is_measured(main):
    out = main("--sections", "decode", "--tokens", "32", "--batches", "1", "--dtype", "bfloat16")
    assert "attention bfloat16 mha 16 1 x 32" in out
    assert "float32" not in out
    assert "same logits" not in out


def test_numbers_that_make_no_sense_are_refused(main):
    for option in ("--tokens", "--batches", "--head-dims", "--threads"):
        with pytest.raises(ConfigError, match=f"{option}: expected at least 1"):
            main(option, "0")


def test_what_was_measured_is_kept_when_a_later_cell_fails(script, main, monkeypatch, tmp_path):
    def fails(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script.Run, "step", fails)
    with pytest.raises(KeyboardInterrupt):
        main("--csv", str(tmp_path / "some.csv"))
    assert {row["section"] for row in rows_of(tmp_path / "some.csv")} == {"decode"}
