"""The way of a prompt into a cache that gets its first tokens in from elsewhere.

One hook on a model's forward tells such a source of each pass before it runs, asks it for the first tokens of a prompt (`take_prefill`),
and lets the model run the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.attachments import ForwardHook
from hf_kvcaches.core.continuation import not_continued
from hf_kvcaches.core.refusal import Refusal
from hf_kvcaches.errors import ConfigError

_TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids")  # a call with any other tensor is left to the model
_INSIDE = ("output_hidden_states", "output_attentions", "output_router_logits")  # of layers, which a source's own run would leave out


class Stage(Enum):
    """What a source does with its tokens."""

    OPEN = "keeps its tokens, and takes prompts"
    FILLING = "fills in a prompt, or broke off while it did, and could not undo it"
    HANDING_OVER = "gives its layers to its holder one by one, or broke off while it did"
    HANDED_OVER = "has given its tokens to its holder"


@dataclass(frozen=True)
class PrefillCall:
    """A prompt, or a chunk of one, on its way into the model."""

    model: PreTrainedModel
    input_ids: torch.Tensor  # the new tokens, (batch, tokens)
    attention_mask: torch.Tensor | None  # 1 where a token is real, (batch, tokens seen before + new ones), or None without padding
    position_ids: torch.Tensor | None  # of the new tokens, (batch, tokens), or None where the model numbers them itself
    most: int  # how many of the first tokens a source may take: the caller wants the logits of the others


@dataclass(frozen=True)
class Remaining:
    """The tokens of a prompt that the model still has to run, where they are not just its last ones; both (batch, tokens).

    The last ones of each row are the prompt's last: as many as a holder's `adopt_window`, and at least one.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor


def _before_forward(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Have a `SourceCache` take the first tokens of a prompt; return the arguments for the others."""
    if args:
        kwargs = dict(zip(compat.parameter_names(type(model)), args, strict=False)) | kwargs
    # Not `compat.cache_of`: this is asked in every decode step.
    source = kwargs.get("past_key_values") if (cache := kwargs.get("cache")) is None else cache
    if source is None or source not in HOOK.caches.get(model, ()):
        return None
    if source.stage is Stage.FILLING or source.stage is Stage.HANDING_OVER:
        raise broke_off(source)
    if source.sparse_pass is not None:  # the last pass broke off
        source.sparse_pass = None
        source.abandon_prefill(source.seen)
    input_ids, mask, positions = kwargs.get("input_ids"), kwargs.get("attention_mask"), kwargs.get("position_ids")
    others = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name not in _TOKEN_INPUTS]
    if others or input_ids is None:
        source.prompt_left(Refusal(f"The call brings {', '.join(others) or 'embeddings'}, and only token ids can be looked up."))
        return None
    handed_over, tokens = source.stage is Stage.HANDED_OVER, input_ids.shape[1]
    seen = source.seen if handed_over else source.layers[0].seen
    if not handed_over and seen != source.layers[-1].seen:
        raise broke_off(source)
    if seen and tokens == 0:
        raise not_continued(source, "a prompt that is not longer")
    if seen and mask is not None and mask.ndim == 2 and mask.shape[1] != seen + tokens:
        raise not_continued(source, f"{tokens} new tokens with an attention_mask of {mask.shape[1]}")
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
        return (), kwargs | {"input_ids": taken.input_ids, "position_ids": axes}
    return (), kwargs | {name: value[..., taken:] for name in ("input_ids", "position_ids") if (value := kwargs.get(name)) is not None}


HOOK = ForwardHook(_before_forward)


def _fill(source: Any, call: PrefillCall) -> int | Remaining:
    """Have a `SourceCache` take the first tokens of a prompt."""
    before = source.seen
    try:
        source.stage = Stage.FILLING
        taken: int | Remaining = source.take_prefill(call)
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


def broke_off(source: Any) -> ConfigError:
    """The error for a source in which a pass broke off between its layers."""
    left = f"left the {type(source).__name__} with part of its tokens"
    return ConfigError(f"A pass through the model broke off and {left}. reset() it, and feed the whole text.")


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
