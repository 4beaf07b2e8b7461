"""What an `EquipCache` says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from hf_kvcaches.core.report import CacheReport, summarise


@dataclass(frozen=True)
class EquipReport(CacheReport):
    """What an `EquipCache` holds, and how many tokens it may keep.

    Args:
        policy: The name of the policy.
        budget: Of each layer that is pruned: tokens, or before the prompt a share of it.
        spread: How many tokens the head with the fewest and the one with the most keep.
    """

    policy: str = ""
    budget: tuple[int | float, ...] = ()
    spread: tuple[int, int] = (0, 0)

    def _shown(self, name: str) -> str:
        if name == "spread":
            return "{} to {} tokens a head".format(*self.spread)
        return summarise(self.budget) if name == "budget" else super()._shown(name)
