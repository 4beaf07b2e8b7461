"""Results of probes, so that not every prompt has to probe again."""

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
# Findings that wait to be stored: the newest.
_UNSTORED = 2**12
# Differences of similarities below this are chance.
_ALIKE = 0.1


_Key = tuple[str, int, str]


class Experience:
    """Scores of probes, by the segment and by how similar its surroundings were to those in which it was stored.

    A segment that passed in surroundings of this similarity or less passes; one that failed in surroundings of this similarity or more
    fails. Where both or neither holds, a probe decides. So a text that drifts away step by step is probed at each step.
    """

    def __init__(self) -> None:
        self._scores: OrderedDict[_Key, list[tuple[float, float]]] = OrderedDict()
        self._unstored: list[tuple[_Key, float, float]] = []
        self._lock = threading.Lock()

    def verdict(self, scope: str, layer: int, ids: Ids, similarity: float, threshold: float) -> bool | None:
        """Whether a segment would pass a probe, or None where a probe has to decide.

        Args:
            threshold: The score from which a probe passes.
        """
        with self._lock:
            scores = self._scores.get(_key(scope, layer, ids), ())
            passed = any(score >= threshold and before <= similarity + _ALIKE for before, score in scores)
            failed = any(score < threshold and before >= similarity - _ALIKE for before, score in scores)
        return None if passed == failed else passed

    def learn(self, scope: str, layer: int, ids: Ids, similarity: float, score: float) -> None:
        """Adds the score of a probe of this process."""
        with self._lock:
            key = _key(scope, layer, ids)
            self._remember(key, similarity, score)
            self._unstored.append((key, similarity, score))
            del self._unstored[:-_UNSTORED]

    def unstored(self) -> list[list[Any]]:
        """What was learned since the last call, as JSON values, for other processes."""
        with self._lock:
            rows, self._unstored = self._unstored, []
        return [[*key, similarity, score] for key, similarity, score in rows]

    def hear(self, rows: Sequence[Sequence[Any]]) -> None:
        """Adds `unstored` rows of another process. A `TypeError`, `ValueError` or `OverflowError` where they are something else."""
        read = [((str(scope), int(layer), str(name)), float(similarity), float(score)) for scope, layer, name, similarity, score in rows]
        if not all(math.isfinite(number) for _, *numbers in read for number in numbers):
            raise ValueError("scores that are not finite")
        with self._lock:
            for key, similarity, score in read:
                self._remember(key, similarity, score)

    def _remember(self, key: _Key, similarity: float, score: float) -> None:
        scores = self._scores.setdefault(key, [])
        if (similarity, score) not in scores:
            scores.append((similarity, score))
        del scores[:-_PROBES]
        self._scores.move_to_end(key)
        while len(self._scores) > _SEGMENTS:
            self._scores.popitem(last=False)


def _key(scope: str, layer: int, ids: Ids) -> _Key:
    return scope, layer, hashlib.blake2b(ids[:KNOWN_BY].tobytes(), digest_size=16).hexdigest()
