"""The metric of attention against sums over all weights, and against what small errors do to outputs."""

from __future__ import annotations

import pytest
import torch

from hf_kvcaches.codec import metric as metrics
from hf_kvcaches.codec import stakes
from hf_kvcaches.codec.calibration import MeterCache, Reading
from hf_kvcaches.codec.metric import Sizes
from tests import tiny
from tests.codec.measured import calibrate, coded, held, measured, moment, rotated
from tests.conformance import models
from tests.reference.codec import decoded


@pytest.mark.parametrize("rotation", ["aware", "post"])
def test_query_moments_are_those_of_all_queries(rotation: str) -> None:
    model = tiny.llama()
    meters = measured(model, metric="attention", rotation=rotation).meters
    for layer in range(4):
        query = held(model, layer)[0]
        query = query if rotation == "aware" else rotated(model, query)
        assert torch.allclose(meters[layer].attention.queries.moments.mean, moment(query), rtol=1e-4, atol=1e-5)
    assert meters[0].attention.queries.met[:40].tolist() == [3 * (40 - distance) for distance in range(40)]
    assert not meters[0].attention.queries.met[40:].any()


def test_stakes_and_shares_are_the_sums_over_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    monkeypatch.setattr(stakes, "_WATCHED", 20)  # every other query
    meter = measured(model, metric="attention").meters[1]
    query, _, keys, values = held(model, 1)
    query, scale = rotated(model, query), 8**-0.5
    weight = model.model.layers[1].self_attn.o_proj.weight.double()
    stake, share = torch.zeros(4), torch.zeros(4)
    for row in range(3):
        for head in range(4):
            part = weight[:, 8 * head : 8 * head + 8]
            for t in range(1, 40, 2):
                a = (query[row, head, t] @ keys[row, head // 2, : t + 1].mT * scale).softmax(-1)
                v = values[row, head // 2, : t + 1]
                stake[head] += (a**2 * ((v - a @ v) @ part.mT).square().sum(-1)).sum() / 60
                share[head] += (a**2).sum() / 60
            assert torch.allclose(meter.attention.output[head], part.mT @ part, rtol=1e-4, atol=1e-5)
    assert torch.allclose((meter.attention.stake / meter.attention.watched).float(), stake, rtol=1e-3)
    assert torch.allclose((meter.attention.share / meter.attention.watched).float(), share, rtol=1e-3)


def test_a_stake_is_what_small_errors_of_logits_do_to_the_output() -> None:
    model = tiny.llama(num_key_value_heads=4)
    meter = measured(model, metric="attention").meters[2]
    query, _, keys, values = held(model, 2)
    scores = (rotated(model, query) @ keys.mT * 8**-0.5).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), float("-inf"))
    generator = torch.Generator().manual_seed(0)
    exact, found = scores.softmax(-1) @ values, torch.zeros(4).double()
    for _ in range(200):
        error = 1e-4 * torch.randn(scores.shape, generator=generator, dtype=torch.float64)
        change = (scores + error).softmax(-1) @ values - exact
        found += ((change @ meter.attention.output) * change).sum(-1).mean((0, 2)) / 1e-8 / 200
    assert torch.allclose(meter.attention.stake / meter.attention.watched, found, rtol=0.05)


def test_directions_without_bits_lose_the_squared_error_of_logits_times_their_stake() -> None:
    model = tiny.llama(num_key_value_heads=4)
    codec = calibrate(model, rank=3, widths=24, rotation="post", metric="attention")
    meter = measured(model, metric="attention", rotation="post").meters[1]
    query, _, keys, values = held(model, 1)
    # Over all pairs of a query and a key, which is what the product of two moments stands for.
    error = coded(keys) - decoded(codec.layers[1], coded(keys), coded(values))[0]
    squares = (moment(rotated(model, query)) * moment(error)).sum((1, 2)) / 8
    stake, side = meter.attention.stake / meter.attention.watched, codec.layers[1].keys
    lost = side.distortions[..., 0].masked_fill(side.widths > 0, 0).sum(-1).double()
    assert torch.allclose(lost, (stake + stake.mean()) / 2 * squares, rtol=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "phi3"])
def test_the_output_projection_is_found_in_other_families(family: str) -> None:
    for meter in measured(models.build(family), metric="attention").meters.values():
        assert meter.sizes.projected
        assert meter.attention.output.diagonal(dim1=-2, dim2=-1).min() > 0


def test_without_an_output_projection_the_heads_outputs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_PROJECTIONS", ("nowhere",))
    meter = measured(tiny.llama(), metric="attention").meters[0]
    assert not meter.sizes.projected
    assert torch.equal(meter.attention.output, torch.eye(8, dtype=torch.float64).repeat(4, 1, 1))
    assert calibrate(metric="attention").settings.metric == "attention"


def test_queries_of_a_layer_that_reads_anothers_keys_count_once() -> None:
    model = tiny.llama()
    cache = MeterCache(model, Reading(metric="attention"))
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(1, heads, 40, 8, generator=generator) for heads in (4, 2))
    with torch.no_grad():
        view, _ = cache.update(keys, keys, 0)
        outputs = [view.attend(model.model.layers[index].self_attn, query, None, scaling=1.0)[0] for index in (0, 1)]
    assert int(cache.meters[0].keys.moments.count) == 36
    assert int(cache.meters[0].attention.queries.moments.count) == 40
    assert torch.equal(*outputs)


def test_scaled_rotations_count_in_the_metric() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    plain = scaled | {"attention_factor": 1.0}
    meters = [measured(tiny.llama(rope_parameters=each), metric="attention").meters[0].attention for each in (scaled, plain)]
    for meter in meters:
        meter.stake, meter.share = torch.ones(4).double(), torch.ones(4).double()
        meter.watched = torch.ones(()).double()
    ratio = meters[0].metrics()[0] / meters[1].metrics()[0]
    assert torch.allclose(ratio, torch.full_like(ratio, 1.5**4), rtol=1e-2)


def test_queries_meet_no_keys_beyond_a_window_and_more_than_was_expected() -> None:
    meter = stakes.QueryMeter(Sizes(2, 1, 4, 4, 0.5, True), None, 5, "cpu")
    meter.observe(torch.zeros(1, 2, 20, 4), {"sliding_window": 3})
    assert meter.met.tolist() == [20, 19, 18] + [0] * 17
