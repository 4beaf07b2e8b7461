"""Measures of what a cache changes: divergence, agreement, the loss of a text, bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import Cache

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.report import measured_bytes
from hf_kvcaches.errors import ConfigError


def divergence(full_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return KL(full || other) of next-token distributions in nats, one number for each position; not-a-number counts as infinite."""
    if full_logits.shape != logits.shape:
        raise ConfigError.of("logits", f"the shape of full_logits, {tuple(full_logits.shape)}", tuple(logits.shape))
    full, other = _wide(full_logits).log_softmax(-1), _wide(logits).log_softmax(-1)
    probability = full.exp()
    # A token without any probability under the full cache adds nothing, whatever the other says.
    terms = torch.where(probability == 0, 0.0, probability * (full - other))
    return terms.sum(-1).clamp(min=0).nan_to_num(nan=torch.inf, posinf=torch.inf)


def agreement(full_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return whether the most likely token is the same, for each position."""
    return full_logits.argmax(-1) == logits.argmax(-1)


def losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the negative log-probability in nats of each target, (...), by logits of shape (..., vocabulary)."""
    return -_wide(logits).log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)


def cache_bytes(cache: Cache) -> int:
    """Return the bytes that a cache has allocated: its own account if it keeps one, else every tensor storage that it holds, once."""
    return cache.report().bytes if isinstance(cache, KVCache) else measured_bytes(_tensors(cache))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        # A wrapper (a quantised tensor, say), whose own storage is only a pretence.
        yield from _tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Cache):
        yield from _tensors([vars(value), *(vars(layer) for layer in value.layers)])
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
