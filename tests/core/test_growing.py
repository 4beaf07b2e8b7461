"""Which attention a growing cache uses for a single new token, and that every one gives the same."""

import copy
import pickle

import pytest
import torch
from transformers import DiffLlamaConfig, DynamicCache

from hf_kvcaches import GrowingCache, disable
from hf_kvcaches.core import growing
from tests import tiny


@pytest.fixture
def kernel_calls(monkeypatch):
    calls = []
    monkeypatch.setattr(GrowingCache, "kernel_from", 0)
    original = growing.slot_attention
    monkeypatch.setattr(growing, "slot_attention", lambda *arguments, **options: calls.append(1) or original(*arguments, **options))
    return calls


def decode(model, cache, steps: int = 3, **kwargs) -> torch.Tensor:
    text = tiny.ids(2, 9 + steps)
    with torch.no_grad():
        model(text[:, :9], past_key_values=cache)
        return torch.cat([model(text[:, 9 + i : 10 + i], past_key_values=cache, **kwargs).logits for i in range(steps)], dim=1)


def test_single_tokens_in_float32_go_through_the_kernel(kernel_calls):
    model = tiny.llama()
    expected = decode(model, DynamicCache())
    torch.testing.assert_close(decode(model, GrowingCache(model)), expected, atol=1e-4, rtol=1e-4)
    assert len(kernel_calls) == 3 * model.config.num_hidden_layers


@pytest.mark.parametrize("change", ["eager", "half", "config", "disabled", "grad"])
def test_whatever_the_kernel_is_not_made_for_takes_the_previous_attention_to_the_bit(kernel_calls, change):
    model = tiny.llama()
    if change == "eager":
        model.set_attn_implementation("eager")
    if change == "half":
        model = model.bfloat16()
    expected = decode(model, DynamicCache())
    cache = GrowingCache(model.config if change == "config" else model)
    if change == "disabled":
        disable(model)
    if change == "grad":
        text = tiny.ids(2, 12)
        model(text[:, :11], past_key_values=cache)
        assert model(text[:, 11:], past_key_values=cache).logits.requires_grad
    else:
        assert torch.equal(decode(model, cache), expected)
    assert kernel_calls == []


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_of_ones_own_is_obeyed(kernel_calls, additive):
    model = tiny.llama()
    mask = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    mask[0, ..., 2:5] = False
    given = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if additive else mask
    expected = decode(model, DynamicCache(), steps=1, attention_mask=given)
    unmasked = decode(model, DynamicCache(), steps=1)
    got = decode(model, GrowingCache(model), steps=1, attention_mask=given)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got[0], unmasked[0], atol=1e-3)
    assert bool(kernel_calls) is not additive


def test_a_left_padded_batch_fed_token_by_token_stays_a_number():
    model, twin = tiny.llama(), tiny.llama()
    text, mask = tiny.ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "prefill_chunk_size": 1}
    options |= {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
    expected = twin.generate(text, past_key_values=DynamicCache(), **options)
    got = model.generate(text, past_key_values=GrowingCache(model), **options)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)


def unpickled_and_disabled(model):
    cache = pickle.loads(pickle.dumps(GrowingCache(model)))
    disable(model)
    return model, cache


def of_another_model(model):
    return tiny.llama(), GrowingCache(model)


def of_a_copy_with_another_attention(model):
    cache, other = GrowingCache(model), copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other, cache


@pytest.mark.parametrize("arrange", [unpickled_and_disabled, of_another_model, of_a_copy_with_another_attention])
def test_a_model_that_does_not_ask_our_attention_gets_the_same_logits(kernel_calls, arrange):
    expected = decode(tiny.llama(), DynamicCache())
    model, cache = arrange(tiny.llama())
    torch.testing.assert_close(decode(model, cache), expected, atol=1e-4, rtol=1e-4)
    assert kernel_calls == []


def test_a_model_that_computes_with_the_cached_values_gets_the_same_logits(kernel_calls):
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = DiffLlamaConfig(**shape, num_key_value_heads=2, initializer_range=0.3)
    expected = decode(tiny.build(config), DynamicCache())
    model = tiny.build(config)
    torch.testing.assert_close(decode(model, GrowingCache(model)), expected, atol=1e-4, rtol=1e-4)
    assert kernel_calls == []
