"""One layer of an `EquipCache`: the way of a decode step. The way of a block of new tokens is in `prompt.py`."""

from __future__ import annotations

import math
from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.call import Call
from hf_kvcaches.core.step import TokenMask
from hf_kvcaches.core.view import previous_attention
from hf_kvcaches.equip.policies.tokens import ModuleCall
from hf_kvcaches.equip.prompt import PromptLayer, StepMask, of_slots, require_one
from hf_kvcaches.equip.slot_layer import Undo
from hf_kvcaches.equip.storage import Flat, Slots
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.slots import Attended


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
        regular = not rotation.streams or (self.table.counts is None and self.geometry.changes_at is None)
        still = regular and not rotation.unrotated and self.table.seen < rotation.window
        plain = type(self.storage) is Flat and self.geometry.kind in ("rope", "learned")
        return free and still and plain and not torch.is_autocast_enabled(keys.device.type)

    def _plain_step(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one token a row; return keys and values of all slots in use."""
        storage, module_call = self.storage, self.module_call
        self.module_call = None
        if keys.shape[0] != storage.keys.shape[0] or keys.dtype != storage.keys.dtype:
            self.check_new_tokens(keys, values)
        if self.frozen != torch.is_inference_mode_enabled() or torch.is_grad_enabled():
            self.own(keys, values)
        assert module_call is not None
        slot, at = self._next_slot(None)
        storage.write(at, (keys, values))
        if self.table.sink_keys is not None:
            self.follow(module_call.positions)
        if not self.policy.order_only:
            self._learn(None, slot, None, None, module_call)
        assert self.table.filled is not None
        return storage.read(self.table.filled)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
        call.check("EquipCache", sinks=True)
        module_call, self.module_call = self.module_call, None
        module_call = module_call or ModuleCall(call.module, call.mask, call.options.get("position_ids"), None)
        if torch.compiler.is_compiling():
            self._require_compileable(call, keys.shape[2])
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
        read: StepMask = (None, None) if mask is None else self.passes.memo("mask", mask, lambda: self._read(mask))
        return self.step(query, keys, values, call, read, module_call)

    def _require_compileable(self, call: Call, tokens: int) -> None:
        """Refuse what a graph can't do, with so many new tokens in each row."""
        rotation, mask, clock = self.rotation, call.mask, self.table.clock
        if not self.is_compileable or clock is None:
            raise UnsupportedError(
                "torch.compile: of EquipCache only decoding steps can be compiled, with a policy that says so and without recording. "
                "Ask cache.is_compileable, and leave the model uncompiled where it says False."
            )
        if tokens > 1 or call.bias is not None or (mask is not None and mask.shape[-1] != tokens):
            what = "single tokens, without a position bias or a mask over earlier ones"
            raise UnsupportedError(f"torch.compile: EquipCache compiles {what}. Feed others to the uncompiled model.")
        if rotation.otherwise is not None and not rotation.streams:
            compat.assert_in_graph(
                clock < rotation.window,
                "EquipCache: the text outgrows the model's window in a compiled step. Ask cache.get_seq_length() before each step, as "
                "`generate` does, or pass positions='compact'.",
            )
        if mask is not None:
            newest = mask[:, 0, -1]  # the last query's row
            compat.assert_in_graph(
                (newest if newest.dtype == torch.bool else newest == 0).all(),
                "EquipCache: padding among the new tokens of a compiled call. Feed them to the uncompiled model. If no new token is "
                "padding, call hf_kvcaches.enable(model) before the model is compiled.",
            )

    def step(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, mask: StepMask, module_call: ModuleCall
    ) -> torch.Tensor:
        """Take one token a row and attend: (batch, 1, heads, head_dim)."""
        (allowed, real), shown, table, storage = mask, query, self.table, self.storage
        if self.geometry.changes_at is not None:
            self.choose_angles(lambda: table.seen, True)
        if real is not None:
            table.pad(keys.shape[0], keys.device)
        if self.rotation.streams and (table.counts is not None or call.bias is not None):
            self.unshift()
        if not torch.compiler.is_compiling() and table.seen >= self.rotation.window:
            self.unrotate(0 if module_call.positions is None else self.places(module_call.positions)[..., None] - table.count)
        slot, at = self._next_slot(real)
        if (rotation := self.rotation).unrotated:
            positions = module_call.positions
            turn = self.passes.memo(("undo", rotation), positions, lambda: rotation.undo(self.places(positions)))
            # One operation for both: a rotation of so few numbers costs what its launches do.
            query, keys = turn(torch.cat([query, keys], 1)).split([query.shape[1], keys.shape[1]], 1)
        raw = storage.encode(keys, values)
        if real is not None:
            raw = tuple(torch.where(real[..., None], new, old) for new, old in zip(raw, storage.gather(at), strict=True))
        storage.write(at, raw)
        if table.sink_keys is not None:
            self.follow(module_call.positions)
        output, weights = self._answer(query, call, allowed)
        if not self.policy.order_only:
            self._learn(weights, slot, shown, real, module_call)
        return output

    def _read(self, mask: Any) -> StepMask:
        """What the mask of a decode step says."""
        seen = self.table.seen
        if not isinstance(mask, torch.Tensor):  # flex attention's
            shown = TokenMask.read(mask, seen, 1).shown
            mask = torch.ones(1, 1, device=self.device, dtype=torch.bool) if shown is None else shown
        if mask.ndim == 4:
            require_one(mask)
            mask = mask[:, 0, -1]
        allowed = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()
        if allowed.shape[1] not in (1, seen + 1):
            raise UnsupportedError(
                f"attention_mask: this cache can't follow a mask over {allowed.shape[1]} tokens behind {seen} others. "
                "Pass a padding mask, (batch, tokens)."
            )
        return allowed if allowed.shape[1] > 1 else None, allowed[:, -1:, None]

    def _next_slot(self, real: torch.Tensor | None) -> tuple[Slots, Slots]:
        """Give the new token of each row a slot: (batch, 1 or kv_heads, 1), and the same as short as it can be."""
        table, graph, first = self.table, torch.compiler.is_compiling(), (self.settings.sinks, self.policy.first_score)
        if not graph and table.filled is not None and table.filled < self.slots:
            if real is None:
                self._reserve(table.filled + 1)
                at = torch.full((1, 1, 1), table.filled, device=self.device)
                if self.journal is not None:
                    self.journal.append(Undo(self, at, 1))
                table.filled += 1
                slot = at.expand(*table.scores.shape[:2], 1)
                table.insert(slot, None, *first)
                return slot, at
            table.filled = None  # rows fill up apart from each other
        if not graph:
            if table.rooms is None and table.filled is None:
                self._reserve(min(self.slots, table.seen + 1))
            if self.rotation.streams:
                self.keep_sinks()
        scores = table.scores
        if self.recent > 1 and not self.policy.order_only:  # the token to come is one of the recent ones
            start: Any = (table.count if graph or table.counts is not None else table.seen) + 1 - self.recent
            scores = scores.masked_fill(table.positions >= (max(0, start) if isinstance(start, int) else start.clamp(min=0)), math.inf)
        slot = scores.argmin(-1, keepdim=True)
        if self.journal is not None:
            self.journal.append(Undo(self, slot, 1))
        table.insert(slot, real, *first)
        return slot, slot

    def _reserve(self, slots: int) -> None:
        if slots > self.storage.capacity:
            self.storage.reserve(slots, self.slots)
            self.table.reserve(self.storage.capacity)

    def _answer(self, query: torch.Tensor, call: Call, allowed: torch.Tensor | None) -> Attended:
        """Attention of one query a row over the slots, and its weights where the policy observes them."""
        table, storage, rotation, valid, bias = self.table, self.storage, self.rotation, None, call.bias
        watched, graph = self.policy.observes != 0, torch.compiler.is_compiling()
        used = table.positions.shape[-1] if graph or table.filled is None else table.filled
        if allowed is not None or (not storage.full and (graph or table.filled is None)):
            valid = table.positions[..., :used] >= 0
            if allowed is not None:
                valid = valid & of_slots(allowed[:, None, None], table.text_index().clamp(min=0))[:, :, 0]
        if not rotation.unrotated and valid is None and not watched and bias is None and type(storage) is Flat:
            return previous_attention(call.module, query, *storage.read(used), None, **call.options)[0], None
        options: dict[str, Any] = {"softcap": call.softcap, "sink_logits": call.sink_logits, "want_weights": watched}
        if bias is not None:
            options["bias"] = of_slots(bias[:, :, -1:], self.columns(table, bias, 0), storage.shape[1])
        if rotation.unrotated:
            distances = table.distances[..., :used]
            distances = distances if valid is None else distances.clamp(max=used - 1)
            options["rotation"] = rotation.on_read(distances, storage.capacity + 1)
        return storage.attend(query, used, self.scaling, valid=valid, **options)

    def _learn(self, weights: Any, slot: Slots, query: torch.Tensor | None, real: torch.Tensor | None, module_call: ModuleCall) -> None:
        """Score the new token, or all, as far as the policy does so now, by what its query gave to each slot, (batch, kv_heads, slots)."""
        table, policy = self.table, self.policy
        if policy.interval is None:
            before = None if real is None else table.scores.clone()
            if weights is not None:
                weights = weights if self.shard is None or policy.by_head else self.shard.gather(weights)
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
        table, asked = self.table, dict[str, Any]()
        current = table.scores[..., : table.used]
        if table.queries is not None:
            steps = torch.arange(1 - table.queries.shape[2], 1, device=table.queries.device)
            index = self.rotation.index_of_new(table, steps + self.places(None))
            states = self.rotation.to_frame(table.queries, steps + self.places(module_call.positions), index, table)
            asked = {"queries": states, "query_index": index}
        if table.gathering is not None:
            asked["attention"] = table.gathering[..., : table.used]
        scores = self.policy.checked_score(self.shown(None, self.slots, module=module_call.module, **asked))
        current.copy_(torch.where(current.isinf(), current, scores))
        table.since = 0
        if table.gathering is not None:
            table.gathering.zero_()
