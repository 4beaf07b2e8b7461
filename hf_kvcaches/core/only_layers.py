"""A model of which only some layers run, by exchanging its list of layers for the time of a pass."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat


class LookedEnough(Exception):
    """Ends a layer whose output nobody wants, where its keys and values are known."""


_locks: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()


@contextmanager
def alone(model: PreTrainedModel) -> Iterator[None]:
    """While open, no other thread has exchanged the model's layers, nor does it. For passes in the background.

    Args:
        model: The model.
    """
    with _locks.setdefault(model, threading.RLock()):
        yield


@contextmanager
def only_layers(
    model: PreTrainedModel,
    start: int,
    stop: int | None = None,
    hidden: torch.Tensor | None = None,
    storing: Callable[[], AbstractContextManager[None]] | None = None,
) -> Iterator[list[torch.Tensor]]:
    """While open, the model runs only these layers; collects what leaves the last of them where `stop` is given.

    Args:
        model: A causal language model.
        start: The lowest layer to run.
        stop: The first layer not to run; None: all run, and nothing is collected.
        hidden: What enters layer `start`; not needed for layer 0.
        storing: See `Remaining`.
    """
    with alone(model):
        yield from _exchanged(model, start, stop, hidden, storing)


def _exchanged(
    model: PreTrainedModel,
    start: int,
    stop: int | None,
    hidden: torch.Tensor | None,
    storing: Callable[[], AbstractContextManager[None]] | None,
) -> Iterator[list[torch.Tensor]]:
    decoder, name, layers = compat.decoder_layers(model)
    left: list[torch.Tensor] = []
    # Skipped layers stay in the list, because models look up masks by a layer's place in it. The last one hands out `hidden`,
    # so that nothing that the model does to its embeddings (scaling, learned positions) matters.
    below = [_Skipped(layer, hidden if index == start - 1 else None) for index, layer in enumerate(layers[:start])]
    running = list(layers[start:stop])
    if stop is not None:
        running[-1] = _Watched(running[-1], left)
    elif storing is not None:
        running[-1] = _LastToken(running[-1], storing)
    above = [_Skipped(layer, None) for layer in layers[len(below) + len(running) :]]
    setattr(decoder, name, nn.ModuleList([*below, *running, *above]))
    try:
        yield left
    finally:
        setattr(decoder, name, layers)


class _StandIn(nn.Module):
    """Stands where a decoder layer stood, and answers for its attributes. Other threads get the layer itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that the layer is not registered as a child.
        self._layer = (layer,)
        self._owner = threading.get_ident()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._owner:
            return self._layer[0](*args, **kwargs)
        return self.stand_in(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._layer[0].parameters(recurse)

    def stand_in(self, *args: Any, **kwargs: Any) -> Any:
        """What happens in the layer's place."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)


class _Skipped(_StandIn):
    """Does nothing, or hands out what the layer would have."""

    def __init__(self, layer: nn.Module, hidden: torch.Tensor | None) -> None:
        super().__init__(layer)
        self._hidden = hidden

    def stand_in(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states if self._hidden is None else self._hidden


class _Watched(_StandIn):
    """Runs the layer, and keeps what comes out."""

    def __init__(self, layer: nn.Module, left: list[torch.Tensor]) -> None:
        super().__init__(layer)
        self._left = left

    def stand_in(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._layer[0](*args, **kwargs)
        self._left.append(outputs[0] if isinstance(outputs, tuple) else outputs)
        return outputs


class _LastToken(_StandIn):
    """The last layer, of which only the last token's output is wanted: of the others it only makes keys and values."""

    def __init__(self, layer: nn.Module, storing: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(layer)
        self._storing = storing

    def stand_in(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layer, (batch, tokens, _) = self._layer[0], hidden_states.shape
        cut = {name: _of_last(value, batch, tokens) for name, value in kwargs.items()}
        if tokens == 1 or args or any(value is _UNCLEAR for value in cut.values()):
            return layer(hidden_states, *args, **kwargs)
        with self._storing(), suppress(LookedEnough):
            layer(hidden_states, **kwargs)
        return layer(hidden_states[:, -1:], **cut)


_UNCLEAR = object()


def _of_last(value: Any, batch: int, tokens: int) -> Any:
    """What a layer's argument is for the last token alone, or `_UNCLEAR`."""
    if isinstance(value, torch.Tensor):
        clear = value.ndim in (2, 3) and value.shape[0] in (1, batch) and value.shape[1] == tokens
        return value[:, -1:] if clear else _UNCLEAR
    if isinstance(value, tuple | list):
        parts = [_of_last(part, batch, tokens) for part in value]
        return _UNCLEAR if any(part is _UNCLEAR for part in parts) else type(value)(parts)
    return value
