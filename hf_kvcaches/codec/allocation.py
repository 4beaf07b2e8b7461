"""How many bits each direction gets: the next ones go where they take off most distortion for each bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvcaches.kernels.code_format import WIDTHS, packed_bytes


def allot(
    distortions: Sequence[torch.Tensor], budget: float, widths: Sequence[int] = WIDTHS, copies: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """The bits of each direction with which a number of bytes loses least, (directions,) for each side.

    Args:
        distortions: For each side, which fills bytes of its own, what is lost of a direction at 0 bits and at each of `WIDTHS`,
            (directions, 1 + widths).
        budget: Bytes of a token.
        widths: The bits that directions may have.
        copies: How often a token has the bytes of each side; None for once.
    """
    copies = [1] * len(distortions) if copies is None else copies
    steps = [_upgrades(side, widths) for side in distortions]
    bits, directions = (torch.cat([step[place] for step in steps]) for place in (1, 2))
    gains = torch.cat([step[0] / count for step, count in zip(steps, copies, strict=True)])
    owner = torch.cat([torch.full_like(step[2], place) for place, step in enumerate(steps)])
    order = gains.argsort(descending=True, stable=True)
    order = order[gains[order] > 0]

    def bought(count: int) -> list[torch.Tensor]:
        chosen, found = order[:count], []
        for place, side in enumerate(distortions):
            mine = chosen[owner[chosen] == place]
            found.append(torch.zeros(len(side), dtype=torch.int64).scatter_reduce(0, directions[mine], bits[mine], "amax"))
        return found

    # Whole bytes of each plane count, so the price of a number of upgrades is only known when they are laid out.
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(count * packed_bytes(side) for count, side in zip(copies, bought(middle), strict=True)) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return bought(low)


def _upgrades(distortions: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All upgrades of some directions that are worth it: their gain for each bit, the width they lead to, and the direction.

    They follow the lower convex hull of a direction's distortions, so that each gains less than the one before.
    """
    levels = torch.tensor([0, *widths])
    columns = torch.tensor([0, *(1 + WIDTHS.index(width) for width in widths)])
    lost = distortions.double()[:, columns]
    directions, here = torch.arange(len(lost)), torch.zeros(len(lost), dtype=torch.int64)
    found = []
    for _ in widths:
        price = levels - levels[here][:, None]
        gains = (lost.gather(1, here[:, None]) - lost) / price.clamp_min(1)
        gain, there = gains.masked_fill(price <= 0, -torch.inf).max(1)
        worth = gain > 0
        found.append((gain[worth], levels[there[worth]], directions[worth]))
        here = torch.where(worth, there, here)
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))  # type: ignore[return-value]
