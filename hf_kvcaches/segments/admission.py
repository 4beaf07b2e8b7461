"""Which stored segments may stand in for a prompt's tokens, and how much of them is run again.

A row of a prompt becomes parts. Its start, as far as an earlier row had the same one, is taken as it is. What else stood in an earlier row
is a *run*: consecutive tokens with other tokens before them. A run is let in by its depth guard, as repaired, or after a probe, and is
computed otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from hf_kvcaches.segments.index import Piece, Run, SegmentIndex
from hf_kvcaches.segments.policy import SegmentPolicy
from hf_kvcaches.segments.records import Chain, Ids, Tier, common_suffix

Mode = Literal["exact", "approximate", "auto"]
Places = npt.NDArray[np.int64]

_NONE: Places = np.zeros(0, np.int64)
SHINGLE = 8
SURROUNDINGS = 128


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive tokens of a row, and where their keys and values come from.

    Args:
        start: The first token's place in the row.
        stop: Behind the last.
        tier: How they come about. For what an earlier row had from its start on, how they came about there.
        pieces: What is stored of them; empty where they are computed.
        rerun: Places of tokens that are run again although they are stored.
        depth: Up to this layer what is stored is used, and the layers above are run from the hidden states stored there; None: all
            layers are used.
        probe: Whether that still hangs on a probe.
    """

    start: int
    stop: int
    tier: Tier
    pieces: tuple[Piece, ...] = ()
    rerun: Places = field(default_factory=lambda: _NONE)
    depth: int | None = None
    probe: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def reused(self) -> int:
        """Tokens that are not run at all, in the layers that are used."""
        return len(self) - len(self.rerun) if self.pieces else 0


@dataclass(frozen=True, eq=False)
class Plan:
    """What happens to one row's new tokens, all but the last.

    Args:
        begin: Tokens that are in the cache already.
        parts: Without gaps from there on.
        prefix: Where what an earlier row had from its start on ends.
        chain: The name of all tokens up to there.
    """

    begin: int
    parts: tuple[Part, ...]
    prefix: int
    chain: Chain

    @property
    def reuses(self) -> bool:
        """Whether anything at all is reused."""
        return any(part.pieces for part in self.parts)


def plan_row(ids: Ids, begin: int, chain: Chain, index: SegmentIndex, policy: SegmentPolicy, mode: Mode, layers: int) -> Plan:
    """The plan for a row, in which some parts may still want a probe.

    Args:
        ids: All tokens of the row, without the last, which is always computed.
        begin: How many of them are in the cache already.
        chain: The name of those.
        index: What is stored.
        policy: What is let in.
        mode: Whether approximations are let in, with or without gates.
        layers: How many the model has.
    """
    pieces, after = index.prefix(ids, chain, begin, exact_only=mode == "exact")
    parts: list[Part] = []
    for piece in pieces:
        _add(parts, Part(piece.start, piece.stop, piece.record.origin, (piece,)))
    prefix = place = pieces[-1].stop if pieces else begin
    if mode != "exact":
        for run in index.runs(ids, place, policy.shortest):
            _add(parts, Part(place, run.start, "computed"))
            for part in _admitted(ids, run, policy, mode, layers):
                _add(parts, part)
            place = run.stop
    _add(parts, Part(place, len(ids), "computed"))
    return Plan(begin, tuple(parts), prefix, after)


def settle(part: Part, passed: bool) -> Part:
    """A part whose probe is done.

    Args:
        part: The part.
        passed: Whether it may be reused.
    """
    if passed:
        return replace(part, tier="probed", probe=False)
    return Part(part.start, part.stop, "computed")


def _add(parts: list[Part], part: Part) -> None:
    """Puts a part behind others; what comes about alike and without gaps becomes one."""
    if not len(part):
        return
    last = parts[-1] if parts else None
    alike = last is not None and (last.tier, last.depth, bool(last.pieces)) == (part.tier, part.depth, bool(part.pieces))
    if last is None or not alike or len(last.rerun) or len(part.rerun) or part.probe or last.probe:
        parts.append(part)
    else:
        parts[-1] = replace(last, stop=part.stop, pieces=last.pieces + part.pieces)


def _admitted(ids: Ids, run: Run, policy: SegmentPolicy, mode: Mode, layers: int) -> list[Part]:
    """The parts that a run becomes."""
    before = _stood_before(run)
    same = common_suffix(before, ids[: run.start])
    whole = policy.window(layers, layers)
    # From here on enough tokens to the left are the same for all layers.
    safe = run.stop if whole is None else min(run.stop, run.start + max(0, whole - same))
    repaired = int(np.ceil(policy.repair * len(run)))
    if safe == run.start:
        return [Part(run.start, run.stop, "guarded", run.pieces)]
    if mode == "approximate" or similarity(before, ids[: run.start]) >= policy.similarity:
        return [_repaired(run, repaired, safe, "repaired")]
    return [replace(_repaired(run, repaired, safe, "probed"), probe=True)]


def _repaired(run: Run, repaired: int, safe: int, tier: Tier) -> Part:
    """A run whose first tokens are run again, but not more of them than are unsafe."""
    rerun = np.arange(run.start, min(run.start + repaired, safe))
    return Part(run.start, run.stop, tier, run.pieces, rerun)


def _stood_before(run: Run) -> Ids:
    """What stood before a run where it was stored, as far as that was stored."""
    first = run.pieces[0]
    return np.concatenate((first.record.context, first.record.ids[: first.offset]))


def similarity(a: Ids, b: Ids) -> float:
    """How alike two texts end, as the Jaccard similarity of the shingles of their last tokens.

    Args:
        a: Tokens.
        b: Tokens.
    """
    first, second = (_shingles(ids[-SURROUNDINGS:]) for ids in (a, b))
    if not len(first) or not len(second):
        return float(np.array_equal(a, b))
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def _shingles(ids: Ids) -> npt.NDArray[np.uint64]:
    if len(ids) < SHINGLE:
        return np.zeros(0, np.uint64)
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    windows = np.lib.stride_tricks.sliding_window_view(mixed, SHINGLE)
    powers = np.array([pow(0xBF58476D1CE4E5B9, i, 2**64) for i in range(SHINGLE)], dtype=np.uint64)
    return np.unique((windows * powers).sum(axis=1, dtype=np.uint64))
