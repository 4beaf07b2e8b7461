"""Whole fits: what comes back where nothing is lost, which layers share a code, what is chosen on held-out texts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_kvcaches.errors import ConfigError, KVCacheError
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.translate import fit
from hf_kvcaches.translate.cache import TranslatedCache
from hf_kvcaches.translate.fit import TranslatorConfig
from tests import tiny
from tests.translate.pairs import MODELS, error, filled, made_by, plain, states_by_row, texts_of, traces_of

FULL = {"payload": 2.0, "ridge": 1e-9}
PROMPT = tiny.ids(1, 30, seed=77)
LOSSLESS = 2e-3


CASES = [
    *((family, options, torch.float32, LOSSLESS) for family in sorted(MODELS) for options in ({}, {"layers_per_code": 4})),
    *((family, options, torch.float32, LOSSLESS) for family in sorted(MODELS) for options in ({"recompute_layers": 1}, {"metric": "loss"})),
    ("llama", {"recompute_layers": 3}, torch.float32, LOSSLESS),
    ("qwen2", {"ridge": 1e-6, "metric": "loss"}, torch.bfloat16, 2e-2),
]


@pytest.mark.parametrize(("family", "options", "dtype", "tolerance"), CASES, ids=str)
def test_a_model_gets_its_own_keys_and_values_back(family, options, dtype, tolerance):
    model = MODELS[family]().to(dtype)
    translator = plain(model, model, **{**FULL, **options})
    own = made_by(model, PROMPT[:, :-1])
    for layer, (keys, values) in filled(translator, model, model, PROMPT).items():
        assert error(keys.float(), own[layer].keys[0].float()) < tolerance
        assert error(values.float(), own[layer].values[0].float()) < tolerance


def least_squares(inputs: Tensor, targets: Tensor) -> Tensor:
    return torch.linalg.pinv(with_ones(inputs)) @ targets.double()


def with_ones(inputs: Tensor) -> Tensor:
    return torch.cat([inputs.new_ones(len(inputs), 1), inputs], dim=1).double()


@pytest.mark.parametrize("recompute", [0, 1])
def test_between_two_models_it_is_least_squares_on_what_is_known_and_the_producers_states(recompute):
    producer, consumer, texts = MODELS["llama"](seed=1), MODELS["qwen3"](seed=2), texts_of()
    theirs, ours = (states_by_row(model, [*texts, PROMPT[:, :-1]], hidden=[recompute]) for model in (producer, consumer))
    have, known = (torch.cat([row[recompute].hidden for row in rows]).double() for rows in (theirs, ours))
    fitted = len(known) - 29  # the tokens of all texts, before those of the prompt
    options = {"recompute_layers": recompute, "exact_tokens": 0}
    whole, nothing = (
        filled(plain(producer, consumer, texts, **options, **more), producer, consumer, PROMPT) for more in (FULL, FULL | {"payload": 0})
    )
    for layer in range(recompute + 1, 4):
        # What is sent is what does not follow from what the producer itself has in the place of what is known.
        states, targets = (torch.cat([row[layer].states for row in rows]).double() for rows in (theirs, ours))
        left = states - with_ones(have) @ least_squares(have[:fitted], states[:fitted])
        for found, inputs in ((whole, torch.cat([known, left], dim=1)), (nothing, known)):
            expected = with_ones(inputs[fitted:]) @ least_squares(inputs[:fitted], targets[:fitted])
            assert error(torch.cat(found[layer], dim=1).double(), expected) < LOSSLESS


@pytest.mark.parametrize("layers_per_code", [1, 4])
def test_a_payload_of_0_sends_nothing(layers_per_code):
    model = MODELS["llama"]()
    codes = plain(model, model, layers_per_code=layers_per_code, payload=0).encode(model, PROMPT)
    assert (len(codes), codes.head.names) == (0, ())


@pytest.mark.parametrize("exact_tokens", [1, 4, 100])
def test_the_first_tokens_are_the_consumers_own(exact_tokens):
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    translator = plain(producer, consumer, payload=0.2, exact_tokens=exact_tokens)
    own, found = made_by(consumer, PROMPT[:, :-1]), filled(translator, producer, consumer, PROMPT)
    for layer in (1, 2, 3):
        assert error(found[layer][0][:exact_tokens], own[layer].keys[0, :exact_tokens]) < 1e-5
        assert error(found[layer][1][:exact_tokens], own[layer].values[0, :exact_tokens]) < 1e-5
    assert translator.encode(producer, PROMPT).head.tokens == max(0, 29 - exact_tokens)


@pytest.mark.parametrize("layers_per_code", [1, 2, 4, None])
def test_consecutive_layers_share_a_code_and_wide_ones_have_one_each(layers_per_code):
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    widths = [TranslatorConfig(layers_per_code=layers_per_code).layers_of_width(width) for width in (16, 512, 1024, 2048, 16384)]
    assert widths == ([layers_per_code] * 5 if layers_per_code else [4, 4, 2, 1, 1])
    translator = plain(producer, consumer, payload=0.3, layers_per_code=layers_per_code)
    names = {1: ("layer.1", "layer.2", "layer.3"), 2: ("layers.1-2", "layer.3")}.get(layers_per_code, ("layers.1-3",))
    assert translator.maps.names == names
    assert translator.settings.layers_per_code == (layers_per_code or 4)
    assert all(decoder.layer in translator.maps.encoders[decoder.code].sources for decoder in translator.maps.decoders)


def test_more_payload_costs_less_in_the_metric_of_the_texts():
    producer, consumer, texts = MODELS["llama"](seed=1), MODELS["llama"](seed=2), texts_of()
    ours, errors = states_by_row(consumer, texts), []
    for payload in (0, 0.05, 0.1, 2.0):
        translator, total = plain(producer, consumer, texts, payload=payload), 0.0
        for text, own in zip(texts, ours, strict=True):
            for layer, pair in filled(translator, producer, consumer, torch.tensor([[*text, 5]])).items():
                total += float((torch.cat(pair, dim=1) - own[layer].states).square().sum() / own[layer].states.var(0).sum())
        errors.append(total)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.95 * errors[0]


@pytest.mark.parametrize(("layers", "others"), [(3, 6), (6, 3), (4, 5)])
@pytest.mark.parametrize("layers_per_code", [1, 4])
def test_models_of_other_depths_are_translated_from_the_layers_nearest_in_depth(layers, others, layers_per_code):
    producer, consumer = (tiny.llama(seed, num_hidden_layers=count) for seed, count in enumerate((others, layers)))
    translator = plain(producer, consumer, payload=0.5, layers_per_code=layers_per_code)
    used = [layer for encoder in translator.maps.encoders for layer in encoder.sources]
    # What the producer's layer 0 computes follows from the token.
    assert {*used} - {0} == {round(layer * (others - 1) / (layers - 1)) for layer in range(1, layers)} - {0}
    found, own = filled(translator, producer, consumer, PROMPT), made_by(consumer, PROMPT[:, :-1])
    assert error(found[0][0], own[0].keys[0]) < LOSSLESS
    assert sorted(found) == list(range(layers))


def test_a_map_of_layers_is_taken_as_it_is():
    model = tiny.llama()
    translator = plain(model, model, layer_map=(0, 3, 2, 1), payload=0.5)
    # In the order in which the producer has them.
    assert [(code.name, code.sources) for code in translator.maps.encoders] == [("layer.3", (1,)), ("layer.2", (2,)), ("layer.1", (3,))]
    assert len(filled(translator, model, model, PROMPT)) == 4


@pytest.mark.parametrize("layers", [(0, 1), (0, 1, 2, 4), "0123", (0, 1, 2, -1), "fit"])
def test_a_map_of_other_layers_is_refused(layers):
    with pytest.raises(ConfigError, match="layer_map"):
        plain(tiny.llama(), tiny.llama(), layer_map=layers)


def test_layers_to_run_are_chosen_by_measurement_within_the_share_of_the_prefill():
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    translator = plain(producer, consumer, recompute_layers="auto", prefill_share=0.5)
    measured = dict(translator.settings.measured)
    assert list(measured) == ["0 layers run", "1 layers run", "2 layers run"]
    assert measured[f"{translator.settings.recompute_layers} layers run"] == min(measured.values())
    assert plain(producer, consumer, recompute_layers="auto", prefill_share=0.2).settings.recompute_layers == 0


def test_what_is_measured_on_held_out_texts_is_what_a_filled_cache_says():
    producer, consumer, texts = MODELS["llama"](seed=1), MODELS["llama"](seed=2), texts_of(16, 40)
    options = {"payload": 2.0, "prefill_share": 0.5}
    measured = plain(producer, consumer, texts, recompute_layers="auto", **options).settings.measured
    held_out = [torch.tensor(text) for text in texts[7::8]]
    for run in (0, 1, 2):
        kept, total = [text for number, text in enumerate(texts) if number % 8 != 7], 0.0
        translator = plain(producer, consumer, kept, recompute_layers=run, **options)
        for ids in held_out:
            split = len(ids) - max(2, len(ids) // 4)
            own = DynamicCache(config=consumer.config)
            cache = TranslatedCache(consumer, translator, translator.encode(producer, ids[None, : split + 1]))
            cache.prefill(ids[None, : split + 1])
            with torch.no_grad():
                consumer(ids[None, :split], past_key_values=own)
                one, other = (consumer(ids[None, split:], past_key_values=held).logits[0] for held in (own, cache))
            total += float(divergence(one, other).mean()) / len(held_out)
        assert measured[f"{run} layers run"] == pytest.approx(total, rel=1e-2)


def test_the_callers_own_score_decides_and_divergences_are_told_all_the_same():
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    options = {"recompute_layers": "auto", "prefill_share": 0.5, "payload": 0.3}
    asked = []

    def far(alone, found):
        asked.append((alone.shape, found.shape))
        return float(divergence(alone, found).mean())

    scored = plain(producer, consumer, score=far, **options).settings
    assert scored.measured == plain(producer, consumer, **options).settings.measured
    assert scored.measured[f"{scored.recompute_layers} layers run"] == max(scored.measured.values())
    assert asked
    assert all(one == other for one, other in asked)
    with pytest.raises(ConfigError, match="score: expected a finite number"):
        plain(producer, consumer, score=lambda alone, found: float("nan"), **options)


def test_short_texts_are_fitted_to_and_none_is_held_out_and_that_is_said():
    model = MODELS["llama"]()
    with pytest.warns(UserWarning, match="'auto' needs 8 texts"):
        translator = plain(model, model, texts_of(30, 12), recompute_layers="auto", prefill_share=0.5)
    assert translator.settings.recompute_layers == 0
    assert dict(translator.settings.measured) == {}


def test_texts_without_a_continuation_have_no_gradients_and_are_refused():
    model = MODELS["llama"]()
    with pytest.raises(ConfigError, match=r"texts: expected one of 8 tokens at least.*metric='plain'"):
        plain(model, model, [[3, 4, 5, 6, 7]] * 9, metric="loss", payload=0.5)
    assert plain(model, model, [[3, 4, 5, 6, 7]] * 9, metric="plain", payload=0.5).settings.metric == "plain"


@pytest.mark.parametrize("fails", [False, True])
def test_both_models_are_left_as_they_were_found(fails, monkeypatch):
    producer, consumer = MODELS["llama"](seed=1).train(), MODELS["qwen3"](seed=2).train()
    before = traces_of(producer), traces_of(consumer)
    if fails:
        monkeypatch.setattr(fit, "regress", lambda *_: (_ for _ in ()).throw(KVCacheError("broken")))
        with pytest.raises(KVCacheError, match="broken"):
            plain(producer, consumer, metric="loss")
    else:
        plain(producer, consumer, metric="loss", recompute_layers="auto")
    assert (traces_of(producer), traces_of(consumer)) == before
