"""Fill a `WarmStartCache` with one prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_kvcaches import compat
from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.identity import Identity
from hf_kvcaches.core.prefill import Remaining
from hf_kvcaches.core.tokens import Ids
from hf_kvcaches.reuse.alignment import Block
from hf_kvcaches.reuse.pipeline import Pipeline, Tensors
from hf_kvcaches.reuse.plan import PromptPlan, PromptRow
from hf_kvcaches.reuse.storage import Buffers, NewPrompt, states_in
from hf_kvcaches.warmstart.changes import changes
from hf_kvcaches.warmstart.library import Neighbour
from hf_kvcaches.warmstart.planning import Choice, ServedRow, best_aligned
from hf_kvcaches.warmstart.reading import PromptStates, last_token
from hf_kvcaches.warmstart.summaries.slots import Slots

if TYPE_CHECKING:
    from hf_kvcaches.warmstart.cache import WarmStartCache

# How many entries a prompt is compared with, token by token.
COMPARED = 3
# Reusing fewer tokens of an entry takes longer than computing them.
WORTH = 96
# On a CPU, attention behind a prefix is slower than that of a whole prompt, so a prefix pays only from 1 / SHARE of the prompt on.
SHARE = 3


class WarmStartPipeline(Pipeline["WarmStartCache"]):
    """Looks up a neighbour for each row, chooses what is reused from it, and runs the rest."""

    @property
    def codec(self) -> KVCodec | None:
        return self.cache.library.codec

    def refused(self, identity: Identity) -> str:
        return self.cache.library.why_not(identity)

    def leave(self, reason: str, rows: tuple[PromptRow, ...] = ()) -> int:
        self.cache.note([self._planned(row, Choice(refused=reason)) for row in rows], inexact=False)
        return super().leave(reason, rows)

    def look_up(self, identity: Identity, rows: tuple[PromptRow, ...]) -> PromptPlan:
        self.cache.library.refresh()
        choices = [self._chosen(row.ids) for row in rows]
        summaries = sum(choice.served == "slots" for choice in choices)
        if 0 < summaries < len(rows):
            alone = "The rows of a batch take summaries only where all of them can."
            choices = [Choice(refused=alone) if choice.served == "slots" else choice for choice in choices]
        return PromptPlan(tuple(map(self._planned, rows, choices)), self.total)

    def _planned(self, row: PromptRow, choice: Choice) -> ServedRow:
        head = None if choice.neighbour is None else self.cache.library.entries.head(choice.neighbour.key)
        spans = choice.spans(len(row.ids), {} if head is None else head.stored)
        return ServedRow(row.number, row.padding, row.ids, row.begin, spans, choice=choice)

    def _chosen(self, ids: Ids) -> Choice:
        """Choose how a row is served."""
        cache, library = self.cache, self.cache.library
        if len(ids) < 2:
            return Choice(refused="One token has nothing before it.")
        exact = library.exact(ids)
        splices = library.full and cache.strategy != "slots"
        if exact is not None and splices:
            return Choice("exact", exact, (Block(0, 0, len(ids) - 1),))
        prefix = self._prefix(ids) if splices else Choice()
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
                why_not = self._why_no_summary(near, ids)
                if not why_not:
                    return Choice("slots", near[0])
                refused = refused or why_not
        if prefix.neighbour is not None:
            return replace(prefix, refused=refused)
        return Choice(refused=refused or "No entry is like it.")

    def _prefix(self, ids: Ids) -> Choice:
        neighbour, shared = self.cache.library.beginning(ids)
        worth = max(WORTH, len(ids) // SHARE if self.on_cpu else 0)
        return Choice("prefix", neighbour, (Block(0, 0, min(shared, len(ids) - 1)),)) if shared >= worth else Choice()

    def _aligned(self, near: Sequence[Neighbour], ids: Ids) -> Choice:
        cache = self.cache
        best, blocks = best_aligned(near, ids, guard=cache.guard, tail=cache.tail)
        if best is None:
            return Choice(refused="No entry shares a span with it." if near else "")
        choice = Choice("align", best, blocks)
        if choice.reused < WORTH:
            return Choice(refused=f"{choice.reused} tokens stand in the earlier prompt, too few to be worth it.")
        verdict = cache.gate.decide(reusable=choice.reused / len(ids))
        return choice if verdict.admitted else Choice(refused=verdict.reason)

    def _why_no_summary(self, near: Sequence[Neighbour], ids: Ids) -> str:
        cache, library, gate = self.cache, self.cache.library, self.cache.gate
        if not near:
            return "No entry is like it."
        if not library.slots:
            return "The library has no summaries."
        if len(ids) <= library.tail:
            return "It has no more tokens than the tail behind a summary."
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
            return "Later tokens behind a summary are worse: strategy='auto' takes it with swap='sync' or 'background' only."
        return ""

    def seconds_to_read(self, keys: Collection[str]) -> float | None:
        return self.cache.library.entries.catalog.seconds_to_read(keys)

    def read(self, key: str) -> Tensors | None:
        entry = self.cache.library.full_of(key)
        return None if entry is None else entry[1]

    def run(self, plan: PromptPlan) -> tuple[int | Remaining, PromptPlan]:
        if all(isinstance(row, ServedRow) and row.choice.served == "slots" for row in plan.rows):
            return self._run_behind_summaries(plan)
        return super().run(plan)

    def _run_behind_summaries(self, plan: PromptPlan) -> tuple[int, PromptPlan]:
        """Begin each row with the summary of a similar prompt, and compute only its tail."""
        library = self.cache.library
        rows = [row for row in plan.rows if isinstance(row, ServedRow) and row.choice.neighbour is not None]
        stored = [library.slots_of(row.choice.neighbour.key) for row in rows if row.choice.neighbour is not None]
        summaries = [slots for slots in stored if slots is not None]
        counts = {layer.keys.shape[1] for slots in summaries for layer in slots.layers}
        if len(summaries) < len(rows) or (len(rows) > 1 and len(counts) > 1):
            refused = "A batch takes summaries of one size, and those of short prompts are smaller."
            refused = "The summary is gone or damaged." if len(summaries) < len(rows) else refused
            return 0, replace(plan, rows=tuple(replace(row, choice=Choice(refused=refused)) for row in rows))
        moved = [self._moved(slots, len(row.ids), row.padding) for slots, row in zip(summaries, rows, strict=True)]
        taken = plan.total - library.tail
        self.cache.start_from(moved, taken)
        served = [replace(row, choice=replace(row.choice, blocks=(Block(0, 0, len(row.ids) - library.tail),))) for row in rows]
        return taken, replace(plan, rows=tuple(served))

    def _moved(self, slots: Slots, tokens: int, padding: int) -> Slots:
        """Move a summary to the end of a row of `tokens` tokens, with columns of the mask as positions."""
        cache, library = self.cache, self.cache.library
        # A prompt of fewer tokens than slots keeps all of them, so nothing is projected.
        if cache.projector is not None and all(layer.keys.shape[1] == library.slots for layer in slots.layers):
            slots = cache.projector.apply(slots, tokens, library.rotation.layers)
        elif library.correction is not None:
            slots = library.correction.shifted(slots, tokens - slots.length)
        else:
            slots = slots.shifted(tokens - slots.length, library.rotation.layers)
        # In a shorter prompt some slots have positions before its start.
        return replace(slots, layers=[layer._replace(positions=layer.positions.clamp_min(0) + padding) for layer in slots.layers])

    def report(self, plan: PromptPlan, identity: Identity) -> None:
        cache, library = self.cache, self.cache.library
        rows = [row for row in plan.rows if isinstance(row, ServedRow)]
        choices = [row.outcome() for row in rows]
        lossy = library.quantization is not None
        inexact = any(choice.served in ("align", "slots") or (choice.blocks and lossy) for choice in choices)
        cache.note(rows, inexact)
        for choice in choices:
            if choice.neighbour is not None:
                library.entries.used(choice.neighbour.key, choice.reused)
        if inexact:
            cache.expect_swap(self.call, [row.padding for row in rows])
        elif new := [row for row, choice in zip(rows, choices, strict=True) if choice.served in ("cold", "prefix")]:
            cache.remember(new, identity, self.total)


def storing_job(cache: WarmStartCache, rows: Sequence[ServedRow], identity: Identity, slots: int) -> NewPrompt:
    """Return the job that stores the rows of a prompt in the cache's library once they are computed."""
    library, device = cache.library, compat.input_device(cache.model)

    def put(buffers: Buffers) -> None:
        if not identity.is_current():
            return
        for row in rows:
            layers = tuple(states_in(buffers, row.number, slice(row.padding, row.padding + len(row.ids))))
            if len(row.ids) > library.tail and library.entries.exact(ids := row.ids.tolist()) is None:
                states = PromptStates(layers, (), ())
                if library.slots:
                    last = last_token(library.model, torch.tensor([ids], device=device), layers)
                    states = PromptStates(layers, last.queries, last.scaling)
                library.keep(ids, states)

    return NewPrompt(slots, put)
