"""Whose the slots are, and what each is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig

from hf_kvcaches.core.adopting import LastQueries
from hf_kvcaches.core.passes import Passes
from hf_kvcaches.equip.budgets import Limit, slots_for
from hf_kvcaches.equip.compiled import ClockedStorage
from hf_kvcaches.equip.frames import Frames, TurningPass
from hf_kvcaches.equip.policies import Policy
from hf_kvcaches.equip.settings import EquipSettings
from hf_kvcaches.equip.tokens import order_of
from hf_kvcaches.errors import ConfigError

UNKNOWN = -2


class SlotState(ClockedStorage):
    """Keeps at most a budget of tokens; a new one is written over the one that goes.

    Slots are in no order. `positions` says whose they are: a token's index among those fed in, counted so that the newest has the same
    in all rows (padding, wherever it was, lies before a row's `first`); -1 is an empty slot. While the oldest token goes and all rows
    agree, slots are a ring, and there is nothing to be said about them (`positions` is None).

    Attributes:
        fed: Tokens that came, padding included. `seen` is what the model is told and may be set forward.
        filled: Slots in use where all rows agree; they are the first ones. `kept_rows` has the numbers otherwise.
        offset: How far the near frame is ahead of the far one; `offset_rows` where rows differ.
        cursor: The ring's oldest slot.
        oldest_recent: Where a policy scores and all slots are in use, the newest tokens mostly have a ring of their own behind all others:
            its oldest slot. -1 where they have none, `UNKNOWN` where nobody looked.
        queries: The last ones, as many as the policy has to see, (batch, heads, queries, head_dim), the newest at the end.
        deferring: Whether nothing is pruned yet, because the policy waits for `EquipCache.compress`.
        gathered: Queries in `gathering`, the attention of the observation window that is not yet complete, (batch, 1, 1).
    """

    row_tensors = (
        "keys",
        "values",
        "swapped",
        "positions",
        "ranks",
        "scores",
        "attention",
        "gathering",
        "gathered",
        "queries",
        "first",
        "kept_rows",
        "offset_rows",
        "padding",
    )
    counters: ClassVar[tuple[str, ...]] = (
        "seen",
        "fed",
        "slots",
        "recent",
        "filled",
        "offset",
        "cursor",
        "oldest_recent",
        "scaling",
        "deferring",
    )
    swapped: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    gathering: torch.Tensor | None = None
    gathered: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    first: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    inputs: Mapping[str, Any] | None = None
    """What the model's attention is called with in the pass that goes on, for policies that read it."""

    def __init__(self, settings: EquipSettings, frames: Frames, passes: Passes[TurningPass], config: PreTrainedConfig) -> None:
        super().__init__()
        self.settings, self.frames, self.passes, self.config = settings, frames, passes, config
        self.backend = settings.backend
        self.fed = self.slots = self.recent = self.filled = self.offset = self.cursor = 0
        self.oldest_recent = UNKNOWN
        self.scaling = 1.0
        self.deferring = self.policy.deferred > 0

    @property
    def policy(self) -> Policy:
        """Who goes."""
        return self.settings.policy

    @property
    def kept(self) -> int:
        return self.filled if self.kept_rows is None else int(self.kept_rows.max())

    @property
    def near(self) -> int:
        """How many of the newest tokens stand in the near frame: those that can't go, and the new one."""
        # Where the oldest goes, all but the sinks are the newest.
        return max(1, self.slots - self.settings.sinks if self.policy.order_only else self.recent)

    @property
    def near_start(self) -> int:
        """The position from which on tokens stand in the near frame."""
        return self.fed - self.near

    @property
    def sinks_end(self) -> int | torch.Tensor:
        """The position before which tokens are sinks."""
        return self.settings.sinks if self.first is None else (self.first + self.settings.sinks)[:, None, None]

    def slot_positions(self) -> torch.Tensor:
        """Whose the slots are, (batch, 1 or kv_heads, slots in use)."""
        if self.positions is not None:
            return self.positions[..., : self.used]
        ranks = self.ring_ranks(self.held_on)
        start: int | torch.Tensor = 0 if self.first is None else self.first[:, None, None]
        # The newest is at fed - 1 and the ring has no gaps; nor have the sinks.
        held = torch.where(ranks < self.settings.sinks, ranks + start, ranks + self.fed - self.filled)
        return held.expand(self.rows, 1, -1)

    def ring_ranks(self, device: torch.device) -> torch.Tensor:
        """Where each slot of the ring stands among those in use, (1, 1, slots in use)."""
        slot, sinks = torch.arange(self.filled, device=device), self.settings.sinks
        if self.filled == self.slots:
            # The oldest of the ring is at the cursor.
            slot = torch.where(slot < sinks, slot, sinks + (slot - self.cursor) % (self.slots - sinks))
        return slot[None, None]

    @property
    def is_ring(self) -> bool:
        """Whether slots are taken in turn, the same in all rows."""
        return self.policy.order_only and self.positions is None

    def find_recents(self) -> None:
        """Looks whether the newest tokens stand in order in the last slots, and no sink but in the first ones, in all rows and heads."""
        self.oldest_recent = -1
        held, start, sinks = self.positions, self.slots - self.near, self.settings.sinks
        if held is None or self.filled < self.slots or self.kept_rows is not None or self.offset_rows is not None:
            return
        # A policy of one's own may choose in another way.
        if type(self.policy).victim is not Policy.victim or self.policy.order_only or self.frames.unrotated:
            return
        newest = torch.arange(self.fed - self.near, self.fed, device=held.device)
        protected = held < self.sinks_end
        if bool((held[..., start:] == newest).all() & protected[..., :sinks].all() & ~protected[..., sinks:].any()):
            self.oldest_recent = start

    @property
    def compact(self) -> bool:
        """Whether positions are counted within the cache."""
        return self.frames.turns

    @property
    def used(self) -> int:
        """How many slots, from the first on, may hold a token."""
        return self.filled if self.kept_rows is None else self.capacity

    def holding(self) -> torch.Tensor | None:
        """True for slots in use that hold a token, (batch, 1 or kv_heads, slots in use), or None where all do."""
        return None if self.kept_rows is None or self.positions is None else self.positions >= 0

    @property
    def kept_count(self) -> int | torch.Tensor:
        """How many tokens are kept: a number, or (batch, 1 or kv_heads, 1)."""
        return self.filled if self.kept_rows is None else self.kept_rows

    @property
    def place(self) -> int | torch.Tensor:
        """Where the newest token stands within the cache."""
        return self.kept_count - 1

    @property
    def frame_offset(self) -> int | torch.Tensor:
        """How far the near frame is ahead of the far one: a number, or (batch, 1 or kv_heads, 1)."""
        return self.offset if self.offset_rows is None else self.offset_rows

    def kept_positions(self) -> torch.Tensor:
        """For each slot the index of its token among all tokens seen, (batch, kv_heads, slots); -1: empty."""
        if not self.rows:
            return torch.empty(0, 0, 0, dtype=torch.long)
        held = self.slot_positions().long()
        held = torch.nn.functional.pad(held[..., : self.used], (0, self.slots - self.used), value=-1)
        if self.first is not None and self.padding is not None:
            held = self._beside_padding(held)
        return held.expand(-1, self.kv_heads, -1)

    def _beside_padding(self, held: torch.Tensor) -> torch.Tensor:
        """Positions as indices into the padded text."""
        assert self.first is not None
        assert self.padding is not None
        width = self.padding.shape[1]
        real = held - self.first[:, None, None]
        # Real tokens of the padded part first, in order; what came later follows without a gap.
        places = torch.argsort((~self.padding).to(torch.int8), dim=-1, stable=True)
        count = self.padding.sum(-1)[:, None, None]
        inside = torch.take_along_dim(places[:, None], real.clamp(0, width - 1), -1)
        return torch.where(held < 0, -1, torch.where(real < count, inside, width + real - count))

    def resolve(self, running: TurningPass, tokens: int) -> Limit:
        """Decides on the number of slots, when the first tokens are there; returns what these are pruned to."""
        valid = running.valid
        prompt = tokens if valid is None else int(valid[:, :tokens].sum(-1).max())
        if self.deferring:
            self.recent = self.settings.recent or 1
            return self.limit
        limit = self.settings.limit_of(prompt)
        self.take_limits(limit, prompt)
        return limit

    def take_limits(self, limit: Limit, prompt: int) -> None:
        """Sets how many slots there are from now on.

        Args:
            limit: What the prompt is pruned to.
            prompt: Its tokens, in the longest row.
        """
        decode, wanted = self.settings.decode_budget, self.settings.recent
        self.slots = limit.slots if decode is None else slots_for(decode, prompt)
        if self.slots < limit.slots:
            raise ConfigError.of("decode_budget", f"at least the budget, {limit.slots} tokens", self.slots)
        self.recent = self.policy.recent(self.slots, self.settings.sinks) if wanted is None else wanted
        self.deferring = False

    @property
    def limit(self) -> Limit:
        """What is kept of all that came."""
        return Limit(self.slots, self.recent)

    def window(self, tokens: int) -> int | None:
        """How many of a block's last queries the policy observes."""
        wanted = self.policy.observes
        return None if wanted is None or (self.used and tokens < wanted) else wanted

    def pass_over(self, valid: torch.Tensor | None, tokens: int) -> torch.Tensor:
        """The positions of new tokens, (batch or 1, 1, tokens), -1 for padding, which is counted to what lies before a row's first token.

        Args:
            valid: True where a token is real, (batch, tokens), or None for all.
        """
        if valid is None:
            assert self.is_initialized
            return torch.arange(self.fed, self.fed + tokens, device=self.device)[None, None]
        if self.rows:
            self.leave_ring()
        real = valid.sum(-1)
        pads = tokens - real
        if self.positions is not None:
            self.positions = torch.where(self.positions < 0, -1, self.positions + pads[:, None, None].to(self.positions.dtype))
        self.first = pads if self.first is None else self.first + pads
        before = valid.new_ones(valid.shape[0], 0) if self.padding is None else self.padding
        before = torch.nn.functional.pad(before, (0, self.fed - before.shape[1]), value=True)
        self.padding = torch.cat([before, valid], 1)
        places = self.fed + tokens - real[:, None] + valid.cumsum(-1) - 1
        return torch.where(valid, places, -1)[:, None]

    def leave_ring(self) -> None:
        """Writes down whose the slots are."""
        if self.positions is None and self.rows:
            held = self.slot_positions().to(torch.int32)
            self.positions = torch.nn.functional.pad(held, (0, self.capacity - held.shape[-1]), value=-1).contiguous()
            if self.frames.unrotated:
                ranks = self.ring_ranks(self.held_on).to(torch.int32).expand(self.rows, 1, -1)
                self.ranks = torch.nn.functional.pad(ranks, (0, self.capacity - ranks.shape[-1])).contiguous()

    def make_ragged(self) -> None:
        """Counts for each row what is kept."""
        if self.kept_rows is not None:
            return
        assert self.positions is not None
        shape = (*self.positions.shape[:2], 1)
        self.kept_rows = self.positions.new_full(shape, self.filled, dtype=torch.long)
        if self.offset_rows is None:
            self.offset_rows = self.positions.new_full(shape, self.offset, dtype=torch.long)

    def reserve(self, used: int) -> None:
        super().reserve(used)
        for name, fill in (("positions", -1), ("ranks", 0), ("scores", 0.0), ("attention", 0.0), ("gathering", 0.0)):
            held = getattr(self, name)
            if held is not None and held.shape[-1] < self.capacity:
                setattr(self, name, torch.nn.functional.pad(held, (0, self.capacity - held.shape[-1]), value=fill))

    def count_evicted(self, tokens: int) -> None:
        """Says that all rows lost as many tokens."""
        if self.offset_rows is None:
            self.offset += tokens
        else:
            self.offset_rows = self.offset_rows + tokens

    def count_insertion(self, evicted: torch.Tensor | None, live: torch.Tensor | None) -> None:
        """Says whether the new tokens took the place of others.

        Args:
            evicted: Their positions, (batch, 1 or kv_heads, 1), -1 for none; None where no row lost one.
            live: True for rows with a real token, (batch, 1, 1), or None for all.
        """
        if self.kept_rows is None:
            if evicted is not None:
                self.count_evicted(1)
            return
        assert evicted is not None
        assert self.offset_rows is not None
        gone = evicted >= 0
        came = ~gone
        if live is not None:
            gone, came = gone & live, came & live
        self.offset_rows, self.kept_rows = self.offset_rows + gone, self.kept_rows + came

    def held_now(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the slots in use, as they are kept."""
        return self.held(self.used)

    def slot_index(self, slot: int | torch.Tensor) -> torch.Tensor:
        """A slot as (batch, 1 or kv_heads, 1)."""
        if isinstance(slot, torch.Tensor):
            return slot
        assert self.positions is not None
        return torch.full((*self.positions.shape[:2], 1), slot, device=self.positions.device)

    def victim_scores(self) -> torch.Tensor:
        """What each slot is worth, (batch, 1 or kv_heads, slots)."""
        if self.policy.order_only:
            assert self.positions is not None
            return (self.positions - self.fed).float()
        scores = self.attention if self.scores is None else self.scores
        assert scores is not None
        return scores

    def set_scores(self, scores: torch.Tensor) -> None:
        """Keeps what the policy says of the slots in use, unless it is kept already.

        Args:
            scores: (batch, 1 or kv_heads, slots in use).
        """
        held = [tensor.data_ptr() for tensor in (self.attention, self.scores) if tensor is not None]
        if scores.data_ptr() in held:
            if self.attention is not None and scores.data_ptr() == self.attention.data_ptr():
                self.scores = None
            return
        self.scores = torch.nn.functional.pad(scores, (0, self.capacity - scores.shape[-1])) if self.capacity > scores.shape[-1] else scores

    def move_scores(self, slot: int, to: torch.Tensor) -> None:
        """Takes what is remembered of a token along to another slot.

        Args:
            slot: Where it is, the same everywhere.
            to: (batch, 1 or kv_heads, 1).
        """
        for held in (self.attention, self.gathering, self.scores):
            if held is not None:
                held.scatter_(2, to.expand(*held.shape[:2], 1), held[..., slot : slot + 1].clone())

    def note_queries(self, queries: LastQueries, valid: torch.Tensor | None) -> None:
        """Remembers the last queries, as many as the policy has to see.

        Args:
            valid: True where a new token is real, (batch, tokens), or None for all.
        """
        window, new = self.policy.queries, queries.states.detach()
        if not window:
            return
        self.scaling = queries.scaling
        before = new.new_zeros(*new.shape[:2], window, new.shape[3]) if self.queries is None else self.queries
        joined = torch.cat([before, new], 2)
        if valid is not None:
            joined = padding_first(joined, torch.cat([valid.new_ones(valid.shape[0], window), valid], 1))
        self.queries = joined[:, :, -window:]

    def add_to_sums(self, weights: torch.Tensor, slot: int) -> None:
        """`add_attention` for a policy that observes all queries.

        Args:
            weights: (batch, kv_heads, slots in use), float32.
            slot: Where the new token is, the same everywhere, whose slot had another's.
        """
        assert self.attention is not None
        self.attention.narrow(2, slot, 1).zero_()
        self.attention.narrow(2, 0, weights.shape[-1]).add_(weights)

    def add_attention(self, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor | bool:
        """Adds one query's attention to what the policy observes; whether its window is complete, of all rows or (batch, 1, 1).

        Args:
            weights: (batch, kv_heads, slots in use), float32.
        """
        used, window = weights.shape[-1], self.policy.observes
        assert self.attention is not None
        if window == 1:
            self.attention[..., :used].copy_(weights)
            return True
        index = index.expand(*weights.shape[:2], 1)
        self.attention.scatter_(2, index, 0.0)
        if window is None:
            self.attention[..., :used].add_(weights)
            return True
        assert self.gathering is not None
        assert self.gathered is not None
        self.gathering.scatter_(2, index, 0.0)
        self.gathering[..., :used].add_(weights)
        self.gathered = self.gathered + 1
        complete = self.gathered >= window
        if not bool(complete.any()):
            return False
        self.attention = torch.where(complete, self.gathering, self.attention)
        self.gathering = torch.where(complete, 0.0, self.gathering)
        self.gathered = torch.where(complete, 0, self.gathered)
        return complete


def padding_first(states: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """States in order, but for those of padding, which come first.

    Args:
        states: (batch, heads, tokens, head_dim).
        valid: True where a token is real, (batch, tokens).
    """
    order = valid.to(torch.int8).argsort(dim=1, stable=True)
    return states.gather(2, order[:, None, :, None].expand_as(states))


def place_ranks(positions: torch.Tensor) -> torch.Tensor:
    """Each slot's place in order of position; empty ones come last."""
    return order_of(positions).argsort(-1)
