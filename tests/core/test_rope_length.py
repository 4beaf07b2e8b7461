"""Frequencies that depend on the length of the text: which ones a forward pass rotates by."""

import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, DynamicCache, LlamaConfig, PhimoeConfig, PreTrainedConfig
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from hf_kvcaches import AdaptiveSubspace, EquipCache, GrowingCache, SubspaceCache
from hf_kvcaches.core.rope import RotaryGeometry, rotation_of
from hf_kvcaches.errors import UnsupportedError
from tests import tiny
from tests.conformance.driving import feed
from tests.core.ropes import LIMIT, LONGROPE, SHORT, phi3_config


def dynamic_config() -> LlamaConfig:
    return LlamaConfig(**SHORT, max_position_embeddings=LIMIT, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})


def cached_keys(model, start: int, tokens: int) -> torch.Tensor:
    """The first layer's keys, which depend on nothing but the tokens and their positions."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tiny.ids(1, tokens), position_ids=torch.arange(start, start + tokens)[None], past_key_values=cache)
    return cache.layers[0].keys


@pytest.mark.parametrize(("start", "tokens"), [(0, 8), (0, LIMIT), (LIMIT - 7, 8), (2 * LIMIT, 8), (0, LIMIT + 8)])
def test_a_forward_pass_rotates_by_the_frequencies_for_its_largest_position(start: int, tokens: int) -> None:
    model = tiny.build(phi3_config())
    rotary, positions = model.model.rotary_emb, torch.arange(start, start + tokens)[None]
    cached_keys(model, start, tokens)
    geometry = RotaryGeometry.from_config(model.config, layer_idx=0).at(positions)
    assert torch.equal(geometry.inv_freq, rotary.inv_freq.double())
    assert geometry.attention_scaling == rotary.attention_scaling > 1
    keys = torch.randn(1, 1, tokens, 16, generator=torch.Generator().manual_seed(0))
    theirs = modeling_phi3.apply_rotary_pos_emb(keys, keys, *rotary(keys, positions))[1]
    torch.testing.assert_close(geometry.rotate(keys, positions), theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("start", "moved"), [(0, LIMIT - 8), (LIMIT, 2 * LIMIT)])
def test_a_models_cached_keys_are_moved_on_either_side_of_the_change(start: int, moved: int) -> None:
    model = tiny.build(phi3_config())
    keys, expected = cached_keys(model, start, 8), cached_keys(model, moved, 8)
    whole = RotaryGeometry.from_config(model.config, layer_idx=0)
    torch.testing.assert_close(whole.at(start + 7).shift(keys, moved - start), expected, rtol=0, atol=2e-5)
    other = whole.at(2 * LIMIT if start == 0 else 0)
    assert not torch.allclose(other.shift(keys, moved - start), expected, atol=1e-2)


@pytest.mark.parametrize("held", [LIMIT - 1, LIMIT])
def test_keys_of_both_frequencies_in_one_cache_are_refused(held: int) -> None:
    geometry = RotaryGeometry.from_config(phi3_config(), layer_idx=0)
    before = geometry.at(held)
    other = 2 * LIMIT - 1 - held
    assert geometry.at(held, before) is before
    with pytest.raises(UnsupportedError, match=rf"position {LIMIT}.*longrope.*one forward pass.*positions='original'"):
        geometry.at(torch.tensor([[0, other]]), before)
    assert geometry.at(other).rotates_like(before) is False


def test_dynamic_frequencies_hold_below_the_length_that_the_model_was_trained_with() -> None:
    model = tiny.build(dynamic_config())
    geometry = RotaryGeometry.from_config(model.config, layer_idx=0)
    within = geometry.at(LIMIT - 2)
    cached_keys(model, 0, LIMIT + 1)
    assert not torch.equal(within.inv_freq, model.model.rotary_emb.inv_freq.double())
    for held in (None, within):
        with pytest.raises(UnsupportedError, match=r"dynamic.*no fixed angles.*positions='original'"):
            geometry.at(LIMIT - 1, held)
    keys, moved = cached_keys(model, 0, 8), cached_keys(model, LIMIT - 9, 8)
    assert torch.equal(within.inv_freq, model.model.rotary_emb.inv_freq.double())
    torch.testing.assert_close(within.shift(keys, LIMIT - 9), moved, rtol=0, atol=2e-5)


def test_frequencies_that_never_change_are_asked_for_no_positions() -> None:
    geometry = RotaryGeometry.from_config(LlamaConfig(**SHORT), layer_idx=0)
    assert geometry.changes_at is None
    assert geometry.at(torch.empty(0)) is geometry


def test_a_family_that_changes_the_norm_of_its_keys_with_the_length_is_refused() -> None:
    rope = {**LONGROPE, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.1, "long_mscale": 1.3}
    geometry = RotaryGeometry.from_config(PhimoeConfig(**SHORT, rope_parameters=rope), layer_idx=0)
    assert geometry.changes_at is None
    with pytest.raises(UnsupportedError, match="depend on the length"):
        geometry.at(5).shift(torch.zeros(1, 1, 3, 16), 1)


def test_geometries_differ_where_only_the_frequencies_beyond_do() -> None:
    one, same, other = (
        RotaryGeometry.from_config(phi3_config(rope_parameters={**LONGROPE, "partial_rotary_factor": 0.5, "long_factor": factors}))
        for factors in ([2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 6.0])
    )
    assert one.rotates_like(same)
    assert not one.rotates_like(other)
    assert one.at(LIMIT - 1).rotates_like(other.at(LIMIT - 1))
    twin = pickle.loads(pickle.dumps(one))
    assert twin.at(LIMIT, one.at(LIMIT)).rotates_like(one.at(LIMIT))


@torch.no_grad()
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
@pytest.mark.parametrize("tokens", [8, LIMIT + 8])
def test_a_pruned_cache_that_was_saved_goes_on_by_the_same_frequencies(policy: str, tokens: int, tmp_path: Path) -> None:
    model = tiny.build(phi3_config())
    cache = EquipCache(model, policy, 6, positions="compact")
    model(tiny.ids(1, tokens), past_key_values=cache)
    cache.save(tmp_path / "cache.safetensors")
    again = EquipCache.load(tmp_path / "cache.safetensors", model)
    expected, found = (feed(model, held, tiny.ids(1, 5)) for held in (cache, again))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for held in (cache, again) if tokens < LIMIT else ():
        with pytest.raises(UnsupportedError, match="keys of the other kind"):
            feed(model, held, tiny.ids(1, LIMIT))
    rotations = {id(layer.rotation.otherwise or layer.rotation) for held in (cache, again) for layer in held.layers}
    assert len(rotations) == 2, "layers share their tables"


@pytest.mark.parametrize("make", [GrowingCache, lambda model: EquipCache(model, "streaming", 16, positions="original")])
def test_a_generate_in_which_the_model_drops_the_cache_is_refused(make) -> None:
    model = tiny.build(phi3_config())
    ids = tiny.ids(1, LIMIT + 8)
    for prompt, tokens in ((ids, 2), (ids[:, : LIMIT - 3], 8)):  # from the start, and where the text gets so long
        with pytest.raises(UnsupportedError, match="generate: Phi3ForCausalLM drops the"):
            model.generate(prompt, past_key_values=make(model), max_new_tokens=tokens, do_sample=False)
    assert model.generate(ids[:, :8], past_key_values=make(model), max_new_tokens=8, do_sample=False).shape == (1, 16)
    fed = GrowingCache(model)
    model(input_ids=ids[:, :-1], past_key_values=fed)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(ids, past_key_values=fed, max_new_tokens=8, do_sample=False), expected)
    assert model(input_ids=ids[:, :4], use_cache=True).past_key_values is not None


# Which dimensions form a pair, and configs that a model's own code brings along: what they don't say is not guessed


class RemoteConfig(PreTrainedConfig):
    """As a model's own code brings along."""

    model_type = "remote"

    def __init__(self, **kwargs):
        known = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim", "rope_parameters"):
            setattr(self, name, getattr(known, name))
        super().__init__(**kwargs)


class InheritingConfig(LlamaConfig):
    """A model's own code that says of itself that it is like Llama."""


def test_keys_of_other_models_code_are_not_rotated_by_guess():
    geometry = RotaryGeometry.from_config(RemoteConfig(), layer_idx=0)
    with pytest.raises(UnsupportedError, match="RemoteConfig is not transformers' own"):
        geometry.shift(torch.zeros(1, 2, 3, 8), 1)
    with pytest.raises(UnsupportedError, match=r"RemoteConfig.*Pass positions='original'"):
        EquipCache(RemoteConfig())
    assert EquipCache(RemoteConfig(), positions="original").seen == 0
    with pytest.raises(UnsupportedError, match=r"RemoteConfig.*rotation='post'"):
        SubspaceCache(RemoteConfig(), adaptive=AdaptiveSubspace(rank=4))
    assert SubspaceCache(RemoteConfig(), adaptive=AdaptiveSubspace(rank=4, rotation="post")).seen == 0
    assert RotaryGeometry.from_config(InheritingConfig()).layout == "half"


def test_common_beginnings_can_still_be_reused():
    rotation = rotation_of(RemoteConfig())
    assert not rotation.refused
    assert "RemoteConfig" in rotation.why


INTERLEAVED = """codegen cohere cohere2 ernie4_5 ernie4_5_moe glm glm4 glm4v_text glm_ocr_text gptj helium llama4_text moonshine
    deepseek_v4""".split()


@pytest.mark.parametrize("model_type", INTERLEAVED)
def test_families_that_pair_neighbouring_dimensions_are_known(model_type):
    assert RotaryGeometry.from_config(AutoConfig.for_model(model_type), layer_idx=0).layout == "interleaved"


def rotate_thirds(q, k, cos, sin):
    return q, k.roll(3, -1) * sin


def fails(q, k, cos, sin):
    raise RuntimeError("other arguments")


@pytest.mark.parametrize("function", [rotate_thirds, fails, None])
def test_keys_are_not_rotated_where_the_rotary_function_is_not_understood(function, monkeypatch):
    if function is None:
        monkeypatch.delattr(modeling_llama, "apply_rotary_pos_emb")
    else:
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", function)
    geometry = RotaryGeometry.from_config(LlamaConfig(hidden_size=32, num_attention_heads=4))
    assert geometry.kind == "unknown"
    with pytest.raises(UnsupportedError, match="rotary function of llama was not understood"):
        geometry.shift(torch.zeros(1, 2, 3, 8), 1)
    rotation = rotation_of(LlamaConfig(hidden_size=32, num_attention_heads=4))
    assert not rotation.refused
    assert "not understood" in rotation.why
