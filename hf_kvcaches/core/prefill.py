"""The one place that knows how to run pieces of a prompt.

A cache can take over the prefill inside `generate` (`install`), run a span of tokens at positions of its choice (`run_span`), look
at the hidden states that enter a layer (`capture_hidden`), and run only the upper layers on hidden states (`run_from_layer`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from hf_kvcaches.core.cache import KVCache


# What a prompt of tokens alone comes with; a call with any other tensor is left to the model.
_TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids")


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
    # Who keeps the logits of the last token only, as `generate` does for prompts, can do without the others' forward pass.
    if (
        kwargs.get("logits_to_keep") != 1
        or input_ids.shape[1] < 2
        or not (mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2))
        or not _only_tokens(kwargs)
    ):
        return None
    before, tokens = cache.seen, input_ids.shape[1]
    takeover.running.add(cache)
    try:
        taken = cache.take_prefill(PrefillCall(model, input_ids, mask, kwargs.get("position_ids")))
    finally:
        takeover.running.discard(cache)
    if not 0 <= taken < tokens or cache.seen != before + taken:
        raise RuntimeError(f"take_prefill returned {taken} of {tokens} tokens, and the cache went from {before} to {cache.seen} tokens")
    per_token = ("input_ids", "position_ids")
    cut = {name: value[..., taken:] if name in per_token and value is not None else value for name, value in kwargs.items()}
    return args, cut


def _only_tokens(kwargs: dict[str, Any]) -> bool:
    """Whether a call is about tokens alone, and not images, say, or what goes on in the layers, which a cache's own run would leave out."""
    asked = any(kwargs.get(name) for name in ("output_hidden_states", "output_attentions", "output_router_logits"))
    return not asked and not any(isinstance(value, torch.Tensor) for name, value in kwargs.items() if name not in _TOKEN_INPUTS)


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
    decoder, name, layers = compat.decoder_layers(model)
    # Skipped layers stay in the list, because models look up masks by a layer's place in it. The last one hands out `hidden`,
    # so that nothing that the model does to its embeddings (scaling, learned positions) matters.
    skipped = [_Skipped(layer, hidden if index == start - 1 else None) for index, layer in enumerate(layers[:start])]
    # Not a number, so that a model which uses its embeddings in later layers too is found out.
    unused = hidden.new_full((*hidden.shape[:2], model.get_input_embeddings().embedding_dim), torch.nan)
    setattr(decoder, name, nn.ModuleList([*skipped, *layers[start:]]))
    try:
        with cache.seen_from(start):
            outputs = model(
                inputs_embeds=unused,
                position_ids=_rows(positions, hidden.shape[0]),
                attention_mask=attention_mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
    finally:
        setattr(decoder, name, layers)
    logits: torch.Tensor = outputs.logits
    if bool(logits.isnan().any()) and not bool(hidden.isnan().any()):
        raise UnsupportedError(
            f"run_from_layer: {type(model).__name__} feeds its embeddings to later layers as well, so hidden states alone are not enough. "
            "The cache has been written to: reset it, and run whole prompts."
        )
    return logits


class _Skipped(nn.Module):
    """Stands where a decoder layer stood, and answers for its attributes."""

    def __init__(self, layer: nn.Module, hidden: torch.Tensor | None) -> None:
        super().__init__()
        # In a tuple, so that the skipped layer is not registered as a child.
        self._skipped = (layer,)
        self._hidden = hidden

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states if self._hidden is None else self._hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_skipped"][0], name)


def _layer(model: PreTrainedModel, index: int) -> nn.Module:
    _, _, layers = compat.decoder_layers(model)
    if not 0 <= index < len(layers):
        raise ConfigError.of("layer", f"a decoder layer from 0 to {len(layers) - 1}", index)
    return layers[index]


def _rows(positions: torch.Tensor, batch: int) -> torch.Tensor:
    return positions.expand(batch, -1) if positions.ndim == 1 else positions
