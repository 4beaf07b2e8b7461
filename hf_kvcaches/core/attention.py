"""The registered attention `hf_kvcaches`: how a cache layer answers queries itself.

`update` of a layer may return a `LayerView` in place of keys and values. The cache then switches the model's attention to the function
registered here (`answer_next`), and that function switches it back before it does anything else. So a model carries another attention
name between the end of `update` and the beginning of the attention function, and at no other time: masks are made by the model, for its
own implementation, and constructing a cache changes nothing about the model. Where an interrupt comes in between, the attention is switched
back when the view is freed with the frames of the pass.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError, UnsupportedError

NAME = "hf_kvcaches"


class _Switched(str):
    """The attention's name in a config, with the implementation to restore.

    A config's attention name is copied and pickled with the model and never written to `config.json`; so is what this object remembers.

    Args:
        explicit: Whether `enable` put it there, so that only `disable` takes it away.
    """

    previous: str
    explicit: bool
    waiting: set[int]

    def __new__(cls, previous: str, explicit: bool) -> _Switched:
        self = super().__new__(cls, NAME)
        self.previous, self.explicit = previous, explicit
        # Threads between their `update` and their attention call.
        self.waiting = set()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Switched, (self.previous, True)) if self.explicit else (str, (self.previous,))


class LayerView(ABC):
    """What a cache layer returns from `update` when it answers the queries itself.

    Attributes:
        in_graph: Whether a compiled graph made it.
        restores: In a compiled graph, the configs that were switched for this view and the names to give back to them.
    """

    in_graph: bool = False
    restores: tuple[tuple[PreTrainedConfig, str], ...] = ()

    @abstractmethod
    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of `query` over what the layer holds.

        Args:
            query: Rotated queries, (batch, heads, queries, head_dim).
            mask: The mask that the model made for its own implementation.
            **kwargs: `scaling`, `dropout`, `softcap` and whatever else the model gives its attention function.

        Returns:
            The output, (batch, queries, heads, head_dim), and the weights or None.
        """


class _Window:
    """The time between `update` and the attention call, in one thread.

    Args:
        configs: Those that the thread has switched.
        bound: Whether they are those of the model that the cache was built with.
    """

    def __init__(self, configs: Sequence[PreTrainedConfig], bound: bool, view: LayerView) -> None:
        self.configs, self.bound = configs, bound
        self._thread = threading.get_ident()
        self._freed = weakref.ref(view, self.close)

    def open(self) -> None:
        """Switch the configs."""
        for config in self.configs:
            with _lock:
                name = compat.attention_name(config)
                if not isinstance(name, _Switched):
                    name = _Switched(previous_implementation(config), explicit=name == NAME)
                    compat.set_attention_name(config, name)
                name.waiting.add(self._thread)

    def close(self, _: Any = None) -> None:
        """Switch the configs back that no other thread waits for."""
        for config in self.configs:
            with _lock:
                name = compat.attention_name(config)
                if isinstance(name, _Switched):
                    name.waiting.discard(self._thread)
                    if not name.waiting and not name.explicit:
                        compat.set_attention_name(config, name.previous)


class _Windows(threading.local):
    """The window that a thread has open."""

    current: _Window | None = None


_windows = _Windows()
# A view may be freed, and its window closed, while the thread opens another.
_lock = threading.RLock()


def answer_next(view: LayerView, configs: Sequence[PreTrainedConfig], bound: bool) -> None:
    """Switch the attention for this thread's next attention call.

    Args:
        view: What is on its way to that call.
        bound: Whether a call by a module with another config is an error.
    """
    close_window()  # left open where an interrupt came between `update` and the attention call, and something still has its view
    window = _windows.current = _Window(configs, bound, view)
    window.open()


def answer_in_graph(view: LayerView, configs: Sequence[PreTrainedConfig]) -> None:
    """`answer_next` inside of a compiled graph, which knows neither threads nor interrupts."""
    view.in_graph = True
    names = [(config, compat.attention_name(config)) for config in configs]
    view.restores = tuple((config, name or "eager") for config, name in names if name != NAME)
    for config, _ in view.restores:
        compat.set_attention_name(config, NAME)


def close_window() -> _Window | None:
    """Switch back what this thread has switched with `answer_next`, and return the window that was open."""
    window, _windows.current = _windows.current, None
    if window is not None:
        window.close()
    return window


def _make_mask(**arguments: Any) -> Any:
    """The mask of the implementation behind ours, for models that `enable` has switched, and for other threads' passes."""
    tokens, start, padding = arguments["q_length"], arguments["q_offset"], arguments.get("attention_mask")
    if torch.compiler.is_compiling() and isinstance(start, torch.Tensor) and arguments["kv_length"] == tokens:
        # A cache that answers inside of a graph asks only which new tokens are real: a mask over all tokens seen grows with each step.
        if padding is None:
            return None
        columns = torch.arange(tokens, device=padding.device) + start.to(padding.device)
        return padding.index_select(1, columns)[:, None, None].bool()
    make = compat.mask_function(previous_implementation(arguments["config"]))
    return None if make is None else make(**arguments)


def _attend(
    module: nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # The first question is much the cheaper one, and asked in every layer of every step.
    if type(key) is torch.Tensor or not isinstance(key, LayerView):
        return previous_attention(module, query, key, value, attention_mask, **kwargs)
    if torch.compiler.is_compiling():
        if not key.in_graph:
            return _attend_uncompiled(module, query, key, value, attention_mask, **kwargs)
        for config, name in key.restores:
            compat.set_attention_name(config, name)
    else:
        window = close_window()
        if window is not None and window.bound and all(config is not module.config for config in window.configs):
            raise ConfigError(
                "The cache was built with another model than the one that it is used with. Build a cache with this model, or pass it to "
                "the model that it was built with."
            )
    output, weights = key.attend(module, query, attention_mask, **kwargs)
    return output.contiguous(), weights  # some models take a view of it


_attend_uncompiled = torch.compiler.disable(_attend, reason="the cache that answers the queries is not compileable")


def previous_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over plain tensors by the model's own implementation.

    Args:
        query: (batch, heads, queries, head_dim).
        key: (batch, kv_heads, keys, head_dim).
    """
    function = compat.attention_function(previous_implementation(module.config), module)
    result: tuple[torch.Tensor, torch.Tensor | None] = function(module, query, key, value, mask, **kwargs)
    return result


def previous_implementation(config: PreTrainedConfig) -> str:
    """The attention implementation behind ours, or the one in force where ours is not."""
    name = compat.attention_name(config)
    if isinstance(name, _Switched):
        return name.previous
    return _fallback(config) if name == NAME else name or "eager"


def _fallback(config: PreTrainedConfig) -> str:
    """What stands behind our name where it was set by itself, as with attn_implementation="hf_kvcaches"."""
    # Softcapping is beyond sdpa, and so are the attention sinks of some families, which it would leave out without a word.
    return "eager" if getattr(config, "attn_logit_softcapping", None) or not compat.supports_sdpa(config) else "sdpa"


def is_enabled(config: PreTrainedConfig) -> bool:
    """Whether the model of that config was switched to our attention by `enable` or by its name."""
    name = compat.attention_name(config)
    return bool(name == NAME) and getattr(name, "explicit", True)


def enable(model: Any) -> None:
    """Switches a model to this package's attention for good. Only `torch.compile` and caches built without the model need it.

    Args:
        model: A transformers model, also inside a PEFT wrapper.
    """
    base = compat.base_model(model)
    if not compat.can_switch_attention(base):
        raise UnsupportedError(
            f"model: {type(base).__name__} computes attention itself instead of looking it up in transformers' AttentionInterface, "
            "so a cache can't answer its queries. Use a cache that returns plain tensors (GrowingCache), or another model."
        )
    for part in _models_inside(base):
        if compat.can_switch_attention(part) and not is_enabled(part.config):
            compat.set_attention_name(part.config, _Switched(previous_implementation(part.config), True))


def disable(model: Any) -> None:
    """Gives a model the attention implementation back that it had before `enable`.

    Args:
        model: A transformers model, also inside a PEFT wrapper.
    """
    for part in _models_inside(compat.base_model(model)):
        if is_enabled(part.config):
            compat.set_attention_name(part.config, previous_implementation(part.config))


def _models_inside(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model and the models that it is made of."""
    return [module for module in compat.modules_of(model) if isinstance(module, PreTrainedModel)]


compat.AttentionInterface.register(NAME, _attend)
compat.AttentionMaskInterface.register(NAME, _make_mask)
