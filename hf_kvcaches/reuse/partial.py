"""Passes through a model without its head, and through some of its layers, on a shallow twin of the model.

The twin shares every weight, buffer and hook with the model; only the modules on the way from its root to an exchanged part are new. The
model is never changed: other threads may run it meanwhile, and nothing has to be restored when a pass is interrupted.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from hf_kvcaches import compat
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.view import LayerView
from hf_kvcaches.errors import ConfigError, UnsupportedError


class PassEnded(Exception):
    """Ends a pass whose further layers nobody wants."""


def twin_of(root: nn.Module, exchanged: Mapping[str, nn.Module]) -> nn.Module:
    """Return a module that shares everything with another one but some modules inside, which are given by their dotted names."""
    if "" in exchanged:
        return exchanged[""]
    below: dict[str, dict[str, nn.Module]] = {}
    for name, module in exchanged.items():
        child, _, rest = name.partition(".")
        below.setdefault(child, {})[rest] = module
    children = {child: twin_of(root.get_submodule(child), inside) for child, inside in below.items()}
    twin = object.__new__(type(root))
    state = {name: _bound_to_twin(value, root, twin) for name, value in root.__dict__.items()}
    if state.get("forward") is not None and state["forward"] is root.__dict__["forward"]:
        raise UnsupportedError(
            f"model: the forward of its {type(root).__name__} was replaced by {state['forward']!r}, which runs the whole model, so parts "
            "of it can't be run. Undo the replacement, or use GrowingCache."
        )
    twin.__dict__.update(state | compat.state_of_twin(root, children))
    return twin


def _bound_to_twin(value: Any, module: nn.Module, twin: nn.Module) -> Any:
    """An attribute of a module for its twin, which gets the methods that were put onto the module itself."""
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return types.MethodType(value.__func__, twin)
    if isinstance(value, functools.partial) and any(argument is module for argument in value.args):  # accelerate's hooks
        return functools.partial(value.func, *(twin if argument is module else argument for argument in value.args), **value.keywords)
    return value


def name_of(root: nn.Module, module: nn.Module) -> str:
    """The dotted name of a module in another one."""
    return next(name for name, inside in root.named_modules() if inside is module)


def with_layers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> nn.Module:
    """A twin of a model without its head, with other decoder layers."""
    decoder, name, _ = decoder_layers(model)
    path = name_of(model.base_model, decoder)
    return twin_of(model.base_model, {f"{path}.{name}" if path else name: nn.ModuleList(layers)})


class StandIn(nn.Module):
    """Stands where another module stood, answers for its attributes, and calls a function in its place."""

    stood: nn.Module

    def __init__(self, stood: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["stood"] = stood  # not registered as a child
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.stood.parameters(recurse)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stood"], name)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ToldModule(StandIn):
    """Runs the module with the `Arguments` that a function makes of its positional and keyword arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._call(args, kwargs)
        return self.stood(*args, **kwargs)


class LayerPass(Cache):
    """Appends to the layers of a cache, or writes where a `SparsePass` says; lengths are those of the layers that run."""

    def __init__(self, cache: KVCache, start: int = 0, sparse: Any = None) -> None:
        super().__init__(layers=cache.layers)
        self.cache, self.start, self.sparse = cache, start, sparse

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        layer = self.layers[layer_idx]
        if self.sparse is None:
            states: tuple[Any, Any] = layer.update(key_states, value_states, *args, **kwargs)
        else:
            states = (self.sparse.write(layer, layer_idx, key_states, value_states),) * 2
        if isinstance(states[0], LayerView):
            self.cache.answer_next(states[0])
        return states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(super().get_seq_length(self._counting(layer_idx)))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.sparse is not None:
            return self.sparse.total, 0
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, self._counting(layer_idx))
        return sizes

    def _counting(self, layer_idx: int) -> int:
        """The lowest running layer of the kind that `layer_idx` has; layers of linear attention don't count tokens."""
        if layer_idx >= self.start:
            return layer_idx
        kinds = self.is_sliding
        alike = (index for index in range(self.start, len(kinds)) if kinds[index] == kinds[layer_idx])
        return next((index for index in alike if isinstance(self.layers[index], CacheLayerMixin)), layer_idx)


class StoppingPass(LayerPass):
    """Ends with a `PassEnded` when a layer has its keys and values."""

    def __init__(self, cache: KVCache, last: int) -> None:
        super().__init__(cache)
        self.last = last

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self.last:
            raise PassEnded
        return states


def run_span(
    model: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, positions: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> None:
    """Run tokens at given positions into a cache.

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
    """Run tokens as `run_span` does, through a model without its head or a twin of it; without positions, at those that follow."""
    arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, **compat.cache_kwargs(module, cache)}
    names = compat.parameter_names(type(module))
    if positions is not None and "position_ids" in names:
        arguments["position_ids"] = positions.expand(input_ids.shape)
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
    """Run only the layers from `start` to before `stop`, and return what would enter layer `stop`, (batch, tokens, hidden).

    After the last layer it is what enters the model's final norm. Tokens, positions and mask are as in `run_span`; `hidden` is what entered
    layer `start`, None for layer 0. The layers of the cache that are run take the keys and values, as the pass says where one is given.
    """
    layers = decoder_layers(model)[2]
    if not 0 <= start < len(layers) or (hidden is None) != (start == 0):
        raise ConfigError.of("start", f"a decoder layer from 0 to {len(layers) - 1}, and hidden for all but layer 0", start)
    if not start < stop <= len(layers):
        raise ConfigError.of("stop", f"a layer above {start}, or the number of layers", stop)
    outputs: list[Any] = []

    def run_last(*args: Any, **kwargs: Any) -> Any:
        outputs.append(layers[stop - 1](*args, **kwargs))
        return outputs[-1]

    # Skipped layers stay in the list, because models look up masks by a layer's index. The last one hands out `hidden`, so that nothing
    # that the model does to its embeddings (scaling, learned positions) matters.
    modules: list[nn.Module] = [StandIn(layer, lambda hidden_states, *args, **kwargs: hidden_states) for layer in layers]
    modules[start:stop] = [*layers[start : stop - 1], StandIn(layers[stop - 1], run_last)]
    if start:
        modules[start - 1] = StandIn(layers[start - 1], lambda *args, **kwargs: hidden)
    taking = cache if isinstance(cache, LayerPass) else LayerPass(cache, start)
    run_module(with_layers(model, modules), taking, input_ids, positions, attention_mask)
    output = next((each[0] if isinstance(each, tuple) else each for each in outputs), None)
    if not isinstance(output, torch.Tensor) or output.shape[:-1] != input_ids.shape:
        raise UnsupportedError(f"model: {type(model).__name__} passes more than hidden states from layer to layer. Run whole prompts.")
    return output
