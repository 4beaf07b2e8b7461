"""Which blobs a full store evicts: those that saved the least work per byte, and not lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Known:
    """What a process knows of a blob."""

    size: int  # bytes
    created: float  # seconds since 1970
    saved: int = 0  # tokens of work
    worth: float = 0.0
    checked: set[str] = field(default_factory=set)  # kinds of checks that its tensors passed


class Worth:
    """What each blob takes, and what it is worth (the greedy-dual size frequency policy of Cherkasova, 1998).

    The worth of a blob is the work that it has saved, in tokens a byte, plus the clock at its last use. The clock stands at the worth of
    the blob evicted last, so a blob that was useful long ago, but not since, is evicted in the end. A new blob counts as used once.
    """

    def __init__(self) -> None:
        # In the order of their last use, so that of two that are worth the same the older one is evicted first.
        self.blobs: OrderedDict[str, Known] = OrderedDict()
        self.total = 0
        self._clock = 0.0

    def add(self, key: str, size: int, tokens: int, created: float = 0.0) -> None:
        """Adds a blob, unless it is there."""
        if key not in self.blobs:
            self.blobs[key] = Known(size, created)
            self.total += size
            self.used(key, tokens)

    def used(self, key: str, tokens: int) -> None:
        """Counts work that a blob saved; an evicted blob is ignored."""
        if (blob := self.blobs.get(key)) is not None:
            blob.saved += tokens
            blob.worth = self._clock + blob.saved / max(blob.size, 1)
            self.blobs.move_to_end(key)

    def remove(self, key: str) -> None:
        """Removes a blob, if it is there."""
        if key in self.blobs:
            self.total -= self.blobs.pop(key).size

    def ascending(self, keep: Collection[str]) -> list[str]:
        """All blobs but some, the least worth first."""
        return sorted((key for key in self.blobs if key not in keep), key=lambda key: self.blobs[key].worth)

    def evicted(self, worth: float) -> None:
        """Moves the clock to what an evicted blob was worth."""
        self._clock = max(self._clock, worth)
