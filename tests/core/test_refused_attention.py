"""Models that keep latents, which a cache can't answer for: the error comes before anything is stored, and says why and what to use."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_kvcaches import EquipCache, UnsupportedError
from tests import tiny
from tests.reference.policies import StreamingReference

_SIZES = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "intermediate_size": 32}
_DENSE = {"num_key_value_heads": 4, "first_k_dense_replace": 2}
FAMILIES = {
    "deepseek_v2": {**_LATENT, **_DENSE, "head_dim": 8},
    "deepseek_v3": {**_LATENT, **_DENSE},
}


def build(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **_SIZES, **FAMILIES[model_type], bos_token_id=1, eos_token_id=2)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_latents_are_refused_by_a_cache_that_takes_none(model_type: str) -> None:
    with pytest.raises(UnsupportedError, match=r"Reference needs.*keys and values after they are in the cache.*Use DynamicCache"):
        StreamingReference(build(model_type), budget=16)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_latents_are_refused_by_a_cache_that_was_built_with_a_config(model_type: str) -> None:
    model = build(model_type)
    with pytest.raises(UnsupportedError, match=r"latent.*positions='original'"):
        EquipCache(model.config)
    cache = EquipCache(model.config, positions="original")
    with pytest.raises(UnsupportedError, match="outside of transformers' AttentionInterface"), torch.no_grad():
        model(input_ids=tiny.ids(1, 9), past_key_values=cache)
    assert cache.seen == 0
