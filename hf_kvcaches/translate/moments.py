"""Second moments of what both models make of the same tokens: all that fits are made of.

No trace is kept. For each layer there is one symmetric matrix over [1, side, producer, consumer], to which every prompt adds; a fit solves
on its blocks.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from hf_kvcaches.core.moments import Moments


class BlockMoments:
    """Mean products of a few blocks of columns."""

    def __init__(self, widths: dict[str, int], device: torch.device | str = "cpu") -> None:
        stops = accumulate(widths.values())
        self.places = {name: slice(stop - width, stop) for (name, width), stop in zip(widths.items(), stops, strict=True)}
        self.sums = Moments((), sum(widths.values()), device)

    @property
    def count(self) -> int:
        """Tokens."""
        return int(self.sums.count)

    def add(self, **blocks: torch.Tensor) -> None:
        """Adds tokens.

        Args:
            **blocks: By name, each (tokens, width).
        """
        assert set(blocks) == set(self.places), (set(blocks), set(self.places))
        self.sums.add(torch.cat([blocks[name].to(self.sums.total.device, torch.float64) for name in self.places], dim=1))

    def of(self, first: str, second: str) -> torch.Tensor:
        """The mean products of two blocks, (first's width, second's width)."""
        return self.sums.total[self.places[first], self.places[second]] / self.sums.count
