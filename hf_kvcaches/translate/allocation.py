"""How a budget is shared out among heads, layers and sides."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from hf_kvcaches.errors import ConfigError, whole_number


def allocate(
    losses: Sequence[torch.Tensor], budget: float, *, cost: float | Sequence[float], multiple_of: int = 1, minimum: int = 1
) -> list[int]:
    """Shares a budget out among heads so that little energy remains outside of their ranks.

    Steps of `multiple_of` are bought, the one with the most energy for its cost first. Energies fall, so no head has a better step behind
    a worse one: where all steps cost the same, nothing can be better. Where costs differ, the best choice of what to do with the rest of
    the budget is a hard problem, and this is at most the gain of one step away from it. Steps that gain nothing are not bought.

    Args:
        losses: For each head (and for its keys and values) the energies, the largest first, 1-D; weighted so that they can be compared.
        budget: What the sum of rank times cost may reach.
        cost: Of one rank; one number for all, or one for each of `losses`.
    """
    costs = [float(each) for each in cost] if isinstance(cost, Sequence) else [float(cost)] * len(losses)
    _check_allocation(losses, costs, multiple_of, minimum)
    sums = [[0.0, *each.double().clamp_min(0.0).cumsum(0).tolist()] for each in losses]
    ranks = [min(-(-minimum // multiple_of) * multiple_of, len(each) - 1) for each in sums]
    spent = sum(rank * each for rank, each in zip(ranks, costs, strict=True))
    if spent > budget:
        raise ConfigError.of("budget", f"at least {spent:g}, the cost of the smallest ranks", budget, "Lower minimum or multiple_of.")

    def offer(index: int) -> list[tuple[float, int, int]]:
        """The head's next step: minus its gain for its cost, the head, the rank it leads to."""
        here, there = ranks[index], min(ranks[index] + multiple_of, len(sums[index]) - 1)
        gain = sums[index][there] - sums[index][here]
        return [(-gain / (costs[index] * (there - here)), index, there)] if gain > 0 else []

    offers = [step for index in range(len(sums)) for step in offer(index)]
    heapq.heapify(offers)
    while offers:
        _, index, there = heapq.heappop(offers)
        price = (there - ranks[index]) * costs[index]
        if spent + price <= budget:
            spent += price
            ranks[index] = there
            for step in offer(index):
                heapq.heappush(offers, step)
    return ranks


def _check_allocation(losses: Sequence[torch.Tensor], costs: list[float], multiple_of: int, minimum: int) -> None:
    if len(costs) != len(losses):
        raise ConfigError.of("cost", f"one number, or one for each of {len(losses)} losses", f"{len(costs)} numbers")
    if not all(each > 0 for each in costs):
        raise ConfigError.of("cost", "numbers above 0", costs)
    for name, value, least in (("multiple_of", multiple_of, 1), ("minimum", minimum, 0)):
        whole_number(name, value, least)
    for index, each in enumerate(losses):
        if each.ndim != 1 or bool((each.diff() > 0).any()):
            raise ConfigError.of(f"losses[{index}]", "one dimension of energies, the largest first", each)
