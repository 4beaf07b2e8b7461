"""`SegmentReuseCache`: segments that prompts share are computed once, at whatever index they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.parallel import require_all_heads
from hf_kvcaches.core.prompt import PrefillCall, Remaining
from hf_kvcaches.core.report import CacheReport
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_choice, require_instance, require_tokenizer
from hf_kvcaches.reuse.cache import SplicingCache
from hf_kvcaches.reuse.plan import PlannedRow, PlannedSpan
from hf_kvcaches.segments.filling import SegmentPipeline
from hf_kvcaches.segments.policy import SegmentPolicy
from hf_kvcaches.segments.scope import check_policy, discovery_for
from hf_kvcaches.segments.stages import Probe
from hf_kvcaches.segments.store import SegmentStore
from hf_kvcaches.segments.tiers import Mode, SegmentTier, tiers_of


class ReusedSpan(NamedTuple):
    """Consecutive tokens of a prompt of one tier.

    Args:
        start: The first token's index in its row, padding not counted.
        repaired: How many stored tokens were recomputed.
        depth: Layers below it are reused; None: all layers.
        segments: The stored segments' ids, for `SegmentStore.pin` and `delete`.
        reason: Why stored tokens were computed, as sentences; "" if none are stored, or all are reused.
    """

    row: int
    start: int
    stop: int
    tier: str
    repaired: int
    depth: int | None
    segments: tuple[str, ...]
    reason: str = ""

    def __repr__(self) -> str:
        """Shorten ids to 8 digits, and leave out what is as in most spans; `segments` has whole ids."""
        ids = ", ".join(f"{key[:8]}…" for key in self.segments[:3]) + (f", {len(self.segments) - 3} more" if len(self.segments) > 3 else "")
        shown = {"repaired": self.repaired or None, "depth": self.depth, "segments": f"[{ids}]" if ids else None}
        shown["reason"] = repr(self.reason) if self.reason else None
        others = "".join(f", {name}={value}" for name, value in shown.items() if value is not None)
        return f"ReusedSpan(row={self.row}, start={self.start}, stop={self.stop}, tier={self.tier!r}{others})"


@dataclass(frozen=True)
class SegmentReport(CacheReport):
    """What a `SegmentReuseCache` holds, and how its prompts were filled in.

    Args:
        reused_tokens: Tokens of prompts that were not computed, in all rows.
        repaired_tokens: Stored tokens that were recomputed in their new context.
        computed_tokens: All other tokens.
        tiers: Tokens by tier.
        flops_saved: Operations that were saved, as a share of those of a prefill without reuse, in the decoder layers.
        spans: The spans of all prompts, in order.
        reason: Why the last prompt was neither looked up nor stored, as a sentence; "" where it was.
    """

    reused_tokens: int = 0
    repaired_tokens: int = 0
    computed_tokens: int = 0
    tiers: dict[str, int] | None = None
    flops_saved: float = 0.0
    spans: tuple[ReusedSpan, ...] = ()
    reason: str = ""


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
        return SegmentPipeline(self, call).fill()

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
        spans = tuple(
            ReusedSpan(
                *(row.number, span.start, span.stop, span.tier, len(span.recompute), span.depth),
                tuple(tokens.key for tokens in span.stored),
                span.reason,
            )
            for row in self.plans
            for span in row.spans
        )
        tiers: Counter[str] = Counter()
        for span in spans:
            tiers[span.tier] += span.stop - span.start
        return SegmentReport(
            **self._report_fields(),
            reused_tokens=sum(row.reused for row in self.plans),
            repaired_tokens=sum(span.repaired for span in spans),
            computed_tokens=sum(span.stop - span.start for span in spans if not span.segments),
            tiers=dict(tiers),
            flops_saved=1 - self._flops[0] / self._flops[1] if self._flops[1] else 0.0,
            spans=spans,
            reason=self.reason,
        )

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


def _checked_tiers(tiers: Any, mode: Mode) -> tuple[SegmentTier, ...]:
    checked = tuple(tiers) if isinstance(tiers, list | tuple) else ()
    if not checked or not all(isinstance(tier, SegmentTier) for tier in checked):
        raise ConfigError.of("tiers", "a list of SegmentTier objects", tiers, "Such as [GuardedTier(), RepairedTier()].")
    if mode != "auto":
        raise ConfigError.of("mode", "'auto' or None beside tiers", mode, "Custom tiers replace those of a mode.")
    return checked
