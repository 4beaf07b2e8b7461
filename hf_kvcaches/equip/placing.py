"""Where the keys of a layer stand, and how blocks of tokens take their slots."""

from __future__ import annotations

from typing import Any

import torch

from hf_kvcaches.core.calls import Call
from hf_kvcaches.equip.candidates import Candidates
from hf_kvcaches.equip.frames import TurningPass
from hf_kvcaches.equip.state import UNKNOWN, SlotState, place_ranks


class PlacedSlots(SlotState):
    """Slots whose keys are rotated to where their tokens stand."""

    def rebase_if_due(self) -> None:
        """Brings the near frame back to the far one where it has gone too far ahead for exact angles."""
        offset, limit = self.frame_offset, self.frames.limit
        if not self.frames.two or (offset < limit if isinstance(offset, int) else self.fed % limit):
            return
        near = self.slot_positions() >= self.near_start
        delta = torch.where(near, -torch.as_tensor(offset, device=near.device), 0)
        keys, _ = self.held_now()
        self.replace_keys(self.frames.by(delta)(keys))
        self.wound = False
        self.offset = 0
        self.offset_rows = None if self.offset_rows is None else torch.zeros_like(self.offset_rows)

    def far_slots(self) -> int | torch.Tensor:
        """The slots whose keys stand in the far frame: the first so many, or (batch, 1 or kv_heads, slots in use)."""
        if self.is_ring:
            return min(self.settings.sinks, self.used)
        if self.oldest_recent >= 0:
            return self.slots - self.near
        assert self.positions is not None
        return self.positions[..., : self.used] < self.near_start

    def placed_keys(self, running: TurningPass) -> torch.Tensor:
        """The keys in use, each at its place within the cache where positions are counted there."""
        if not self.frames.two:
            return self.near_keys(running)
        held = self.slot_positions()
        delta = torch.where(held < 0, 0, place_ranks(held) - self.standing())
        return self.frames.by(delta)(self.held_now()[0])

    def as_rotated(self, keys: torch.Tensor, positions: torch.Tensor, stands: torch.Tensor | None) -> torch.Tensor:
        """Keys as the model rotated them when their tokens came.

        Args:
            keys: (batch, kv_heads, tokens, head_dim), as they are kept.
            positions: (batch, 1 or kv_heads, tokens).
            stands: To where they are rotated now, likewise; None for keys without rotation.
        """
        first = 0 if self.first is None else self.first[:, None, None]
        delta = torch.where(positions < 0, 0, positions - first if stands is None else positions - first - stands)
        return self.frames.by(delta)(keys) if bool(delta.any()) else keys

    def standing(self) -> torch.Tensor:
        """The position to which each slot's key is rotated, (batch, 1 or kv_heads, slots in use)."""
        held = self.slot_positions()[..., : self.used]
        ranks = place_ranks(held)
        return torch.where(held >= self.near_start, ranks + self.frame_offset, ranks)

    def near_keys(self, running: TurningPass) -> torch.Tensor:
        """The keys in use, in the frame of a block's queries."""
        keys, _ = self.held_now()
        if self.frames.unrotated:
            ranks = self.slot_ranks(running)
            table = self.frames.table(self.slots, keys.device)
            return type(table)(table.cos[ranks], table.sin[ranks], table.layout)(keys)
        offset = self.frame_offset
        if not self.frames.two or (isinstance(offset, int) and offset == 0):
            return keys
        far = self.slot_positions()[..., : self.used] < self.near_start
        return self.frames.by(torch.where(far, torch.as_tensor(offset, device=far.device), 0))(keys)

    def slot_ranks(self, running: TurningPass) -> torch.Tensor:
        """The places of the slots within the cache, (batch or 1, 1 or kv_heads, slots in use)."""
        if self.ranks is not None:
            return self.ranks[..., : self.used]
        key = ("ranks", self.slots, self.filled, self.cursor, self.settings.sinks)
        ranks: torch.Tensor = running.shared(key, lambda: self.ring_ranks(running.device))
        return ranks

    def attend_held(
        self, query: torch.Tensor, call: Call, *, ranks: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of one query a row over the slots in use.

        Args:
            query: (batch, heads, 1, head_dim).
            ranks: The places of keys that are kept without rotation, or None.
        """
        return self.attend_slots(query, self.used, call.scaling, softcap=call.softcap, sink_logits=call.sink_logits, ranks=ranks, **options)

    def mix_dead_rows(
        self, live: torch.Tensor, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New tokens, with what the slots hold already in rows that have none.

        Args:
            live: True for rows with a real token, (batch, 1, 1).
            keys: (batch, kv_heads, 1, head_dim).
        """
        live = live[..., None]
        return torch.where(live, keys, self.keys_at(index)), torch.where(live, values, self.values_at(index))

    def absorb(self, found: Candidates, before: torch.Tensor) -> None:
        """Makes what was kept of a block the content of the slots.

        Args:
            before: How many tokens each row had before it was pruned, (batch, 1 or kv_heads, 1).
        """
        scores = found.scores
        heads = max(found.positions.shape[1], 1 if scores is None else scores.shape[1])
        positions = found.positions.expand(-1, heads, -1).contiguous()
        kept = (positions >= 0).sum(-1, keepdim=True)
        offset = self.frame_offset + (before - kept)
        keys = found.keys
        if self.frames.two:
            assert found.stands is not None
            places = torch.arange(positions.shape[-1], device=keys.device)
            wanted = torch.where(positions >= self.near_start, places + offset, places)
            delta = torch.where(positions < 0, 0, wanted - found.stands)
            if bool(delta.any()):
                keys = self.frames.by(delta)(keys)
        self.install(keys, found.values, kept)
        self.positions, self.attention, self.gathering, self.scores = positions, found.attention, found.gathering, None
        self.ranks, self.oldest_recent = None, UNKNOWN
        if self.frames.unrotated:
            self.ranks = torch.arange(positions.shape[-1], device=keys.device, dtype=torch.int32).expand_as(positions).contiguous()
        self._settle_counts(kept, offset)
        self.reserve(self.capacity)
        if scores is not None:
            self.set_scores(scores)

    @property
    def replaces_in_place(self) -> bool:
        """Whether a block can be written over what goes: where all rows are full, and slots are one buffer."""
        return self.slots > 0 and self.filled == self.slots and self.kept_rows is None and self.has_buffer

    def write_ring(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes a block over the oldest tokens of a full ring.

        Args:
            keys: (batch, kv_heads, tokens, head_dim), as they are kept.
        """
        sinks, tokens = self.settings.sinks, keys.shape[2]
        ring = self.slots - sinks
        self.fed += tokens
        self.count_evicted(tokens)
        done = max(0, tokens - ring)  # more than the ring holds: the first ones would be overwritten at once
        self.cursor = sinks + (self.cursor - sinks + done) % ring
        while done < tokens:
            part = min(tokens - done, self.slots - self.cursor)
            self.write_span(self.cursor, keys[:, :, done : done + part], values[:, :, done : done + part])
            self.cursor = sinks + (self.cursor - sinks + part) % ring
            done += part

    def overwrite(self, found: Candidates, left: torch.Tensor, came: torch.Tensor, heads: int) -> None:
        """Puts candidates into slots that are left, and all keys where they stand now.

        Args:
            left: Rows, heads and slots, (changes, 3).
            came: Rows, heads and candidates for these, (changes, 3).
        """
        rows, kv_heads, used = self.rows, self.kv_heads, self.used
        to, source = tuple(left.unbind(1)), tuple(came.unbind(1))
        same = found.scores is not None and found.attention is not None and found.scores.data_ptr() == found.attention.data_ptr()
        scores = None if same else found.scores
        for name, value in (("attention", found.attention), ("gathering", found.gathering), ("scores", scores)):
            held = None if value is None else value[..., :used].expand(-1, max(heads, value.shape[1]), -1).contiguous()
            if held is not None and value is not None:
                _replace(held, value, to, source, heads)
            setattr(self, name, held)
        positions = found.positions[..., :used].expand(-1, heads, -1).contiguous()
        _replace(positions, found.positions, to, source, heads)
        self.positions, self.oldest_recent = positions, UNKNOWN
        self.write_many(_spread(to, heads, kv_heads), found.keys, found.values, _spread(source, heads, kv_heads))
        self.count_evicted(found.keys.shape[2] - used)
        if self.frames.two:
            assert found.stands is not None
            stands = found.stands[..., :used].expand(-1, heads, -1).contiguous()
            _replace(stands, found.stands, to, source, heads)
            delta = self.standing() - stands
            self.turn_many(delta.expand(rows, -1, -1))
        elif self.frames.unrotated:
            self.ranks = place_ranks(positions).to(torch.int32)

    def _settle_counts(self, kept: torch.Tensor, offset: torch.Tensor) -> None:
        """One number for all rows where they agree, and a ring where the slots are one."""
        assert self.positions is not None
        same, first = bool((kept == kept[:1, :1]).all()), int(kept[0, 0, 0])
        self.filled, self.kept_rows = (first, None) if same else (0, kept)
        alike = bool((offset == offset[:1, :1]).all())
        self.offset, self.offset_rows = (int(offset[0, 0, 0]), None) if alike and same else (0, offset.expand_as(kept).contiguous())
        if not same:
            return
        self.cursor = self.settings.sinks
        # Before a ring is full, its first tokens would have to change their frame; where there is but one it does not matter.
        if self.policy.order_only and (self.filled == self.slots or (self.offset == 0 and self.offset_rows is None)):
            positions, self.positions = self.positions, None
            if not torch.equal(positions.long(), self.slot_positions().expand_as(positions).long()):
                self.positions = positions
            elif self.frames.unrotated:
                self.ranks = None


def _replace(held: torch.Tensor, found: torch.Tensor, to: tuple[torch.Tensor, ...], source: tuple[torch.Tensor, ...], heads: int) -> None:
    """Puts single numbers of candidates into slots; all heads of a tensor take part where the changes are the same for all."""
    wide = held.shape[1]
    found = found.expand(-1, wide, -1)
    held[_spread(to, heads, wide)] = found[_spread(source, heads, wide)]


def _spread(index: tuple[torch.Tensor, ...], heads: int, wide: int) -> tuple[torch.Tensor, ...]:
    """Rows, heads and slots for `wide` heads, given for all alike or for each."""
    if heads == wide:
        return index
    row, _, slot = index
    head = torch.arange(wide, device=row.device)
    return row[:, None].expand(-1, wide), head.expand(row.numel(), -1), slot[:, None].expand(-1, wide)
