"""The calibration of translators runs as a user runs it, on files and on this repository's own texts, alone and in two processes."""

from __future__ import annotations

import importlib
import json

import pytest

from hf_kvcaches.translate.translator import CacheTranslator
from tests import testbed
from tests.scripts.running import ROOT, run_process, run_script

FAST = ["--prefixes", "4", "--length", "64", "--metric", "plain", "--device", "cpu"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("calibrate_translator")


@pytest.fixture(scope="module")
def tokenizer():
    return testbed.load()[1]


def run(*options):
    return run_script("calibrate_translator", *options)


def pair(folder, producer="base", consumer="tuned"):
    return ["--producer", producer, "--consumer", consumer, "--out", folder]


def test_a_translator_for_these_models_is_written_and_its_stages_are_told(tmp_path):
    done = run(*pair(tmp_path / "pair"), *FAST, "--patch-layers", "none", "--payload", "0.25")
    assert done.returncode == 0, done.stderr
    made = CacheTranslator.from_pretrained(tmp_path / "pair", producer=testbed.load()[0], consumer=testbed.load("tuned")[0])
    assert (made.settings.payload, made.settings.config.method, made.settings.config.metric) == (0.25, "joint", "plain")
    assert (made.settings.prefixes, made.settings.tokens) == (4, 4 * 64)
    stages = {line.split()[0] for line in done.stdout.splitlines() if line and line.split()[-1].endswith("%")}
    assert stages == set(made.settings.seconds) >= {"prefill", "fit"}
    assert made.describe_calibration() in done.stdout
    assert f"written to {tmp_path / 'pair'}" in done.stdout


def test_files_adapters_patched_layers_and_layers_that_are_run(tmp_path):
    (tmp_path / "a.txt").write_text(testbed.held_out("verse")[:600])
    (tmp_path / "b.jsonl").write_text('"The road was long and the day was cold."\n\n{"text": [5, 6, 7, 8]}\n')
    files = ["--texts", tmp_path / "a.txt", tmp_path / "b.jsonl"]
    done = run(
        *pair(tmp_path / "pair", consumer="lora"), *FAST, *files, "--patch-layers", "3", "--layers-per-code", "1", "--recompute-layers", "1"
    )
    assert done.returncode == 0, done.stderr
    made = CacheTranslator.from_pretrained(tmp_path / "pair", consumer=testbed.load("lora")[0])
    assert (made.patched_layers, made.sent_layers, made.settings.recompute_layers) == ((3,), (2, 3), 1)


@pytest.mark.full
def test_two_processes_give_what_one_gives(tmp_path):
    pytest.importorskip("accelerate")
    both = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    both += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", "--main_process_port", "0"]
    same = [*FAST, "--payload", "0.5"]
    together = run_process("calibrate_translator", *pair(tmp_path / "two"), *same, before=both)
    assert together.returncode == 0, together.stderr
    assert together.stdout.count("written to") == 1, "one process of the two writes and tells"
    alone = run(*pair(tmp_path / "one"), *same)
    assert alone.returncode == 0, alone.stderr
    one, two = (CacheTranslator.from_pretrained(tmp_path / name) for name in ("one", "two"))
    assert one.settings.tokens == two.settings.tokens
    for first, second in zip(one.maps.decoders, two.maps.decoders, strict=True):
        made = [each.weights.side for each in (first, second)]
        assert float((made[0] - made[1]).norm()) < 1e-2 * float(made[0].norm())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--texts", "missing.txt"], "--texts: expected files that exist"),
        (["--patch-layers", "all"], "--patch-layers: expected auto, none, or numbers"),
        (["--prefixes", "0"], "--prefixes: expected at least 1"),
        (["--payload", "3"], "payload: expected a share of the bytes"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(tmp_path, options, named):
    done = run(*pair(tmp_path / "pair"), *FAST, *options)
    assert done.returncode == 1
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "pair").exists()


def test_texts_of_this_repository_are_of_both_kinds(script, tokenizer):
    texts = script.held_out(tokenizer, 64)
    starts = [json.dumps(tokenizer(testbed.held_out(kind), verbose=False)["input_ids"][:64]) for kind in ("prose", "verse")]
    assert [json.dumps(text) for text in texts[:2]] == starts
