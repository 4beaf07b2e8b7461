"""The tokens that a cache was fed, as far as they are known, and prompts that have to go on with them.

`generate` cuts off as many tokens of a prompt as the cache has seen, unread. It asks `model.prepare_inputs_for_generation` for the inputs
of each pass, the first time with the whole prompt. From its first `generate` with a cache of this package until that cache is freed, a
model has a `Preparation` in place of this method: it compares the prompt with the cache's log before anything runs, and logs the tokens of
each pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import Attachment
from hf_kvcaches.errors import ConfigError, Refusal, UnsupportedError, with_article

Ids = npt.NDArray[np.uint32]
_METHOD = "prepare_inputs_for_generation"
_MOST_PASSES = 64  # that are kept apart
_SEVERAL = -1  # in place of the thread of a cache that two threads use at once


class TokenLog:
    """The first tokens of all rows, with what a model was told of them: which are padding, and their positions."""

    def __init__(self, positions_matter: bool = True) -> None:
        self._positions_matter = positions_matter
        self.reset()

    def reset(self) -> None:
        # As passes brought them, (3, rows, tokens), on the device of the ids: nothing waits for a GPU before someone reads.
        self._passes: list[Tensor] = []
        self._length = 0
        self._mask: Tensor | None = None  # of the last pass
        self._had_no_mask = False  # of any pass: it saw padding as tokens

    def __len__(self) -> int:
        """How many of the cache's first tokens are known."""
        return self._length

    def _joined(self) -> Tensor:
        """Token ids, whether they are real, and positions, (3, rows, tokens)."""
        if len(self._passes) > 1:
            self._passes = [torch.cat(self._passes, -1)]
        return self._passes[0] if self._passes else torch.empty(3, 0, 0, dtype=torch.long)

    @property
    def ids(self) -> Tensor:
        return self._joined()[0]

    def rows(self) -> list[Ids]:
        """The token ids of each row, padding included."""
        return list(self.ids.cpu().numpy().astype(np.uint32))

    def append(self, ids: Tensor, seen: int, attention_mask: Any = None, position_ids: Any = None) -> None:
        """Add the tokens of a pass, (rows, tokens); those behind unknown ones, and with a mask that is none of tokens, are unknown.

        The mask, (rows, tokens seen and new ones), is 1 where a token is real. Without `position_ids`, a token's position is its
        slot in the cache, padding included.
        """
        if seen == 0:
            self.reset()
        self.crop(seen)  # what is logged behind belongs to a pass that failed
        rows, tokens = ids.shape
        stop = seen + tokens
        mask_fits = attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.shape == (rows, stop))
        positions_fit = position_ids is None or (isinstance(position_ids, Tensor) and position_ids.ndim in (2, 3))
        if self._length != seen or (seen and self._passes[0].shape[1] != rows) or not mask_fits or not positions_fit:
            return
        real = torch.ones_like(ids) if attention_mask is None else attention_mask[:, seen:]
        if position_ids is None:
            position_ids = torch.arange(seen, stop, device=ids.device)
        elif position_ids.ndim == 3:  # with an axis for each of an image's positions, which are unknown where these differ
            position_ids = torch.where((position_ids == position_ids[:1]).all(0), position_ids[0], -1)
        joined = torch.stack([part.to(ids.device, torch.long).expand(rows, tokens) for part in (ids, real, position_ids)])
        self._mask, self._had_no_mask = attention_mask, self._had_no_mask or attention_mask is None
        self._length = stop  # before the tokens: after an interrupt in between, the next pass forgets what is behind those seen
        self._passes.append(joined)
        if len(self._passes) > _MOST_PASSES:
            self._joined()

    def padding(self, length: int) -> list[int] | Refusal:
        """How many slots at the start of each row hold no token; or why the log does not describe the prompt of that length."""
        if not self._length or self._length != length:
            return Refusal("The cache does not know its tokens: a pass had embeddings or images as input, or a mask for other tokens.")
        _, real, positions = self._joined().cpu()
        real = real != 0
        if bool(real.all()):
            padding = [0] * real.shape[0]
        elif self._had_no_mask or not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
            return Refusal("The attention mask is more than padding on the left.")
        else:
            padding = (~real).sum(1).tolist()
        expected = torch.arange(length)[None] - torch.tensor(padding)[:, None]
        if self._positions_matter and bool(((positions != expected) & real).any()):
            return Refusal("The position_ids do not count each row's tokens from 0.")
        # All passes must have seen the same tokens.
        agrees = self._mask is None or torch.equal(self._mask.to("cpu", torch.bool), real)
        return padding if agrees else Refusal("The attention mask hides tokens that earlier passes saw, or shows others.")

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        if self._passes:
            self._passes = [torch.stack([function(part) for part in self._joined()])]
        if self._mask is not None:
            self._mask = function(self._mask)

    def crop(self, length: int) -> None:
        if length < self._length:
            self._passes, self._length = [self._joined()[..., :length]], length
            if self._mask is not None:
                self._mask = self._mask[:, :length]


class Preparation:
    """Stands in for a model's `prepare_inputs_for_generation`, which it calls; copies and pickles of the model have their own method."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self.original = vars(model).get(_METHOD)  # PEFT's wrapper puts its method there; else None, and the class's method is called

    @property
    def __wrapped__(self) -> Any:  # `generate` reads the signature
        return self.original or _method_of_class(self._model())

    @property
    def __self__(self) -> Any:
        return self.__wrapped__.__self__

    def __call__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        cache = compat.cache_of(kwargs)
        prepared = cache in PREPARED.caches.get(self._model(), ())
        if prepared and cache.begins:
            cache.begins = False
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

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _method_of_class, (self._model(),)


def _method_of_class(model: PreTrainedModel | None) -> Any:
    return getattr(type(model), _METHOD).__get__(model)


class _Preparations(Attachment):
    def attach(self, model: PreTrainedModel) -> None:
        if not isinstance(vars(model).get(_METHOD), Preparation):
            vars(model)[_METHOD] = Preparation(model)

    def detach(self, model: PreTrainedModel) -> None:
        preparation = vars(model).get(_METHOD)
        if isinstance(preparation, Preparation):
            del vars(model)[_METHOD]
            if preparation.original is not None:
                vars(model)[_METHOD] = preparation.original


PREPARED = _Preparations()


def _require_continuation(cache: Any, input_ids: Tensor, options: dict[str, Any]) -> None:
    """Refuse a prompt that does not go on with what a cache holds, as far as `generate` passes it along."""
    # The ids are the whole prompt; or the new tokens alone, where the mask is of all; or the first chunk of either.
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


def _require_same(cache: Any, beginning: Tensor, options: dict[str, Any]) -> None:
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
    other = "" if cache.thread == get_ident() else " Another thread has filled it: a cache serves one text, in one thread at a time."
    return ConfigError(
        f"input_ids: expected a prompt that begins with the {cache.seen} tokens that this {type(cache).__name__} has seen and goes on, "
        f"got {got}.{other} Call reset() before another text, or make a new cache for it; generate makes one for each call with "
        f"custom_generate=per_call({type(cache).__name__}, ...)."
    )
