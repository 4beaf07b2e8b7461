"""Configs with rotary embeddings of many kinds."""

from transformers import (
    CohereConfig,
    Gemma3TextConfig,
    GlmConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm import modeling_glm
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.phi import modeling_phi
from transformers.models.qwen3 import modeling_qwen3

from tests import tiny

TWO_TYPES = ["sliding_attention", "full_attention"]
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def llama(head_dim: int = 16, **rope: object) -> LlamaConfig:
    return LlamaConfig(
        **SIZES, intermediate_size=64, head_dim=head_dim, max_position_embeddings=4096, rope_parameters={"rope_theta": 1e4, **rope}
    )


CONFIGS: dict[str, tuple[PreTrainedConfig, object, str | None]] = {
    "llama default": (llama(rope_type="default"), modeling_llama, None),
    "llama linear": (llama(rope_type="linear", factor=4.0), modeling_llama, None),
    "llama llama3": (llama(64, **LLAMA3, original_max_position_embeddings=512), modeling_llama, None),
    "llama yarn": (llama(64, rope_type="yarn", factor=8.0, original_max_position_embeddings=512), modeling_llama, None),
    "qwen3": (Qwen3Config(**SIZES, head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 1e6}), modeling_qwen3, None),
    "gpt_neox partial": (GPTNeoXConfig(**SIZES, rotary_pct=0.25), modeling_gpt_neox, None),
    "phi partial": (PhiConfig(**SIZES, partial_rotary_factor=0.5), modeling_phi, None),
    "cohere interleaved": (CohereConfig(**SIZES), modeling_cohere, None),
    "glm interleaved partial": (GlmConfig(**SIZES, head_dim=32), modeling_glm, None),
    "gemma3 sliding": (Gemma3TextConfig(**SIZES, head_dim=32, layer_types=TWO_TYPES), modeling_gemma3, "sliding_attention"),
    "gemma3 full": (Gemma3TextConfig(**SIZES, head_dim=32, layer_types=TWO_TYPES), modeling_gemma3, "full_attention"),
}

# Of models whose frequencies depend on the length of the text.
LIMIT = 32
SHORT = SIZES | {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
SHORT |= {"num_key_value_heads": 1, "pad_token_id": 0, "initializer_range": 0.3}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": LIMIT,
}


def phi3_config(**changes) -> Phi3Config:
    rope = {**LONGROPE, "partial_rotary_factor": 0.5}
    return Phi3Config(
        **{**SHORT, "max_position_embeddings": 4 * LIMIT, "original_max_position_embeddings": LIMIT, "rope_parameters": rope, **changes}
    )
