"""The analysis of translated caches runs as a user runs it, and its parts are what they are said to be."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from transformers import DynamicCache

from tests import tiny
from tests.scripts.running import ROOT, rows_of, run_script

REUSES = {"reuse", "reuse and patch", "paper's Reuse", "paper's Reuse and Patch"}
FAST = "--prefixes 8 --prompts 2 --length 60 --behind 6 --aligner ridge --metric plain --points 120 --steps 60 --device cpu".split()


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


@pytest.fixture
def analysis(script):
    return importlib.import_module("_translation_analysis")


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
def test_the_map_has_a_place_for_each_state_and_the_target_is_at_no_distance_from_itself(rows):
    places = [row for row in rows if row["measure"] == "place"]
    names = {row["variant"] for row in places}
    assert names == {"source", "target", *REUSES}
    assert all(sum(row["variant"] == name for row in places) == 20 for name in names)
    assert all(math.isfinite(float(row[axis])) for row in places for axis in "xy")
    away = values(rows, "distance from target, relative")
    assert away["target", 2] == 0 < min(away[name, 2] for name in names - {"target"})


@pytest.mark.full
def test_it_prints_tables_and_draws_a_picture(done, rows):
    out = done[1].stdout
    assert "errors: attention input, relative error, by layer  0" in out
    assert "2 prompts; medians; patched layers: 2" in out
    assert (done[0] / "some.png").read_bytes().startswith(b"\x89PNG")
    assert all(row["hardware"] and row["torch"] for row in rows)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prompts", "100000"], "--prompts: expected fewer than the"),
        (["--layer", "9", "--variants", "reuse"], "--layer: expected 0 to 3"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(options, named):
    done = run(*options)
    assert done.returncode == 1
    assert named in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2])
def test_what_layers_had_is_what_the_model_says_it_had(analysis, make):
    model, ids = make(), tiny.ids(1, 12)
    seen = analysis.seen_by(model, ids, DynamicCache(config=model.config))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
    for layer, state in enumerate(expected.hidden_states[:-1]):
        torch.testing.assert_close(seen.hidden[layer], state[0])
    torch.testing.assert_close(seen.logits, expected.logits[0])
    layer = analysis.compat.decoder_layers(model)[2][1]
    norm = getattr(layer, "input_layernorm", getattr(layer, "ln_1", None))
    torch.testing.assert_close(seen.inputs[1], norm(seen.hidden[1]))
    assert set(seen.hidden) == set(range(len(expected.hidden_states)))
    last = getattr(model.base_model, "norm", getattr(model.base_model, "ln_f", None))
    torch.testing.assert_close(last(seen.hidden[len(expected.hidden_states) - 1]), expected.hidden_states[-1][0])


def test_a_cache_as_a_matrix_has_keys_then_values(analysis):
    cache = DynamicCache()
    keys, own = torch.arange(12.0).view(1, 2, 3, 2), -torch.arange(12.0).view(1, 2, 3, 2)
    cache.update(keys, own, 0)
    assert analysis.cache_matrix(cache.layers[0], 2).tolist() == [[0, 1, 6, 7, 0, -1, -6, -7], [2, 3, 8, 9, -2, -3, -8, -9]]


def test_each_point_has_as_many_neighbours_as_asked_for(analysis):
    points = torch.randn(60, 5, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 60)[:, None]
    chances = analysis.neighbours(points, 7.0)
    torch.testing.assert_close(chances.sum(1), torch.ones(60, dtype=torch.float64))
    assert float(chances.diagonal().abs().max()) == 0
    entropy = -torch.xlogy(chances, chances).sum(1)
    torch.testing.assert_close(entropy.exp(), torch.full((60,), 7.0, dtype=torch.float64), rtol=1e-4, atol=0)


def test_near_points_stay_near_in_the_plane(analysis):
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(3, 20, generator=random) * 10
    points = centres.repeat_interleave(25, 0) + torch.randn(75, 20, generator=random)
    placed = analysis.tsne(points, perplexity=10, steps=300)
    groups = placed.view(3, 25, 2)
    spread = (groups - groups.mean(1, keepdim=True)).norm(dim=-1).mean()
    apart = torch.pdist(groups.mean(1)).min()
    assert apart > 3 * spread
    # The divergence that it goes down is lower than that of the principal components that it starts from.
    centred = (points - points.mean(0)).double()
    start = centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T
    wanted = analysis.neighbours(points, 10.0)
    wanted = (wanted + wanted.T) / 150

    def divergence(places):
        close = (1 / (1 + torch.cdist(places, places).square())).fill_diagonal_(0)
        return float((torch.xlogy(wanted, wanted) - torch.xlogy(wanted, (close / close.sum()).clamp_min(1e-300))).sum())

    assert divergence(placed) < divergence(start)
    assert (analysis.tsne(points, perplexity=10, steps=20) == analysis.tsne(points, perplexity=10, steps=20)).all()
