"""One layer of an `EquipCache`: slots that are overwritten in place, and the attention over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_kvcaches.core.attention import LayerView, MaskRecipe, is_enabled
from hf_kvcaches.equip import editing, pruning, steps
from hf_kvcaches.equip.budgets import check_budget, slots_for
from hf_kvcaches.equip.frames import Frames, Pass, Passes
from hf_kvcaches.equip.policies import Policy
from hf_kvcaches.equip.rollback import Recording
from hf_kvcaches.equip.storage import SlotStorage
from hf_kvcaches.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class Settings:
    """What the user asked of one layer.

    Args:
        budget: Slots, or a fraction of the prompt.
        sinks: First tokens of each row that always stay.
        recent: Newest tokens that always stay; None for the policy's own number.
        policy: Who goes.
        backend: Of the kernels.
    """

    budget: int | float
    sinks: int
    recent: int | None
    policy: Policy
    backend: str = "auto"


@dataclass(frozen=True)
class Call:
    """What a model's attention module asks.

    Args:
        module: The module.
        mask: What it was given as its mask.
        options: Its other arguments.
    """

    module: nn.Module
    mask: MaskRecipe | torch.Tensor | None
    options: dict[str, Any]

    @property
    def scaling(self) -> float:
        """Of the scores."""
        scaling = self.options.get("scaling")
        return float(self.module.head_dim**-0.5 if scaling is None else scaling)

    @property
    def softcap(self) -> float | None:
        """Bound of the scores."""
        return self.options.get("softcap")

    @property
    def bias(self) -> torch.Tensor | None:
        """Added to the scores, (batch or 1, heads or 1, queries, tokens seen)."""
        return self.options.get("position_bias")

    def check(self) -> None:
        """Refuses what attention over slots leaves out."""
        for name in ("s_aux", "head_mask", "cu_seq_lens_q"):
            if self.options.get(name) is not None:
                raise UnsupportedError(f"EquipCache does not support attention with {name}. Use another cache with this model.")
        if self.options.get("dropout"):
            raise UnsupportedError("EquipCache does not support dropout of attention weights. Call model.eval(), or set it to 0.")


class SlotView(LayerView):
    """What the layer hands out in place of keys and values: the new ones, on their way to `EquipLayer.attend`."""

    def __init__(self, layer: EquipLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: MaskRecipe | torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.layer.attend(query, self.keys, self.values, Call(module, mask, kwargs)), None

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            f"This model reads {name!r} from the keys or values that its cache returns, and EquipCache returns slots. "
            "Build the cache with the model's config, so that it hands out plain tensors."
        )


class EquipLayer(SlotStorage):
    """Keeps at most a budget of tokens; a new one is written over the one that goes.

    Slots are in no order. `positions` says whose they are: a token's index among those fed in, counted so that the newest has the same
    in all rows (padding, wherever it was, lies before a row's `first`); -1 is an empty slot. While the oldest token goes and all rows
    agree, slots are a ring, and there is nothing to be said about them (`positions` is None).

    Attributes:
        fed: Tokens that came, padding included. `seen` is what the model is told and may be set forward.
        filled: Slots in use where all rows agree; they are the first ones. `kept_rows` has the numbers otherwise.
        offset: How far the near frame is ahead of the far one; `offset_rows` where rows differ.
        cursor: The ring's oldest slot.
        gathered: Queries in `gathering`, the attention of the observation window that is not yet complete.
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
        "first",
        "kept_rows",
        "offset_rows",
        "padding",
    )
    counters: ClassVar[tuple[str, ...]] = ("seen", "fed", "slots", "recent", "filled", "offset", "cursor", "gathered")
    is_croppable = True
    swapped: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    gathering: torch.Tensor | None = None
    first: torch.Tensor | None = None
    kept_rows: torch.Tensor | None = None
    offset_rows: torch.Tensor | None = None
    padding: torch.Tensor | None = None

    def __init__(self, settings: Settings, frames: Frames, passes: Passes, config: PreTrainedConfig) -> None:
        super().__init__()
        self.settings, self.frames, self.passes, self.config = settings, frames, passes, config
        self.backend = settings.backend
        self.recording: Recording | None = None
        self.inserting: editing.Insertion | None = None
        self.fed = self.slots = self.recent = self.filled = self.offset = self.cursor = self.gathered = 0

    # What the layer holds

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
        """Where each slot of the ring stands among those in use, (1, 1, slots in use).

        Args:
            device: Of the result.
        """
        slot, sinks = torch.arange(self.filled, device=device), self.settings.sinks
        if self.filled == self.slots:
            # The oldest of the ring is at the cursor.
            slot = torch.where(slot < sinks, slot, sinks + (slot - self.cursor) % (self.slots - sinks))
        return slot[None, None]

    @property
    def is_ring(self) -> bool:
        """Whether slots are taken in turn, the same in all rows."""
        return self.policy.order_only and self.positions is None

    @property
    def compact(self) -> bool:
        """Whether positions are counted within the cache."""
        return self.frames.turns

    @property
    def used(self) -> int:
        """How many slots, from the first on, may hold a token."""
        return self.filled if self.kept_rows is None else self.capacity

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
        assert self.first is not None and self.padding is not None
        width = self.padding.shape[1]
        real = held - self.first[:, None, None]
        # Real tokens of the padded part first, in order; what came later follows without a gap.
        places = torch.argsort((~self.padding).to(torch.int8), dim=-1, stable=True)
        count = self.padding.sum(-1)[:, None, None]
        inside = torch.take_along_dim(places[:, None], real.clamp(0, width - 1), -1)
        return torch.where(held < 0, -1, torch.where(real < count, inside, width + real - count))

    # How transformers asks

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if is_enabled(self.config):
            return super().get_mask_sizes(query_length)
        held = self.filled + query_length
        if query_length == 1 and self.filled:
            held = min(held, self.slots)
        return held, self.seen + query_length - held

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Takes the new tokens; returns a view that attends to all, or plain tensors where the model asks its own attention.

        Args:
            key_states: (batch, kv_heads, tokens, head_dim), as the model rotated them.
            value_states: Like `key_states`.
            *args: Ignored.
            **kwargs: Ignored.
        """
        self.check_new_tokens(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not is_enabled(self.config):
            return self._update_plainly(key_states, value_states)
        view = SlotView(self, key_states, value_states)
        return view, view

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
        """Takes the new tokens and gives their queries' attention, (batch, tokens, heads, head_dim).

        Args:
            query: (batch, heads, tokens, head_dim), as the model rotated them.
            keys: (batch, kv_heads, tokens, head_dim), likewise.
            values: Like `keys`.
            call: What else the model said.
        """
        call.check()
        tokens = keys.shape[-2]
        running = self.passes.enter(call.mask, call.options.get("position_ids"), self.seen, tokens, keys.device)
        if self.inserting is not None:
            return editing.insert_block(self, query, keys, values, call, running)
        block = self._block_length(tokens)
        if self.recording is not None:
            self.recording.note(self, running, query, keys, values, call, block)
        output = self.take(query, keys, values, call, running, block)
        self.seen += tokens
        return output

    def _block_length(self, tokens: int) -> int:
        """How many of the new tokens are one block; the others are steps, one after the other, as if they had come alone."""
        if self.recording is None:
            return 0 if tokens == 1 and self.fed else tokens
        drafts = self.passes.drafts
        if not self.fed:
            return max(1, tokens - (drafts or 0))
        # Drafts behind more than the last chosen token follow a prompt.
        return tokens - drafts if drafts and tokens - drafts > 1 else 0

    def take(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: Pass, block: int) -> torch.Tensor:
        """`attend` without its bookkeeping.

        Args:
            query: As in `attend`.
            keys: As in `attend`.
            values: As in `attend`.
            call: As in `attend`.
            running: The pass with these tokens.
            block: How many of the tokens are one block.
        """
        tokens, outputs = keys.shape[-2], []
        self.own(torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad))
        if block:
            if not self.fed:
                self.resolve(running, block)
            own, span = running.part(0, block), slice(0, block)
            outputs.append(pruning.take_block(self, query[:, :, span], keys[:, :, span], values[:, :, span], call, own))
        for index in range(block, tokens):
            own, span = running.part(index, index + 1), slice(index, index + 1)
            slot = steps.insert(self, keys[:, :, span], values[:, :, span], own)
            output, weights = steps.attend(self, query[:, :, span], call, own)
            steps.observe(self, weights, slot, own)
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def activate_past_recording(self) -> None:
        """From now on tokens can be taken back with `crop`, up to the last crop. Several tokens at once count as so many steps."""
        if self.recording is None:
            self.recording = Recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last tokens back: slots, scores and the ring are as if they had never come.

        Args:
            tokens_to_remove: Minus the number of tokens, as in transformers. 0 only makes final what came.
        """
        tokens = -int(tokens_to_remove)
        if not 0 <= tokens <= self.seen:
            raise ConfigError.of("tokens_to_remove", f"a number from -{self.seen} to 0", -tokens, "crop(-n) removes the last n tokens.")
        recorded = 0 if self.recording is None else self.recording.tokens
        if self.recording is not None and (tokens <= recorded or not self._is_whole_ring):
            self.recording.take_back(self, tokens)
        elif tokens:
            self._truncate(tokens)

    @property
    def _is_whole_ring(self) -> bool:
        """Whether every token that came is still here, in order, and nothing else is remembered of it."""
        return self.is_ring and self.fed == self.filled and self.first is None

    def _truncate(self, tokens: int) -> None:
        if not self._is_whole_ring:
            raise UnsupportedError(
                "crop: tokens were pruned or scored, so EquipCache can take back only what it has recorded. "
                "Call activate_past_recording() before the tokens that may be taken back, or build the cache anew from the shorter text."
            )
        if self.recording is not None:
            self.recording.clear()
        self.filled -= tokens
        self.fed -= tokens
        self.seen -= tokens

    def reset(self) -> None:
        super().reset()
        if self.recording is not None:
            self.recording.clear()

    def _map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map_rows(function)
        self.forget_recording()

    def forget_recording(self) -> None:
        """Makes final what came."""
        if self.recording is not None:
            self.recording.clear()

    def _update_plainly(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots as plain tensors, for a model that attends by itself."""
        tokens = keys.shape[2]
        needs = "rope='on_read' and 'rotated_keys' need" if self.frames.unrotated else f"{type(self.policy).__name__} needs"
        if self.policy.observes != 0 or self.frames.unrotated or self.recording is not None:
            needs = "taking tokens back needs" if self.recording is not None else needs
            raise UnsupportedError(
                f"{needs} the model to ask the cache's attention, and it does not. Build the cache with the model instead of its config, or "
                "call hf_kvcaches.enable(model) first."
            )
        self.own(torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad))
        running = Pass(None, None, self.seen, tokens, keys.device)
        if not self.fed:
            self.resolve(running, tokens)
        if keys.shape[0] > 1 and self.filled + tokens > self.slots:
            raise UnsupportedError(
                "A batch may be padded, and EquipCache does not see the padding, because the model does not ask its attention. Build the "
                "cache with the model instead of its config, call hf_kvcaches.enable(model) first, or give it one row at a time."
            )
        if tokens == 1 and self.fed:
            slot = steps.insert(self, keys, values, running)
            steps.observe(self, None, slot, running)
            result = self.near_keys(running), self.held_now()[1]
        else:
            result = keys, values
            if self.used:
                result = torch.cat([self.near_keys(running), keys], 2), torch.cat([self.held_now()[1], values], 2)
            pruning.prune_block(self, keys, values, running)
        self.seen += tokens
        return result

    # What steps and blocks do to it

    def resolve(self, running: Pass, tokens: int) -> None:
        """Decides on the number of slots, when the first tokens are there.

        Args:
            running: Their pass.
            tokens: How many are the prompt.
        """
        valid = running.valid
        prompt = tokens if valid is None else int(valid[:, :tokens].sum(-1).max())
        self.slots = slots_for(self.settings.budget, prompt)
        wanted, sinks = self.settings.recent, self.settings.sinks
        self.recent = self.policy.recent(self.slots, sinks) if wanted is None else wanted
        check_budget(self.slots, sinks, self.recent)

    def window(self, tokens: int) -> int | None:
        """How many of a block's last queries the policy observes.

        Args:
            tokens: In the block.
        """
        wanted = self.policy.observes
        return None if wanted is None or (self.used and tokens < wanted) else wanted

    def pass_over(self, valid: torch.Tensor | None, tokens: int) -> torch.Tensor:
        """The positions of new tokens, (batch or 1, 1, tokens), -1 for padding, which is counted to what lies before a row's first token.

        Args:
            valid: True where a token is real, (batch, tokens), or None for all.
            tokens: New ones.
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
            self.positions = torch.nn.functional.pad(held, (0, self.capacity - held.shape[-1]), value=-1)

    def make_ragged(self) -> None:
        """Counts for each row what is kept."""
        if self.kept_rows is not None:
            return
        assert self.positions is not None
        self.reserve(self.slots)
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
        """Says that all rows lost as many tokens.

        Args:
            tokens: How many.
        """
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

    def rebase_if_due(self) -> None:
        """Brings the near frame back to the far one where it has gone too far ahead for exact angles."""
        offset, limit = self.frame_offset, self.frames.limit
        # Where the model attends by itself, nobody turns its queries.
        if not self.frames.two or not is_enabled(self.config) or (offset < limit if isinstance(offset, int) else self.fed % limit):
            return
        near = self.slot_positions() >= self.fed - self.near
        delta = torch.where(near, -torch.as_tensor(offset, device=near.device), 0)
        keys, values = self.held_now()
        self.replace_keys(self.frames.by(delta)(keys))
        self.offset = 0
        self.offset_rows = None if self.offset_rows is None else torch.zeros_like(self.offset_rows)

    def far_slots(self) -> int | torch.Tensor:
        """The slots whose keys stand in the far frame: the first so many, or (batch, 1 or kv_heads, slots in use)."""
        if self.is_ring:
            return min(self.settings.sinks, self.used)
        assert self.positions is not None
        return self.positions[..., : self.used] < self.fed - self.near

    def placed_keys(self, running: Pass) -> torch.Tensor:
        """The keys in use, each at its place within the cache where positions are counted there.

        Args:
            running: The pass.
        """
        if not self.frames.two:
            return self.near_keys(running)
        held = self.slot_positions()
        delta = torch.where(held < 0, 0, _ranks(held) - self.standing())
        return self.frames.by(delta)(self.held_now()[0])

    def standing(self) -> torch.Tensor:
        """The position to which each slot's key is rotated, (batch, 1 or kv_heads, slots in use)."""
        held = self.slot_positions()[..., : self.used]
        ranks = _ranks(held)
        return torch.where(held >= self.fed - self.near, ranks + self.frame_offset, ranks)

    def near_keys(self, running: Pass) -> torch.Tensor:
        """The keys in use, in the frame of a block's queries.

        Args:
            running: The pass.
        """
        keys, _ = self.held_now()
        if self.frames.unrotated:
            ranks = self.slot_ranks(running)
            table = self.frames.table(self.slots, keys.device)
            return type(table)(table.cos[ranks], table.sin[ranks], table.layout)(keys)
        offset = self.frame_offset
        if not self.frames.two or (isinstance(offset, int) and offset == 0):
            return keys
        far = self.slot_positions()[..., : self.used] < self.fed - self.near
        return self.frames.by(torch.where(far, torch.as_tensor(offset, device=far.device), 0))(keys)

    def slot_ranks(self, running: Pass) -> torch.Tensor:
        """The places of the slots within the cache, (batch or 1, 1 or kv_heads, slots in use).

        Args:
            running: The pass.
        """
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
            call: What the model said.
            ranks: The places of keys that are kept without rotation, or None.
            **options: Of `kernels.slots.slot_attention`.
        """
        return self.attend_slots(query, self.used, call.scaling, softcap=call.softcap, ranks=ranks, **options)

    def held_now(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the slots in use, as they are kept."""
        return self.held(self.used)

    def mix_dead_rows(
        self, live: torch.Tensor, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New tokens, with what the slots hold already in rows that have none.

        Args:
            live: True for rows with a real token, (batch, 1, 1).
            index: Their slots.
            keys: (batch, kv_heads, 1, head_dim).
            values: Like `keys`.
        """
        live = live[..., None]
        return torch.where(live, keys, self.keys_at(index)), torch.where(live, values, self.values_at(index))

    def slot_index(self, slot: int | torch.Tensor) -> torch.Tensor:
        """A slot as (batch, 1 or kv_heads, 1).

        Args:
            slot: A number, or already so.
        """
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

    def add_attention(self, weights: torch.Tensor, index: torch.Tensor) -> bool:
        """Adds one query's attention to what the policy observes; whether its window is complete.

        Args:
            weights: (batch, kv_heads, slots in use), float32.
            index: Where the new token is, whose slot had another's.
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
        self.gathering.scatter_(2, index, 0.0)
        self.gathering[..., :used].add_(weights)
        self.gathered += 1
        if self.gathered < window:
            return False
        self.attention.copy_(self.gathering)
        self.gathering.zero_()
        self.gathered = 0
        return True

    def absorb(self, found: pruning.Candidates, before: torch.Tensor) -> None:
        """Makes what was kept of a block the content of the slots.

        Args:
            found: In order of position; what is empty comes last.
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
            wanted = torch.where(positions >= self.fed - self.near, places + offset, places)
            delta = torch.where(positions < 0, 0, wanted - found.stands)
            if bool(delta.any()):
                keys = self.frames.by(delta)(keys)
        self.install(keys, found.values, kept)
        self.positions, self.attention, self.gathering, self.scores = positions, found.attention, found.gathering, None
        self.ranks = torch.arange(positions.shape[-1], device=keys.device).expand_as(positions).contiguous() if self.frames.unrotated else None
        self._settle_counts(kept, offset)
        self.reserve(self.capacity)
        if scores is not None:
            self.set_scores(scores)

    def _settle_counts(self, kept: torch.Tensor, offset: torch.Tensor) -> None:
        """One number for all rows where they agree, and a ring where the slots are one."""
        assert self.positions is not None
        same, first = bool((kept == kept[:1, :1]).all()), int(kept[0, 0, 0])
        self.filled, self.kept_rows = (first, None) if same else (0, kept)
        alike = bool((offset == offset[:1, :1]).all())
        self.offset, self.offset_rows = (int(offset[0, 0, 0]), None) if alike and same else (0, offset.expand_as(kept).contiguous())
        if not same:
            self.reserve(self.slots)
            return
        self.cursor = self.settings.sinks
        # Before a ring is full, its first tokens would have to change their frame; where there is but one it does not matter.
        if self.policy.order_only and (self.filled == self.slots or (self.offset == 0 and self.offset_rows is None)):
            positions, self.positions = self.positions, None
            if not torch.equal(positions.long(), self.slot_positions().expand_as(positions).long()):
                self.positions = positions
            elif self.frames.unrotated:
                self.ranks = None


def _ranks(positions: torch.Tensor) -> torch.Tensor:
    """Each slot's place in order of position; empty ones come last."""
    ends = torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions)
    return ends.argsort(stable=True, dim=-1).argsort(-1)
