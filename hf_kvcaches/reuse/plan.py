"""The plan of a prompt: a frozen value that is made, checked, executed and reported."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_kvcaches.reuse.tokens import Ids

# Indices of tokens in their row, padding not counted, ascending.
Indices = npt.NDArray[np.int64]

NONE: Indices = np.zeros(0, np.int64)
# The tier of tokens that all layers compute.
COMPUTED = "computed"
# The tier of tokens that were computed behind the same tokens.
EXACT = "exact"


class StoredTokens(NamedTuple):
    """Consecutive tokens of a row, and the blob that has their keys and values.

    Args:
        offset: The first token's index in the blob.
        position: The first token's position when it was computed.
        stored: What `layout.encode` returned with the blob's tensors.
    """

    start: int
    stop: int
    key: str
    offset: int
    position: int
    stored: Mapping[str, Any]

    def cut(self, start: int, stop: int) -> StoredTokens:
        """Return the part of the tokens that lies between two indices."""
        start, stop = max(start, self.start), min(stop, self.stop)
        skipped = start - self.start
        return self._replace(start=start, stop=stop, offset=self.offset + skipped, position=self.position + skipped)


@dataclass(frozen=True, eq=False)
class Check:
    """The check that decides a span, once its keys have been compared at a layer.

    Args:
        probe: Whether the span is reused only if a probe passes.
        choose: How many of its tokens are recomputed: those whose keys deviate most.
        likeness: The similarity of the tokens before the stored span and those before it in the row.
        otherwise: The spans that replace it if the probe fails.
    """

    probe: bool = False
    choose: int = 0
    likeness: float = 0.0
    otherwise: tuple[PlannedSpan, ...] = ()


@dataclass(frozen=True, eq=False)
class PlannedSpan:
    """Consecutive tokens of a row, and where their keys and values come from.

    Args:
        tier: The rule that admitted them, or "computed".
        stored: The stored tokens that are reused, without gaps; empty where all tokens are computed.
        recompute: Indices of stored tokens that are recomputed.
        depth: Layers below it are reused, the others run from stored hidden states; None: all layers are reused.
        reason: Why nothing more is reused, as a sentence; "" where nothing is stored or everything is reused.
        check: What decides the span first, or None.
        repair_depth: The layers below it recompute the tokens of `recompute`, the others reuse them; None: all layers recompute them.
    """

    start: int
    stop: int
    tier: str = COMPUTED
    stored: tuple[StoredTokens, ...] = ()
    recompute: Indices = field(default_factory=lambda: NONE)
    depth: int | None = None
    reason: str = ""
    check: Check | None = None
    repair_depth: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def reused(self) -> int:
        """How many tokens the reused layers do not compute."""
        return len(self) - len(self.recompute) if self.stored else 0

    def outline(self) -> tuple[Any, ...]:
        """What it computes and reuses; not from which blobs, where tokens were computed behind the same text."""
        stored = [] if self.tier == EXACT else [(tokens.start, tokens.stop, tokens.offset, tokens.position) for tokens in self.stored]
        reused = bool(self.stored)
        check = self.check and (self.check.probe, self.check.choose, [span.outline() for span in self.check.otherwise])
        return self.start, self.stop, self.tier, reused, stored, self.recompute.tolist(), self.depth, self.repair_depth, check

    def joining(self) -> Indices:
        """Return the indices of the tokens that run from layer `depth` on."""
        return np.setdiff1d(np.arange(self.start, self.stop), self.recompute) if self.depth is not None else NONE

    def cut(self, stop: int) -> PlannedSpan:
        """Return the span up to an index inside of it."""
        stored = tuple(tokens.cut(self.start, stop) for tokens in self.stored if tokens.start < stop)
        return replace(self, stop=min(self.stop, stop), stored=stored)

    def without(self, keys: Collection[str], reason: str) -> list[PlannedSpan]:
        """Return the spans that replace this one when blobs are missing; a span without recomputed tokens keeps its other blobs."""
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
        ids: All its token ids, including those in the cache.
        begin: How many of them are in the cache.
    """

    number: int
    padding: int
    ids: Ids
    begin: int

    def planned(self, spans: Sequence[PlannedSpan], prefix: int = 0) -> PlannedRow:
        """Return the row with a plan."""
        return PlannedRow(self.number, self.padding, self.ids, self.begin, tuple(spans), max(prefix, self.begin))


@dataclass(frozen=True, eq=False)
class PlannedRow(PromptRow):
    """A row with the plan for its new tokens, without the last one, which the model itself runs.

    Args:
        prefix: Up to this index, stored tokens were computed behind the same tokens.
    """

    spans: tuple[PlannedSpan, ...] = ()
    prefix: int = 0

    @property
    def stored(self) -> Iterator[StoredTokens]:
        """All stored tokens that are reused."""
        return (tokens for span in self.spans for tokens in span.stored)

    @property
    def reused(self) -> int:
        """How many tokens the reused layers do not compute."""
        return sum(span.reused for span in self.spans)

    def recompute(self) -> Indices:
        """Return the indices of the tokens that the lowest layer computes: all layers do, but for those above a `repair_depth`."""
        runs = [span.recompute if span.stored else np.arange(span.start, span.stop) for span in self.spans]
        return np.concatenate([NONE, *runs])

    def cut(self, stop: int, reason: str = "") -> PlannedRow:
        """Return the row with reuse only before an index."""
        spans = [span.cut(stop) for span in self.spans if span.start < stop]
        end = len(self.ids) - 1
        return replace(self, spans=(*spans, PlannedSpan(stop, end, reason=reason)) if stop < end else tuple(spans))

    def without(self, keys: Collection[str], reason: str) -> PlannedRow:
        """Return the row without reuse of missing blobs."""
        lost = [tokens.start for tokens in self.stored if tokens.key in keys]
        spans = tuple(part for span in self.spans for part in span.without(keys, reason))
        return replace(self, spans=spans, prefix=min([self.prefix, *lost]))


@dataclass(frozen=True, eq=False)
class PromptPlan:
    """The plans of all rows of a prompt.

    Args:
        total: Slots of the prompt, including those in the cache.
    """

    rows: tuple[PlannedRow, ...]
    total: int

    @property
    def stored(self) -> Iterator[StoredTokens]:
        """All stored tokens that are reused."""
        return (tokens for row in self.rows for tokens in row.stored)

    @property
    def checked(self) -> bool:
        """Whether a check still has to decide a span."""
        return any(span.check is not None for row in self.rows for span in row.spans)

    @property
    def repairs_lower_layers(self) -> bool:
        """Whether some tokens are recomputed in the lower layers only."""
        return any(span.repair_depth is not None for row in self.rows for span in row.spans)

    def outline(self) -> str:
        """Which tokens are reused, and from which tokens' states, as a text: the same for plans that run the same tokens."""
        return repr([(row.number, row.begin, [span.outline() for span in row.spans]) for row in self.rows])

    @property
    def prefixes(self) -> list[int]:
        """For each row, the number of slots before the first token that runs."""
        computed = [row.recompute() for row in self.rows]
        return [row.padding + int(indices[0]) if len(indices) else self.total - 1 for row, indices in zip(self.rows, computed, strict=True)]

    @property
    def reuses_a_prefix_only(self) -> bool:
        """Whether all rows reuse the same number of first slots, and nothing else."""
        prefix, *others = set(self.prefixes)
        return not others and all(len(row.recompute()) == self.total - 1 - prefix for row in self.rows)


def joined(spans: Sequence[PlannedSpan]) -> list[PlannedSpan]:
    """Drop empty spans and merge consecutive spans of one kind."""
    merged: list[PlannedSpan] = []
    for span in spans:
        last = merged[-1] if merged else None
        if not len(span):
            continue
        mergeable = last is not None and _kind(last) == _kind(span) and last.stop == span.start
        if last is None or not mergeable or any(len(part.recompute) or part.check is not None for part in (last, span)):
            merged.append(span)
        else:
            merged[-1] = replace(last, stop=span.stop, stored=last.stored + span.stored)
    return merged


def _kind(span: PlannedSpan) -> tuple[Any, ...]:
    return span.tier, span.depth, bool(span.stored), span.reason
