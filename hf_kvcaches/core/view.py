"""How a cache layer answers queries itself: the view that its `update` returns, and the attention function that asks it.

From `update` to this thread's next attention call, the model's config names the function registered here, which first restores the name.
So the model makes masks for its own implementation, and plain tensors never get here. A view that is never asked, because of an interrupt,
restores the name when it is freed, or when its thread attends again.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import EXPANSION
from hf_kvcaches.errors import ConfigError, Refusal, UnsupportedError

NAME = "hf_kvcaches"
# Layers whose memory has a bound of its own, so that a cache which bounds or compresses the others may leave them to transformers.
_BOUNDED = frozenset({"sliding_attention", "chunked_attention", "hybrid_sliding", "linear_attention", "conv", "dummy"})
# A view may be freed by the garbage collector while its thread holds the lock.
_lock = threading.RLock()


class _Switched(str):
    """This package's name in a config, with the implementation to restore; `config.json` never has it."""

    previous: str
    explicit: bool  # put there by `enable`, so that only `disable` removes it
    waiting: dict[int, int]  # threads between their `update` and their attention call, with the id of the view

    def __new__(cls, previous: str, explicit: bool) -> _Switched:
        self = super().__new__(cls, NAME)
        self.previous, self.explicit, self.waiting = previous, explicit, {}
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Switched, (self.previous, True)) if self.explicit else (str, (self.previous,))


class LayerView(ABC):
    """What a cache layer returns from `update` when it answers the queries itself. Used as a tensor it raises."""

    cache_name = "the cache"  # for errors
    configs: Sequence[PreTrainedConfig] = ()  # those that are switched until the view is asked
    bound = False  # whether a call by a module with another config is an error
    restores: tuple[tuple[PreTrainedConfig, str], ...] | None = None  # what a compiled graph has switched, and the names before
    _thread: int | None = None  # that waits
    # Called when the queries are answered, with the view, the model's attention module, the queries and the options of the call.
    afterwards: Callable[[Any, nn.Module, Tensor, dict[str, Any]], None] | None = None

    @abstractmethod
    def attend(self, module: nn.Module, query: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Store the new tokens, unless `update` did; return the attention of the queries, (batch, queries, heads, head_dim), and weights.

        Args:
            query: Rotated, (batch, heads, queries, head_dim).
            mask: As the model made it for its own implementation.
            **kwargs: `scaling`, `softcap` and whatever else the model gives its attention function.
        """

    def restore(self) -> None:
        """Restore the attention of the configs that no other thread waits for."""
        # An interrupt may come between any two lines: until all is done, `__del__` does it again.
        if (thread := self._thread) is not None:
            with _lock:
                for config in self.configs:
                    name = vars(config).get(compat.ATTENTION_NAME)
                    if isinstance(name, _Switched) and name.waiting.get(thread) == id(self):
                        if len(name.waiting) == 1 and not name.explicit:
                            vars(config)[compat.ATTENTION_NAME] = name.previous
                        del name.waiting[thread]
            self._thread = None

    __del__ = restore

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._refusal(repr(name))

    def __getitem__(self, index: Any) -> Any:
        raise self._refusal("a slice")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = (item for arg in (*args, *(kwargs or {}).values()) for item in (arg if isinstance(arg, list | tuple) else [arg]))
        raise next(item for item in arguments if isinstance(item, cls))._refusal(getattr(function, "__name__", str(function)))

    def _refusal(self, what: str) -> UnsupportedError:
        self.restore()
        return UnsupportedError(
            f"The model asks its own attention for {what} of the keys or values that {self.cache_name} returns. Either it computes "
            "with keys and values outside of transformers' AttentionInterface, and needs a cache that returns plain tensors; or the cache "
            "was built without this model: build it with the model, or call hf_kvcaches.enable(model)."
        )


def answer_next(view: LayerView, configs: Sequence[PreTrainedConfig], bound: bool) -> None:
    """Have this thread's next attention call ask a view; its modules look up their implementation in the configs."""
    if torch.compiler.is_compiling():  # a graph knows neither threads nor interrupts
        names = [(config, vars(config).get(compat.ATTENTION_NAME)) for config in configs]
        view.restores = tuple((config, name or "eager") for config, name in names if name != NAME)
        for config, _ in view.restores:
            vars(config)[compat.ATTENTION_NAME] = NAME
        return
    view.configs, view.bound, view._thread = configs, bound, threading.get_ident()
    with _lock:
        for config in configs:
            found = name = vars(config).get(compat.ATTENTION_NAME)
            if not isinstance(name, _Switched):
                name = _Switched("eager" if name in (None, NAME) else name, explicit=name == NAME)
            name.waiting[view._thread] = id(view)
            if name is not found:  # last, so that an interrupt finds the view waiting
                vars(config)[compat.ATTENTION_NAME] = name


def _attend(module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    # Plain tensors are those of other threads' passes, and of models that `enable` has switched.
    if not isinstance(key, LayerView):
        if not torch.compiler.is_compiling():
            _restore_interrupted(module.config)
        return previous_attention(module, query, key, value, attention_mask, **kwargs)
    if torch.compiler.is_compiling():
        if key.restores is None:
            return _attend_uncompiled(module, query, key, value, attention_mask, **kwargs)
        for config, name in key.restores:
            vars(config)[compat.ATTENTION_NAME] = name
    else:
        key.restore()
        if key.bound and id(module.config) not in map(id, key.configs):
            hint = "Build a cache with this model, or pass it to the model that it was built with."
            raise ConfigError(f"The cache was built with another model than the one that it is used with. {hint}")
    output, weights = key.attend(module, query, attention_mask, **kwargs)
    if key.afterwards is not None:
        key.afterwards(key, module, query, kwargs)
    return output.contiguous(), weights  # some models take a view of it


_attend_uncompiled = torch.compiler.disable(_attend, reason="the cache that answers the queries is not compileable")


def _restore_interrupted(config: Any) -> None:
    """Restore what a view of this thread has left switched, which something still holds on to: an interrupt's traceback."""
    name, thread = vars(config).get(compat.ATTENTION_NAME), threading.get_ident()
    if isinstance(name, _Switched) and thread in name.waiting:
        with _lock:  # in the order of `LayerView.restore`, for the next interrupt
            if len(name.waiting) == 1 and not name.explicit:
                vars(config)[compat.ATTENTION_NAME] = name.previous
            del name.waiting[thread]


def _make_mask(**arguments: Any) -> Any:
    """The mask of the implementation behind ours, for models that `enable` has switched, and for other threads' passes."""
    tokens, start, padding = arguments["q_length"], arguments["q_offset"], arguments.get("attention_mask")
    if torch.compiler.is_compiling() and isinstance(start, Tensor) and arguments["kv_length"] == tokens:
        # A cache that answers inside of a graph asks only which new tokens are real: a mask over all tokens seen grows with each step.
        if padding is None:
            return None
        columns = torch.arange(tokens, device=padding.device) + start.to(padding.device)
        return padding.index_select(1, columns)[:, None, None].bool()
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(previous_implementation(arguments["config"]))
    return None if make is None else make(**arguments)


def require_plain_decoder(model: PreTrainedModel, what: str) -> None:
    """Refuse a model with an encoder, and one that runs layers in loops; `what` is the subject of the message."""
    name, why = type(model).__name__, ""
    if model.config.is_encoder_decoder:
        why = f"a decoder-only model, and {name} is an encoder-decoder, whose cross-attention keeps keys of another text"
    elif getattr(compat.decoder_config(model.config), "n_recurrent_loops", 1) > 1:
        why = f"a model that runs each layer once, and {name} runs some in loops, with keys of each loop"
    if why:
        raise UnsupportedError(f"{what} needs {why}. Use GrowingCache, or leave past_key_values out.")


def require_answering(model: PreTrainedModel, what: str, *, latents: bool = False) -> None:
    """Refuse a model whose queries a cache can't answer; with `latents` it can those of multi-head latent attention."""
    require_plain_decoder(model, what)
    if reason := why_not_answering(model, latents=latents):
        raise UnsupportedError(f"{what} needs a cache that answers the model's queries, which is not possible: {reason}. Use DynamicCache.")


def why_not_answering(model: PreTrainedModel, *, latents: bool = False) -> Refusal | None:
    """Why a cache can't answer a model's queries in place of its attention, as far as is known before a pass."""
    name, config = type(model).__name__, compat.decoder_config(model.config)
    unbounded = sorted({kind for kind, _ in compat.layer_plan(config)} - _BOUNDED - {"full_attention"})
    shares = getattr(config, "num_kv_shared_layers", None) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ())
    expands = not latents and any(hasattr(module, EXPANSION) for module in compat.modules_of(model.get_decoder()))
    reasons = (
        (not compat.can_switch_attention(model), "computes attention itself instead of looking it up in transformers' AttentionInterface"),
        (unbounded, f"has layers of the types {unbounded}, which keep tokens in a form of their own"),
        (shares, "has layers that attend to the keys of other layers"),
        (getattr(config, "cross_attention_layers", None), "has layers of cross-attention in its cache"),
        (expands or compat.is_family(config, "computes_with_cached_keys"), "computes with keys and values after they are in the cache"),
    )
    return next((Refusal(f"{name} {reason}") for applies, reason in reasons if applies), None)


def previous_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention over plain tensors by the model's own implementation."""
    attend: Callable[..., Any] = compat.attention_function(previous_implementation(module.config), module)
    return attend(module, query, key, value, mask, **kwargs)


def previous_implementation(config: PreTrainedConfig) -> str:
    """The attention implementation behind ours, or the one in force where ours is not."""
    name = vars(config).get(compat.ATTENTION_NAME)
    if isinstance(name, _Switched):
        return name.previous
    return "eager" if name in (None, NAME) else name  # ours may be set by its bare name


def is_enabled(config: PreTrainedConfig) -> bool:
    """Whether the model of that config was switched to our attention by `enable` or by its name."""
    name = vars(config).get(compat.ATTENTION_NAME)
    return bool(name == NAME) and getattr(name, "explicit", True)


def enable(model: Any) -> None:
    """Switch a model, also inside a PEFT wrapper, to this package's attention for good.

    Only `torch.compile` and caches built without the model need it.
    """
    base = compat.base_model(model)
    if not compat.can_switch_attention(base):
        raise UnsupportedError(
            f"model: {type(base).__name__} computes attention itself instead of looking it up in transformers' AttentionInterface, "
            "so a cache can't answer its queries. Use a cache that returns plain tensors (GrowingCache), or another model."
        )
    for config in _configs_inside(base):
        if not is_enabled(config):
            vars(config)[compat.ATTENTION_NAME] = _Switched(previous_implementation(config), True)


def disable(model: Any) -> None:
    """Give a model the attention implementation back that it had before `enable`."""
    for config in _configs_inside(compat.base_model(model)):
        if is_enabled(config):
            vars(config)[compat.ATTENTION_NAME] = previous_implementation(config)


def _configs_inside(model: PreTrainedModel) -> list[PreTrainedConfig]:
    models = (module for module in compat.modules_of(model) if isinstance(module, PreTrainedModel))
    return [module.config for module in models if compat.can_switch_attention(module)]


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _make_mask)
