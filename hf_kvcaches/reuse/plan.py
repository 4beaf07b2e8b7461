"""The plan of a prompt: a frozen value that is made, checked, executed and reported."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.reuse.index import COMPUTED, EXACT, Ids, Match, Piece, Record
from hf_kvcaches.reuse.policy import Admission, Admit

# Indices of tokens in their row, padding not counted, ascending.
Indices = npt.NDArray[np.int64]

PROBING = 8  # tokens at a prompt's end that are computed where text before them has changed; what they attend to most is repaired
_FIRST = 3  # one in so many of a span's repaired tokens is among its first ones, which depend most on the text before


@dataclass(frozen=True, eq=False)
class PlannedSpan:
    """Consecutive tokens of a row, and where their keys and values come from."""

    start: int
    stop: int
    rule: str = COMPUTED  # what admitted them, or "computed"
    sources: tuple[Piece, ...] = ()  # the stored tokens that are reused, without gaps; none where all tokens are computed
    repaired: tuple[int, ...] = ()  # indices of stored tokens that are recomputed, ascending: until they are picked, the first ones
    repair_depth: int | None = None  # the layers below it recompute these, the layers above reuse them; None: all recompute them
    reason: str = ""  # why nothing more is reused, as a sentence; "" where nothing is stored or everything is reused

    @property
    def reused(self) -> int:
        """How many tokens no layer computes."""
        return self.stop - self.start - len(self.computed)

    @property
    def computed(self) -> Indices:
        """The indices of the tokens that the lowest layer computes."""
        return np.array(self.repaired, np.int64) if self.sources else np.arange(self.start, self.stop)

    def cut(self, stop: int) -> PlannedSpan:
        """Return the span up to an index inside of it."""
        sources = tuple(piece._replace(stop=min(stop, piece.stop)) for piece in self.sources if piece.start < stop)
        repaired = tuple(index for index in self.repaired if index < stop)
        return replace(self, stop=min(self.stop, stop), sources=sources, repaired=repaired)

    def without(self, keys: Collection[str], reason: str) -> list[PlannedSpan]:
        """Return the spans that are left of it without missing blobs; one that is not repaired keeps its other pieces."""
        spans = [replace(self, start=piece.start, stop=piece.stop, sources=(piece,)) for piece in self.sources]
        parts = spans if self.sources and not self.repaired else [self]
        lost = [any(piece.record.key in keys for piece in part.sources) for part in parts]
        return [PlannedSpan(part.start, part.stop, reason=reason) if gone else part for part, gone in zip(parts, lost, strict=True)]


@dataclass(frozen=True, eq=False)
class PromptRow:
    """A row of a prompt, with the plan for its new tokens but the last one, which the model itself runs."""

    number: int
    padding: int  # slots at its start that hold no token
    ids: Ids  # all its tokens, of which the first `begin` are in the cache
    begin: int
    spans: tuple[PlannedSpan, ...] = ()  # the plan, without gaps; empty until it is made
    prefix: int = 0  # up to this index, reused tokens were computed behind the same tokens
    probed: int = 0  # its last tokens that run again once the tokens are repaired that they attend to; the new ones have run by then

    @property
    def sources(self) -> Iterator[Piece]:
        """All stored tokens that are reused."""
        return (piece for span in self.spans for piece in span.sources)

    @property
    def reused(self) -> int:
        """How many tokens no layer computes."""
        return sum(span.reused for span in self.spans)

    @cached_property
    def computed(self) -> Indices:
        """The indices of the tokens that the lowest layer computes, without the last one."""
        return _together(span.computed for span in self.spans)

    @property
    def new(self) -> Indices:
        """The indices of the tokens for which nothing is reused, without the last one."""
        return _together(span.computed for span in self.spans if not span.sources)

    def last(self, most: int) -> Indices:
        """Return the indices of at most so many of the tokens behind the last reused one."""
        behind = max((piece.stop for piece in self.sources), default=self.begin)
        return np.arange(max(behind, len(self.ids) - most), len(self.ids))

    def running(self, layer: int = 0) -> Indices:
        """Return the indices of the tokens that a layer still computes when repaired ones are picked, without the last one."""
        indices = self.computed
        if self.probed:
            indices = np.union1d(np.setdiff1d(indices, self.new), np.arange(len(self.ids) - self.probed, len(self.ids) - 1))
        left = _together(span.computed for span in self.spans if span.repair_depth is not None and span.repair_depth <= layer)
        return np.setdiff1d(indices, left)

    def picking(self, shares: npt.NDArray[np.float32], probed: int) -> PromptRow:
        """Return the row with the repaired tokens picked: the first few of each span, and of all spans those with the largest shares."""
        shares = shares.copy()
        for span in self.spans:
            shares[span.start : span.start + -(-len(span.repaired) // _FIRST)] = np.inf
        indices = _together(np.arange(span.start, span.stop) for span in self.spans if span.repaired)
        best = np.argsort(-shares[indices], kind="stable")[: sum(len(span.repaired) for span in self.spans)]
        picked = np.sort(indices[best])
        inside = [picked[(picked >= span.start) & (picked < span.stop)].tolist() for span in self.spans]
        spans = [replace(span, repaired=tuple(repaired)) for span, repaired in zip(self.spans, inside, strict=True)]
        return replace(self, spans=tuple(spans), probed=probed)

    def cut(self, stop: int, reason: str = "") -> PromptRow:
        """Return the row with reuse only before an index."""
        spans = [span.cut(stop) for span in self.spans if span.start < stop]
        end = len(self.ids) - 1
        return replace(self, spans=(*spans, PlannedSpan(stop, end, reason=reason)) if stop < end else tuple(spans))

    def without(self, keys: Collection[str], reason: str) -> PromptRow:
        """Return the row without reuse of missing blobs."""
        prefix = min([self.prefix, *(piece.start for piece in self.sources if piece.record.key in keys)])
        return replace(self, spans=_joined([part for span in self.spans for part in span.without(keys, reason)]), prefix=prefix)


@dataclass(frozen=True, eq=False)
class PromptPlan:
    """The plans of all rows of a prompt."""

    rows: tuple[PromptRow, ...]
    total: int  # slots of the prompt, including those in the cache

    @cached_property
    def records(self) -> dict[str, Record]:
        """The spans that are reused, by the keys of their blobs."""
        return {piece.record.key: piece.record for row in self.rows for piece in row.sources}

    @property
    def padding(self) -> list[int]:
        return [row.padding for row in self.rows]

    @property
    def repair_depths(self) -> list[int]:
        """The layers at which repaired tokens leave, ascending."""
        return sorted({span.repair_depth for row in self.rows for span in row.spans if span.repaired and span.repair_depth is not None})

    def outline(self) -> str:
        """Return which tokens are reused, from where in which text: the same for plans that run the same tokens."""
        parts: list[Any] = []
        for row in self.rows:
            for span in row.spans:
                # Tokens that were computed behind the same text may be from any blobs.
                moved = [] if span.rule == EXACT else [(piece.start, piece.stop, piece.offset, piece.position) for piece in span.sources]
                parts.append((row.number, row.begin, span.start, span.stop, span.rule, span.repaired, span.repair_depth, moved))
        return repr(parts)

    @property
    def common_prefix(self) -> int:
        """How many first slots all rows reuse."""
        return min(row.padding + int(row.computed[0]) if len(row.computed) else self.total - 1 for row in self.rows)

    @property
    def only_prefix(self) -> int | None:
        """How many first slots all rows reuse, where they reuse nothing else; else None."""
        prefix = self.common_prefix
        return prefix if all(len(row.computed) == self.total - 1 - prefix for row in self.rows) else None

    def without(self, keys: Collection[str], reason: str) -> PromptPlan:
        """Return the plan without reuse of missing blobs."""
        return replace(self, rows=tuple(row.without(keys, reason) for row in self.rows))

    def with_common_prefix(self, reason: str = "") -> PromptPlan:
        """Return the plan with reuse of as many first slots as all rows can, and nothing else."""
        prefix = self.common_prefix
        return replace(self, rows=tuple(row.cut(max(prefix - row.padding, row.begin), reason) for row in self.rows))


def plan_row(row: PromptRow, prefix: Sequence[Piece], matches: Sequence[Match], admit: Admit | None, layers: int) -> PromptRow:
    """Plan a row from what is stored: exact tokens of the prefix, from `row.begin` on, are reused, and `admit` decides on all others.

    Matches are behind the prefix, in order, without overlaps and the row's last token. Without `admit` an exact prefix alone is reused.
    """
    reached = end = prefix[-1].stop if prefix else row.begin
    spans: list[PlannedSpan] = []
    # What is not exact was repaired for another end of the prompt, unless the whole prompt is stored.
    whole = end == len(row.ids) - 1
    for as_stored, pieces in groupby(prefix, lambda piece: whole or piece.record.origin == EXACT):
        if as_stored:
            spans += [PlannedSpan(piece.start, piece.stop, piece.record.origin, (piece,)) for piece in pieces]
        elif admit is not None:
            spans.append(_admitted(Match(tuple(pieces), row.ids), admit, layers))
    if admit is not None:
        for match in matches:
            spans += [PlannedSpan(end, match.start), _admitted(match, admit, layers)]
            end = match.stop
    spans.append(PlannedSpan(end, len(row.ids) - 1))
    return replace(row, spans=_joined(spans), prefix=reached)


def _admitted(match: Match, admit: Admit, layers: int) -> PlannedSpan:
    admission = admit(match)
    if not isinstance(admission, Admission) or admission.rule in (EXACT, COMPUTED) or not 0 <= admission.repair <= len(match):
        expected = f"an Admission with a rule of another name than 'exact' and 'computed', and a repair of 0 to {len(match)} tokens"
        raise ConfigError.of("admit", expected, admission)
    if not admission.rule:
        return PlannedSpan(match.start, match.stop, reason=admission.reason)
    depth = math.ceil(admission.repair_depth * layers)
    repaired = tuple(range(match.start, match.start + admission.repair)) if depth else ()
    return PlannedSpan(match.start, match.stop, admission.rule, match.pieces, repaired, depth if repaired and depth < layers else None)


def _together(indices: Iterable[Indices]) -> Indices:
    return np.concatenate([np.zeros(0, np.int64), *indices])


def _joined(spans: Sequence[PlannedSpan]) -> tuple[PlannedSpan, ...]:
    """Drop empty spans, and merge consecutive ones of one rule that are not repaired."""
    merged: list[PlannedSpan] = []
    for span in (span for span in spans if span.start < span.stop):
        last = merged[-1] if merged else None
        alike = last is not None and (last.rule, not last.sources, last.reason) == (span.rule, not span.sources, span.reason)
        if last is None or not alike or last.repaired or span.repaired:
            merged.append(span)
        else:
            merged[-1] = replace(last, stop=span.stop, sources=last.sources + span.sources)
    return tuple(merged)
