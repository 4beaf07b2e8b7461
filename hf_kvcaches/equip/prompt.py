"""The way of a block of new tokens through a layer: they attend, and then the layer is pruned (`pruning.py`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from hf_kvcaches.core.call import Call
from hf_kvcaches.core.holder import LastQueries
from hf_kvcaches.core.step import Pass
from hf_kvcaches.equip.budgets import Limit
from hf_kvcaches.equip.policies.tokens import ModuleCall
from hf_kvcaches.equip.pruning import Incoming, KeysAndValues, PruningLayer
from hf_kvcaches.equip.settings import QUESTION_ADOPTED
from hf_kvcaches.equip.slot_layer import Undo
from hf_kvcaches.equip.slots import SlotTable
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.attention import Visibility, block_attention, observers

# Arguments of the model's attention with one entry for each new token.
_BY_TOKEN = ("hidden_states", "position_embeddings")

# What a step's mask says: which tokens of the text the query may see, (batch or 1, tokens), or None for all; and which rows have a new
# token, (batch or 1, 1, 1), or None for all.
StepMask = tuple[torch.Tensor | None, torch.Tensor | None]


class PromptLayer(PruningLayer):
    """Takes blocks of new tokens."""

    step: Callable[..., torch.Tensor]  # takes one token a row and attends; see `EquipLayer`

    def choose_angles(self, positions: Any, begun: bool) -> None:
        """Follow a model whose angles depend on how far a text reaches; once it has `begun`, refuse to pass from the ones to the others."""
        rotation = self.rotation
        if self.geometry.changes_at is not None and rotation.geometry is not None:
            now = self.geometry.at(positions(), rotation.geometry if begun else None)
            self.rotation = rotation if now.rotates_like(rotation.geometry) else rotation.by(now)

    def import_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        super().import_state(tensors, values)
        self.choose_angles(lambda: self.table.seen - 1, False)

    def take(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, module_call: ModuleCall) -> torch.Tensor:
        """Take new tokens, a block together and drafts one by one; the attention of all, (batch, tokens, heads, head_dim)."""
        table, tokens, rows = self.table, keys.shape[2], keys.shape[0]
        if module_call.positions is not None and module_call.positions.ndim == 2:  # some models tell them to the module alone
            call.options.setdefault("position_ids", module_call.positions)
        before = table.seen if table.counts is None else table.counts.view(-1, 1).long()
        running = self.passes.enter(call, table.seen, tokens, keys.device, before)
        if running.allowed is not None:
            require_one(running.allowed)
        self.choose_angles(running.positions, bool(table.seen))
        if self.detour is not None:
            return self.detour(self, query, keys, values, call, running)
        length = self.passes.block_length(tokens, begun=bool(table.seen), recording=self.journal is not None)
        if length < tokens and self.waiting:
            raise UnsupportedError(
                f"policy: {self.policy.name!r} prunes in cache.compress(model), which has to be called after the context and before "
                "the first token that follows. A context may come in several calls of more than one token each."
            )
        outputs = []
        with self.storage.space_for(rows, tokens, running.valid, length, running.shared):
            spans = [*self._spans(running, length), *((index, index + 1, None) for index in range(length, tokens))]
            for start, stop, limit in spans:
                part = running.part(start, stop)
                states = query[:, :, start:stop], keys[:, :, start:stop], values[:, :, start:stop]
                inputs = module_call.inputs
                if inputs is not None:
                    inputs = {name: _part(value, start, stop) if name in _BY_TOKEN else value for name, value in inputs.items()}
                if start < length:
                    undo = None if self.journal is None else Undo(self, None, stop - start)
                    outputs.append(self._block(*states, call, part, limit, inputs))
                    if undo is not None and self.journal is not None:  # only now: a block that failed can't be taken back
                        self.journal.append(undo)
                    continue
                allowed = None if part.allowed is None else part.allowed[:, 0, 0].expand(rows, -1)
                real = None if part.valid is None else part.valid[:, None]
                if allowed is not None and real is None:
                    real = torch.ones(rows, 1, 1, dtype=torch.bool, device=keys.device)
                outputs.append(self.step(*states, call, (allowed, real), ModuleCall(call.module, None, part.position_ids, inputs)))
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
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass, limit: Limit | None, inputs: Any
    ) -> torch.Tensor:
        """Attend with a block of new tokens, then prune: (batch, tokens, heads, head_dim)."""
        before, states, observed, output, bias, allowed = self.table, None, None, None, call.bias, running.allowed
        try:
            new, used = self._append(keys, values, running, call.bias), before.used
            query = self.rotation.to_frame(query, running.positions(), new.index[:, 0], before)
            if not before.seen and running.whole and bias is None:
                output = call.dense(query, new.frame, values).to(values.dtype)
            if output is None or self.policy.observes != 0:
                if before.seen and allowed is not None:
                    allowed = _with_new(of_slots(allowed, before.text_index().clamp(min=0)), allowed)
                if before.seen and bias is not None:
                    bias = _with_new(of_slots(bias, self.columns(before, bias, running.tokens), keys.shape[1]), bias)
                slots = None if before.filled is not None or not used else before.positions >= 0
                states, visible = self.states(used, new), Visibility(slots, used, running.valid, allowed)
                output, observed = self.attend_with(query, states, call, visible, bias, output)
            asked: dict[str, Any] = {"queries": query, "query_index": new.index[:, 0], "module": call.module, "inputs": inputs}
            self.arrive(new, limit, attention=observed, states=states, **asked)
        except BaseException:  # slots of new tokens were not written: the layer stays behind the others, and the next pass is refused
            self.table, self.arrival = before, None
            before.advance(0)  # sets the clock, which both tables share
            raise
        return output

    def attend_with(
        self, query: torch.Tensor, states: KeysAndValues, call: Call, visible: Visibility, bias: Any = None, output: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of new tokens over kept ones and themselves, unless the `output` is known, and what observed queries gave to all."""
        (keys, values), window, tokens = states, self.policy.observes, query.shape[2]
        groups = query.shape[1] // keys.shape[1]
        if output is None and call.softcap is None and bias is None and call.sink_logits is None:
            mask = visible.rows(0, tokens, keys.device)
            mask = mask if mask.shape[1] == 1 else mask.repeat_interleave(groups, 1)
            output = functional.scaled_dot_product_attention(query, keys, values, mask, scale=call.scaling, enable_gqa=groups > 1)
            output = output.transpose(1, 2).nan_to_num(0.0)  # a query that sees nothing is padding
        if output is not None and window == 0:
            return output, None
        watching = None if window == 0 else observers(window, visible.new, tokens, keys.device)
        options: dict[str, Any] = {"softcap": call.softcap, "sink_logits": call.sink_logits, "bias": bias, "observers": watching}
        attended, observed = block_attention(query, keys, values if output is None else None, call.scaling, visible, **options)
        output = attended if output is None else output
        assert output is not None
        return output, observed

    def _append(self, keys: torch.Tensor, values: torch.Tensor, running: Pass, bias: torch.Tensor | None) -> Incoming:
        """Put new tokens behind all others, and count them, in a new table: the one before stays as it was, but for the clock."""
        if running.valid is not None:
            self.table.pad(keys.shape[0], keys.device)
        # A stream has one distance for all rows, and counts positions from 0 where it puts the sinks.
        if self.table.counts is not None or bias is not None or (self.rotation.streams and not self.table.seen and running.start != 0):
            self.unshift()
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
        new, table = self.incoming(keys, values, running, self.rotation.index_of_new(table, positions)), copy.copy(table)
        table.append(positions.to(torch.int32), text)
        table.advance(tokens)
        if table.counts is not None:
            table.counts = counts = table.counts + (positions >= 0).sum(-1, keepdim=True, dtype=torch.int32)
            table.fewest = self.passes.memo("fewest", running, lambda: int(counts.min()))
        self.table = table
        return new

    def incoming(self, keys: torch.Tensor, values: torch.Tensor, running: Pass, index: torch.Tensor) -> Incoming:
        """New tokens as the layer keeps them, which are at some positions in the frame, (batch, 1, tokens)."""
        places, rotation = running.positions(), self.rotation
        frame = rotation.to_frame(keys, places, index[:, 0], self.table)
        return Incoming(rotation.undo(places)(keys) if rotation.unrotated else keys, frame, values, index, places[:, -1:])

    def columns(self, table: SlotTable, bias: torch.Tensor, tokens: int) -> torch.Tensor:
        """The columns of a bias by position that belong to slots in use, where so many of the last ones belong to tokens in no slot."""
        if not self.rotation.unrotated:
            return table.text_index().clamp(min=0)
        return (bias.shape[-1] - tokens - 1 - table.distances[..., : table.used]).clamp(min=0)

    def adopt(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        padding: torch.Tensor | None,
        queries: LastQueries | None = None,
    ) -> None:
        tokens, policy, observed, asked = keys.shape[2], self.policy, None, dict[str, Any]()
        running = self.passes.of_prompt(positions, padding, tokens, keys.device)
        self.choose_angles(running.positions, False)
        if (needed := self.settings.queries_needed) != 0 and self.settings.question_start is not None:
            raise UnsupportedError(QUESTION_ADOPTED)
        if policy.observes != 0:
            observed = _observe_adopted(queries, keys, running.valid, policy.observes)
        elif needed and queries is None:
            raise UnsupportedError(
                f"queries: {policy.name!r}, or refit, looks at a prompt's last {needed} queries, and got none. Pass them, or use 'keydiff' "
                "without refit."
            )
        spans = self._spans(running, tokens)
        with self.storage.space_for(keys.shape[0], tokens, running.valid, tokens, running.shared):
            for start, stop, limit in spans:
                part = running.part(start, stop)
                new = self._append(keys[:, :, start:stop], values[:, :, start:stop], part, None)
                if needed != 0 and queries is not None:
                    self.scaling = queries.scaling
                    asked = {"queries": queries.states, "query_index": new.index[:, 0, -queries.states.shape[2] :]}
                self.arrive(new, limit, attention=observed, **asked)


def _observe_adopted(queries: LastQueries | None, keys: torch.Tensor, valid: torch.Tensor | None, window: int | None) -> Any:
    """What an adopted prompt's keys, as the model rotated them, got from its last queries, (batch, kv_heads, tokens)."""
    tokens = keys.shape[2]
    count = tokens if window is None else min(window, tokens)
    available = 0 if queries is None else queries.states.shape[2]
    if queries is None or available < count:
        raise UnsupportedError(f"queries: the policy scores a prompt of {tokens} tokens by its last {count} queries, and got {available}.")
    earlier = tokens - count
    slots, new = (None, None) if valid is None else (valid[:, None, :earlier], valid[:, earlier:])
    watching, visible = observers(window, new, count, keys.device), Visibility(slots, earlier, new)
    options: dict[str, Any] = {"softcap": queries.softcap, "sink_logits": queries.sink_logits, "observers": watching}
    return block_attention(queries.states[:, :, available - count :], keys, None, queries.scaling, visible, **options)[1]


def of_slots(of_text: torch.Tensor, columns: torch.Tensor, kv_heads: int = 1) -> torch.Tensor:
    """What a mask or a bias, (batch or 1, 1 or heads, tokens, tokens of the text), says of slots, with `columns` (batch, heads, slots)."""
    kv_heads = max(kv_heads, columns.shape[1])
    heads = max(of_text.shape[1], kv_heads)
    columns = columns.long().expand(-1, kv_heads, -1).repeat_interleave(heads // kv_heads, 1)
    return of_text.expand(columns.shape[0], heads, -1, -1).gather(-1, columns[:, :, None].expand(-1, -1, of_text.shape[2], -1))


def _with_new(slots: torch.Tensor, of_text: torch.Tensor) -> torch.Tensor:
    """What a mask or a bias says of slots, and of the new tokens, which are its last columns."""
    return torch.cat([slots, of_text[..., -slots.shape[2] :].expand(*slots.shape[:2], -1, -1)], -1)


def _part(value: Any, start: int, stop: int) -> Any:
    """Of some tokens what a module is called with."""
    if isinstance(value, tuple):
        return tuple(_part(entry, start, stop) for entry in value)
    return value[:, start:stop] if isinstance(value, torch.Tensor) else value


def require_one(mask: torch.Tensor) -> None:
    """Refuse a mask, (batch or 1, heads, tokens, tokens of the text), that differs by head."""
    if mask.shape[1] != 1:
        raise UnsupportedError("attention_mask: EquipCache can't follow a mask that differs by head. Give one for all heads.")
