"""Tiers: rules that admit or reject stored tokens behind another text, each a class with one method.

A custom tier subclasses `SegmentTier` and is passed to `SegmentReuseCache(tiers=...)`. Tiers are tried in order, and the first one that
admits a candidate decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.reuse.plan import COMPUTED, Check, PlannedSpan, StoredTokens, joined
from hf_kvcaches.reuse.tokens import Ids, common_suffix, window_hashes
from hf_kvcaches.segments.index import SHINGLE, Run, StoredSpan
from hf_kvcaches.segments.policy import SegmentPolicy

Mode = Literal["exact", "approximate", "auto"]

# How many tokens before a segment are compared, by their shingles.
SURROUNDINGS = 128


@dataclass(frozen=True, eq=False)
class Candidate:
    """Consecutive tokens of a row that an earlier prompt had behind another text.

    Args:
        ids: All tokens of the row.
    """

    run: Run
    ids: Ids

    @property
    def start(self) -> int:
        """Index of the first token."""
        return self.run.start

    @property
    def stop(self) -> int:
        """Index behind the last token."""
        return self.run.stop

    def __len__(self) -> int:
        return len(self.run)

    @property
    def tokens(self) -> Ids:
        """The candidate's own tokens."""
        return self.ids[self.start : self.stop]

    @property
    def before(self) -> Ids:
        """The tokens before it in the row."""
        return self.ids[: self.start]

    @cached_property
    def stored_before(self) -> Ids:
        """The last tokens before it in the text where it was stored."""
        first = self.run.pieces[0]
        return np.concatenate((first.record.context, first.record.ids[: first.offset]))

    @cached_property
    def same(self) -> int:
        """How many tokens directly before it are the same in both texts."""
        return common_suffix(self.stored_before, self.before)

    @cached_property
    def likeness(self) -> float:
        """How similar both texts before it are, see `likeness`."""
        return likeness(self.stored_before, self.before)

    def reused(self, tier: str, context: TierContext, recompute: int = 0) -> PlannedSpan:
        """Return the whole candidate as a span of a plan, with its first tokens recomputed."""
        depth = stored_depth(self.run.pieces, context.layers)
        first = np.arange(self.start, self.start + recompute)
        return PlannedSpan(self.start, self.stop, tier, stored_tokens(self.run.pieces), first, depth)


@dataclass(frozen=True)
class TierContext:
    """What tiers decide by, besides the candidate.

    Args:
        layers: How many layers the model has.
        experience: Whether earlier probes of a segment passed or failed at a likeness of its surroundings; None if they don't tell.
    """

    policy: SegmentPolicy
    layers: int
    experience: Callable[[Ids, float], bool | None] = lambda ids, likeness: None


class Verdict(NamedTuple):
    """The decision of a tier on a candidate.

    Args:
        spans: The spans of it that are reused, with or without gaps; empty if the tier rejects it.
        reason: Why it is rejected, as a sentence.
        probe: Whether the spans are reused only if a probe of the candidate passes.
    """

    spans: tuple[PlannedSpan, ...] = ()
    reason: str = ""
    probe: bool = False

    @property
    def admitted(self) -> bool:
        """Whether anything of the candidate is reused, or a probe decides."""
        return bool(self.spans)


class SegmentTier(ABC):
    """A rule that admits or rejects stored tokens behind another text.

    Attributes:
        name: The tier's name in reports.
    """

    name: ClassVar[str]

    @abstractmethod
    def admit(self, candidate: Candidate, context: TierContext) -> Verdict:
        """Decide which of the candidate's tokens are reused, or why none."""


class GuardedTier(SegmentTier):
    """Admits tokens behind as many equal tokens as the policy's guard requires for all layers."""

    name = "guarded"

    def admit(self, candidate: Candidate, context: TierContext) -> Verdict:
        window = context.policy.window(context.layers, context.layers)
        if window is not None and candidate.same >= window:
            return Verdict((candidate.reused(self.name, context),))
        return Verdict(reason=f"{candidate.same} tokens before it are the same, too few for the guard of all layers.")


class RepairedTier(SegmentTier):
    """Admits tokens in similar surroundings, and recomputes some of them: a departure from the paper, after CacheBlend and EPIC.

    Args:
        likeness: The least Jaccard similarity of the surroundings' shingles; None for the policy's.
    """

    name = "repaired"

    def __init__(self, likeness: float | None = None) -> None:
        self.likeness = likeness

    def admit(self, candidate: Candidate, context: TierContext) -> Verdict:
        least = context.policy.similarity if self.likeness is None else self.likeness
        # A threshold of 0 admits everything, without comparing surroundings.
        if least > 0 and candidate.likeness < least:
            return Verdict(reason=f"Its surroundings have a likeness of {candidate.likeness:.2f}, below {least:g}.")
        return Verdict((repaired(self.name, candidate, context),))


class ProbedTier(SegmentTier):
    """Admits tokens whose stored keys get the same attention as recomputed ones, by a probe or by earlier probes."""

    name = "probed"

    def admit(self, candidate: Candidate, context: TierContext) -> Verdict:
        policy = context.policy
        if policy.probe > 1 or context.layers <= policy.check_layer:
            return Verdict(reason="The policy has no probes.")
        passed = context.experience(candidate.tokens, candidate.likeness)
        if passed is False:
            return Verdict(reason="Probes of it failed in surroundings that were as similar.")
        return Verdict((repaired(self.name, candidate, context),), probe=passed is None)


class LowerLayersTier(SegmentTier):
    """Admits as many of the lowest layers as the guards allow, more of them further into a segment; needs a store with `cuts`."""

    name = "guarded"

    def admit(self, candidate: Candidate, context: TierContext) -> Verdict:
        spans: list[PlannedSpan] = []
        edges = [candidate.start + tokens - candidate.same for _, tokens in context.policy.guard]
        for piece in (part for whole in candidate.run.pieces for part in _split(whole, edges)):
            safe = context.policy.safe_depth(candidate.same + piece.start - candidate.start, context.layers)
            depth = max((cut for cut in piece.record.stored.get("cuts", ()) if cut <= safe), default=None)
            if depth is not None:
                spans.append(PlannedSpan(piece.start, piece.stop, self.name, stored_tokens([piece]), depth=depth))
        return Verdict(tuple(joined(spans)), "Too few tokens before it are the same, or no hidden states are stored at a safe layer.")


def tiers_of(mode: Mode) -> tuple[SegmentTier, ...]:
    """Return the tiers of a mode, in order."""
    if mode == "exact":
        return ()
    if mode == "approximate":
        return GuardedTier(), RepairedTier(likeness=0.0)
    return GuardedTier(), RepairedTier(), ProbedTier(), LowerLayersTier()


def admitted(candidate: Candidate, tiers: Sequence[SegmentTier], context: TierContext) -> list[PlannedSpan]:
    """Return the spans of a candidate, without gaps: those of the first tier that admits it, or one computed span."""
    reasons: list[str] = []
    for number, tier in enumerate(tiers):
        verdict = tier.admit(candidate, context)
        if not isinstance(verdict, Verdict):
            raise ConfigError.of("tiers", f"a Verdict from {type(tier).__name__}.admit", type(verdict).__name__)
        if not verdict.admitted:
            reasons.append(verdict.reason)
            continue
        spans = _without_gaps(candidate, verdict.spans)
        if not verdict.probe:
            return spans
        if len(spans) > 1:
            raise ConfigError.of("tiers", "one span of the whole candidate beside probe=True", f"{len(spans)} spans")
        return [_probed(spans[0], candidate.likeness, tuple(admitted(candidate, tiers[number + 1 :], context)))]
    return [PlannedSpan(candidate.start, candidate.stop, reason=" ".join(filter(None, reasons)))]


def _probed(span: PlannedSpan, likeness: float, otherwise: tuple[PlannedSpan, ...]) -> PlannedSpan:
    choose = 0 if span.check is None else span.check.choose
    fallback = tuple(replace(part, reason=part.reason or "The probe failed.") if not part.stored else part for part in otherwise)
    return replace(span, check=Check(True, choose, likeness, fallback))


def _without_gaps(candidate: Candidate, spans: Sequence[PlannedSpan]) -> list[PlannedSpan]:
    """Fill the gaps between a tier's spans with computed ones; refuse spans that a tier may not return."""
    filled: list[PlannedSpan] = []
    index = candidate.start
    for span in spans:
        if span.start < index or span.stop > candidate.stop or (span.stored and span.tier in ("exact", COMPUTED)):
            expected = f"spans in order, within {candidate.start} to {candidate.stop}, of a tier that is neither 'exact' nor 'computed'"
            raise ConfigError.of("tiers", expected, f"{span.start} to {span.stop} of the tier {span.tier!r}")
        filled += [PlannedSpan(index, span.start), span]
        index = span.stop
    return joined([*filled, PlannedSpan(index, candidate.stop)])


def repaired(tier: str, candidate: Candidate, context: TierContext) -> PlannedSpan:
    """Return a candidate with the policy's share of tokens recomputed, except tokens that the guard of all layers admits."""
    policy = context.policy
    window = policy.window(context.layers, context.layers)
    unsafe = len(candidate) if window is None else min(len(candidate), max(0, window - candidate.same))
    count = min(int(np.ceil(policy.repair * len(candidate))), unsafe)
    # Keys are compared while all tokens of a check still run.
    depth = max(int(np.ceil(policy.repair_depth * context.layers)), policy.check_layer)
    chosen = policy.repair_by == "deviation" and context.layers > policy.check_layer and count > 0
    span = candidate.reused(tier, context, 0 if chosen else count)
    return replace(
        span,
        check=Check(choose=count) if chosen else None,
        repair_depth=depth if count and span.depth is None and depth < context.layers else None,
    )


def stored_tokens(spans: Sequence[StoredSpan]) -> tuple[StoredTokens, ...]:
    """Convert stored spans to the stored tokens of a plan."""
    return tuple(StoredTokens(span.start, span.stop, span.record.key, span.offset, span.position, span.record.stored) for span in spans)


def stored_depth(spans: Sequence[StoredSpan], layers: int) -> int | None:
    """Return how many layers all spans are stored of; None for all layers of the model."""
    stored = min((sum(map(len, span.record.stored.get("piles", ()))) for span in spans), default=layers)
    return stored if 0 < stored < layers else None


def likeness(a: Ids, b: Ids) -> float:
    """Return how similar two texts end: the Jaccard similarity of the shingles of their last `SURROUNDINGS` tokens."""
    first, second = (_shingles(ids[-SURROUNDINGS:].tobytes()) for ids in (a, b))
    if not first or not second:
        return float(np.array_equal(a, b))
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


@lru_cache(1024)
def _shingles(ids: bytes) -> frozenset[int]:
    # Cached, because every prompt that has a stored segment compares the tokens before it.
    return frozenset(window_hashes(np.frombuffer(ids, np.uint32), SHINGLE).tolist())


def _split(piece: StoredSpan, edges: Sequence[int]) -> Iterator[StoredSpan]:
    """Cut a stored span at the indices that lie inside of it."""
    cuts = sorted({piece.start, piece.stop, *(edge for edge in edges if piece.start < edge < piece.stop)})
    for start, stop in pairwise(cuts):
        yield StoredSpan(start, stop, piece.record, piece.offset + start - piece.start)
