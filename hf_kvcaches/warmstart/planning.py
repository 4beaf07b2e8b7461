"""Plan which spans of a row are reused from a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_kvcaches.reuse.alignment import Block, align
from hf_kvcaches.reuse.plan import PlannedRow, PlannedSpan, StoredTokens
from hf_kvcaches.reuse.tokens import Ids
from hf_kvcaches.warmstart.library import Neighbour

Served = Literal["exact", "align", "slots", "prefix", "cold"]

# Shorter spans that two prompts share are ignored: the tokens behind a change are recomputed anyway.
SHORTEST = 8
# A moved span has other text before it; a short one is mostly recomputed anyway.
SHORTEST_MOVED = 24
# If one neighbour has this share of a prompt, the others are not compared.
ENOUGH = 0.75


@dataclass(frozen=True)
class Choice:
    """How a row is served: from which entry, with which of its spans, and why not by a better strategy."""

    served: Served = "cold"
    neighbour: Neighbour | None = None
    blocks: tuple[Block, ...] = ()
    refused: str = ""

    @property
    def reused(self) -> int:
        """How many tokens are not computed."""
        return sum(block.length for block in self.blocks)

    def spans(self, tokens: int, stored: Mapping[str, Any]) -> tuple[PlannedSpan, ...]:
        """Return the spans of a row of `tokens` tokens, without the last one; `stored` is the metadata of the entry's states."""
        spans: list[PlannedSpan] = []
        end = 0
        for block in self.blocks:
            assert self.neighbour is not None
            start, stop = block.target, block.target + block.length
            reused = StoredTokens(start, stop, self.neighbour.key, block.source, block.source, stored)
            spans += [PlannedSpan(end, start), PlannedSpan(start, stop, self.served, (reused,))]
            end = stop
        return tuple(span for span in [*spans, PlannedSpan(end, tokens - 1, reason=self.refused)] if len(span))


@dataclass(frozen=True, eq=False)
class ServedRow(PlannedRow):
    """A planned row with the choice that its plan was made from."""

    choice: Choice = Choice()

    def outcome(self) -> Choice:
        """Return the choice, or a cold one with the reason if its entry was not fetched."""
        dropped = bool(self.choice.blocks) and self.choice.served != "slots" and next(self.stored, None) is None
        return Choice(refused=next((span.reason for span in self.spans if span.reason), "")) if dropped else self.choice


def reusable_blocks(source: Ids, target: Ids, *, guard: int, tail: int) -> tuple[Block, ...]:
    """Return the spans of a prompt that can be reused from a similar one, in the order of the prompt.

    The states of tokens behind a change depend on it, so the first `guard` of each span are recomputed, and so are the last `tail` (at
    least one) of the prompt. A common prefix is exact and needs no guard.
    """
    end = len(target) - max(1, tail)
    reused: list[Block] = []
    source_end = target_end = 0  # of the previous block
    for block in align(source, target, SHORTEST, moved=True):
        # A block that directly follows another one in both prompts, or begins both, has the same tokens before it.
        continues = (block.source, block.target) == (source_end, target_end)
        in_order = block.source >= source_end
        source_end, target_end = block.source + block.length, block.target + block.length
        if not in_order and not continues and block.length < SHORTEST_MOVED:
            continue
        skip = 0 if continues else guard
        length = min(target_end, end) - block.target - skip
        if length > 0:
            reused.append(Block(block.source + skip, block.target + skip, length))
    return tuple(reused)


def best_aligned(neighbours: Sequence[Neighbour], ids: Ids, *, guard: int, tail: int) -> tuple[Neighbour | None, tuple[Block, ...]]:
    """Return the neighbour from which most tokens of a prompt can be reused, and its spans."""
    best: Neighbour | None = None
    blocks: tuple[Block, ...] = ()
    reused = 0
    for neighbour in neighbours:
        candidate = reusable_blocks(neighbour.ids, ids, guard=guard, tail=tail)
        if (count := sum(block.length for block in candidate)) > reused:
            best, blocks, reused = neighbour, candidate, count
        # Comparing more entries takes longer than computing the few tokens that they could add.
        if reused >= ENOUGH * len(ids):
            break
    return best, blocks
