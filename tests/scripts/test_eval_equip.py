"""The quality evaluation of EquipCache runs as a user runs it, and its numbers are those of plain computations."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches.errors import ConfigError
from tests import testbed, tiny
from tests.scripts.running import ROOT, rows_of, run_script


def evaluate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("eval_equip", "--device", "cpu", "--quick", *arguments)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "new"
    tasks = ("--tasks", "perplexity", "prefix", "recall", "--positions", "compact", "original")
    done = evaluate(*tasks, "--csv", folder / "equip.csv", "--plot", folder / "equip.png")
    assert done.returncode == 0, done.stderr
    return folder, done, rows_of(folder / "equip.csv")


def test_every_setting_has_a_row_in_both_tables_and_in_the_file(quick):
    _, done, rows = quick
    names = ["full cache", *(f"{policy} {positions}" for policy in ("streaming", "h2o") for positions in ("compact", "original"))]
    for name in names:
        assert sum(line.startswith(name) for line in done.stdout.splitlines()) == 3
    waiting = {f"kvzip {positions}" for positions in ("compact", "original")}
    for task, others in (("perplexity", set()), ("prefix", waiting), ("recall", waiting)):
        found = {f"{row['policy']} {row['positions']}".strip() for row in rows if row["task"] == task}
        assert found == {*names, *others}
    assert all(row["torch"] and row["model"] == "base" for row in rows)


def test_the_full_caches_perplexity_is_that_of_one_forward_pass(quick):
    row = next(row for row in quick[2] if row["policy"] == "full cache" and row["task"] == "perplexity")
    model, tokenizer = testbed.load()
    ids = torch.tensor(tokenizer(testbed.held_out(), add_special_tokens=False)["input_ids"])
    both = torch.stack([ids[:64], ids[len(ids) // 2 :][:64]])
    with torch.no_grad():
        loss = model(input_ids=both, labels=both).loss
    assert float(row["perplexity"]) == pytest.approx(math.exp(float(loss)), rel=1e-3)
    assert (row["from"], row["to"], row["tokens"]) == ("1", "64", "126")


def test_the_full_cache_recalls_what_it_read(quick):
    row = next(row for row in quick[2] if row["policy"] == "full cache" and row["task"].startswith("recall"))
    assert (row["questions"], row["right"]) == ("2", "2")


def test_it_prints_the_bars(quick):
    assert "compactor recalls 99.0% at 0.5" in quick[1].stdout


def test_it_draws_a_picture(quick):
    assert (quick[0] / "equip.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("eval_equip")


def test_what_follows_a_whole_prefix_is_as_likely_as_with_the_full_cache(script):
    model, ids = tiny.llama(), tiny.ids(2, 40)
    with torch.no_grad():
        settings = (script.Setting(script.FULL_CACHE), *(script.Setting(policy, "compact", 1.0) for policy in ("compactor", "kvzip")))
        rows = list(script.prefixes(model, ids, 30, settings))
        logits = model(ids).logits[:, 30:-1]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 31:].flatten())
    assert rows[0]["perplexity"] == pytest.approx(math.exp(float(expected)), rel=1e-3)
    assert all(abs(row["excess"]) < 1e-3 for row in rows)


def test_a_budget_for_the_whole_document_recalls_as_much_as_the_full_cache(script):
    model, tokenizer = testbed.load()
    quizzes = script.make_quizzes(tokenizer, 1, 200, 2, seed=0)
    settings = (script.Setting(script.FULL_CACHE), script.Setting("h2o", "compact", 400))
    with torch.no_grad():
        full, kept = (row for setting in settings for row in script.recall(model, quizzes, setting))
    assert (full["questions"], full["right"]) == (2, 2)
    assert (kept["questions"], kept["right"]) == (2, 2)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_the_loss_of_each_token_does_not_depend_on_the_pieces_that_a_full_cache_is_fed(script, chunk):
    model = tiny.llama()
    ids = tiny.ids(2, 30)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        found = script.losses(model, DynamicCache(config=model.config), ids, chunk)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_number_below_one_is_refused(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval_equip.py", "--rows", "0"])
    with pytest.raises(ConfigError, match="--rows: expected at least 1"):
        script.parse()
