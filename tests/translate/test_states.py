"""What is read of a model's layers, against its own cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3NextConfig

from hf_kvcaches.core.decoder import attention_module, decoder_layers
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.translate.states import PromptTokens
from hf_kvcaches.translate.states import read as read_states
from hf_kvcaches.translate.translator import in_evaluation
from tests import tiny
from tests.translate.pairs import MODELS, made_by, traces_of
from tests.warmstart.warm import left_padded

FAMILIES = sorted(MODELS)
LENGTHS = (9, 13, 4)


def read(model, tokens: PromptTokens, **options):
    found = []
    read_states(model, tokens, lambda index, state: found.append((index, state)), **options)
    return found


def close(found, expected, dtype=torch.float32) -> None:
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance * float(expected.float().abs().max()))


@pytest.mark.parametrize(("family", "dtype"), [*((family, torch.float32) for family in FAMILIES), ("qwen3", torch.bfloat16)])
def test_states_of_a_padded_batch_are_those_of_the_models_own_cache_row_by_row(family, dtype):
    model = MODELS[family]().to(dtype)
    ids, mask = left_padded(*(tiny.ids(1, length, seed=length) for length in LENGTHS))
    expected = made_by(model, ids, mask)
    states = read(model, PromptTokens.of(ids, mask), hidden=range(len(expected)))
    assert [index for index, _ in states] == list(range(len(expected)))
    for (_, state), made in zip(states, expected, strict=True):
        keys, values = (side.transpose(0, 1).flatten(1) for side in state.sides())
        for found, whole in ((keys, made.keys), (values, made.values), (state.hidden, made.hidden)):
            assert found.dtype == dtype
            close(found, torch.cat([row[-length:] for row, length in zip(whole, LENGTHS, strict=True)]), dtype)
        assert state.shape[0] == (getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_ends_with_the_last_layer_that_is_wanted_before_its_attention(family):
    model = MODELS[family]()
    attended, entered = [], []
    for index, layer in enumerate(decoder_layers(model)[2]):
        layer.register_forward_pre_hook(lambda *_, index=index: entered.append(index))
        attention_module(layer).register_forward_hook(lambda *_, index=index: attended.append(index))
    states = read(model, PromptTokens.of(tiny.ids(2, 7)), last=1, hidden=(0, 1, 2))
    assert [index for index, _ in states] == entered == [0, 1]
    assert attended == [0]
    assert all(len(state.hidden) == 14 for _, state in states)


@pytest.mark.parametrize("last", [None, 3])
def test_nothing_is_left_behind_on_a_model(last):
    model, tokens = MODELS["llama"]().train(), PromptTokens.of(tiny.ids(1, 6))
    before = traces_of(model)
    read_states(model, tokens, lambda *_: None, hidden=(0, 2), last=last)
    assert traces_of(model) == before
    with pytest.raises(ZeroDivisionError):
        read_states(model, tokens, lambda index, *_: 1 / (2 - index), hidden=(0, 2), last=last)
    assert traces_of(model) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_training_mode_is_read_through_a_twin_in_evaluation_mode(family):
    model = MODELS[family]()
    expected = read(model, PromptTokens.of(tiny.ids(1, 9)))
    assert in_evaluation(model) is model
    model.train()
    before, twin = traces_of(model), in_evaluation(model)
    assert not any(module.training for module in twin.modules())
    assert [id(weight) for weight in twin.parameters()] == [id(weight) for weight in model.parameters()]
    for (_, one), (_, other) in zip(read(twin, PromptTokens.of(tiny.ids(1, 9))), expected, strict=True):
        assert torch.equal(one.states, other.states)
    assert traces_of(model) == before


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_tokens_keep_the_real_ids_and_count_positions_from_each_rows_first(lengths):
    ids, mask = left_padded(*(tiny.ids(1, length, seed=length) for length in lengths))
    tokens = PromptTokens.of(ids.tolist(), mask.tolist())
    assert [row.tolist() for row in tokens.rows()] == [row[-length:].tolist() for row, length in zip(ids, lengths, strict=True)]
    _, positions, mask = tokens.inputs()
    for row, length in enumerate(lengths):
        assert positions[row, -length:].tolist() == list(range(length))
        assert mask is None or int(mask[row].sum()) == length
    assert (mask is None) == (len(set(lengths)) == 1)


@pytest.mark.parametrize(
    "mask", [[[1, 1, 0]], [[1, 0, 1]], [[0, 0, 0]], [[1, 1]], [[[1, 1, 1]]], [[1, 1, 1], [1, 1, 1]], [[0.0, -9.0, -9.0]], [[2, 1, 1]], "no"]
)
def test_padding_on_the_right_holes_and_other_masks_are_refused(mask):
    with pytest.raises(ConfigError, match="attention_mask"):
        PromptTokens.of([[5, 6, 7]], mask)


WRONG = [[[0.5, 1.0]], [[True, False]], [], [[]], torch.zeros(0, 4).long(), torch.zeros(1, 2, 3).long(), [[1, 2], [3]], "no"]


@pytest.mark.parametrize("ids", WRONG, ids=range(8))
def test_what_is_no_batch_of_token_ids_is_refused(ids):
    with pytest.raises(ConfigError, match="input_ids"):
        PromptTokens.of(ids)


def dynamic():
    parameters = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    return tiny.build(LlamaConfig(**{**tiny._SHAPE, "rope_parameters": parameters}))


def linear():
    changes = {"head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return tiny.build(Qwen3NextConfig(**{**tiny._SHAPE, **changes, **experts}))


@pytest.mark.parametrize("make", [dynamic, linear])
def test_models_without_keys_that_could_be_translated_are_refused(make):
    model = make()
    with pytest.raises(UnsupportedError, match=r"^model: "):
        read(model, PromptTokens.of(tiny.ids(1, 5)))
