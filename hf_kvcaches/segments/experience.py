"""Remember the results of probes, so that later prompts need fewer probes."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from hf_kvcaches.reuse.tokens import Ids

# A segment is identified by this many of its first tokens: those that probes run, and some more.
KNOWN_BY = 32
# How many segments are remembered, and how many probes of each; the oldest are forgotten.
_SEGMENTS, _PROBES = 2**16, 8
# How many results wait to be stored; the oldest are dropped.
_UNSTORED = 2**12
# Smaller differences of similarities are chance.
_ALIKE = 0.1


_Key = tuple[str, int, str]


class Experience:
    """Scores of probes, by the segment and by how similar its surroundings were to those in which it was stored.

    A segment passes if a probe passed at this similarity or a lower one, and fails if a probe failed at this similarity or a higher one. If
    both or neither holds, a probe decides. So a text that drifts away step by step is probed at each step.
    """

    def __init__(self) -> None:
        self._scores: OrderedDict[_Key, list[tuple[float, float]]] = OrderedDict()
        self._unstored: list[tuple[_Key, float, float]] = []
        self._lock = threading.Lock()

    def verdict(self, scope: str, layer: int, ids: Ids, similarity: float, threshold: float, repair: float = 0.0) -> bool | None:
        """Return whether a segment would pass a probe; None if a probe has to decide.

        Args:
            threshold: The lowest score with which a probe passes.
            repair: The share of the segment's tokens that is recomputed, behind which a probe compares.
        """
        with self._lock:
            scores = self._scores.get(_key(scope, layer, ids, repair), ())
            passed = any(score >= threshold and earlier <= similarity + _ALIKE for earlier, score in scores)
            failed = any(score < threshold and earlier >= similarity - _ALIKE for earlier, score in scores)
        return None if passed == failed else passed

    def learn(self, scope: str, layer: int, ids: Ids, similarity: float, score: float, repair: float = 0.0) -> None:
        """Add the score of a probe of this process."""
        with self._lock:
            key = _key(scope, layer, ids, repair)
            self._remember(key, similarity, score)
            self._unstored.append((key, similarity, score))
            del self._unstored[:-_UNSTORED]

    def unstored(self) -> list[list[Any]]:
        """Return the results since the last call, as JSON values for other processes."""
        with self._lock:
            rows, self._unstored = self._unstored, []
        return [[*key, similarity, score] for key, similarity, score in rows]

    def hear(self, rows: Sequence[Sequence[Any]]) -> None:
        """Add `unstored` rows of another process; raise a `TypeError`, `ValueError` or `OverflowError` for anything else."""
        results = [((str(scope), int(layer), str(name)), float(similarity), float(score)) for scope, layer, name, similarity, score in rows]
        if not all(math.isfinite(number) for _, *numbers in results for number in numbers):
            raise ValueError("scores that are not finite")
        with self._lock:
            for key, similarity, score in results:
                self._remember(key, similarity, score)

    def _remember(self, key: _Key, similarity: float, score: float) -> None:
        scores = self._scores.setdefault(key, [])
        if (similarity, score) not in scores:
            scores.append((similarity, score))
        del scores[:-_PROBES]
        self._scores.move_to_end(key)
        while len(self._scores) > _SEGMENTS:
            self._scores.popitem(last=False)


def _key(scope: str, layer: int, ids: Ids, repair: float) -> _Key:
    return scope, layer, hashlib.blake2b(ids[:KNOWN_BY].tobytes() + repr(float(repair)).encode(), digest_size=16).hexdigest()
