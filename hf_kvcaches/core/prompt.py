"""The way of a prompt into a cache that gets its first tokens in from elsewhere.

One hook on a model's forward tells such a source of each pass before it runs, asks it for the first tokens of a prompt (`take_prefill`),
and lets the model run the others.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core import continuation
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.errors import ConfigError

# What a prompt of tokens alone comes with; a call with any other tensor is left to the model.
_TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids")
# What asks for the insides of layers, which a source's own run would leave out.
_INSIDE = ("output_hidden_states", "output_attentions", "output_router_logits")


class Stage(Enum):
    """What a source does with its tokens."""

    OPEN = "keeps its tokens, and takes prompts"
    FILLING = "fills in a prompt, or broke off while it did, and could not undo it"
    HANDED_OVER = "has given its tokens to its holder"


@dataclass(frozen=True)
class PrefillCall:
    """A prompt, or a chunk of one, on its way into the model.

    Args:
        input_ids: The new tokens, (batch, tokens).
        attention_mask: 1 where a token is real, (batch, tokens seen before + new ones), or None when nothing is padded.
        position_ids: Of the new tokens, (batch, tokens), or None where the model numbers them itself.
        most: How many of the first tokens a source may take: the caller wants the logits of the others.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    most: int


@dataclass(frozen=True)
class Remaining:
    """The tokens of a prompt that the model still has to run, where they are not just its last ones.

    Args:
        input_ids: (batch, tokens); the last one of each row is the prompt's last token.
        positions: Of these tokens, (batch, tokens).
    """

    input_ids: torch.Tensor
    positions: torch.Tensor


class PromptSource(continuation.DecodedCache, Protocol):
    """What the hook asks a source.

    Attributes:
        stage: What the source does with its tokens.
        own_pass: The pass over a `Remaining`, until its last layer has the tokens; None in all other passes.
        watches_steps: Whether `observe` is to be told of the next decode step, too, which is else only logged.
    """

    stage: Stage
    own_pass: Any
    watches_steps: bool
    layers: Any

    def observe(self, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> None:
        """Told of the tokens of every prompt, and of decode steps where `watches_steps`, before they run; not of embeddings and images.

        Args:
            input_ids: (batch, tokens).
            attention_mask: As the model got it.
            position_ids: As the model got them, or None.
        """

    def take_prefill(self, call: PrefillCall) -> int | Remaining:
        """Fill the cache with the first tokens of the call and return how many; the model runs the others.

        A source may return a `Remaining` instead: the model runs its tokens, and the source counts the whole prompt as seen when the last
        layer has them.
        """

    def prompt_left(self, refusal: Refusal) -> None:
        """Told why `take_prefill` is not asked for a pass of several tokens."""

    def require_not_half_handed_over(self) -> None:
        """Refuse to go on behind a pass that broke off while layers were handed over to a holder."""

    def leave_last(self, taken: int, tokens: int) -> int:
        """Forget the last of the tokens that `take_prefill` took, if the model is to run them, too; return how many are left.

        Args:
            tokens: How many the prompt has.
        """

    def abandon_prefill(self, seen: int) -> None:
        """Undo a `take_prefill` that failed or was interrupted; unless it opens the stage, the cache refuses passes until `reset`.

        Args:
            seen: How many tokens the cache had before.
        """


class _Hook:
    """The hook on one model's forward, the names of its arguments, and the living sources that want it."""

    def __init__(self, handle: RemovableHandle, names: tuple[str, ...]) -> None:
        self.handle, self.names = handle, names
        self.sources: weakref.WeakSet[PromptSource] = weakref.WeakSet()


_hooks: weakref.WeakKeyDictionary[PreTrainedModel, _Hook] = weakref.WeakKeyDictionary()
# Sources may be freed in another thread, and by the garbage collector in the middle of `install`.
_lock = threading.RLock()


def install(model: PreTrainedModel, source: PromptSource) -> None:
    """Have a model's forward ask a source for its prompts, for as long as the source lives.

    There is one hook a model, which holds on to neither model nor sources and goes when the last source does.
    """
    with _lock:
        hook = None
        while hook is None or _hooks.get(model) is not hook:  # the garbage collector may free the last other source meanwhile
            hook = _hooks.get(model) or _new_hook(model)
            hook.sources.add(source)
        weakref.finalize(source, _forget, weakref.ref(model)).atexit = False


def _new_hook(model: PreTrainedModel) -> _Hook:
    compat.remove_pre_hook(model, _before_forward)  # A copied model brings that of its original, and nobody who would remove it.
    _hooks[model] = hook = _Hook(model.register_forward_pre_hook(_before_forward, with_kwargs=True), compat.parameter_names(type(model)))
    return hook


def _forget(reference: weakref.ref[PreTrainedModel]) -> None:
    with _lock:
        model = reference()
        hook = None if model is None else _hooks.get(model)
        if model is not None and hook is not None and not any(True for _ in hook.sources):
            hook.handle.remove()
            del _hooks[model]


def _before_forward(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    hook = _hooks.get(model)
    if hook is None:
        return None
    if args:
        args, kwargs = (), dict(zip(hook.names, args, strict=False)) | kwargs
    source = next((cache for name in compat.CACHE_NAMES if (cache := kwargs.get(name)) is not None), None)
    if not isinstance(source, Cache) or source not in hook.sources:
        return None
    if source.own_pass is not None:  # the last pass broke off
        source.require_not_half_handed_over()
        source.own_pass = None
        source.abandon_prefill(source.seen)
    input_ids, mask, positions = kwargs.get("input_ids"), kwargs.get("attention_mask"), kwargs.get("position_ids")
    others = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name not in _TOKEN_INPUTS]
    if others or input_ids is None:
        source.prompt_left(Refusal(f"The call brings {', '.join(others) or 'embeddings'}, and only token ids can be looked up."))
        return None
    handed_over, tokens = source.stage is Stage.HANDED_OVER, input_ids.shape[1]
    seen = source.seen if handed_over else source.layers[0].seen
    if source.stage is Stage.FILLING or (not handed_over and seen != source.layers[-1].seen):
        _require_whole(source)
    if seen and (tokens == 0 or (mask is not None and mask.ndim == 2 and mask.shape[1] != seen + tokens)):
        continuation.require_new_tokens(source, kwargs)
    if tokens == 1 and not source.watches_steps:
        source.log.append(input_ids, seen, mask, positions)
        return None
    source.observe(input_ids, mask, positions)
    if tokens == 1 or handed_over:
        return None
    if refusal := _why_left(model, kwargs, tokens):
        source.prompt_left(refusal)
        return None
    taken = _fill(source, PrefillCall(model, input_ids, mask, positions, tokens - kwargs["logits_to_keep"]))
    if isinstance(taken, Remaining):
        axes = taken.positions if positions is None or positions.ndim == 2 else taken.positions.expand(len(positions), -1, -1)
        return args, kwargs | {"input_ids": taken.input_ids, "position_ids": axes}
    return args, kwargs | {name: value[..., taken:] for name in ("input_ids", "position_ids") if (value := kwargs.get(name)) is not None}


def _fill(source: PromptSource, call: PrefillCall) -> int | Remaining:
    """Let a source take the first tokens of a prompt."""
    before = source.seen
    try:
        source.stage = Stage.FILLING
        taken = source.take_prefill(call)
        count = 0 if isinstance(taken, Remaining) else taken
        if not 0 <= count <= call.most or source.seen != before + count:
            raise RuntimeError(f"take_prefill took {count} of {call.most} tokens, and the cache went from {before} to {source.seen} tokens")
        if count:
            taken = source.leave_last(count, call.input_ids.shape[1])
        source.stage = Stage.OPEN
    except BaseException:
        source.abandon_prefill(before)
        raise
    return taken


def _require_whole(source: PromptSource) -> None:
    """Refuse a source in which a pass broke off between its layers."""
    lengths = {layer.seen for layer in source.layers if isinstance(layer, KVLayer)}
    if source.stage is Stage.FILLING or len(lengths) > 1:
        raise ConfigError(
            f"A pass through the model broke off and left the {type(source).__name__} with part of its tokens. reset() it, and feed the "
            "whole text."
        )


def _why_left(model: PreTrainedModel, kwargs: dict[str, Any], tokens: int) -> Refusal | None:
    """Why the model runs all tokens of a pass itself, None where a source may take the first ones."""
    keep, mask = kwargs.get("logits_to_keep"), kwargs.get("attention_mask")
    inside = next((name for name in _INSIDE if kwargs.get(name) or getattr(model.config, name, False)), None)
    if inside is not None:
        return Refusal(f"{inside} asks for the insides of layers, which takes the passes of all tokens.")
    if not isinstance(keep, int) or not 0 < keep < tokens:
        return Refusal(f"The logits of all tokens are wanted (logits_to_keep={keep!r}), which takes their passes. Pass logits_to_keep=1.")
    if not (mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)):
        return Refusal("The attention mask is not one number for each token.")
    return None
