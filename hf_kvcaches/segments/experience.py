"""What probes have found of segments, so that not every prompt has to ask again."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from hf_kvcaches.core.splicing.tokens import Ids

# A segment is known by so many of its first tokens: those that probes look at, and some more.
KNOWN_BY = 32
# How many segments are remembered, and how many probes of each: the newest.
_SEGMENTS, _PROBES = 2**16, 8
# Findings that wait to be told, and what blobs that tell of them may take in a store: the newest.
_UNTOLD, _MOST_BLOBS, _MOST_BYTES = 2**12, 256, 4 << 20
# Differences of similarities below this are chance.
_ALIKE = 0.1


_Key = tuple[str, int, str]


class Experience:
    """Scores of probes, by the segment and by how unlike its old surroundings the new ones were.

    A segment that passed in surroundings as unlike as these, or more, passes; one that failed in surroundings as like, or more, fails.
    Where that says both, or neither, a probe has to tell. So a text that drifts away step by step is probed at each step.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[_Key, list[tuple[float, float]]] = OrderedDict()
        self._untold: list[tuple[_Key, float, float]] = []
        self._lock = threading.Lock()

    def verdict(self, scope: str, layer: int, ids: Ids, similarity: float, threshold: float) -> bool | None:
        """Whether a segment would pass a probe, or None where nothing is known of it.

        Args:
            threshold: What a score must reach.
        """
        with self._lock:
            found = self._found.get(_key(scope, layer, ids), ())
            passed = any(score >= threshold and before <= similarity + _ALIKE for before, score in found)
            failed = any(score < threshold and before >= similarity - _ALIKE for before, score in found)
        return None if passed == failed else passed

    def learn(self, scope: str, layer: int, ids: Ids, similarity: float, score: float) -> None:
        """Remembers what a probe found."""
        with self._lock:
            key = _key(scope, layer, ids)
            self._remember(key, similarity, score)
            self._untold.append((key, similarity, score))
            del self._untold[:-_UNTOLD]

    def untold(self) -> list[list[Any]]:
        """What was learned since the last call, as JSON can hold it, to be told to other processes."""
        with self._lock:
            told, self._untold = self._untold, []
        return [[*key, similarity, score] for key, similarity, score in told]

    def hear(self, rows: Sequence[Sequence[Any]]) -> None:
        """Remembers what a process told of. A `TypeError`, `ValueError` or `OverflowError` where it is something else."""
        read = [((str(scope), int(layer), str(name)), float(similarity), float(score)) for scope, layer, name, similarity, score in rows]
        if not all(math.isfinite(number) for _, *numbers in read for number in numbers):
            raise ValueError("scores that are not finite")
        with self._lock:
            for key, similarity, score in read:
                self._remember(key, similarity, score)

    def _remember(self, key: _Key, similarity: float, score: float) -> None:
        found = self._found.setdefault(key, [])
        if (similarity, score) not in found:
            found.append((similarity, score))
        del found[:-_PROBES]
        self._found.move_to_end(key)
        while len(self._found) > _SEGMENTS:
            self._found.popitem(last=False)


class ToldBlobs:
    """The blobs of a store that tell what probes have found. They would become ever more: the oldest go."""

    def __init__(self) -> None:
        self._blobs: dict[str, tuple[float, int]] = {}

    def add(self, key: str, created: float, size: int) -> None:
        """Counts one in.

        Args:
            created: When, in seconds since 1970.
        """
        self._blobs[key] = created, size

    def remove(self, key: str) -> None:
        """Counts one out, if it is one."""
        self._blobs.pop(key, None)

    def excess(self) -> list[str]:
        """Those to evict, the oldest first."""
        newest = sorted(self._blobs, key=lambda key: (self._blobs[key][0], key), reverse=True)
        total, kept = 0, 0
        for key in newest[:_MOST_BLOBS]:
            total += self._blobs[key][1]
            if total > _MOST_BYTES:
                break
            kept += 1
        return newest[kept:][::-1]


def _key(scope: str, layer: int, ids: Ids) -> _Key:
    return scope, layer, hashlib.blake2b(ids[:KNOWN_BY].tobytes(), digest_size=16).hexdigest()
