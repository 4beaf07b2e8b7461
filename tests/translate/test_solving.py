"""Translators from fit to filled cache, against the consumer's own keys and values and against least squares on all rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_kvcaches.errors import ConfigError, KVCacheError, UnsupportedError
from hf_kvcaches.translate import calibration, reading
from hf_kvcaches.translate.config import TranslatorConfig
from hf_kvcaches.translate.pair import Pair
from hf_kvcaches.translate.reading import TextSums
from hf_kvcaches.translate.solving import part_name
from hf_kvcaches.translate.states import PromptTokens, State, read_states
from tests import tiny
from tests.translate.models import MODELS, error, filled, fitted, made_by, rebuilt, texts_of, traces_of

pytestmark = pytest.mark.full

FULL = {"payload": 2.0, "widths": 24, "ridge": 1e-9}
LOSSLESS = 1e-3
PROMPT = tiny.ids(1, 30, seed=77)


@pytest.mark.parametrize("options", [{}, {"layers_per_code": 4}, {"method": "paper"}], ids=str)
@pytest.mark.parametrize("family", sorted(MODELS))
def test_a_model_gets_its_own_keys_and_values_back_at_full_rank(family, options):
    """On a text that nothing was fitted to."""
    model = MODELS[family]()
    translator = fitted(model, model, **options, **FULL)
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
    assert translator.settings.config.metric == metric
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
    return torch.linalg.pinv(with_ones(inputs)) @ targets.double()


def with_ones(inputs: Tensor) -> Tensor:
    return torch.cat([inputs.new_ones(len(inputs), 1), inputs], dim=1).double()


@pytest.mark.parametrize("recompute", [0, 1])
def test_between_two_models_it_is_least_squares_on_what_is_known_and_the_producers_states(recompute):
    producer, consumer, texts = MODELS["llama"](seed=1), MODELS["qwen3"](seed=2), texts_of()
    translator = fitted(producer, consumer, texts, recompute_layers=recompute, **FULL)
    theirs, ours = (states_by_row(model, texts, hidden=[recompute]) for model in (producer, consumer))
    (new_theirs,), (new_ours,) = (states_by_row(model, PROMPT, hidden=[recompute]) for model in (producer, consumer))
    found = rebuilt(translator, producer, consumer, PROMPT)
    assert len(found) == 3 - recompute
    for layer, pair in found.items():
        # What is sent is what does not follow from what the producer itself has in the place of what is known.
        have, states = torch.cat([row[recompute].hidden for row in theirs]), torch.cat([row[layer].pair for row in theirs])
        follows = least_squares(have, states)
        known = torch.cat([row[recompute].hidden for row in ours]).double()
        weights = least_squares(torch.cat([known, states - with_ones(have) @ follows], dim=1), torch.cat([row[layer].pair for row in ours]))
        left = new_theirs[layer].pair - with_ones(new_theirs[recompute].hidden) @ follows
        new = with_ones(torch.cat([new_ours[recompute].hidden.double(), left], dim=1))
        assert error(torch.cat(pair, dim=1).double(), new @ weights) < LOSSLESS


@pytest.mark.parametrize("layers_per_code", [1, 4])
def test_a_payload_of_0_sends_nothing_and_leaves_least_squares_on_what_is_known(layers_per_code):
    producer, consumer, texts = MODELS["llama"](seed=1), MODELS["llama"](seed=2), texts_of()
    translator = fitted(producer, consumer, texts, layers_per_code=layers_per_code, payload=0, ridge=1e-9)
    assert not translator.maps.encoders
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


@pytest.mark.parametrize(("width", "shared"), [(16, 4), (512, 4), (1024, 2), (2048, 1), (16384, 1)])
def test_wide_layers_have_a_code_each_where_nothing_else_is_asked_for(width, shared):
    assert TranslatorConfig().layers_of_width(width) == shared
    assert TranslatorConfig(layers_per_code=3).layers_of_width(width) == 3
    assert TranslatorConfig(method="paper").layers_of_width(width) == 1


@pytest.mark.parametrize(("options", "shared"), [({}, 4), ({"patch_layers": (2,)}, 1), ({"method": "paper"}, 1)], ids=str)
def test_a_translator_says_how_many_layers_share_a_code(options, shared):
    translator = fitted(MODELS["llama"](seed=1), MODELS["llama"](seed=2), layers_per_code=None, **options)
    assert translator.settings.config.layers_per_code == shared
    assert max(len(encoder.layers) for encoder in translator.maps.encoders) == min(3, shared)


@pytest.mark.parametrize("widths", [None, (2, 4), 16])
@pytest.mark.parametrize("layers_per_code", [1, 2, 4])
def test_bytes_are_a_share_of_bfloat16_keys_and_values(widths, layers_per_code):
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    translator = fitted(producer, consumer, payload=0.125, widths=widths, layers_per_code=layers_per_code)
    # 4 layers of 2 heads of 8 numbers, for keys and for values, 2 bytes each.
    sent = sum(encoder.quantizer.rows for encoder in translator.maps.encoders)
    assert 0.125 * 256 - 3 <= sent <= 0.125 * 256
    names = {1: ["layer.1", "layer.2", "layer.3"], 2: ["layers.1-2", "layer.3"], 4: ["layers.1-3"]}[layers_per_code]
    assert [encoder.part for encoder in translator.maps.encoders] == names
    codes = translator.encode(producer, PROMPT)
    assert sum(part.codes.numel() for part in codes) == sent * 29
    for encoder in translator.maps.encoders:
        if widths is not None:
            assert set(encoder.quantizer.widths.tolist()) <= {*(widths if isinstance(widths, tuple) else (widths,))}


def test_more_payload_costs_less_in_the_metric_of_the_texts():
    producer, consumer, texts = MODELS["llama"](seed=1), MODELS["llama"](seed=2), texts_of()
    ours, errors = states_by_row(consumer, texts), []
    for payload in (0, 0.05, 0.15, 0.4, 1.5):
        translator = fitted(producer, consumer, texts, payload=payload, metric="plain")
        total = 0.0
        for text, own in zip(texts, ours, strict=True):
            for layer, pair in rebuilt(translator, producer, consumer, text).items():
                total += float((torch.cat(pair, dim=1) - own[layer].pair).square().sum() / own[layer].pair.var(0).sum())
        errors.append(total)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.95 * errors[0]


def test_a_code_of_several_layers_is_made_of_all_and_serves_all():
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    (encoder,) = (maps := fitted(producer, consumer, layers_per_code=3).maps).encoders
    rank = len(encoder.quantizer.steps)
    assert (encoder.kind, encoder.layers, encoder.weights.shape) == ("states", (1, 2, 3), (96, rank))
    for layer, decoder in zip((1, 2, 3), maps.decoders, strict=True):
        assert (decoder.layer, decoder.part, decoder.kind, decoder.shape) == (layer, "layers.1-3", "states", (2, 8, 8))
        assert (decoder.weights.side.shape, decoder.weights.codes.shape, decoder.weights.bias.shape) == ((32, 32), (rank, 32), (32,))


@pytest.mark.parametrize("heads", ["joint", "each"])
def test_the_papers_codes_are_keys_and_values_apart_with_nothing_known(heads):
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    translator = fitted(producer, consumer, method="paper", ranks=(3, 5), heads=heads)
    for layer, encoder, decoder in zip((1, 2, 3), translator.maps.encoders, translator.maps.decoders, strict=True):
        assert (encoder.part, encoder.layers, encoder.side) == (part_name((layer,)), (layer,), None)
        assert (encoder.weights.shape, encoder.quantizer.widths.tolist()) == ((32, 8), [16] * 8)
        assert decoder.weights.side is None
        assert not bool(decoder.weights.bias.any())
        assert decoder.weights.codes.shape == (8, 32)
        # Keys are made of the code of keys alone, values of that of values.
        for rows, columns in ((slice(0, 3), slice(16, 32)), (slice(3, 8), slice(0, 16))):
            assert not bool(decoder.weights.codes[rows, columns].any())
            assert not bool(encoder.weights.T[rows, columns].any())
        if heads == "each":
            assert not bool(encoder.weights[8:16, :2].any())
            assert not bool(decoder.weights.codes[:2, 8:16].any())


def test_the_papers_ranks_follow_from_the_payload_where_they_are_not_given():
    model = MODELS["llama"]()
    translator = fitted(model, model, method="paper", payload=0.2)
    # 51 of 256 bytes, for 3 layers: 8 codes of 16 bits each, and a byte for the gain.
    assert [encoder.weights.shape for encoder in translator.maps.encoders] == [(32, 8)] * 3


def test_heads_that_do_not_match_are_refused_each_for_itself():
    with pytest.raises(UnsupportedError, match="heads='each'"):
        fitted(tiny.llama(num_key_value_heads=4), tiny.llama(), method="paper", heads="each")


def test_models_of_other_widths_and_heads_are_translated():
    producer, consumer = MODELS["gpt2"](seed=1), tiny.llama(seed=2, num_hidden_layers=3)
    translator = fitted(producer, consumer, payload=0.5)
    assert {
        (len(encoder.weights), decoder.weights.codes.shape[1]) for encoder, decoder in zip(*vars(translator.maps).values(), strict=True)
    } == {(64, 32)}
    assert filled(translator, producer, consumer, PROMPT)[2][0].shape == (29, 16)


def test_where_the_consumer_runs_all_layers_nothing_is_solved():
    model = MODELS["llama"]()
    translator = fitted(model, model, recompute_layers=3)
    assert translator.sent_layers == ()
    own = made_by(model, PROMPT[:, :-1])
    for layer, (keys, _) in filled(translator, model, model, PROMPT).items():
        assert error(keys, own[layer].keys[0]) < LOSSLESS


@pytest.mark.parametrize(("layers", "others"), [(3, 6), (6, 3), (4, 5)])
@pytest.mark.parametrize("layers_per_code", [1, 4])
def test_models_of_other_depths_are_translated_from_the_layers_nearest_in_depth(layers, others, layers_per_code):
    producer, consumer = (tiny.llama(seed, num_hidden_layers=count) for seed, count in enumerate((others, layers)))
    translator = fitted(producer, consumer, payload=0.5, layers_per_code=layers_per_code)
    used = [layer for encoder in translator.maps.encoders for layer in encoder.layers]
    assert sorted(set(used)) == sorted({round(layer * (others - 1) / (layers - 1)) for layer in range(1, layers)})
    found, own = filled(translator, producer, consumer, PROMPT), made_by(consumer, PROMPT[:, :-1])
    assert error(found[0][0], own[0].keys[0]) < LOSSLESS
    assert sorted(found) == list(range(layers))


@pytest.mark.parametrize("kept", [(0, 1), (0, 2, 3), (0, 1, 3), (0, 1, 2, 3)])
def test_a_fitted_map_of_layers_finds_the_layers_that_a_consumer_has_of_its_producer(kept):
    producer, consumer = tiny.llama(), tiny.llama()
    for number in set(range(4)) - set(kept):
        # A layer that changes nothing, so that those behind it read the same.
        for model in (producer, consumer):
            model.model.layers[number].self_attn.o_proj.weight.data.zero_()
            model.model.layers[number].mlp.down_proj.weight.data.zero_()
    consumer.model.layers = torch.nn.ModuleList(consumer.model.layers[number] for number in kept)
    for number, layer in enumerate(consumer.model.layers):
        layer.self_attn.layer_idx = number
    consumer.config.num_hidden_layers = len(kept)
    texts = [tiny.ids(80, seed=number).tolist() for number in range(12)]
    translator = fitted(producer, consumer, texts, layer_map="fit", payload=0.5)
    assert translator.settings.config.layer_map == kept


def test_a_map_of_layers_is_taken_as_it_is():
    model = tiny.llama()
    translator = fitted(model, model, layer_map=(0, 3, 2, 1), payload=0.5)
    # In the order in which the producer has them.
    assert [(encoder.part, encoder.layers) for encoder in translator.maps.encoders] == [
        ("layer.3", (1,)),
        ("layer.2", (2,)),
        ("layer.1", (3,)),
    ]
    assert len(filled(translator, model, model, PROMPT)) == 4


@pytest.mark.parametrize("layers", [(0, 1), (0, 1, 2, 4), "0123", (0, 1, 2, -1)])
def test_a_map_of_other_layers_is_refused(layers):
    with pytest.raises(ConfigError, match="layer_map"):
        fitted(tiny.llama(), tiny.llama(), layer_map=layers)


def test_layers_to_run_are_chosen_by_measurement_within_the_share_of_the_prefill():
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    translator = fitted(producer, consumer, recompute_layers="auto", prefill_share=0.5)
    measured = {name: value for name, value in translator.settings.measured.items() if name.endswith("layers run")}
    assert list(measured) == ["0 layers run", "1 layers run", "2 layers run"]
    assert measured[f"{translator.settings.recompute_layers} layers run"] == min(measured.values())
    assert fitted(producer, consumer, recompute_layers="auto", prefill_share=0.2).settings.recompute_layers == 0


@pytest.mark.parametrize("metric", ["attention", "plain"])
def test_metrics_of_all_layers_are_in_one_unit(metric):
    """What states cost by their spread is 1 in each layer, so that strengths of layers can be compared."""
    model, texts = MODELS["llama"](), texts_of(8)
    sums = TextSums(Pair(model, model, None), TranslatorConfig(metric=metric), 0, {})
    sums.read([torch.tensor(text) for text in texts], False)
    for layer in (1, 2, 3):
        rows = torch.cat([states[layer].pair for states in states_by_row(model, texts)]).double()
        rows -= rows.mean(0)
        assert float((rows @ sums.metric(layer, rows.T @ rows / len(rows)) * rows).sum(1).mean()) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("fails", [False, True])
def test_both_models_are_left_as_they_were_found(fails, monkeypatch):
    producer, consumer = MODELS["llama"](seed=1).train(), MODELS["qwen3"](seed=2).train()
    before = traces_of(producer), traces_of(consumer)
    if fails:
        monkeypatch.setattr(calibration, "joint_maps", lambda *_: (_ for _ in ()).throw(KVCacheError("broken")))
        with pytest.raises(KVCacheError, match="broken"):
            fitted(producer, consumer, metric="loss")
    else:
        fitted(producer, consumer, metric="loss", patch_layers="auto")
    assert (traces_of(producer), traces_of(consumer)) == before


def test_a_model_in_bfloat16_gets_its_own_keys_and_values_back_to_its_precision():
    model = MODELS["qwen2"]().bfloat16()
    translator = fitted(model, model, payload=2.0, widths=16, ridge=1e-6, metric="loss")
    own = made_by(model, PROMPT[:, :-1])
    for layer, (keys, values) in filled(translator, model, model, PROMPT).items():
        assert error(keys.float(), own[layer].keys[0].float()) < 2e-2
        assert error(values.float(), own[layer].values[0].float()) < 2e-2


def test_a_model_that_is_out_of_memory_keeps_its_metric(monkeypatch):
    def exhausted(*args):
        raise torch.OutOfMemoryError("no memory")

    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    monkeypatch.setattr(reading, "loss_gradients", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        fitted(producer, consumer, metric="loss")
