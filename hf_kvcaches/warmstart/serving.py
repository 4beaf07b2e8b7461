"""One prompt's way into a `WarmStartCache`: find a neighbour, decide, write what is reused, run what lies between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_kvcaches.core.prefill import PrefillCall
from hf_kvcaches.core.splicing.placing import Loaded
from hf_kvcaches.core.splicing.plan import PlannedRow, PromptPlan
from hf_kvcaches.core.splicing.tokens import Ids
from hf_kvcaches.warmstart.changes import changes
from hf_kvcaches.warmstart.library import Neighbour
from hf_kvcaches.warmstart.planning import RowPlan, beginning, best_aligned
from hf_kvcaches.warmstart.summaries.slots import Slots

if TYPE_CHECKING:
    from hf_kvcaches.warmstart.cache import WarmStartCache

# Entries that a prompt is compared with, token by token.
COMPARED = 3
# To take fewer tokens from an entry takes longer than to compute them.
WORTH = 96
# On a CPU, attention behind what is reused is slower than that of a whole prompt: a beginning pays that is a third of it.
SHARE = 3


@dataclass(frozen=True)
class Outcome:
    """What became of a prompt.

    Args:
        taken: How many of the prompt's slots are in the cache.
    """

    taken: int
    plans: tuple[RowPlan, ...]
    reused: int
    computed: int
    inexact: bool


class Serving:
    """Serves one prompt.

    Args:
        padding: Slots at the start of each row that hold no token.
    """

    def __init__(self, cache: WarmStartCache, call: PrefillCall, padding: Sequence[int]) -> None:
        self.cache, self.call, self.padding, self.library = cache, call, padding, cache.library
        self._full: dict[str, tuple[Mapping[str, Any], dict[str, torch.Tensor]] | None] = {}

    def serve(self) -> Outcome:
        """Does all of it."""
        cache, call = self.cache, self.call
        total = call.input_ids.shape[1]
        rows = [slots[pad:] for slots, pad in zip(cache.history.rows(), self.padding, strict=True)]
        plans: list[RowPlan] = []
        if not self.library.why_not(cache.identity_of_pass(total)):
            self.library.refresh()
            plans = [self._plan(ids) for ids in rows]
        if not plans or any(plan.neighbour is not None for plan in plans):
            if why_not := self.library.why_not(cache.confirmed_identity()):
                return Outcome(0, tuple(RowPlan("cold", refused=why_not) for _ in rows), 0, sum(map(len, rows)), False)
            plans = plans or [self._plan(ids) for ids in rows]
        if len(plans) == 1 and plans[0].served == "slots":
            outcome = self._from_slots(plans[0], rows[0])
            if outcome is not None:
                return outcome
            plans = [RowPlan("cold", refused="The summary is gone or damaged.")]
        tokens = sum(map(len, rows))
        reused = sum(plan.reused for plan in plans)
        for plan in plans:
            if plan.neighbour is not None:
                self.library.entries.used(plan.neighbour.key, plan.reused)
        inexact = any(plan.served == "align" or (plan.blocks and self.library.full != "exact") for plan in plans)
        if not reused:
            return Outcome(0, tuple(plans), 0, tokens, False)
        planned = tuple(
            PlannedRow(padding, self._loaded(plan), plan.to_run(len(ids))[:-1])
            for padding, plan, ids in zip(self.padding, plans, rows, strict=True)
        )
        return Outcome(cache.execute(call, PromptPlan(planned, total)), tuple(plans), reused, tokens - reused, inexact)

    def _plan(self, ids: Ids) -> RowPlan:
        """What is best for a row."""
        cache, library = self.cache, self.library
        if len(ids) < 2:
            return RowPlan("cold", refused="One token has nothing before it.")
        refused = ""
        exact = library.exact(ids)
        if exact is not None and library.full is not None and cache.strategy != "slots":
            plan = self._with_tensors(RowPlan("exact", exact, beginning(len(ids), len(ids))))
            if plan.blocks:
                return plan
        begins, shared = library.beginning(ids) if library.full is not None and cache.strategy != "slots" else (None, 0)
        worth = max(WORTH, len(ids) // SHARE if self.call.input_ids.device.type == "cpu" else 0)
        prefix = RowPlan("prefix", begins, () if begins is None or shared < worth else beginning(shared, len(ids)))
        if cache.strategy != "exact" and not cache.parts_refused:
            near = [exact._replace(similarity=1.0)] if exact is not None else library.near(ids, k=COMPARED)
            aligned, refused = self._aligned(near, ids, refused)
            if aligned is not None and aligned.reused > prefix.reused:
                return aligned
            enough = prefix.reused > 0 and prefix.reused >= cache.gate.reusable * len(ids)
            if cache.strategy in ("auto", "slots") and not enough:
                slots, why = self._summary(near, ids)
                if slots is not None and cache.strategy == "auto" and cache.swap == "off":
                    slots, why = None, "A summary answers what follows worse: with strategy='auto' it takes swap='sync' or 'background'."
                if slots is not None:
                    return slots
                refused = refused or why
        prefix = self._with_tensors(prefix)
        return replace(prefix, refused=refused) if prefix.blocks else RowPlan("cold", refused=refused or "No entry is like it.")

    def _aligned(self, near: Sequence[Neighbour], ids: Ids, refused: str) -> tuple[RowPlan | None, str]:
        cache = self.cache
        if cache.strategy == "slots" or self.library.full is None or not cache.approximates:
            return None, refused
        best, blocks = best_aligned(near, ids, guard=cache.guard, tail=cache.tail)
        if best is None:
            return None, "No entry shares a stretch with it." if near else refused
        plan = RowPlan("align", best, blocks)
        if plan.reused < WORTH:
            return None, f"{plan.reused} tokens stand in the earlier prompt, too few to be worth it."
        verdict = cache.gate.decide(reusable=plan.reused / len(ids))
        if not verdict.admitted:
            return None, verdict.reason
        plan = self._with_tensors(plan)
        return (plan, "") if plan.blocks else (None, "The entry is gone or damaged.")

    def _summary(self, near: Sequence[Neighbour], ids: Ids) -> tuple[RowPlan | None, str]:
        """A row that is served from a summary, or why not."""
        cache, library = self.cache, self.library
        if not near:
            return None, "No entry is like it."
        if not library.slots:
            return None, "The library has no summaries."
        if len(self.padding) > 1:
            return None, "A summary serves one row, and this is a batch."
        closest = near[0]
        if len(ids) <= library.tail:
            return None, "It is too short for a summary to stand before it."
        verdict = cache.gate.decide(similarity=closest.similarity, lengths=(len(closest.ids), len(ids)))
        end = max(1, cache.tail)
        if verdict.admitted and cache.gate.lexical and not np.array_equal(closest.ids[-end:], ids[-end:]):
            return None, "The two don't end alike."
        reads = cache.gate.lexical or cache.gate.content is not None
        if verdict.admitted and reads and (closest.ids.shape != ids.shape or (closest.ids != ids).any()):
            before = library.prompt(closest.key) or ""
            verdict = cache.gate.decide(changes=changes(before, library.text(ids.tolist()), stop=True))
        return (RowPlan("slots", closest), "") if verdict.admitted else (None, verdict.reason)

    def _with_tensors(self, plan: RowPlan) -> RowPlan:
        """The plan if what it needs is there."""
        if plan.neighbour is None or not plan.blocks:
            return replace(plan, blocks=())
        key = plan.neighbour.key
        if key not in self._full:
            self._full[key] = self.library.full_of(key)
        return plan if self._full[key] is not None else replace(plan, neighbour=None, blocks=())

    def _loaded(self, plan: RowPlan) -> tuple[Loaded, ...]:
        if plan.neighbour is None or not plan.blocks:
            return ()
        found = self._full[plan.neighbour.key]
        assert found is not None
        stored, tensors = found
        return tuple(Loaded(b.target, b.target + b.length, b.source, b.source, stored, tensors) for b in plan.blocks)

    def _from_slots(self, plan: RowPlan, ids: Ids) -> Outcome | None:
        """A prompt of which only the tail is run, behind the summary of a similar one."""
        cache, library = self.cache, self.library
        assert plan.neighbour is not None
        slots: Slots | None = library.slots_of(plan.neighbour.key)
        if slots is None:
            return None
        # A prompt of fewer tokens than slots has all of them, and nothing to project.
        if cache.projector is not None and all(own.shape[1] == library.slots for own in slots.keys):
            slots = cache.projector.apply(slots, len(ids), library.rotation.layers)
        else:
            slots = library.moved(slots, len(ids))
        covered, padding = len(ids) - library.tail, self.padding[0]
        # Places are columns, as masks have them, and keys are turned by positions. In a shorter prompt some slots stand before its start.
        cache.start_from(replace(slots, positions=tuple(own.clamp_min(0) + padding for own in slots.positions)), padding + covered)
        library.entries.used(plan.neighbour.key, covered)
        return Outcome(padding + covered, (plan,), covered, library.tail, True)
