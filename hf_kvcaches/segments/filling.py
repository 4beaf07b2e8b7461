"""Fill a `SegmentReuseCache` with one prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.identity import Identity
from hf_kvcaches.core.prefill import PrefillCall, Remaining
from hf_kvcaches.reuse.flops import Costs
from hf_kvcaches.reuse.pipeline import Pipeline, Tensors
from hf_kvcaches.reuse.plan import PlannedRow, PromptPlan, PromptRow
from hf_kvcaches.reuse.storage import Buffers, NewPrompt
from hf_kvcaches.segments.near import NearIdentical
from hf_kvcaches.segments.planning import plan_row
from hf_kvcaches.segments.records import Chain
from hf_kvcaches.segments.scope import other_scopes, scope_of
from hf_kvcaches.segments.stages import Stages
from hf_kvcaches.segments.storing import Hidden, NewRow, SegmentForm, new_segments
from hf_kvcaches.segments.tiers import TierContext

if TYPE_CHECKING:
    from hf_kvcaches.segments.cache import SegmentReuseCache

# On a CPU, reuse behind computed tokens pays only from 1 / SHARE of a prompt on. Less than 1 / LEAST of it never pays.
SHARE, LEAST = 5, 50


class SegmentPipeline(Pipeline["SegmentReuseCache"]):
    """Looks up segments, lets tiers admit or reject them, and runs the rest, in stages if one pass is not enough."""

    def __init__(self, cache: SegmentReuseCache, call: PrefillCall) -> None:
        super().__init__(cache, call)
        self.scope = ""
        self.stages: Stages | None = None
        self.hidden: dict[int, Hidden] = {}
        # By blob: the hidden states of tokens that run, or may run, from a higher layer on.
        self.joining: dict[str, Tensors] = {}

    @property
    def codec(self) -> KVCodec | None:
        return self.cache.store.codec

    def refused(self, identity: Identity) -> str:
        return identity.reason

    def look_up(self, identity: Identity, rows: tuple[PromptRow, ...]) -> PromptPlan:
        cache, store = self.cache, self.cache.store
        self.scope = scope_of(identity, cache.model, cache.tokenizer, store.quantization, store.depth)
        store.refresh(self.scope, partial(other_scopes, identity, cache.model, cache.tokenizer, store.quantization, store.depth))
        policy = cache.policy
        verdict = partial(store.experience.verdict, self.scope, policy.check_layer)
        context = TierContext(policy, len(cache.layers), lambda ids, likeness: verdict(ids, likeness, policy.probe, policy.repair))
        tiers = cache.tiers if cache.approximates else ()
        with store.reading():
            index = store.index(self.scope)
            planned = []
            for row in rows:
                near = NearIdentical(index, cache.discovery, cache.caller_spans_of(row.number)) if store.near_identical else None
                planned.append(self._worth_reusing(plan_row(row, index, tiers, context, near)))
        return PromptPlan(tuple(planned), self.total)

    def _worth_reusing(self, row: PlannedRow) -> PlannedRow:
        """Return the row, with reuse of its prefix alone, or of nothing, where too few of its tokens are stored for more to pay."""
        tokens, reason = len(row.ids) - row.begin, f"{row.reused} tokens are stored, too few for reuse to pay."
        behind = any(span.reused for span in row.spans if span.start >= row.prefix)
        if behind and row.reused < max(self.cache.policy.shortest, tokens // SHARE if self.on_cpu else 0):
            row = row.cut(row.prefix, reason)
        return row if row.reused >= tokens // LEAST else row.cut(row.begin, reason)

    def seconds_to_read(self, keys: Collection[str]) -> float | None:
        return self.cache.store.catalog.seconds_to_read(keys)

    def read(self, key: str) -> Tensors | None:
        return self.cache.store.tensors(key, self.call.input_ids.device)

    def write(self, plan: PromptPlan, blobs: Mapping[str, Tensors], make_room: bool) -> None:
        super().write(plan, blobs, make_room)
        # All of them: a failed probe may leave a span to the lower layers of its blobs.
        for key, tensors in blobs.items():
            self.joining[key] = {name: tensor for name, tensor in tensors.items() if name.startswith("hidden.")}

    def run(self, plan: PromptPlan) -> tuple[int | Remaining, PromptPlan]:
        cache, store = self.cache, self.cache.store
        if not cache.approximates:
            # The model continues from the same slot in all rows.
            common = min(plan.prefixes)
            plan = replace(plan, rows=tuple(row.cut(max(common - row.padding, row.begin)) for row in plan.rows))
        elif store.cuts or store.depth or plan.checked or plan.repairs_lower_layers:
            self.stages = Stages(cache, self.call, plan, self.joining, self.scope)
            plan, self.hidden = self.stages.run()
            return cache.take(plan.total - 1), plan
        return super().run(plan)

    def report(self, plan: PromptPlan, identity: Identity) -> None:
        cache = self.cache
        costs = Costs.of(cache.model)
        with cache.store.reading():
            new_rows = [self._new(row) for row in plan.rows]
        for row in plan.rows:
            cost = self.operations(PromptPlan((row,), self.total))
            if self.stages is not None:
                cost += self.stages.cost_of_checks(row, costs)
            cache.note(row, cost, costs.of_prompt(row.begin, len(row.ids)))
            # The last first: among equally useful segments, the start of a prompt is evicted last.
            for tokens in reversed(list(row.stored)):
                cache.store.used(tokens.key, tokens.stop - tokens.start)
        if new_rows := [new for new in new_rows if new.stored < len(new.row.ids)]:
            self._expect(new_rows, identity)

    def _new(self, row: PlannedRow) -> NewRow:
        """Describe what of a row is to be stored. In a chat in one cache that includes the tokens generated since the last prompt."""
        cache, stored = self.cache, row.prefix
        if row.begin:
            pieces, _ = cache.store.index(self.scope).prefix(row.ids[: row.begin], Chain(), 0, exact_only=not cache.tiers)
            end = pieces[-1].stop if pieces else 0
            # Of dropped tokens there is nothing to store.
            stored = max(stored if end == row.begin else end, cache.dropped - row.padding)
        return NewRow(row, stored, cache.earlier_spans(row.number), cache.caller_spans_of(row.number), self.hidden.get(row.number))

    def _expect(self, rows: list[NewRow], identity: Identity) -> None:
        """Store the rows once they are computed."""
        cache, store = self.cache, self.cache.store
        form = SegmentForm(self.scope, cache.discovery, store.depth, store.near_identical, cache.rotation.layers)

        def put(buffers: Buffers) -> None:
            if identity.is_current():
                store.put([segment for new in rows for segment in new_segments(new, buffers, form)])

        if cache.remembering is not None:
            cache.remembering.expect(NewPrompt(self.total, put))
