"""The calibration of gates runs as a user runs it, on a file of pairs and on generated ones."""

from __future__ import annotations

import importlib
import json

import pytest

from hf_kvcaches import WarmStartGate
from tests import testbed
from tests.scripts.running import ROOT, run_script
from tests.testbed.pairs import KINDS


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("calibrate_warmstart")


def run(*options):
    return run_script("calibrate_warmstart", "--device", "cpu", *options)


def test_a_gate_for_this_model_is_written_without_a_file(tmp_path):
    done = run("--quick", "--out", tmp_path / "gate")
    assert done.returncode == 0, done.stderr
    model, tokenizer = testbed.load()
    gate = WarmStartGate.from_pretrained(tmp_path / "gate", model=model, tokenizer=tokenizer)
    assert sum(row["chosen"] for row in gate.measured) == 1
    assert f"reusable: {gate.reusable:.4g}" in done.stdout
    assert f"encoder: {gate.encoder}" in done.stdout


def test_a_file_of_pairs_is_taken_instead(tmp_path):
    start = "The road was long and the day was cold. " * 6
    lines = [{"source": f"{start}Ann went {word} and the", "target": f"{start}Ann went, {word} and the"} for word in ("home", "away")]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = run("--pairs", tmp_path / "some.jsonl", "--out", tmp_path / "gate")
    assert done.returncode == 0, done.stderr
    assert "2 pairs" in done.stdout


def test_a_line_that_is_no_pair_is_named(tmp_path):
    (tmp_path / "some.jsonl").write_text('{"source": "a", "target": "b"}\n{"source": "a"}\n')
    done = run("--pairs", tmp_path / "some.jsonl", "--out", tmp_path / "gate")
    assert done.returncode == 1
    assert "some.jsonl, line 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_generated_pairs_are_of_every_kind_and_of_other_seeds_than_those_that_are_measured(script):
    _, tokenizer = testbed.load()
    pairs = script.generated_pairs(tokenizer, 1, [128])
    assert len(pairs) == 2 * len(KINDS)
    sources = {tuple(source) for source, _ in pairs}
    assert not sources & {tuple(source) for source, _ in script.generated_pairs(tokenizer, 1, [128], seed=0)}
