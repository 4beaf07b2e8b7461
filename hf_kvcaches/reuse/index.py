"""Look up stored tokens: those behind the same tokens by chains, others by anchors."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_kvcaches.core.token_log import Ids as Ids

# The rule of tokens that the model computes, and of those that were computed behind the same tokens.
COMPUTED, EXACT = "computed", "exact"
# An anchor is this many consecutive tokens, which are found at any index of a prompt.
ANCHOR = 16
# How many records with the same anchor are kept: the newest.
ALIKE = 8
# How many tokens before its own are stored with a record: the most equal tokens that a guard can require, short of all.
CONTEXT = 512

_KINDS = {"scope": str, "left": str, "right": str, "start": int, "origin": str, "fresh": bool, "form": dict}


class Chain:
    """The name of all tokens of a row up to an index. Equal names mean equal tokens, however the row was cut."""

    def __init__(self) -> None:
        self._hasher = hashlib.blake2b(digest_size=16)

    def extend(self, ids: Ids) -> Chain:
        """Return the chain with more tokens; this one does not change."""
        longer = Chain.__new__(Chain)
        longer._hasher = self._hasher.copy()
        longer._hasher.update(np.ascontiguousarray(ids, dtype="<u4").data)
        return longer

    @property
    def name(self) -> str:
        """The digest in hex."""
        return self._hasher.hexdigest()


@dataclass(frozen=True, eq=False)
class Record:
    """A stored span without its tensors.

    Args:
        scope: The model, adapters, tokenizer and format of its tensors; only caches of the same scope reuse it.
        ids: Its token ids, (tokens,).
        left: The `Chain` name of all tokens before it.
        right: The `Chain` name of these and its own tokens.
        start: The index of its first token in the row where it was computed.
        context: Up to `CONTEXT` tokens before it, (n,).
        origin: The rule by which it was reused: "exact" if neither it nor anything before it was an approximation.
        fresh: Whether all of it was computed at its index. Only such spans are reused behind other texts, so drift does not add up.
        form: What `layout` needs to read the tensors.
    """

    scope: str
    ids: Ids
    left: str
    right: str
    start: int
    context: Ids
    origin: str = EXACT
    fresh: bool = True
    form: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """The id of its blob: equal for equal tokens behind equal tokens, in one scope and of one origin."""
        hasher = hashlib.blake2b(digest_size=16)
        for part in (self.scope, self.left, self.right, self.origin):
            hasher.update(part.encode() + b"|")
        return hasher.hexdigest()

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def anchors(self) -> list[tuple[int, int]]:
        """Hash and offset of its anchors: any 2 * ANCHOR - 1 consecutive tokens contain one."""
        if len(self) < ANCHOR:
            return []
        hashes = window_hashes(self.ids, ANCHOR)
        return [(int(hashes[offset]), offset) for offset in (*range(0, len(self) - ANCHOR, ANCHOR), len(self) - ANCHOR)]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        plain = {name: getattr(self, name) for name in _KINDS}
        return plain | {name: array_as_text(value, "<u4") for name, value in (("ids", self.ids), ("context", self.context))}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """Restore what `to_dict` returned; raise a `LookupError`, `TypeError` or `ValueError` if a field is missing or wrong."""
        arrays: dict[str, Any] = {name: array_of_text(data[name], "<u4") for name in ("ids", "context")}
        plain = {name: data[name] for name in _KINDS}
        for name, kind in _KINDS.items():
            if type(plain[name]) is not kind:
                raise TypeError(f"{name}: expected {kind.__name__}, got {type(plain[name]).__name__}")
        if not plain["origin"] or plain["origin"] == COMPUTED or plain["start"] < 0 or not len(arrays["ids"]):
            raise ValueError(f"no span has {len(arrays['ids'])} tokens, the origin {plain['origin']!r} and the start {plain['start']!r}")
        return cls(**plain, **arrays)


class Piece(NamedTuple):
    """A span of a prompt whose tokens a record has, from its token `offset` on."""

    start: int
    stop: int
    record: Record
    offset: int

    @property
    def position(self) -> int:
        """The first token's position when it was computed."""
        return self.record.start + self.offset

    def cut(self, stop: int) -> Piece:
        """Return the tokens before an index."""
        return self._replace(stop=min(stop, self.stop))


class Run(NamedTuple):
    """Consecutive tokens of a prompt that were consecutive in an earlier one.

    Args:
        pieces: Spans without gaps, in order; each was stored behind the one before.
    """

    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        return self.pieces[-1].stop

    def __len__(self) -> int:
        return self.stop - self.start


class TokenIndex:
    """Records of one scope, found by their tokens."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        # Keys of records by the chain of all tokens before them, and their first token.
        self._after: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        # How many records start at an index with a token.
        self._starts: Counter[tuple[int, int]] = Counter()
        self._anchored: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)

    def add(self, key: str, record: Record) -> None:
        """Add a record, if it is not there."""
        if key in self.records:
            return
        self.records[key] = record
        first = int(record.ids[0])
        self._after[record.left, first].append(key)
        self._starts[record.start, first] += 1
        if record.fresh:
            for anchor, offset in record.anchors:
                alike = self._anchored[anchor]
                alike.append((key, offset))
                del alike[:-ALIKE]

    def remove(self, key: str) -> None:
        """Remove a record, if it is there."""
        record = self.records.pop(key, None)
        if record is None:
            return
        first = int(record.ids[0])
        self._after[record.left, first].remove(key)
        if not self._after[record.left, first]:
            del self._after[record.left, first]
        self._starts[record.start, first] -= 1
        if not self._starts[record.start, first]:
            del self._starts[record.start, first]
        if record.fresh:
            for anchor, _ in record.anchors:
                remaining = [entry for entry in self._anchored[anchor] if entry[0] != key]
                if remaining:
                    self._anchored[anchor] = remaining
                else:
                    self._anchored.pop(anchor, None)

    def prefix(self, ids: Ids, chain: Chain, start: int, exact_only: bool) -> tuple[list[Piece], Chain]:
        """Return the stored spans of the longest prefix that a row shares with earlier rows, and the chain of all tokens up to its end.

        Args:
            chain: The chain of the row's first `start` tokens.
        """
        spans = self._prefix_spans(ids, chain, start, exact_only)
        end = max((span.stop for span in spans), default=start)
        pieces: list[Piece] = []
        index = start
        while index < end:
            # An exact span comes before a longer one, which the rest is then taken from.
            covering = [span for span in spans if span.start <= index < span.stop]
            best = max(covering, key=lambda span: (span.record.origin == EXACT, span.stop))
            pieces.append(Piece(index, best.stop, best.record, index - best.start))
            index = best.stop
        return pieces, chain.extend(ids[start:end])

    def _prefix_spans(self, ids: Ids, chain: Chain, start: int, exact_only: bool) -> list[Piece]:
        """Return all stored spans that follow a prefix of a row and continue like the row.

        Spans overlap if rows were cut differently: in one batch, by several processes, or stored again after an eviction. So records are
        looked up at every index that stored spans reach, not only where one ends.
        """
        spans: list[Piece] = []
        stop = hashed = start
        for index, token in enumerate(ids[start:].tolist(), start):
            if index > stop:
                break
            if (index, token) not in self._starts:
                continue
            chain, hashed = chain.extend(ids[hashed:index]), index
            for key in self._after.get((chain.name, token), ()):
                record = self.records[key]
                if not exact_only or record.origin == EXACT:
                    spans.append(Piece(index, index + common_prefix(record.ids, ids[index:]), record, 0))
                    stop = max(stop, spans[-1].stop)
        return spans

    def runs(self, ids: Ids, start: int, shortest: int) -> list[Run]:
        """Return the verbatim runs that earlier rows have at any index, in order and without overlaps."""
        runs: list[Run] = []
        hashes = window_hashes(ids[start:], ANCHOR).tolist()
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
        """Return the longest run that has a record's token `offset` at an index, through the records that follow it."""
        back = common_suffix(record.ids[:offset], ids[free:index])
        ahead = common_prefix(record.ids[offset:], ids[index:])
        if ahead < ANCHOR:  # a collision of hashes
            return None
        pieces = [Piece(index - back, index + ahead, record, offset - back)]
        while offset + ahead == len(record) and pieces[-1].stop < len(ids):
            continuation = self._fresh_after(record.right, ids[pieces[-1].stop :])
            if continuation is None:
                break
            record, ahead = continuation
            offset = 0
            pieces.append(Piece(pieces[-1].stop, pieces[-1].stop + ahead, record, 0))
        return Run(tuple(pieces))

    def _fresh_after(self, name: str, ids: Ids) -> tuple[Record, int] | None:
        best: tuple[Record, int] | None = None
        for key in self._after.get((name, int(ids[0])), ()):
            record = self.records[key]
            shared = common_prefix(record.ids, ids) if record.fresh else 0
            if shared > (best[1] if best else 0):
                best = record, shared
        return best


def as_ids(values: Any) -> Ids:
    """Return token ids as an array, from a list, a tensor on the CPU or an array."""
    return np.ascontiguousarray(np.asarray(values), dtype=np.uint32)


def array_as_text(values: npt.ArrayLike, dtype: str) -> str:
    """Return an array as a string for JSON; `dtype` is NumPy's name with the byte order, such as "<u4"."""
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def array_of_text(text: str, dtype: str) -> npt.NDArray[Any]:
    """Undo `array_as_text`; raise a `ValueError` or `TypeError` for any other string."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)


def common_prefix(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Return how many tokens two rows share at their starts."""
    length = min(len(a), len(b))
    different = (a[:length] != b[:length]).nonzero()[0]
    return int(different[0]) if len(different) else length


def common_suffix(a: Ids, b: Ids) -> int:
    """Return how many tokens two rows share at their ends."""
    return common_prefix(a[::-1], b[::-1])


def window_hashes(ids: Ids, width: int) -> npt.NDArray[np.uint64]:
    """Hash every window of `width` consecutive tokens, (tokens - width + 1,); equal windows have equal hashes."""
    if len(ids) < width:
        return np.zeros(0, np.uint64)
    mixed = ids.astype(np.uint64)
    # The finaliser of splitmix64: small ids fill all 64 bits.
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB) + np.uint64(0x9E3779B97F4A7C15)
    windows = np.lib.stride_tricks.sliding_window_view(mixed, width)
    hashes: npt.NDArray[np.uint64] = (windows * _powers(width)).sum(axis=1, dtype=np.uint64)
    return hashes


@cache
def _powers(width: int) -> npt.NDArray[np.uint64]:
    return np.array([pow(0x9E3779B97F4A7C15, width - 1 - i, 2**64) for i in range(width)], dtype=np.uint64)
