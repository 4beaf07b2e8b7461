"""The one place that knows how to run pieces of a prompt.

A cache can take over the prefill inside `generate` (`install`), run a span of tokens at positions of its choice (`run_span`), or run some
of the layers (`run_layers`).
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.attention import close_window
from hf_kvcaches.core.continuing import require_new_tokens
from hf_kvcaches.core.layer_pass import LayerPass
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.partial import RunningLayer, SkippedLayer, with_layers
from hf_kvcaches.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from hf_kvcaches.core.cache import KVCache


# What a prompt of tokens alone comes with; a call with any other tensor is left to the model.
_TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids")
# What asks for the insides of layers, which a cache's own run would leave out.
_INSIDE = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True)
class PrefillCall:
    """A prompt, or a chunk of one, on its way into the model.

    Args:
        input_ids: The new tokens, (batch, tokens).
        attention_mask: 1 where a token is real, (batch, tokens seen before + new ones), or None when nothing is padded.
        position_ids: Of the new tokens, (batch, tokens), or None where the model numbers them itself.
        most: How many of the first tokens a cache may take: the caller wants the logits of the others.
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


class _Takeover:
    """The hook on one model, and the living caches that want it."""

    def __init__(self, handle: RemovableHandle) -> None:
        self.handle = handle
        self.caches: weakref.WeakSet[KVCache] = weakref.WeakSet()


_takeovers: weakref.WeakKeyDictionary[PreTrainedModel, _Takeover] = weakref.WeakKeyDictionary()
# Caches may be freed in another thread, and by the garbage collector in the middle of `install`.
_lock = threading.RLock()


def install(model: PreTrainedModel, cache: KVCache) -> None:
    """Lets a cache take over the prompts that `generate` feeds into a model, for as long as the cache lives.

    There is one hook a model, which holds on to neither model nor caches and goes when the last such cache does.

    Args:
        cache: Its `take_prefill` is called with each prompt.
    """
    with _lock:
        takeover = None
        while takeover is None or _takeovers.get(model) is not takeover:  # the last other cache may have taken it along
            takeover = _takeovers.get(model) or _take_over(model)
            takeover.caches.add(cache)
        weakref.finalize(cache, _forget, weakref.ref(model))


def _take_over(model: PreTrainedModel) -> _Takeover:
    compat.remove_pre_hook(model, _before_forward)  # A copied model brings that of its original, and nobody who would remove it.
    _takeovers[model] = takeover = _Takeover(model.register_forward_pre_hook(_before_forward, with_kwargs=True))
    return takeover


def is_installed(model: PreTrainedModel) -> bool:
    """Whether a model has the hook."""
    return model in _takeovers


def _forget(model_reference: weakref.ref[PreTrainedModel]) -> None:
    with _lock:
        model = model_reference()
        takeover = None if model is None else _takeovers.get(model)
        if model is not None and takeover is not None and not any(True for _ in takeover.caches):
            takeover.handle.remove()
            del _takeovers[model]


def _before_forward(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if args:
        args, kwargs = (), dict(zip(compat.parameter_names(type(model)), args, strict=False)) | kwargs
    cache, input_ids = compat.cache_of(kwargs), kwargs.get("input_ids")
    takeover = _takeovers.get(model)
    if takeover is None or not isinstance(cache, Cache) or cache not in takeover.caches:
        return None
    cache.pass_begins()
    if (reason := _more_than_tokens(kwargs)) or input_ids is None:
        cache.prompt_left(reason)
        return None
    _require_whole(cache)
    require_new_tokens(cache, kwargs)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    cache.observe(input_ids, mask, positions)
    if not cache.wants_prompts:
        return None
    tokens = input_ids.shape[1]
    if reason := _left(model, kwargs, tokens):
        if tokens > 1:
            cache.prompt_left(reason)
        return None
    most = tokens - kwargs["logits_to_keep"]
    before = cache.seen
    try:
        cache.filling = True
        taken = cache.take_prefill(PrefillCall(model, input_ids, mask, positions, most))
        count = 0 if isinstance(taken, Remaining) else taken
        if not 0 <= count <= most or cache.seen != before + count:
            raise RuntimeError(f"take_prefill took {count} of {most} tokens, and the cache went from {before} to {cache.seen} tokens")
        count = cache.leave_last(count, tokens)
        cache.filling = False
    except BaseException:
        close_window()
        cache.abandon_prefill(before)
        raise
    if isinstance(taken, Remaining):
        axes = taken.positions if positions is None or positions.ndim == 2 else taken.positions.expand(len(positions), -1, -1)
        return args, kwargs | {"input_ids": taken.input_ids, "position_ids": axes}
    per_token = ("input_ids", "position_ids")
    return args, {name: value[..., count:] if name in per_token and value is not None else value for name, value in kwargs.items()}


def _require_whole(cache: KVCache) -> None:
    """Refuses a cache in which a pass broke off between its layers."""
    lengths = {layer.seen for layer in cache.layers if isinstance(layer, KVLayer)}
    if cache.filling or len(lengths) > 1:
        raise ConfigError(
            f"A pass through the model broke off and left the {type(cache).__name__} with part of its tokens. reset() it, and feed the "
            "whole text."
        )


def _left(model: PreTrainedModel, kwargs: dict[str, Any], tokens: int) -> str:
    """Why the model runs all tokens of a pass itself, as a sentence; "" where a cache may take the first ones."""
    keep, mask = kwargs.get("logits_to_keep"), kwargs.get("attention_mask")
    inside = next((name for name in _INSIDE if kwargs.get(name) or getattr(model.config, name, False)), None)
    if inside is not None:
        return f"{inside} asks for the insides of layers, which takes the passes of all tokens."
    if not isinstance(keep, int) or not 0 < keep < tokens:
        return f"The logits of all tokens are wanted (logits_to_keep={keep!r}), which takes their passes. Pass logits_to_keep=1."
    if not (mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)):
        return "The attention mask is not one number for each token."
    return ""


def _more_than_tokens(kwargs: dict[str, Any]) -> str:
    """Why a call is not about tokens alone, as a sentence: a cache's own run would leave out images, say."""
    others = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name not in _TOKEN_INPUTS]
    return f"The call brings {', '.join(others)}, and only token ids can be looked up." if others else ""


def run_span(
    model: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, positions: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> None:
    """Runs tokens at given positions into a cache.

    Args:
        cache: What the tokens follow, and where their keys and values go.
        input_ids: (batch, tokens).
        positions: (tokens,) or (batch, tokens); they need not follow those in the cache.
        attention_mask: 1 where a token is real, (batch, tokens seen before + new ones), or None.
    """
    run_module(model.base_model, cache, input_ids, positions, attention_mask)


def run_module(
    module: nn.Module,
    cache: Cache | None,
    input_ids: torch.Tensor,
    positions: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> None:
    """Does what `run_span` does, with the module to call.

    Args:
        module: A model without its head, or a twin of it.
        cache: As in `run_span`; None for none.
        positions: As in `run_span`; None for those that follow.
    """
    arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, **compat.cache_kwargs(module, cache)}
    names = compat.parameter_names(type(module))
    if positions is not None and "position_ids" in names:
        arguments["position_ids"] = positions.expand(input_ids.shape[0], -1) if positions.ndim == 1 else positions
    if "logits_to_keep" in names:  # the base of a model may be a model with a head
        arguments["logits_to_keep"] = 1
    module(**arguments)


def run_layers(
    model: PreTrainedModel,
    start: int,
    stop: int,
    input_ids: torch.Tensor,
    cache: KVCache | LayerPass,
    positions: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs only the layers from `start` to before `stop`, and returns what would enter layer `stop`, (batch, tokens, hidden).

    The cache's other layers are not touched, whatever they hold. After the last layer it is what enters the model's final norm.

    Args:
        model: A causal language model; neither its final norm nor its head matter.
        stop: The first layer not to run, or the number of layers.
        input_ids: (batch, tokens).
        cache: Its layers from `start` to before `stop` take the keys and values, as the pass says where one is given.
        positions: (tokens,) or (batch, tokens).
        attention_mask: 1 where a token is real, (batch, tokens that layer `start` has seen + new ones), or None.
        hidden: What entered layer `start`, (batch, tokens, hidden); None for layer 0.
    """
    layers = compat.decoder_layers(model)[2]
    if not 0 <= start < len(layers) or (hidden is None) != (start == 0):
        raise ConfigError.of("start", f"a decoder layer from 0 to {len(layers) - 1}, and hidden for all but layer 0", start)
    if not start < stop <= len(layers):
        raise ConfigError.of("stop", f"a layer above {start}, or the number of layers", stop)
    # Skipped layers stay in the list, because models look up masks by a layer's index. The last one hands out `hidden`, so that nothing
    # that the model does to its embeddings (scaling, learned positions) matters.
    below = [SkippedLayer(layer, hidden if index == start - 1 else None) for index, layer in enumerate(layers[:start])]
    running = [RunningLayer(layer) for layer in layers[start:stop]]
    twin = with_layers(model, [*below, *running, *(SkippedLayer(layer) for layer in layers[stop:])])
    run_module(twin, cache if isinstance(cache, LayerPass) else LayerPass(cache, start), input_ids, positions, attention_mask)
    output = running[-1].output
    if not isinstance(output, torch.Tensor) or output.shape[:-1] != input_ids.shape:
        raise UnsupportedError(f"model: {type(model).__name__} passes more than hidden states from layer to layer. Run whole prompts.")
    return output
