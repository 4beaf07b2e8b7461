"""Presses of kvpress as policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_kvcaches.equip.policies.base import Policy, put_score
from hf_kvcaches.equip.tokens import Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class PressPolicy(Policy):
    """Keeps what a press of kvpress gives the highest scores: any object with its `score`.

    **Departs from kvpress**: sinks and recent tokens stay whatever the press says. Presses that read the weights of attention
    (`attentions`), or that choose in another way than by `score`, are not served. Tokens that come singly stay until the next block.

    Args:
        press: Has `score(module, hidden_states, keys, values, attentions, kwargs)`, which returns (batch, kv_heads, tokens).
    """

    name = "press"
    reads_inputs = True
    press: Any = None

    def __post_init__(self) -> None:
        if not callable(getattr(self.press, "score", None)):
            what = "an object with score(module, hidden_states, keys, values, attentions, kwargs), as the presses of kvpress"
            raise ConfigError.of("press", what, self.press)

    def score(self, tokens: Tokens) -> torch.Tensor:
        if tokens.module is None or tokens.inputs is None:
            raise UnsupportedError(
                "policy: a press is shown what the model's attention reads, and no pass reads it now. Prune a prompt that the model "
                "runs, or use a policy of this package."
            )
        inputs = dict(tokens.inputs)
        scores = self.press.score(tokens.module, inputs.pop("hidden_states"), tokens.keys, tokens.values, None, inputs)
        if not isinstance(scores, torch.Tensor):
            raise ConfigError.of(f"{type(self.press).__name__}.score", "a tensor", scores)
        return scores

    def rescore(self, scores: torch.Tensor, tokens: Tokens, slots: torch.Tensor) -> torch.Tensor:
        return put_score(scores, slots, torch.inf)

    def settings(self) -> dict[str, Any]:
        return {"policy": f"press of {type(self.press).__module__}.{type(self.press).__qualname__}"}
