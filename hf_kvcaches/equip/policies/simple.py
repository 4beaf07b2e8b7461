"""Policies that score by age (StreamingLLM), keys (KeyDiff) or the attention that was paid (H2O, TOVA, SnapKV); presses of kvpress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from hf_kvcaches.equip.policies.base import Policy, count
from hf_kvcaches.equip.policies.tokens import Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError, is_number


@dataclass(frozen=True)
class StreamingPolicy(Policy, built_in=True):
    """Keeps the sinks and the newest tokens.

    StreamingLLM (Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453): the first tokens of a text take the
    attention that no other token needs, and a model without them fails. With them and a sliding window it reads a text of any length.

    **Departs from the paper**: in nothing. The paper's positions within the cache are `positions="compact"` of the cache.
    """

    name = "streaming"
    interval = None
    order_only = True

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, budget - sinks)

    def score(self, tokens: Tokens) -> torch.Tensor:
        # Counted from the end, because float32 holds integers up to 2^24 only.
        return (tokens.positions - tokens.count).float()


@dataclass(frozen=True)
class KeyDiffPolicy(Policy, built_in=True):
    """Keeps the tokens with the keys least similar to the mean direction of all keys.

    KeyDiff (Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference, arXiv 2504.15364): similar keys can replace each
    other. No attention is needed, and the score does not depend on the question.

    **Departs from the paper**: prompts are scored as a whole and not in blocks, decoded tokens `interval` at a time.

    Args:
        interval: Decode steps between two scorings.
    """

    name = "keydiff"
    interval: int = count(64, kw_only=True)

    def score(self, tokens: Tokens) -> torch.Tensor:
        keys = functional.normalize(tokens.keys.detach().float(), dim=-1)
        anchor = (keys * tokens.real[..., None]).sum(2, keepdim=True)
        return -functional.cosine_similarity(keys, anchor, dim=-1)


@dataclass(frozen=True)
class H2OPolicy(Policy, built_in=True):
    """Keeps the tokens that received most attention from all queries since they came.

    H2O (Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, arXiv 2306.14048): the running sum of attention
    identifies the few tokens that get most of it. Half of the budget holds the newest tokens.

    **Departs from the paper**: sinks stay, a token is evicted before the new query attends, and heads that share keys are averaged.
    """

    name = "h2o"
    interval = None
    observes = None
    first_score = 0.0
    comparable = True

    def recent(self, budget: int, sinks: int) -> int:
        return max(1, min(budget // 2, budget - sinks))

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.observed

    def watch(self, scores: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor) -> None:
        scores.add_(weights)


@dataclass(frozen=True)
class TOVAPolicy(Policy, built_in=True):
    """Keeps the tokens that the last query attends to most, the same for all heads of a layer.

    TOVA (Transformers are Multi-State RNNs, arXiv 2401.06104) evicts the token with the lowest attention of the current query.

    **Departs from the paper**: a token is evicted before the new query attends; sinks and the newest token stay.
    """

    name = "tova"
    interval = None
    observes = 1
    by_head = False
    asks_all_heads = True

    def recent(self, budget: int, sinks: int) -> int:
        return 1

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.of_all_heads(tokens.observed).mean(1, keepdim=True)

    def watch(self, scores: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor) -> None:
        scores.copy_(torch.where(scores.isinf(), scores, weights.mean(1, keepdim=True)))


@dataclass(frozen=True)
class SnapKVPolicy(Policy, built_in=True):
    """Keeps the tokens that the last `window` queries attend to, together with their neighbours.

    SnapKV (LLM Knows What You are Looking for Before Generation, arXiv 2404.14469): the end of a prompt already shows which spans of it
    the answer will need. Prune with the question in the prompt: without it, a fact that nobody has asked for yet is lost.

    **Departs from the paper**: pools by the mean and averages heads that share keys, as kvpress does; sinks stay; heads and layers share
    their budgets; tokens are evicted while decoding too, and observed again after each `window` tokens.

    Args:
        window: Queries that observe; as many of the newest tokens always stay.
        kernel_size: Neighbours that are pooled; odd.
    """

    name = "snapkv"
    comparable = True
    head_budgets = "global"
    window: int = count(64)
    kernel_size: int = count(5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel_size % 2 == 0:
            raise ConfigError.of("kernel_size", "an odd number, so that neighbours lie on both sides of a token", self.kernel_size)
        object.__setattr__(self, "observes", self.window)
        object.__setattr__(self, "interval", self.window)

    def recent(self, budget: int, sinks: int) -> int:
        return self.window

    def score(self, tokens: Tokens) -> torch.Tensor:
        order = tokens.positions.argsort(-1).expand_as(tokens.observed)
        # Empty slots sort first, with zeros, like padding of the pool. Sums rank tokens as means do.
        received = torch.where(tokens.real, tokens.observed, 0).gather(-1, order)
        scores = torch.full_like(received, torch.inf)
        if (earlier := received.shape[-1] - self.window) > 0:
            scores[..., :earlier] = functional.avg_pool1d(received[..., :earlier], self.kernel_size, 1, self.kernel_size // 2)
        return torch.empty_like(scores).scatter_(-1, order, scores)


@dataclass(frozen=True)
class PressPolicy(Policy):
    """Keeps the tokens with the highest scores of a press of kvpress: any object with its `score`.

    **Departs from kvpress**: sinks and recent tokens stay, and decoded ones until the next block. Presses that read attention weights
    (`attentions`), or select in another way than by `score`, are not supported.

    Args:
        press: Has `score(module, hidden_states, keys, values, attentions, kwargs)`, which returns (batch, kv_heads, tokens).
    """

    name = "press"
    interval = None
    reads_inputs = True
    mixes_heads = True
    press: Any = None

    def __post_init__(self) -> None:
        if not callable(getattr(self.press, "score", None)):
            raise ConfigError.of("press", "an object with score(module, hidden_states, keys, values, attentions, kwargs)", self.press)

    def share_left(self) -> float:
        """The budget that the press's `compression_ratio` leaves."""
        ratio: Any = getattr(self.press, "compression_ratio", None)
        if not is_number(ratio) or not 0 <= ratio < 1:
            raise ConfigError.of("budget", "a budget, where the press has no compression_ratio from 0 to 1", ratio)
        return 1.0 - float(ratio)

    def recent(self, budget: int, sinks: int) -> int:
        return 1

    def score(self, tokens: Tokens) -> torch.Tensor:
        if tokens.module is None or tokens.inputs is None:
            raise UnsupportedError("policy: a press reads the inputs of the model's attention, and no model runs now. Use another policy.")
        inputs = dict(tokens.inputs)
        scores = self.press.score(tokens.module, inputs.pop("hidden_states"), tokens.keys, tokens.values, None, inputs)
        if not isinstance(scores, torch.Tensor):
            raise ConfigError.of(f"{type(self.press).__name__}.score", "a tensor", scores)
        return scores

    def settings(self) -> dict[str, Any]:
        return {"policy": f"press of {type(self.press).__module__}.{type(self.press).__qualname__}"}
