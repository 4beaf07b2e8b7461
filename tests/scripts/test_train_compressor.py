"""Adapters are trained as a user trains them, and what is written fits a library."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch

from hf_kvcaches.errors import ConfigError, FingerprintMismatch
from hf_kvcaches.warmstart.paper.cache import SummaryCache, SummaryLibrary
from tests import testbed
from tests.scripts.running import ROOT, run_script

pytest.importorskip("faiss")

SMALL = ["--device", "cpu", "--count", "10", "--length", "120", "--slots", "16", "--layout", "paper", "--batch", "4"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("train") / "adapters"
    done = run_script("train_compressor", "--out", str(out), *SMALL, "--steps", "12", "--seeds", "1", "2")
    assert done.returncode == 0, done.stderr
    return out, done


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("train_compressor")


@pytest.fixture
def run(script, monkeypatch, capsys):
    def call(*more):
        monkeypatch.setattr(sys, "argv", ["train_compressor.py", *map(str, more)])
        script.main()
        return capsys.readouterr().out

    return call


def test_it_prints_the_errors_and_divergences_of_every_way_and_shows_how_far_it_is(trained):
    out = trained[1].stdout
    names = ("no adapters", "ridge", "seed 1", "seed 2")
    assert all(any(line.startswith(name) for line in out.splitlines()) for name in names)
    assert "L_C  L_C held out  KL held out" in out
    assert "16 slots, layout paper; 8 texts learned from, 2 others; 12 steps" in out
    assert "KL of 2 seeds: mean" in out
    assert "12/12" in trained[1].stderr


def test_training_lowers_the_error_on_what_it_learned_from(trained, script):
    rows = {row["adapters"]: row for row in script.TrainedAdapters.from_pretrained(trained[0]).measured}
    assert rows["ridge"]["L_C"] < rows["no adapters"]["L_C"]
    assert max(rows[name]["L_C"] for name in ("seed 1", "seed 2")) < rows["no adapters"]["L_C"]
    assert rows["seed 1"]["L_C"] != rows["seed 2"]["L_C"]


def test_what_is_written_is_the_best_and_a_library_takes_it(trained, script):
    model, tokenizer = testbed.load()
    artifact = script.TrainedAdapters.from_pretrained(trained[0], model=model, tokenizer=tokenizer)
    assert (artifact.slots, artifact.layout, artifact.tail) == (16, "paper", 1)
    best = min(artifact.measured[1:], key=lambda row: row["KL held out"])
    assert f"Written to {trained[0]}: {best['adapters']}." in trained[1].stdout
    texts = script.default_texts(tokenizer, 10, 120)
    bench = script.Bench(model, tokenizer, texts, 16, "paper", 1)
    again = bench.measure("again", artifact.adapters)
    assert again["KL held out"] == pytest.approx(best["KL held out"], rel=1e-3)
    library = SummaryLibrary(model, tokenizer, slots=16, layout="paper", adapters=artifact)
    library.add([texts[0]])
    cache = SummaryCache(model, library)
    model.generate(torch.tensor([texts[0]]), past_key_values=cache, max_new_tokens=2)
    assert cache.served
    with pytest.raises(FingerprintMismatch):
        script.TrainedAdapters.from_pretrained(trained[0], model=testbed.load("tuned")[0])


def test_texts_come_from_a_file(run, tmp_path):
    path, words = tmp_path / "texts.jsonl", testbed.held_out().split()
    lines = [" ".join(words[start : start + 60]) for start in range(0, 420, 60)]
    path.write_text("\n".join(json.dumps({"prompt": line}) for line in [*lines, "short"]))
    out = run("--out", tmp_path / "out", "--texts", path, *SMALL, "--steps", 2, "--seeds", 1)
    assert "5 texts learned from, 2 others; 2 steps" in out, "of seven; the short one has fewer tokens than slots"
    path.write_text(json.dumps("short"))
    with pytest.raises(ConfigError, match="two or more texts of more than 17 tokens"):
        run("--out", tmp_path / "out", "--texts", path, *SMALL)


def test_default_texts_are_as_long_as_asked_for_and_share_no_prose(script):
    _, tokenizer = testbed.load()
    texts = script.default_texts(tokenizer, 6, 200)
    assert len(texts) == 6
    assert all(80 <= len(ids) <= 200 for ids in texts)
    windows = [{tuple(ids[place : place + 24]) for place in range(len(ids) - 23)} for ids in texts[::2]]
    assert not windows[0] & windows[1]
    assert not windows[1] & windows[2]
    document = tokenizer.decode(texts[1])
    assert document.startswith("System: ")
    assert "Q: " in document.splitlines()[-1], "it ends with a question"


def test_seeds_that_come_twice_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="all different"):
        run("--out", tmp_path, *SMALL, "--seeds", 1, 1)
