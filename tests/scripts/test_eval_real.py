"""The quality suite of real models runs as a user runs it, goes on where it was cut off, and its peers are what they are said to be."""

from __future__ import annotations

import math

import pytest
import torch

from tests.scripts.running import import_script, rows_of, run_script


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    files = ("--state", folder / "state", "--csv", folder, "--plot", folder / "real.png")
    options = ("--model", "base", "--device", "cpu", "--threads", 1, "--quick", *files)
    done = run_script("eval_real", *options)
    assert done.returncode == 0, done.stderr
    return folder, options, done, rows_of(folder / "real-base.csv")


@pytest.mark.full
def test_each_task_has_its_rows_with_the_conditions_they_were_measured_under(quick):
    _, _, done, rows = quick
    assert {row["section"] for row in rows} == {"codes", "quantized", "reuse"}
    assert {(row["model"], row["dtype"], row["threads"]) for row in rows} == {("base", "float32", "1")}
    codes = {(row["cache"], row["share"], row["recent"]): row for row in rows if row["section"] == "codes"}
    assert float(codes["codec", "0.25", "0"]["kl"]) < float(codes["KIVI 2 bit", "0.1875", "0"]["kl"])
    assert {row["peer"] for (cache, *_), row in codes.items() if cache not in ("codec", "packed codec")} == {"True"}
    assert {row["task"] for row in codes.values()} == {"prose.txt"}
    reuse = {(row["cache"], row["task"]): row for row in rows if row["section"] == "reuse"}
    assert float(reuse["segments exact", "requests"]["kl"]) < 1e-6
    assert all(0 < float(row["saved"]) < 1 for row in reuse.values())
    assert done.stdout.startswith("base\n\ncodes\n")


@pytest.mark.full
def test_a_finished_run_measures_nothing_again_and_a_cut_one_only_what_is_missing(quick, monkeypatch):
    folder, options, _, rows = quick
    [path] = folder.glob("state/*.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert run_script("eval_real", *options).returncode == 0
    assert path.read_text(encoding="utf-8").splitlines() == lines
    path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    assert run_script("eval_real", *options).returncode == 0
    again = path.read_text(encoding="utf-8").splitlines()
    assert again[:-1] == lines[:-1]
    assert rows_of(folder / "real-base.csv") == rows


@pytest.mark.full
def test_it_draws_a_picture(quick):
    assert (quick[0] / "real.png").read_bytes().startswith(b"\x89PNG")


def test_one_task_alone_is_measured_where_it_is_named(tmp_path):
    files = ("--state", tmp_path / "state", "--csv", tmp_path)
    done = run_script("eval_real", "--model", "base", "--threads", 1, "--quick", "--tasks", "requests", *files)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "real-base.csv")
    assert {row["section"] for row in rows} == {"reuse"}
    assert [row["cache"] for row in rows] == ["segments exact", "segments auto", "segments approximate"]


def test_levels_of_rotated_codes_lose_as_little_as_the_best_scalar_quantizer_of_normal_numbers():
    sides = import_script("_real_sides")
    numbers = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    # The least squared errors of 1, 2, 3 and 4 bits for a normal variable.
    for bits, error in {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}.items():
        levels = sides.normal_levels(bits)
        nearest = levels[(numbers[:, None] - levels).abs().argmin(1)]
        assert float((numbers - nearest).square().mean()) == pytest.approx(error, rel=0.03)


def test_rotated_codes_keep_norms_and_lose_less_with_more_bits():
    sides = import_script("_real_sides")
    states = torch.randn(1, 2, 50, 64) * torch.rand(1, 2, 50, 1)
    errors = []
    for bits in (2, 3, 4):
        keys, values = sides.RotatedCoding(bits).read(0, states, states)
        assert torch.equal(keys, values)
        errors.append(float((keys - states).square().mean()))
    assert errors[0] > errors[1] > errors[2]
    assert math.isclose(errors[2], 0.0095 * float(states.square().mean()), rel_tol=0.2)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("codec 0.125, 64 recent", ("codec", 0.125, 64, False)),
        ("KIVI 4 bit 0.3125", ("KIVI 4 bit", 0.3125, 0, True)),
        ("QuantizedCache hqq 2 bit 0.15625, 128 recent", ("QuantizedCache hqq 2 bit", 0.15625, 128, True)),
    ],
)
def test_names_of_sides_become_columns(name, columns):
    found = import_script("eval_real").columns_of(name)
    assert (found["cache"], found["share"], found["recent"], found["peer"]) == columns
