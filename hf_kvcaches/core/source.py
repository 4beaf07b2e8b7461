"""Sources: caches that get the first tokens of a prompt in from elsewhere, and may hand the prompt to a holder.

One hook on a model's forward tells a source of each pass, and asks it for the first tokens of a prompt (`take_prefill`). The pass that
answers the prompt hands over layer by layer: as soon as a layer's attention is computed, the holder's layer takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.call import Call
from hf_kvcaches.core.decoder import ForwardHook
from hf_kvcaches.core.files import Content
from hf_kvcaches.core.holder import HolderCache, LastQueries, generated_positions
from hf_kvcaches.core.layers import GrowingLayer
from hf_kvcaches.core.rope import Rotation, rotation_of
from hf_kvcaches.core.token_log import TokenLog, not_continued
from hf_kvcaches.core.view import LayerView, previous_attention, require_answering, require_plain_decoder
from hf_kvcaches.errors import ConfigError, Refusal, UnsupportedError

_TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids")  # a call with any other tensor is left to the model
_INSIDE = ("output_hidden_states", "output_attentions", "output_router_logits")  # of layers, which a source's own run would leave out


class Stage(Enum):
    """What a source does with its tokens."""

    OPEN = "keeps its tokens, and takes prompts"
    FILLING = "fills in a prompt, or broke off while it did, and could not undo it"
    HANDING_OVER = "gives its layers to its holder one by one, or broke off while it did"
    HANDED_OVER = "has given its tokens to its holder"


@dataclass(frozen=True)
class PrefillCall:
    """A prompt, or a chunk of one, on its way into the model."""

    model: PreTrainedModel
    input_ids: Tensor  # the new tokens, (batch, tokens)
    attention_mask: Tensor | None  # 1 where a token is real, (batch, tokens seen before + new ones), or None without padding
    position_ids: Tensor | None  # of the new tokens, (batch, tokens), or None where the model numbers them itself
    most: int  # how many of the first tokens a source may take: the caller wants the logits of the others


@dataclass(frozen=True)
class Remaining:
    """What the model has to run of a prompt, (batch, tokens); rows end with the prompt's last ones, as many as `adopt_window` or one."""

    input_ids: Tensor
    positions: Tensor


class TensorView(LayerView):
    """All keys and values of a layer, (batch, kv_heads, tokens, head_dim), which the model attends to as ever."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def attend(self, module: nn.Module, query: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return previous_attention(module, query, self.keys, self.values, mask, **kwargs)


class SourceCache(KVCache):
    """Fills in prompts, and keeps every token; or hands the prompt to a holder, once the model has answered it from exact keys.

    Args:
        model: A transformers model.
        decode_with: The holder, a new cache of the same model; None to keep every token.
        offloading: Keep all layers but the running one in CPU memory; needs CUDA.
    """

    # The pass over a `Remaining`, until its last layer has the tokens: then the cache has seen `total` tokens. Its
    # `write(layer, layer_idx, key_states, value_states)` returns the `TensorView` of a layer.
    sparse_pass: Any
    watches_steps: bool  # whether `observe` is told of the next decode step, which is else only logged
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
        self._positions: Tensor | None = None
        self._padding: Tensor | None = None
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

    def observe(self, input_ids: Tensor, attention_mask: Any, position_ids: Any) -> None:
        """Take the model's identity for a prompt, or a decode step where `watches_steps`, and log its tokens."""
        self.provenance.until = min(self.provenance.until, seen := self.seen)  # what was behind belongs to a pass that failed
        self.begin_pass(input_ids.shape[1])
        self.log.append(input_ids, seen, attention_mask, position_ids)
        self.watches_steps = input_ids.shape[1] > 1 or self.steps_matter()

    def steps_matter(self) -> bool:
        """Whether `observe` has to be told of the next decode step, because it stores the prompt or drops tokens then."""
        return False

    def take_prefill(self, call: PrefillCall) -> int | Remaining:
        """Fill in the first tokens of the call and return how many; or set `sparse_pass` and return what the model has to run."""
        raise NotImplementedError(f"{type(self).__name__} is asked for prompts and does not write take_prefill")

    def fill(self, call: PrefillCall) -> int | Remaining:
        """Have `take_prefill` take the first tokens of a prompt, or leave the cache as it was."""
        before = self.seen
        try:
            self.stage = Stage.FILLING
            taken: int | Remaining = self.take_prefill(call)
            count = 0 if isinstance(taken, Remaining) else taken
            if not 0 <= count <= call.most or self.seen != before + count:
                raise RuntimeError(f"take_prefill took {count} of {call.most} tokens, and the cache went from {before} to {self.seen}")
            if count and self.holder is not None:  # whose window of last queries the model runs again; None, for all, was refused
                again = min(count, max(0, (self.holder.adopt_window or 0) - (call.input_ids.shape[1] - count)))
                for layer in self.source_layers:
                    layer.seen -= again
                taken = count - again
            self.stage = Stage.OPEN
        except BaseException:
            self.abandon_prefill(before)
            raise
        return taken

    def prompt_left(self, refusal: Refusal) -> None:
        """Called with the reason why `take_prefill` is not asked for a pass of several tokens."""

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

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        holder, sparse = self.holder, self.sparse_pass
        if (holder is None and sparse is None) or self.stage is Stage.FILLING or layer_idx >= len(self.layers):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == 0 and holder is not None and self.stage is not Stage.HANDED_OVER:  # which it may be afterwards
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
            view.afterwards = partial(self._hand_over, holder, layer_idx)
        self.answer_next(view)
        return view, view

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length, layer_idx) if self.sparse_pass is None else (self.sparse_pass.total, 0)

    def _begin_hand_over(self, holder: HolderCache, total: int) -> None:
        """Begin the pass that answers the prompt, behind which the cache has seen `total` tokens."""
        if self.stage is Stage.HANDING_OVER:
            raise broke_off(self)
        unknown = torch.is_grad_enabled() or torch.compiler.is_compiling()
        padding = Refusal("Gradients are enabled, or the pass is compiled.") if unknown else self.log.padding(total)
        if isinstance(padding, Refusal):  # the holder reads it itself, if it is the first one
            if self.seen:
                raise UnsupportedError(f"decode_with: {type(self).__name__} can't hand over this prompt. {padding} Leave decode_with out.")
            self.layers[:] = holder.layers
            holder.provenance, self.stage = self.provenance, Stage.HANDED_OVER
            return
        self._padding = torch.tensor(padding) if any(padding) else None
        self._positions = generated_positions(self, self._padding, total)

    def _hand_over(self, holder: HolderCache, layer_idx: int, view: Any, module: nn.Module, query: Tensor, options: Any) -> None:
        """Put a layer of the holder in the place of one that has answered the prompt, with keys and values of all tokens."""
        assert self._positions is not None
        self.stage, call = Stage.HANDING_OVER, Call(module, None, options)
        queries = LastQueries(query, call.scaling, call.softcap, call.sink_logits)
        holder.adopt_layer(layer_idx, view.keys, view.values, self._positions, self._padding, queries)
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

    def content(self, codec: Any, attention_mask: Tensor | None) -> Content:
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


def _before_forward(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Have a `SourceCache` take the first tokens of a prompt; return the arguments for the others."""
    if args:
        kwargs = dict(zip(compat.parameter_names(type(model)), args, strict=False)) | kwargs
    # Not `compat.cache_of`: this is asked in every decode step.
    source = kwargs.get("past_key_values") if (cache := kwargs.get("cache")) is None else cache
    if source is None or source not in HOOK.caches.get(model, ()):
        return None
    if source.stage is Stage.FILLING or source.stage is Stage.HANDING_OVER:
        raise broke_off(source)
    if source.sparse_pass is not None:  # the last pass broke off
        source.sparse_pass = None
        source.abandon_prefill(source.seen)
    input_ids, mask, positions = kwargs.get("input_ids"), kwargs.get("attention_mask"), kwargs.get("position_ids")
    others = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _TOKEN_INPUTS]
    if others or input_ids is None:
        source.prompt_left(Refusal(f"The call brings {', '.join(others) or 'embeddings'}, and only token ids can be looked up."))
        return None
    handed_over, tokens = source.stage is Stage.HANDED_OVER, input_ids.shape[1]
    seen = source.seen if handed_over else source.layers[0].seen
    if not handed_over and seen != source.layers[-1].seen:
        raise broke_off(source)
    if seen and tokens == 0:
        raise not_continued(source, "a prompt that is not longer")
    if seen and mask is not None and mask.ndim == 2 and mask.shape[1] != seen + tokens:
        raise not_continued(source, f"{tokens} new tokens with an attention_mask of {mask.shape[1]}")
    if tokens == 1 and not source.watches_steps:
        source.log.append(input_ids, seen, mask, positions)
        return None
    source.observe(input_ids, mask, positions)
    if tokens == 1 or handed_over:
        return None
    if refusal := _why_left(model, kwargs, tokens):
        source.prompt_left(refusal)
        return None
    taken = source.fill(PrefillCall(model, input_ids, mask, positions, tokens - kwargs["logits_to_keep"]))
    if isinstance(taken, Remaining):
        axes = taken.positions if positions is None or positions.ndim == 2 else taken.positions.expand(len(positions), -1, -1)
        return (), kwargs | {"input_ids": taken.input_ids, "position_ids": axes}
    return (), kwargs | {name: value[..., taken:] for name in ("input_ids", "position_ids") if (value := kwargs.get(name)) is not None}


HOOK = ForwardHook(_before_forward)


def broke_off(source: Any) -> ConfigError:
    left = f"left the {type(source).__name__} with part of its tokens"
    return ConfigError(f"A pass through the model broke off and {left}. reset() it, and feed the whole text.")


def _why_left(model: PreTrainedModel, kwargs: dict[str, Any], tokens: int) -> Refusal | None:
    """Why the model runs all tokens of a pass itself, None where a source may take the first ones."""
    keep, mask = kwargs.get("logits_to_keep"), kwargs.get("attention_mask")
    inside = next((name for name in _INSIDE if kwargs.get(name) or getattr(model.config, name, False)), None)
    if inside is not None:
        return Refusal(f"{inside} asks for the insides of layers, which takes the passes of all tokens.")
    if not isinstance(keep, int) or not 0 < keep < tokens:
        return Refusal(f"The logits of all tokens are wanted (logits_to_keep={keep!r}), which takes their passes. Pass logits_to_keep=1.")
    if not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
        return Refusal("The attention mask is not one number for each token.")
    return None
