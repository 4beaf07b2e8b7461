"""The analysis of translated caches runs as a user runs it, and its parts are what they are said to be."""

from __future__ import annotations

import importlib

import pytest
import torch
from transformers import DynamicCache

from tests import tiny
from tests.scripts.running import ROOT, rows_of, run_script

REUSES = {"reuse", "reuse and patch", "paper's Reuse", "paper's Reuse and Patch"}
FAST = "--prefixes 8 --prompts 2 --length 60 --behind 6 --aligner ridge --metric plain --device cpu".split()


def run(*options):
    return run_script("analyse_translation", *FAST, *options)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analysis") / "new"
    return folder, run("--csv", folder / "some.csv", "--plot", folder / "some.png")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("analyse_translation")


@pytest.mark.full
def test_layers_that_the_consumer_has_for_nothing_have_no_error_and_the_others_some(done):
    rows = rows_of(done[0] / "some.csv")
    errors = {(row["variant"], int(row["layer"])): float(row["value"]) for row in rows}
    assert set(errors) == {(name, layer) for name in {*REUSES, "raw keys and values"} for layer in range(4)}
    for name in REUSES:
        assert max(errors[name, 0], errors[name, 1]) < 1e-5, "the first layer's keys and values are exact"
        assert errors[name, 3] > 1e-3
    assert errors["raw keys and values", 0] == 0
    assert errors["raw keys and values", 1] > 1e-3
    assert all(row["hardware"] and row["torch"] for row in rows)


@pytest.mark.full
def test_it_prints_a_table_and_draws_a_picture(done):
    assert done[1].returncode == 0, done[1].stderr
    assert "relative error of the attention input, by layer  0" in done[1].stdout
    assert "2 prompts; medians; patched layers: 2" in done[1].stdout
    assert (done[0] / "some.png").read_bytes().startswith(b"\x89PNG")


def test_more_prompts_than_there_are_are_refused_with_a_sentence():
    done = run("--prompts", "100000")
    assert done.returncode == 1
    assert "--prompts: expected fewer than the" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2])
def test_attention_inputs_are_the_normalised_states_of_the_model(script, make):
    model, ids = make(), tiny.ids(1, 12)
    inputs = script.attention_inputs(model, ids, DynamicCache(config=model.config))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
    layers = script.decoder_layers(model)[2]
    assert len(inputs) == len(layers)
    for layer, ours, state in zip(layers, inputs, expected, strict=False):
        norm = getattr(layer, "input_layernorm", getattr(layer, "ln_1", None))
        torch.testing.assert_close(ours, norm(state[0]))
