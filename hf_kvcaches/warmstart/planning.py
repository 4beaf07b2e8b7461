"""What of a row of a prompt is taken from a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hf_kvcaches.core.splicing.alignment import Block, align
from hf_kvcaches.core.splicing.plan import Indices
from hf_kvcaches.core.splicing.tokens import Ids
from hf_kvcaches.warmstart.library import Neighbour

Served = Literal["exact", "align", "slots", "prefix", "cold"]

# Shorter stretches that two prompts share are not looked for: the tokens behind a change are run anyway.
SHORTEST = 8
# A stretch that stands elsewhere has other text before it; a short one is mostly what is run again anyway.
SHORTEST_MOVED = 24
# A neighbour that has so much of a prompt will do.
ENOUGH = 0.75


@dataclass(frozen=True)
class RowPlan:
    """A row.

    Args:
        neighbour: From which entry, or None where it is computed.
        blocks: What is taken: where it stands in the entry, where in the row, and how many tokens.
    """

    served: Served
    neighbour: Neighbour | None = None
    blocks: tuple[Block, ...] = ()
    refused: str = ""

    @property
    def reused(self) -> int:
        """Tokens that are not run."""
        return sum(block.length for block in self.blocks)

    def to_run(self, tokens: int) -> Indices:
        """The other tokens."""
        run = np.ones(tokens, dtype=bool)
        for block in self.blocks:
            run[block.target : block.target + block.length] = False
        return np.flatnonzero(run)


def reusable_blocks(source: Ids, target: Ids, *, guard: int, tail: int, moved: bool = True) -> tuple[Block, ...]:
    """What of a prompt can be taken from a similar one, in the order of the prompt.

    Tokens behind a change have taken it in, so the first ones of each stretch are run again, and so are the last of the prompt. What both
    begin with is exact and needs no guard.

    Args:
        tail: Tokens to run again at the end; at least one.
        moved: Whether stretches may stand in another order.
    """
    blocks = align(source, target, SHORTEST, moved=moved)
    end = len(target) - max(1, tail)
    kept = []
    # What is first in the source and the prompt stays, what follows it there as well.
    for before, block in zip([None, *blocks], blocks, strict=False):
        begins = block.source == block.target == 0
        goes_on = before is not None and (before.source + before.length, before.target + before.length) == (block.source, block.target)
        in_order = before is None or block.source >= before.source + before.length
        if not (begins or in_order) and block.length < SHORTEST_MOVED:
            continue
        skip = 0 if begins or goes_on else guard
        length = min(block.target + block.length, end) - block.target - skip
        if length > 0:
            kept.append(Block(block.source + skip, block.target + skip, length))
    return tuple(kept)


def beginning(shared: int, tokens: int) -> tuple[Block, ...]:
    """What a row begins with like an entry, without the row's last token."""
    return (Block(0, 0, min(shared, tokens - 1)),)


def best_aligned(neighbours: Sequence[Neighbour], ids: Ids, *, guard: int, tail: int) -> tuple[Neighbour | None, tuple[Block, ...]]:
    """The entry that most of a prompt can be taken from, and what."""
    best: Neighbour | None = None
    blocks: tuple[Block, ...] = ()
    for neighbour in neighbours:
        found = reusable_blocks(neighbour.ids, ids, guard=guard, tail=tail)
        if sum(block.length for block in found) > sum(block.length for block in blocks):
            best, blocks = neighbour, found
        # To compare more entries takes longer than to compute what little they could add.
        if sum(block.length for block in blocks) >= ENOUGH * len(ids):
            break
    return best, blocks
