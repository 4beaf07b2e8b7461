"""The one place that knows how to run pieces of a prompt.

A cache can take over the prefill inside `generate` (`install`), run a span of tokens at positions of its choice (`run_span`), look
at the hidden states that enter a layer (`capture_hidden`), run only the upper layers on hidden states (`run_from_layer`), or some
layers in the middle (`run_layers`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.only_layers import only_layers
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
        model: The model, to run pieces with.
        input_ids: The new tokens, (batch, tokens).
        attention_mask: 1 where a token is real, (batch, tokens seen before + new ones), or None when nothing is padded.
        position_ids: Of the new tokens, (batch, tokens), or None for consecutive ones.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None


@dataclass(frozen=True)
class Remaining:
    """What the model is to run of a prompt of which the cache has pieces, and not only the start.

    Args:
        input_ids: (batch, tokens), the last column the prompt's own. The cache knows where each token stands.
        position_ids: (batch, tokens).
        hidden: What enters layer `start`, (batch, tokens, hidden), where the layers below have been run already; else None.
        start: The lowest layer to run.
        storing: Opens a stretch in which the last layer's part of the cache takes keys and values, and raises `LookedEnough` where it would
            have to answer. After it, only the last column is still to be run through that layer. None: it is run for all tokens.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    hidden: torch.Tensor | None = None
    start: int = 0
    storing: Callable[[], AbstractContextManager[None]] | None = None


class _Takeover:
    """The hook on one model, and the living caches that want it."""

    def __init__(self, handle: RemovableHandle) -> None:
        self.handle = handle
        self.caches: weakref.WeakSet[KVCache] = weakref.WeakSet()
        self.running: weakref.WeakSet[KVCache] = weakref.WeakSet()
        self.alive = 0


_takeovers: weakref.WeakKeyDictionary[PreTrainedModel, _Takeover] = weakref.WeakKeyDictionary()


def install(model: PreTrainedModel, cache: KVCache) -> None:
    """Lets a cache take over the prompts that `generate` feeds into a model, for as long as the cache lives.

    There is one hook a model, which holds on to neither model nor caches and goes when the last such cache does.

    Args:
        model: The model.
        cache: Its `take_prefill` is called with each prompt.
    """
    takeover = _takeovers.get(model)
    if takeover is None:
        for key, hook in list(model._forward_pre_hooks.items()):
            if hook is _before_forward:  # A copied model brings the hook of its original, and nobody who would remove it.
                del model._forward_pre_hooks[key]
                model._forward_pre_hooks_with_kwargs.pop(key, None)
        takeover = _takeovers[model] = _Takeover(model.register_forward_pre_hook(_before_forward, with_kwargs=True))
    if cache not in takeover.caches:
        takeover.caches.add(cache)
        takeover.alive += 1
        weakref.finalize(cache, _forget, weakref.ref(model))


def is_installed(model: PreTrainedModel) -> bool:
    """Whether a model has the hook.

    Args:
        model: The model.
    """
    return model in _takeovers


def _forget(model_reference: weakref.ref[PreTrainedModel]) -> None:
    model = model_reference()
    if model is None or model not in _takeovers:
        return
    takeover = _takeovers[model]
    takeover.alive -= 1
    if takeover.alive == 0:
        takeover.handle.remove()
        del _takeovers[model]


def _before_forward(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    cache, input_ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
    takeover = _takeovers.get(model)
    if takeover is None or input_ids is None or not isinstance(cache, Cache) or cache not in takeover.caches or cache in takeover.running:
        return None
    mask = kwargs.get("attention_mask")
    if not _tokens_alone(kwargs):
        return None
    cache.observe(input_ids, mask, kwargs.get("position_ids"))
    # Who keeps the logits of the last token only, as `generate` does for prompts, can do without the others' forward pass.
    if (
        kwargs.get("logits_to_keep") != 1
        or input_ids.shape[1] < 2
        or not (mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2))
        or any(kwargs.get(name) for name in _INSIDE)
    ):
        return None
    before, tokens = cache.seen, input_ids.shape[1]
    takeover.running.add(cache)
    try:
        taken = cache.take_prefill(PrefillCall(model, input_ids, mask, kwargs.get("position_ids")))
    finally:
        takeover.running.discard(cache)
    if isinstance(taken, Remaining):
        return args, kwargs | _feed(model, taken)
    if not 0 <= taken < tokens or cache.seen != before + taken:
        raise RuntimeError(f"take_prefill returned {taken} of {tokens} tokens, and the cache went from {before} to {cache.seen} tokens")
    per_token = ("input_ids", "position_ids")
    cut = {name: value[..., taken:] if name in per_token and value is not None else value for name, value in kwargs.items()}
    return args, cut


def _feed(model: PreTrainedModel, remaining: Remaining) -> dict[str, Any]:
    """The arguments for a model's own pass over what remains; its lower layers are put back after that pass."""
    fed: dict[str, Any] = {"input_ids": remaining.input_ids, "position_ids": remaining.position_ids}
    if remaining.hidden is not None:
        fed |= {"input_ids": None, "inputs_embeds": _no_embeddings(model, remaining.hidden)}
    elif remaining.storing is None:
        return fed
    without = only_layers(model, remaining.start, hidden=remaining.hidden, storing=remaining.storing)
    without.__enter__()
    owner = threading.get_ident()

    def put_back(*_: Any) -> None:
        if threading.get_ident() != owner:  # another thread's pass is over
            return
        handle.remove()
        without.__exit__(None, None, None)

    handle = model.register_forward_hook(put_back, always_call=True)
    return fed


def _tokens_alone(kwargs: dict[str, Any]) -> bool:
    """Whether a call is about tokens alone, and not images, say, which a cache's own run would leave out."""
    return not any(isinstance(value, torch.Tensor) for name, value in kwargs.items() if name not in _TOKEN_INPUTS)


def run_span(
    model: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, positions: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Runs tokens at given positions into a cache and returns the last hidden states, (batch, tokens, hidden).

    Args:
        model: A causal language model; its head is not run.
        cache: What the tokens follow, and where their keys and values go.
        input_ids: (batch, tokens).
        positions: (tokens,) or (batch, tokens); they need not follow those in the cache.
        attention_mask: 1 where a token is real, (batch, tokens seen before + new ones), or None.
    """
    outputs = model.base_model(
        input_ids=input_ids,
        position_ids=_rows(positions, input_ids.shape[0]),
        attention_mask=attention_mask,
        past_key_values=cache,
        use_cache=True,
    )
    hidden: torch.Tensor = outputs.last_hidden_state
    return hidden


@contextmanager
def capture_hidden(model: PreTrainedModel, layer: int) -> Iterator[list[torch.Tensor]]:
    """While open, collects the hidden states that enter a decoder layer, one tensor (batch, tokens, hidden) a forward pass.

    Args:
        model: A causal language model.
        layer: The layer's index.
    """
    captured: list[torch.Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured.append(args[0] if args else kwargs["hidden_states"])

    handle = _layer(model, layer).register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield captured
    finally:
        handle.remove()


def run_from_layer(
    model: PreTrainedModel,
    start: int,
    hidden: torch.Tensor,
    cache: KVCache,
    positions: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    logits_to_keep: int = 1,
) -> torch.Tensor:
    """Runs only the layers from `start` up on hidden states that entered it, and returns the logits of the last tokens.

    The cache's layers below `start` are not touched, whatever they hold. The model's list of layers is exchanged during the call,
    so no other thread may run the model meanwhile.

    Args:
        model: A causal language model.
        start: The lowest layer to run, at least 1 (for 0 see `run_span`).
        hidden: What entered that layer, (batch, tokens, hidden).
        cache: Its layers from `start` up take the keys and values.
        positions: (tokens,) or (batch, tokens).
        attention_mask: 1 where a token is real, (batch, tokens that layer `start` has seen + new ones), or None.
        logits_to_keep: For how many of the last tokens; 0 for all.
    """
    _layer(model, start)
    if start == 0:
        raise ConfigError.of("start", "a layer of at least 1", start, "Layer 0 starts from tokens: use run_span.")
    with only_layers(model, start, hidden=hidden), cache.seen_from(start):
        outputs = model(
            inputs_embeds=_no_embeddings(model, hidden),
            position_ids=_rows(positions, hidden.shape[0]),
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
    logits: torch.Tensor = outputs.logits
    if bool(logits.isnan().any()) and not bool(hidden.isnan().any()):
        raise UnsupportedError(
            f"run_from_layer: {type(model).__name__} feeds its embeddings to later layers as well, so hidden states alone are not enough. "
            "The cache has been written to: reset it, and run whole prompts."
        )
    return logits


def run_layers(
    model: PreTrainedModel,
    start: int,
    stop: int,
    inputs: torch.Tensor,
    cache: KVCache,
    positions: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs only the layers from `start` to before `stop`, and returns what would enter layer `stop`, (batch, tokens, hidden).

    All that is said of `run_from_layer` holds. After the last layer it is what enters the model's final norm.

    Args:
        model: A causal language model; neither its final norm nor its head matter.
        start: The lowest layer to run.
        stop: The first layer not to run, or the number of layers.
        inputs: Token ids (batch, tokens) where `start` is 0, else what entered that layer, (batch, tokens, hidden).
        cache: Its layers from `start` to before `stop` take the keys and values.
        positions: (tokens,) or (batch, tokens).
        attention_mask: As in `run_from_layer`.
    """
    _layer(model, start)
    if not start < stop <= len(compat.decoder_layers(model)[2]):
        raise ConfigError.of("stop", f"a layer above {start}, or the number of layers", stop)
    hidden = inputs if start else None
    fed = {"input_ids": inputs} if hidden is None else {"inputs_embeds": _no_embeddings(model, hidden)}
    with only_layers(model, start, stop, hidden) as left, cache.seen_from(start):
        model.base_model(
            **fed, position_ids=_rows(positions, inputs.shape[0]), attention_mask=attention_mask, past_key_values=cache, use_cache=True
        )
    if bool(left[0].isnan().any()) and not (hidden is not None and bool(hidden.isnan().any())):
        raise UnsupportedError(
            f"run_layers: {type(model).__name__} feeds its embeddings to later layers as well, or its weights give NaN. "
            "The cache has been written to: reset it, and run whole prompts."
        )
    return left[0]


def _no_embeddings(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Not a number, so that a model which uses its embeddings in later layers too is found out."""
    return hidden.new_full((*hidden.shape[:2], model.get_input_embeddings().embedding_dim), torch.nan)


def _layer(model: PreTrainedModel, index: int) -> nn.Module:
    _, _, layers = compat.decoder_layers(model)
    if not 0 <= index < len(layers):
        raise ConfigError.of("layer", f"a decoder layer from 0 to {len(layers) - 1}", index)
    return layers[index]


def _rows(positions: torch.Tensor, batch: int) -> torch.Tensor:
    return positions.expand(batch, -1) if positions.ndim == 1 else positions
