"""`SegmentReuseCache`: which stored segments a prompt reuses, and which it adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import Identity, require_identity
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.errors import ConfigError, Refusal, UnsupportedError, require_choice, require_instance, require_tokenizer
from hf_kvcaches.reuse.cache import ReuseCache
from hf_kvcaches.reuse.index import CONTEXT, EXACT, Match, Record, TokenIndex, chain_of
from hf_kvcaches.reuse.plan import PROBING, PlannedSpan, PromptPlan, PromptRow, plan_row
from hf_kvcaches.reuse.policy import Admit, SegmentPolicy
from hf_kvcaches.reuse.store import NewSpan, PromptStates
from hf_kvcaches.segments.discovery import Discovery, checked_spans, discovery_for
from hf_kvcaches.segments.report import SegmentReport, report_of
from hf_kvcaches.segments.store import SegmentStore

Mode = Literal["exact", "approximate", "auto"]

LEAST = 0.02  # less than this share of a prompt is not reused: to read it takes as long as to compute it
LEAST_BETWEEN = 0.2  # on a CPU, reuse behind computed tokens pays only from this share of a prompt on


class SegmentReuseCache(ReuseCache):
    """Keeps every token, and takes keys and values of segments of earlier prompts from a store.

    Paper: Cross-Query KV Reuse with RoPE Reindexing for Template-Heavy Agent Prompts.

    **Departs from the paper**: see docs/benchmarks/segments.md.

    **Refuses**: models whose keys change with the length of the text (dynamic and long RoPE), or with layers that keep no keys and
    values; `mode="approximate"` and `admit` with models without rotary positions, or that compute attention their own way.

    **Memory per token**: 2 x kv_heads x head_dim x bytes per element x layers, plus an eighth (at least 64 slots) of reserve.
    Layers with a sliding window keep the window from the first decode step on.

    Args:
        model: A transformers model.
        store: Where segments are kept between requests; None is refused.
        tokenizer: The model's. With it, prompts are cut between chat messages and at blank lines. Segments are bound to it.
        mode: `"exact"`: prefixes of earlier prompts only. `"auto"`: other segments too, where the policy admits them. `"approximate"`:
            every verbatim segment, repaired, in any surroundings. None: `"auto"` with a policy or `admit`, else `"exact"`.
        policy: Thresholds, from `hf-kvcaches calibrate segments`; None for strict ones.
        repair: Share of a segment's tokens to recompute behind another text; None for the policy's.
        admit: A rule of your own, in place of the policy's: a function from a `Match` to an `Admission` (`hf_kvcaches.reuse.policy`).
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
        admit: Admit | None = None,
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
        if admit is not None and not callable(admit):
            raise ConfigError.of("admit", "a function from a Match to an Admission, or None", admit)
        if admit is not None and mode in ("exact", "approximate"):
            raise ConfigError.of("mode", "'auto' or None beside admit", mode, "A rule of your own replaces that of a mode.")
        super().__init__(model, store, decode_with=decode_with, offloading=offloading)
        self.tokenizer, self.own_rule = tokenizer, admit
        self.mode: Mode = mode or ("exact" if policy is None and admit is None else "auto")
        self.policy = policy or SegmentPolicy()
        if repair is not None:
            self.policy = replace(self.policy, repair=repair)
        if self.policy.fingerprint is not None:
            self.policy.fingerprint.require_model(require_identity(self.model, "The policy").fingerprint, "The policy")
        if isinstance(store.codec, KVCodec):
            store.codec.require_all_layers(self.model, "store")
            require_all_heads(self.model, "A store with the codes of a KVCodec", "Use quantization='int8'.")
        if (mode == "approximate" or admit) and (refusal := self.moving_refused):
            name = "admit" if admit else "mode='approximate'"
            raise UnsupportedError(f"{name}: {refusal}. Use mode='exact', or 'auto'.")
        self.discovery = discovery_for(tokenizer, tuple(separators))
        self.caller_spans = None if spans is None else [checked_spans(own) for own in spans]

    @property
    def admit(self) -> Admit | None:
        """The rule that admits segments behind another text; None where only prefixes are reused."""
        if self.mode == "exact" or self.moving_refused:
            return None
        policy = replace(self.policy, similarity=0.0) if self.mode == "approximate" else self.policy
        return self.own_rule or policy.admit

    def find(self, rows: tuple[PromptRow, ...], identity: Identity) -> PromptPlan | Refusal:
        if identity.reason:
            return Refusal(identity.reason)
        self.store.refresh()
        _, index = self.store.look_up(identity, self.model, self.tokenizer)
        admit = self.admit
        with self.store.catalog.lock:
            return PromptPlan(tuple(self._planned(row, index, admit) for row in rows), rows[0].padding + len(rows[0].ids))

    def _planned(self, row: PromptRow, index: TokenIndex, admit: Admit | None) -> PromptRow:
        prefix = index.prefix(row.ids[:-1], row.begin, exact_only=admit is None)
        end = prefix[-1].stop if prefix else row.begin
        planned = plan_row(row, prefix, [] if admit is None else self.runs(index, row, end), admit, len(self.layers))
        # Where too few tokens are stored, reuse of the prefix alone, or of nothing, takes less time.
        tokens, reused = len(row.ids) - row.begin, planned.reused
        reason = f"{reused} tokens are stored, too few for reuse to pay."
        on_cpu = self.model.device.type == "cpu"
        if end - row.begin < reused < max(self.policy.shortest, tokens * LEAST_BETWEEN if on_cpu else 0):
            planned = planned.cut(end, reason)
            reused = planned.reused
        return planned if reused >= int(tokens * LEAST) else planned.cut(row.begin, reason)

    def runs(self, index: TokenIndex, row: PromptRow, start: int) -> list[Match]:
        """Return the stored tokens behind an index of a row, in order and without overlaps."""
        return index.runs(row.ids[:-PROBING], start, self.policy.shortest)

    def note(self, plan: PromptPlan, identity: Identity) -> None:
        store: SegmentStore = self.store
        scope, index = store.look_up(identity, self.model, self.tokenizer)
        with store.catalog.lock:
            firsts = [self._stored_up_to(row, index) for row in plan.rows]
        new = []
        for row, first in zip(plan.rows, firsts, strict=True):
            if first < len(row.ids):
                new.append(_NewRow(row, first, self._earlier_spans(row), self.caller_spans[row.number] if self.caller_spans else []))
        self.plans += plan.rows
        for row in plan.rows:
            # The last first: among equally useful segments, the start of a prompt is evicted last.
            for piece in reversed(list(row.sources)):
                store.catalog.used(piece.record.key, piece.stop - piece.start)
        discovery, geometries = self.discovery, self.rotation.layers

        def put(states: PromptStates) -> None:  # without a reference to the cache, which is stored when it is dropped
            if identity.known_digest():
                store.put([span for row in new for span in row.spans(discovery, scope, states)], geometries)

        if new:
            self.expect(plan, min(each.row.padding + each.first for each in new), put)

    def _stored_up_to(self, row: PromptRow, index: TokenIndex) -> int:
        """How many of a row's first tokens are in the store. In a chat in one cache, tokens generated since the last prompt are not."""
        if not row.begin:
            return row.prefix
        pieces = index.prefix(row.ids[: row.begin], 0, exact_only=self.mode == "exact")
        end = pieces[-1].stop if pieces else 0
        # Of dropped tokens there is nothing to store.
        return max(row.prefix if end == row.begin else end, self.dropped - row.padding)

    def _earlier_spans(self, row: PromptRow) -> list[PlannedSpan]:
        """The reused spans of a row's earlier prompts. Once rows were reordered, an approximation in one row counts for all."""
        if not self.exchanged:
            return [span for number, span in self.reused_spans if number == row.number]
        return [replace(span, start=0) for _, span in self.reused_spans if span.rule != EXACT]

    def report(self) -> SegmentReport:
        return report_of(self.plans, self._costs, **self._report_fields(), reason=self.reason)

    def settings(self) -> dict[str, Any]:
        if self.own_rule is not None:
            raise UnsupportedError("save: a rule of your own can't be written to a file. Save a cache with the rule of a mode.")
        fingerprint = self.policy.fingerprint
        return {"mode": self.mode, "policy": self.policy.metadata() | {"fingerprint": fingerprint and fingerprint.to_dict()}}

    @classmethod
    def rebuild(cls, model: Any, settings: dict[str, Any]) -> Self:
        policy = dict(settings["policy"])
        if policy["fingerprint"] is not None:
            policy["fingerprint"] = ModelFingerprint.from_dict(policy["fingerprint"])
        # The file holds keys and values but no store; the loaded cache gets a new one.
        return cls(model, SegmentStore("memory"), mode=settings["mode"], policy=SegmentPolicy(**policy))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # These are shared, not copied.
        memo |= {id(part): part for part in (self.tokenizer, self.discovery, self.own_rule)}
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "tokenizer": None, "discovery": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.discovery = discovery_for(None, ())
        self._attach(SegmentStore("memory"))


class _NewRow(NamedTuple):
    """A row of a prompt with new segments."""

    row: PromptRow  # its executed plan
    first: int  # how many of its first tokens are in the store
    earlier: Sequence[PlannedSpan]  # the reused spans of earlier prompts in the same cache
    caller_spans: Sequence[tuple[int, int]]  # (start, stop)

    def spans(self, discovery: Discovery, scope: str, states: PromptStates) -> Iterator[NewSpan]:
        """Yield the segments that are not in the store."""
        row, first = self.row, self.first
        # A prompt may be stored without its last token, which is computed later.
        own = [(start, min(stop, len(row.ids))) for start, stop in self.caller_spans if start < len(row.ids)]
        edges = {first, len(row.ids), *(start for start, _ in discovery.spans(row.ids.tolist(), own))}
        edges.update(edge for span in row.spans for edge in (span.start, span.stop))
        chain = chain_of(row.ids[:first])
        for start, stop in pairwise(sorted(edge for edge in edges if first <= edge <= len(row.ids))):
            left, chain = chain.hexdigest(), chain_of(row.ids[start:stop], chain)
            reused = [span for span in (*self.earlier, *row.spans) if span.sources and span.start < stop]
            rules = [EXACT, *(span.rule for span in reused if span.rule != EXACT)]
            fresh = not any(span.stop > start for span in reused)
            context = row.ids[max(0, start - CONTEXT) : start]
            record = Record(scope, row.ids[start:stop], left, chain.hexdigest(), start, context, rules[-1], fresh)
            yield NewSpan(record, states.of(row.number, start + row.padding, stop + row.padding))
