"""Which blobs a full store evicts: those that saved the least work per byte, and not lately."""

from __future__ import annotations

from collections.abc import Collection


class Worth:
    """What each blob takes, and what it is worth (the greedy-dual size frequency policy of Cherkasova, 1998).

    The worth of a blob is the work that it has saved, in tokens a byte, plus the clock at its last use. The clock stands at the
    worth of what was evicted last, so that what was useful long ago, but not since, goes in the end. A new blob counts as used once.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.total = 0
        self._clock = 0.0
        self._saved: dict[str, int] = {}
        # In the order of their last use, so that of two that are worth the same the older one goes first.
        self._worth: dict[str, float] = {}

    def add(self, key: str, size: int, tokens: int) -> None:
        """Adds a blob."""
        if key not in self.sizes:
            self.sizes[key] = size
            self.total += size
            self.used(key, tokens)

    def used(self, key: str, tokens: int) -> None:
        """Counts work that a blob saved; an evicted blob is ignored."""
        if key in self.sizes:
            self._saved[key] = self._saved.get(key, 0) + tokens
            self._worth.pop(key, None)
            self._worth[key] = self._clock + self._saved[key] / max(self.sizes[key], 1)

    def remove(self, key: str) -> None:
        """Removes a blob, if it is there."""
        if key in self.sizes:
            self.total -= self.sizes.pop(key)
            del self._saved[key], self._worth[key]

    def ascending(self, keep: Collection[str]) -> list[str]:
        """All blobs but some, the least worth first."""
        return sorted((key for key in self._worth if key not in keep), key=self._worth.__getitem__)

    def evicted(self, key: str) -> None:
        """Moves the clock to what a blob was worth that has been evicted."""
        self._clock = max(self._clock, self._worth.get(key, 0.0))
