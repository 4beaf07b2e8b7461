"""What the model's attention modules are called with, which a cache's layers can't see: told to them by hooks, one for each module."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import Attachment, attention_module, decoder_layers
from hf_kvcaches.equip.slot_layer import ModuleCall, SlotLayer
from hf_kvcaches.errors import UnsupportedError


def _begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a cache before a pass whether that came without a mask, and refuse images where the cache moves tokens by one position.

    Models that read images give an image's tokens a position on each axis, and text the same one on all. Attention is called without
    them, so a cache layer can't tell the two apart.
    """
    cache = compat.cache_of(kwargs)
    if not hasattr(cache, "unmasked"):
        return
    cache.unmasked = len(args) < 2 and kwargs.get("attention_mask") is None
    ids = kwargs.get("position_ids") if cache.refuses_images and not torch.compiler.is_compiling() else None
    if ids is not None and ids.ndim == 3:
        axes = ids[-3:]  # before the three there may be the index in the text
        if not bool((axes == axes[:1]).all()):
            raise UnsupportedError(
                "position_ids: image tokens have a position for each axis, and this cache moves tokens by one. Pass positions='original'."
            )


def _tell(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a layer what its module is module_call before the module does."""
    cache = compat.cache_of(kwargs)
    layers = getattr(cache, "layers", ())
    layer = layers[module.layer_idx] if module.layer_idx < len(layers) else None
    if isinstance(layer, SlotLayer):
        inputs = None
        if layer.policy.reads_inputs:
            inputs = {name: value for name, value in kwargs.items() if not isinstance(value, Cache)}
            inputs["hidden_states"] = args[0] if args else kwargs["hidden_states"]
        mask = None if getattr(cache, "unmasked", False) else kwargs.get("attention_mask", False)
        layer.module_call = ModuleCall(module, mask, kwargs.get("position_ids"), inputs)


_begin.only_observes = _tell.only_observes = True  # type: ignore[attr-defined]


class _Telling(Attachment):
    """`_begin` before a decoder, `_tell` before each of its attention modules."""

    def attach(self, model: PreTrainedModel) -> None:
        for module, hook in _told(model):
            if hook not in compat.forward_hooks(module):
                module.register_forward_pre_hook(hook, with_kwargs=True)

    def detach(self, model: PreTrainedModel) -> None:
        for module, hook in _told(model):
            compat.remove_pre_hook(module, hook)


def _told(model: PreTrainedModel) -> list[tuple[Any, Any]]:
    """The modules that have a hook, with it: those that are found where a decoder usually has them."""
    told: list[tuple[Any, Any]] = [(model.get_decoder(), _begin)]
    with suppress(UnsupportedError):
        for layer in decoder_layers(model)[2]:
            with suppress(UnsupportedError):  # another mixer
                told.append((attention_module(layer), _tell))
    return told


TELLING = _Telling()
