"""Models that a cache can't answer for: the error comes before anything is stored, and says why and what to use."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache, GrowingCache, UnsupportedError
from tests import tiny
from tests.reference.policies import StreamingReference

_SIZES = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "intermediate_size": 32}
_DENSE = {"num_key_value_heads": 4, "first_k_dense_replace": 2}
FAMILIES = {
    "deepseek_v2": {**_LATENT, **_DENSE, "head_dim": 8},
    "deepseek_v3": {**_LATENT, **_DENSE},
    "falcon": {"alibi": False},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}
LATENT = [name for name in FAMILIES if name.startswith("deepseek")]


def build(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = FAMILIES[model_type] if model_type == "bloom" else {**_SIZES, **FAMILIES[model_type]}
    config = AutoConfig.for_model(model_type, **{**sizes, "vocab_size": tiny.VOCABULARY, "bos_token_id": 1, "eos_token_id": 2})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in LATENT])
def test_the_error_says_why_and_names_another_cache(model_type: str, positions: str) -> None:
    model = build(model_type)
    with pytest.raises(UnsupportedError, match=r"EquipCache needs.*AttentionInterface.*Use DynamicCache"):
        EquipCache(model, positions=positions)
    cache, own = GrowingCache(model), DynamicCache(config=model.config)
    with torch.no_grad():
        logits = [model(input_ids=tiny.ids(1, 9), past_key_values=past).logits for past in (cache, own)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("model_type", LATENT)
def test_latents_are_refused_by_a_cache_that_takes_none(model_type: str) -> None:
    with pytest.raises(UnsupportedError, match=r"Reference needs.*keys and values after they are in the cache.*Use DynamicCache"):
        StreamingReference(build(model_type), budget=16)


@pytest.mark.parametrize("model_type", LATENT)
def test_latents_are_refused_by_a_cache_that_was_built_with_a_config(model_type: str) -> None:
    model = build(model_type)
    with pytest.raises(UnsupportedError, match=r"latent.*positions='original'"):
        EquipCache(model.config)
    cache = EquipCache(model.config, positions="original")
    with pytest.raises(UnsupportedError, match="outside of transformers' AttentionInterface"), torch.no_grad():
        model(input_ids=tiny.ids(1, 9), past_key_values=cache)
    assert cache.seen == 0
