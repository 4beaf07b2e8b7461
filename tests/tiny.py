"""Tiny models from configs, for tests that need a real model and no particular one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import Gemma2Config, GPT2Config, Lfm2Config, LlamaConfig, PreTrainedModel
from transformers.models.auto import AutoModelForCausalLM

VOCABULARY = 96


def build(config, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, spread wide enough that its logits differ."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def observing(hook: Callable[..., object]) -> Callable[..., object]:
    """A hook that changes nothing, marked as such, so that caches go on sharing what they compute."""
    hook.only_observes = True
    return hook


_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def llama(seed: int = 0, **changes) -> PreTrainedModel:
    """Grouped heads and four layers, unless told otherwise."""
    return build(LlamaConfig(**{**_SHAPE, **changes}), seed)


def gemma2(seed: int = 0, **changes) -> PreTrainedModel:
    """Alternating sliding and full layers, soft-capped attention, scaled embeddings."""
    return build(Gemma2Config(**{**_SHAPE, "head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 5.0, **changes}), seed)


def gpt2(seed: int = 0) -> PreTrainedModel:
    """Learned positions, no grouped heads."""
    return build(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=256, initializer_range=0.3), seed)


def lfm2() -> PreTrainedModel:
    """Convolutions around one layer of attention."""
    layers = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    return build(Lfm2Config(**{**_SHAPE, **layers}))


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
