"""A cache, and its layers, whose tokens can be written in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.nn import functional

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.layers import GrowingLayer, append, capacity_for
from hf_kvcaches.core.parallel import is_tensor_parallel, shard_of
from hf_kvcaches.core.source import SourceCache, Stage
from hf_kvcaches.errors import ArtifactError, ConfigError, Refusal, UnsupportedError


class SplicedLayer(GrowingLayer):
    """Keys and values of all tokens, in buffers that stored spans are spliced into before the rest of a prompt is run.

    With a `window`, tokens that no later token sees are dropped at the first decode step. Before the next prompt, `fit_slots` makes the
    buffers as long as the text again, with zeros for the dropped tokens, so that slots are counted from the text's start.
    """

    counters: ClassVar[tuple[str, ...]] = (*GrowingLayer.counters, "dropped", "offset")
    window: int | None = None  # how many tokens the model's attention sees, its own included; None: all
    dropped: int = 0  # how many of the first tokens are lost
    offset: int = 0  # how many of these have no slot in the buffers: all of them or none
    arrived: torch.cuda.Event | None = None  # what stored tokens are written behind, until this stream waits for it

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Keys and values of all slots, (batch, kv_heads, capacity, head_dim); none before the first token."""
        return [buffer for buffer in (self.key_buffer, self.value_buffer) if buffer is not None]

    def replace_buffers(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put what a function makes of keys and of values in their places."""
        self.key_buffer, self.value_buffer = map(function, self.buffers)

    def arrive(self) -> None:
        """Make the current stream, not the CPU, wait for stored tokens that are on their way."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
            self.arrived = None

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        self.arrive()
        return super().owned_tensors()

    @property
    def kept(self) -> int:
        return self.seen - self.offset

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        visible = self.seen if self.window is None else min(self.seen, self.window - 1)
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
        keys, values = append(self.key_buffer, key_states, self.kept), append(self.value_buffer, value_states, self.kept)
        self.key_buffer, self.value_buffer = keys, values
        visible, _ = self.get_mask_sizes(key_states.shape[2])
        self.seen += key_states.shape[2]
        return keys.narrow(2, self.kept - visible, visible), values.narrow(2, self.kept - visible, visible)

    def drop_unseen(self) -> None:
        """Free the tokens that no later token sees, where that makes the buffers smaller or they are full."""
        if self.window is None or self.key_buffer is None or self.record_past:
            return
        last, slots = self.window - 1, self.key_buffer.shape[2]
        if self.kept <= last or (slots <= capacity_for(last) and self.kept < slots):
            return
        start, stop = self.kept - last, self.kept
        self.replace_buffers(lambda buffer: append(None, buffer[:, :, start:stop], 0))
        self.offset += start
        self.dropped = self.offset

    def fit_slots(self, tokens: int) -> None:
        """Make the buffers as long as the text, with room for some new tokens."""
        if self.offset:
            kept, behind = self.kept, capacity_for(self.seen + tokens) - self.seen
            self.replace_buffers(lambda held: functional.pad(held[:, :, :kept], (0, 0, self.offset, behind)))
            self.offset = 0

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.seen == 0:
            self.dropped = self.offset = 0

    def reset(self) -> None:
        super().reset()
        self.arrived = None

    def import_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        values = {"dropped": 0, "offset": 0} | values
        counts: list[Any] = [values.get(name) for name in ("offset", "dropped", "seen")]
        offset, dropped, _ = counts
        if not all(type(count) is int for count in counts) or sorted(counts) != counts or offset not in (0, dropped) or offset < 0:
            raise ArtifactError(f"The stored state of a {type(self).__name__} has dropped {dropped} tokens. Save the cache again.")
        super().import_state(tensors, values)

    def open(self, rows: int, total: int, keys: torch.Tensor, values: torch.Tensor, padding: int) -> None:
        """Make room for a prompt's tokens, the filler slot behind them, and some new tokens.

        `keys` and `values` have their heads (third last dimension), head_dim, dtype and device. The slots from `padding` on, but for the
        prompt's last one, are written before they are read.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        missing, sides = total + 1 - self.seen, list[torch.Tensor]()
        capacity = capacity_for(missing)
        for buffer, like in ((self.key_buffer, keys), (self.value_buffer, values)):
            if buffer is None:
                buffer = like.new_empty(rows, like.shape[-3], capacity, like.shape[-1])
                buffer[:, :, :padding].zero_()
                buffer[:, :, total - 1 :].zero_()
            else:
                buffer = append(buffer, like.new_zeros(rows, like.shape[-3], missing, like.shape[-1]), self.seen)
            sides.append(buffer)
        self.key_buffer, self.value_buffer = sides

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor, slots: torch.Tensor, total: int) -> Sequence[torch.Tensor]:
        """Write rotated tokens into slots of an open layer, (batch, tokens), and return keys and values of all; none counts as seen.

        Fillers, which no query sees, have the slot `total`.
        """
        self.arrive()
        keys, values = self.buffers
        rows, slots = torch.arange(len(slots), device=keys.device)[:, None], slots.to(keys.device)
        keys.transpose(1, 2)[rows, slots] = key_states.transpose(1, 2)
        values.transpose(1, 2)[rows, slots] = value_states.transpose(1, 2)
        return keys.narrow(2, 0, total), values.narrow(2, 0, total)


class SplicingCache(SourceCache):
    """Keeps every token, in buffers that stored tokens can be written into at any index. A subclass implements `take_prefill`."""

    reason: str = ""  # why the last prompt was neither looked up nor stored, as a sentence; "" where it was
    exchanged: bool = False  # whether rows were reordered, selected or repeated

    def __init__(self, model: Any, *, decode_with: KVCache | None = None, offloading: bool = False) -> None:
        super().__init__(model, decode_with=decode_with, offloading=offloading)
        foreign = sorted({kind for kind, _ in compat.layer_plan(self.config) if kind not in self.own_layer_types})
        for refused, why in (
            (foreign, f"layers of the types {foreign} keep no keys and values that could be reused"),
            (self.rotation.refused, self.rotation.why),
            (compat.is_family(self.config, "inserts_tokens"), "it inserts tokens before every text, which count in the cache"),
            (self.learned_prompt, "a learned prompt stands before every text, and is in no fingerprint"),
        ):
            if refused:
                raise UnsupportedError(f"model: {why}. Use DynamicCache.")
        if self._model is not None:
            decoder_layers(self.model)  # refuses models without decoder layers
        if self.holder is None:  # which takes all tokens of a layer
            for layer, (kind, plain) in zip(self.layers, compat.layer_plan(self.config), strict=True):
                if kind == "sliding_attention":
                    layer.window, layer.is_sliding = plain.sliding_window, True
        self.shard = shard_of(model)
        if self.shard is None and self._model is not None and is_tensor_parallel(self.model):
            raise UnsupportedError(
                f"model: {type(self).__name__} serves tensor parallelism that splits keys and values by head, and this model's plan splits "
                "other modules only. Use GrowingCache."
            )

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
        left = self.seen + int(tokens_to_remove)
        for layer in self.source_layers:
            if layer.dropped and layer.window is not None and 0 < left < layer.dropped + layer.window - 1:
                raise UnsupportedError(
                    f"crop: of the {left} tokens that would be left, layers with a window of {layer.window} have dropped some that the "
                    "next one sees. Use a new cache for the shorter text, or reset() this one."
                )
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
