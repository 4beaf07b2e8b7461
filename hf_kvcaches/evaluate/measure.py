"""Measures of what a cache changes: divergence, perplexity, and answers whose text is known."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.past import CodedPast, PastCoding, require_rows
from hf_kvcaches.evaluate.verify import evaluating

# Logits of so many positions are compared at a time: a vocabulary may have 262k entries.
_POSITIONS = 64


def kl(full_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(full || other) of next-token distributions in nats, one number for each position.

    Args:
        full_logits: (..., vocabulary), those of the full cache.
        logits: Of the same shape.
    """
    if full_logits.shape != logits.shape:
        raise ConfigError.of("logits", f"the shape of full_logits, {tuple(full_logits.shape)}", tuple(logits.shape))
    full, other = full_logits.double().log_softmax(-1), logits.double().log_softmax(-1)
    probability = full.exp()
    # A token without any probability under the full cache adds nothing, whatever the other says.
    return torch.where(probability == 0, 0.0, probability * (full - other)).sum(-1).clamp(min=0)


def losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The negative log-probability of each target in nats.

    Args:
        logits: (..., vocabulary).
        targets: Token ids, (...).
    """
    return -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def perplexity(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """The exponential of the mean loss."""
    return math.exp(float(losses(logits, targets).mean()))


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


@torch.no_grad()
def read_rows(model: Any, input_ids: torch.Tensor, coding: PastCoding | None = None, prompt: int = 1) -> torch.Tensor:
    """The logits of all tokens, (batch, tokens, vocabulary), in one pass.

    Args:
        input_ids: (batch, tokens), without padding.
        coding: How the past is coded; None reads it exactly.
        prompt: First tokens that are read as a prompt, which attends exactly to itself.
    """
    ids = require_rows(input_ids, 1).to(model.device)
    with evaluating(model):
        cache = None if coding is None else CodedPast(model, coding, prompt)
        logits: torch.Tensor = model(input_ids=ids, **compat.cache_kwargs(model, cache)).logits
    return logits


def compare(full_logits: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor, prompt: int = 4) -> TextQuality:
    """What logits lose against those of the full cache, over the positions behind a prompt that have a successor.

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
        total += torch.stack([part.sum() for part in (kl(full, other), losses(other, targets), losses(full, targets))]).cpu()
    count = len(input_ids) * (last - prompt)
    return TextQuality(count, *(total / count).tolist())


@dataclass(frozen=True)
class Answer:
    """How a known continuation fares behind a cache.

    Args:
        log_probability: Of all of its tokens together, in nats.
        matches: Whether greedy decoding writes exactly these tokens.
        tokens: How many they are.
    """

    log_probability: float
    matches: bool
    tokens: int

    @property
    def loss(self) -> float:
        """The mean loss of a token in nats."""
        return -self.log_probability / self.tokens


@torch.no_grad()
def prefill(model: Any, cache: Cache, input_ids: Sequence[int]) -> Cache:
    """Reads a context into a cache, before anything else is known.

    Args:
        cache: Empty. One whose policy reads the context a second time (`compress`) does so here.
    """
    ids = torch.tensor([list(input_ids)], device=model.device)
    with evaluating(model):
        model(input_ids=ids, logits_to_keep=1, **compat.cache_kwargs(model, cache))
        if getattr(getattr(cache, "policy", None), "deferred", False):
            cache.compress(model, input_ids=ids)
    return cache


@torch.no_grad()
def answers(model: Any, cache: Cache, questions: Sequence[tuple[Sequence[int], Sequence[int]]], step: int | None = None) -> list[Answer]:
    """How the answers to questions fare behind a context, each question asked on a copy of the cache.

    A greedy continuation equals the answer exactly if each answer token is the most likely one behind those before it, so the answer is
    fed along with its question.

    Args:
        cache: What `prefill` returned; unchanged afterwards.
        questions: Token ids of each question, which may be empty only behind a context whose last token is fed with it, and of its answer.
        step: Tokens per call; None feeds question and answer in one.
    """
    found = []
    with evaluating(model):
        for question, answer in questions:
            if not question or not answer:
                raise ConfigError.of("questions", "at least one token in each question and answer", (len(question), len(answer)))
            ids, copied = torch.tensor([[*question, *answer[:-1]]], device=model.device), copy.deepcopy(cache)
            blocks = [model(input_ids=part, **compat.cache_kwargs(model, copied)).logits for part in ids.split(step or ids.shape[1], 1)]
            logits, targets = torch.cat(blocks, 1)[0, -len(answer) :], torch.tensor(list(answer), device=model.device)
            found.append(Answer(-float(losses(logits, targets).sum()), bool((logits.argmax(-1) == targets).all()), len(answer)))
    return found
