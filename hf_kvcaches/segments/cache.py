"""`SegmentReuseCache`: segments that prompts share are computed once, at whatever index they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.identity import Identity
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.core.prompt import PrefillCall, Remaining
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_choice, require_instance, require_tokenizer
from hf_kvcaches.reuse.cache import SplicingCache
from hf_kvcaches.reuse.pipeline import Pipeline, Tensors
from hf_kvcaches.reuse.plan import PlannedRow, PlannedSpan, PromptPlan, PromptRow
from hf_kvcaches.reuse.storage import Buffers, NewPrompt
from hf_kvcaches.segments.flops import Costs
from hf_kvcaches.segments.near import NearIdentical
from hf_kvcaches.segments.planning import plan_row
from hf_kvcaches.segments.policy import SegmentPolicy
from hf_kvcaches.segments.records import Chain
from hf_kvcaches.segments.report import SegmentReport, report_of
from hf_kvcaches.segments.scope import check_policy, discovery_for, other_scopes, scope_of
from hf_kvcaches.segments.stages import Probe, Stages
from hf_kvcaches.segments.store import SegmentStore
from hf_kvcaches.segments.storing import Hidden, NewRow, SegmentForm, new_segments
from hf_kvcaches.segments.tiers import Mode, SegmentTier, TierContext, tiers_of

# On a CPU, reuse behind computed tokens pays only from 1 / SHARE of a prompt on. Less than 1 / LEAST of it never pays: to read all weights,
# before anything stored is used, takes 2% of a prefill of 2,000 tokens.
SHARE, LEAST = 5, 50


class SegmentReuseCache(SplicingCache):
    """Keeps every token, and takes keys and values of segments of earlier prompts from a store.

    Paper: Cross-Query KV Reuse with RoPE Reindexing for Template-Heavy Agent Prompts.

    **Departs from the paper**: see docs/benchmarks/segments.md.

    **Refuses**: models whose keys change with the length of the text (dynamic and long RoPE), or with layers that keep no keys and
    values; `mode="approximate"` and `tiers` with models without rotary positions, or that compute attention their own way.

    **Memory per token**: 2 x kv_heads x head_dim x bytes per element x layers, plus an eighth (at least 64 slots) of reserve.
    Layers with a sliding window keep the window from the first decode step on.

    Args:
        model: A transformers model.
        store: Where segments are kept between requests; None is refused.
        tokenizer: The model's. With it, prompts are cut at messages, blank lines and lines. Segments are bound to it.
        mode: `"exact"`: prefixes of earlier prompts only. `"auto"`: other segments too, where the policy admits them. `"approximate"`:
            every verbatim segment, repaired, without guards and probes. None: `"auto"` with a policy or tiers, else `"exact"`.
        policy: Guards and thresholds, from `scripts/calibrate_segments.py`; None for the paper's guards and strict thresholds.
        repair: Share of a segment's tokens to recompute behind another text; None for the policy's.
        tiers: Custom rules that admit segments behind another text, in place of those of the mode.
        separators: Strings at which a prompt is cut.
        spans: For each row, the caller's own segments as (start, stop) indices of its tokens, padding not counted; or None.
        decode_with: A new cache of the same model that holds the tokens once the prompt is answered; None to keep them all here.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    def __init__(
        self,
        model: Any,
        store: SegmentStore | None = None,
        tokenizer: Any = None,
        mode: Mode | None = None,
        policy: SegmentPolicy | None = None,
        repair: float | None = None,
        *,
        tiers: Sequence[SegmentTier] | None = None,
        separators: tuple[str, ...] = (),
        spans: list[list[tuple[int, int]]] | None = None,
        decode_with: KVCache | None = None,
        offloading: bool = False,
    ) -> None:
        others = {"model": model, "tokenizer": tokenizer, "policy": policy}
        require_instance("store", store, SegmentStore, others, 'Such as SegmentStore("memory").')
        assert store is not None
        require_tokenizer(tokenizer)
        require_choice("mode", mode, ("exact", "approximate", "auto", None))
        if policy is not None:
            require_instance("policy", policy, SegmentPolicy, {"tokenizer": tokenizer}, "Or None.")
        super().__init__(model, decode_with=decode_with, offloading=offloading)
        self.store, self.tokenizer = store, tokenizer
        self.mode: Mode = mode or ("exact" if policy is None and tiers is None else "auto")
        self._own_tiers = None if tiers is None else _checked_tiers(tiers, self.mode)
        self.policy = (policy or SegmentPolicy()).with_repair(repair)
        check_policy(self.model, self.policy)
        if store.codec is not None:
            store.codec.require_all_layers(self.model, "store")
            require_all_heads(self.model, "A store with the codes of a KVCodec", "Use quantization='int8'.")
        if (store.depth or store.cuts) and self.moving_refused:
            raise UnsupportedError(
                f"store: cuts and depth run some layers without those below, and {self.moving_refused}. Use a store without."
            )
        if (mode == "approximate" or tiers) and self.moving_refused:
            name = "tiers" if tiers else "mode='approximate'"
            raise UnsupportedError(f"{name}: {self.moving_refused}. Use mode='exact', or 'auto'.")
        self.discovery = discovery_for(tokenizer, tuple(separators))
        self.caller_spans = spans
        self.plans: list[PlannedRow] = []
        self._flops = [0.0, 0.0]
        self.probes: list[Probe] = []
        self.remember_with(store.background)

    @property
    def tiers(self) -> tuple[SegmentTier, ...]:
        """The caller's tiers, or those of the mode."""
        return tiers_of(self.mode) if self._own_tiers is None else self._own_tiers

    def caller_spans_of(self, row: int) -> tuple[tuple[int, int], ...]:
        """Return the caller's own segments of a row."""
        return tuple(self.caller_spans[row]) if self.caller_spans else ()

    def settings(self) -> dict[str, Any]:
        if self._own_tiers is not None:
            raise UnsupportedError("save: custom tiers can't be written to a file. Save a cache with the tiers of a mode.")
        return {"mode": self.mode, "policy": self.policy.to_json()}

    @classmethod
    def rebuild(cls, model: Any, settings: dict[str, Any]) -> Self:
        # The file holds keys and values but no store; the loaded cache gets a new one.
        return cls(model, SegmentStore("memory"), mode=settings["mode"], policy=SegmentPolicy.from_json(settings["policy"]))

    def take_prefill(self, call: PrefillCall) -> int | Remaining:
        self.reason = ""
        return _SegmentPipeline(self, call).fill()

    def earlier_spans(self, row: int) -> tuple[PlannedSpan, ...]:
        """Return the spans of a row's earlier prompts. Once rows were reordered, an approximation in one row counts for all."""
        if not self.exchanged:
            return tuple(span for earlier in self.plans if earlier.number == row for span in earlier.spans)
        return tuple(replace(span, start=0) for row in self.plans for span in row.spans if span.tier != "exact" and span.stored)

    def note(self, row: PlannedRow, cost: float, full_cost: float) -> None:
        """Count an executed plan of a row, its operations, and those of a prefill without reuse."""
        self.plans.append(row)
        self._flops[0] += cost
        self._flops[1] += full_cost

    def report(self) -> SegmentReport:
        return report_of(self.plans, *self._flops, **self._report_fields(), reason=self.reason)

    def reset(self) -> None:
        super().reset()
        self.plans, self._flops, self.probes = [], [0.0, 0.0], []

    @property
    def why_inexact(self) -> str:
        spans = [span for row in self.plans for span in row.spans if span.stored]
        exact = all(span.tier == "exact" and tokens.stored["quantization"] is None for span in spans for tokens in span.stored)
        return "" if exact else "It reused segments that are not exact."

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # These are shared, not copied.
        memo |= {id(part): part for part in (self.tokenizer, self.discovery, self.policy, self._own_tiers)}
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "store": None, "tokenizer": None, "discovery": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.store, self.discovery = SegmentStore("memory"), discovery_for(None, ())
        self.remember_with(self.store.background)


class _SegmentPipeline(Pipeline[SegmentReuseCache]):
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
            self.stages = Stages(cache, self.call, plan, self.joining, store, cache.policy, self.scope)
            plan, self.hidden = self.stages.run()
            cache.probes += self.stages.probes
            return cache.take(plan.total - 1), plan
        return super().run(plan)

    def report(self, plan: PromptPlan, identity: Identity) -> None:
        cache = self.cache
        costs = Costs.of(cache.model)
        with cache.store.reading():
            new_rows = [self._new(row) for row in plan.rows]
        for row in plan.rows:
            cost = costs.of_row(row)
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
            if identity.known_digest():
                store.put([segment for new in rows for segment in new_segments(new, buffers, form)])

        if cache.remembering is not None:
            cache.remembering.expect(NewPrompt(self.total, put))


def _checked_tiers(tiers: Any, mode: Mode) -> tuple[SegmentTier, ...]:
    checked = tuple(tiers) if isinstance(tiers, list | tuple) else ()
    if not checked or not all(isinstance(tier, SegmentTier) for tier in checked):
        raise ConfigError.of("tiers", "a list of SegmentTier objects", tiers, "Such as [GuardedTier(), RepairedTier()].")
    if mode != "auto":
        raise ConfigError.of("mode", "'auto' or None beside tiers", mode, "Custom tiers replace those of a mode.")
    return checked
