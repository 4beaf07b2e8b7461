"""Find blocks of equal tokens in two prompts, each as long as possible, the longest first.

A common prefix and a common suffix are taken first, since states of a common prefix are exact. Between them the longest block is taken,
then the longest ones that fit before and behind it, and so on. difflib's matcher does the same with nested loops. Here sorting finds the
pairs of indices at which `shortest` consecutive tokens are equal; they form runs on diagonals.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_kvcaches.reuse.tokens import common_prefix

Ids = npt.NDArray[np.int64]
# With more pairs of equal windows than this for each token on average, only the best diagonals are searched.
_BUDGET = 16
# So many pairs are always searched.
_FREE = 4096
# The diagonals that are searched.
_DIAGONALS = 64


class Block(NamedTuple):
    """A block of equal tokens: `source[source : source + length] == target[target : target + length]`."""

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
    """Return blocks of equal tokens in the order of the target, where they never overlap.

    Args:
        moved: Whether blocks may be in another order in the source, and overlap there. Otherwise their order is the same in both.
    """
    assert shortest >= 1, shortest
    a, b = np.asarray(source, np.int64), np.asarray(target, np.int64)
    head = common_prefix(a, b)
    if head == len(a) == len(b):
        return [Block(0, 0, head)] if head >= shortest else []
    head = head if head >= shortest else 0
    # A moved suffix may overlap the prefix in the source.
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
    """Return all maximal runs of at least `shortest` equal tokens; with too many pairs, only those on the best diagonals."""
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
    target_indices = np.repeat(np.arange(len(y)), counts)
    within = np.arange(total) - np.repeat(counts.cumsum() - counts, counts)
    diagonal = target_indices - order[np.repeat(low, counts) + within]
    # One number for each pair, ordered by diagonal: a run is a sequence of consecutive numbers.
    stride = len(a) + len(b)
    keys = np.sort((diagonal + len(a)) * stride + target_indices)
    starts = np.flatnonzero(np.diff(keys, prepend=-2) != 1)
    lengths = np.diff(starts, append=total) + width - 1
    long = lengths >= shortest
    shift, target_index = np.divmod(keys[starts[long]], stride)
    return list(zip((target_index - shift + len(a)).tolist(), target_index.tolist(), lengths[long].tolist(), strict=True))


def _codes(a: Ids, b: Ids, shortest: int) -> tuple[Ids, int]:
    """Return a code for every window of consecutive tokens, and the width of the windows: `shortest`, or as many tokens as fit a code.

    Equal codes mean equal windows. The codes of `a` come first, then those of windows across the end of `a`, then those of `b`.
    """
    both = np.concatenate([a, b])
    top = int(both.max())
    if both.min() < 0 or top.bit_length() * shortest > 63:
        distinct, both = np.unique(both, return_inverse=True)
        top = len(distinct)
    bits = max(1, top.bit_length())
    width = max(1, min(shortest, 63 // bits))
    codes = np.zeros(len(both) - width + 1, np.int64)
    for offset in range(width):
        codes = (codes << bits) | both[offset : len(codes) + offset]
    return codes, width


def _diagonals(y: Ids, order: Ids, low: Ids, counts: Ids) -> Ids:
    """Return the diagonals with the most pairs, where the n-th occurrence of a window in one row is paired with the n-th in the other."""
    target_order = y.argsort(kind="stable")
    sorted_y = y[target_order]
    rank = np.empty(len(y), np.int64)
    rank[target_order] = np.arange(len(y)) - sorted_y.searchsorted(sorted_y)
    target_indices = np.flatnonzero(rank < counts)
    diagonals, counts_on = np.unique(target_indices - order[low[target_indices] + rank[target_indices]], return_counts=True)
    return diagonals[np.argsort(-counts_on, kind="stable")[:_DIAGONALS]]


def _likely_runs(a: Ids, b: Ids, diagonals: Ids, shortest: int) -> list[tuple[int, int, int]]:
    """Return all runs on some diagonals."""
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
    """Pick the longest run, then the longest that still fits, and so on; between `first` and `last`.

    Of runs of the same length, the first one in the source is picked; with `moved`, the one that has moved least.
    """
    heap = [(-n, abs(t - s) if moved else s, t, s) for s, t, n in runs]
    heapq.heapify(heap)
    blocks, targets = [first, last], [first.target, last.target]
    while heap:
        negative, _, t, s = heapq.heappop(heap)
        length, shift = -negative, t - s
        index = bisect_right(targets, t) - 1
        while index + 1 < len(blocks) and blocks[index].target < t + length:
            before, behind = blocks[index], blocks[index + 1]
            start, stop = max(t, before.target + before.length), min(t + length, behind.target)
            if not moved:
                start, stop = max(start, before.source + before.length + shift), min(stop, behind.source + shift)
            if stop - start == length:
                blocks.insert(index + 1, Block(s, t, length))
                targets.insert(index + 1, t)
                break
            if stop - start >= shortest:
                # The part that fits is a run of its own.
                heapq.heappush(heap, (start - stop, abs(shift) if moved else start - shift, start, start - shift))
            index += 1
    return blocks
