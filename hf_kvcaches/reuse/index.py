"""Look up stored tokens: those behind the same tokens by chains, others by anchors."""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_kvcaches.core.token_log import Ids as Ids

# The rule of tokens that the model computes, and of those that were computed behind the same tokens.
COMPUTED, EXACT = "computed", "exact"
ANCHOR, ALIKE = 16, 8  # consecutive tokens by which a record is found at any index; the most records with one anchor, the newest
CONTEXT = 512  # tokens before its own that are stored with a record: the most that a guard can require to be equal, short of all
SURROUNDINGS, SHINGLE = 128, 8  # tokens before a match that are compared, by their shingles, and consecutive tokens in a shingle

_KINDS = {"scope": str, "left": str, "right": str, "start": int, "origin": str, "fresh": bool, "form": dict}
_ARRAYS = ("ids", "context")


def chain_of(ids: Ids, before: hashlib.blake2b | None = None) -> hashlib.blake2b:
    """Hash all tokens of a row up to an index, `before` being the chain of the first ones. Equal digests mean equal tokens."""
    chain = hashlib.blake2b(digest_size=16) if before is None else before.copy()
    chain.update(np.ascontiguousarray(ids, dtype="<u4").data)
    return chain


@dataclass(frozen=True, eq=False)
class Record:
    """A stored span without its tensors."""

    scope: str  # model, adapters, tokenizer and format of its tensors: only caches of the same scope reuse it
    ids: Ids  # its tokens
    left: str  # the hexadecimal digest of the chain of all tokens before it
    right: str  # that of these and its own tokens
    start: int  # the index of its first token where it was computed
    context: Ids  # up to `CONTEXT` tokens before it
    origin: str = EXACT  # the rule by which it was reused; "exact" if neither it nor anything before it was an approximation
    fresh: bool = True  # all of it was computed at its index: only then it is reused behind other texts, so drift does not add up
    form: dict[str, Any] = field(default_factory=dict)  # what `layout` needs to read the tensors

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
        hashes = window_hashes(self.ids, ANCHOR)
        return [(hashes[offset], offset) for offset in sorted({*range(0, len(hashes), ANCHOR), len(hashes) - 1})] if hashes else []

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {name: getattr(self, name) for name in _KINDS} | {name: array_as_text(getattr(self, name), "<u4") for name in _ARRAYS}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """Restore what `to_dict` returned; raise a `LookupError`, `TypeError` or `ValueError` if a field is missing or wrong."""
        for name, kind in _KINDS.items():
            if type(data[name]) is not kind:
                raise TypeError(f"{name}: expected {kind.__name__}, got {type(data[name]).__name__}")
        arrays: dict[str, Any] = {name: array_of_text(data[name], "<u4") for name in _ARRAYS}
        record = cls(**{name: data[name] for name in _KINDS}, **arrays)
        if record.origin in ("", COMPUTED) or record.start < 0 or not len(record):
            raise ValueError(f"no span has {len(record)} tokens, the origin {record.origin!r} and the start {record.start}")
        return record


class Piece(NamedTuple):
    """A span of a prompt whose tokens a record has, from its token `offset` on."""

    start: int
    stop: int
    record: Record
    offset: int

    @property
    def position(self) -> int:
        """Where the first token was computed."""
        return self.record.start + self.offset


@dataclass(frozen=True, eq=False)
class Match:
    """Consecutive tokens of a prompt that were consecutive in an earlier one, behind another text."""

    pieces: tuple[Piece, ...]  # spans without gaps, in order; each was stored behind the one before
    ids: Ids  # the tokens of the prompt, as far as they were looked up

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        return self.pieces[-1].stop

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> Ids:
        """Its own tokens."""
        return self.ids[self.start : self.stop]

    @property
    def before(self) -> Ids:
        """The tokens before it in the prompt."""
        return self.ids[: self.start]

    @cached_property
    def stored_before(self) -> Ids:
        """The last tokens before it in the text where it was stored."""
        first = self.pieces[0]
        return np.concatenate((first.record.context, first.record.ids[: first.offset]))

    @cached_property
    def same(self) -> int:
        """How many tokens directly before it are the same in both texts."""
        return common_suffix(self.stored_before, self.before)

    @cached_property
    def likeness(self) -> float:
        """How similar both texts end before it: the Jaccard similarity of the shingles of their last `SURROUNDINGS` tokens."""
        first, second = (_shingles(ids[-SURROUNDINGS:].tobytes()) for ids in (self.stored_before, self.before))
        if not first or not second:
            return float(np.array_equal(self.stored_before, self.before))
        shared = len(first & second)
        return shared / (len(first) + len(second) - shared)


class TokenIndex:
    """Records of one scope, found by their tokens."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        # Keys of records by the chain of all tokens before them and their first token, and by the index where they start and this token.
        self._after: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        self._starts: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        # Keys of records, and offsets in them, by the hash of an anchor.
        self._anchored: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)

    def add(self, key: str, record: Record) -> None:
        """Add a record, if it is not there."""
        if key not in self.records:
            self.records[key] = record
            for table, name, entry in self._entries(key, record):
                table[name].append(entry)
                if table is self._anchored:
                    del table[name][:-ALIKE]

    def remove(self, key: str) -> None:
        """Remove a record, if it is there."""
        if (record := self.records.pop(key, None)) is not None:
            for table, name, entry in self._entries(key, record):
                table[name] = [other for other in table[name] if other != entry]
                if not table[name]:
                    del table[name]

    def _entries(self, key: str, record: Record) -> Iterator[tuple[defaultdict[Any, list[Any]], Any, Any]]:
        """Yield the tables in which a record is listed, each with the list's name and the entry."""
        first = int(record.ids[0])
        yield self._after, (record.left, first), key
        yield self._starts, (record.start, first), key
        for anchor, offset in record.anchors if record.fresh else ():
            yield self._anchored, anchor, (key, offset)

    def prefix(self, ids: Ids, start: int, exact_only: bool) -> list[Piece]:
        """Return the stored spans, from an index on, of the longest prefix that a row shares with earlier rows.

        Spans overlap if rows were cut differently: in one batch, by several processes, or stored again after an eviction. So records are
        looked up at every index that stored spans reach, not only where one ends.
        """
        spans, chain, hashed, end = list[Piece](), chain_of(ids[:0]), 0, start
        for index, token in enumerate(ids[start:].tolist(), start):
            if index > end:
                break
            if (index, token) in self._starts:
                chain, hashed = chain_of(ids[hashed:index], chain), index
                records = [self.records[key] for key in self._after.get((chain.hexdigest(), token), ())]
                records = [record for record in records if not exact_only or record.origin == EXACT]
                new = [Piece(index, index + common_prefix(record.ids, ids[index:]), record, 0) for record in records]
                spans += new
                end = max([end, *(span.stop for span in new)])
        pieces: list[Piece] = []
        while start < end:
            # An exact span comes before a longer one, which the rest is then taken from.
            covering = [span for span in spans if span.start <= start < span.stop]
            best = max(covering, key=lambda span: (span.record.origin == EXACT, span.stop))
            pieces.append(Piece(start, best.stop, best.record, start - best.start))
            start = best.stop
        return pieces

    def runs(self, ids: Ids, start: int, shortest: int) -> list[Match]:
        """Return the tokens that earlier rows have at any index, in order and without overlaps; of several matches the longest."""
        matches, free = list[Match](), start
        for index, alike in enumerate(map(self._anchored.get, window_hashes(ids[start:], ANCHOR)), start):
            if alike is not None and index >= free:
                found = [self._match(ids, index, free, self.records[key], offset) for key, offset in alike]
                best = max(found, key=lambda match: (len(match), match.same))
                if len(best) >= shortest:
                    matches.append(best)
                    free = best.stop
        return matches

    def _match(self, ids: Ids, index: int, free: int, record: Record, offset: int) -> Match:
        """Return the longest match that has a record's token `offset` at an index, from `free` on and through the records that follow."""
        back = common_suffix(record.ids[:offset], ids[free:index])
        ahead = common_prefix(record.ids[offset:], ids[index:])
        pieces = [Piece(index - back, index + ahead, record, offset - back)]
        while offset + ahead == len(record) and (start := pieces[-1].stop) < len(ids):
            following = [self.records[key] for key in self._after.get((record.right, int(ids[start])), ())]
            fresh = [(common_prefix(other.ids, ids[start:]), other) for other in following if other.fresh]
            if not fresh:
                break
            offset, (ahead, record) = 0, max(fresh, key=lambda pair: pair[0])
            pieces.append(Piece(start, start + ahead, record, 0))
        return Match(tuple(pieces), ids)


def as_ids(values: Any) -> Ids:
    """Return the token ids of a list, a tensor on the CPU or an array."""
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


def window_hashes(ids: Ids, width: int) -> list[int]:
    """Hash every window of `width` consecutive tokens; equal windows have equal hashes."""
    if len(ids) < width:
        return []
    powers = np.uint64(0x9E3779B97F4A7C15) ** np.arange(width, dtype=np.uint64)  # modulo 2^64
    hashes: list[int] = (np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), width) * powers).sum(1).tolist()
    return hashes


@lru_cache(1024)  # every prompt that has a stored span compares the tokens before it
def _shingles(ids: bytes) -> frozenset[int]:
    return frozenset(window_hashes(np.frombuffer(ids, np.uint32), SHINGLE))
