"""The plan of a prompt: a frozen value that is made, checked, executed and reported."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_kvcaches.reuse.index import COMPUTED, EXACT, Ids, Piece, Record

# Indices of tokens in their row, padding not counted, ascending.
Indices = npt.NDArray[np.int64]

# How many tokens at the end of a prompt are computed where text before them has changed; those that they attend to most are repaired.
PROBING = 8


@dataclass(frozen=True, eq=False)
class PlannedSpan:
    """Consecutive tokens of a row, and where their keys and values come from.

    Args:
        rule: What admitted them, or "computed".
        sources: The stored tokens that are reused, without gaps; empty where all tokens are computed.
        repair: How many of its tokens are recomputed, in the layers below `repair_depth`; the layers above reuse them.
        repair_depth: None: all layers.
        picked: The indices of the recomputed tokens, ascending; None until they are picked: the first ones.
        reason: Why nothing more is reused, as a sentence; "" where nothing is stored or everything is reused.
    """

    start: int
    stop: int
    rule: str = COMPUTED
    sources: tuple[Piece, ...] = ()
    repair: int = 0
    repair_depth: int | None = None
    reason: str = ""
    picked: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def reused(self) -> int:
        """How many tokens no layer computes."""
        return self.stop - self.start - self.repair if self.sources else 0

    @property
    def computed(self) -> Indices:
        """The indices of the tokens that the lowest layer computes."""
        if self.picked is not None:
            return np.array(self.picked, np.int64)
        return np.arange(self.start, self.start + self.repair if self.sources else self.stop)

    def outline(self) -> tuple[Any, ...]:
        """What it computes and reuses; not from which blobs, where tokens were computed behind the same text."""
        sources = [] if self.rule == EXACT else [(piece.start, piece.stop, piece.offset, piece.position) for piece in self.sources]
        return self.start, self.stop, self.rule, bool(self.sources), sources, self.repair, self.repair_depth

    def cut(self, stop: int) -> PlannedSpan:
        """Return the span up to an index inside of it."""
        sources = tuple(piece.cut(stop) for piece in self.sources if piece.start < stop)
        return replace(self, stop=min(self.stop, stop), sources=sources, repair=min(self.repair, stop - self.start))

    def without(self, keys: Collection[str], reason: str) -> list[PlannedSpan]:
        """Return the spans that replace this one when blobs are missing; a span that is not repaired keeps its other blobs."""
        if not any(piece.record.key in keys for piece in self.sources):
            return [self]
        if self.repair:
            return [PlannedSpan(self.start, self.stop, reason=reason)]
        return [
            PlannedSpan(piece.start, piece.stop, reason=reason)
            if piece.record.key in keys
            else replace(self, start=piece.start, stop=piece.stop, sources=(piece,))
            for piece in self.sources
        ]


@dataclass(frozen=True, eq=False)
class PromptRow:
    """A row of a prompt, with the plan for its new tokens but the last one, which the model itself runs.

    Args:
        padding: Slots at its start that hold no token.
        ids: All its token ids, including those in the cache.
        begin: How many of them are in the cache.
        spans: The plan, without gaps; empty until it is made.
        prefix: Up to this index, reused tokens were computed behind the same tokens.
        probed: How many of its last tokens run again, once the tokens are repaired that they attend to; the new ones have run by then.
    """

    number: int
    padding: int
    ids: Ids
    begin: int
    spans: tuple[PlannedSpan, ...] = ()
    prefix: int = 0
    probed: int = 0

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
        return np.concatenate([np.zeros(0, np.int64), *(span.computed for span in self.spans)])

    @property
    def new(self) -> Indices:
        """The indices of the tokens for which nothing is reused, without the last one."""
        return np.concatenate([np.zeros(0, np.int64), *(span.computed for span in self.spans if not span.sources)])

    @property
    def remaining(self) -> Indices:
        """The indices of the tokens that still run when repaired ones are picked, without the last one."""
        if not self.probed:
            return self.computed
        repaired = [span.computed for span in self.spans if span.sources]
        return np.unique(np.concatenate([*repaired, np.arange(len(self.ids) - self.probed, len(self.ids) - 1)]))

    @property
    def behind(self) -> int:
        """How many tokens are behind the last reused one."""
        return len(self.ids) - max((piece.stop for piece in self.sources), default=self.begin)

    def picking(self, shares: npt.NDArray[np.float32], probed: int) -> PromptRow:
        """Return the row with the tokens picked that are repaired: of all repaired spans those with the largest shares.

        Args:
            shares: Of the weights of the last `probed` tokens, for each token of the row.
        """
        indices = np.concatenate([np.zeros(0, np.int64), *(np.arange(span.start, span.stop) for span in self.spans if span.repair)])
        best = np.argsort(-shares[indices], kind="stable")[: sum(span.repair for span in self.spans)]
        picked = np.sort(indices[best])
        spans = []
        for span in self.spans:
            own = tuple(picked[(picked >= span.start) & (picked < span.stop)].tolist())
            spans.append(replace(span, repair=len(own), picked=own) if span.repair else span)
        return replace(self, spans=tuple(spans), probed=probed)

    def cut(self, stop: int, reason: str = "") -> PromptRow:
        """Return the row with reuse only before an index."""
        spans = [span.cut(stop) for span in self.spans if span.start < stop]
        end = len(self.ids) - 1
        return replace(self, spans=(*spans, PlannedSpan(stop, end, reason=reason)) if stop < end else tuple(spans))

    def without(self, keys: Collection[str], reason: str) -> PromptRow:
        """Return the row without reuse of missing blobs."""
        lost = [piece.start for piece in self.sources if piece.record.key in keys]
        spans = tuple(part for span in self.spans for part in span.without(keys, reason))
        return replace(self, spans=spans, prefix=min([self.prefix, *lost]))


@dataclass(frozen=True, eq=False)
class PromptPlan:
    """The plans of all rows of a prompt.

    Args:
        total: Slots of the prompt, including those in the cache.
    """

    rows: tuple[PromptRow, ...]
    total: int

    @cached_property
    def records(self) -> dict[str, Record]:
        """The spans that are reused, by the keys of their blobs."""
        return {piece.record.key: piece.record for row in self.rows for piece in row.sources}

    @property
    def repairs(self) -> bool:
        """Whether some tokens of a span are recomputed, and others are not."""
        return any(0 < span.repair < len(span) for row in self.rows for span in row.spans)

    @property
    def repair_depths(self) -> list[int]:
        """The layers at which repaired tokens leave, ascending."""
        return sorted({span.repair_depth for row in self.rows for span in row.spans if span.repair and span.repair_depth is not None})

    def outline(self) -> str:
        """Which tokens are reused, and from which tokens' states, as a text: the same for plans that run the same tokens."""
        return repr([(row.number, row.begin, [span.outline() for span in row.spans]) for row in self.rows])

    @property
    def prefixes(self) -> list[int]:
        """For each row, the number of slots before the first token that runs."""
        return [row.padding + int(row.computed[0]) if len(row.computed) else self.total - 1 for row in self.rows]

    @property
    def only_prefix(self) -> int | None:
        """How many first slots all rows reuse, where they reuse nothing else; else None."""
        prefix, *others = set(self.prefixes)
        alone = not others and all(len(row.computed) == self.total - 1 - prefix for row in self.rows)
        return prefix if alone else None

    def without(self, keys: Collection[str], reason: str) -> PromptPlan:
        """Return the plan without reuse of missing blobs."""
        return replace(self, rows=tuple(row.without(keys, reason) for row in self.rows))

    def with_common_prefix(self) -> PromptPlan:
        """Return the plan with reuse of as many first slots as all rows can, and nothing else."""
        common = min(self.prefixes)
        return replace(self, rows=tuple(row.cut(max(common - row.padding, row.begin)) for row in self.rows))


def joined(spans: Sequence[PlannedSpan]) -> tuple[PlannedSpan, ...]:
    """Drop empty spans, and merge consecutive ones of one rule that are not repaired."""
    merged: list[PlannedSpan] = []
    for span in spans:
        last = merged[-1] if merged else None
        if span.start == span.stop:
            continue
        if last is None or last.repair or span.repair or _kind(last) != _kind(span):
            merged.append(span)
        else:
            merged[-1] = replace(last, stop=span.stop, sources=last.sources + span.sources)
    return tuple(merged)


def _kind(span: PlannedSpan) -> tuple[Any, ...]:
    return span.rule, bool(span.sources), span.reason
