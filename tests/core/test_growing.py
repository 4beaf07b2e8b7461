"""A growing cache returns plain tensors, and every model computes with them as with those of `DynamicCache`."""

import torch
from transformers import DiffLlamaConfig, DynamicCache

from hf_kvcaches import GrowingCache
from tests import tiny


def decode(model, cache, steps: int = 3, **kwargs) -> torch.Tensor:
    text = tiny.ids(2, 9 + steps)
    with torch.no_grad():
        model(text[:, :9], past_key_values=cache)
        return torch.cat([model(text[:, 9 + i : 10 + i], past_key_values=cache, **kwargs).logits for i in range(steps)], dim=1)


def test_logits_are_those_of_a_dynamic_cache_to_the_bit():
    for model in (tiny.llama(), tiny.gemma2(), tiny.gpt2()):
        assert torch.equal(decode(model, GrowingCache(model)), decode(model, DynamicCache(config=model.config)))


def test_a_model_that_computes_with_the_cached_values_gets_the_same_logits():
    shape = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = tiny.build(DiffLlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0))
    assert torch.equal(decode(model, GrowingCache(model)), decode(model, DynamicCache()))
