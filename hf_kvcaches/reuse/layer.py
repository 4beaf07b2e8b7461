"""A cache, and its layers, whose tokens can be written in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.layers import GrowingLayer, append, capacity_for
from hf_kvcaches.core.parallel import is_tensor_parallel, shard_of
from hf_kvcaches.core.prompt import Stage
from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.core.source import SourceCache
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError


class SplicedLayer(GrowingLayer):
    """Keys and values of all tokens, in buffers that stored spans are spliced into before the rest of a prompt is run.

    With a `window`, tokens that no later token sees are dropped at the first decode step. Before the next prompt, `fit_slots` makes the
    buffers as long as the text again, with zeros for the dropped tokens, so that slots are counted from the text's start.
    """

    window: int | None = None
    """How many tokens the model's attention sees, its own included; None: all."""
    dropped: int = 0
    """How many of the first tokens are lost."""
    offset: int = 0
    """How many of the dropped tokens have no slot in the buffers: all of them or none."""
    record_past: bool = False
    """Whether tokens that leave the window are kept, because drafts may be cropped."""
    arrived: torch.cuda.Event | None = None
    """What stored tokens are written behind, on another stream; None once this stream waits for it."""

    def arrive(self) -> None:
        """Make the current stream, not the CPU, wait for stored tokens that are on their way."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
            self.arrived = None

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        self.arrive()
        return super().owned_tensors()

    def own_buffers(self) -> None:
        """Copy the buffers, which another thread goes on reading."""
        for name in ("key_buffer", "value_buffer"):
            if (buffer := getattr(self, name)) is not None:
                setattr(self, name, buffer.clone())

    def see_window(self, window: int) -> None:
        """Keep no more than a window between prompts."""
        self.window, self.is_sliding = window, True

    @property
    def kept(self) -> int:
        return self.seen - self.offset

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.window is None:
            return self.seen + query_length, 0
        visible = min(self.seen, self.window - 1)
        return visible + query_length, self.seen - visible

    def exact_states(self, window: bool = False) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        self.arrive()
        keys, values = self.keys, self.values
        if self.dropped and not window:
            return None
        if not self.offset or keys is None or values is None:
            return keys, values
        return functional.pad(keys, (0, 0, self.offset, 0)), functional.pad(values, (0, 0, self.offset, 0))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.arrived is not None:  # a call per layer and decode step less
            self.arrive()
        if self.window is None or self.seen == 0:
            return super().update(key_states, value_states, *args, **kwargs)
        self.check_new_tokens(key_states, value_states)
        if self.offset:
            self.drop_unseen()
        start, tokens = self.kept, key_states.shape[2]
        keys, values = append(self.key_buffer, key_states, start), append(self.value_buffer, value_states, start)
        self.key_buffer, self.value_buffer = keys, values
        visible = min(self.seen, self.window - 1) + tokens
        self.seen += tokens
        return keys.narrow(2, self.kept - visible, visible), values.narrow(2, self.kept - visible, visible)

    def drop_unseen(self) -> None:
        """Free the tokens that no later token sees, where that makes the buffers smaller or they are full."""
        if self.window is None or self.key_buffer is None or self.record_past:
            return
        last, slots = self.window - 1, self.key_buffer.shape[2]
        if self.kept <= last or (slots <= capacity_for(last) and self.kept < slots):
            return
        start = self.kept - last
        for name in ("key_buffer", "value_buffer"):
            setattr(self, name, append(None, getattr(self, name)[:, :, start : self.kept], 0))
        self.offset += start
        self.dropped = self.offset

    def fit_slots(self, tokens: int) -> None:
        """Make the buffers as long as the text, with room for some new tokens."""
        if not self.offset:
            return
        for name in ("key_buffer", "value_buffer"):
            held = getattr(self, name)
            buffer = held.new_zeros(*held.shape[:2], capacity_for(self.seen + tokens), held.shape[3])
            buffer[:, :, self.offset : self.seen] = held[:, :, : self.kept]
            setattr(self, name, buffer)
        self.offset = 0

    def require_croppable(self, tokens_to_remove: int) -> None:
        """Refuse a crop after which the window would reach back to dropped tokens."""
        left = self.seen + int(tokens_to_remove)
        if self.dropped and self.window is not None and 0 < left < self.dropped + self.window - 1:
            raise UnsupportedError(
                f"crop: of the {left} tokens that would be left, layers with a window of {self.window} have dropped some that the next one "
                "sees. Use a new cache for the shorter text, or reset() this one."
            )

    def crop(self, tokens_to_remove: int) -> None:
        self.require_croppable(tokens_to_remove)
        super().crop(tokens_to_remove)
        if self.seen == 0:
            self.dropped = self.offset = 0

    def activate_past_recording(self) -> None:
        self.record_past = True

    def reset(self) -> None:
        super().reset()
        self.dropped = self.offset = 0
        self.record_past, self.arrived = False, None

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, values = super().export_state()
        return tensors, values | ({"dropped": self.dropped, "offset": self.offset} if self.dropped else {})

    def import_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        others = dict(values)
        dropped, offset = others.pop("dropped", 0), others.pop("offset", 0)
        super().import_state(tensors, others)
        if not (type(dropped) is type(offset) is int and 0 <= offset <= dropped <= self.seen and offset in (0, dropped)):
            raise ArtifactError(f"The stored state of a {type(self).__name__} has dropped {dropped} tokens. Save the cache again.")
        self.dropped, self.offset = dropped, offset

    def open(self, rows: int, total: int, keys: torch.Tensor, values: torch.Tensor, padding: int | None = None) -> None:
        """Make room for a prompt's tokens, the filler slot behind them, and some new tokens.

        Args:
            keys: Any tensor with the keys' heads (third last dimension), head_dim (last one), dtype and device.
            padding: The slots from here on, but for the prompt's last one, are written before they are read; None: they may not be.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        missing = total + 1 - self.seen
        capacity = capacity_for(missing)
        for name, like in (("key_buffer", keys), ("value_buffer", values)):
            if getattr(self, name) is None and not torch.is_grad_enabled():
                buffer = like.new_empty(rows, like.shape[-3], capacity, like.shape[-1])
                buffer[:, :, : total if padding is None else padding].zero_()
                buffer[:, :, total - 1 :].zero_()
            else:
                room = like.new_zeros(rows, like.shape[-3], missing, like.shape[-1])
                buffer = append(getattr(self, name), room, self.seen)
            setattr(self, name, buffer)

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, slots: torch.Tensor, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write tokens into slots and return keys and values of all slots; no token counts as seen.

        Args:
            key_states: (batch, kv_heads, tokens, head_dim), rotated.
            slots: (batch, tokens); `total` for fillers, which no query sees.
        """
        self.arrive()
        if not all(_has_room(buffer, total) for buffer in (self.key_buffer, self.value_buffer)):
            self.open(len(slots), total, key_states, value_states)
        assert self.key_buffer is not None
        assert self.value_buffer is not None
        slots = slots.to(key_states.device)
        if len(slots) == 1:
            self.key_buffer.index_copy_(2, slots[0], key_states)
            self.value_buffer.index_copy_(2, slots[0], value_states)
        else:
            index = slots[:, None, :, None]
            self.key_buffer.scatter_(2, index.expand_as(key_states), key_states)
            self.value_buffer.scatter_(2, index.expand_as(value_states), value_states)
        return self.key_buffer.narrow(2, 0, total), self.value_buffer.narrow(2, 0, total)


def _has_room(buffer: torch.Tensor | None, total: int) -> bool:
    """Whether a buffer is writable and has room for a prompt's slots and the filler slot."""
    frozen = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
    return buffer is not None and buffer.shape[2] > total and not frozen


class SplicingCache(SourceCache):
    """Keeps every token, in buffers that stored tokens can be written into at any index.

    A subclass implements `take_prefill`.

    Args:
        model: A transformers model.
        decode_with: A cache that takes over the prompt's tokens once it is answered; None to keep them all here.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.

    Attributes:
        reason: Why the last prompt was neither looked up nor stored, as a sentence; "" where it was.
        exchanged: Whether rows were reordered, selected or repeated.
    """

    def __init__(self, model: Any, *, decode_with: KVCache | None = None, offloading: bool = False) -> None:
        super().__init__(model, decode_with=decode_with, offloading=offloading)
        foreign = sorted({kind for kind, _ in compat.layer_plan(self.config) if kind not in self.own_layer_types})
        if foreign:
            raise UnsupportedError(f"model: layers of the types {foreign} keep no keys and values that could be reused. Use DynamicCache.")
        if self.rotation.refused:
            raise UnsupportedError(f"model: {self.rotation.why}. Use DynamicCache.")
        if self._model is not None:
            decoder_layers(self.model)  # refuses models without decoder layers
        if compat.is_family(self.config, "inserts_tokens"):
            raise UnsupportedError("model: it inserts tokens before every text, which count in the cache. Use DynamicCache.")
        if self.learned_prompt:
            raise UnsupportedError("model: a learned prompt stands before every text, and is in no fingerprint. Use DynamicCache.")
        if self.holder is None:  # which takes all tokens of a layer
            for layer, (kind, plain) in zip(self.layers, compat.layer_plan(self.config), strict=True):
                if kind == "sliding_attention":
                    layer.see_window(plain.sliding_window)
        self.shard = shard_of(model)
        if self.shard is None and self._model is not None and is_tensor_parallel(self.model):
            raise UnsupportedError(
                f"model: {type(self).__name__} serves tensor parallelism that splits keys and values by head, and this model's plan splits "
                "other modules only. Use GrowingCache."
            )
        self.exchanged, self.reason = False, ""

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        super().observe(input_ids, attention_mask, position_ids)
        if self.holder is None and not self.offloading:
            for layer in self.layers:
                if layer.window is not None:
                    layer.drop_unseen() if input_ids.shape[1] == 1 else layer.fit_slots(input_ids.shape[1])

    def steps_matter(self) -> bool:
        return any(layer.window is not None for layer in self.source_layers)

    @property
    def dropped(self) -> int:
        """How many of the first slots are lost in some layer: the model's windows no longer reach back to them."""
        return max(layer.dropped for layer in self.source_layers)

    def make_layer(self, layer_idx: int) -> SplicedLayer:
        return SplicedLayer()

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Fill the cache with all tokens of a prompt but the last, as `generate` does.

        Args:
            input_ids: (batch, tokens), the tokens that follow those in the cache.
            attention_mask: (batch, tokens seen before + new tokens), 1 for real tokens; or None.

        Returns:
            How many tokens the cache has seen. Go on with `model(input_ids[:, -1:], past_key_values=cache)` or `generate(input_ids, ...)`.
        """
        if self.holder is not None:
            raise UnsupportedError(
                "prefill: with decode_with, the pass that answers the prompt hands it over. Pass the prompt to generate."
            )
        if input_ids.ndim != 2 or input_ids.shape[1] < 2:
            raise ConfigError.of("input_ids", "at least two tokens a row, (batch, tokens)", tuple(input_ids.shape))
        with torch.no_grad():
            self.read_prompt(input_ids, attention_mask)
        return self.seen

    def read_prompt(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        """Have the model read all tokens of a prompt but the last."""
        self.read(input_ids[:, :-1], None if attention_mask is None else attention_mask[:, :-1])

    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
        """Run the model, with the positions that `generate` passes for a padded batch."""
        arguments = compat.cache_kwargs(self.model, self)
        if attention_mask is not None and "position_ids" in compat.parameter_names(type(self.model)):
            arguments["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -input_ids.shape[1] :]
        self.model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=1, **arguments)

    def prompt_left(self, refusal: Refusal) -> None:
        self.reason = str(refusal)

    def take(self, slots: int) -> int:
        """Count the first slots as seen, now that they hold the prompt's tokens; return how many of them are new."""
        before = self.seen
        for layer in self.layers:
            layer.seen = slots
        return slots - before

    def abandon_prefill(self, seen: int) -> None:
        # Passes write behind the seen slots, so these are unchanged.
        for layer in self.layers:
            if seen == 0:
                layer.reset()
            layer.seen = seen
        self.log.crop(seen)
        self.stage = Stage.OPEN

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.source_layers:
            layer.require_croppable(tokens_to_remove)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.exchanged, self.reason = False, ""

    def pick_rows(self, of_layer: Callable[[Any], None], pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().pick_rows(of_layer, pick)
        self.exchanged = True


class PlainCache(SplicingCache):
    """A cache that no hook tells of prompts."""

    hooks_forward = False
