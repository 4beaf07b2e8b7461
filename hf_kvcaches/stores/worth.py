"""Which blobs a full store can do without: those that saved least work a byte, and not lately."""

from __future__ import annotations

import heapq
from collections.abc import Collection


class Worth:
    """What each blob takes, and what it is worth.

    The worth of a blob is the work that it has saved, in tokens a byte, plus the clock at its last use. The clock stands at the
    worth of what was evicted last, so that what was useful long ago, but not since, goes in the end (the greedy-dual size frequency
    policy of Cherkasova, 1998). A new blob counts as used once: for itself.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.total = 0
        self._clock = 0.0
        self._saved: dict[str, int] = {}
        self._rank: dict[str, tuple[float, int]] = {}
        self._uses = 0

    def add(self, key: str, size: int, tokens: int) -> None:
        """Counts a blob in."""
        if key in self.sizes:
            return
        self.sizes[key] = size
        self.total += size
        self._saved[key] = 0
        self.used(key, tokens)

    def used(self, key: str, tokens: int) -> None:
        """Counts work that a blob saved.

        Args:
            key: Its id; what is not there any more is ignored.
        """
        if key in self.sizes:
            self._uses += 1
            self._saved[key] += tokens
            self._rank[key] = (self._clock + self._saved[key] / max(self.sizes[key], 1), self._uses)

    def remove(self, key: str) -> None:
        """Counts a blob out."""
        size = self.sizes.pop(key, None)
        if size is not None:
            self.total -= size
            del self._saved[key], self._rank[key]

    def least(self, excess: int, keep: Collection[str]) -> list[str]:
        """What to evict, the least worth first."""
        if excess <= 0:
            return []
        ranked = [(rank, key) for key, rank in self._rank.items() if key not in keep]
        heapq.heapify(ranked)
        leaving = []
        while ranked and excess > 0:
            (worth, _), key = heapq.heappop(ranked)
            leaving.append(key)
            excess -= self.sizes[key]
            self._clock = max(self._clock, worth)
        return leaving
