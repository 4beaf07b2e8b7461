"""The parts of a model's decoder, and what is attached to a model for its caches: once, and for as long as one of them lives."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import UnsupportedError

# The method by which attention modules make keys and values of the latents that a cache returns.
EXPANSION = "expand_kv"
# A cache may be freed by another thread, or by the garbage collector in the middle of `Attachment.add`.
_lock = threading.RLock()


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, str, nn.ModuleList]:
    """Return the module that runs the decoder layers, the name of its list of layers, and the list, which is as long as the config says."""
    count = compat.decoder_config(model.config).num_hidden_layers
    for module in model.get_decoder().modules():
        for name, layers in module.named_children():
            listed = name in ("layers", "h", "blocks") and isinstance(layers, nn.ModuleList) and len(layers) == count
            # The encoder of an image or a text may have as many layers, and comes first; those know no index in a cache.
            if listed and any(hasattr(part, "layer_idx") for part in layers.modules()):
                return module, name, layers
    raise UnsupportedError(f"Found no list of {count} decoder layers in {type(model).__name__}. Use GrowingCache.")


def attention_module(layer: nn.Module) -> nn.Module:
    """Return the part of a decoder layer that makes keys and values."""
    for module in layer.modules():
        if module is not layer and hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
            return module
    raise UnsupportedError(f"Found no attention in a layer of the kind {type(layer).__name__}.")


def attention_configs(model: PreTrainedModel) -> tuple[PreTrainedConfig, ...]:
    """Return the configs in which a decoder's attention modules look up their implementation, each once."""
    modules = [module for module in compat.modules_of(model.get_decoder()) if hasattr(module, "layer_idx")]
    configs = {id(module.config): module.config for module in modules if isinstance(getattr(module, "config", None), PreTrainedConfig)}
    return tuple(configs.values())


class Attachment(ABC):
    """Holds on to neither models nor caches; `caches` has for each model those that it is attached for."""

    _all: ClassVar[list[Attachment]] = []

    def __init__(self) -> None:
        self.caches: weakref.WeakKeyDictionary[PreTrainedModel, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
        self._all.append(self)

    @abstractmethod
    def attach(self, model: PreTrainedModel) -> None:
        """Attach this to a model, unless it is."""

    @abstractmethod
    def detach(self, model: PreTrainedModel) -> None:
        """Take it away again."""

    def add(self, model: PreTrainedModel, cache: Any) -> None:
        """Attach this to a model for as long as a cache lives."""
        with _lock:
            caches = self.caches.setdefault(model, weakref.WeakSet())
            if cache not in caches:
                caches.add(cache)
                self.attach(model)  # last: nothing is detached while this cache is in the set
                weakref.finalize(cache, self._cache_freed, weakref.ref(model)).atexit = False

    @classmethod
    def add_copy(cls, model: PreTrainedModel, cache: Any, copied: Any) -> None:
        for attachment in cls._all:
            if cache in attachment.caches.get(model, ()):
                attachment.add(model, copied)

    def _cache_freed(self, reference: weakref.ref[PreTrainedModel]) -> None:
        with _lock:
            model = reference()
            if model is not None and not list(self.caches[model]):
                self.detach(model)


class ForwardHook(Attachment):
    """A hook as in `register_forward_pre_hook(hook, with_kwargs=True)`."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__()
        self.hook = hook

    def attach(self, model: PreTrainedModel) -> None:
        if self.hook not in compat.forward_hooks(model):
            model.register_forward_pre_hook(self.hook, with_kwargs=True)

    def detach(self, model: PreTrainedModel) -> None:
        compat.remove_pre_hook(model, self.hook)
