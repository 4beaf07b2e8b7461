"""Run a prompt in stages, some layers at a time, because tokens join or leave between them.

All tokens but the last run here; the model runs the last one. In a store with hidden states it runs here too, to have its own stored.

A segment of which only the lower layers are reused joins above them, with its stored hidden states. Of a probed segment a few tokens run
through the lowest layers, until the probe decides whether the segment is reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.core.prompt import PrefillCall
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.splice import splice
from hf_kvcaches.reuse import layout
from hf_kvcaches.reuse.cache import SplicingCache
from hf_kvcaches.reuse.pipeline import Tensors
from hf_kvcaches.reuse.plan import NONE, Indices, PlannedRow, PlannedSpan, PromptPlan
from hf_kvcaches.reuse.sparse import Look, SparsePass, ids_at, slots_of
from hf_kvcaches.reuse.transfer import moved
from hf_kvcaches.segments.flops import Costs
from hf_kvcaches.segments.planning import PROBES, SLICE, probed_indices
from hf_kvcaches.segments.policy import SegmentPolicy
from hf_kvcaches.segments.store import SegmentStore
from hf_kvcaches.segments.storing import Hidden


class Probe(NamedTuple):
    """The score of a probe of the span from `start` to `stop`."""

    start: int
    stop: int
    score: float


def agreement(query: torch.Tensor, cached: torch.Tensor, fresh: torch.Tensor, shard: HeadShard | None = None) -> float:
    """Return the cosine between the scores of queries over cached keys and over fresh ones, the mean over queries and heads.

    Args:
        query: (heads, queries, head_dim).
        cached: (kv_heads, keys, head_dim).
        shard: Which heads these are, under tensor parallelism.
    """
    grouped = query.float().reshape(cached.shape[0], -1, query.shape[-1])
    first, second = (grouped @ keys.float().mT for keys in (cached, fresh))
    cosines = torch.nn.functional.cosine_similarity(first, second, dim=-1)
    return float((cosines if shard is None else shard.gather(cosines, 0)).mean())


class Stages:
    """Runs a prompt that takes more than one pass.

    Args:
        cache: A cache whose layers have room for the prompt, and hold its reused tokens.
        joining: Hidden states of tokens that join above the lowest layer, by the key of their blob.
        scope: See `Record`; the results of probes are remembered for it.

    Attributes:
        probes: The probes of the prompt.
    """

    def __init__(
        self,
        cache: SplicingCache,
        call: PrefillCall,
        plan: PromptPlan,
        joining: Mapping[str, Tensors],
        store: SegmentStore,
        policy: SegmentPolicy,
        scope: str,
    ) -> None:
        self.cache, self.call, self.joining, self.total = cache, call, joining, plan.total
        self.store, self.policy, self.scope = store, policy, scope
        self.probes: list[Probe] = []
        self.rows, self.checked = list(plan.rows), plan.checked
        self.layers = len(cache.layers)
        self.device = call.input_ids.device
        self.padding = torch.tensor([row.padding for row in plan.rows], device=self.device)
        self.cuts = self._stored_cuts()
        self._probed: dict[int, Indices] = {}
        self._level = 0

    def run(self) -> tuple[PromptPlan, dict[int, Hidden]]:
        """Run all tokens but the last.

        Returns:
            The plan with all checks decided, and for each row the hidden states to store.
        """
        check = self.policy.check_layer if self.checked else None
        if check is not None and check >= self.layers:
            raise UnsupportedError(
                f"policy: check_layer={check}, and the model has {self.layers} layers. Calibrate a policy for this model."
            )
        depths = {depth for row in self.rows for span in row.spans for depth in (span.depth, span.repair_depth)}
        levels = sorted(level for level in {check, *self.cuts, *depths} if level is not None and level < self.layers)
        probes = [np.concatenate([NONE, *(probed_indices(span) for span in row.spans if span.check)]) for row in self.rows]
        if check is not None:
            self._probed, self._level = {row.number: indices for row, indices in zip(self.rows, probes, strict=True)}, check
        slots = self._slots([np.union1d(self._needed(row), indices) for row, indices in zip(self.rows, probes, strict=True)])
        hidden: torch.Tensor | None = None
        kept: dict[int, Hidden] = {row.number: {} for row in self.rows}
        start = 0
        for level in levels:
            states = self._run(start, level, slots, hidden)
            if level == check:
                slots, states = self._check(level, slots, states, probes)
            slots, hidden = self._joined(level, *self._without_repaired(level, slots, states))
            if level in self.cuts:
                for index, row in enumerate(self.rows):
                    kept[row.number] = {**kept[row.number], level: (slots[index].cpu(), hidden[index])}
            start = level
        self._run(start, self.layers, slots, hidden)
        return PromptPlan(tuple(self.rows), self.total), kept

    def cost_of_checks(self, row: PlannedRow, costs: Costs) -> float:
        """Count the floating-point operations of a row's checks alone; the layer that compares keys counts as a whole."""
        probed = self._probed.get(row.number)
        if probed is None:
            return 0.0
        probed_only = np.setdiff1d(probed, row.recompute())
        return costs.of_tokens(probed_only, 0, self._level) + costs.of_tokens(probed, self._level, self._level + 1)

    def _needed(self, row: PlannedRow) -> Indices:
        """Return the indices of the tokens that all layers compute."""
        indices = row.recompute()
        return np.append(indices, len(row.ids) - 1) if self.cuts else indices

    def _stored_cuts(self) -> set[int]:
        store = self.store
        cuts = set(range(store.cuts, self.layers, store.cuts)) if store.cuts else set()
        return cuts | ({store.depth} if store.depth and store.depth < self.layers else set())

    def _slots(self, indices: Sequence[Indices]) -> torch.Tensor:
        return slots_of(indices, [row.padding for row in self.rows], self.total, self.device)

    def _run(self, start: int, stop: int, slots: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run tokens through some layers."""
        if not slots.shape[1]:
            return torch.zeros(*slots.shape, self.cache.config.hidden_size, dtype=self.call.model.dtype, device=self.device)
        sparse = SparsePass(slots, self.padding, self.total)
        return self.cache.run_sparse(sparse, ids_at(self.call, slots, self.total), start, stop, hidden)

    def _without_repaired(self, level: int, slots: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Drop the tokens that only the layers below this one recompute; return the other slots and hidden states."""
        spans = [[span.recompute for span in row.spans if span.repair_depth == level] for row in self.rows]
        if not any(spans):
            return slots, hidden
        indices = [(row_slots[row_slots < self.total].cpu().numpy() - row.padding) for row_slots, row in zip(slots, self.rows, strict=True)]
        remaining = self._slots([np.setdiff1d(row, np.concatenate([NONE, *gone])) for row, gone in zip(indices, spans, strict=True)])
        return remaining, self._states_of(remaining, slots, hidden)

    def _joined(self, level: int, slots: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the tokens of segments that are reused below this layer; return all slots and hidden states."""
        spans = [[span for span in row.spans if span.depth == level] for row in self.rows]
        if not any(spans):
            return slots, hidden
        new = self._slots([np.concatenate([NONE, *(span.joining() for span in row_spans)]) for row_spans in spans])
        states = torch.zeros(*new.shape, self.cache.config.hidden_size, dtype=self.call.model.dtype, device=self.device)
        for row_states, row_spans in zip(states, spans, strict=True):
            filled = 0
            for span in row_spans:
                for tokens in span.stored:
                    length = tokens.stop - tokens.start
                    blob = self.joining[tokens.key]
                    packed = layout.hidden_states(blob, tokens.stored, level, tokens.offset, tokens.offset + length)
                    span_states = row_states.new_empty(1, length, row_states.shape[-1])
                    splice(moved(packed, self.device), [span_states], torch.arange(length, device=self.device))
                    joining = np.setdiff1d(np.arange(tokens.start, tokens.stop), span.recompute) - tokens.start
                    row_states[filled : filled + len(joining)] = span_states[0, joining]
                    filled += len(joining)
        return self._merged(slots, hidden, new, states)

    def _merged(
        self, slots: torch.Tensor, hidden: torch.Tensor, new: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both, order = torch.cat([slots, new], dim=1).sort(dim=1, stable=True)
        joined = torch.cat([hidden.to(states), states], dim=1) if hidden.shape[1] else states
        longest = int((both < self.total).sum(1).max())
        return both[:, :longest], joined.gather(1, order[..., None].expand_as(joined))[:, :longest]

    def _check(self, level: int, slots: torch.Tensor, hidden: torch.Tensor, probes: Sequence[Indices]) -> tuple[torch.Tensor, torch.Tensor]:
        """Decide the checked spans; return slots and hidden states of the tokens that go on: without probes, with rejected spans."""
        probe_slots = self._slots(probes)
        look = self._look(level, probe_slots, self._states_of(probe_slots, slots, hidden))
        for index, row in enumerate(self.rows):
            spans: list[PlannedSpan] = []
            for span in row.spans:
                spans += self._decided(span, level, index, row, probe_slots[index], look) if span.check else [span]
            self.rows[index] = replace(row, spans=tuple(spans))
        remaining = self._slots([self._needed(row) for row in self.rows])
        ran = [set(row_slots.tolist()) for row_slots in slots]
        needed = [set((self._needed(row) + row.padding).tolist()) for row in self.rows]
        if any(needed_slots - ran_slots for needed_slots, ran_slots in zip(needed, ran, strict=True)):
            # Tokens behind a rejected segment have attended to its stored keys, so they run again, with the segment.
            slots, hidden = remaining, self._run(0, level, remaining, None)
        return remaining, self._states_of(remaining, slots, hidden)

    def _decided(
        self, span: PlannedSpan, level: int, index: int, row: PlannedRow, probe_slots: torch.Tensor, look: Look
    ) -> Sequence[PlannedSpan]:
        """Return the spans that replace a checked one, by the keys that its tokens have at this layer."""
        check = span.check
        assert check is not None
        slots = torch.from_numpy(probed_indices(span)).to(self.device) + row.padding
        columns = torch.searchsorted(probe_slots.contiguous(), slots)
        buffer = self.cache.layers[level].key_buffer
        assert buffer is not None
        cached, fresh = buffer[index, :, slots], look.fresh[index, :, columns]
        if check.probe:
            assert look.query is not None
            queries = look.query[index, :, columns[SLICE : SLICE + PROBES]]
            score = agreement(queries, cached[:, :SLICE], fresh[:, :SLICE], self.cache.shard)
            self.probes.append(Probe(span.start, span.stop, score))
            policy, ids = self.policy, row.ids[span.start : span.stop]
            self.store.experience.learn(self.scope, level, ids, check.likeness, score, policy.repair)
            if score < policy.probe:
                return check.otherwise
        recompute = span.recompute
        if check.choose:
            deviations = (fresh.float() - cached.float()).norm(dim=-1)
            deviations = deviations if self.cache.shard is None else self.cache.shard.gather(deviations, 0)
            order = np.argsort(-deviations.norm(dim=0).cpu().numpy(), kind="stable")
            recompute = np.sort(order[: check.choose]) + span.start
        return (replace(span, recompute=recompute, check=None),)

    def _look(self, level: int, slots: torch.Tensor, hidden: torch.Tensor) -> Look:
        sparse = SparsePass(slots, self.padding, self.total)
        return self.cache.look(sparse, ids_at(self.call, slots, self.total), level, hidden)

    def _states_of(self, chosen: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of some of the tokens that ran; fillers get any."""
        columns = torch.searchsorted(slots.contiguous(), chosen).clamp_max(slots.shape[1] - 1)
        return hidden.gather(1, columns[..., None].expand(-1, -1, hidden.shape[-1]))
