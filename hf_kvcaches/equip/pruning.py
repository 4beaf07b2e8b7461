"""From scores to slots: kept and new tokens are scored, some of them stay, and these are the content of the slots."""

from __future__ import annotations

import math

import torch

from hf_kvcaches.equip import graphs
from hf_kvcaches.equip.block import Arrival, Incoming, Questions
from hf_kvcaches.equip.budgets import Candidates, Limit, best, by_position, compared, indices_of, protected, rooms_of, slots_for, with_rooms
from hf_kvcaches.equip.coded import ragged_like
from hf_kvcaches.equip.policies.tokens import UNSCORED, Tokens, unscored
from hf_kvcaches.equip.ragged import Ragged
from hf_kvcaches.equip.refit import context_queries, refitted
from hf_kvcaches.equip.settings import scores_alike
from hf_kvcaches.equip.slot_layer import SlotLayer
from hf_kvcaches.equip.storage import Slots, Streamed, pick
from hf_kvcaches.errors import ConfigError

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class PruningLayer(SlotLayer):
    """Keeps the tokens that are worth most.

    Attributes:
        arrival: The tokens of a block until it is known which of them stay.
    """

    arrival: Arrival

    def limit_of_context(self, behind: int) -> tuple[Limit, int]:
        """What a context that is held, all but the newest tokens, is pruned to, and the tokens of its longest row."""
        counts = self.table.counts
        context = (self.table.seen if counts is None else int(counts.max())) - behind
        return self.settings.limit_of(context, behind), context

    def set_limits(self, limit: Limit, prompt: int) -> None:
        """Set how many slots there are from now on, for a prompt of so many tokens in its longest row, which is pruned to `limit`."""
        decode = self.settings.decode_budget
        slots = limit.slots if decode is None else slots_for(decode, prompt, limit.slots)
        if slots < limit.slots:
            raise ConfigError.of("decode_budget", f"at least the budget, {limit.slots} tokens", slots)
        self.slots, self.recent, self.waiting = slots, self.settings.recent_of(slots), False

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
        table, used, scores = self.table, self.table.used, None
        positions, count = self._positions(new), table.count - behind
        states, index = (None, None) if new is None else ((new.frame, new.values), new.index)
        if used:
            states, index = joined(self.kept_states(), states), side_by_side(self.rotation.index_of_slots(table), index)
            scores = table.scores[..., :used]
            scores = torch.where(scores >= UNSCORED, -math.inf, scores)
            scores = torch.nn.functional.pad(scores, (0, positions.shape[-1] - used), value=-math.inf)
        assert states is not None
        assert index is not None
        return Tokens(
            keys=states[0],
            values=states[1],
            positions=torch.where(positions >= count, -1, positions) if behind else positions,
            count=count,
            sinks=self.settings.sinks,
            index=index.expand(*positions.shape[:2], -1),
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

    def kept_states(self) -> KeysAndValues:
        """Keys in the frame and values of slots in use."""
        keys, values = self.storage.read(self.table.used)
        return self.rotation.frame(keys, self.table), values

    def _positions(self, new: Incoming | None) -> torch.Tensor:
        """Of slots in use and new tokens, (batch, 1 or kv_heads, slots in use + tokens)."""
        used, positions = self.table.used, None if new is None else new.positions
        return side_by_side(self.table.positions[..., :used], positions) if used or positions is None else positions

    def arrive(
        self, new: Incoming | None, limit: Limit | None, questions: Questions, attention: torch.Tensor | None, behind: int = 0
    ) -> None:
        """Score slots in use and new tokens, and prune, now or when all layers have scored.

        Args:
            limit: What is pruned to; None: what the layer has slots for.
            attention: What all got from the observed queries, (batch, kv_heads, slots in use + tokens), or None.
        """
        table, policy, positions, limit = self.table, self.policy, self._positions(new), limit or Limit(self.slots, self.recent)
        if attention is not None and policy.observes is None and table.used:  # the sum over all queries so far
            attention = attention + torch.nn.functional.pad(table.scores[..., : table.used], (0, attention.shape[-1] - table.used))
        again = new is None and attention is None and (policy.observes != 0 or policy.reads_queries or policy.reads_inputs)
        if policy.order_only:
            scores = unscored(positions)
        elif again:  # nothing new is known
            scores = table.scores[..., : table.used]
        else:
            tokens = self.shown(new, questions, attention, limit.slots, behind)
            scores = torch.where(tokens.real, policy.checked_score(tokens), unscored(positions))  # also what it was not shown
            if self.settings.refit and tokens.queries is not None:
                table.asked = context_queries(tokens, table.asked)
        heads = max(scores.shape[1], positions.shape[1])
        positions, text = positions.expand(-1, heads, -1), None if new is None else new.text
        text = text if table.text is None else side_by_side(table.text[..., : table.used], text)
        self.arrival = Arrival(new, positions, None if text is None else text.expand(-1, heads, -1), self._with_sinks(scores, positions))
        self._allocate(limit)

    def _with_sinks(self, scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scores with +inf for sinks, and -inf where there is no token."""
        return torch.where(positions < 0, -math.inf, torch.where(positions < self.settings.sinks, math.inf, scores))

    def _allocate(self, limit: Limit) -> None:
        """Choose which tokens stay, as far as this layer can choose alone."""
        arrival, shared = self.arrival, self.settings.head_budgets
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
        positions = self.arrival.positions
        if kept is None or rooms is None:
            return self._install(None if self._dense() else by_position(positions, positions >= 0), None, None)
        index, lengths = indices_of(kept, positions)
        return self._install(index, lengths, rooms.expand(positions.shape[0], -1, -1).contiguous())

    def _install(self, index: Slots | None, lengths: torch.Tensor | None, rooms: torch.Tensor | None) -> None:
        """Make tokens the content of the slots, in order of position.

        Args:
            index: Which ones, (batch, 1 or kv_heads, tokens); None for all as they are.
            lengths: How many of these count, where heads differ, (batch, kv_heads, 1).
            rooms: As in `settle`.
        """
        arrival, table, self.arrival = self.arrival, self.table, None  # type: ignore[assignment]
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
        table.find_distances(self.rotation.unrotated)
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
        storage, used, new = self.storage, self.table.used, arrival.new
        states = None if new is None else (new.keys, new.values)
        if new is not None:
            storage.prepare(new.keys, new.positions >= 0, self.table.kept() if used else None)
        refits = self.settings.refit and index is not None and self.table.asked is not None
        if rooms is None and not refits:
            return storage.rebuild(index, None if states is None else storage.encode(*states), used, self.slots)
        assert index is not None
        states = joined(storage.read(used), states) if used else states
        assert states is not None
        keys, values = (pick(tensor, index) for tensor in states)
        if refits and self.table.asked is not None:
            queries, self.table.asked = self.table.asked, None
            values = refitted(self.shown(new, Questions(), None, None), queries, keys, index, positions >= 0, self.rotation.unrotated)
        if rooms is not None:
            self.replace_storage(ragged_like(storage, rooms))
        self.storage.rebuild(None, self.storage.encode(keys, values), 0, self.slots)
        if isinstance(self.storage, Ragged):
            self.storage.find_full((positions >= 0).sum(-1, keepdim=True))
        return None

    def _by_head(self, worth: torch.Tensor) -> torch.Tensor:
        """Worth of each head's tokens, (batch, kv_heads, tokens)."""
        heads = self._heads()
        if worth.shape[1] != heads and not self.policy.order_only:
            raise scores_alike(self.policy)
        return worth.expand(-1, heads, -1)

    def _heads(self) -> int:
        """How many KV heads the tokens that have arrived have here."""
        return self.storage.shape[1] if self.arrival.new is None else self.arrival.new.keys.shape[1]

    def _shares(self, device: torch.device) -> torch.Tensor:
        """The shares of slots of this layer's heads, (kv_heads,)."""
        shares = self.settings.head_budgets.get(str(self.layer_idx), [])
        shares = shares if self.shard is None else self.shard.own(tuple(shares))
        if len(shares) != self._heads():
            raise ConfigError.of("head_budgets", "HeadBudgets of this model", shares, "Calibrate them with this model.")
        return torch.tensor(shares, device=device)

    def drop(self, gone: torch.Tensor) -> None:
        """Empty slots, where `gone` is True, (batch or 1, 1 or kv_heads, slots in use)."""
        self.unshift()
        table, used = self.table, self.table.used
        heads = max(gone.shape[1], table.positions.shape[1])
        positions = torch.where(gone, -1, table.positions[..., :used].expand(-1, heads, -1))
        scores = table.scores[..., :used].expand(-1, heads, -1)
        scores = self._with_sinks(torch.where(scores.isinf(), unscored(positions), scores), positions)  # an edit may have moved the sinks
        text = None if table.text is None else torch.where(gone, -1, table.text[..., :used].expand(-1, heads, -1))
        self.arrival = Arrival(None, positions, text, scores)
        index = by_position(positions, positions >= 0)[..., : int((positions >= 0).sum(-1).max())]
        table.filled = None
        self._install(index, None, table.rooms)


def joined(kept: KeysAndValues, new: KeysAndValues | None) -> KeysAndValues:
    """Keys and values of slots in use and of new tokens, (batch, kv_heads, slots in use + tokens, width) each."""
    return kept if new is None else (torch.cat([kept[0], new[0]], 2), torch.cat([kept[1], new[1]], 2))


def side_by_side(kept: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
    """What is known of slots in use and of new tokens, (batch, 1 or kv_heads, slots in use + tokens)."""
    if new is None:
        return kept
    shape = (max(kept.shape[0], new.shape[0]), max(kept.shape[1], new.shape[1]), -1)
    return torch.cat([kept.expand(*shape), new.expand(*shape)], -1)
