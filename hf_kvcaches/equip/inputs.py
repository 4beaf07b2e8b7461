"""What a model's attention modules are called with, for policies that read it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from hf_kvcaches import compat

if TYPE_CHECKING:
    from hf_kvcaches.equip.cache import EquipCache

# Arguments with one entry for each new token.
_BY_TOKEN = ("hidden_states", "position_embeddings")


def watch_inputs(model: PreTrainedModel, cache: EquipCache) -> None:
    """Has a cache's layers shown what the model's attention modules are called with, for as long as the cache lives."""
    reference = weakref.ref(cache)

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        watching = reference()
        if watching is None or kwargs is None or not any(value is watching for value in kwargs.values()):
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        rest = {name: value for name, value in kwargs.items() if value is not watching}
        watching.layers[module.layer_idx].inputs = {**rest, "hidden_states": hidden}

    before.only_observes = True  # type: ignore[attr-defined]
    for layer in compat.decoder_layers(model)[2]:
        handle = compat.attention_module(layer).register_forward_pre_hook(before, with_kwargs=True)
        weakref.finalize(cache, handle.remove)


def part_of(inputs: Mapping[str, Any] | None, start: int, stop: int) -> Mapping[str, Any] | None:
    """The arguments for some of the new tokens."""
    if inputs is None:
        return None
    return {name: _part(value, start, stop) if name in _BY_TOKEN else value for name, value in inputs.items()}


def _part(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_part(entry, start, stop) for entry in value)
    return value[:, start:stop] if isinstance(value, torch.Tensor) else value
