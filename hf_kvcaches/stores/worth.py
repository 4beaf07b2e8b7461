"""Which blobs a full store evicts: those that saved the least work per byte, and not lately."""

from __future__ import annotations

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
        """Adds a blob."""
        if key in self.sizes:
            return
        self.sizes[key] = size
        self.total += size
        self._saved[key] = 0
        self.used(key, tokens)

    def used(self, key: str, tokens: int) -> None:
        """Counts work that a blob saved; an evicted blob is ignored."""
        if key in self.sizes:
            self._uses += 1
            self._saved[key] += tokens
            self._rank[key] = (self._clock + self._saved[key] / max(self.sizes[key], 1), self._uses)

    def remove(self, key: str) -> None:
        """Removes a blob, if it is there."""
        size = self.sizes.pop(key, None)
        if size is not None:
            self.total -= size
            del self._saved[key], self._rank[key]

    def least(self, excess: int, keep: Collection[str]) -> list[str]:
        """Blobs to evict to free `excess` bytes, the least worth first."""
        victims: list[str] = []
        for key in sorted(self._rank.keys() - set(keep), key=self._rank.__getitem__):
            if excess <= 0:
                break
            victims.append(key)
            excess -= self.sizes[key]
            self._clock = max(self._clock, self._rank[key][0])
        return victims
