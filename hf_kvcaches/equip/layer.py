"""One layer of an `EquipCache`: slots that are overwritten in place, and the attention over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_kvcaches.core.attention import is_enabled
from hf_kvcaches.core.calls import Call, NewTokens
from hf_kvcaches.core.passes import Passes
from hf_kvcaches.equip import compiled, editing, pruning, steps
from hf_kvcaches.equip.frames import Frames, TurningPass
from hf_kvcaches.equip.placing import PlacedSlots
from hf_kvcaches.equip.rollback import Recording
from hf_kvcaches.equip.settings import Settings
from hf_kvcaches.errors import ConfigError, UnsupportedError


class EquipLayer(PlacedSlots):
    """Keeps at most a budget of tokens; a new one is written over the one that goes."""

    is_croppable = True
    no_tensors = (
        "EquipCache returns slots. Call hf_kvcaches.disable(model) and build the cache with the model's config, so that it hands out "
        "plain tensors."
    )

    def __init__(self, settings: Settings, frames: Frames, passes: Passes[TurningPass], config: PreTrainedConfig) -> None:
        super().__init__(settings, frames, passes, config)
        self.recording: Recording | None = None
        self.inserting: editing.Insertion | None = None
        self.has_plain_ring = self.policy.order_only and self.has_buffer and not frames.unrotated

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if is_enabled(self.config):
            # Nobody makes a mask from these in a graph, which would take growing numbers for constants.
            return (query_length, 0) if torch.compiler.is_compiling() else super().get_mask_sizes(query_length)
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
        view = NewTokens(self, key_states, value_states)
        return view, view

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
        """Takes the new tokens and gives their queries' attention, (batch, tokens, heads, head_dim).

        Args:
            query: (batch, heads, tokens, head_dim), as the model rotated them.
            keys: (batch, kv_heads, tokens, head_dim), likewise.
            values: Like `keys`.
            call: What else the model said.
        """
        call.check("EquipCache")
        if torch.compiler.is_compiling():
            return compiled.attend(self, query, keys, values, call)
        tokens = keys.shape[-2]
        running = self.passes.enter(call.mask, call.options.get("position_ids"), self.seen, tokens, keys.device)
        if self.inserting is not None:
            return editing.insert_block(self, query, keys, values, call, running)
        self._check_padding(running)
        if tokens == 1 and self.has_plain_ring and self.recording is None and self.fed:
            turned = steps.turn_ring(self, query, keys, values, call, running)
            if not isinstance(turned, bool):
                self.seen += 1
                self.wind(True)
                return turned
        block = self.passes.block_length(tokens, begun=bool(self.fed), recording=self.recording is not None)
        if self.recording is not None:
            self.recording.note(self, running, query, keys, values, call, block)
        output = self.take(query, keys, values, call, running, block)
        self.seen += tokens
        self.wind(not block and tokens == 1 and running.valid is None)
        return output

    def _check_padding(self, running: TurningPass) -> None:
        """Refuses masks that hide what the cache took for text: it read them without this attention, or the caller changed them."""
        before = running.real_before
        if before is None or not self.fed or self.fed != self.seen:
            return
        held: int | torch.Tensor = self.fed if self.first is None else self.fed - self.first[:, None]
        key = ("padding", None if self.first is None else id(self.first), self.fed)
        if not running.shared(key, lambda: bool((before == held).all())):
            raise UnsupportedError(
                "attention_mask: it hides other tokens than when they were fed in, or the cache was filled before "
                "hf_kvcaches.enable(model). Use a new cache; evict() forgets tokens that are to be hidden."
            )

    def take(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: TurningPass, block: int
    ) -> torch.Tensor:
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
            self.write_down()

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

    def make_final(self) -> None:
        """Ends a change that came from outside of a forward pass."""
        self.forget_recording()
        self.write_down()

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
                f"{needs} the model to ask the cache's attention, and it does not. Build the cache with the model instead of its "
                "config, or call hf_kvcaches.enable(model) first."
            )
        apart = self.first is not None or self.kept_rows is not None or self.offset_rows is not None
        if apart or (self.frames.two and self.fed and self.kept_count + self.frame_offset != self.seen):
            raise UnsupportedError(
                "This cache holds rows that differ, or keys that were moved, and the model no longer asks its attention. Call "
                "hf_kvcaches.enable(model), or reset() the cache."
            )
        self.own(torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad))
        running = TurningPass(None, None, self.seen, tokens, keys.device)
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
