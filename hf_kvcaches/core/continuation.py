"""A prompt must go on with what its cache holds.

`generate` cuts off as many tokens of a prompt as the cache has seen, unread: a prompt that begins otherwise would be answered behind the
cache's text. It asks `model.prepare_inputs_for_generation` for the inputs of each pass, the first time with the whole prompt. From its
first `generate` with a cache of this package on, and for as long as that cache lives, a model has a `Preparation` there, which compares the
prompt with the cache's log of tokens before anything runs, and writes down the tokens of each pass.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.attachments import Attachment
from hf_kvcaches.errors import ConfigError, UnsupportedError, with_article

METHOD = "prepare_inputs_for_generation"
_SEVERAL = -1  # in place of the thread of a cache that two threads use at once


class CacheArgument(compat.MarkedCache):
    """What `generate` takes as its cache, and neither as a class nor as `custom_generate`.

    A class of its own: next to a constructor, `__new__` would be the signature of the cache.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if "logits_processor" in kwargs and "generation_config" in kwargs:
            raise _not_custom_generate(cls, f"the class {cls.__name__}")
        return super().__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be `custom_generate`, which `generate` leaves out where it can't be called."""
        kind = with_article(type(self).__name__)
        raise _not_custom_generate(type(self), kind, f", or {kind} as past_key_values")


def _not_custom_generate(kind: type, got: str, other: str = "") -> ConfigError:
    """The error for a class, or a cache, passed as `custom_generate`."""
    recipe = f"per_call({kind.__name__}, ...)"
    return ConfigError(f"custom_generate: expected {recipe}, got {got}. Pass {recipe}{other}.")


class Preparation:
    """Stands in for a model's `prepare_inputs_for_generation`, which it calls; copies and pickles of the model have their own method."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self.original = vars(model).get(METHOD)  # PEFT's wrapper puts its method there; else None, and the class's method is called

    @property
    def __wrapped__(self) -> Any:  # `generate` reads the signature
        return self.original or _method_of_class(self._model())

    @property
    def __self__(self) -> Any:
        return self.__wrapped__.__self__

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare the inputs of a pass. Called by `generate`."""
        cache = compat.cache_of(kwargs)
        prepared = cache in _PREPARED.caches.get(self._model(), ())
        if prepared and cache in _BEGINNING:
            _BEGINNING.discard(cache)
            if cache.seen:
                _require_continuation(cache, input_ids, kwargs)
            cache.thread = get_ident()
        elif prepared and cache.thread not in (None, get_ident()):
            cache.thread, kind = _SEVERAL, type(cache).__name__  # the other thread's next pass is refused, too
            raise ConfigError(
                f"past_key_values: expected a cache that one thread uses at a time, got {with_article(kind)} that two calls of generate "
                f"fill at once. Call reset(), and make a cache for each of them, as custom_generate=per_call({kind}, ...) does."
            )
        inputs: dict[str, Any] = self.__wrapped__(input_ids, *args, **kwargs)
        if not prepared:
            return inputs
        if compat.cache_of(inputs) is not cache:
            raise UnsupportedError(
                f"generate: {type(self._model()).__name__} drops the {type(cache).__name__} that it was given, as models do whose angles "
                "change where a text is longer than config.original_max_position_embeddings. Keep the text shorter, or feed a longer "
                "prompt to the model itself, with past_key_values, before generate."
            )
        ids = inputs.get("input_ids")
        if not cache.hooks_forward and ids is not None and ids.ndim == 2:
            cache.log.append(ids, cache.seen)
        return inputs

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__reduce__()[0](memo.get(id(self._model()), self._model()))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _method_of_class, (self._model(),)


def _method_of_class(model: PreTrainedModel | None) -> Any:
    return getattr(type(model), METHOD).__get__(model)


class _Preparations(Attachment):
    def attach(self, model: PreTrainedModel) -> None:
        if not isinstance(vars(model).get(METHOD), Preparation):
            vars(model)[METHOD] = Preparation(model)

    def detach(self, model: PreTrainedModel) -> None:
        preparation = vars(model).get(METHOD)
        if isinstance(preparation, Preparation):
            del vars(model)[METHOD]
            if preparation.original is not None:
                vars(model)[METHOD] = preparation.original


_PREPARED = _Preparations()
# Caches whose `generate` has begun and not yet prepared its first pass.
_BEGINNING: weakref.WeakSet[Any] = weakref.WeakSet()


def begin_generate(model: PreTrainedModel, cache: Any) -> None:
    """Have the passes of the `generate` that begins with a cache prepared by a `Preparation`."""
    _BEGINNING.add(cache)
    _PREPARED.add(model, cache)


def _require_continuation(cache: Any, input_ids: torch.Tensor, options: dict[str, Any]) -> None:
    """Refuse a prompt that does not go on with what a cache holds, as far as `generate` passes it along.

    Args:
        input_ids: The whole prompt; or the new tokens alone, where the mask is of all; or the first chunk of either.
    """
    seen, tokens = cache.seen, input_ids.shape[1]
    embeddings: Any = options.get("inputs_embeds")
    length: Any = options.get("next_sequence_length")
    embedded = embeddings is not None and options.get("is_first_iteration")
    if embedded or length is not None:
        if (embeddings.shape[1] - seen if embedded else length) <= 0:
            raise not_continued(cache, "a prompt that is not longer")
        if not embedded:
            _require_same(cache, input_ids[:, : tokens - length], options)
        return
    mask, positions = options.get("attention_mask"), options.get("position_ids")
    # `generate` drops a mask without padding, and has the positions of all of its tokens, or of those of a chunk.
    widths, fitting = (positions, (tokens, seen + tokens)) if mask is None else (mask, (seen + tokens,))
    if tokens == 0 or (widths is not None and widths.shape[-1] not in fitting):
        raise not_continued(cache, f"{tokens} new tokens with an attention_mask of {0 if widths is None else widths.shape[-1]}")
    # With `prefill_chunk_size` these are a slice of the whole prompt, with what comes before in the same memory.
    rows_apart = len(input_ids) == 1 or input_ids.stride(0) >= seen + tokens
    if input_ids.stride(-1) == 1 and input_ids.storage_offset() == seen and rows_apart:
        _require_same(cache, input_ids.as_strided((len(input_ids), seen), input_ids.stride(), 0), options)


def _require_same(cache: Any, beginning: torch.Tensor, options: dict[str, Any]) -> None:
    """Refuse a prompt that begins with other tokens than the cache has seen, both (rows, seen)."""
    cache.log.crop(cache.seen)  # what is behind belongs to a pass that failed
    logged = cache.log.ids
    if not len(cache.log):
        return
    if logged.shape[0] != beginning.shape[0]:
        raise not_continued(cache, f"{beginning.shape[0]} rows, where it holds {logged.shape[0]}")
    other = logged.to(beginning.device) != beginning[:, : logged.shape[1]]
    mask = options.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        other &= mask[:, : logged.shape[1]].to(beginning.device, torch.bool)
    if bool(other.any()):
        row, index = other.nonzero()[0].tolist()
        raise not_continued(cache, f"one whose row {row} has another token at {index}")


def not_continued(cache: Any, got: str) -> ConfigError:
    """The error for a prompt that does not go on with a cache."""
    other = "" if cache.thread == get_ident() else " Another thread has filled it: a cache serves one text, in one thread at a time."
    return ConfigError(
        f"input_ids: expected a prompt that begins with the {cache.seen} tokens that this {type(cache).__name__} has seen and goes on, "
        f"got {got}.{other} Call reset() before another text, or make a new cache for it; generate makes one for each call with "
        f"custom_generate=per_call({type(cache).__name__}, ...)."
    )
