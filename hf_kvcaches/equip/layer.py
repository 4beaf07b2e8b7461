"""One layer of an `EquipCache`: the way of a decode step. The way of a block of new tokens is in `prompt.py`."""

from __future__ import annotations

import math
from typing import Any

import torch

from hf_kvcaches.core.call import Call
from hf_kvcaches.core.step import TokenMask
from hf_kvcaches.core.view import previous_attention
from hf_kvcaches.equip import block, graphs
from hf_kvcaches.equip.block import ModuleCall, Questions, StepMask
from hf_kvcaches.equip.prompt import PromptLayer
from hf_kvcaches.equip.rotation import Shifted, Turn, Unrotated
from hf_kvcaches.equip.storage import Flat, Slots, Streamed
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.arguments import Attended


class EquipLayer(PromptLayer):
    """Keeps at most a budget of tokens; a new one overwrites the eviction victim."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Hand out plain tensors in a decode step that needs neither queries nor a mask; else the view that answers the queries."""
        if key_states.shape[2] == 1 and self._hands_out(key_states):
            return self._plain_step(key_states, value_states)
        return super().update(key_states, value_states, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "module_call": None}  # an interrupted pass leaves it, and copies are without the model

    def _hands_out(self, keys: torch.Tensor) -> bool:
        """Whether the model's own attention may have the slots as they are: all in use hold a token, and no mask hides one."""
        if torch.compiler.is_compiling() or self.module_call is None or self.module_call.mask is not None or not self.table.filled:
            return False
        policy, rotation = self.policy, self.rotation
        watched = policy.observes != 0 or (policy.reads_queries and policy.interval is not None)
        free = not (watched or self.waiting or self.journal is not None or self.detour is not None)
        regular = not isinstance(rotation, Shifted) or (self.table.counts is None and self.geometry.changes_at is None)
        still = regular and not rotation.unrotated and self.table.seen < rotation.window
        plain = type(self.storage) in (Flat, Streamed) and self.geometry.kind in ("rope", "learned")
        return free and still and plain and not torch.is_autocast_enabled(keys.device.type)

    def _plain_step(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one token a row; return keys and values of all slots in use."""
        table, storage, module_call = self.table, self.storage, self.module_call
        self.module_call = None
        if keys.shape[0] != storage.keys.shape[0] or keys.dtype != storage.keys.dtype:
            self.check_new_tokens(keys, values)
        if self.frozen != torch.is_inference_mode_enabled() or torch.is_grad_enabled():
            self.own(keys, values)
        assert module_call is not None
        assert table.filled is not None
        slot, at = self._next_slot(None)
        table.insert(slot, None, self.settings.sinks, self.policy.first_score)
        storage.write(at, (keys, values))
        if isinstance(storage, Streamed):
            self.follow(module_call.positions)
        if not self.policy.order_only:
            self._learn(None, slot, None, None, module_call)
        return storage.read(table.filled)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
        """Take the new tokens and give their queries' attention, (batch, tokens, heads, head_dim).

        Args:
            query: (batch, heads, tokens, head_dim), as the model rotated them.
            keys: (batch, kv_heads, tokens, head_dim), as the model rotated them.
        """
        call.check("EquipCache", sinks=True)
        module_call, self.module_call = self.module_call, None
        module_call = module_call or ModuleCall(call.module, call.mask, call.options.get("position_ids"), None)
        if torch.compiler.is_compiling():
            graphs.require_compileable(self, call, keys.shape[2])
            return self.step(query, keys, values, call, (None, None), module_call)
        if self.table.stale:
            self.table.catch_up()
        self.scaling = call.scaling
        if self.frozen != torch.is_inference_mode_enabled() or torch.is_grad_enabled():
            self.own(query, keys, values)
        alone = keys.shape[2] == 1 and self.table.seen and not (self.storage.pooled or self.waiting)
        if not alone or self.journal is not None or self.detour is not None:
            return self.take(query, keys, values, call, module_call)
        mask = call.mask if module_call.mask is False else module_call.mask
        read: StepMask = (None, None) if mask is None else self.passes.memo("mask", mask, lambda: self.read_step(mask))
        return self.step(query, keys, values, call, read, module_call)

    def step(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, mask: StepMask, module_call: ModuleCall
    ) -> torch.Tensor:
        """Take one token a row and attend: (batch, 1, heads, head_dim).

        Args:
            mask: Which tokens of the text the query may see, and which rows have a new token.
        """
        allowed, real = mask
        table, shown = self.table, query
        if self.geometry.changes_at is not None:
            self.choose_angles(lambda: table.seen, True)
        if real is not None or isinstance(self.rotation, Shifted):
            self.regularise(keys, real is not None, call.bias)
        if not torch.compiler.is_compiling() and table.seen >= self.rotation.window:
            self.unrotate(0 if module_call.positions is None else self.places(module_call.positions)[..., None] - table.count)
        slot, at = self._next_slot(real)
        table.insert(slot, real, self.settings.sinks, self.policy.first_score)
        if self.rotation.unrotated:
            # One operation for both: a rotation of so few numbers costs what its launches do.
            query, keys = self.undo_turn(module_call.positions)(torch.cat([query, keys], 1)).split([query.shape[1], keys.shape[1]], 1)
        raw = self.storage.encode(keys, values)
        if real is not None:
            raw = tuple(torch.where(real[..., None], new, old) for new, old in zip(raw, self.storage.gather(at), strict=True))
        self.storage.write(at, raw)
        if isinstance(self.storage, Streamed):
            self.follow(module_call.positions)
        output, weights = self._answer(query, call, allowed)
        if not self.policy.order_only:
            self._learn(weights, slot, shown, real, module_call)
        return output

    def read_step(self, mask: Any) -> StepMask:
        """What the mask of a decode step says."""
        seen = self.table.seen
        if not isinstance(mask, torch.Tensor):  # flex attention's
            read = TokenMask.read(mask, seen, 1)
            mask = torch.ones(1, 1, device=self.device, dtype=torch.bool) if read.shown is None else read.shown
        if mask.ndim == 4:
            block.require_one(mask)
            mask = mask[:, 0, -1]
        allowed = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()
        if allowed.shape[1] not in (1, seen + 1):
            raise UnsupportedError(
                f"attention_mask: this cache can't follow a mask over {allowed.shape[1]} tokens behind {seen} others. "
                "Pass a padding mask, (batch, tokens)."
            )
        return allowed if allowed.shape[1] > 1 else None, allowed[:, -1:, None]

    def undo_turn(self, positions: torch.Tensor | None) -> Turn:
        """From the model's position of the newest token to none."""
        rotation: Any = self.rotation
        if torch.compiler.is_compiling():  # a graph would be compiled anew for each cache's `id`
            return rotation.undo(self.places(positions))
        turn: Turn = self.passes.memo(("undo", id(rotation)), positions, lambda: rotation.undo(self.places(positions)))
        return turn

    def _next_slot(self, real: torch.Tensor | None) -> tuple[Slots, Slots]:
        """The slot of the new token of each row, (batch, 1 or kv_heads, 1), and the same as short as it can be."""
        table, graph = self.table, torch.compiler.is_compiling()
        if not graph and table.filled is not None and table.filled < self.slots:
            if real is None:
                self._reserve(table.filled + 1)
                at = torch.full((1, 1, 1), table.filled, device=self.device)
                if self.journal is not None:
                    self.record(at, 1)
                table.filled += 1
                return at.expand(*table.scores.shape[:2], 1), at
            table.filled = None  # rows fill up apart from each other
        if not graph and table.rooms is None and table.filled is None:
            self._reserve(min(self.slots, table.seen + 1))
        if isinstance(self.storage, Streamed) and not graph:
            self.storage.keep_sinks(self.settings.sinks)
        scores = table.scores
        if self.recent > 1 and not self.policy.order_only:  # the token to come is one of the recent ones
            start: Any = (table.count if graph or table.counts is not None else table.seen) + 1 - self.recent
            scores = scores.masked_fill(table.positions >= (max(0, start) if isinstance(start, int) else start.clamp(min=0)), math.inf)
        slot = scores.argmin(-1, keepdim=True)
        if self.journal is not None:
            self.record(slot, 1)
        return slot, slot

    def _reserve(self, slots: int) -> None:
        """Make room for a number of slots."""
        if slots > self.storage.capacity:
            self.storage.reserve(slots, self.slots)
            self.table.reserve(self.storage.capacity)

    def _answer(self, query: torch.Tensor, call: Call, allowed: torch.Tensor | None) -> Attended:
        """Attention of one query a row over the slots, and its weights where the policy observes them."""
        table, valid, tables = self.table, None, None
        used = table.positions.shape[-1] if torch.compiler.is_compiling() or table.filled is None else table.filled
        if allowed is not None or (not self.storage.full and (torch.compiler.is_compiling() or table.filled is None)):
            valid = table.positions[..., :used] >= 0
            if allowed is not None:
                valid = valid & block.mask_of_slots(allowed[:, None, None], table.text_index())[:, :, 0]
        watched, bias = self.policy.observes != 0, call.bias
        if bias is not None:
            bias = block.bias_of_slots(bias[:, :, -1:], self.columns(bias, 0), self.storage.shape[1])
        if isinstance(self.rotation, Unrotated):
            distances = table.distances[..., :used]
            tables = self.rotation.on_read(distances if valid is None else distances.clamp(max=used - 1), self.storage.capacity + 1)
        elif valid is None and not watched and bias is None and type(self.storage) in (Flat, Streamed):
            return previous_attention(call.module, query, *self.storage.read(used), None, **call.options)[0], None
        return self.storage.attend(
            query,
            used,
            self.scaling,
            rotation=tables,
            valid=valid,
            softcap=call.softcap,
            bias=bias,
            sink_logits=call.sink_logits,
            want_weights=watched,
        )

    def _learn(self, weights: Any, slot: Slots, query: torch.Tensor | None, real: torch.Tensor | None, module_call: ModuleCall) -> None:
        """Score the new token, or all, as far as the policy does so now.

        Args:
            weights: What the query gave to each slot, (batch, kv_heads, slots in use), float32, or None where the policy observes none.
            query: As the model rotated it, or None.
            real: Which rows have a new token, (batch, 1, 1), or None for all.
        """
        table, policy = self.table, self.policy
        if policy.interval is None:
            before = table.scores.clone() if real is not None and not policy.order_only else None
            if weights is not None and self.shard is not None and not policy.by_head:
                weights = self.shard.gather(weights)
            if weights is not None:
                policy.watch(table.scores[..., : weights.shape[-1]], weights.detach(), slot)
            elif module_call.inputs is not None and (score := policy.score_new(dict(module_call.inputs), module_call.module)) is not None:
                score = score if self.shard is None else score[:, self.shard.span(score.shape[1])]
                sink: Any = table.count <= self.settings.sinks
                if sink is not True:
                    table.scores.scatter_(2, slot, score if sink is False else torch.where(sink, math.inf, score))
            if before is not None and real is not None:
                table.scores = torch.where(real, table.scores, before)
            return
        if weights is not None and table.gathering is not None:
            table.gathering[..., : weights.shape[-1]].add_(weights.detach() if real is None else weights.detach() * real)
        if query is not None and policy.reads_queries:
            if table.queries is None:
                table.queries = query.new_zeros(*query.shape[:2], policy.interval, query.shape[3])
            table.queries[:, :, table.since : table.since + 1] = query.detach()
        table.since += 1
        if table.since == policy.interval:
            self._score_again(module_call)

    def _score_again(self, module_call: ModuleCall) -> None:
        """Score all tokens by what came since the last scoring."""
        table = self.table
        questions, attention = Questions(module=module_call.module), None if table.gathering is None else table.gathering[..., : table.used]
        if table.queries is not None:
            steps = torch.arange(1 - table.queries.shape[2], 1, device=table.queries.device)
            index = self.rotation.index_of_new(table, steps + self.places(None))
            states = self.rotation.to_frame(table.queries, steps + self.places(module_call.positions), index, table)
            questions = Questions(states, index, module_call.module)
        scores = self.policy.checked_score(self.shown(None, questions, attention, self.slots))
        current = table.scores[..., : table.used]
        current.copy_(torch.where(current.isinf(), current, scores))
        table.since = 0
        if table.gathering is not None:
            table.gathering.zero_()
