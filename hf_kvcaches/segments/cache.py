"""`SegmentReuseCache`: repeated segments of prompts are computed once, wherever they stand."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.growing import GrowingLayer
from hf_kvcaches.core.prefill import PrefillCall
from hf_kvcaches.core.report import CacheReport
from hf_kvcaches.core.splicing.cache import SplicingCache
from hf_kvcaches.errors import UnsupportedError, require_choice, require_instance, require_tokenizer
from hf_kvcaches.segments.admission import Mode, PlannedSpan
from hf_kvcaches.segments.policy import SegmentPolicy
from hf_kvcaches.segments.probing import Looked
from hf_kvcaches.segments.records import Tier
from hf_kvcaches.segments.remembering import Remembering
from hf_kvcaches.segments.scope import check_policy, reader_for
from hf_kvcaches.segments.store import SegmentStore
from hf_kvcaches.segments.taking import Taking


class ReusedSpan(NamedTuple):
    """Consecutive tokens of a prompt of one tier.

    Args:
        start: The first token's index in its row, padding not counted.
        repaired: How many stored tokens were run again.
        depth: Up to this layer they are reused; None: all layers.
        segments: The stored segments' ids, for `SegmentStore.pin` and `delete`.
    """

    row: int
    start: int
    stop: int
    tier: Tier
    repaired: int
    depth: int | None
    segments: tuple[str, ...]


@dataclass(frozen=True)
class SegmentReport(CacheReport):
    """What a `SegmentReuseCache` holds, and how its prompts were filled in.

    Args:
        reused_tokens: Tokens of prompts that were not run, in all rows.
        repaired_tokens: Stored tokens that were run again in their new context.
        computed_tokens: All others.
        tiers: Tokens by tier.
        flops_saved: Share of the operations in the decoder layers that a prefill without reuse needs.
        spans: Each prompt's, in order.
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
    """Keeps every token, and takes the keys and values of what earlier prompts had already from a store.

    Paper: Cross-Query KV Reuse with RoPE Reindexing for Template-Heavy Agent Prompts.

    **Departs from the paper**: see docs/segments.md.

    **Refuses**: models whose keys change with the length of the text (dynamic and long RoPE), or with layers that keep no keys and
    values; `mode="approximate"` with models without rotary positions, or that compute attention their own way.

    **Memory per token**: 2 x kv_heads x head_dim x bytes per element x layers, plus an eighth (at least 64 slots) of reserve.
    Layers with a sliding window keep all tokens too.

    Args:
        model: A transformers model.
        store: Where segments live between requests.
        tokenizer: The model's. With it, prompts are cut at messages, JSON, code and headings; it is part of what segments are bound to.
        mode: `"exact"`: only what an earlier prompt had from its start on. `"auto"`: other segments too, where the policy lets them in.
            `"approximate"`: every verbatim segment, repaired, without gates.
        policy: Guards and thresholds, from `scripts/calibrate_segments.py`; None for the paper's guards and strict thresholds.
        repair: Share of a segment's tokens to run again where the text before it is another; None for the policy's.
        spans: For each row, the caller's own segments as (start, stop) places of its tokens, padding not counted; or None.
        decode_with: A new cache of the same model that holds the tokens once the prompt is answered; None to keep them all here.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    def __init__(
        self,
        model: Any,
        store: SegmentStore,
        tokenizer: Any = None,
        mode: Mode = "auto",
        policy: SegmentPolicy | None = None,
        repair: float | None = None,
        *,
        separators: tuple[str, ...] = (),
        spans: list[list[tuple[int, int]]] | None = None,
        decode_with: KVCache | None = None,
        offloading: bool = False,
    ) -> None:
        others = {"model": model, "tokenizer": tokenizer, "policy": policy}
        require_instance("store", store, SegmentStore, others, 'Such as SegmentStore("memory").')
        require_tokenizer(tokenizer)
        require_choice("mode", mode, ("exact", "approximate", "auto"))
        if policy is not None:
            require_instance("policy", policy, SegmentPolicy, {"tokenizer": tokenizer}, "Or None.")
        super().__init__(model, decode_with=decode_with, offloading=offloading)
        self.store, self.tokenizer, self.mode = store, tokenizer, mode
        self.policy = (policy or SegmentPolicy()).with_repair(repair)
        check_policy(self.model, self.policy)
        if store.codec is not None:
            store.codec.require_all_layers(self.model, "store")
        if (store.depth or store.cuts) and self.moving_refused:
            raise UnsupportedError(
                f"store: with cuts or depth, layers are run from the middle, and {self.moving_refused}. Use a store without."
            )
        if mode == "approximate" and self.moving_refused:
            raise UnsupportedError(f"mode='approximate': {self.moving_refused}. Use mode='exact', or 'auto'.")
        self.reader = reader_for(tokenizer, tuple(separators))
        self.given_spans = spans
        self._parts: list[tuple[int, PlannedSpan]] = []
        self._flops = [0.0, 0.0]
        self.probes: list[Looked] = []
        self.reason = ""
        self._watch()

    def settings(self) -> dict[str, Any]:
        return {"mode": self.mode, "policy": self.policy.to_json()}

    @classmethod
    def rebuild(cls, model: Any, settings: dict[str, Any]) -> Self:
        # The file holds the tokens' keys and values; the store is not in it, and what the loaded cache stores goes into one of its own.
        return cls(model, SegmentStore("memory"), mode=settings["mode"], policy=SegmentPolicy.from_json(settings["policy"]))

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        self.remembering.release()
        super().observe(input_ids, attention_mask, position_ids)

    def take_prefill(self, call: PrefillCall) -> int:
        self.reason = ""
        return Taking(self, call).take()

    def earlier_parts(self, row: int) -> tuple[PlannedSpan, ...]:
        """The plan of a row's earlier prompts. Where rows have been exchanged, any approximation counts for all."""
        if not self.exchanged:
            return tuple(part for number, part in self._parts if number == row)
        return tuple(replace(part, start=0) for _, part in self._parts if part.tier != "exact" and part.pieces)

    def note(self, row: int, parts: tuple[PlannedSpan, ...], cost: float, whole: float) -> None:
        """Counts an executed plan of a row, its operations, and those of a prefill without reuse."""
        self._parts += [(row, part) for part in parts]
        self._flops[0] += cost
        self._flops[1] += whole

    def report(self) -> SegmentReport:
        spans = tuple(
            ReusedSpan(row, part.start, part.stop, part.tier, len(part.rerun), part.depth, tuple(piece.record.key for piece in part.pieces))
            for row, part in self._parts
        )
        tiers: Counter[str] = Counter()
        for span in spans:
            tiers[span.tier] += span.stop - span.start
        return SegmentReport(
            **self._report_fields(),
            reused_tokens=sum(part.reused for _, part in self._parts),
            repaired_tokens=sum(len(part.rerun) for _, part in self._parts),
            computed_tokens=sum(len(part) for _, part in self._parts if not part.pieces),
            tiers=dict(tiers),
            flops_saved=1 - self._flops[0] / self._flops[1] if self._flops[1] else 0.0,
            spans=spans,
            reason=self.reason,
        )

    def reset(self) -> None:
        self.remembering.release()
        super().reset()
        self._parts, self._flops, self.probes, self.reason = [], [0.0, 0.0], [], ""

    def crop(self, tokens_to_remove: int) -> None:
        # New tokens are going to be written where these were, and the store's thread may be reading there.
        self.remembering.release()
        if self.seen + int(tokens_to_remove) < self.remembering.reading_until:
            self.store.flush()
        super().crop(tokens_to_remove)

    @property
    def why_inexact(self) -> str:
        reused = [part for _, part in self._parts if part.pieces]
        exact = all(part.tier == "exact" for part in reused) and (not reused or self.store.quantization is None)
        return "" if exact else "It reused segments that are not exact."

    def rows_change(self) -> None:
        self.remembering.release()

    def release_layer(self, layer: GrowingLayer) -> None:
        if not self.remembering.waiting:
            super().release_layer(layer)

    def prompt_answered(self) -> None:
        # What is new is read from the layers' buffers, which the store lets go of when it is written.
        self.remembering.release()
        for layer in self.source_layers:
            layer.reset()

    def _watch(self) -> None:
        self.remembering = Remembering(self.source_layers, self.store)
        self.store.watch(self.remembering)
        # A cache that is dropped after one token has computed its prompt all the same.
        weakref.finalize(self, self.remembering.release).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.remembering.release()
        # These are shared, not copied.
        memo |= {id(part): part for part in (self.tokenizer, self.reader, self.policy, self.rotation)}
        memo[id(self.remembering)] = None
        copied = super().__deepcopy__(memo)
        copied._watch()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # A store stays in its process. Elsewhere the cache goes on with what it has.
        self.remembering.release()
        return {**super().__getstate__(), "store": None, "remembering": None, "tokenizer": None, "reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.store, self.reader = SegmentStore("memory"), reader_for(None, ())
        self._watch()
