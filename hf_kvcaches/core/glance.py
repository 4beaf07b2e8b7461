"""A quick look at a model, for caches that share nothing: it takes milliseconds where reading every weight takes some decode steps.

It compares what modules hold besides tensors (settings of adapters among it) and some elements of every tensor. So a change of a whole
weight, of a setting or of an adapter is noticed, and a change of single elements mostly is not.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core._model_parts import CHANGING_ROPE
from hf_kvcaches.core._plain import BOOKKEEPING, FOR_TRAINING, INTERNAL

_SAMPLES = 64
_VALUES = (bool, int, float, str, type(None))

# What was seen: equal for a model that has not changed in between. It means nothing to another process.
Glance = tuple[Any, ...]


def glance_at(model: PreTrainedModel) -> Glance:
    """What a quick look at a model sees.

    Args:
        model: Without a PEFT wrapper.
    """
    modules = compat.modules_of(model)
    held = tuple(
        (name, _value(value))
        for module in modules
        for name in _counted(tuple(vars(module)))
        # An attribute that is not there is as good as one that says no.
        if (value := vars(module)[name]) is not None and value is not False
    )
    tensors = [tensor for module in modules for tensor in chain(module._parameters.values(), _lasting(module))]
    return tuple(map(id, modules)), held, _value(tuple(map(str, vars(model.config).values()))), _samples(tensors)


def _lasting(module: nn.Module) -> list[Tensor | None]:
    """A module's buffers, but for frequencies that its forward changes with the length of the text."""
    changing = getattr(module, "rope_type", None) in CHANGING_ROPE
    return [tensor for name, tensor in module._buffers.items() if not (changing and name == "inv_freq")]


@cache
def _counted(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a module's attributes that have an effect on what it computes, as in `core._plain`."""
    own = (name for name in names if name not in INTERNAL and name not in BOOKKEEPING)
    return tuple(name for name in own if not FOR_TRAINING.search(name))


def _value(value: Any) -> Any:
    if type(value) in _VALUES:
        return value
    if type(value) in (tuple, list):
        return tuple(map(_value, value))
    if isinstance(value, dict):  # PEFT's scaling, say, by adapter
        return tuple((key, _value(item)) for key, item in value.items())
    return id(value) if callable(value) else type(value)


def _samples(tensors: list[Tensor | None]) -> tuple[bytes, ...]:
    """Some elements of every tensor, brought from each device in one go."""
    picked: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor is None or tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
            continue
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            continue  # a wrapper around others
        flat = tensor.detach().flatten() if tensor.is_contiguous() else tensor.detach()[..., :1].flatten()
        # An odd step, for one that divides the row length would read the same column in every row.
        picked[tensor.dtype, tensor.device].append(flat[:: (flat.numel() // _SAMPLES) | 1])
    return tuple(torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes() for parts in picked.values())
