"""Prompts as callers pass them: texts or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvcaches.errors import ConfigError

Prompt = str | Sequence[int] | torch.Tensor


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, from one or several."""
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__len__"):
        raise ConfigError.of("prompts", "texts or rows of token ids", type(prompts).__name__, "Of a tokenizer's output, add input_ids.")
    single = isinstance(prompts, str) or (isinstance(prompts, torch.Tensor) and prompts.ndim == 1)
    return [prompts] if single or (len(prompts) and isinstance(prompts[0], int)) else list(prompts)  # type: ignore[list-item,arg-type]


def token_ids(prompt: Prompt, model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Return a prompt's token ids, those of a text with special tokens as the tokenizer has them."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    try:
        ids = [index(token) for token in (prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt)]
    except TypeError as error:
        raise ConfigError.of("prompts", "texts or rows of token ids", type(prompt).__name__) from error
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", 1 << 31)
    if not all(0 <= token < vocabulary for token in ids):
        raise ConfigError.of("prompts", f"token ids from 0 to {vocabulary - 1}", f"{min(ids)} to {max(ids)}")
    return ids
