"""How a `WarmStartCache` serves a prompt: look up a neighbour, decide, write what is reused, recompute the rest."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hf_kvcaches.core.prefill import PrefillCall
from hf_kvcaches.core.splicing.alignment import Block
from hf_kvcaches.core.splicing.placing import Loaded
from hf_kvcaches.core.splicing.plan import PlannedRow, PromptPlan
from hf_kvcaches.core.splicing.tokens import Ids
from hf_kvcaches.warmstart.changes import changes
from hf_kvcaches.warmstart.library import Neighbour
from hf_kvcaches.warmstart.planning import RowPlan, best_aligned

if TYPE_CHECKING:
    from hf_kvcaches.warmstart.cache import WarmStartCache

# Entries that a prompt is compared with, token by token.
COMPARED = 3
# To take fewer tokens from an entry takes longer than to compute them.
WORTH = 96
# On a CPU, attention behind what is reused is slower than that of a whole prompt: a prefix pays from this share of it, 1 / SHARE.
SHARE = 3


@dataclass(frozen=True)
class Outcome:
    """How a prompt was served, with numbers of tokens."""

    taken: int  # in the cache now, padding included
    plans: tuple[RowPlan, ...]
    reused: int
    computed: int
    inexact: bool  # an exact prefill gives other keys and values


class Serving:
    """Serves one prompt, with so much padding at the start of each row."""

    def __init__(self, cache: WarmStartCache, call: PrefillCall, padding: Sequence[int]) -> None:
        self.cache, self.call, self.padding, self.library = cache, call, padding, cache.library
        # Rows may share an entry.
        self.full_of = functools.cache(cache.library.full_of)

    def serve(self) -> Outcome:
        """Plan all rows and carry the plans out."""
        cache, total = self.cache, self.call.input_ids.shape[1]
        rows = [ids[pad:] for ids, pad in zip(cache.history.rows(), self.padding, strict=True)]
        tokens = sum(map(len, rows))
        plans: list[RowPlan] = []
        if not self.library.why_not(cache.identity_of_pass(total)):
            self.library.refresh()
            plans = [self._plan(ids) for ids in rows]
        # To confirm the identity takes long, and is needed only where something is reused.
        if not plans or any(plan.neighbour is not None for plan in plans):
            if why_not := self.library.why_not(cache.confirmed_identity()):
                return Outcome(0, tuple(RowPlan("cold", refused=why_not) for _ in rows), 0, tokens, False)
            plans = plans or [self._plan(ids) for ids in rows]
        if plans[0].served == "slots":
            return self._from_slots(plans[0], rows[0])
        for plan in plans:
            if plan.neighbour is not None:
                self.library.entries.used(plan.neighbour.key, plan.reused)
        reused = sum(plan.reused for plan in plans)
        inexact = any(plan.served == "align" or (plan.blocks and self.library.quantization is not None) for plan in plans)
        prompt = PromptPlan(tuple(map(self._planned, self.padding, plans, rows)), total)
        return Outcome(cache.execute(self.call, prompt), tuple(plans), reused, tokens - reused, inexact)

    def _plan(self, ids: Ids) -> RowPlan:
        """Return what saves most of a row."""
        cache, library = self.cache, self.library
        if len(ids) < 2:
            return RowPlan("cold", refused="One token has nothing before it.")
        exact = library.exact(ids)
        splices = library.full and cache.strategy != "slots"
        if exact is not None and splices and self.full_of(exact.key) is not None:
            return RowPlan("exact", exact, (Block(0, 0, len(ids) - 1),))
        prefix = self._prefix(ids) if splices else RowPlan("cold")
        refused = ""
        if cache.strategy != "exact" and not cache.parts_refused:
            near = library.near(ids, k=COMPARED) if exact is None else [exact._replace(similarity=1.0)]
            if splices and cache.approximates:
                aligned = self._aligned(near, ids)
                if aligned.reused > prefix.reused:
                    return aligned
                refused = aligned.refused
            enough = prefix.reused > 0 and prefix.reused >= cache.gate.reusable * len(ids)
            if cache.strategy in ("auto", "slots") and not enough:
                summary = self._summary(near, ids)
                if summary.neighbour is not None:
                    return summary
                refused = refused or summary.refused
        if prefix.neighbour is not None and self.full_of(prefix.neighbour.key) is not None:
            return replace(prefix, refused=refused)
        return RowPlan("cold", refused=refused or "No entry is like it.")

    def _prefix(self, ids: Ids) -> RowPlan:
        neighbour, shared = self.library.beginning(ids)
        worth = max(WORTH, len(ids) // SHARE if self.call.input_ids.device.type == "cpu" else 0)
        return RowPlan("prefix", neighbour, (Block(0, 0, min(shared, len(ids) - 1)),)) if shared >= worth else RowPlan("cold")

    def _aligned(self, near: Sequence[Neighbour], ids: Ids) -> RowPlan:
        cache = self.cache
        best, blocks = best_aligned(near, ids, guard=cache.guard, tail=cache.tail)
        if best is None:
            return RowPlan("cold", refused="No entry shares a stretch with it." if near else "")
        plan = RowPlan("align", best, blocks)
        if plan.reused < WORTH:
            return RowPlan("cold", refused=f"{plan.reused} tokens stand in the earlier prompt, too few to be worth it.")
        verdict = cache.gate.decide(reusable=plan.reused / len(ids))
        if not verdict.admitted:
            return RowPlan("cold", refused=verdict.reason)
        return plan if self.full_of(best.key) is not None else RowPlan("cold", refused="The entry is gone or damaged.")

    def _summary(self, near: Sequence[Neighbour], ids: Ids) -> RowPlan:
        why_not = self._why_no_summary(near, ids)
        return RowPlan("cold", refused=why_not) if why_not else RowPlan("slots", near[0])

    def _why_no_summary(self, near: Sequence[Neighbour], ids: Ids) -> str:
        cache, library, gate = self.cache, self.library, self.cache.gate
        if not near:
            return "No entry is like it."
        if not library.slots:
            return "The library has no summaries."
        if len(self.padding) > 1:
            return "A summary serves one row, and this is a batch."
        if len(ids) <= library.tail:
            return "It is too short for a summary to stand before it."
        closest = near[0]
        verdict = gate.decide(similarity=closest.similarity, lengths=(len(closest.ids), len(ids)))
        end = max(1, cache.tail)
        if verdict.admitted and gate.lexical and not np.array_equal(closest.ids[-end:], ids[-end:]):
            return "The two don't end alike."
        if verdict.admitted and (gate.lexical or gate.content is not None) and not np.array_equal(closest.ids, ids):
            before = library.prompt(closest.key) or ""
            verdict = gate.decide(changes=changes(before, library.text(ids.tolist()), stop=True))
        if not verdict.admitted:
            return verdict.reason
        if cache.strategy == "auto" and cache.swap == "off":
            return "A summary answers what follows worse: with strategy='auto' it takes swap='sync' or 'background'."
        return ""

    def _planned(self, padding: int, plan: RowPlan, ids: Ids) -> PlannedRow:
        packed = None if plan.neighbour is None else self.full_of(plan.neighbour.key)
        loaded: tuple[Loaded, ...] = ()
        if packed is not None:
            places = ((block.target, block.target + block.length, block.source, block.source) for block in plan.blocks)
            loaded = tuple(Loaded(*place, *packed, codec=self.library.codec) for place in places)
        return PlannedRow(padding, loaded, plan.to_run(len(ids))[:-1])

    def _from_slots(self, plan: RowPlan, ids: Ids) -> Outcome:
        """Recompute only the tail of a prompt, behind the summary of a similar one."""
        cache, library = self.cache, self.library
        assert plan.neighbour is not None
        slots = library.slots_of(plan.neighbour.key)
        if slots is None:
            return Outcome(0, (RowPlan("cold", refused="The summary is gone or damaged."),), 0, len(ids), False)
        # A prompt of fewer tokens than slots has all of them, and nothing to project.
        if cache.projector is not None and all(layer.keys.shape[1] == library.slots for layer in slots.layers):
            slots = cache.projector.apply(slots, len(ids), library.rotation.layers)
        elif library.correction is not None:
            slots = library.correction.shifted(slots, len(ids) - slots.length)
        else:
            slots = slots.shifted(len(ids) - slots.length, library.rotation.layers)
        covered, padding = len(ids) - library.tail, self.padding[0]
        # From positions to columns of the mask. In a shorter prompt some slots have positions before its start.
        layers = [layer._replace(positions=layer.positions.clamp_min(0) + padding) for layer in slots.layers]
        cache.start_from(replace(slots, layers=layers), padding + covered)
        library.entries.used(plan.neighbour.key, covered)
        return Outcome(padding + covered, (plan,), covered, library.tail, True)
