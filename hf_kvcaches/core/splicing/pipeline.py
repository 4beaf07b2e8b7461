"""One prompt's way into a cache that is filled from a store: look up, plan, fetch, write, run, report."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
import torch

from hf_kvcaches.core.codec.codec import KVCodec
from hf_kvcaches.core.identity import Identity
from hf_kvcaches.core.prefill import PrefillCall
from hf_kvcaches.core.splicing.cache import SplicingCache
from hf_kvcaches.core.splicing.flops import Costs
from hf_kvcaches.core.splicing.plan import PromptPlan, PromptRow
from hf_kvcaches.core.splicing.speed import seconds_to_compute
from hf_kvcaches.stores.hot import bytes_of

CacheT = TypeVar("CacheT", bound=SplicingCache)

Tensors = Mapping[str, torch.Tensor]
# Seconds of reading that are too few to be weighed against computing.
NOTICED = 0.05
# Bytes of blobs that are read before they are written into the cache and let go of.
TOGETHER = 2**25


class Pipeline(ABC, Generic[CacheT]):
    """Gets one prompt into a cache. Each step makes a new value: a plan, a plan without what is gone, a plan as it was carried out.

    A read that fails makes the tokens computed; a model that has changed since the look-up makes the look-up be done again.
    """

    def __init__(self, cache: CacheT, call: PrefillCall) -> None:
        self.cache, self.call = cache, call
        self.total = cache.seen + call.input_ids.shape[1]

    @property
    def on_cpu(self) -> bool:
        """Whether the prompt is on a CPU, where attention between reused tokens is slower than that of a whole prompt."""
        return self.call.input_ids.device.type == "cpu"

    def fill(self) -> int:
        """Fills the cache; returns how many of the prompt's tokens it took."""
        padding = self.cache.padding_of(self.call)
        if isinstance(padding, str):
            return self.leave(padding)
        rows = tuple(
            PromptRow(number, pad, slots[pad:], max(self.cache.seen - pad, 0))
            for number, (slots, pad) in enumerate(zip(self.cache.history.rows(), padding, strict=True))
        )
        identity = self.cache.identity_of_pass(self.call.input_ids.shape[1])
        reason = self.refused(identity)
        plan = None if reason else self.look_up(identity, rows)
        # All weights are read before anything stored is used, and before it is said that nothing can be.
        if identity.presumed and (plan is None or self.reuses(plan)):
            presumed, identity = identity, self.cache.confirmed_identity()
            reason = self.refused(identity)
            if not reason and (plan is None or identity != presumed):
                plan = self.look_up(identity, rows)
        if plan is None or reason:
            return self.leave(reason, rows)
        plan = self.load(plan)
        began = time.perf_counter()
        taken, plan = self.run(plan)
        self.cache.time_pass(began, self.operations(plan))
        self.report(plan, identity)
        return taken

    def operations(self, plan: PromptPlan) -> float:
        """What a plan computes in the decoder layers, the last token included, in floating-point operations."""
        costs, layers = Costs.of(self.cache.model), len(self.cache.layers)
        joining = (costs.of_tokens(span.joining(), span.depth or 0, layers) for row in plan.rows for span in row.spans)
        return sum(joining) + sum(costs.of_tokens(np.append(row.recompute(), len(row.ids) - 1)) for row in plan.rows)

    def slower(self, plan: PromptPlan) -> str:
        """Why fetching takes longer than computing, as a sentence; "" where it does not, or nobody knows."""
        reading = self.seconds_to_read({tokens.key for tokens in plan.stored})
        if reading is None or reading < NOTICED:
            return ""
        costs = Costs.of(self.cache.model)
        saved = sum(costs.of_prompt(row.begin, len(row.ids)) for row in plan.rows) - self.operations(plan)
        computing = seconds_to_compute(self.cache.model, saved)
        if computing is None or reading < computing:
            return ""
        return f"To fetch what is stored takes {reading:.2f} s, and to compute it {computing:.2f} s."

    def leave(self, reason: str, rows: tuple[PromptRow, ...] = ()) -> int:
        """Leaves the prompt to the model, and keeps the reason for the report; the rows are not known of every prompt."""
        self.cache.reason = reason
        return 0

    def reuses(self, plan: PromptPlan) -> bool:
        """Whether a plan takes anything from the store."""
        return next(plan.stored, None) is not None

    def load(self, plan: PromptPlan) -> PromptPlan:
        """Reads the blobs of a plan and writes its tokens into the cache, some blobs at a time, so that no more than those take memory.

        Returns:
            The plan without what another process has evicted since the look-up, or what is damaged: that is computed.
        """
        if reason := self.slower(plan):
            return replace(plan, rows=tuple(row.cut(row.begin, reason) for row in plan.rows))
        lost: set[str] = set()
        for number, blobs in enumerate(self._batches(plan, lost)):
            self.write(plan, blobs, make_room=number == 0)
        return replace(plan, rows=tuple(row.without(lost, "The stored tokens are gone or damaged.") for row in plan.rows)) if lost else plan

    def _batches(self, plan: PromptPlan, lost: set[str]) -> Iterator[dict[str, Tensors]]:
        """The blobs of a plan by their keys, some at a time; keys of those that can't be read are added to `lost`."""
        blobs: dict[str, Tensors] = {}
        for key in dict.fromkeys(tokens.key for tokens in plan.stored):
            tensors = self.read(key)
            if tensors is None:
                lost.add(key)
                continue
            blobs[key] = tensors
            if sum(map(bytes_of, blobs.values())) >= TOGETHER:
                yield blobs
                blobs = {}
        if blobs:
            yield blobs

    def write(self, plan: PromptPlan, blobs: Mapping[str, Tensors], make_room: bool) -> None:
        """Writes the tokens that some blobs have into the cache.

        Args:
            make_room: Whether these are the first blobs of the plan.
        """
        self.cache.write(plan, blobs, self.codec, make_room)

    def run(self, plan: PromptPlan) -> tuple[int, PromptPlan]:
        """Runs what is not reused; returns how many tokens the cache took, and the plan as it was carried out."""
        return self.cache.execute(self.call, plan), plan

    @property
    @abstractmethod
    def codec(self) -> KVCodec | None:
        """What reads the store's blobs, where they are codes."""

    @abstractmethod
    def seconds_to_read(self, keys: Collection[str]) -> float | None:
        """How long blobs take to be read, at the speed that was measured; None where nobody knows."""

    @abstractmethod
    def refused(self, identity: Identity) -> str:
        """Why nothing stored is of use to a model of this identity, as a sentence; "" where it may be."""

    @abstractmethod
    def look_up(self, identity: Identity, rows: tuple[PromptRow, ...]) -> PromptPlan:
        """What is found of the rows, and which of it is reused."""

    @abstractmethod
    def read(self, key: str) -> Tensors | None:
        """The tensors of a blob, or None where it is gone or damaged."""

    @abstractmethod
    def report(self, plan: PromptPlan, identity: Identity) -> None:
        """Counts a plan that was carried out, for the cache's report and for the store, and has what is new stored."""
