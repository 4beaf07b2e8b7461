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


@pytest.fixture(scope="module")
def rows(done) -> list[dict[str, str]]:
    assert done[1].returncode == 0, done[1].stderr
    return rows_of(done[0] / "some.csv")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("analyse_translation")


def values(rows, measure):
    return {(row["variant"], int(row["layer"])): float(row["value"]) for row in rows if row["measure"] == measure}


@pytest.mark.full
def test_layers_that_the_consumer_has_for_nothing_have_no_error_and_the_others_some(rows):
    errors = values(rows, "attention input, relative error")
    assert set(errors) == {(name, layer) for name in {*REUSES, "raw keys and values"} for layer in range(4)}
    for name in REUSES:
        assert max(errors[name, 0], errors[name, 1]) < 1e-5, "the first layer's keys and values are exact"
        assert errors[name, 3] > 1e-3
    assert errors["raw keys and values", 0] == 0
    assert errors["raw keys and values", 1] > 1e-3
    held = values(rows, "keys and values, spectral error")
    assert all(held[name, 0] < 1e-3 < held[name, 2] for name in REUSES)


@pytest.mark.full
def test_what_is_measured_stays_within_its_bound(rows):
    errors, bounds = values(rows, "state, error"), values(rows, "state, bound")
    assert set(errors) == set(bounds) == {(name, layer) for name in {*REUSES, "raw keys and values"} for layer in range(5)}
    assert all(errors[key] <= bounds[key] + 1e-4 for key in errors)
    reset = values(rows, "state, bound if patches reset it")
    assert {name for name, _ in reset} == {"reuse and patch", "paper's Reuse and Patch"}
    assert all(reset[key] == pytest.approx(errors[key]) for key in reset if key[1] == 2)
    assert all(reset[key] < bounds[key] for key in reset if key[1] > 2)
    changes = values(rows, "log-probability, change")
    near, far = values(rows, "log-probability, bound from the state's error"), values(rows, "log-probability, bound")
    assert all(0 < changes[key] <= near[key] <= far[key] for key in changes)
    alphas, papers = values(rows, "alpha"), values(rows, "paper_alpha")
    assert all(alphas[key] > papers[key] > 1 for key in papers)


@pytest.mark.full
def test_it_prints_tables_and_draws_a_picture(done, rows):
    out = done[1].stdout
    assert "errors: attention input, relative error, by layer  0" in out
    assert "2 prompts; medians; patched layers: 2" in out
    assert (done[0] / "some.png").read_bytes().startswith(b"\x89PNG")
    assert all(row["hardware"] and row["torch"] for row in rows)


def test_more_prompts_than_there_are_are_refused_with_a_sentence():
    done = run("--prompts", "100000")
    assert done.returncode == 1
    assert "--prompts: expected fewer than the" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2])
def test_what_layers_had_is_what_the_model_says_it_had(script, make):
    model, ids = make(), tiny.ids(1, 12)
    seen = script.seen_by(model, ids, DynamicCache(config=model.config))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
    for layer, state in enumerate(expected.hidden_states[:-1]):
        torch.testing.assert_close(seen.hidden[layer], state[0])
    torch.testing.assert_close(seen.logits, expected.logits[0])
    layer = script.compat.decoder_layers(model)[2][1]
    norm = getattr(layer, "input_layernorm", getattr(layer, "ln_1", None))
    torch.testing.assert_close(seen.inputs[1], norm(seen.hidden[1]))
    assert set(seen.hidden) == set(range(len(expected.hidden_states)))
    last = getattr(model.base_model, "norm", getattr(model.base_model, "ln_f", None))
    torch.testing.assert_close(last(seen.hidden[len(expected.hidden_states) - 1]), expected.hidden_states[-1][0])


def test_a_cache_as_a_matrix_has_keys_then_values(script):
    cache = DynamicCache()
    keys, own = torch.arange(12.0).view(1, 2, 3, 2), -torch.arange(12.0).view(1, 2, 3, 2)
    cache.update(keys, own, 0)
    assert script.cache_matrix(cache.layers[0], 2).tolist() == [[0, 1, 6, 7, 0, -1, -6, -7], [2, 3, 8, 9, -2, -3, -8, -9]]
