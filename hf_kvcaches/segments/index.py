"""Look up stored segments: by the tokens before them, by their own tokens, and by their signatures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_kvcaches.reuse.tokens import Ids, common_prefix, common_suffix, window_hashes
from hf_kvcaches.segments.records import Chain, Record
from hf_kvcaches.segments.signatures import Signature, SignatureIndex

# An anchor is this many consecutive tokens, which are found at any index of a prompt.
ANCHOR = 16
# A shingle is this many consecutive tokens, by which texts are compared.
SHINGLE = 8
# How many segments with the same anchor are kept: the newest.
ALIKE = 8


class StoredSpan(NamedTuple):
    """A span of a prompt whose tokens a stored segment has, from its token `offset` on."""

    start: int
    stop: int
    record: Record
    offset: int

    @property
    def position(self) -> int:
        """The first token's position when it was computed."""
        return self.record.start + self.offset


class Run(NamedTuple):
    """Consecutive tokens of a prompt that were consecutive in an earlier one.

    Args:
        pieces: Spans without gaps, in order; each was stored behind the one before.
    """

    pieces: tuple[StoredSpan, ...]

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        return self.pieces[-1].stop

    def __len__(self) -> int:
        return self.stop - self.start


def anchors(ids: Ids) -> npt.NDArray[np.uint64]:
    """Hash every `ANCHOR` consecutive tokens, (tokens - ANCHOR + 1,). Hashes may collide, so callers compare the tokens."""
    return window_hashes(ids, ANCHOR)


def _anchor_offsets(length: int) -> Iterator[int]:
    """Yield the offsets of a segment's anchors: any 2 * ANCHOR - 1 consecutive tokens of it contain one."""
    if length >= ANCHOR:
        yield from range(0, length - ANCHOR, ANCHOR)
        yield length - ANCHOR


class SegmentIndex:
    """The segments of one scope: their records, without tensors.

    Args:
        signed: Whether segments can be looked up by their signatures.
    """

    def __init__(self, signed: bool = False) -> None:
        self.records: dict[str, Record] = {}
        # Keys of segments by the chain of all tokens before them, and their first token.
        self._after: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        # How many segments start at an index with a token.
        self._starts: Counter[tuple[int, int]] = Counter()
        self._anchored: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        self._signatures = SignatureIndex() if signed else None

    def add(self, key: str, record: Record) -> None:
        """Add a segment, if it is not there."""
        if key in self.records:
            return
        self.records[key] = record
        if self._signatures is not None and record.signature is not None and record.fresh:
            self._signatures.add(key, record.signature)
        first = int(record.ids[0])
        self._after[record.left, first].append(key)
        self._starts[record.start, first] += 1
        if record.fresh:
            hashes = anchors(record.ids)
            for offset in _anchor_offsets(len(record)):
                alike = self._anchored[int(hashes[offset])]
                alike.append((key, offset))
                del alike[:-ALIKE]

    def remove(self, key: str) -> None:
        """Remove a segment, if it is there."""
        record = self.records.pop(key, None)
        if record is None:
            return
        if self._signatures is not None:
            self._signatures.remove(key)
        first = int(record.ids[0])
        self._after[record.left, first].remove(key)
        if not self._after[record.left, first]:
            del self._after[record.left, first]
        self._starts[record.start, first] -= 1
        if not self._starts[record.start, first]:
            del self._starts[record.start, first]
        if record.fresh:
            hashes = anchors(record.ids)
            for offset in _anchor_offsets(len(record)):
                anchor = int(hashes[offset])
                remaining = [entry for entry in self._anchored[anchor] if entry[0] != key]
                if remaining:
                    self._anchored[anchor] = remaining
                else:
                    self._anchored.pop(anchor, None)

    def prefix(self, ids: Ids, chain: Chain, start: int, exact_only: bool) -> tuple[list[StoredSpan], Chain]:
        """Return the stored spans of the longest prefix that a row shares with earlier rows, and the chain of all tokens up to its end.

        Args:
            chain: The chain of the row's first `start` tokens.
        """
        spans = self._prefix_spans(ids, chain, start, exact_only)
        end = max((span.stop for span in spans), default=start)
        pieces: list[StoredSpan] = []
        index = start
        while index < end:
            # An exact span comes before a longer one, which the rest is then taken from.
            covering = [span for span in spans if span.start <= index < span.stop]
            best = max(covering, key=lambda span: (span.record.origin == "exact", span.stop))
            pieces.append(StoredSpan(index, best.stop, best.record, index - best.start))
            index = best.stop
        return pieces, chain.extend(ids[start:end])

    def _prefix_spans(self, ids: Ids, chain: Chain, start: int, exact_only: bool) -> list[StoredSpan]:
        """Return all stored spans that follow a prefix of a row and continue like the row.

        Spans overlap if rows were cut differently: in one batch, by several processes, or stored again after an eviction. So segments are
        looked up at every index that stored spans reach, not only where one ends.
        """
        spans: list[StoredSpan] = []
        stop = hashed = start
        for index, token in enumerate(ids[start:].tolist(), start):
            if index > stop:
                break
            if (index, token) not in self._starts:
                continue
            chain, hashed = chain.extend(ids[hashed:index]), index
            for key in self._after.get((chain.name, token), ()):
                record = self.records[key]
                if not exact_only or record.origin == "exact":
                    spans.append(StoredSpan(index, index + common_prefix(record.ids, ids[index:]), record, 0))
                    stop = max(stop, spans[-1].stop)
        return spans

    def near(self, signature: Signature) -> list[str]:
        """Return the keys of segments with a similar signature, the most similar first, equally similar ones by their keys."""
        near = [] if self._signatures is None else self._signatures.near(signature)
        return sorted(near, key=lambda key: (-float(np.mean(self.records[key].signature == signature)), key))

    def runs(self, ids: Ids, start: int, shortest: int) -> list[Run]:
        """Return the verbatim runs that earlier rows have at any index, in order and without overlaps."""
        runs: list[Run] = []
        hashes = anchors(ids[start:]).tolist()
        index, free = start, start
        while index - start < len(hashes):
            alike = self._anchored.get(hashes[index - start])
            run = self._longest(ids, index, free, alike) if alike else None
            if run is None or len(run) < shortest:
                index += 1
                continue
            runs.append(run)
            index = free = run.stop
        return runs

    def _longest(self, ids: Ids, index: int, free: int, alike: Iterable[tuple[str, int]]) -> Run | None:
        """Return the longest run through an index that does not begin before `free`."""
        best: Run | None = None
        best_score = (0, 0)
        for key, offset in alike:
            record = self.records.get(key)
            if record is None:
                continue
            run = self._run(ids, index, free, record, offset)
            if run is None:
                continue
            first = run.pieces[0]
            before = np.concatenate((first.record.context, first.record.ids[: first.offset]))
            score = (len(run), common_suffix(before, ids[: run.start]))
            if score > best_score:
                best, best_score = run, score
        return best

    def _run(self, ids: Ids, index: int, free: int, record: Record, offset: int) -> Run | None:
        """Return the longest run that has a segment's token `offset` at an index, through the segments that follow it."""
        back = common_suffix(record.ids[:offset], ids[free:index])
        ahead = common_prefix(record.ids[offset:], ids[index:])
        if ahead < ANCHOR:  # a collision of hashes
            return None
        pieces = [StoredSpan(index - back, index + ahead, record, offset - back)]
        while offset + ahead == len(record) and pieces[-1].stop < len(ids):
            continuation = self._fresh_after(record.right, ids[pieces[-1].stop :])
            if continuation is None:
                break
            record, ahead = continuation
            offset = 0
            pieces.append(StoredSpan(pieces[-1].stop, pieces[-1].stop + ahead, record, 0))
        return Run(tuple(pieces))

    def _fresh_after(self, name: str, ids: Ids) -> tuple[Record, int] | None:
        best: tuple[Record, int] | None = None
        for key in self._after.get((name, int(ids[0])), ()):
            record = self.records[key]
            shared = common_prefix(record.ids, ids) if record.fresh else 0
            if shared > (best[1] if best else 0):
                best = record, shared
        return best
