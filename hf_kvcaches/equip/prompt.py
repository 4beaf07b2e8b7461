"""The way of a block of new tokens through a layer: they attend, and then the layer is pruned (`pruning.py`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from hf_kvcaches.core.call import Call
from hf_kvcaches.core.holder import LastQueries
from hf_kvcaches.core.step import Pass
from hf_kvcaches.equip import block
from hf_kvcaches.equip.block import Incoming, ModuleCall, Questions, StepMask
from hf_kvcaches.equip.budgets import Limit
from hf_kvcaches.equip.pruning import KeysAndValues, PruningLayer, joined
from hf_kvcaches.equip.rotation import Shifted
from hf_kvcaches.equip.settings import QUESTION_ADOPTED
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.blocks import Visibility

# What new tokens do in place of being appended: of (layer, query, keys, values, call, pass), as in `EquipLayer.attend`, their attention.
Detour = Callable[..., torch.Tensor]


class PromptLayer(PruningLayer):
    """Takes blocks of new tokens.

    Attributes:
        detour: What the passes of `EquipCache.edit` and `EquipCache.compress` do; else None.
    """

    detour: Detour | None

    def step(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, mask: StepMask, module_call: ModuleCall
    ) -> torch.Tensor:
        """Take one token a row and attend; see `EquipLayer`."""
        raise NotImplementedError

    def enter(self, call: Call, tokens: int, device: torch.device) -> Pass:
        """The pass that a block of new tokens belongs to."""
        table = self.table
        before = table.seen if table.counts is None else table.counts.view(-1, 1).long()
        running = self.passes.enter(call, table.seen, tokens, device, before)
        if running.allowed is not None:
            block.require_one(running.allowed)
        self.choose_angles(running.positions, bool(table.seen))
        return running

    def take(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, module_call: ModuleCall) -> torch.Tensor:
        """Take new tokens, a block together and drafts one by one; the attention of all, (batch, tokens, heads, head_dim)."""
        table, tokens, rows = self.table, keys.shape[2], keys.shape[0]
        if module_call.positions is not None and module_call.positions.ndim == 2:  # some models tell them to the module alone
            call.options.setdefault("position_ids", module_call.positions)
        running = self.enter(call, tokens, keys.device)
        if self.detour is not None:
            return self.detour(self, query, keys, values, call, running)
        length = self.passes.block_length(tokens, begun=bool(table.seen), recording=self.journal is not None)
        outputs = []
        with self.storage.space_for(rows, tokens, running.valid, length, running.shared):
            for start, stop, limit in self._spans(running, length):
                span = slice(start, stop)
                questions = Questions(query[:, :, span], None, call.module, block.inputs_of(module_call.inputs, start, stop))
                self.record(None, stop - start)
                outputs.append(self._block(questions, keys[:, :, span], values[:, :, span], call, running.part(start, stop), limit))
            if length < tokens and self.waiting and table.seen:
                raise UnsupportedError(
                    f"policy: {self.policy.name!r} prunes in cache.compress(model), which has to be called after the context and before "
                    "the first token that follows. A context may come in several calls of more than one token each."
                )
            for index in range(length, tokens):
                span, part = slice(index, index + 1), running.part(index, index + 1)
                allowed = None if part.allowed is None else part.allowed[:, 0, 0].expand(rows, -1)
                real = None if part.valid is None else part.valid[:, None]
                if allowed is not None and real is None:
                    real = torch.ones(rows, 1, 1, dtype=torch.bool, device=keys.device)
                step_call = ModuleCall(call.module, None, part.position_ids, block.inputs_of(module_call.inputs, index, index + 1))
                outputs.append(self.step(query[:, :, span], keys[:, :, span], values[:, :, span], call, (allowed, real), step_call))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _spans(self, running: Pass, length: int) -> list[tuple[int, int, Limit | None]]:
        """The blocks of new tokens, and what each is pruned to, None for what there is: a first prompt's question is a block of its own."""
        if not length:
            return []
        if self.table.seen or self.waiting:
            return [(0, length, None)]
        ends = sorted({0, self.settings.question_in(length), length})
        prompt = ends[1] if running.valid is None else int(running.valid[:, : ends[1]].sum(-1).max())
        first = self.settings.limit_of(prompt)
        self.set_limits(first, prompt)
        return [(start, stop, None if start else first) for start, stop in pairwise(ends)]

    def _block(
        self, questions: Questions, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass, limit: Limit | None
    ) -> torch.Tensor:
        """Attend with a block of new tokens, then prune: (batch, tokens, heads, head_dim)."""
        new = self._appended(keys, values, running, call.bias)
        table, used, observed, output, bias, allowed = self.table, self.table.used, None, None, call.bias, running.allowed
        assert questions.states is not None
        query = self.rotation.to_frame(questions.states, running.positions(), new.index[:, 0], table)
        if not table.seen and running.whole and bias is None:
            output = call.dense(query, new.frame, values).to(values.dtype)
        if output is None or self.policy.observes != 0:
            if table.seen and allowed is not None:
                allowed = block.with_new(block.mask_of_slots(allowed, table.text_index()), allowed)
            if table.seen and bias is not None:
                bias = block.with_new(block.bias_of_slots(bias, self.columns(bias, running.tokens), keys.shape[1]), bias)
            slots = None if table.filled is not None or not used else table.positions >= 0
            visible, kept = Visibility(slots, used, running.valid, allowed), self.kept_states() if used else None
            output, observed = self.attend_with(query, kept, new.frame, values, call, visible, bias, output)
        self._count(new, running)
        self.arrive(new, limit, Questions(query, new.index[:, 0], questions.module, questions.inputs), observed)
        return output

    def attend_with(
        self,
        query: torch.Tensor,
        kept: KeysAndValues | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        call: Call,
        visible: Visibility,
        bias: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of new tokens over what is kept and themselves, and what all got from the queries that the policy observes, or None.

        Args:
            output: The attention, where it is known already.
        """
        if kept is not None:
            keys, values = joined((kept[0][:, :, : visible.kept], kept[1][:, :, : visible.kept]), (keys, values))
        output = block.attend(query, keys, values, call, visible, bias) if output is None else output
        window = self.policy.observes
        return output, None if window == 0 else block.observe(query, keys, call, visible, window, bias)

    def _appended(self, keys: torch.Tensor, values: torch.Tensor, running: Pass, bias: torch.Tensor | None) -> Incoming:
        """New tokens behind all others, with their places in their rows and in the frame."""
        self.regularise(keys, running.valid is not None, bias)
        if isinstance(self.rotation, Shifted) and not self.table.seen and running.start != 0:
            self.unshift()  # a stream counts positions from 0 where it puts the sinks
        table, tokens, batch = self.table, running.tokens, keys.shape[0]
        steps = torch.arange(tokens, device=keys.device)
        positions, text = (steps + table.seen).expand(batch, 1, -1), None
        if table.counts is not None:
            text = positions
            steps = steps.expand(batch, -1) if running.valid is None else running.valid.cumsum(-1) - 1
            positions = steps[:, None] + table.counts
        if running.valid is not None:
            positions = torch.where(running.valid[:, None], positions, -1)
            text = torch.where(running.valid[:, None], text, -1)  # type: ignore[arg-type]
        if table.seen + tokens > self.rotation.window:
            self.unrotate(torch.where(positions < 0, 0, running.positions()[:, None] - positions).amax(-1, keepdim=True))
        return self.incoming(keys, values, running, positions, text, self.rotation.index_of_new(table, positions))

    def incoming(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        running: Pass,
        positions: torch.Tensor,
        text: torch.Tensor | None,
        index: torch.Tensor,
    ) -> Incoming:
        """New tokens at some positions in their rows, as the layer keeps them; arguments as in `Incoming`."""
        places = running.positions()
        frame = self.rotation.to_frame(keys, places, index[:, 0], self.table)
        return Incoming(self.rotation.stored(keys, places), frame, values, positions.to(torch.int32), index, text, places[:, -1:])

    def columns(self, bias: torch.Tensor, tokens: int) -> torch.Tensor:
        """The columns of a bias by position that belong to slots in use, (batch, 1 or kv_heads, slots in use).

        Args:
            tokens: How many of the last ones belong to tokens that are in no slot.
        """
        table = self.table
        if not self.rotation.unrotated:
            return table.text_index().clamp(min=0)
        return (bias.shape[-1] - tokens - 1 - table.distances[..., : table.used]).clamp(min=0)

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
                new = self._appended(keys[:, :, start:stop], values[:, :, start:stop], part, None)
                self._count(new, part)
                if needed != 0 and queries is not None:
                    self.scaling = queries.scaling
                    questions = Questions(queries.states, new.index[:, 0, -queries.states.shape[2] :])
                self.arrive(new, limit, questions, observed)
