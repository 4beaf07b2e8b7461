"""Where two prompts hold the same tokens: blocks that are as long as they can be, the longest first.

What the prompts begin and end with alike is taken off first, since state of a common beginning holds exactly. In what is left between, the
longest block is taken, then the longest that fits before and behind it, and so on. That is what difflib's matcher does as well, without
its nested loops: the places where `shortest` tokens in a row are equal come from sorting, and lie on diagonals as runs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_kvcaches.core.splicing.tokens import common_prefix

Ids = npt.NDArray[np.int64]
# How many pairs of equal places a token may have on average before only the best diagonals are looked at; so many pairs are always fine.
_BUDGET = 16
_FREE = 4096
_DIAGONALS = 64


class Block(NamedTuple):
    """Tokens that are the same in both: `source[source : source + length] == target[target : target + length]`."""

    source: int
    target: int
    length: int


def align(
    source: Sequence[int] | npt.NDArray[np.integer[Any]],
    target: Sequence[int] | npt.NDArray[np.integer[Any]],
    shortest: int = 4,
    *,
    moved: bool = False,
) -> list[Block]:
    """Blocks of equal tokens in the order of the target; they never overlap there.

    Args:
        moved: Whether a block may come from anywhere in the source, twice too. Otherwise blocks stand in the same order in both.
    """
    assert shortest >= 1, shortest
    a, b = np.asarray(source, np.int64), np.asarray(target, np.int64)
    head = common_prefix(a, b)
    if head == len(a) == len(b):
        return [Block(0, 0, head)] if head >= shortest else []
    head = head if head >= shortest else 0
    # What comes from anywhere may come from the beginning, too.
    tail = common_prefix(a[0 if moved else head :][::-1], b[head:][::-1])
    tail = tail if tail >= shortest else 0
    first = Block(0, 0, head)
    last = Block(len(a) - tail, len(b) - tail, tail)
    begin = 0 if moved else head
    end = len(a) if moved else last.source
    runs = _runs(a[begin:end], b[head : last.target], shortest)
    picked = _pick([(s + begin, t + head, n) for s, t, n in runs], first, last, shortest, moved)
    return [block for block in picked if block.length]


def _runs(a: Ids, b: Ids, shortest: int) -> list[tuple[int, int, int]]:
    """All runs of at least so many equal tokens that can't be made longer; only the likeliest, where nearly everything is equal."""
    if min(len(a), len(b)) < shortest:
        return []
    codes, width = _codes(a, b, shortest)
    x, y = codes[: len(a) - width + 1], codes[len(a) :]
    order = x.argsort(kind="stable")
    ordered = x[order]
    low = ordered.searchsorted(y)
    counts = ordered.searchsorted(y, side="right") - low
    total = int(counts.sum())
    if not total:
        return []
    if total > max(_FREE, _BUDGET * (len(a) + len(b))):
        return _likely_runs(a, b, _diagonals(y, order, low, counts), shortest)
    at = np.repeat(np.arange(len(y)), counts)
    within = np.arange(total) - np.repeat(counts.cumsum() - counts, counts)
    diagonal = at - order[np.repeat(low, counts) + within]
    # One number a pair: the pairs of a diagonal follow one another, and those of a run without a gap.
    stride = len(a) + len(b)
    keys = np.sort((diagonal + len(a)) * stride + at)
    starts = np.flatnonzero(np.diff(keys, prepend=-2) != 1)
    lengths = np.diff(starts, append=total) + width - 1
    long = lengths >= shortest
    shift, place = np.divmod(keys[starts[long]], stride)
    return list(zip((place - shift + len(a)).tolist(), place.tolist(), lengths[long].tolist(), strict=True))


def _codes(a: Ids, b: Ids, shortest: int) -> tuple[Ids, int]:
    """A number for every so many tokens in a row, equal only for equal ones, and how many: `shortest`, or as many as fit a number.

    Those that reach over the end of `a` stand between those of `a` and those of `b`.
    """
    both = np.concatenate([a, b])
    top = int(both.max())
    if both.min() < 0 or top.bit_length() * shortest > 63:
        known, both = np.unique(both, return_inverse=True)
        top = len(known)
    bits = max(1, top.bit_length())
    width = max(1, min(shortest, 63 // bits))
    codes = np.zeros(len(both) - width + 1, np.int64)
    for place in range(width):
        codes = (codes << bits) | both[place : len(codes) + place]
    return codes, width


def _diagonals(y: Ids, order: Ids, low: Ids, counts: Ids) -> Ids:
    """The diagonals with the most pairs, if what comes often is paired in order: the first with the first, the second with the second."""
    turn = y.argsort(kind="stable")
    sorted_y = y[turn]
    rank = np.empty(len(y), np.int64)
    rank[turn] = np.arange(len(y)) - sorted_y.searchsorted(sorted_y)
    at = np.flatnonzero(rank < counts)
    diagonals, often = np.unique(at - order[low[at] + rank[at]], return_counts=True)
    return diagonals[np.argsort(-often, kind="stable")[:_DIAGONALS]]


def _likely_runs(a: Ids, b: Ids, diagonals: Ids, shortest: int) -> list[tuple[int, int, int]]:
    """All runs on these diagonals."""
    runs = []
    for shift in diagonals.tolist():
        s, t = max(0, -shift), max(0, shift)
        room = min(len(a) - s, len(b) - t)
        equal = np.zeros(room + 2, np.int8)
        equal[1:-1] = a[s : s + room] == b[t : t + room]
        edges = np.flatnonzero(np.diff(equal)).reshape(-1, 2)
        runs += [(s + start, t + start, stop - start) for start, stop in edges.tolist() if stop - start >= shortest]
    return runs


def _pick(runs: list[tuple[int, int, int]], first: Block, last: Block, shortest: int, moved: bool) -> list[Block]:
    """The longest run, then the longest of what still fits, and so on; between `first` and `last`.

    Of runs of the same length the one that comes first in the source is taken, or, if it may come from anywhere, the one that has
    moved least.
    """
    heap = [(-n, abs(t - s) if moved else s, t, s) for s, t, n in runs]
    heapq.heapify(heap)
    blocks, places = [first, last], [first.target, last.target]
    while heap:
        negative, _, t, s = heapq.heappop(heap)
        length, shift = -negative, t - s
        index = bisect_right(places, t) - 1
        while index + 1 < len(blocks) and blocks[index].target < t + length:
            before, behind = blocks[index], blocks[index + 1]
            start, stop = max(t, before.target + before.length), min(t + length, behind.target)
            if not moved:
                start, stop = max(start, before.source + before.length + shift), min(stop, behind.source + shift)
            if stop - start == length:
                blocks.insert(index + 1, Block(s, t, length))
                places.insert(index + 1, t)
                break
            if stop - start >= shortest:
                # The part that fits waits for its turn.
                heapq.heappush(heap, (start - stop, abs(shift) if moved else start - shift, start, start - shift))
            index += 1
    return blocks
