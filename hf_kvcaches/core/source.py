"""Sources: caches that get the first tokens of a prompt in from elsewhere (see `prompt.py`), and may hand the prompt to a holder.

The pass that answers the prompt hands over layer by layer: as soon as a layer's attention is computed, the holder's layer takes its place.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.call import Call
from hf_kvcaches.core.files import Content
from hf_kvcaches.core.holder import HolderCache, LastQueries, generated_positions
from hf_kvcaches.core.layers import GrowingLayer
from hf_kvcaches.core.prompt import HOOK, PrefillCall, Remaining, Stage, broke_off
from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.core.rope import Rotation, rotation_of
from hf_kvcaches.core.save import CacheCodec
from hf_kvcaches.core.token_log import TokenLog
from hf_kvcaches.core.view import LayerView, previous_attention, require_answering, require_plain_decoder
from hf_kvcaches.errors import ConfigError, UnsupportedError


class TensorView(LayerView):
    """All keys and values of a layer, (batch, kv_heads, tokens, head_dim), which the model attends to as ever."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return previous_attention(module, query, self.keys, self.values, mask, **kwargs)


class SourceCache(KVCache):
    """Fills in prompts, and keeps every token; or hands the prompt to a holder, once the model has answered it from exact keys.

    Args:
        model: A transformers model.
        decode_with: The holder, a new cache of the same model; None to keep every token.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    stage: Stage
    sparse_pass: Any
    """The pass over a `Remaining`, until its last layer has the tokens. Behind it the cache has seen `total` tokens, and its
    `write(layer, layer_idx, key_states, value_states)` returns the `TensorView` of a layer."""
    watches_steps: bool
    """Whether `observe` is to be told of the next decode step, too, which is else only logged."""
    hooks_forward = True
    is_compileable = False  # which layers answer is known in Python only
    own_layer_types = ("full_attention", "sliding_attention", "chunked_attention")

    def __init__(self, model: Any, *, decode_with: KVCache | None = None, offloading: bool = False) -> None:
        if offloading and decode_with is not None:
            raise UnsupportedError("offloading: with decode_with, only the prompt is in this cache. Give offloading to the holder.")
        super().__init__(model, offloading=offloading)
        if self._model is not None:
            require_plain_decoder(self.model, type(self).__name__)
        self.rotation: Rotation = rotation_of(self.config)
        self.log = TokenLog(self.rotation.positions_matter)
        self.source_layers: tuple[GrowingLayer, ...] = tuple(self.layers)
        self.stage, self.sparse_pass, self.watches_steps = Stage.OPEN, None, True
        self.holder: HolderCache | None = None
        # Of the prompt that is handed over: (batch or 1, tokens), and (batch,) or None.
        self._positions: torch.Tensor | None = None
        self._padding: torch.Tensor | None = None
        if decode_with is not None:
            self._take_holder(decode_with)
        if self._model is not None and self.hooks_forward:
            HOOK.add(self.model, self)

    def _take_holder(self, holder: KVCache) -> None:
        if not isinstance(holder, HolderCache):
            expected = "a GrowingCache, an EquipCache or a SubspaceCache"
            raise ConfigError.of("decode_with", expected, type(holder).__name__, "Or leave it out.")
        if holder.seen or holder.adopted:
            raise ConfigError(
                "decode_with: expected a new cache, got one that holds tokens or decodes for another cache. Make one for each."
            )
        if holder.living_model is not self.model:
            raise ConfigError("decode_with: expected a cache of the same model object. Make both with this model.")
        require_answering(self.model, "decode_with")  # whatever the holder: handing over takes a view
        if why := holder.adopt_refused(with_queries=True):
            raise UnsupportedError(f"decode_with: {why}")
        holder.adopted, self.holder = True, holder

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        """Take the model's identity for the tokens of a pass, and log them; the arguments are the model's.

        Called before every prompt, and before decode steps where `watches_steps`; not for embeddings and images.
        """
        # Anew, because a pass that was told of before may have failed.
        self.provenance.until = min(self.provenance.until, seen := self.seen)
        self.begin_pass(input_ids.shape[1])
        self.log.append(input_ids, seen, attention_mask, position_ids)
        self.watches_steps = input_ids.shape[1] > 1 or self.steps_matter()

    def steps_matter(self) -> bool:
        """Whether `observe` has to be told of the next decode step, because it stores the prompt or drops tokens then."""
        return False

    def take_prefill(self, call: PrefillCall) -> int | Remaining:
        """Fill the cache with the first tokens of the call and return how many; the model runs the others.

        A source may return a `Remaining` instead and set `sparse_pass`: the whole prompt counts as seen when the last layer has its tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} is asked for prompts and does not write take_prefill")

    def prompt_left(self, refusal: Refusal) -> None:
        """Told why `take_prefill` is not asked for a pass of several tokens."""

    def leave_last(self, taken: int, tokens: int) -> int:
        """Forget those of the `taken` first tokens of a prompt whose queries the holder needs; return how many are left."""
        window = 0 if self.holder is None else self.holder.adopt_window or 0  # None, for all queries, was refused
        run_again = min(taken, max(0, window - (tokens - taken)))
        for layer in self.source_layers:
            layer.seen -= run_again
        return taken - run_again

    def abandon_prefill(self, seen: int) -> None:
        """Undo a `take_prefill` that failed, and open the stage; where a source does not, passes are refused until `reset`."""

    @property
    def seen(self) -> int:
        # The source's own layers all count; a holder may have some of transformers'.
        return int(self.layers[0].seen) if self.stage in (Stage.OPEN, Stage.FILLING) else super().seen

    @property
    def broken(self) -> bool:
        return self.stage in (Stage.FILLING, Stage.HANDING_OVER)

    @property
    def why_inexact(self) -> str:
        return f"{type(self).__name__} does not say whether what it filled in is exact."

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        holder, sparse = self.holder, self.sparse_pass
        plain = (holder is None and sparse is None) or self.stage is Stage.FILLING
        if plain or layer_idx >= len(self.layers):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == 0 and holder is not None and self.stage is not Stage.HANDED_OVER:
            # May end in `HANDED_OVER`.
            self._begin_hand_over(holder, self.seen + key_states.shape[2] if sparse is None else sparse.total)
        if holder is not None and self.stage is Stage.HANDED_OVER:
            return holder.update(key_states, value_states, layer_idx, *args, **kwargs)
        if sparse is None:
            view: LayerView = TensorView(*super().update(key_states, value_states, layer_idx, *args, **kwargs))
        else:
            view = sparse.write(self.source_layers[layer_idx], layer_idx, key_states, value_states)
            if layer_idx == len(self.source_layers) - 1:
                # All at once: where the pass breaks off before, no token counts as seen.
                self.sparse_pass = None
                for layer in self.source_layers:
                    layer.seen = sparse.total
        if holder is not None:
            view = _HandingOver(self, holder, layer_idx, view)
        self.answer_next(view)
        return view, view

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.sparse_pass is not None:
            return self.sparse_pass.total, 0
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def _begin_hand_over(self, holder: HolderCache, total: int) -> None:
        """Begin the pass that answers the prompt, behind which the cache has seen `total` tokens.

        A prompt that the log does not describe can't be handed over: the holder reads it itself, if it is the first one.
        """
        if self.stage is Stage.HANDING_OVER:
            raise broke_off(self)
        unknown = torch.is_grad_enabled() or torch.compiler.is_compiling()
        padding = Refusal("Gradients are enabled, or the pass is compiled.") if unknown else self.log.padding(total)
        if isinstance(padding, Refusal):
            if self.seen:
                raise UnsupportedError(f"decode_with: {type(self).__name__} can't hand over this prompt. {padding} Leave decode_with out.")
            self.layers[:] = holder.layers
            holder.provenance, self.stage = self.provenance, Stage.HANDED_OVER
            return
        self._padding = torch.tensor(padding) if any(padding) else None
        self._positions = generated_positions(self, self._padding, total)

    def hand_over(self, holder: HolderCache, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, queries: LastQueries) -> None:
        """Put a layer of the holder in the place of one that has answered the prompt, with keys and values of all tokens."""
        assert self._positions is not None
        self.stage = Stage.HANDING_OVER
        holder.adopt_layer(layer_idx, keys, values, self._positions, self._padding, queries)
        self.layers[layer_idx] = holder.layers[layer_idx]
        self.release_layer(self.source_layers[layer_idx])
        if layer_idx == len(self.layers) - 1:
            holder.provenance, self.stage = self.provenance, Stage.HANDED_OVER
            self.prompt_answered()

    def release_layer(self, layer: GrowingLayer) -> None:
        """Free a layer of the source whose tokens are with the holder; a subclass may keep it until `prompt_answered`."""
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
        if self.seen and self.stage is not Stage.HANDED_OVER:
            raise UnsupportedError("save: the prompt is not yet with the holder. Let the model answer it first.")
        return self.holder.content(codec, attention_mask)

    def reset(self) -> None:
        self.layers[:] = self.source_layers
        super().reset()
        self.stage, self.sparse_pass, self.watches_steps = Stage.OPEN, None, True
        self._positions = self._padding = None
        if self.holder is not None:
            self.holder.reset()

    def activate_past_recording(self) -> None:
        if self.holder is not None and self.stage is not Stage.HANDED_OVER:
            raise UnsupportedError(
                "activate_past_recording: assisted decoding brings its first drafts with the prompt, which decode_with can't tell apart. "
                "Decode without an assistant, or leave decode_with out."
            )
        super().activate_past_recording()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(self.rotation): self.rotation, id(self.sparse_pass): None}
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "sparse_pass": None}


class _HandingOver(LayerView):
    """A view of all tokens of a layer, which a holder takes over once they have answered the prompt's queries."""

    def __init__(self, cache: SourceCache, holder: HolderCache, layer_idx: int, view: Any) -> None:
        self.cache, self.holder, self.layer_idx, self.view = cache, holder, layer_idx, view

    def attend(self, module: nn.Module, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output: tuple[torch.Tensor, torch.Tensor | None] = self.view.attend(module, query, mask, **kwargs)
        call = Call(module, mask, kwargs)
        queries = LastQueries(query, call.scaling, call.softcap, call.sink_logits)
        self.cache.hand_over(self.holder, self.layer_idx, self.view.keys, self.view.values, queries)
        return output
