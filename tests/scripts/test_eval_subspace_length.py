"""Errors over long texts are those of each window, and a script run gives a line for each of them."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import DynamicCache

from tests import tiny
from tests.scripts.running import import_script, rows_of, run_script


@pytest.mark.full
def test_each_window_of_each_text_has_a_line_and_is_measured_once(tmp_path, monkeypatch):
    options = ("--device", "cpu", "--quick", "--model", "base", "--csv", tmp_path / "length.csv")
    done = run_script("eval_subspace_length", *options)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "length.csv")
    texts = {"prose.txt": ["0", "32", "64"], "prose.txt, then verse.txt": ["0", "32"]}
    for variant in ("codec 0.1", "codec 0.1, adaptive"):
        for text, windows in texts.items():
            assert [row["window"] for row in rows if (row["variant"], row["text"]) == (variant, text)] == windows
    assert all(0 < float(row["kl"]) < 0.1 for row in rows)
    assert sum(line.split()[0] in ("0", "32", "64") for line in done.stdout.splitlines() if line) == 5
    script = import_script("eval_subspace_length")
    monkeypatch.setattr(script, "windows", None)
    monkeypatch.setattr(sys, "argv", ["eval_subspace_length.py", *map(str, options)])
    script.main()
    assert rows_of(tmp_path / "length.csv") == rows


@pytest.mark.parametrize("step", [1, 7])
def test_windows_together_have_the_mean_of_the_row(step):
    model, ids, kivi = tiny.llama(), tiny.ids(2, 60), import_script("_kivi")
    script, quality = import_script("eval_subspace_length"), import_script("_subspace_quality")
    rows = list(script.windows(model, kivi.KiviCache(model.config, 2), ids, 4, step, 20))
    assert [row["window"] for row in rows] == [0, 20, 40]
    mean = sum(row["kl"] * count for row, count in zip(rows, (16, 20, 19), strict=True)) / 55
    if step == 1:
        whole = quality.quality(model, lambda: kivi.KiviCache(model.config, 2), ids, 4)
        assert mean == pytest.approx(whole["kl"], rel=1e-2)
    exact = list(script.windows(model, DynamicCache(config=model.config), ids, 4, step, 20))
    assert all(abs(row["kl"]) < 1e-6 for row in exact)
    assert [row["perplexity"] for row in exact] == [row["perplexity"] for row in rows]
    assert mean > 1e-4


def test_half_of_a_row_is_another_text():
    script = import_script("eval_subspace_length")
    texts = {"a": torch.arange(100), "b": torch.arange(1000, 1100)}
    args = type("Args", (), {"rows": 1, "tokens": 50, "switch_rows": 2, "switch": 20})
    found = script.texts_of(type("Setting", (), {"texts": texts}), args)
    assert found["a"].tolist() == [list(range(50))]
    assert found["a, then b"].tolist() == [[*range(10), *range(1000, 1010)], [*range(50, 60), *range(1050, 1060)]]
