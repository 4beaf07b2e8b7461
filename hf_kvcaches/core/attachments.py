"""What is attached to a model for its caches, such as a hook: once, and for as long as any of these caches lives."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from transformers import PreTrainedModel

from hf_kvcaches import compat

# A cache may be freed by another thread, or by the garbage collector in the middle of `add`.
_lock = threading.RLock()


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
