"""Passes through some of a model's layers, on a shallow twin of the model.

The twin shares every weight, buffer and hook with the model. Only the modules on the way from its root to an exchanged part are new
objects, with a dict of children of their own. The model itself is never changed: other threads may run it meanwhile, and nothing has to be
restored when a pass is interrupted.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.errors import UnsupportedError


class PassEnded(Exception):
    """Ends a pass whose further layers nobody wants."""


def twin_of(root: nn.Module, exchanged: Mapping[str, nn.Module]) -> nn.Module:
    """A module that shares everything with another one but some of the modules inside.

    Args:
        exchanged: New modules by their dotted names in `root`.
    """
    if "" in exchanged:
        return exchanged[""]
    below: dict[str, dict[str, nn.Module]] = {}
    for name, module in exchanged.items():
        child, _, rest = name.partition(".")
        below.setdefault(child, {})[rest] = module
    children = {child: twin_of(root.get_submodule(child), inside) for child, inside in below.items()}
    return _shallow_copy(root, children)


def _shallow_copy(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    twin = object.__new__(type(module))
    state = {name: _bound_to_twin(value, module, twin) for name, value in module.__dict__.items()}
    if state.get("forward") is not None and state["forward"] is module.__dict__["forward"]:
        raise UnsupportedError(
            f"model: the forward of its {type(module).__name__} was replaced by {state['forward']!r}, which runs the whole model, so "
            "parts of it can't be run. Undo the replacement, or use GrowingCache."
        )
    twin.__dict__.update(state | compat.state_of_twin(module, children))
    return twin


def _bound_to_twin(value: Any, module: nn.Module, twin: nn.Module) -> Any:
    """An attribute of a module as its twin needs it: methods that were put onto the module itself belong to the twin."""
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
    decoder, name, _ = compat.decoder_layers(model)
    path = name_of(model.base_model, decoder)
    return twin_of(model.base_model, {f"{path}.{name}" if path else name: nn.ModuleList(layers)})


class StandIn(nn.Module):
    """Stands where another module stood, and answers for its attributes."""

    def __init__(self, stood: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that the module is not registered as a child.
        self._stood = (stood,)

    @property
    def stood(self) -> nn.Module:
        """The module in whose place this one stands."""
        return self._stood[0]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.stood.parameters(recurse)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_stood"][0], name)


class SkippedLayer(StandIn):
    """Computes nothing: it hands on what it is given, or hands out what the layer would have.

    Args:
        hidden: What it hands out, (batch, tokens, hidden); None for what it is given.
    """

    def __init__(self, stood: nn.Module, hidden: torch.Tensor | None = None) -> None:
        super().__init__(stood)
        self._hidden = hidden

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states if self._hidden is None else self._hidden


class ToldModule(StandIn):
    """Runs the module, and is told what it is called with.

    Args:
        on_call: From the arguments to those that the module gets.
    """

    def __init__(
        self, stood: nn.Module, on_call: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> None:
        super().__init__(stood)
        self._on_call = on_call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._on_call(args, kwargs)
        return self.stood(*args, **kwargs)


class RunningLayer(StandIn):
    """Runs the layer, and keeps what came out.

    Attributes:
        output: What the layer gave last, (batch, tokens, hidden).
    """

    def __init__(self, stood: nn.Module) -> None:
        super().__init__(stood)
        self.__dict__["output"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.stood(*args, **kwargs)
        self.__dict__["output"] = outputs[0] if isinstance(outputs, tuple) else outputs
        return outputs
