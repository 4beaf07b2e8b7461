"""Which attention a growing cache uses for a single new token, and that every one gives the same."""

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import GrowingCache, disable
from hf_kvcaches.core import growing
from tests import tiny


@pytest.fixture
def kernel_calls(monkeypatch):
    calls = []
    original = growing.decode_attention
    monkeypatch.setattr(growing, "decode_attention", lambda *arguments: calls.append(1) or original(*arguments))
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
