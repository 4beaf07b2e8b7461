"""Which entries a full store can do without: those that saved the fewest tokens a byte, and not lately."""

from __future__ import annotations

import heapq
from collections.abc import Collection


class Worth:
    """What each entry takes and is worth: the tokens a byte that it saved, plus what those were worth that went before its last use.

    So what was useful long ago goes in the end. A new entry counts as used once.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.total = 0
        self._age = 0.0
        self._saved: dict[str, int] = {}
        self._ranks: dict[str, tuple[float, int]] = {}
        self._uses = 0

    def add(self, key: str, size: int, tokens: int) -> None:
        """Counts an entry in, if it is not yet.

        Args:
            key: Its id.
            size: The bytes that it takes.
            tokens: That it holds.
        """
        if key not in self.sizes:
            self.sizes[key], self._saved[key] = size, 0
            self.total += size
            self.used(key, tokens)

    def used(self, key: str, tokens: int) -> None:
        """Counts work that an entry saved.

        Args:
            key: Of one that was counted in.
            tokens: That were not computed.
        """
        self._uses += 1
        self._saved[key] += tokens
        # Of two that are worth the same the one used longer ago goes.
        self._ranks[key] = (self._age + self._saved[key] / max(self.sizes[key], 1), self._uses)

    def remove(self, key: str) -> None:
        """Counts an entry out, if it is in.

        Args:
            key: Its id.
        """
        if key in self.sizes:
            self.total -= self.sizes.pop(key)
            del self._saved[key], self._ranks[key]

    def least(self, excess: int, keep: Collection[str]) -> list[str]:
        """What to evict, the least worth first.

        Args:
            excess: How many bytes have to go.
            keep: Ids that must stay.
        """
        ranked = [(rank, key) for key, rank in self._ranks.items() if key not in keep]
        heapq.heapify(ranked)
        leaving = []
        while ranked and excess > 0:
            (worth, _), key = heapq.heappop(ranked)
            leaving.append(key)
            excess -= self.sizes[key]
            self._age = max(self._age, worth)
        return leaving
