"""Plan which spans of a row are reused from a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from hf_kvcaches.reuse.alignment import Block, align
from hf_kvcaches.reuse.plan import PlannedRow, PlannedSpan, StoredTokens
from hf_kvcaches.reuse.tokens import Ids
from hf_kvcaches.warmstart.changes import changes
from hf_kvcaches.warmstart.gate import WarmStartGate
from hf_kvcaches.warmstart.library import Neighbour, WarmStartLibrary
from hf_kvcaches.warmstart.swapping import Swap

Served = Literal["exact", "align", "slots", "prefix", "cold"]
Strategy = Literal["auto", "slots", "align", "exact"]

# How many entries a prompt is compared with, token by token.
COMPARED = 3
# Reusing fewer tokens of an entry takes longer than computing them.
WORTH = 96
# On a CPU, attention behind a prefix is slower than that of a whole prompt, so a prefix pays only from 1 / SHARE of the prompt on.
SHARE = 3
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


@dataclass(frozen=True)
class Chooser:
    """Chooses how rows are served; the options are those of the cache.

    Args:
        parts: Whether the model can run spans of a prompt between others.
        moved: Whether tokens can be reused behind another text.
        on_cpu: Whether the prompt is on a CPU.
    """

    library: WarmStartLibrary
    strategy: Strategy
    swap: Swap
    gate: WarmStartGate
    guard: int
    tail: int
    parts: bool
    moved: bool
    on_cpu: bool

    def choose(self, ids: Ids) -> Choice:
        """Choose how a row is served."""
        library = self.library
        if len(ids) < 2:
            return Choice(refused="One token has nothing before it.")
        exact = library.exact(ids)
        splices = library.full and self.strategy != "slots"
        if exact is not None and splices:
            return Choice("exact", exact, (Block(0, 0, len(ids) - 1),))
        prefix = self._prefix(ids) if splices else Choice()
        refused = ""
        if self.strategy != "exact" and self.parts:
            near = library.near(ids, k=COMPARED) if exact is None else [exact._replace(similarity=1.0)]
            if splices and self.moved:
                aligned = self._aligned(near, ids)
                if aligned.reused > prefix.reused:
                    return aligned
                refused = aligned.refused
            enough = prefix.reused > 0 and prefix.reused >= self.gate.reusable * len(ids)
            if self.strategy in ("auto", "slots") and not enough:
                why_not = self._why_no_summary(near, ids)
                if not why_not:
                    return Choice("slots", near[0])
                refused = refused or why_not
        if prefix.neighbour is not None:
            return replace(prefix, refused=refused)
        return Choice(refused=refused or "No entry is like it.")

    def _prefix(self, ids: Ids) -> Choice:
        neighbour, shared = self.library.beginning(ids)
        worth = max(WORTH, len(ids) // SHARE if self.on_cpu else 0)
        return Choice("prefix", neighbour, (Block(0, 0, min(shared, len(ids) - 1)),)) if shared >= worth else Choice()

    def _aligned(self, near: Sequence[Neighbour], ids: Ids) -> Choice:
        best, blocks = best_aligned(near, ids, guard=self.guard, tail=self.tail)
        if best is None:
            return Choice(refused="No entry shares a span with it." if near else "")
        choice = Choice("align", best, blocks)
        if choice.reused < WORTH:
            return Choice(refused=f"{choice.reused} tokens stand in the earlier prompt, too few to be worth it.")
        verdict = self.gate.decide(reusable=choice.reused / len(ids))
        return choice if verdict.admitted else Choice(refused=verdict.reason)

    def _why_no_summary(self, near: Sequence[Neighbour], ids: Ids) -> str:
        library, gate = self.library, self.gate
        if not near:
            return "No entry is like it."
        if not library.slots:
            return "The library has no summaries."
        if len(ids) <= library.tail:
            return "It has no more tokens than the tail behind a summary."
        closest = near[0]
        verdict = gate.decide(similarity=closest.similarity, lengths=(len(closest.ids), len(ids)))
        end = max(1, self.tail)
        if verdict.admitted and gate.lexical and not np.array_equal(closest.ids[-end:], ids[-end:]):
            return "The two don't end alike."
        if verdict.admitted and (gate.lexical or gate.content is not None) and not np.array_equal(closest.ids, ids):
            before = library.prompt(closest.key) or ""
            verdict = gate.decide(changes=changes(before, library.text(ids.tolist()), stop=True))
        if not verdict.admitted:
            return verdict.reason
        if self.strategy == "auto" and self.swap == "off":
            return "Later tokens behind a summary are worse: strategy='auto' takes it with swap='sync' or 'background' only."
        return ""
