"""Refuses a prompt whose length says that it does not go on with what a cache holds.

`generate` takes it for granted that a prompt begins with the tokens in the cache: it cuts off as many as the cache has seen, and neither
the model nor the cache is shown them. A prompt that is no longer than that is cut to nothing, or to some or all of its tokens, which
would be answered behind the cache's text. What is left of it, its mask and its positions then contradict each other.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from hf_kvcaches.errors import ConfigError

if TYPE_CHECKING:
    from hf_kvcaches.core.cache import KVCache

# What removes the hook that waits for the next pass of a cache.
_waiting: weakref.WeakKeyDictionary[KVCache, weakref.finalize[[], KVCache]] = weakref.WeakKeyDictionary()


def check_next_pass(model: PreTrainedModel, cache: KVCache) -> None:
    """Checks the next pass of a model with a cache, before it runs, and no other one.

    Args:
        model: The model.
        cache: It holds tokens, and `generate` begins with it.
    """
    reference: weakref.ref[KVCache] = weakref.ref(cache)

    # Another thread's pass may call a hook that has just been removed, without its keyword arguments.
    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        waiting = reference()
        if waiting is None or kwargs is None or id(kwargs.get("past_key_values")) != id(waiting) or torch.compiler.is_compiling():
            return
        forget(waiting)
        require_continuing(waiting, kwargs)
        _require_positions_behind(waiting, kwargs)

    before.only_observes = True  # type: ignore[attr-defined]
    forget(cache)
    # Before the hook with which a cache takes over prompts.
    handle = model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    _waiting[cache] = weakref.finalize(cache, handle.remove)


def forget(cache: KVCache) -> None:
    """No longer checks the next pass of a cache.

    Args:
        cache: The cache.
    """
    if cache in _waiting:
        _waiting.pop(cache)()


def require_continuing(cache: KVCache, kwargs: dict[str, Any]) -> None:
    """Refuses a pass without new tokens, or with a mask that is not of the tokens seen and the new ones.

    Args:
        cache: The cache.
        kwargs: What the model is called with.
    """
    tokens, mask = _new_tokens(kwargs), kwargs.get("attention_mask")
    if tokens is None or not cache.seen:
        return
    if tokens == 0:
        raise refusal(cache, "a prompt that is not longer")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] != cache.seen + tokens:
        raise refusal(cache, f"{tokens} new tokens with an attention_mask of {mask.shape[1]}")


def _require_positions_behind(cache: KVCache, kwargs: dict[str, Any]) -> None:
    """Refuses new tokens that `generate`, which leaves out a mask without padding, numbered like tokens in the cache."""
    tokens, positions = _new_tokens(kwargs), kwargs.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or kwargs.get("attention_mask") is not None:
        return
    if positions.shape[1] != tokens or int(positions[:, -1].max()) < cache.seen:
        raise refusal(cache, "a prompt that is not longer")


def refusal(cache: KVCache, got: str) -> ConfigError:
    """The error for a prompt that does not go on with a cache.

    Args:
        cache: The cache.
        got: What came.
    """
    return ConfigError(
        f"input_ids: expected a prompt that begins with the {cache.seen} tokens that this {type(cache).__name__} has seen and goes on, "
        f"got {got}. Call reset() before another text, or make a new cache for it."
    )


def _new_tokens(kwargs: dict[str, Any]) -> int | None:
    """How many tokens a pass adds; None where it brings neither tokens nor embeddings by name."""
    new = next((kwargs[name] for name in ("inputs_embeds", "input_ids") if isinstance(kwargs.get(name), torch.Tensor)), None)
    return None if new is None or new.ndim < 2 else new.shape[1]
