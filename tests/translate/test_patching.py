"""Patched layers: which, what the maps give them, and what is tried on texts kept apart."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.translate.aligner import MLPAligner
from hf_kvcaches.translate.pair import Pair
from hf_kvcaches.translate.paper import patching
from hf_kvcaches.translate.states import PromptTokens, read_states
from hf_kvcaches.translate.trial import Trial
from tests import tiny
from tests.translate.models import MODELS, error, filled, fitted, layers_of, made_by, projected, rebuilt, texts_of, traces_of

pytestmark = pytest.mark.full

FULL = {"payload": 2.0, "widths": 24, "ridge": 1e-9}
PROMPT = tiny.ids(1, 30, seed=77)
FAMILIES = sorted(MODELS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_layer_makes_its_keys_and_values_with_the_consumers_own_projections(family):
    """Norms, biases, grouped heads and partial rotation are the model's; the input is what the maps say."""
    producer, consumer = MODELS[family](seed=1), MODELS[family](seed=2)
    translator = fitted(producer, consumer, patch_layers=[2], payload=0.5)
    assert translator.patched_layers == translator.route.patched == (2,)
    decoder = translator.maps.decoders[1]
    assert (decoder.layer, decoder.part, decoder.kind) == (2, "layer.2", "input")
    encoder = translator.maps.encoders[1]
    assert (encoder.kind, encoder.layers) == ("input", (2,))
    theirs, ours = {}, {}
    tokens = PromptTokens.of(PROMPT[:, :-1])
    read_states(producer, tokens, theirs.__setitem__, hidden=[2])
    read_states(consumer, tokens, ours.__setitem__, hidden=[0])
    given = decoder.apply(ours[0].hidden, encoder.quantizer.decode(encoder.encode(theirs)))
    with torch.no_grad():
        expected = projected(consumer, 2, given[None])
    keys, values = filled(translator, producer, consumer, PROMPT)[2]
    assert error(keys, expected.keys[0]) < 1e-5
    assert error(values, expected.values[0]) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_layer_gets_its_own_input_back_where_both_models_are_one(family):
    model = MODELS[family]()
    translator = fitted(model, model, patch_layers=[1, 2], **FULL)
    own = made_by(model, PROMPT[:, :-1])
    for layer, (keys, values) in filled(translator, model, model, PROMPT).items():
        assert error(keys, own[layer].keys[0]) < 2e-3
        assert error(values, own[layer].values[0]) < 2e-3


def test_the_codes_of_an_input_are_those_that_its_keys_and_values_need_most(monkeypatch):
    """With few codes, an input's error counts by what the layer makes of it, not by its own size."""
    producer, consumer, texts = MODELS["qwen2"](seed=1), MODELS["qwen2"](seed=2), texts_of()
    with torch.no_grad():
        own = layers_of(consumer)[2].self_attn
        for projection in (own.k_proj, own.v_proj):
            projection.weight[:, 6:] *= 0.1

    def left() -> dict[str, float]:
        translator = fitted(producer, consumer, texts, patch_layers=[2], payload=0.05, metric="plain")
        errors = {"pair": 0.0, "input": 0.0}
        for text in texts:
            theirs, ours = {}, {}
            read_states(producer, PromptTokens.of(text), theirs.__setitem__, hidden=[2])
            read_states(consumer, PromptTokens.of(text), ours.__setitem__, hidden=[0, 2])
            encoder = translator.maps.encoders[1]
            made = translator.maps.decoders[1].apply(ours[0].hidden, encoder.quantizer.decode(encoder.encode(theirs)))
            pair = torch.cat(rebuilt(translator, producer, consumer, text)[2], dim=1)
            errors["pair"] += float((pair - ours[2].pair).square().sum())
            errors["input"] += float((made - ours[2].hidden).square().sum())
        return errors

    by_use, plainly = left(), patching.reduced_rank
    monkeypatch.setattr(patching, "reduced_rank", lambda moments, metric, ridge: plainly(moments, torch.eye(len(metric)), ridge))
    by_size = left()
    assert by_use["pair"] < by_size["pair"]
    assert by_use["input"] > by_size["input"]


@pytest.mark.parametrize("aligner", ["ridge", "mlp"])
def test_with_a_payload_of_0_a_named_layer_is_patched_from_what_the_consumer_knows(aligner, monkeypatch):
    monkeypatch.setattr(patching, "_STEPS", 5)
    producer, consumer = MODELS["qwen3"](seed=1), MODELS["qwen3"](seed=2)
    translator = fitted(producer, consumer, patch_layers=[2], payload=0, aligner=aligner)
    assert not translator.maps.encoders
    assert [(each.part, each.kind) for each in translator.maps.decoders] == [(None, "states"), (None, "input"), (None, "states")]
    known = {}
    read_states(consumer, PromptTokens.of(PROMPT[:, :-1]), known.__setitem__, hidden=[0])
    with torch.no_grad():
        expected = projected(consumer, 2, translator.maps.decoders[1].apply(known[0].hidden, None)[None])
    keys, values = filled(translator, producer, consumer, PROMPT)[2]
    assert error(keys, expected.keys[0]) < 1e-5
    assert error(values, expected.values[0]) < 1e-5


@pytest.mark.parametrize("layers", [None, [], ()])
def test_no_layers_are_none(layers):
    model = MODELS["llama"]()
    translator = fitted(model, model, patch_layers=layers)
    assert translator.patched_layers == translator.route.patched == ()
    assert dict(translator.settings.measured) == {}


@pytest.mark.parametrize("layers", [[0], [4], [1, 9], "all", 2, [None]])
def test_layers_that_are_not_sent_are_refused(layers):
    model = MODELS["llama"]()
    before = traces_of(model)
    with pytest.raises(ConfigError, match="patch_layers"):
        fitted(model, model, patch_layers=layers)
    assert traces_of(model) == before


def test_a_patched_layer_has_as_many_bytes_as_it_had_without():
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    for options in ({"payload": 0.3}, {"method": "paper", "ranks": (3, 5)}):
        without, patched = (fitted(producer, consumer, patch_layers=layers, **options) for layers in (None, [2]))
        rows = [[encoder.quantizer.rows for encoder in each.maps.encoders] for each in (without, patched)]
        assert rows[0][::2] == rows[1][::2]
        assert rows[0][1] - 2 <= rows[1][1] <= rows[0][1]
        assert len(filled(patched, producer, consumer, PROMPT)) == 4


def test_patches_need_codes_of_one_layer_each():
    model = MODELS["llama"]()
    with pytest.raises(ConfigError, match="layers_per_code=1"):
        fitted(model, model, layers_per_code=2, patch_layers="auto")


def test_a_trained_aligner_is_at_least_as_near_as_the_line_it_starts_from(monkeypatch):
    monkeypatch.setattr(patching, "_STEPS", 60)
    producer, consumer, texts = MODELS["llama"](seed=1), MODELS["llama"](seed=2), texts_of()
    options = {"patch_layers": [2], "payload": 0.5}
    errors = []
    for own in ({}, {"aligner": "mlp"}):
        translator = fitted(producer, consumer, texts, **options, **own)
        (decoder,) = (each for each in translator.maps.decoders if each.kind == "input")
        (encoder,) = (each for each in translator.maps.encoders if each.kind == "input")
        total = 0.0
        for text in texts:
            theirs, ours = {}, {}
            read_states(producer, PromptTokens.of(text), theirs.__setitem__, hidden=[2])
            read_states(consumer, PromptTokens.of(text), ours.__setitem__, hidden=[0, 2])
            with torch.no_grad():
                made = decoder.apply(ours[0].hidden, encoder.quantizer.decode(encoder.encode(theirs)))
            total += float((made - ours[2].hidden).square().sum())
        errors.append(total)
    assert isinstance(decoder.aligner, MLPAligner)
    assert errors[1] <= errors[0] * 1.02
    assert len(filled(translator, producer, consumer, PROMPT)) == 4


def trial_of(family: str, length: int = 40) -> tuple[Trial, torch.Tensor]:
    producer, consumer = MODELS[family](seed=1), MODELS[family](seed=2)
    ids = tiny.ids(length, seed=9)
    return Trial(Pair(producer, consumer, None), ids), ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trial_without_anything_exchanged_says_what_the_consumer_says(family):
    with torch.no_grad():
        trial, ids = trial_of(family)
        assert (len(trial.prefix), len(trial.continuation)) == (30, 10)
        expected = trial.pair.consumer(ids[None], use_cache=False).logits[0, 30:]
    torch.testing.assert_close(trial.expected, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


class Exchanging(DynamicCache):
    """Puts other keys and values in the place of one layer's, the rest as they come."""

    def __init__(self, layer, count, keys, values):
        super().__init__()
        self.exchanged = (layer, count, keys, values)

    def update(self, keys, values, layer_idx, *args, **kwargs):
        layer, count, new_keys, new_values = self.exchanged
        if layer_idx == layer:
            keys, values = (torch.cat([new, old[:, :, count:]], dim=2) for new, old in ((new_keys, keys), (new_values, values)))
        return super().update(keys, values, layer_idx, *args, **kwargs)


@pytest.mark.parametrize("family", ["llama", "yarn", "gpt2", "neox"])
def test_an_exchange_reaches_the_texts_end_alone_and_goes_through_one_layers_cache(family):
    """The last layer's, so that a whole pass may be compared: what its own tokens say otherwise is asked of nobody."""
    with torch.no_grad():
        trial, ids = trial_of(family)
        model, last, count = trial.pair.consumer, trial.pair.layers - 1, len(trial.prefix)
        state = trial.consumer[last]
        generator = torch.Generator().manual_seed(1)
        keys, values = (torch.randn(part.shape, generator=generator) for part in (state.keys, state.values))
        found = trial.logits({last: (keys, values)})
        heads = [part.unflatten(1, (state.heads, -1)).transpose(0, 1)[None] for part in (keys, values)]
        geometry = trial.pair.rotation.layers[last]
        if geometry.kind == "rope":
            heads[0] = geometry.rotate(heads[0], torch.arange(count))
        expected = model(ids[None], past_key_values=Exchanging(last, count, *heads)).logits[0, count:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert float((found - trial.expected).abs().max()) > 0.1


@pytest.mark.parametrize("patched", [None, [2]])
def test_a_trial_translates_as_a_cache_is_filled(patched):
    with torch.no_grad():
        trial, _ = trial_of("llama")
    producer, consumer = trial.pair.producer, trial.pair.consumer
    translator = fitted(producer, consumer, patch_layers=patched, payload=0.3)
    with torch.no_grad():
        found = trial.translated(translator.maps, 0)
    prompt = torch.cat([trial.prefix, trial.continuation[:1]])[None]
    for layer, pair in filled(translator, producer, consumer, prompt).items():
        if layer:
            for one, other in zip(found[layer], pair, strict=True):
                assert error(one, other) < 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_layers_are_patched_only_where_texts_kept_apart_are_better_for_it(family):
    producer, consumer = MODELS[family](seed=1), MODELS[family](seed=2)
    translator = fitted(producer, consumer, patch_layers="auto", payload=0.3)
    measured = translator.settings.measured
    assert measured["with patches"] <= measured["reuse alone"] if translator.route.patched else "reuse alone" in measured
    assert translator.patched_layers == translator.route.patched
    assert set(translator.route.sensitivity) == set(translator.sent_layers)


def test_the_callers_own_score_decides():
    """One that likes translations the less, the nearer they are to the consumer, restores nothing."""
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    asked = []

    def far(alone, found):
        asked.append((alone.shape, found.shape))
        return float(divergence(alone, found).mean())

    translator = fitted(producer, consumer, patch_layers="auto", payload=0.3, score=far)
    assert translator.route.patched == ()
    assert asked
    assert all(one == other for one, other in asked)


def test_short_texts_are_fitted_to_and_none_is_held_out_and_that_is_said():
    model = MODELS["llama"]()
    with pytest.warns(UserWarning, match="'auto' needs 8 texts"):
        translator = fitted(model, model, texts_of(30, 12), patch_layers="auto")
    assert translator.patched_layers == ()
    assert dict(translator.settings.measured) == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_refused(bad):
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    with pytest.raises(ConfigError, match="score: expected a finite number"):
        fitted(producer, consumer, patch_layers="auto", payload=0.3, score=lambda expected, logits: bad)


def test_divergences_are_told_whatever_the_callers_score_is():
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    options = {"recompute_layers": "auto", "prefill_share": 0.3, "payload": 0.3}
    scored = fitted(producer, consumer, score=lambda expected, logits: 1e6 - float(divergence(expected, logits).mean()), **options)
    assert scored.settings.measured == fitted(producer, consumer, **options).settings.measured


def test_a_patch_without_bits_sends_nothing_in_the_place_of_what_the_layer_sent():
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    maps = fitted(producer, consumer, payload=0.3).maps
    patched = patching._with(maps, {2: (None, maps.decoders[1])})
    assert [encoder.part for encoder in patched.encoders] == ["layer.1", "layer.3"]
