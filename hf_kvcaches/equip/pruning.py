"""From scores to slots: kept and new tokens are scored, some of them stay, and these are the content of the slots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hf_kvcaches.equip.budgets import Candidates, Limit, best, by_position, compared, protected, slots_for, with_rooms
from hf_kvcaches.equip.coded import ragged_like
from hf_kvcaches.equip.policies.tokens import UNSCORED, Tokens, unscored
from hf_kvcaches.equip.refit import context_queries, refitted
from hf_kvcaches.equip.settings import scores_alike
from hf_kvcaches.equip.slot_layer import SlotLayer
from hf_kvcaches.equip.storage import Ragged, Slots, pick
from hf_kvcaches.errors import ConfigError

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Incoming:
    """The new tokens of a block, which are the last ones of the table until it is known which of all tokens stay."""

    keys: torch.Tensor  # as they will be kept
    frame: torch.Tensor  # the same keys, rotated as their queries are
    values: torch.Tensor
    index: torch.Tensor  # to which position `frame` is rotated, (batch, 1, tokens); -1: padding
    newest: torch.Tensor  # the model's position of the last one, (batch or 1, 1)


class PruningLayer(SlotLayer):
    """Keeps the tokens that are worth most."""

    arrival: Incoming | None

    def set_limits(self, limit: Limit, prompt: int) -> None:
        """Set how many slots there are from now on, for a prompt of so many tokens in its longest row, which is pruned to `limit`."""
        decode = self.settings.decode_budget
        slots = limit.slots if decode is None else slots_for(decode, prompt, limit.slots)
        if slots < limit.slots:
            raise ConfigError.of("decode_budget", f"at least the budget, {limit.slots} tokens", slots)
        self.slots, self.recent, self.waiting = slots, self.settings.recent_of(slots), False

    def kept_states(self, used: int) -> KeysAndValues:
        """Keys in the frame and values of slots in use."""
        keys, values = self.storage.read(used)
        return self.rotation.frame(keys, self.rotation.index_of_slots(self.table, used)), values

    def states(self, old: int, new: Incoming | None) -> KeysAndValues:
        """Keys in the frame and values of the first slots, so many, and of new tokens behind them."""
        kept = self.kept_states(old) if old else None
        return joined(kept, None if new is None else (new.frame, new.values))

    def shown(self, new: Incoming | None, budget: int | None, behind: int = 0, states: KeysAndValues | None = None, **asked: Any) -> Tokens:
        """What the policy is shown: slots in use, of which the last ones are for new tokens, but for so many `behind`."""
        table, used = self.table, self.table.used
        old, scores, count = used - _tokens(new), None, table.count - behind
        positions, indices = table.positions[..., :used], [] if new is None else [new.index]
        if old:
            indices = [self.rotation.index_of_slots(table, old), *indices]
            scores = table.scores[..., :used]
            scores = torch.where(scores >= UNSCORED, -math.inf, scores)
        indices = [index.expand(*positions.shape[:2], -1) for index in indices]
        return Tokens(
            *(states or self.states(old, new)),
            positions=torch.where(positions >= count, -1, positions) if behind else positions,
            count=count,
            sinks=self.settings.sinks,
            index=indices[0] if len(indices) == 1 else torch.cat(indices, -1),
            scaling=self.scaling,
            geometry=self.rotation.geometry or self.geometry,
            scores=scores,
            budget=budget,
            shard=self.shard,
            **asked,
        )

    def arrive(
        self, new: Incoming | None, limit: Limit | None, behind: int = 0, attention: torch.Tensor | None = None, **asked: Any
    ) -> None:
        """Score slots in use and new tokens, and prune, now or when all layers have scored.

        Args:
            limit: What is pruned to; None: what the layer has slots for. So many newest tokens `behind` stay, not shown to the policy.
            attention: What all got from the observed queries, (batch, kv_heads, slots in use + tokens), or None.
            **asked: What else is shown of the pass, as in `Tokens`, and `states`, where these are known.
        """
        table, policy, limit = self.table, self.policy, limit or Limit(self.slots, self.recent)
        if attention is not None and policy.observes is None and (old := table.used - _tokens(new)):  # the sum over all queries so far
            attention = attention + torch.nn.functional.pad(table.scores[..., :old], (0, attention.shape[-1] - old))
        positions = table.positions[..., : table.used]
        if policy.order_only:
            scores = unscored(positions)
        elif new is None and attention is None and (policy.observes != 0 or policy.reads_queries or policy.reads_inputs):
            scores = table.scores[..., : table.used]  # nothing new is known
        else:
            tokens = self.shown(new, limit.slots, behind, attention=attention, **asked)
            scores = torch.where(tokens.real, policy.checked_score(tokens), unscored(positions))  # also what it was not shown
            if self.settings.refit and tokens.queries is not None:
                table.asked = context_queries(tokens, table.asked)
        self.arrival = new
        self._set(positions, scores, table.text)
        self._allocate(limit)

    def _set(self, positions: torch.Tensor, scores: torch.Tensor, text: torch.Tensor | None) -> None:
        """Set what the table says of slots in use: for as many heads, and with +inf for sinks, -inf where there is no token."""
        table, shape = self.table, (-1, max(scores.shape[1], positions.shape[1]), -1)
        scores = torch.where(positions < 0, -math.inf, torch.where(positions < self.settings.sinks, math.inf, scores))
        table.text = None if text is None else text[..., : positions.shape[-1]].expand(*shape)
        table.positions, table.scores = positions.expand(*shape), scores.expand(*shape)

    def _allocate(self, limit: Limit) -> None:
        """Choose which tokens stay, as far as this layer can choose alone."""
        table, settings, shared = self.table, self.settings, self.settings.head_budgets
        worth = protected(table.scores, table.positions, table.count, settings.sinks, limit.recent)
        # Under tensor parallelism buffers differ, and processes decide as one.
        most = worth.shape[-1] if shared is None or self.shard is None else self.shard.most(worth.shape[-1], worth.device)
        fits = most <= limit.slots and table.rooms is None
        if self.waiting:
            self.slots = table.seen
            return self.settle(None, None)
        if shared is not None:
            new = self.arrival
            heads = self.storage.shape[1] if new is None else new.keys.shape[1]
            if worth.shape[1] != heads and not self.policy.order_only:
                raise scores_alike(self.policy)
            worth = worth.expand(-1, heads, -1)
            drafting = self.journal is not None and new is not None and self.detour is None  # drafts may follow in the same call
            if table.rooms is not None and drafting:
                return self.settle(with_rooms(worth, table.rooms), table.rooms)
            if shared == "global" and not drafting:
                return self.assembly.add(self, Candidates(worth, limit.slots, self.slots, fits))
        if fits:
            return self.settle(None, None)
        if shared is None:
            return self._install(best(worth, table.positions, limit.slots), None, None)
        if isinstance(shared, dict):
            shares, sinks, recent = self._shares(worth), settings.sinks, max(1, limit.recent)
            # Sinks and recent tokens are each head's own.
            kept, rooms = (
                (least + (shares * (slots - least)).round().long()).view(1, -1, 1)
                for slots, least in ((limit.slots, sinks + recent), (self.slots, sinks + max(recent, self.recent)))
            )
            return self.settle(with_rooms(worth, kept), rooms)
        return self.settle(*compared([Candidates(worth, limit.slots, self.slots)], self.shard)[0])

    def _shares(self, worth: torch.Tensor) -> torch.Tensor:
        """The shares of slots of this layer's heads, (kv_heads,)."""
        shares = self.settings.head_budgets.get(str(self.layer_idx), [])
        shares = shares if self.shard is None else self.shard.own(tuple(shares))
        if len(shares) != worth.shape[1]:
            raise ConfigError.of("head_budgets", "HeadBudgets of this model", shares, "Calibrate them with this model.")
        return torch.tensor(shares, device=worth.device)

    def settle(self, kept: torch.Tensor | None, rooms: torch.Tensor | None) -> None:
        """Keep the arrived tokens where `kept` is True, (batch, kv_heads, slots in use), or all; `rooms` as in `SlotTable`, or (1, ...)."""
        positions = self.table.positions
        if kept is None or rooms is None:
            # As they lie, tokens are in order and without gaps, but where an edit puts new ones in the middle.
            dense = self.table.filled is not None and self.detour is None
            return self._install(None if dense else by_position(positions, positions >= 0), None, None)
        lengths = kept.sum(-1, keepdim=True)
        index = by_position(positions, kept)[..., : max(1, int(lengths.max()))]
        return self._install(index, lengths, rooms.expand(positions.shape[0], -1, -1).contiguous())

    def _install(self, index: Slots | None, lengths: torch.Tensor | None, rooms: torch.Tensor | None, refits: bool = True) -> None:
        """Make tokens the content of the slots; arguments as in `SlotTable.install`."""
        table, storage, unrotated, new = self.table, self.storage, self.rotation.unrotated, self.arrival
        old, refits = table.used - _tokens(new), refits and self.settings.refit and index is not None and table.asked is not None
        tokens, self.arrival = self.shown(new, None) if refits else None, None
        if new is not None:
            real = table.positions >= 0
            storage.prepare(new.keys, real[..., old : table.used], real[..., :old].sum(-1, keepdim=True) if old else None)
        table.install(index, lengths, rooms, unrotated)
        states = None if new is None else (new.keys, new.values)
        if rooms is None and tokens is None:
            storage.rebuild(index, None if states is None else storage.encode(*states), old, self.slots)
        else:
            assert index is not None
            keys, values = (pick(tensor, index) for tensor in joined(storage.read(old) if old else None, states))
            if tokens is not None and table.asked is not None:
                values = refitted(tokens, table.asked, keys, index, table.positions >= 0, unrotated)
                table.asked = None
            if rooms is not None:
                self.storage = ragged_like(storage, rooms)
                storage.clear()
            self.storage.rebuild(None, self.storage.encode(keys, values), 0, self.slots)
            if isinstance(self.storage, Ragged):
                self.storage.find_full(table.kept())
        slots, watches = table.positions.shape[-1], self.policy.interval is not None and self.policy.observes != 0
        table.gathering = torch.zeros(*self.storage.shape, slots, device=table.positions.device) if watches else None
        table.reserve(self.storage.capacity)
        if slots >= self.settings.sinks or table.seen > slots:
            self.keep_sinks()
        self.follow(None if new is None else new.newest)
        self.prepare_graphs()

    def drop(self, gone: torch.Tensor) -> None:
        """Empty slots, where `gone` is True, (batch or 1, 1 or kv_heads, slots in use)."""
        self.unshift()
        table, used = self.table, self.table.used
        heads = max(gone.shape[1], table.positions.shape[1])
        positions, scores = (tensor[..., :used].expand(-1, heads, -1) for tensor in (table.positions, table.scores))
        positions = torch.where(gone, -1, positions)
        text = None if table.text is None else torch.where(positions < 0, -1, table.text[..., :used])
        self._set(positions, torch.where(scores.isinf(), unscored(positions), scores), text)  # an edit may have moved the sinks
        table.filled = None
        index = by_position(positions, positions >= 0)[..., : int(table.kept().max())]
        self._install(index, None, table.rooms, refits=False)


def _tokens(new: Incoming | None) -> int:
    return 0 if new is None else new.keys.shape[2]


def joined(kept: KeysAndValues | None, new: KeysAndValues | None) -> KeysAndValues:
    """Keys and values of slots in use and of new tokens, (batch, kv_heads, slots in use + tokens, width) each."""
    parts = [part for part in (kept, new) if part is not None]
    return parts[0] if len(parts) == 1 else (torch.cat([parts[0][0], parts[1][0]], 2), torch.cat([parts[0][1], parts[1][1]], 2))
