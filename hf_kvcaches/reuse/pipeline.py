"""Fill a cache with one prompt from a store: look up, plan, fetch, write, run, report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from hf_kvcaches.core.identity import Identity
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.core.prompt import PrefillCall, Remaining
from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.reuse.cache import SplicingCache
from hf_kvcaches.reuse.codec import TokenCodec
from hf_kvcaches.reuse.plan import PromptPlan, PromptRow
from hf_kvcaches.stores.hot import bytes_of

CacheT = TypeVar("CacheT", bound=SplicingCache)

Tensors = Mapping[str, torch.Tensor]
# Blobs are read, written into the cache and freed in batches of about this many bytes.
TOGETHER = 2**25


class Pipeline(ABC, Generic[CacheT]):
    """Fill a cache with one prompt. Each step returns a new plan: as looked up, without missing blobs, as executed.

    A failed read is a miss: its tokens are computed.
    """

    def __init__(self, cache: CacheT, call: PrefillCall) -> None:
        self.cache, self.call = cache, call
        self.total = cache.seen + call.input_ids.shape[1]

    @property
    def on_cpu(self) -> bool:
        """Whether the prompt is on a CPU, where attention between reused tokens is slower than that of a whole prompt."""
        return self.call.input_ids.device.type == "cpu"

    def fill(self) -> int | Remaining:
        """Fill the cache; return how many of the prompt's tokens it took, or those that the model runs."""
        padding = self.cache.padding_of(self.call)
        if isinstance(padding, Refusal):
            return self.leave(padding.reason)
        rows = tuple(
            PromptRow(number, pad, slots[pad:], max(self.cache.seen - pad, 0))
            for number, (slots, pad) in enumerate(zip(self.cache.log.rows(), padding, strict=True))
        )
        identity = self.cache.provenance.identity
        reason = self.refused(identity)
        plan = None if reason else self.look_up(identity, rows)
        plan = None if plan is None or reason else self.load(plan)
        if self.cache.shard is not None:
            plan, reason = self._agreed(self.cache.shard, plan, reason)
        if plan is None:
            return self.leave(reason, rows)
        taken, plan = self.run(plan)
        self.report(plan, identity)
        return taken

    def _agreed(self, shard: HeadShard, plan: PromptPlan | None, reason: str) -> tuple[PromptPlan | None, str]:
        """The plan, or the reason for none, that the processes of a tensor-parallel model have in common: they run the same passes.

        Where plans differ, nothing is reused.
        """
        decisions = shard.decisions("" if plan is None else plan.outline())
        if len(decisions) == 1:
            return plan, reason
        differ = "The processes of the tensor-parallel model found different tokens in their stores."
        if plan is None or "" in decisions:
            return None, reason or differ
        return replace(plan, rows=tuple(row.cut(row.begin, differ) for row in plan.rows)), ""

    def leave(self, reason: str, rows: tuple[PromptRow, ...] = ()) -> int:
        """Leave the prompt to the model, and keep the reason for the report; `rows` is empty where the rows are not known."""
        self.cache.reason = reason
        return 0

    def load(self, plan: PromptPlan) -> PromptPlan:
        """Read the blobs of a plan and write its tokens into the cache, some blobs at a time to bound the memory.

        Returns:
            The plan without evicted or damaged blobs, whose tokens are computed.
        """
        lost: set[str] = set()
        for number, blobs in enumerate(self._batches(plan, lost)):
            self.write(plan, blobs, make_room=number == 0)
        return replace(plan, rows=tuple(row.without(lost, "The stored tokens are gone or damaged.") for row in plan.rows)) if lost else plan

    def _batches(self, plan: PromptPlan, lost: set[str]) -> Iterator[dict[str, Tensors]]:
        """Yield the blobs of a plan by their keys, some at a time; add the keys of blobs that can't be read to `lost`."""
        blobs: dict[str, Tensors] = {}
        size = 0
        for key in dict.fromkeys(tokens.key for tokens in plan.stored):
            tensors = self.read(key)
            if tensors is None:
                lost.add(key)
                continue
            blobs[key] = tensors
            size += bytes_of(tensors)
            if size >= TOGETHER:
                yield blobs
                blobs, size = {}, 0
        if blobs:
            yield blobs

    def write(self, plan: PromptPlan, blobs: Mapping[str, Tensors], make_room: bool) -> None:
        """Write the tokens of some blobs into the cache.

        Args:
            make_room: Whether to make room for the prompt first: true for the first blobs of a plan.
        """
        self.cache.write(plan, blobs, self.codec, make_room)

    def run(self, plan: PromptPlan) -> tuple[int | Remaining, PromptPlan]:
        """Run what is not reused, or leave it to the model; return how many tokens the cache took, and the plan as executed."""
        return self.cache.execute(self.call, plan), plan

    @property
    @abstractmethod
    def codec(self) -> TokenCodec | None:
        """The codec of the store's blobs, if they are codes."""

    @abstractmethod
    def refused(self, identity: Identity) -> str:
        """Say why a model of this identity can reuse nothing, as a sentence; "" if it may."""

    @abstractmethod
    def look_up(self, identity: Identity, rows: tuple[PromptRow, ...]) -> PromptPlan:
        """Look up the rows and plan what is reused."""

    @abstractmethod
    def read(self, key: str) -> Tensors | None:
        """Return the tensors of a blob; None if it is missing or damaged."""

    @abstractmethod
    def report(self, plan: PromptPlan, identity: Identity) -> None:
        """Count an executed plan in the reports of cache and store, and have new tokens stored."""
