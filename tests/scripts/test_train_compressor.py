"""Adapters of summaries are trained as a user trains them, and what is written fits a library."""

from __future__ import annotations

import pytest

from hf_kvcaches import TrainedAdapters
from hf_kvcaches.warmstart.paper.cache import SummaryCache, SummaryLibrary
from tests import testbed
from tests.scripts.running import run_script

pytest.importorskip("faiss")
SMALL = ("--device", "cpu", "--count", 10, "--length", 120, "--slots", 16, "--layout", "paper")


def test_training_lowers_the_error_on_what_it_learned_from_and_a_library_takes_the_best(tmp_path) -> None:
    done = run_script("papers/train_compressor", "--out", tmp_path, *SMALL, "--steps", 12, "--seeds", 1, 2)
    assert done.returncode == 0, done.stderr
    model, tokenizer = testbed.load()
    artifact = TrainedAdapters.from_pretrained(tmp_path, model=model, tokenizer=tokenizer)
    plain, *trained = artifact.measured
    assert [row["adapters"] for row in artifact.measured] == ["no adapters", "seed 1", "seed 2"]
    assert max(row["L_C"] for row in trained) < plain["L_C"]
    assert f"Written to {tmp_path}: {min(trained, key=lambda row: row['KL held out'])['adapters']}." in done.stdout
    library = SummaryLibrary(model, tokenizer, slots=16, layout="paper", adapters=artifact)
    ids = tokenizer(testbed.held_out(), return_tensors="pt").input_ids[:, :100]
    library.add([ids[0].tolist()])
    cache = SummaryCache(model, library)
    model.generate(ids, past_key_values=cache, max_new_tokens=2)
    assert cache.served


def test_texts_that_slots_hold_whole_are_refused(tmp_path) -> None:
    (tmp_path / "texts.jsonl").write_text('"short"\n')
    done = run_script("papers/train_compressor", "--out", tmp_path / "out", "--texts", tmp_path / "texts.jsonl", *SMALL)
    assert done.returncode == 1
    assert "two or more texts of more than 17 tokens" in done.stderr
