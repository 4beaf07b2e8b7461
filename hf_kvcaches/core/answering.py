"""The base of caches whose layers answer queries themselves and can take tokens back."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from hf_kvcaches import compat
from hf_kvcaches.core.adopting import AdoptingCache
from hf_kvcaches.core.calls import NewTokens
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.passes import Pass, Passes
from hf_kvcaches.errors import UnsupportedError


class AnsweringCache(AdoptingCache):
    """A cache whose layers share a pass, and know which of its tokens are drafts.

    Attributes:
        pass_class: What the layers share during a forward pass.
        passes: The one that is going on.
    """

    needs_attention = True
    pass_class: ClassVar[type[Pass]] = Pass

    def __init__(self, model: Any, *, offloading: bool = False) -> None:
        self.passes: Passes[Any] = Passes(self.pass_class)
        self._hook: weakref.finalize[[], Self] | None = None
        self._answering: int | None = None
        self._last_layer = len(compat.layer_plan(compat.split_model(model)[1]))
        super().__init__(model, offloading=offloading)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if torch.compiler.is_compiling() and not self.is_compileable:
            return _update_uncompiled(self, key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx <= self._last_layer and not torch.compiler.is_compiling():
            self.passes.begin()
            if compat.records_attentions():
                raise UnsupportedError(
                    f"output_attentions: {type(self).__name__} computes attention over the tokens as it keeps them, and has no weights for "
                    "each token of the text. Leave output_attentions out, or use DynamicCache with attn_implementation='eager'."
                )
            lengths = {int(layer.get_seq_length()) for layer in self.layers if isinstance(layer, CacheLayerMixin)}
            if len(lengths) > 1:
                raise UnsupportedError(
                    f"The layers of this cache saw {sorted(lengths)} tokens: a forward pass or a crop failed on the way. "
                    "Call reset() and feed the text again."
                )
        self._last_layer = layer_idx
        if not self.offloading:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._answering = layer_idx
        try:
            held: tuple[Any, Any] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        finally:
            self._answering = None
        if isinstance(held[0], NewTokens):
            held[0].afterwards = partial(self.offload, layer_idx, self.only_non_sliding)
        return held

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        # transformers moves a layer away at the end of `update`, and this one has yet to answer the queries.
        if layer_idx != self._answering or not isinstance(self.layers[layer_idx], KVLayer):
            super().offload(layer_idx, only_non_sliding)

    def prompt_pass(self, positions: torch.Tensor, padding: torch.Tensor | None, tokens: int, device: torch.device) -> Pass:
        running: Pass = self.passes.of_prompt(positions, padding, tokens, device)
        return running

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        if self._hook is None and self._model is not None and (model := self._model()) is not None:
            self._hook = _watch_drafts(model, self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_hook": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        hook, self._hook = self._hook, None
        try:
            copied = super().__deepcopy__(memo)
        finally:
            self._hook = hook
        if hook is not None:
            copied.activate_past_recording()
        return copied


# Traced, such a cache would be compiled anew at nearly every step.
_update_uncompiled = torch.compiler.disable(AnsweringCache.update, reason="the cache's is_compileable is False")


def _watch_drafts(model: PreTrainedModel, cache: AnsweringCache) -> weakref.finalize[[], Any]:
    """Tells a cache at each forward pass how many of the tokens are drafts.

    Assisted generation feeds a prompt and the first drafts in one call, and only the number of logits it asks for tells them apart.
    """
    passes = cache.passes
    reference = weakref.ref(cache)

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = reference()
        if given is None or compat.cache_of(kwargs) is not given:
            return
        keep, ids = kwargs.get("logits_to_keep"), kwargs.get("input_ids")
        # Who wants the logits of a whole prompt does not draft.
        whole = isinstance(ids, torch.Tensor) and ids.shape[1] == keep and not given.seen
        passes.drafts = keep - 1 if isinstance(keep, int) and keep > 0 and not whole else None

    return weakref.finalize(cache, model.register_forward_pre_hook(before, with_kwargs=True).remove)
