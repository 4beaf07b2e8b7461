"""What a layer is built with."""

from __future__ import annotations

from dataclasses import dataclass

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.budgets import Limit, check_budget, slots_for
from hf_kvcaches.equip.policies import Policy
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.launch import Backend


@dataclass(frozen=True)
class EquipSettings:
    """What the user asked of one layer.

    Args:
        budget: Tokens that the prompt is pruned to.
        sinks: First tokens of each row that always stay.
        recent: Newest tokens that always stay; None for the policy's own number.
        geometry: How the model rotates the layer's keys.
    """

    budget: int | float
    sinks: int
    recent: int | None
    policy: Policy
    geometry: RotaryGeometry
    backend: Backend = "auto"
    decode_budget: int | float | None = None
    """Tokens kept while decoding; None for as many as of the prompt."""
    question_start: int | None = None
    """Where the first prompt's question begins: what stands before is pruned as if it had come alone."""

    head_budgets: str | tuple[bool, ...] | None = None
    """How the slots are shared among heads, or which heads keep all tokens; None: each has as many slots."""

    def question_in(self, tokens: int) -> int:
        """How many of a first prompt's tokens stand before its question."""
        if self.question_start is None:
            return tokens
        start = self.question_start + (tokens if self.question_start < 0 else 0)
        if not 0 < start < tokens:
            what = f"the index of one of the prompt's {tokens} tokens, and not of the first"
            raise ConfigError.of("question_start", what, self.question_start)
        return start

    def limit_of(self, prompt: int, beside: int = 0) -> Limit:
        """What a prompt is pruned to.

        Args:
            prompt: Its tokens, in the longest row.
            beside: Tokens that stay besides, on top of a fraction.
        """
        budget, wanted, sinks = self.budget, self.recent, self.sinks
        slots = slots_for(budget, prompt) + (beside if isinstance(budget, float) else 0)
        recent = self.policy.recent(slots, sinks) if wanted is None else wanted
        check_budget(slots, sinks, max(recent, beside))
        return Limit(slots, recent)
