"""Refuses a prompt that does not go on with what a cache holds, a `generate` whose model drops the cache, and a class for a cache.

`generate` takes it for granted that a prompt begins with the tokens in the cache: it cuts off as many as the cache has seen, and neither
the model nor the cache is shown them. A prompt that begins otherwise would be answered behind the cache's text. So the tokens that
`generate` feeds are written down, and what it is given next is compared with them before it runs anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.compat import GenerateCall
from hf_kvcaches.errors import ConfigError, UnsupportedError, with_article

if TYPE_CHECKING:
    from hf_kvcaches.core.cache import KVCache

# So many passes are written down before their tokens are put into one tensor.
_MOST_PARTS = 64


class CacheArgument(compat.MarkedCache):
    """What `generate` takes as its cache, and neither as a class nor as `custom_generate`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if "logits_processor" in kwargs and "generation_config" in kwargs:
            raise _not_custom_generate(cls, f"the class {cls.__name__}")
        return super().__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be `custom_generate`, which `generate` leaves out where it can't be called."""
        kind = with_article(type(self).__name__)
        raise _not_custom_generate(type(self), kind, f", or {kind} as past_key_values")


def _not_custom_generate(kind: type, got: str, other: str = "") -> ConfigError:
    recipe = f"per_call({kind.__name__}, ...)"
    return ConfigError(f"custom_generate: expected {recipe}, got {got}. Pass {recipe}{other}.")


class FedTokens:
    """The first tokens that a cache was fed, as far as they are known: what a caller's own loop feeds is not."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def __len__(self) -> int:
        return sum(part.shape[1] for part in self._parts)

    @property
    def ids(self) -> torch.Tensor:
        """All that are known, (rows, tokens)."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts, dim=1)]
        return self._parts[0] if self._parts else torch.empty(0, 0, dtype=torch.long)

    def add(self, ids: torch.Tensor, start: int) -> None:
        """Takes in the tokens of a pass. Behind tokens that are not known, nothing is.

        Args:
            ids: (rows, tokens).
            start: How many tokens the cache had before; what is known behind them belongs to a pass that failed.
        """
        self.cut(start)
        if len(self) == start and (not self._parts or self._parts[0].shape[0] == ids.shape[0]):
            self._parts.append(ids)
        if len(self._parts) > _MOST_PARTS:
            self._parts = [self.ids]

    def cut(self, length: int) -> None:
        """Forgets all but the first tokens."""
        if len(self) > length:
            self._parts = [self.ids[:, :length]] if length else []

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Does to the rows what is done to the cache's.

        Args:
            function: From and to (rows, tokens).
        """
        if self._parts:
            self._parts = [function(self.ids)]


def begin_generate(model: PreTrainedModel, cache: KVCache, call: GenerateCall) -> None:
    """Refuses a prompt that does not go on with a cache, and writes down what `generate` feeds into it.

    Args:
        cache: What `generate` begins with.
        call: What `generate` was given.
    """
    if cache.seen:
        _require_continuing(cache, call)
    reference, config = weakref.ref(cache), weakref.ref(call.config)
    prompt = call.tokens if call.whole else cache.seen + call.tokens

    # Another thread's pass may call a hook that has just been removed, without its keyword arguments.
    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if torch.compiler.is_compiling() or kwargs is None:
            return
        _write_down(kwargs)
        if compat.cache_of(kwargs) is None and kwargs.get("use_cache"):
            _require_not_dropped(module, reference(), config(), prompt)

    before.only_observes = True  # type: ignore[attr-defined]
    handle = model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    # The traceback of an interrupted call may keep the config alive, and with it a hook that only writes down.
    weakref.finalize(call.config, handle.remove)


def _require_not_dropped(model: Any, cache: KVCache | None, config: GenerationConfig | None, prompt: int) -> None:
    """Refuses a pass without the cache, if the model itself takes the cache out of the passes of the running `generate`.

    Guidance, for one, runs passes of its own beside those of `generate`, and the cache has nothing to do with them.

    Args:
        config: Of the call of `generate`.
        prompt: How many tokens the prompt has, those in the cache included.
    """
    if cache is None or config is None or not compat.is_generating(config):
        return
    if _drops_cache(model, cache, max(prompt, cache.seen + 1)):
        raise UnsupportedError(
            f"generate: {type(model).__name__} drops the {type(cache).__name__} that it was given, as models do whose angles change where "
            "a text is longer than config.original_max_position_embeddings. Keep the text shorter, or feed a longer prompt to the model "
            "itself, with past_key_values, before generate."
        )


def _drops_cache(model: PreTrainedModel, cache: KVCache, tokens: int) -> bool:
    """Whether a model takes the cache out of what `generate` hands to its forward, for a text of so many tokens."""
    prepare: Any = type(model).prepare_inputs_for_generation
    if prepare is GenerationMixin.prepare_inputs_for_generation:
        return False
    text = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    return compat.cache_of(prepare(model, text, **{compat.GENERATE_CACHE: cache})) is not cache


def _write_down(kwargs: dict[str, Any]) -> None:
    """Adds the tokens of a pass to those that its cache was fed."""
    cache, ids = compat.cache_of(kwargs), kwargs.get("input_ids")
    fed = getattr(cache, "fed", None)
    if cache is not None and isinstance(fed, FedTokens) and isinstance(ids, torch.Tensor) and ids.ndim == 2:
        fed.add(ids, cache.seen)


def _require_continuing(cache: KVCache, call: GenerateCall) -> None:
    if not call.whole:
        if call.masked is not None and call.masked != cache.seen + call.tokens:
            raise refusal(cache, f"{call.tokens} new tokens with an attention_mask of {call.masked}")
        return
    if call.tokens <= cache.seen:
        raise refusal(cache, "a prompt that is not longer")
    cache.fed.cut(cache.seen)  # what is behind belongs to a pass that failed
    if call.ids is None or not len(cache.fed):
        return
    fed, new = cache.fed.ids, call.ids
    if fed.shape[0] != new.shape[0]:
        raise refusal(cache, f"{new.shape[0]} rows, where it holds {fed.shape[0]}")
    other = fed.to(new.device) != new[:, : fed.shape[1]]
    if call.mask is not None:
        other &= call.mask[:, : fed.shape[1]].to(new.device, torch.bool)
    if bool(other.any()):
        row, position = other.nonzero()[0].tolist()
        raise refusal(cache, f"one whose row {row} has another token at {position}")


def require_new_tokens(cache: KVCache, kwargs: dict[str, Any]) -> None:
    """Refuses a pass without new tokens, or with a mask that is not of the tokens seen and the new ones."""
    new = next((kwargs[name] for name in ("inputs_embeds", "input_ids") if isinstance(kwargs.get(name), torch.Tensor)), None)
    if new is None or new.ndim < 2 or not cache.seen:
        return
    tokens, mask = new.shape[1], kwargs.get("attention_mask")
    if tokens == 0:
        raise refusal(cache, "a prompt that is not longer")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] != cache.seen + tokens:
        raise refusal(cache, f"{tokens} new tokens with an attention_mask of {mask.shape[1]}")


def refusal(cache: KVCache, got: str) -> ConfigError:
    """The error for a prompt that does not go on with a cache."""
    return ConfigError(
        f"input_ids: expected a prompt that begins with the {cache.seen} tokens that this {type(cache).__name__} has seen and goes on, "
        f"got {got}. Call reset() before another text, or make a new cache for it; generate makes one for each call with "
        f"custom_generate=per_call({type(cache).__name__}, ...)."
    )
