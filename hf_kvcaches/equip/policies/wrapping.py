"""Policies made of another policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_kvcaches.equip.policies.base import PeriodicPolicy, policy_from_settings, resolve_policy
from hf_kvcaches.equip.tokens import Tokens
from hf_kvcaches.errors import UnsupportedError


@dataclass(frozen=True)
class WrappingPolicy(PeriodicPolicy):
    """Changes the meaning of another policy's scores, and gets the inputs of that policy.

    Args:
        inner: The other policy, or its name.
    """

    inner: Any = "keydiff"

    def __post_init__(self) -> None:
        super().__post_init__()
        policy = policy_from_settings(self.inner) if isinstance(self.inner, dict) else resolve_policy(self.inner)
        if policy.deferred or policy.order_only:
            raise UnsupportedError(f"inner: {policy.name!r} gives no scores that {type(self).__name__} could change. Use another policy.")
        object.__setattr__(self, "inner", policy)
        for name in ("observes", "queries", "sees_block", "directions", "reads_inputs", "mixes_heads", "always_recent", "by_head"):
            object.__setattr__(self, name, getattr(policy, name))

    def recent(self, budget: int, sinks: int) -> int:
        return int(self.inner.recent(budget, sinks))

    def inner_score(self, tokens: Tokens) -> torch.Tensor:
        """The other policy's scores, (batch, kv_heads, slots)."""
        scores: torch.Tensor = self.inner.checked_score(tokens)
        return scores.expand(tokens.keys.shape[:3])
