"""The base of caches that are sources: they get a prompt in from somewhere, and may hand it to a holder."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_kvcaches.core import attention
from hf_kvcaches.core.adopting import AdoptingCache, LastQueries, first_position
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.calls import Call
from hf_kvcaches.core.chunks import ChunkView
from hf_kvcaches.core.files import Content
from hf_kvcaches.core.growing import GrowingLayer
from hf_kvcaches.core.history import History
from hf_kvcaches.core.rotation import Rotation, rotation_of
from hf_kvcaches.core.save import CacheCodec
from hf_kvcaches.errors import ConfigError, UnsupportedError


class SourceCache(KVCache):
    """Fills in prompts, and keeps every token; or hands the prompt to a holder, once the model has answered it from exact keys.

    The pass that answers the prompt hands over layer by layer: as soon as a layer's attention is computed, the holder's layer takes its
    place, and its buffers are freed. From then on the cache *is* its holder: what is decoded, and further prompts of a chat, go there.

    Args:
        model: A transformers model.
        decode_with: The holder, a new cache of the same model; None to keep every token.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    takes_over_prefill = True
    own_layer_types = ("full_attention", "sliding_attention", "chunked_attention")

    def __init__(self, model: Any, *, decode_with: KVCache | None = None, offloading: bool = False) -> None:
        if offloading and decode_with is not None:
            raise UnsupportedError("offloading: with decode_with, only the prompt is in this cache. Give offloading to the holder.")
        super().__init__(model, offloading=offloading)
        self.rotation: Rotation = rotation_of(self.config)
        self.history = History(self.rotation.positions_matter)
        self.source_layers: tuple[GrowingLayer, ...] = tuple(self.layers)
        self.holder: AdoptingCache | None = None
        # Of the prompt that is handed over: (batch or 1, tokens), and (batch,) or None.
        self._positions: torch.Tensor | None = None
        self._padding: torch.Tensor | None = None
        if decode_with is not None:
            self._take_holder(decode_with)

    def _take_holder(self, holder: KVCache) -> None:
        if not isinstance(holder, AdoptingCache):
            raise ConfigError.of(
                "decode_with", "a GrowingCache, an EquipCache or a SubspaceCache", type(holder).__name__, "Or leave it out."
            )
        if holder.seen or holder.adopted:
            raise ConfigError(
                "decode_with: expected a new cache, got one that holds tokens or decodes for another cache. Make one for each."
            )
        if holder._model is None or holder._model() is not self.model:
            raise ConfigError("decode_with: expected a cache of the same model object. Make both with this model.")
        if why := holder.adopt_refused(holder.adopt_window or 0):
            raise UnsupportedError(f"decode_with: {why}")
        holder.adopted, self.holder = True, holder

    @property
    def handed_over(self) -> bool:
        """Whether the holder has the prompt."""
        return self.holder is not None and self.layers[-1] is not self.source_layers[-1]

    @property
    def why_inexact(self) -> str:
        return f"{type(self).__name__} does not say whether what it filled in is exact."

    @property
    def is_compileable(self) -> bool:
        """False: which layers answer is known in Python only."""
        return False

    @property
    def wants_prompts(self) -> bool:
        return not self.handed_over

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        super().observe(input_ids, attention_mask, position_ids)
        self.history.observe(input_ids, attention_mask, position_ids, self.seen)

    def leave_last(self, taken: int, tokens: int) -> int:
        if self.holder is None or not taken:
            return taken
        run_again = min(taken, max(0, (self.holder.adopt_window or 0) - (tokens - taken)))
        for layer in self.source_layers:
            layer.seen -= run_again
        return taken - run_again

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        holder = self.holder
        if holder is None or self.filling or layer_idx >= len(self.layers):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == 0:
            self.begin_hand_over(holder, key_states.shape[2])
        if self.layers[layer_idx] is not self.source_layers[layer_idx]:
            held: tuple[Any, Any] = holder.update(key_states, value_states, layer_idx, *args, **kwargs)
            return held
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self.answer_with(ChunkView(keys, values), layer_idx)

    def answer_with(self, view: ChunkView, layer_idx: int) -> tuple[Any, Any]:
        """Answers the queries of a layer with a view of all tokens; then a holder takes the layer over.

        Returns:
            What the model gets in the place of keys and of values.
        """
        answering = view if self.holder is None else _HandingOver(self, layer_idx, view)
        self.answer_next(answering)
        return answering, answering

    def begin_hand_over(self, holder: AdoptingCache, tokens: int) -> None:
        """Called before the pass that answers the prompt.

        Args:
            tokens: How many tokens the cache will have seen more behind it.
        """
        handed = {layer is not source for layer, source in zip(self.layers, self.source_layers, strict=True)}
        if len(handed) > 1:
            raise ConfigError(
                f"A pass through the model broke off while {type(self).__name__} handed its prompt to its holder. reset() it, and feed the "
                "whole text."
            )
        if self.handed_over:
            return
        unknown = torch.is_grad_enabled() or torch.compiler.is_compiling()
        padding = "Gradients are enabled, or the pass is compiled." if unknown else self.history.padding(self.seen + tokens)
        if isinstance(padding, str) and self.seen:
            raise UnsupportedError(f"decode_with: {type(self).__name__} can't hand over this prompt. {padding} Leave decode_with out.")
        if isinstance(padding, str):
            # There is nothing to hand over: the holder reads the prompt itself.
            self.layers[:] = holder.layers
            holder.take_provenance(self.provenance)
            return
        self._positions, self._padding = _positions(padding, self.seen + tokens, first_position(self))

    def hand_over(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, queries: LastQueries) -> None:
        """Puts a layer of the holder in the place of one that has answered the prompt.

        Args:
            layer_idx: The layer.
            keys: Of all tokens, (batch, kv_heads, tokens, head_dim).
            values: Like `keys`.
            queries: Of the pass.
        """
        assert self.holder is not None
        assert self._positions is not None
        self.holder.adopt_layer(layer_idx, keys, values, self._positions, self._padding, queries)
        self.layers[layer_idx] = self.holder.layers[layer_idx]
        self.release_layer(self.source_layers[layer_idx])
        if layer_idx == len(self.layers) - 1:
            self.holder.take_provenance(self.provenance)
            self.prompt_answered()

    def release_layer(self, layer: GrowingLayer) -> None:
        """Frees a layer whose tokens are with the holder.

        Args:
            layer: Of the source.
        """
        layer.reset()

    def prompt_answered(self) -> None:
        """Called when the holder has all layers."""

    def _report_fields(self) -> dict[str, Any]:
        fields = super()._report_fields()
        return fields if self.holder is None else fields | {"decode_with": self.holder.report()}

    def content(self, codec: CacheCodec | None, attention_mask: torch.Tensor | None) -> Content:
        """What is saved or sent: with `decode_with`, the holder, to be read with the holder's class."""
        if self.holder is None:
            return super().content(codec, attention_mask)
        if self.seen and not self.handed_over:
            raise UnsupportedError("save: the prompt is not yet with the holder. Let the model answer it first.")
        return self.holder.content(codec, attention_mask)

    def reset(self) -> None:
        self.layers[:] = self.source_layers
        super().reset()
        self.history.reset()
        self._positions = self._padding = None
        if self.holder is not None:
            self.holder.reset()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.history.crop(self.seen)

    def activate_past_recording(self) -> None:
        if self.holder is not None and not self.handed_over:
            raise UnsupportedError(
                "activate_past_recording: assisted decoding brings its first drafts with the prompt, which decode_with can't tell apart. "
                "Decode without an assistant, or leave decode_with out."
            )
        super().activate_past_recording()


class _HandingOver(attention.LayerView):
    """A view of all tokens of a layer, which a holder takes over once they have answered the prompt's queries."""

    def __init__(self, cache: SourceCache, layer_idx: int, view: ChunkView) -> None:
        self.cache, self.layer_idx, self.view = cache, layer_idx, view

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output = self.view.attend(module, query, mask, **kwargs)
        call, scaling = Call(module, mask, kwargs), kwargs.get("scaling")
        queries = LastQueries(query, query.shape[-1] ** -0.5 if scaling is None else scaling, call.softcap, call.sink_logits)
        self.cache.hand_over(self.layer_idx, self.view.keys, self.view.values, queries)
        return output


def _positions(padding: list[int], tokens: int, first: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The positions of a left-padded batch, (batch or 1, tokens), and its padding, (batch,), or None for none."""
    slots = torch.arange(tokens)[None]
    if not any(padding):
        return slots + first, None
    counts = torch.tensor(padding)
    return (slots - counts[:, None]).clamp_min(0) + first, counts
