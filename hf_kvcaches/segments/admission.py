"""Which stored segments are reused for a prompt's tokens, and how many of these are recomputed.

A row of a prompt becomes parts. Its prefix, as far as an earlier row had the same one, is reused as it is. Other consecutive tokens that an
earlier row had after another text are a *run*. A run is admitted by its depth guard, as repaired, or by a probe, and is computed otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from hf_kvcaches.core.splicing.tokens import Ids, common_suffix, window_hashes
from hf_kvcaches.segments.index import SHINGLE, Run, SegmentIndex, StoredSpan
from hf_kvcaches.segments.policy import SegmentPolicy
from hf_kvcaches.segments.records import Chain, Tier
from hf_kvcaches.segments.resembling import Resembling

Mode = Literal["exact", "approximate", "auto"]
Places = npt.NDArray[np.int64]

# A probe is so many consecutive tokens: the queries of the last ones, against the keys of those before.
SLICE, PROBES = 4, 1
_NONE: Places = np.zeros(0, np.int64)
SURROUNDINGS = 128


@dataclass(frozen=True, eq=False)
class PlannedSpan:
    """Consecutive tokens of a row, and where their keys and values come from.

    Args:
        tier: How they come about. For what an earlier row had from its start on, how they came about there.
        pieces: What is stored of them; empty where they are computed.
        rerun: Places of tokens that are run again although they are stored.
        depth: Up to this layer what is stored is used, and the layers above are run from the hidden states stored there; None: all
            layers are used.
        similarity: Of what stood before it where it was stored, and what stands before it now; where a probe asks.
        choose: How many tokens are still to be chosen for `rerun`, by how much their keys deviate.
        instead: What it becomes if the probe fails.
    """

    start: int
    stop: int
    tier: Tier
    pieces: tuple[StoredSpan, ...] = ()
    rerun: Places = field(default_factory=lambda: _NONE)
    depth: int | None = None
    probe: bool = False
    choose: int = 0
    instead: tuple[PlannedSpan, ...] = ()
    similarity: float = 0.0

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def reused(self) -> int:
        """Tokens that are not run at all, in the layers that are used."""
        return len(self) - len(self.rerun) if self.pieces else 0

    @property
    def open(self) -> bool:
        """Whether something of it is settled only when its keys have been looked at."""
        return self.probe or self.choose > 0

    def joining(self) -> Places:
        """Places of the tokens that are run from `depth` on."""
        return np.setdiff1d(np.arange(self.start, self.stop), self.rerun) if self.depth is not None else _NONE


@dataclass(frozen=True, eq=False)
class Plan:
    """What happens to one row's new tokens, all but the last.

    Args:
        prefix: Where what an earlier row had from its start on ends.
        chain: The name of all tokens up to there.
    """

    begin: int
    parts: tuple[PlannedSpan, ...]
    prefix: int
    chain: Chain

    @property
    def reuses(self) -> bool:
        """Whether anything at all is reused."""
        return any(part.pieces for part in self.parts)


def plan_row(
    ids: Ids,
    begin: int,
    chain: Chain,
    index: SegmentIndex,
    policy: SegmentPolicy,
    mode: Mode,
    layers: int,
    resembling: Resembling | None = None,
    verdict: Callable[[Ids, float], bool | None] | None = None,
) -> Plan:
    """The plan for a row, in which some parts may still want a probe.

    Args:
        ids: All tokens of the row, without the last, which is always computed.
        mode: Whether approximations are let in, with or without gates.
        resembling: Looks for near-identical segments; only asked where something verbatim was found, because a look takes longer.
        verdict: What earlier probes say of a segment, given the similarity of its surroundings: passed, failed, or None.
    """
    pieces, after = index.prefix(ids, chain, begin, exact_only=mode == "exact")
    parts: list[PlannedSpan] = []
    for piece in pieces:
        _add(parts, PlannedSpan(piece.start, piece.stop, piece.record.origin, (piece,), depth=_stored_depth((piece,), layers)))
    prefix = place = pieces[-1].stop if pieces else begin
    if mode != "exact":
        runs = index.runs(ids, place, policy.shortest)
        if resembling is not None and (pieces or runs):
            # A look takes as long as computing many tokens, so it must promise more than one short stretch.
            worth = 2 * policy.aligned - SHINGLE
            gaps = [gap for gap in _gaps(runs, place, len(ids)) if index.shares_with(ids[gap[0] : gap[1]]) > worth]
            runs = sorted([*runs, *resembling.runs(ids, gaps, policy.aligned)], key=lambda run: run.start) if gaps else runs
        for run in runs:
            _add(parts, PlannedSpan(place, run.start, "computed"))
            for part in _admitted(ids, run, policy, mode, layers, verdict):
                _add(parts, part)
            place = run.stop
    _add(parts, PlannedSpan(place, len(ids), "computed"))
    return Plan(begin, tuple(_affordable(parts, len(ids) - begin, policy, layers)), prefix, after)


def _affordable(parts: Sequence[PlannedSpan], tokens: int, policy: SegmentPolicy, layers: int) -> list[PlannedSpan]:
    """The parts with no more probes than the policy pays for: the longest segments are probed, and the others do without."""
    probed = sorted((part for part in parts if part.probe), key=len, reverse=True)
    # Of the layer that is looked at only the keys and queries are computed, less than half of it.
    allowed = int(policy.probing * tokens * layers / ((SLICE + PROBES) * (policy.check_layer + 0.5)))
    # A look of its own takes longer than to compute a few tokens; they are looked at when there is more to look at.
    allowed = 0 if sum(map(len, probed[:allowed])) < 4 * policy.shortest else allowed
    refused = {id(part) for part in probed[allowed:]}
    kept: list[PlannedSpan] = []
    for part in parts:
        for admitted in part.instead if id(part) in refused else (part,):
            _add(kept, admitted)
    return kept


def _gaps(runs: Sequence[Run], start: int, stop: int) -> list[tuple[int, int]]:
    """What lies before, between and behind runs."""
    edges = [start, *(edge for run in runs for edge in (run.start, run.stop)), stop]
    return list(zip(edges[::2], edges[1::2], strict=True))


def settle(part: PlannedSpan, passed: bool, deviations: npt.NDArray[np.float32] | None = None) -> tuple[PlannedSpan, ...]:
    """What becomes of a part that has been looked at.

    Args:
        deviations: How much the keys of its tokens deviate, (tokens,), where some are to be chosen.
    """
    if not passed:
        return part.instead
    rerun = part.rerun
    if part.choose and deviations is not None:
        rerun = np.sort(np.argsort(-deviations, kind="stable")[: part.choose]) + part.start
    return (replace(part, rerun=rerun, probe=False, choose=0, instead=()),)


def _add(parts: list[PlannedSpan], part: PlannedSpan) -> None:
    """Puts a part behind others; what comes about alike and without gaps becomes one."""
    if not len(part):
        return
    last = parts[-1] if parts else None
    alike = last is not None and (last.tier, last.depth, bool(last.pieces)) == (part.tier, part.depth, bool(part.pieces))
    if last is None or not alike or len(last.rerun) or len(part.rerun) or part.open or last.open:
        parts.append(part)
    else:
        parts[-1] = replace(last, stop=part.stop, pieces=last.pieces + part.pieces)


def _admitted(
    ids: Ids, run: Run, policy: SegmentPolicy, mode: Mode, layers: int, verdict: Callable[[Ids, float], bool | None] | None
) -> list[PlannedSpan]:
    """The parts that a run becomes."""
    before = _stood_before(run)
    same = common_suffix(before, ids[: run.start])
    whole = policy.window(layers, layers)
    # From here on enough tokens to the left are the same for all layers.
    safe = run.stop if whole is None else min(run.stop, run.start + max(0, whole - same))
    repaired = int(np.ceil(policy.repair * len(run)))
    depth = _stored_depth(run.pieces, layers)
    if safe == run.start:
        return [PlannedSpan(run.start, run.stop, "guarded", run.pieces, depth=depth)]
    # Not more than are unsafe.
    repaired = min(repaired, safe - run.start)
    part = PlannedSpan(run.start, run.stop, "repaired", run.pieces, depth=depth)
    if policy.repair_by == "deviation" and layers > policy.check_layer:
        part = replace(part, choose=repaired)
    else:
        part = replace(part, rerun=np.arange(run.start, run.start + repaired))
    if mode == "approximate":
        return [part]
    alike = similarity(before, ids[: run.start])
    if alike >= policy.similarity:
        return [part]
    passed = False if policy.probe > 1 or layers <= policy.check_layer else None
    if passed is None and verdict is not None:
        passed = verdict(ids[run.start : run.stop], alike)
    if passed:
        return [replace(part, tier="probed")]
    guarded = _guarded(run, same, policy, layers)
    return guarded if passed is False else [replace(part, tier="probed", probe=True, similarity=alike, instead=tuple(guarded))]


def _guarded(run: Run, same: int, policy: SegmentPolicy, layers: int) -> list[PlannedSpan]:
    """A run of which only as many layers are reused as its guards allow, the further into it the more."""
    parts: list[PlannedSpan] = []
    # Where one more guard is met.
    edges = [run.start + tokens - same for _, tokens in policy.guard]
    for piece in (part for whole in run.pieces for part in _split(whole, edges)):
        safe = policy.safe_depth(same + piece.start - run.start, layers)
        depth = max((cut for cut in piece.record.stored.get("cuts", ()) if cut <= safe), default=None)
        reused = PlannedSpan(piece.start, piece.stop, "guarded", (piece,), depth=depth)
        _add(parts, PlannedSpan(piece.start, piece.stop, "computed") if depth is None else reused)
    return parts


def _split(piece: StoredSpan, edges: Sequence[int]) -> Iterator[StoredSpan]:
    """A piece, cut at those of the places that lie inside of it."""
    places = sorted({piece.start, piece.stop, *(edge for edge in edges if piece.start < edge < piece.stop)})
    for start, stop in pairwise(places):
        yield StoredSpan(start, stop, piece.record, piece.offset + start - piece.start)


def _stored_depth(pieces: Sequence[StoredSpan], layers: int) -> int | None:
    """How many layers are stored of all pieces, or None for all that the model has."""
    stored = min((sum(map(len, piece.record.stored.get("piles", ()))) for piece in pieces), default=layers)
    return stored if 0 < stored < layers else None


def _stood_before(run: Run) -> Ids:
    """What stood before a run where it was stored, as far as that was stored."""
    first = run.pieces[0]
    return np.concatenate((first.record.context, first.record.ids[: first.offset]))


def similarity(a: Ids, b: Ids) -> float:
    """How alike two texts end, as the Jaccard similarity of the shingles of their last tokens."""
    first, second = (_shingles(ids[-SURROUNDINGS:].tobytes()) for ids in (a, b))
    if not first or not second:
        return float(np.array_equal(a, b))
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


@lru_cache(1024)
def _shingles(ids: bytes) -> frozenset[int]:
    # Kept, because what stood before a stored segment is asked for with every prompt that has the segment.
    return frozenset(window_hashes(np.frombuffer(ids, np.uint32), SHINGLE).tolist())
