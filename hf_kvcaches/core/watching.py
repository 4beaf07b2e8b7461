"""Whether a model is still the one that was fingerprinted, asked before every prompt and therefore cheaply."""

from __future__ import annotations

import weakref
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core._model_state import adapters_in_force
from hf_kvcaches.core._tensor_digest import sample_of
from hf_kvcaches.core.fingerprint import ModelFingerprint

# How many tensors' contents are compared each time, in turn.
_LOOKED_AT = 4


class _Watched:
    """What was seen of a model when its fingerprint was taken."""

    def __init__(self, tensors: list[torch.Tensor], marks: list[Any], rest: tuple[Any, ...], digest: str) -> None:
        self.marks, self.rest, self.digest = marks, deepcopy(rest), digest
        self.samples = [sample_of(tensor) for tensor in tensors]
        self.turn = 0


_watched: weakref.WeakKeyDictionary[PreTrainedModel, _Watched] = weakref.WeakKeyDictionary()


def digest_of_model(model: PreTrainedModel) -> str:
    """The digest of a model's fingerprint (without a tokenizer), taken anew only where the model has changed.

    Every call compares where each tensor is and how often PyTorch wrote to it, the config, which adapters are in force, and some elements
    of a few tensors, each time of others. The latter finds what PyTorch does not count: fused optimizers at once, because they write to all
    tensors; a write through `.data` to a single one within a few calls.

    Args:
        model: Without a PEFT wrapper.
    """
    modules = compat.modules_of(model)
    own = chain.from_iterable((*module._parameters.values(), *module._buffers.values()) for module in modules)
    tensors = [tensor for tensor in own if tensor is not None]
    marks = [_mark(tensor) for tensor in tensors]
    rest = (_settings(model.config), adapters_in_force(model, modules))
    kept = _watched.get(model)
    if kept is None or kept.marks != marks or kept.rest != rest or not _same_content(kept, tensors):
        kept = _watched[model] = _Watched(tensors, marks, rest, ModelFingerprint.of(model).digest)
    return kept.digest


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    """What a config says, but for its private notes: the way attention is computed is one, and changes with every kind of cache."""
    return {
        name: _settings(value) if isinstance(value, PreTrainedConfig) else value
        for name, value in vars(config).items()
        if not name.startswith("_")
    }


def _mark(tensor: torch.Tensor) -> Any:
    # Tensors made in inference mode have no version counter.
    return (id(tensor), 0 if tensor.is_meta else tensor.data_ptr(), None if tensor.is_inference() else tensor._version)


def _same_content(kept: _Watched, tensors: list[torch.Tensor]) -> bool:
    count = len(tensors)
    chosen = [(kept.turn + step * max(1, count // _LOOKED_AT)) % count for step in range(min(_LOOKED_AT, count))]
    kept.turn += 1
    return all(sample_of(tensors[index]) == kept.samples[index] for index in chosen)
