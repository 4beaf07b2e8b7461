"""Rotary geometry against the models' own rotary modules, and against a slow float64 loop."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    DynamicCache,
    FalconConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    JambaConfig,
    MptConfig,
    OPTConfig,
    PreTrainedConfig,
    SmolLM3Config,
)

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests.core.ropes import CONFIGS, SIZES, TWO_TYPES, llama, phi3_config

FAR = 5_000_000


def own_rotary(name: str):
    """The model's rotary module, its apply function and the geometry under test."""
    config, module, layer_type = CONFIGS[name]
    rotary_class = next(value for key, value in vars(module).items() if key.endswith("RotaryEmbedding") and "Image" not in key)
    rotary = rotary_class(config=config)
    extra = (layer_type,) if layer_type else ()
    prefix = f"{layer_type}_" if layer_type else ""

    def cos_sin(x: torch.Tensor, positions: torch.Tensor):
        return rotary(x, positions, *extra)

    def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = cos_sin(x, positions)
        if name == "phi partial":
            # Phi cuts the rotated dimensions off in its attention, outside of the function.
            head, tail = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
            return torch.cat((module.apply_rotary_pos_emb(head, head, cos, sin)[1], tail), dim=-1)
        return module.apply_rotary_pos_emb(x, x, cos, sin)[1]

    return getattr(rotary, f"{prefix}inv_freq"), cos_sin, turn, RotaryGeometry.from_config(config, layer_type)


def slow_turn(x: np.ndarray, positions: np.ndarray, geometry: RotaryGeometry) -> np.ndarray:
    """One pair after the other in float64; `positions` is (batch, heads, seq)."""
    out = x.astype(np.float64).copy()
    pairs = geometry.rotary_dim // 2
    for b, h, s in np.ndindex(*x.shape[:3]):
        for pair, frequency in enumerate(geometry.inv_freq.tolist()):
            i, j = (2 * pair, 2 * pair + 1) if geometry.layout == "interleaved" else (pair, pair + pairs)
            angle = math.fmod(int(positions[b, h, s]) * frequency, 2 * math.pi)
            u, v = float(x[b, h, s, i]), float(x[b, h, s, j])
            out[b, h, s, i] = u * math.cos(angle) - v * math.sin(angle)
            out[b, h, s, j] = v * math.cos(angle) + u * math.sin(angle)
    return out


def keys(geometry: RotaryGeometry, batch: int = 2, heads: int = 3, seq: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, heads, seq, geometry.head_dim, generator=generator).to(dtype)


every_config = pytest.mark.parametrize("name", CONFIGS)


@every_config
def test_frequencies_are_exactly_the_models_own(name: str) -> None:
    own, _, _, geometry = own_rotary(name)
    assert own.dtype == torch.float32
    assert torch.equal(geometry.inv_freq, own.double())


@every_config
def test_rotate_does_what_the_model_does(name: str) -> None:
    _, _, turn, geometry = own_rotary(name)
    x = keys(geometry)
    for positions, tolerance in (([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]], 5e-6), ([[0, 1, 99, 500, 700], [40, 41, 42, 43, 44]], 2e-4)):
        where = torch.tensor(positions)
        torch.testing.assert_close(geometry.rotate(x, where), turn(x, where), rtol=0, atol=tolerance)


@every_config
def test_a_shift_at_five_million_is_as_exact_as_at_five(name: str) -> None:
    geometry = own_rotary(name)[3]
    x = keys(geometry, 1, 2, 3)
    for start in (5, FAR, 2**24 + 1):
        delta = np.array([[[start, -start, start + 3], [start - 1, 1 - start, 7]]])
        exact = slow_turn(x.numpy(), delta, geometry)
        got = geometry.shift(x, torch.from_numpy(delta)).double().numpy()
        assert np.abs(got - exact).max() < 1e-6
        got64 = geometry.shift(x.double(), torch.from_numpy(delta)).numpy()
        assert np.abs(got64 - exact).max() < 1e-8


def test_yarn_scaling_is_in_rotate_out_of_unrotate_and_not_in_shift() -> None:
    geometry = own_rotary("llama yarn")[3]
    x = keys(geometry)
    assert geometry.attention_scaling > 1.1
    torch.testing.assert_close(geometry.rotate(x, 9).norm(dim=-1), x.norm(dim=-1) * geometry.attention_scaling)
    torch.testing.assert_close(geometry.unrotate(x, 9).norm(dim=-1), x.norm(dim=-1) / geometry.attention_scaling)
    torch.testing.assert_close(geometry.shift(x, 9).norm(dim=-1), x.norm(dim=-1))


# Properties

SHIFTS = st.integers(-10_000_000, 10_000_000)
GEOMETRIES = {name: RotaryGeometry.from_config(config, layer_type) for name, (config, _, layer_type) in CONFIGS.items()}


@given(name=st.sampled_from(sorted(GEOMETRIES)), start=SHIFTS, delta=SHIFTS)
def test_rotating_is_rotating_elsewhere_and_shifting(name: str, start: int, delta: int) -> None:
    geometry = GEOMETRIES[name]
    x = keys(geometry, 1, 1, 2)
    torch.testing.assert_close(geometry.shift(geometry.rotate(x, start), delta), geometry.rotate(x, start + delta), rtol=0, atol=3e-6)
    torch.testing.assert_close(geometry.unrotate(geometry.rotate(x, start), start), x, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["llama yarn", "glm interleaved partial"])
def test_a_shift_by_zero_is_exact_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    geometry = GEOMETRIES[name]
    x = keys(geometry, dtype=dtype)
    for zero in (0, torch.tensor(0), torch.zeros(5, dtype=torch.long), torch.zeros(2, 1, dtype=torch.int32)):
        out = geometry.shift(x, zero)
        assert out.dtype == dtype
        assert torch.equal(out, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_turned_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    geometry = GEOMETRIES["llama llama3"]
    x = keys(geometry, dtype=dtype)
    assert torch.equal(geometry.shift(x, 1234), geometry.shift(x.float(), 1234).to(dtype))


def test_every_shape_of_positions_means_what_it_says() -> None:
    geometry = GEOMETRIES["llama default"]
    x = keys(geometry, 2, 3, 5)
    full = torch.arange(30).reshape(2, 3, 5) * 7 - 60
    for positions, expanded in [
        (torch.tensor(4), torch.full((2, 3, 5), 4)),
        (full[0, 0], full[:1, :1].expand(2, 3, 5)),
        (full[:, 0], full[:, :1].expand(2, 3, 5)),
        (full[:, 0, :1], full[:, :1, :1].expand(2, 3, 5)),
        (full[:, :1], full[:, :1].expand(2, 3, 5)),
        (full, full),
        (full.int(), full),
    ]:
        exact = slow_turn(x.numpy(), expanded.numpy(), geometry)
        np.testing.assert_allclose(geometry.shift(x, positions).numpy(), exact, rtol=0, atol=2e-6)
    np.testing.assert_allclose(geometry.shift(x, -3).numpy(), slow_turn(x.numpy(), np.full((2, 3, 5), -3), geometry), rtol=0, atol=2e-6)


def test_gradients_flow_through_a_shift() -> None:
    geometry = GEOMETRIES["llama default"]
    x = keys(geometry, 1, 1, 2, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda y: geometry.shift(y, torch.tensor([3, FAR])), (x,))


@pytest.mark.parametrize("name", ["llama yarn", "glm interleaved partial"])
def test_turning_is_traced_whole_by_torch_compile(name: str) -> None:
    geometry = GEOMETRIES[name]
    x = keys(geometry)

    def step(y: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return geometry.unrotate(geometry.rotate(geometry.shift(y, delta), delta[:, :1]), delta)

    delta = torch.arange(10).reshape(2, 5) - 4
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, delta), step(x, delta), rtol=0, atol=1e-6)


# Whole models


def cached_keys(model: torch.nn.Module, start: int) -> list[torch.Tensor]:
    cache = DynamicCache(config=model.config)
    ids = torch.arange(3, 10)[None]
    with torch.no_grad():
        model(input_ids=ids, position_ids=torch.arange(7)[None] + start, past_key_values=cache, use_cache=True)
    return [layer.keys for layer in cache.layers]


MODELS: dict[str, dict[str, object]] = {
    "cohere2": {"layer_types": TWO_TYPES, "sliding_window": 64},
    "exaone4": {"layer_types": TWO_TYPES, "sliding_window": 64},
    "gemma3_text": {"layer_types": TWO_TYPES, "head_dim": 32},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64},
    "helium": {"head_dim": 16},
    "llama4_text": {"no_rope_layers": [1, 0], "num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 16},
    "persimmon": {},
    "smollm3": {"no_rope_layers": [1, 0]},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_a_models_cached_keys_are_moved_in_every_layer(model_type: str) -> None:
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, **{**SIZES, "intermediate_size": 64, **special, **MODELS[model_type]})
    model = AutoModelForCausalLM.from_config(config).eval()
    kinds = set()
    for layer_idx, (near, far) in enumerate(zip(cached_keys(model, 0), cached_keys(model, 13), strict=True)):
        geometry = RotaryGeometry.from_config(config, layer_idx=layer_idx)
        kinds.add(geometry.kind)
        torch.testing.assert_close(geometry.shift(near, 13), far, rtol=0, atol=2e-5)
        assert torch.allclose(near, far, atol=2e-5) == (geometry.kind == "none")
    assert kinds == ({"rope", "none"} if model_type in ("cohere2", "exaone4", "llama4_text", "smollm3") else {"rope"})


# Reading configs


def test_a_multimodal_config_gives_its_text_decoders_geometry() -> None:
    text = Gemma3TextConfig(**SIZES, head_dim=32, layer_types=TWO_TYPES)
    whole = RotaryGeometry.from_config(Gemma3Config(text_config=text), "full_attention")
    assert torch.equal(whole.inv_freq, RotaryGeometry.from_config(text, "full_attention").inv_freq)


def test_layer_types_that_differ_must_be_chosen() -> None:
    config = Gemma3TextConfig(**SIZES, head_dim=32, layer_types=TWO_TYPES)
    with pytest.raises(ConfigError, match=r"layer_type.*full_attention.*sliding_attention"):
        RotaryGeometry.from_config(config)
    with pytest.raises(ConfigError, match=r"layer_type.*full_attention.*sliding_attention"):
        RotaryGeometry.from_config(config, "chunked_attention")
    with pytest.raises(ConfigError, match="layer_type"):
        RotaryGeometry.from_config(config, "sliding_attention", layer_idx=1)
    with pytest.raises(ConfigError, match="layer_idx"):
        RotaryGeometry.from_config(config, layer_idx=2)
    sliding, full = (RotaryGeometry.from_config(config, kind) for kind in ("sliding_attention", "full_attention"))
    assert not torch.equal(sliding.inv_freq, full.inv_freq)
    assert torch.equal(RotaryGeometry.from_config(config, layer_idx=1).inv_freq, full.inv_freq)


def test_layers_of_one_type_that_differ_must_be_numbered() -> None:
    config = SmolLM3Config(**SIZES, no_rope_layers=[1, 0], pad_token_id=0)
    with pytest.raises(ConfigError, match=r"layer_idx.*0 to 1"):
        RotaryGeometry.from_config(config)


def test_a_config_that_is_no_config_is_named() -> None:
    with pytest.raises(ConfigError, match=r"config.*model\.config"):
        RotaryGeometry.from_config({"rope_theta": 1e4})


def test_missing_rope_parameters_are_named() -> None:
    config = llama(rope_type="default")
    config.rope_parameters = {"rope_type": "llama3", "rope_theta": 1e4}
    with pytest.raises(ConfigError, match=r"rope_parameters.*factor"):
        RotaryGeometry.from_config(config)


@pytest.mark.parametrize("config", [llama(rope_type="dynamic", factor=2.0), phi3_config()], ids=["dynamic", "longrope"])
def test_angles_that_depend_on_length_can_be_seen_but_not_used(config: PreTrainedConfig) -> None:
    geometry = RotaryGeometry.from_config(config)
    assert geometry.rotary_dim
    x = keys(geometry)
    for use in (geometry.shift, geometry.rotate, geometry.unrotate):
        with pytest.raises(UnsupportedError, match="depend on the length"):
            use(x, 3)
    with pytest.raises(UnsupportedError, match="depend on the length"):
        geometry.cos_sin(3)


@pytest.mark.parametrize(("model_type", "reason"), [("deepseek_v3", "latent"), ("hunyuan_v1_dense", "after the rotation")])
def test_keys_that_are_more_than_rotated_are_refused(model_type: str, reason: str) -> None:
    geometry = RotaryGeometry.from_config(AutoConfig.for_model(model_type))
    with pytest.raises(UnsupportedError, match=reason):
        geometry.shift(keys(geometry, 1, 1, 2), 3)


WITHOUT_ROTATION = {
    "learned": [GPT2Config(n_embd=64, n_head=4), OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=64)],
    "alibi": [
        BloomConfig(hidden_size=64, n_head=4),
        MptConfig(d_model=64, n_heads=4),
        FalconConfig(hidden_size=64, num_attention_heads=4, alibi=True),
    ],
}


@pytest.mark.parametrize(("kind", "config"), [(kind, config) for kind, configs in WITHOUT_ROTATION.items() for config in configs])
def test_keys_without_rotation_stay_as_they_are_and_cannot_be_moved(kind: str, config: PreTrainedConfig) -> None:
    geometry = RotaryGeometry.from_config(config)
    assert (geometry.kind, geometry.rotary_dim, geometry.head_dim) == (kind, 0, 16)
    x = keys(geometry)
    for same in (
        geometry.rotate(x, 3),
        geometry.unrotate(x, torch.arange(5)),
        geometry.shift(x, 0),
        geometry.shift(x, torch.zeros(2, 1, dtype=torch.long)),
    ):
        assert torch.equal(same, x)
    for delta in (1, torch.tensor([0, 0, 0, 0, 2])):
        with pytest.raises(UnsupportedError, match=kind):
            geometry.shift(x, delta)


def test_a_model_whose_config_tells_nothing_of_positions_is_not_guessed_at() -> None:
    geometry = RotaryGeometry.from_config(JambaConfig(**SIZES))
    assert geometry.kind == "unknown"
    x = keys(geometry)
    assert torch.equal(geometry.shift(x, 0), x)
    for use in (geometry.shift, geometry.rotate, geometry.unrotate):
        with pytest.raises(UnsupportedError, match="unknown"):
            use(x, 3)


def test_a_geometry_is_read_without_numbers_from_a_meta_device() -> None:
    with torch.device("meta"):
        geometry = RotaryGeometry.from_config(llama(rope_type="default"))
    assert torch.equal(geometry.inv_freq, GEOMETRIES["llama default"].inv_freq)


# Bad arguments and odds


WRONG_SHAPES = [torch.zeros(shape, dtype=torch.long) for shape in ((4,), (3, 5), (2, 2, 5), (2, 3, 5, 1))]


@pytest.mark.parametrize("positions", [1.5, True, [1, 2], torch.zeros(5), torch.zeros(5, dtype=torch.bool), *WRONG_SHAPES])
def test_positions_of_another_type_or_shape_are_refused(positions: object) -> None:
    geometry = GEOMETRIES["llama default"]
    x = keys(geometry)
    with pytest.raises(ConfigError, match="positions"):
        geometry.rotate(x, positions)
    with pytest.raises(ConfigError, match="delta"):
        geometry.shift(x, positions)


@pytest.mark.parametrize("x", [torch.zeros(2, 5, 16), torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 5, 16, dtype=torch.long)])
def test_keys_of_another_shape_or_type_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="x: expected"):
        GEOMETRIES["llama default"].shift(x, 1)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"inv_freq": torch.ones(4)}, "inv_freq"),
        ({"inv_freq": torch.ones(9, dtype=torch.float64)}, "inv_freq"),
        ({"layout": "pairs"}, "layout"),
        ({"attention_scaling": 0.0}, "attention_scaling"),
    ],
)
def test_a_geometry_that_makes_no_sense_is_refused(change: dict[str, object], argument: str) -> None:
    with pytest.raises(ConfigError, match=argument):
        dataclasses.replace(GEOMETRIES["llama default"], **change)


def test_cos_sin_gives_pure_rotations_in_the_asked_dtype() -> None:
    geometry = GEOMETRIES["llama yarn"]
    cos, sin = geometry.cos_sin(torch.tensor([[FAR, 3]]), dtype=torch.float64)
    assert cos.shape == (1, 2, 32)
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))
    assert geometry.cos_sin(FAR, dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    torch.testing.assert_close(geometry.cos_sin(FAR, dtype=torch.float64)[1], sin[0, 0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_config
def test_a_cuda_device_turns_as_the_cpu_does(name: str) -> None:
    geometry = GEOMETRIES[name]
    x = keys(geometry)
    delta = torch.tensor([[FAR], [-3]])
    torch.testing.assert_close(geometry.shift(x.cuda(), delta.cuda()).cpu(), geometry.shift(x, delta), rtol=0, atol=1e-6)
    torch.testing.assert_close(geometry.rotate(x.cuda(), FAR).cpu(), geometry.rotate(x, FAR), rtol=0, atol=1e-6)
