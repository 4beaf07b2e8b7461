"""One layer of an `EquipCache`: slots that are overwritten in place, and the attention over them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_kvcaches.core.adopting import LastQueries
from hf_kvcaches.core.calls import Call, hand_out
from hf_kvcaches.core.passes import Passes
from hf_kvcaches.equip import compiled, editing, pruning, steps
from hf_kvcaches.equip.frames import Frames, TurningPass
from hf_kvcaches.equip.inputs import part_of
from hf_kvcaches.equip.placing import PlacedSlots
from hf_kvcaches.equip.reconstruction import Reconstruction
from hf_kvcaches.equip.rollback import Recording
from hf_kvcaches.equip.settings import EquipSettings
from hf_kvcaches.errors import ConfigError, UnsupportedError


class EquipLayer(PlacedSlots):
    """Keeps at most a budget of tokens; a new one is written over the one that goes."""

    is_croppable = True
    cache_name = "EquipCache"

    def __init__(self, settings: EquipSettings, frames: Frames, passes: Passes[TurningPass], config: PreTrainedConfig) -> None:
        super().__init__(settings, frames, passes, config)
        self.recording: Recording | None = None
        self.inserting: editing.Insertion | None = None
        self.reconstruction: Reconstruction | None = None
        self.has_plain_ring = self.policy.order_only and self.has_buffer and not frames.unrotated

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if torch.compiler.is_compiling():
            # Any number but that of the new tokens would grow with each step, and a graph would take it for a constant.
            return query_length, 0
        if query_length == 1 and self.is_compileable:
            return 1, self.seen  # `generate` makes this mask ahead, for a graph to come
        return super().get_mask_sizes(query_length)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Returns a view that takes the new tokens and attends to all.

        Args:
            key_states: (batch, kv_heads, tokens, head_dim), as the model rotated them.
        """
        return hand_out(self, key_states, value_states)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
        """Takes the new tokens and gives their queries' attention, (batch, tokens, heads, head_dim).

        Args:
            query: (batch, heads, tokens, head_dim), as the model rotated them.
            keys: (batch, kv_heads, tokens, head_dim), likewise.
            call: What else the model said.
        """
        call.check("EquipCache", sinks=True)
        if torch.compiler.is_compiling():
            return compiled.attend(self, query, keys, values, call)
        tokens = keys.shape[-2]
        running = self.enter(call, tokens, keys.device)
        if self.reconstruction is not None:
            return self.reconstruction.attend(self, query, keys, values, call, running)
        if self.deferring and tokens == 1 and self.fed:
            raise UnsupportedError(
                f"policy: {self.policy.name!r} prunes in cache.compress(model), which has to be called after the context and before the "
                "first token that follows. A context may come in several calls of more than one token each."
            )
        if self.inserting is not None:
            return editing.insert_block(self, query, keys, values, call, running)
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

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, running: TurningPass, queries: LastQueries | None = None) -> None:
        """Takes over a prompt's keys and values and prunes them, as after a prefill.

        Args:
            keys: (batch, kv_heads, tokens, head_dim), as the model rotated them.
            queries: The prompt's last ones, as many as the policy observes, or more.
        """
        observed = pruning.observed_by(self, queries, keys, running)
        limit = self.resolve(running, running.tokens)
        pruning.prune_block(self, keys, values, running, limit, observed, queries)
        self.seen = running.tokens
        self.wind(False)

    def enter(self, call: Call, tokens: int, device: torch.device) -> TurningPass:
        """The pass that new tokens belong to."""
        counted = self.fed if self.first is None else (self.fed - self.first)[:, None]
        real_before = counted if self.fed == self.seen else None  # a text that was edited is counted anew
        return self.passes.enter(call, self.seen, tokens, device, real_before)

    def take(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call, running: TurningPass, block: int
    ) -> torch.Tensor:
        """`attend` without its bookkeeping."""
        tokens, outputs = keys.shape[-2], []
        self.own(torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad))
        if block:
            parts, limit = [0, block], self.limit
            if not self.fed:
                question = self.settings.question_in(block)
                parts, limit = sorted({0, question, block}), self.resolve(running, question)
            inputs = self.inputs
            for start, stop in pairwise(parts):
                self.inputs = part_of(inputs, start, stop)
                own, span = running.part(start, stop), slice(start, stop)
                outputs.append(pruning.take_block(self, query[:, :, span], keys[:, :, span], values[:, :, span], call, own, limit))
                limit = self.limit
            self.inputs = None
        for index in range(block, tokens):
            own, span = running.part(index, index + 1), slice(index, index + 1)
            self.note_queries(LastQueries(query[:, :, span], call.scaling), own.valid)
            slot = steps.insert(self, keys[:, :, span], values[:, :, span], own)
            output, weights = steps.attend(self, query[:, :, span], call, own)
            steps.observe(self, weights, slot, own, call.module)
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
        self.deferring = self.policy.deferred > 0
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
