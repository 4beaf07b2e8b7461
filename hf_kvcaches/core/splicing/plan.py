"""What becomes of a prompt: a frozen plan, which is made, checked, executed and reported."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_kvcaches.core.splicing.tokens import Ids

# Of tokens in their row, padding not counted, ascending.
Indices = npt.NDArray[np.int64]

NONE: Indices = np.zeros(0, np.int64)
# The tier of tokens that run through all layers.
COMPUTED = "computed"


class StoredTokens(NamedTuple):
    """Consecutive tokens of a row, and the blob that has their keys and values.

    Args:
        offset: Of the first of them in the blob.
        position: Of the first of them where it was computed.
        stored: What `packing.encode` gave with the blob's tensors.
    """

    start: int
    stop: int
    key: str
    offset: int
    position: int
    stored: Mapping[str, Any]

    def cut(self, start: int, stop: int) -> StoredTokens:
        """Those of the tokens that lie between two indices."""
        start, stop = max(start, self.start), min(stop, self.stop)
        skipped = start - self.start
        return self._replace(start=start, stop=stop, offset=self.offset + skipped, position=self.position + skipped)


@dataclass(frozen=True, eq=False)
class Check:
    """What settles a span once its keys have been compared at a layer.

    Args:
        probe: Whether the span is reused only if a probe passes.
        choose: How many of its tokens are recomputed, those whose keys deviate most.
        likeness: Of the tokens before it where it was stored, and those before it in the row.
        otherwise: What the span becomes if the probe fails.
    """

    probe: bool = False
    choose: int = 0
    likeness: float = 0.0
    otherwise: tuple[PlannedSpan, ...] = ()


@dataclass(frozen=True, eq=False)
class PlannedSpan:
    """Consecutive tokens of a row, and where their keys and values come from.

    Args:
        tier: By which rule they are reused, or "computed".
        stored: The stored tokens that are reused, without gaps; empty where all are computed.
        recompute: Indices of stored tokens that run through all layers nevertheless.
        depth: The layers below it are reused, and those above run from stored hidden states; None: all layers are reused.
        reason: Why nothing is reused, or no more, as a sentence; "" where nothing was found or all is reused.
        check: What has to be settled first, or None.
    """

    start: int
    stop: int
    tier: str = COMPUTED
    stored: tuple[StoredTokens, ...] = ()
    recompute: Indices = field(default_factory=lambda: NONE)
    depth: int | None = None
    reason: str = ""
    check: Check | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def reused(self) -> int:
        """Tokens that run through none of the layers that are reused."""
        return len(self) - len(self.recompute) if self.stored else 0

    def joining(self) -> Indices:
        """Indices of the tokens that run from `depth` on."""
        return np.setdiff1d(np.arange(self.start, self.stop), self.recompute) if self.depth is not None else NONE

    def cut(self, stop: int) -> PlannedSpan:
        """The span up to an index inside of it."""
        stored = tuple(tokens.cut(self.start, stop) for tokens in self.stored if tokens.start < stop)
        return replace(self, stop=min(self.stop, stop), stored=stored)

    def without(self, keys: Collection[str], reason: str) -> list[PlannedSpan]:
        """The spans that this one becomes where blobs are gone: what else is stored of a whole span stays."""
        if not any(tokens.key in keys for tokens in self.stored):
            return [self]
        if len(self.recompute) or self.check is not None:
            return [PlannedSpan(self.start, self.stop, reason=reason)]
        return [
            PlannedSpan(tokens.start, tokens.stop, reason=reason)
            if tokens.key in keys
            else replace(self, start=tokens.start, stop=tokens.stop, stored=(tokens,))
            for tokens in self.stored
        ]


@dataclass(frozen=True, eq=False)
class PromptRow:
    """A row of a prompt.

    Args:
        padding: Slots at its start that hold no token.
        ids: All its tokens, those in the cache included.
        begin: How many of them are in the cache.
    """

    number: int
    padding: int
    ids: Ids
    begin: int

    def planned(self, spans: Sequence[PlannedSpan], prefix: int = 0) -> PlannedRow:
        """The row with a plan."""
        return PlannedRow(self.number, self.padding, self.ids, self.begin, tuple(spans), max(prefix, self.begin))


@dataclass(frozen=True, eq=False)
class PlannedRow(PromptRow):
    """A row with the plan for all its new tokens but the last, which is the model's.

    Args:
        prefix: Up to this index stored tokens stood behind the same tokens.
    """

    spans: tuple[PlannedSpan, ...] = ()
    prefix: int = 0

    @property
    def stored(self) -> Iterator[StoredTokens]:
        """All stored tokens that are reused."""
        return (tokens for span in self.spans for tokens in span.stored)

    @property
    def reused(self) -> int:
        """Tokens that are not computed in the layers that are reused."""
        return sum(span.reused for span in self.spans)

    def recompute(self) -> Indices:
        """Indices of the tokens that run through all layers."""
        runs = [span.recompute if span.stored else np.arange(span.start, span.stop) for span in self.spans]
        return np.concatenate([NONE, *runs])

    def cut(self, stop: int, reason: str = "") -> PlannedRow:
        """The row of which only what comes before an index is reused."""
        spans = [span.cut(stop) for span in self.spans if span.start < stop]
        end = len(self.ids) - 1
        return replace(self, spans=(*spans, PlannedSpan(stop, end, reason=reason)) if stop < end else tuple(spans))

    def without(self, keys: Collection[str], reason: str) -> PlannedRow:
        """The row without what is stored in blobs that are gone."""
        lost = [tokens.start for tokens in self.stored if tokens.key in keys]
        spans = tuple(part for span in self.spans for part in span.without(keys, reason))
        return replace(self, spans=spans, prefix=min([self.prefix, *lost]))


@dataclass(frozen=True, eq=False)
class PromptPlan:
    """A prompt of several rows.

    Args:
        total: Slots of the prompt, with those that the cache holds already.
    """

    rows: tuple[PlannedRow, ...]
    total: int

    @property
    def stored(self) -> Iterator[StoredTokens]:
        """All stored tokens that are reused."""
        return (tokens for row in self.rows for tokens in row.stored)

    @property
    def checked(self) -> bool:
        """Whether a span is still to be settled."""
        return any(span.check is not None for row in self.rows for span in row.spans)

    @property
    def prefixes(self) -> list[int]:
        """Of each row the slots before the first token that runs."""
        ends = [row.recompute() for row in self.rows]
        return [row.padding + int(run[0]) if len(run) else self.total - 1 for row, run in zip(self.rows, ends, strict=True)]

    @property
    def reuses_a_prefix_only(self) -> bool:
        """Whether nothing is reused but the same first slots of all rows."""
        prefix, *others = set(self.prefixes)
        return not others and all(len(row.recompute()) == self.total - 1 - prefix for row in self.rows)


def joined(spans: Sequence[PlannedSpan]) -> list[PlannedSpan]:
    """Spans without empty ones; those of one kind that follow one another become one."""
    found: list[PlannedSpan] = []
    for span in spans:
        last = found[-1] if found else None
        if not len(span):
            continue
        alike = last is not None and _kind(last) == _kind(span) and last.stop == span.start
        if last is None or not alike or any(len(part.recompute) or part.check is not None for part in (last, span)):
            found.append(span)
        else:
            found[-1] = replace(last, stop=span.stop, stored=last.stored + span.stored)
    return found


def _kind(span: PlannedSpan) -> tuple[Any, ...]:
    return span.tier, span.depth, bool(span.stored), span.reason
