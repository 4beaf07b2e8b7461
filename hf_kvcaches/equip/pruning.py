"""From scores to slots: kept and new tokens are scored, some of them stay, and these are the content of the slots."""

from __future__ import annotations

import math

import torch

from hf_kvcaches.equip import graphs
from hf_kvcaches.equip.allocation import Candidates, best, compared, in_order, indices_of, protected, rooms_of, with_rooms
from hf_kvcaches.equip.block import Arrival, Incoming, Questions
from hf_kvcaches.equip.budgets import Limit
from hf_kvcaches.equip.coded import Coded
from hf_kvcaches.equip.policies.future import future_queries
from hf_kvcaches.equip.policies.tokens import Tokens, unscored
from hf_kvcaches.equip.positions import PositionedLayer
from hf_kvcaches.equip.ragged import Ragged, RaggedCodes
from hf_kvcaches.equip.refit import refit
from hf_kvcaches.equip.settings import scores_alike
from hf_kvcaches.equip.storage import Slots, pick
from hf_kvcaches.equip.streamed import Streamed
from hf_kvcaches.errors import ConfigError

# Queries of a context that a refit looks at, and to how many positions behind its end they are rotated in turn.
_REFITTED, _AHEAD = 256, 96


class PruningLayer(PositionedLayer):
    """Keeps the tokens that are worth most.

    Attributes:
        arrival: The tokens of a block until it is known which of them stay.
    """

    arrival: Arrival | None

    def compress(self, limit: Limit, behind: int, received: torch.Tensor | None) -> None:
        """Prune what the layer holds.

        Args:
            behind: How many of the newest tokens stay, and are not shown to the policy.
            received: What each slot got while the context was read again, (batch, kv_heads, slots in use), or None.
        """
        self.arrive(None, Limit(limit.slots, max(limit.recent, behind)), Questions(), received, behind)

    def shown(
        self, new: Incoming | None, questions: Questions, attention: torch.Tensor | None, budget: int | None, behind: int = 0
    ) -> Tokens:
        """What the policy is shown: slots in use and new tokens.

        Args:
            behind: How many of the newest tokens it is not shown.
        """
        table, used = self.table, self.table.used
        keys, values, index = [], [], []
        if used:
            held_keys, held_values = self.storage.read(used)
            keys, values, index = [self.rotation.frame(held_keys, table)], [held_values], [self.rotation.index_of_slots(table)]
        if new is not None:
            keys, values, index = [*keys, new.frame], [*values, new.values], [*index, new.index]
        positions = self._positions(new)
        count = table.count - behind
        scores = torch.nn.functional.pad(table.known_scores(), (0, positions.shape[-1] - used), value=-math.inf) if used else None
        return Tokens(
            keys=torch.cat(keys, 2) if len(keys) > 1 else keys[0],
            values=torch.cat(values, 2) if len(values) > 1 else values[0],
            positions=torch.where(positions >= count, -1, positions) if behind else positions,
            count=count,
            sinks=self.settings.sinks,
            index=torch.cat([part.expand(*positions.shape[:2], -1) for part in index], -1),
            attention=attention,
            queries=questions.states,
            query_index=questions.index,
            scaling=self.scaling,
            geometry=self.rotation.geometry or self.geometry,
            scores=scores,
            budget=budget,
            module=questions.module,
            inputs=questions.inputs,
            shard=self.shard,
        )

    def _positions(self, new: Incoming | None) -> torch.Tensor:
        """Of slots in use and new tokens, (batch, 1 or kv_heads, slots in use + tokens)."""
        table = self.table
        held = [] if table.positions is None or not table.used else [table.positions[..., : table.used]]
        parts = held if new is None else [*held, new.positions]
        heads = max(part.shape[1] for part in parts)
        return torch.cat([part.expand(-1, heads, -1) for part in parts], -1)

    def arrive(self, new: Incoming | None, limit: Limit, questions: Questions, attention: torch.Tensor | None, behind: int = 0) -> None:
        """Score slots in use and new tokens, and prune, now or when all layers have scored.

        Args:
            attention: What all got from the observed queries, (batch, kv_heads, slots in use + tokens), or None.
        """
        table, policy, positions = self.table, self.policy, self._positions(new)
        if attention is not None and policy.observes is None and table.used:  # the sum over all queries so far
            assert table.scores is not None
            attention = attention + torch.nn.functional.pad(table.scores[..., : table.used], (0, attention.shape[-1] - table.used))
        again = new is None and attention is None and (policy.observes != 0 or policy.reads_queries or policy.reads_inputs)
        if policy.order_only:
            scores = unscored(positions)
        elif again:  # nothing new is known
            assert table.scores is not None
            scores = table.scores[..., : table.used]
        else:
            tokens = self.shown(new, questions, attention, limit.slots, behind)
            scores = torch.where(tokens.real, policy.checked_score(tokens), unscored(positions))  # also what it was not shown
            self._remember(tokens)
        heads = max(scores.shape[1], positions.shape[1])
        positions = positions.expand(-1, heads, -1)
        text = None
        if table.text is not None or (new is not None and new.text is not None):
            parts = [] if table.text is None else [table.text[..., : table.used]]
            parts = parts if new is None or new.text is None else [*parts, new.text]
            text = torch.cat([part.expand(-1, heads, -1) for part in parts], -1)
        sinks = positions < self.settings.sinks
        scores = torch.where(positions < 0, -math.inf, torch.where(sinks, math.inf, scores))
        self.arrival = Arrival(new, positions, text, scores)
        self._allocate(limit)

    def _remember(self, tokens: Tokens) -> None:
        """Keep queries of the context for a refit."""
        table = self.table
        if self.settings.refit and tokens.queries is not None:
            asked, real = future_queries(tokens, _REFITTED, 0, _AHEAD)
            asked = torch.where(real[:, None, :, None], asked, asked[:, :, -1:])  # padding asks what the last query asks
            asked = self._moved(asked, 1 - tokens.end)
            if table.asked is not None:
                asked = torch.cat([table.asked, asked], 2)
                asked = asked[:, :, torch.arange(_REFITTED, device=asked.device) * asked.shape[2] // _REFITTED]
            table.asked = asked

    def _moved(self, x: torch.Tensor, by: int | torch.Tensor) -> torch.Tensor:
        """Queries or keys, rotated further by a number of positions, where their angles are known."""
        geometry = self.rotation.geometry or self.geometry
        return geometry.shift(x, by) if geometry.kind == "rope" and geometry.refusal is None else x

    def _allocate(self, limit: Limit) -> None:
        """Choose which tokens stay, as far as this layer can choose alone."""
        arrival, shared = self.arrival, self.settings.head_budgets
        assert arrival is not None
        worth = protected(arrival.scores, arrival.positions, self.table.count, self.settings.sinks, limit.recent)
        # Under tensor parallelism buffers differ, and processes decide as one.
        most = worth.shape[-1] if shared is None or self.shard is None else self.shard.most(worth.shape[-1], worth.device)
        fits = most <= limit.slots and self.table.rooms is None
        if self.waiting:
            self.slots = self.table.seen
            return self.settle(None, None)
        candidates = Candidates(self._by_head(worth) if shared is not None else worth, limit.slots, self.slots, fits)
        drafting = self.journal is not None and arrival.new is not None and self.detour is None  # drafts may follow in the same call
        if shared is not None and self.table.rooms is not None and drafting:
            return self.settle(with_rooms(candidates, self.table.rooms), self.table.rooms)
        if shared == "global" and not drafting:
            return self.assembly.add(self, candidates)
        if shared is None or fits:
            return self._install(None if self._dense() and fits else best(worth, arrival.positions, limit.slots), None, None)
        if isinstance(shared, dict):
            shares, sinks = self._shares(worth.device), self.settings.sinks
            kept = rooms_of(shares, limit.slots, sinks + max(1, limit.recent))
            rooms = rooms_of(shares, self.slots, sinks + max(1, limit.recent, self.recent))
            return self.settle(with_rooms(candidates, kept), rooms)
        return self.settle(*compared([candidates], self.shard)[0])

    def _dense(self) -> bool:
        """Whether slots in use and new tokens, as they lie, are in order and without gaps; an edit has new ones in the middle."""
        return self.table.counts is None and self.table.filled is not None and self.detour is None

    def settle(self, kept: torch.Tensor | None, rooms: torch.Tensor | None) -> None:
        """Keep some of the tokens that have arrived.

        Args:
            kept: True for these, (batch, kv_heads, slots in use + tokens); None for all.
            rooms: How many slots each head has from now on, (batch or 1, kv_heads, 1); None where all have as many.
        """
        assert self.arrival is not None
        positions = self.arrival.positions
        if kept is None or rooms is None:
            everything = torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)
            return self._install(None if self._dense() else in_order(everything, positions), None, None)
        index, lengths = indices_of(kept, positions)
        return self._install(index, lengths, rooms.expand(positions.shape[0], -1, -1).contiguous())

    def _install(self, index: Slots | None, lengths: torch.Tensor | None, rooms: torch.Tensor | None) -> None:
        """Make tokens the content of the slots, in order of position.

        Args:
            index: Which ones, (batch, 1 or kv_heads, tokens); None for all as they are.
            lengths: How many of these count, where heads differ, (batch, kv_heads, 1).
            rooms: As in `settle`.
        """
        arrival, table = self.arrival, self.table
        assert arrival is not None
        self.arrival = None
        positions, scores, text = arrival.positions, arrival.scores, arrival.text
        if index is not None:
            wide = (positions.shape[0], max(index.shape[1], positions.shape[1]), -1)
            picked = [None if tensor is None else tensor.expand(*wide).take_along_dim(index, -1) for tensor in (positions, scores, text)]
            positions, scores, text = picked[0], picked[1], picked[2]  # type: ignore[assignment]
        if lengths is not None:
            empty = torch.arange(positions.shape[-1], device=positions.device) >= lengths
            positions, scores = positions.masked_fill(empty, -1), scores.masked_fill(empty, -math.inf)
            text = None if text is None else text.masked_fill(empty, -1)
        self._store(arrival, index, positions, rooms)
        table.positions, table.scores, table.rooms = positions.contiguous(), scores.contiguous(), rooms
        table.text = None if text is None else text.contiguous()
        table.filled = positions.shape[-1] if rooms is None and table.counts is None and table.filled is not None else None
        if rooms is None and table.filled is None:
            table.find_filled()
        table.set_order(table.kept(), self.rotation.unrotated)
        table.since = 0
        watches = self.policy.interval is not None and self.policy.observes != 0
        table.gathering = torch.zeros(*self.storage.shape, positions.shape[-1], device=positions.device) if watches else None
        table.reserve(self.storage.capacity)
        if rooms is not None:
            missing = torch.arange(table.scores.shape[-1], device=rooms.device) >= rooms
            table.scores.masked_fill_(missing, math.inf)
            if table.distances is not None:
                table.distances.masked_fill_(missing, 0)  # steps add no more to it than to that of the oldest token
        if isinstance(self.storage, Streamed) and (positions.shape[-1] >= self.settings.sinks or table.seen > positions.shape[-1]):
            self.storage.keep_sinks(self.settings.sinks)
        self.follow(None if arrival.new is None else arrival.new.newest)
        graphs.prepare(self)

    def _store(self, arrival: Arrival, index: Slots | None, positions: torch.Tensor, rooms: torch.Tensor | None) -> None:
        """Keep the keys and values of tokens at some indices; arguments as in `_install`."""
        storage, used, states = self.storage, self.table.used, None
        if arrival.new is not None:
            states = arrival.new.keys, arrival.new.values
            self._prepare(states[0], arrival.new.positions >= 0)
        refits = self.settings.refit and index is not None and self.table.asked is not None
        if rooms is None and not refits:
            return storage.rebuild(index, None if states is None else storage.encode(*states), used, self.slots)
        if used:
            held = storage.read(used)
            states = held if states is None else (torch.cat([held[0], states[0]], 2), torch.cat([held[1], states[1]], 2))
        assert index is not None
        assert states is not None
        keys, values = (pick(tensor, index) for tensor in states)
        if refits:
            values = self._refitted(arrival, keys, states[1], index, positions)
        if rooms is None:
            return storage.rebuild(None, storage.encode(keys, values), 0, self.slots)
        if isinstance(storage, Coded):
            apart = storage.apart(RaggedCodes.with_rooms(rooms, storage.backend))
            self.replace_storage(apart)
            return apart.rebuild(None, apart.encode(keys, values), 0, self.slots)
        self.replace_storage(Ragged.of((keys, values), rooms, storage.backend, (positions >= 0).sum(-1, keepdim=True)))
        return None

    def _refitted(
        self, arrival: Arrival, kept_keys: torch.Tensor, values: torch.Tensor, index: Slots, positions: torch.Tensor
    ) -> torch.Tensor:
        """The values of kept tokens, refitted to what queries of the context get of all.

        Args:
            kept_keys: Of these tokens, as they are kept.
            values: Of all tokens.
            index: Which tokens are kept, at these `positions`.
        """
        table, tokens, stays = self.table, self.shown(arrival.new, Questions(), None, None), positions >= 0
        assert table.asked is not None
        asked, table.asked, afterwards = table.asked, None, None
        if self.rotation.unrotated:  # what is gone no longer lies between queries and keys
            distances = stays.sum(-1, keepdim=True) - 1 - torch.arange(stays.shape[-1], device=asked.device)
            afterwards = asked, self._moved(kept_keys, -distances.clamp(min=0).expand(*kept_keys.shape[:3]))
        every = torch.ones(1, asked.shape[2], dtype=torch.bool, device=asked.device)
        index = index.expand(-1, values.shape[1], -1)
        asked = self._moved(asked, tokens.end - 1)
        return refit(asked, every, tokens.keys, values, tokens.real, index, stays, self.scaling, afterwards=afterwards)

    def _prepare(self, keys: torch.Tensor, real: torch.Tensor) -> None:
        """Have the storage look at new keys before they are encoded."""
        if self.storage.shape[0] == 0 or self.table.positions is None or not self.table.used:
            empty = torch.ones(keys.shape[0], 1, 1, 1, dtype=torch.bool, device=keys.device)
        else:
            empty = (self.table.kept() == 0).all(1, keepdim=True)[..., None]
        self.storage.prepare(keys, real, empty)

    def _by_head(self, worth: torch.Tensor) -> torch.Tensor:
        """Worth of each head's tokens, (batch, kv_heads, tokens)."""
        heads = self.arrival.new.keys.shape[1] if self.arrival is not None and self.arrival.new is not None else self.storage.shape[1]
        if worth.shape[1] != heads and not self.policy.order_only:
            raise scores_alike(self.policy)
        return worth.expand(-1, heads, -1)

    def _shares(self, device: torch.device) -> torch.Tensor:
        """The shares of slots of this layer's heads, (kv_heads,)."""
        assert self.arrival is not None
        shares = self.settings.head_budgets.get(str(self.layer_idx), [])
        shares = shares if self.shard is None else self.shard.own(tuple(shares))
        heads = self.arrival.new.keys.shape[1] if self.arrival.new is not None else self.storage.shape[1]
        if len(shares) != heads:
            raise ConfigError.of("head_budgets", "HeadBudgets of this model", shares, "Calibrate them with this model.")
        return torch.tensor(shares, device=device)

    def drop(self, gone: torch.Tensor) -> None:
        """Empty slots.

        Args:
            gone: True for these, (batch or 1, 1 or kv_heads, slots in use).
        """
        self.unshift()
        table, used, sinks = self.table, self.table.used, self.settings.sinks
        assert table.positions is not None
        assert table.scores is not None
        heads = max(gone.shape[1], table.positions.shape[1])
        positions, scores = (
            tensor[..., :used].expand(-1, heads, -1) for tensor in (table.positions, table.scores.expand(-1, table.positions.shape[1], -1))
        )
        positions = torch.where(gone, -1, positions)
        scores = torch.where(scores.isinf(), unscored(positions), scores)  # an edit may have moved the sinks
        scores = torch.where(positions < 0, -math.inf, torch.where(positions < sinks, math.inf, scores))
        text = None if table.text is None else torch.where(gone, -1, table.text[..., :used].expand(-1, heads, -1))
        self.arrival = Arrival(None, positions, text, scores)
        every = torch.arange(used, device=positions.device).expand_as(positions)
        index = in_order(every, positions)[..., : int((positions >= 0).sum(-1).max())]
        table.filled = None
        self._install(index, None, table.rooms)
