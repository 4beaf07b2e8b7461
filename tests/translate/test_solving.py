"""Translators from fit to filled cache, against the consumer's own keys and values and against least squares on all rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_kvcaches.errors import KVCacheError, UnsupportedError
from hf_kvcaches.translate.calibration import Pair, Sums, Wanted
from hf_kvcaches.translate.solving import Solver, part_name
from hf_kvcaches.translate.states import PromptTokens, State, read_states
from tests import tiny
from tests.translate.models import MODELS, error, filled, fitted, made_by, rebuilt, texts_of, traces_of

pytestmark = pytest.mark.full

FULL = {"payload": 1.0, "dtype": "float32", "ridge": 1e-9}
LOSSLESS = 1e-3
PROMPT = tiny.ids(1, 30, seed=77)


@pytest.mark.parametrize("method", ["joint", "cross_layer", "paper"])
@pytest.mark.parametrize("family", sorted(MODELS))
def test_a_model_gets_its_own_keys_and_values_back_at_full_rank(family, method):
    """On a text that nothing was fitted to."""
    model = MODELS[family]()
    translator = fitted(model, model, method=method, **FULL)
    own = made_by(model, PROMPT)
    found = rebuilt(translator, model, model, PROMPT)
    assert sorted(found) == list(range(1, len(own)))
    for layer, (keys, values) in found.items():
        assert error(keys, own[layer].keys[0]) < LOSSLESS
        assert error(values, own[layer].values[0]) < LOSSLESS


@pytest.mark.parametrize("family", sorted(MODELS))
def test_a_filled_cache_has_the_models_own_keys_and_values(family):
    model = MODELS[family]()
    translator = fitted(model, model, **FULL)
    own = made_by(model, PROMPT[:, :-1])
    for layer, (keys, values) in filled(translator, model, model, PROMPT).items():
        assert error(keys, own[layer].keys[0]) < LOSSLESS
        assert error(values, own[layer].values[0]) < LOSSLESS


@pytest.mark.parametrize("metric", ["loss", "attention", "plain"])
@pytest.mark.parametrize("recompute", [0, 2])
def test_the_metric_and_the_layers_that_are_run_change_nothing_where_nothing_is_lost(metric, recompute):
    model = MODELS["llama"]()
    translator = fitted(model, model, metric=metric, recompute_layers=recompute, **FULL)
    assert translator.settings.metric == metric
    assert translator.sent_layers == tuple(range(recompute + 1, 4))
    own = made_by(model, PROMPT[:, :-1])
    for layer, (keys, values) in filled(translator, model, model, PROMPT).items():
        assert error(keys, own[layer].keys[0]) < LOSSLESS
        assert error(values, own[layer].values[0]) < LOSSLESS


def states_by_row(model, texts, hidden=()) -> list[dict[int, State]]:
    found = []
    for text in texts:
        states: dict[int, State] = {}
        read_states(model, PromptTokens.of(text), states.__setitem__, hidden=hidden)
        found.append(states)
    return found


def least_squares(inputs: Tensor, targets: Tensor) -> Tensor:
    columns = torch.cat([inputs.new_ones(len(inputs), 1), inputs], dim=1).double()
    return torch.linalg.pinv(columns) @ targets.double()


@pytest.mark.parametrize("recompute", [0, 1])
def test_between_two_models_it_is_least_squares_on_what_is_known_and_the_producers_states(recompute):
    producer, consumer, texts = MODELS["llama"](seed=1), MODELS["qwen3"](seed=2), texts_of()
    translator = fitted(producer, consumer, texts, recompute_layers=recompute, **FULL)
    theirs, ours = states_by_row(producer, texts), states_by_row(consumer, texts, hidden=[recompute])
    (new_theirs,), (new_ours,) = states_by_row(producer, PROMPT), states_by_row(consumer, PROMPT, hidden=[recompute])
    found = rebuilt(translator, producer, consumer, PROMPT)
    assert len(found) == 3 - recompute
    for layer, pair in found.items():
        inputs = torch.cat([torch.cat([own[recompute].hidden, other[layer].pair], dim=1) for own, other in zip(ours, theirs, strict=True)])
        weights = least_squares(inputs, torch.cat([own[layer].pair for own in ours]))
        new = torch.cat([torch.ones(PROMPT.shape[1], 1), new_ours[recompute].hidden, new_theirs[layer].pair], dim=1)
        assert error(torch.cat(pair, dim=1).double(), new.double() @ weights) < LOSSLESS


@pytest.mark.parametrize("method", ["joint", "cross_layer"])
def test_a_payload_of_0_sends_nothing_and_leaves_least_squares_on_what_is_known(method):
    producer, consumer, texts = MODELS["llama"](seed=1), MODELS["llama"](seed=2), texts_of()
    translator = fitted(producer, consumer, texts, method=method, payload=0, ridge=1e-9)
    assert translator.maps.encoders == ()
    assert [decoder.part for decoder in translator.maps.decoders] == [None] * 3
    codes = translator.encode(producer, PROMPT)
    assert (len(codes), codes.head.parts) == (0, ())
    ours = states_by_row(consumer, texts, hidden=[0])
    (new,) = states_by_row(consumer, PROMPT[:, :-1], hidden=[0])
    found = filled(translator, producer, consumer, PROMPT)
    for layer in (1, 2, 3):
        weights = least_squares(torch.cat([own[0].hidden for own in ours]), torch.cat([own[layer].pair for own in ours]))
        expected = torch.cat([torch.ones(len(new[0].hidden), 1), new[0].hidden], dim=1).double() @ weights
        assert error(torch.cat(found[layer], dim=1).double(), expected) < LOSSLESS
    assert error(found[0][0], new[0].keys) < LOSSLESS


@pytest.mark.parametrize(("dtype", "times"), [("int4", 2), ("int8", 1), ("float16", 1)])
def test_a_budget_is_kept_over_all_layers_and_each_gets_some_of_it(dtype, times):
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    translator = fitted(producer, consumer, payload=0.125, dtype=dtype)
    ranks = [encoder.ranks["kv"] for encoder in translator.maps.encoders]
    # 3 layers of 2 heads of 8 numbers, for keys and for values.
    assert sum(ranks) == times * 3 * 32 // 8
    assert min(ranks) >= 1
    assert [encoder.part for encoder in translator.maps.encoders] == [part_name(layer) for layer in (1, 2, 3)]
    for encoder, decoder in zip(translator.maps.encoders, translator.maps.decoders, strict=True):
        assert encoder.weights["kv"].shape == (32, encoder.ranks["kv"])
        assert decoder.weights.codes.shape == (encoder.ranks["kv"], 32)
        assert decoder.weights.side.shape == (32, 32)


def test_more_payload_costs_less_in_the_metric_of_the_texts():
    producer, consumer, texts = MODELS["llama"](seed=1), MODELS["llama"](seed=2), texts_of()
    ours, errors = states_by_row(consumer, texts), []
    for payload in (0, 0.1, 0.3, 0.6, 1.0):
        translator = fitted(producer, consumer, texts, payload=payload, dtype="float32", metric="plain")
        total = 0.0
        for text, own in zip(texts, ours, strict=True):
            for layer, pair in rebuilt(translator, producer, consumer, text).items():
                total += float((torch.cat(pair, dim=1) - own[layer].pair).square().sum() / own[layer].pair.var(0).sum())
        errors.append(total)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.95 * errors[0]


def test_one_code_across_layers_is_made_of_all_and_serves_all():
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    translator = fitted(producer, consumer, method="cross_layer", payload=0.125, dtype="int8")
    (encoder,) = translator.maps.encoders
    assert (encoder.part, encoder.kind, encoder.layers, encoder.ranks) == ("all", "cross_layer", (1, 2, 3), {"all": 12})
    assert encoder.weights["all"].shape == (96, 12)
    for layer, decoder in zip((1, 2, 3), translator.maps.decoders, strict=True):
        assert (decoder.layer, decoder.part, decoder.kind) == (layer, "all", "cross_layer")
        assert (decoder.weights.side.shape, decoder.weights.codes.shape, decoder.weights.bias.shape) == ((32, 32), (12, 32), (32,))


@pytest.mark.parametrize("heads", ["joint", "each"])
def test_the_papers_codes_are_keys_and_values_apart_with_nothing_known(heads):
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    translator = fitted(producer, consumer, method="paper", ranks=(3, 5), heads=heads)
    assert translator.settings.dtype == "float16"
    for layer, encoder, decoder in zip((1, 2, 3), translator.maps.encoders, translator.maps.decoders, strict=True):
        assert (encoder.part, encoder.layers, encoder.ranks) == (part_name(layer), (layer,), {"k": 3, "v": 5})
        assert (encoder.weights["k"].shape, encoder.weights["v"].shape) == ((16, 3), (16, 5))
        assert decoder.weights.side is None
        assert decoder.weights.bias is None
        assert decoder.weights.codes.shape == (8, 32)
        # Keys are made of the code of keys alone, values of that of values.
        assert not bool(decoder.weights.codes[:3, 16:].any())
        assert not bool(decoder.weights.codes[3:, :16].any())
        if heads == "each":
            assert not bool(encoder.weights["k"][8:, :2].any())
            assert not bool(decoder.weights.codes[:2, 8:].any())


def test_the_papers_ranks_follow_from_the_payload_where_they_are_not_given():
    model = MODELS["llama"]()
    translator = fitted(model, model, method="paper", payload=0.25)
    assert [encoder.ranks for encoder in translator.maps.encoders] == [{"k": 4, "v": 4}] * 3


def test_heads_that_do_not_match_are_refused_each_for_itself():
    with pytest.raises(UnsupportedError, match="heads='each'"):
        fitted(tiny.llama(num_key_value_heads=4), tiny.llama(), method="paper", heads="each")


def test_models_of_other_widths_and_heads_are_translated():
    producer, consumer = MODELS["gpt2"](seed=1), tiny.llama(seed=2, num_hidden_layers=3)
    translator = fitted(producer, consumer, payload=0.5, dtype="float32")
    shapes = {
        (encoder.weights["kv"].shape[0], decoder.weights.codes.shape[1])
        for encoder, decoder in zip(translator.maps.encoders, translator.maps.decoders, strict=True)
    }
    assert shapes == {(64, 32)}
    assert filled(translator, producer, consumer, PROMPT)[2][0].shape == (29, 16)


def test_where_the_consumer_runs_all_layers_nothing_is_solved():
    model = MODELS["llama"]()
    translator = fitted(model, model, recompute_layers=3)
    assert translator.sent_layers == ()
    own = made_by(model, PROMPT[:, :-1])
    for layer, (keys, _) in filled(translator, model, model, PROMPT).items():
        assert error(keys, own[layer].keys[0]) < LOSSLESS


@pytest.mark.parametrize("metric", ["attention", "plain"])
def test_metrics_of_all_layers_are_in_one_unit(metric):
    """What states cost by their spread is 1 in each layer, so that strengths of layers can be compared."""
    model, texts = MODELS["llama"](), texts_of(8)
    wanted = Wanted("joint", 0.5, "int8", None, None, 0, metric, "joint", None, "ridge", None, 1e-4)
    sums = Sums(Pair(model, model, None), wanted, (1, 2, 3))
    for text in texts:
        sums.add(*sums.pair.states(torch.tensor(text), 0, queries=sums.look))
    solver = Solver(sums, wanted)
    solver.solve()
    for layer in (1, 2, 3):
        rows = torch.cat([states[layer].pair for states in states_by_row(model, texts)]).double()
        rows -= rows.mean(0)
        assert float((rows @ solver.metrics[layer] * rows).sum(1).mean()) == pytest.approx(1.0, rel=1e-4)
    assert sum(solver.ranks.values()) == 48


@pytest.mark.parametrize("fails", [False, True])
def test_both_models_are_left_as_they_were_found(fails, monkeypatch):
    producer, consumer = MODELS["llama"](seed=1).train(), MODELS["qwen3"](seed=2).train()
    before = traces_of(producer), traces_of(consumer)
    if fails:
        monkeypatch.setattr(Solver, "solve", lambda self: (_ for _ in ()).throw(KVCacheError("broken")))
        with pytest.raises(KVCacheError, match="broken"):
            fitted(producer, consumer, metric="loss")
    else:
        fitted(producer, consumer, metric="loss", patch_layers="auto")
    assert (traces_of(producer), traces_of(consumer)) == before


def test_a_model_in_bfloat16_gets_its_own_keys_and_values_back_to_its_precision():
    model = MODELS["qwen2"]().bfloat16()
    translator = fitted(model, model, payload=1.0, dtype="float16", ridge=1e-6, metric="loss")
    own = made_by(model, PROMPT[:, :-1])
    for layer, (keys, values) in filled(translator, model, model, PROMPT).items():
        assert error(keys.float(), own[layer].keys[0].float()) < 2e-2
        assert error(values.float(), own[layer].values[0].float()) < 2e-2
