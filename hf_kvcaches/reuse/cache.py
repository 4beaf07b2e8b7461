"""`ReuseCache`: the way of a prompt whose tokens are partly stored, from the look-up to the tokens that the model runs."""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch.nn import functional

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.identity import Identity
from hf_kvcaches.core.layers import GrowingLayer
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.core.source import PrefillCall, Remaining
from hf_kvcaches.errors import Refusal
from hf_kvcaches.reuse.costs import LEAST_TIMED, Costs, Moment, Pace
from hf_kvcaches.reuse.index import EXACT
from hf_kvcaches.reuse.layer import SplicingCache
from hf_kvcaches.reuse.layout import write_plan
from hf_kvcaches.reuse.partial import LayerPass, run_layers, run_module
from hf_kvcaches.reuse.plan import PlannedSpan, PromptPlan, PromptRow
from hf_kvcaches.reuse.sparse import SparsePass, spans_refused
from hf_kvcaches.reuse.store import PromptStates, Recorder, SpanStore

_NEIGHBOURS = 7  # tokens whose attention is averaged before repaired tokens are picked
_QUESTION = 64  # the most tokens at a prompt's end, such as a question, that run again once what they attend to is repaired


class ReuseCache(SplicingCache):
    """Takes keys and values of tokens that earlier prompts had from a store, and has the others computed.

    A subclass finds what is stored (`find`), and counts what was reused (`note`).
    """

    def __init__(self, model: Any, store: SpanStore, *, decode_with: KVCache | None = None, offloading: bool = False) -> None:
        super().__init__(model, decode_with=decode_with, offloading=offloading)
        self.plans: list[PromptRow] = []  # the executed plan of each row of each prompt
        self._loading_seconds = 0.0  # in which reused tokens were found and loaded
        self._timed: tuple[Moment, int, float] | None = None  # when a prompt's pass began, the tokens seen behind it, and its operations
        self._costs: Any = None if self._model is None else Costs.of(self.model)  # without a model there is no prompt
        self._attach(store)

    def _attach(self, store: SpanStore) -> None:
        self.store: Any = store  # None in another process
        self.recorder: Recorder | None = Recorder(self.source_layers, store.queue)
        store.queue.watch(self.recorder)
        # Stores the prompt of a cache that is dropped after the first token, too.
        weakref.finalize(self, self.recorder.release).atexit = False

    @abstractmethod
    def find(self, rows: tuple[PromptRow, ...], identity: Identity) -> PromptPlan | Refusal:
        """Look the rows up and plan what is reused; or return why nothing is looked up."""

    @abstractmethod
    def note(self, plan: PromptPlan, identity: Identity) -> None:
        """Count an executed plan, and have new tokens stored (`expect`)."""

    def take_prefill(self, call: PrefillCall) -> int | Remaining:
        """Write the stored tokens of a prompt into the layers; a blob that can't be read is a miss, whose tokens are computed."""
        self.reason, began = "", time.perf_counter()
        rows, identity = self._rows_of(call), self.provenance.identity
        if isinstance(rows, Refusal):
            return self.leave(rows)
        plan = self.find(rows, identity)
        # Of one row of a model whose tokens can't be moved, nothing but a prefix is planned.
        if isinstance(plan, PromptPlan) and len(rows) > 1 and self.moving_refused:
            plan = plan.with_common_prefix()
        blobs: dict[str, dict[str, torch.Tensor]] = {}
        if isinstance(plan, PromptPlan) and (records := plan.records):
            blobs = self.store.load(records, call.input_ids.device)
            if len(blobs) < len(records):
                lost = "The stored tokens are gone or damaged."
                plan = plan.without(records.keys() - blobs.keys(), lost)
                plan = plan.with_common_prefix(lost) if self.moving_refused else plan
        if self.shard is not None:
            plan = _agreed(self.shard, plan)
        if isinstance(plan, Refusal):
            return self.leave(plan, rows)
        taken: int | Remaining = 0
        if plan.records:
            write_plan(self, plan, blobs, self.store.codec)
            self._loading_seconds += time.perf_counter() - began
            plan, taken = _hand_over(self, call, plan)
        self.note(plan, identity)
        self._time(plan)
        return taken

    def _time(self, plan: PromptPlan) -> None:
        """Take the time of the pass that now runs, if all that a prompt computes is in it and is worth timing."""
        whole = not any(span.repaired for row in plan.rows for span in row.spans)
        tokens = sum(len(row.computed) for row in plan.rows)
        if whole and tokens >= LEAST_TIMED and (start := Moment.now(compat.input_device(self.model))):
            self._timed = start, plan.total, sum(map(self._costs.of_row, plan.rows))

    def _lap(self) -> None:
        """Count the prompt that was timed, unless its pass broke off."""
        if self._timed is None:
            return
        (start, total, operations), self._timed = self._timed, None
        if self.seen >= total and (stop := Moment.now(compat.input_device(self.model))):
            Pace.of(self.model).add(start, stop, operations)

    def leave(self, refusal: Refusal, rows: tuple[PromptRow, ...] = ()) -> int:
        """Leave the prompt to the model, and keep the reason for the report."""
        self.reason = str(refusal)
        return 0

    def _rows_of(self, call: PrefillCall) -> tuple[PromptRow, ...] | Refusal:
        """Return the rows of a prompt; or why it is left to the model."""
        tokens, seen = call.input_ids.shape[1], self.seen
        if torch.is_grad_enabled():
            return Refusal("Gradients are enabled, and stored keys and values have none. Call the model under torch.no_grad().")
        if torch.compiler.is_compiling():
            return Refusal("The pass is compiled, and look-ups happen in Python.")
        if self.offloading:
            return Refusal("The cache offloads its layers, which can't be filled out of their order.")
        if call.most != tokens - 1:
            asked = f"The call asks for logits of the last {tokens - call.most} tokens, which the model has to run."
            return Refusal(f"{asked} Pass logits_to_keep=1.")
        padding = self.log.padding(seen + tokens)
        if isinstance(padding, Refusal):
            return padding
        rows = zip(self.log.rows(), padding, strict=True)
        return tuple(PromptRow(number, pad, slots[pad:], max(seen - pad, 0)) for number, (slots, pad) in enumerate(rows))

    @property
    def moving_refused(self) -> Refusal | None:
        """Why tokens can't be reused behind another text with this model."""
        if self.rotation.why:
            return Refusal(self.rotation.why)
        refusal = spans_refused(self.model)
        if refusal is None and "position_ids" not in compat.parameter_names(type(self.model)):
            return Refusal(f"{type(self.model).__name__} takes no position_ids by name, so nobody can tell how it numbers tokens")
        return refusal

    def expect(self, plan: PromptPlan, first: int, store: Callable[[PromptStates], None]) -> None:
        """Have the prompt of a plan stored, from a slot on, once it is computed."""
        if self.recorder is not None:
            self.recorder.expect(plan.total, first, store)

    @property
    def _expecting(self) -> bool:
        """Whether a prompt is to be stored once it is computed."""
        return self.recorder is not None and self.recorder.prompt is not None

    def _release(self) -> None:
        """Hand a computed prompt to the store, before its buffers change."""
        if (recorder := self.recorder) is not None and recorder.prompt is not None:
            recorder.release()

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        self._lap()  # first: storing the prompt is no part of its time
        self._release()
        super().observe(input_ids, attention_mask, position_ids)

    def steps_matter(self) -> bool:
        return self._expecting or super().steps_matter()

    def release_layer(self, layer: GrowingLayer) -> None:
        if not self._expecting:
            super().release_layer(layer)

    def prompt_answered(self) -> None:
        # The store holds the buffers until it has written the new tokens.
        self._release()
        for layer in self.source_layers:
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        self._release()
        if self.recorder is not None:
            self.recorder.protect(self.seen + int(tokens_to_remove))
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        self._release()
        super().reset()
        self.plans, self._loading_seconds, self._timed = [], 0.0, None

    def pick_rows(self, of_layer: Callable[[Any], None], pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._release()
        super().pick_rows(of_layer, pick)

    def _report_fields(self) -> dict[str, Any]:
        seconds = None if (model := self.living_model) is None else Pace.of(model).seconds()
        saved = sum(map(self._costs.saved, self.plans)) if self._costs else 0.0
        loading = self._loading_seconds
        return super()._report_fields() | {"saved_seconds": None if seconds is None else saved * seconds - loading}

    @property
    def reused_spans(self) -> list[tuple[int, PlannedSpan]]:
        """The spans with reused tokens, each with the number of its row."""
        return [(row.number, span) for row in self.plans for span in row.spans if span.sources]

    @property
    def why_inexact(self) -> str:
        rules = {span.rule for _, span in self.reused_spans}
        stored_as = {piece.record.form["quantization"] for _, span in self.reused_spans for piece in span.sources}
        return "" if rules <= {EXACT} and stored_as <= {None} else "What it reused is not exact."

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._release()
        memo |= {id(self.recorder): None, id(self._timed): None}
        copied = super().__deepcopy__(memo)
        if self.recorder is not None:
            copied._attach(self.store)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # A store belongs to its process. In another one the cache keeps its tokens only.
        self._release()
        return {**super().__getstate__(), "store": None, "recorder": None, "_timed": None}


def _agreed(shard: HeadShard, plan: PromptPlan | Refusal) -> PromptPlan | Refusal:
    """The plan that the processes of a tensor-parallel model, which run the same passes, have in common; where plans differ, no reuse."""
    decisions = shard.decisions("" if isinstance(plan, Refusal) else plan.outline())
    if len(decisions) == 1 or isinstance(plan, Refusal):
        return plan
    differ = "The processes of the tensor-parallel model found different tokens in their stores."
    return Refusal(differ) if "" in decisions else PromptPlan(tuple(row.cut(row.begin, differ) for row in plan.rows), plan.total)


def _hand_over(cache: SplicingCache, call: PrefillCall, plan: PromptPlan) -> tuple[PromptPlan, int | Remaining]:
    """Take a prefix if nothing else is reused; else have the model run the tokens between reused ones. Return the executed plan, too."""
    # Where all tokens of a span are recomputed, or none, there is nothing to pick.
    if any(span.repaired and span.reused for row in plan.rows for span in row.spans):
        plan = _picking(cache, call, plan)
    if (prefix := plan.only_prefix) is not None:
        return plan, cache.take(prefix)
    if plan.repair_depths:
        _run_in_parts(cache, call, plan)
        return plan, cache.take(plan.total - 1)
    # The prompt's last token runs, and those whose queries the holder needs.
    window = 1 if cache.holder is None else max(1, cache.holder.adopt_window or 0)
    last = [np.arange(max(row.begin, len(row.ids) - window), len(row.ids)) for row in plan.rows]
    indices = [np.union1d(row.running(), ends) for row, ends in zip(plan.rows, last, strict=True)]
    cache.sparse_pass = sparse = SparsePass(call, indices, plan.padding, plan.total)
    return plan, Remaining(sparse.ids, sparse.positions)


def _picking(cache: SplicingCache, call: PrefillCall, plan: PromptPlan) -> PromptPlan:
    """Run the new tokens of a prompt, and pick the tokens that are repaired: those that its last tokens attend to most, with neighbours.

    A token that is attended to is often the first of several, such as the digits of a number, and the next ones follow in decode steps.
    """
    last, by_layer = [row.last(_QUESTION) for row in plan.rows], list[torch.Tensor]()
    indices = [np.union1d(row.new, ends) for row, ends in zip(plan.rows, last, strict=True)]
    probing = SparsePass(call, indices, plan.padding, plan.total, by_layer)
    run_module(cache.model.base_model, LayerPass(cache, sparse=probing), probing.ids, probing.positions)
    shares = torch.stack([share.to(call.input_ids.device) for share in by_layer])
    if cache.shard is not None:
        shares = cache.shard.gather(shares[None], 0).amax(0)
    pooled = functional.avg_pool1d(shares.mean(0), _NEIGHBOURS, 1, _NEIGHBOURS // 2).cpu().numpy()
    picking = zip(plan.rows, pooled, last, strict=True)
    return PromptPlan(tuple(row.picking(shares[row.padding :], len(ends)) for row, shares, ends in picking), plan.total)


def _run_in_parts(cache: SplicingCache, call: PrefillCall, plan: PromptPlan) -> None:
    """Run all tokens but the last, some layers at a time: between them, repaired tokens leave, whose higher layers are reused."""
    by_slot: torch.Tensor | None = None
    for start, stop in pairwise([0, *plan.repair_depths, len(cache.layers)]):
        indices = [row.running(start) for row in plan.rows]
        if not any(map(len, indices)):
            return
        sparse = SparsePass(call, indices, plan.padding, plan.total)
        columns = torch.arange(len(sparse.slots), device=sparse.slots.device)[:, None], sparse.slots
        hidden = None if by_slot is None else by_slot[columns]
        left = run_layers(cache.model, start, stop, sparse.ids, LayerPass(cache, start, sparse), sparse.positions, hidden=hidden)
        if stop < len(cache.layers):
            by_slot = left.new_zeros(len(left), plan.total + 1, left.shape[-1], device=sparse.slots.device)
            by_slot[columns] = left.to(by_slot.device)
