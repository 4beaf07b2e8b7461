"""The way of a block of new tokens through a layer: they attend, and then the layer is pruned (`pruning.py`)."""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from typing import Any, Protocol

import torch

from hf_kvcaches.core.call import Call
from hf_kvcaches.core.holder import LastQueries
from hf_kvcaches.core.step import Pass
from hf_kvcaches.equip import block
from hf_kvcaches.equip.block import Incoming, Questions
from hf_kvcaches.equip.budgets import Limit
from hf_kvcaches.equip.positions import StepMask
from hf_kvcaches.equip.pruning import PruningLayer
from hf_kvcaches.equip.rotation import Shifted
from hf_kvcaches.equip.settings import QUESTION_ADOPTED
from hf_kvcaches.equip.slot_layer import Asked
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.blocks import Visibility


class Detour(Protocol):
    """What new tokens do in place of being appended, for the passes of one operation."""

    def attend(self, layer: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass) -> torch.Tensor:
        """The attention of the new tokens, (batch, tokens, heads, head_dim); arguments as in `EquipLayer.attend`."""


class PromptLayer(PruningLayer):
    """Takes blocks of new tokens.

    Attributes:
        detour: What the passes of `EquipCache.edit` and `EquipCache.compress` do; else None.
    """

    detour: Detour | None

    @abstractmethod
    def step(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, mask: StepMask, asked: Asked) -> torch.Tensor:
        """Take one token a row and attend."""

    def take(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, asked: Asked) -> torch.Tensor:
        """Take new tokens, a block together and drafts one by one; the attention of all, (batch, tokens, heads, head_dim)."""
        table, tokens, rows = self.table, keys.shape[2], keys.shape[0]
        if asked.positions is not None and asked.positions.ndim == 2:  # some models tell them to the module alone
            call.options.setdefault("position_ids", asked.positions)
        running = self.enter(call, tokens, keys.device)
        if self.detour is not None:
            return self.detour.attend(self, query, keys, values, call, running)
        length = self.passes.block_length(tokens, begun=bool(table.seen), recording=self.journal is not None)
        outputs = []
        with self.storage.space_for(rows, tokens, running.valid, length, running.shared):
            for start, stop, limit in self._spans(running, length):
                span = slice(start, stop)
                questions = Questions(query[:, :, span], None, call.module, block.inputs_of(asked.inputs, start, stop))
                self.record(None, stop - start)
                outputs.append(self._block(questions, keys[:, :, span], values[:, :, span], call, running.part(start, stop), limit))
            if length < tokens:
                self.require_pruned()
            for index in range(length, tokens):
                span, part = slice(index, index + 1), running.part(index, index + 1)
                allowed = None if part.allowed is None else part.allowed[:, 0, 0].expand(rows, -1)
                real = None if part.valid is None else part.valid[:, None]
                if allowed is not None and real is None:
                    real = torch.ones(rows, 1, 1, dtype=torch.bool, device=keys.device)
                told = Asked(call.module, None, part.position_ids, block.inputs_of(asked.inputs, index, index + 1))
                outputs.append(self.step(query[:, :, span], keys[:, :, span], values[:, :, span], call, (allowed, real), told))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _spans(self, running: Pass, length: int) -> list[tuple[int, int, Limit]]:
        """The blocks of new tokens with what each is pruned to: a first prompt's question is one of its own."""
        if not length:
            return []
        if self.table.seen or self.waiting:
            return [(0, length, self.limit)]
        ends = sorted({0, self.settings.question_in(length), length})
        first = self.resolve(ends[1] if running.valid is None else int(running.valid[:, : ends[1]].sum(-1).max()))
        return [(start, stop, self.limit if start else first) for start, stop in pairwise(ends)]

    def _block(
        self, questions: Questions, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass, limit: Limit
    ) -> torch.Tensor:
        """Attend with a block of new tokens, then prune: (batch, tokens, heads, head_dim)."""
        table, used, observed, output, bias = self.table, self.table.used, None, None, call.bias
        new = self._incoming(keys, values, running, call)
        index = new.index[:, 0]
        assert questions.states is not None
        query = self.rotation.to_frame(questions.states, running.positions(), index, table)
        if not table.seen and running.whole and bias is None:
            output = call.dense(query, new.frame, values).to(values.dtype)
        if output is None or self.policy.observes != 0:
            all_keys, all_values, allowed = new.frame, values, running.allowed
            if used:
                all_keys = torch.cat([self.rotation.frame(self.storage.read(used)[0], table), new.frame], 2)
                all_values = torch.cat([self.storage.read(used)[1], values], 2)
            if table.seen:
                allowed = None if allowed is None else block.with_new(block.mask_of_slots(allowed, table.text_index()), allowed)
                if bias is not None:
                    bias = block.with_new(block.bias_of_slots(bias, self.columns(bias, running.tokens), keys.shape[1]), bias)
            visible = Visibility(self.holding(), used, running.valid, allowed)
            if output is None:
                output = block.attend(query, all_keys, all_values, call, visible, bias)
            if self.policy.observes != 0:
                observed = block.observe(query, all_keys, call, visible, self.policy.observes, bias)
        self._count(new, running)
        self.arrive(new, limit, Questions(query, index, questions.module, questions.inputs), observed)
        return output

    def _incoming(self, keys: torch.Tensor, values: torch.Tensor, running: Pass, call: Call | None) -> Incoming:
        """New tokens, with their places in their rows and in the frame."""
        self.regularise(keys, running.valid is not None, None if call is None else call.bias)
        if isinstance(self.rotation, Shifted) and not self.table.seen and running.start != 0:
            self.unshift()  # a stream counts positions from 0 where it puts the sinks
        table, tokens, batch, device = self.table, running.tokens, keys.shape[0], keys.device
        steps = torch.arange(tokens, device=device)
        positions, text = (steps + table.seen).expand(batch, 1, -1), None
        if table.counts is not None:
            text = positions
            steps = steps.expand(batch, -1) if running.valid is None else running.valid.cumsum(-1) - 1
            positions = steps[:, None] + table.counts
        if running.valid is not None:
            positions = torch.where(running.valid[:, None], positions, -1)
            text = torch.where(running.valid[:, None], text, -1)  # type: ignore[arg-type]
        places = running.positions()
        if table.seen + tokens > self.rotation.window:
            self.unrotate(torch.where(positions < 0, 0, places[:, None] - positions).amax(-1, keepdim=True))
        index = self.rotation.index_of_new(table, positions)
        frame = self.rotation.to_frame(keys, places, index[:, 0], table)
        return Incoming(self.rotation.stored(keys, places), frame, values, positions.to(torch.int32), index, text, places[:, -1:])

    def _count(self, new: Incoming, running: Pass) -> None:
        """Count new tokens as seen."""
        table = self.table
        table.advance(running.tokens)
        if table.counts is not None:
            table.counts = counts = table.counts + (new.positions >= 0).sum(-1, keepdim=True, dtype=torch.int32)
            table.fewest = self.passes.memo("fewest", running, lambda: int(counts.min()))

    def adopt(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        padding: torch.Tensor | None,
        queries: LastQueries | None = None,
    ) -> None:
        tokens, policy, observed, questions = keys.shape[2], self.policy, None, Questions()
        running = self.passes.of_prompt(positions, padding, tokens, keys.device)
        self.choose_angles(running.positions, False)
        if (needed := self.settings.queries_needed) != 0 and self.settings.question_start is not None:
            raise UnsupportedError(QUESTION_ADOPTED)
        if policy.observes != 0:
            observed = block.observe_adopted(queries, keys, running.valid, policy.observes)
        elif needed and queries is None:
            raise UnsupportedError(
                f"queries: {policy.name!r}, or refit, looks at a prompt's last {needed} queries, and got none. Pass them, or use 'keydiff' "
                "without refit."
            )
        spans = self._spans(running, tokens)
        with self.storage.space_for(keys.shape[0], tokens, running.valid, tokens, running.shared):
            for start, stop, limit in spans:
                part = running.part(start, stop)
                new = self._incoming(keys[:, :, start:stop], values[:, :, start:stop], part, None)
                self._count(new, part)
                if needed != 0 and queries is not None:
                    self.scaling = queries.scaling
                    questions = Questions(queries.states, new.index[:, 0, -queries.states.shape[2] :])
                self.arrive(new, limit, questions, observed)
