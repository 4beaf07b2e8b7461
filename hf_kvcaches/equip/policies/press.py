"""Presses of kvpress as policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_kvcaches.equip.policies.base import Policy
from hf_kvcaches.equip.policies.tokens import Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError, is_number


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
