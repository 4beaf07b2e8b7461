"""`per_call`: a new cache for each call of `generate`, through transformers' `custom_generate`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import Cache, EncoderDecoderCache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.errors import ConfigError, with_article


class PerCall(compat.MarkedCache):
    """What `per_call` returns: a recipe of a cache, and the `custom_generate` that decodes with a new one. Threads may share it."""

    def __init__(self, cache_class: type[KVCache], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.cache_class, self.args, self.options = cache_class, args, options

    def new_cache(self, model: Any) -> KVCache:
        """Return a cache as each call of `generate` gets one."""

        def fresh(value: Any) -> Any:
            return value.new_cache(model) if isinstance(value, PerCall) else value

        return self.cache_class(model, *map(fresh, self.args), **{name: fresh(value) for name, value in self.options.items()})

    def __call__(self, model: PreTrainedModel, input_ids: torch.Tensor, /, **arguments: Any) -> Any:
        """Decode as `generate`, which prepared the arguments, would with a new cache passed as `past_key_values`."""
        default = compat.cache_of(arguments)
        implementation = getattr(arguments.get("generation_config"), "cache_implementation", None)
        beside = f"beside custom_generate=per_call({self.cache_class.__name__}, ...), which makes a new cache for each call"
        if compat.is_callers_cache(default):
            hint = "Leave one of them out: custom_generate to go on with your cache, past_key_values for a new one."
            raise ConfigError.of("past_key_values", f"none {beside}", type(default).__name__, hint)
        if implementation is not None:
            hint = "Leave it out; where it is the model's default, set model.generation_config.cache_implementation = None."
            raise ConfigError.of("cache_implementation", f"none {beside}", implementation, hint)
        if not arguments.get("use_cache", True):
            raise ConfigError.of("use_cache", f"True {beside}", False, "Leave one of them out.")
        # PEFT's wrapper with a learned prompt prepares the model's inputs meanwhile.
        owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
        cache = self.new_cache(owner if compat.has_learned_prompt(owner) else model)
        method, unshared = compat.begin_decoding(model, cache)
        both = EncoderDecoderCache(cache, default.cross_attention_cache) if isinstance(default, EncoderDecoderCache) else cache
        return method(input_ids, **unshared | arguments | {compat.GENERATE_CACHE: both})

    def generate_begins(self) -> None:
        """Refuse to be passed as `past_key_values`."""
        raise ConfigError.of("past_key_values", "a cache", self, "Pass what per_call returns as custom_generate.")

    def __repr__(self) -> str:
        options = (f"{name}={value!r}" for name, value in self.options.items())
        return f"per_call({', '.join((self.cache_class.__name__, *map(repr, self.args), *options))})"


def per_call(cache_class: type[KVCache], /, *args: Any, **options: Any) -> PerCall:
    """A new cache for each call of `generate`: pass what this returns as `custom_generate`.

    `model.generate(**inputs, custom_generate=per_call(EquipCache, budget=512))` gives the text that
    `model.generate(**inputs, past_key_values=EquipCache(model, budget=512))` gives. A pipeline takes it, too, with a list of prompts. With
    `return_dict_in_generate=True` the cache is in the output, as `past_key_values`; else it is freed when the call ends.

    Args:
        cache_class: `EquipCache`, `SegmentReuseCache` or another.
        *args: What its constructor takes behind the model. Stores, libraries, codecs and policies are shared by all calls.
        **options: Its keyword arguments. What is a `per_call(...)` itself, as `decode_with` may be, is made anew for each call.
    """
    if not (isinstance(cache_class, type) and issubclass(cache_class, KVCache)):
        got = repr(cache_class) if isinstance(cache_class, type) else with_article(type(cache_class).__name__)
        example = type(cache_class).__name__ if isinstance(cache_class, KVCache) else "EquipCache"
        raise ConfigError(
            f"cache_class: expected a class of this package's caches, got {got}. Pass the class and its options: per_call({example}, ...)."
        )
    kind = cache_class.__name__
    signature = inspect.signature(cache_class)
    try:
        named = signature.bind(None, *args, **options).arguments
    except TypeError as error:
        expected = f"what {kind} takes behind the model ({', '.join([*signature.parameters][1:])})"
        raise ConfigError(f"options: expected {expected}: {error}.") from None
    for name, value in named.items():
        given = type(value).__name__
        if isinstance(value, PreTrainedModel):
            raise ConfigError.of(name, "no model, which comes from generate", given, f"Leave it out: per_call({kind}, ...).")
        if isinstance(value, Cache):
            raise ConfigError.of(name, "no cache, which would serve a single call", given, f"Pass per_call({given}, ...) in its place.")
    return PerCall(cache_class, args, options)
