"""Measures of what a cache changes: divergence, agreement, the loss of a text, bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.report import measured_bytes
from hf_kvcaches.errors import ConfigError

# Logits of so many positions are compared at a time: a vocabulary may have 262k entries.
_POSITIONS = 64


def divergence(full_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return KL(full || other) of next-token distributions in nats, one number for each position; not-a-number counts as infinite.

    Args:
        full_logits: (..., vocabulary), those of the full cache.
        logits: Of the same shape.
    """
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
    """Return the negative log-probability of each target in nats.

    Args:
        logits: (..., vocabulary).
        targets: Token ids, (...).
    """
    return -_wide(logits).log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)


@dataclass(frozen=True)
class TextQuality:
    """What a cache loses over a text.

    Args:
        tokens: How many distributions were compared.
        kl: The mean KL(full || cache) in nats.
        loss: The mean loss with the cache in nats.
        full_loss: That with the full cache.
    """

    tokens: int
    kl: float
    loss: float
    full_loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def change(self) -> float:
        """By which share the perplexity is higher than that of the full cache."""
        return math.expm1(self.loss - self.full_loss)


def compare(full_logits: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor, prompt: int = 4) -> TextQuality:
    """Return what logits lose against those of the full cache, over the positions behind a prompt that have a successor.

    Args:
        full_logits: (batch, tokens, vocabulary); and `logits`.
        input_ids: (batch, tokens).
        prompt: First tokens of each row, which are not compared.
    """
    require_rows(input_ids, prompt + 2)
    last, total = input_ids.shape[1] - 1, torch.zeros(3, dtype=torch.float64)
    for start in range(prompt, last, _POSITIONS):
        span = slice(start, min(start + _POSITIONS, last))
        targets = input_ids[:, span.start + 1 : span.stop + 1]
        full, other = full_logits[:, span], logits[:, span]
        total += torch.stack([part.sum() for part in (divergence(full, other), losses(other, targets), losses(full, targets))]).cpu()
    count = len(input_ids) * (last - prompt)
    return TextQuality(count, *(total / count).tolist())


def cache_bytes(cache: Cache) -> int:
    """Return the bytes that a cache has allocated: its own account if it keeps one, else every tensor storage that it holds, once.

    Args:
        cache: Any transformers cache. Spare room in a buffer counts, because it is allocated.
    """
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


def require_rows(input_ids: object, least: int) -> torch.Tensor:
    """Refuse anything but rows of token ids.

    Args:
        least: Tokens that a row needs.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or not len(input_ids) or input_ids.shape[1] < least:
        got = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ConfigError.of("input_ids", f"token ids (batch, tokens) of at least {least} tokens", got)
    return input_ids
