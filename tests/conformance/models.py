"""Tiny models of many families, built from configs with weights that make attention matter.

Every model has a twin with the same weights that no cache is ever built on, so that references are computed by transformers alone.
"""

import os
import weakref
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from hf_kvcaches.core.view import is_enabled

DEVICE = torch.device(os.environ.get("CONFORMANCE_DEVICE", "cpu"))
VOCABULARY = 96
WINDOW = 8  # shorter than every prompt, so that sliding layers really slide

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_ROTARY: dict[str, Any] = _COMMON | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GQA: dict[str, Any] = _ROTARY | {"num_key_value_heads": 2, "head_dim": 16}


def _configs() -> dict[str, PreTrainedConfig]:
    alternating = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    return {
        "llama": LlamaConfig(**_GQA),
        "llama_mha": LlamaConfig(**_GQA | {"num_key_value_heads": 4}),
        "llama_mqa": LlamaConfig(**_GQA | {"num_key_value_heads": 1}),
        "mistral": MistralConfig(**_GQA, sliding_window=None),
        "mistral_sliding": MistralConfig(**_GQA, sliding_window=WINDOW),
        "qwen2": Qwen2Config(**_GQA),
        "qwen2_mixed": Qwen2Config(**_GQA, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        "qwen3": Qwen3Config(**_GQA),
        # Eager is the implementation that applies Gemma 2's soft cap.
        "gemma2": Gemma2Config(**_GQA, **alternating, query_pre_attn_scalar=16, attn_logit_softcapping=5.0, attn_implementation="eager"),
        "gemma3": Gemma3TextConfig(**_GQA, **alternating, query_pre_attn_scalar=16),
        "phi3": Phi3Config(**_ROTARY, num_key_value_heads=2),
        "gpt_neox": GPTNeoXConfig(**_ROTARY, rotary_pct=0.5),
        "gpt2": GPT2Config(**_COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=256),
        "opt": OPTConfig(**_COMMON, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4),
    }


FAMILIES = tuple(_configs())

_origins: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, torch.dtype]] = weakref.WeakKeyDictionary()


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A new model of a family; the same weights each time."""
    config = _configs()[family]
    for name, value in changes.items():
        setattr(config, name, value)
    wanted = config._attn_implementation
    model = AutoModelForCausalLM.from_config(config, **({"attn_implementation": wanted} if wanted else {}))
    generator = torch.Generator().manual_seed(sum(family.encode()) + 4)
    # Gemma multiplies its embeddings by this, and they would drown what attention adds.
    embedding_scale = config.hidden_size**-0.5 if family.startswith("gemma") else 1.0
    for name, parameter in sorted(model.named_parameters()):
        _draw(name, parameter, generator, embedding_scale)
    model.generation_config = GenerationConfig(pad_token_id=0)
    model = model.to(device=DEVICE, dtype=dtype).eval()
    _origins[model] = (family, dtype)
    return model


@torch.no_grad()
def _draw(name: str, parameter: nn.Parameter, generator: torch.Generator, embedding_scale: float) -> None:
    """Weights large enough that the text decides what comes next; drawn at 0.02 all logits would nearly tie."""
    if parameter.ndim < 2:
        noise = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise)
    elif "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * embedding_scale)
    else:
        # GPT-2 keeps its matrices transposed; its larger side is not always the input, but near enough.
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5 / parameter.shape[-1] ** 0.5)


@cache
def tiny(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a family that all tests share."""
    return build(family, dtype)


@cache
def _twin(family: str, dtype: torch.dtype) -> PreTrainedModel:
    return build(family, dtype)


def family_of(model: PreTrainedModel) -> str:
    """The family that a model was built as."""
    return _origins[model][0]


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """The untouched model with the same weights."""
    twin = _twin(*_origins[model])
    assert not is_enabled(twin.config), "a cache was built on the reference model"
    return twin


@cache
def assistant_for(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """A drafting model that is right about some tokens and wrong about others: the same weights with noise on them.

    Its window is wider than any text here, because the drafter's own cache, which is not under test, fails past the window in some
    versions of transformers.
    """
    assistant = build(family, dtype, **({"sliding_window": 64} if getattr(tiny(family, dtype).config, "sliding_window", None) else {}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(assistant.named_parameters()):
            scale = 0.1 * float(parameter.float().std()) if parameter.numel() > 1 else 0.0
            parameter.add_((scale * torch.randn(parameter.shape, generator=generator)).to(parameter))
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant
