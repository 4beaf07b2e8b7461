"""Find out whether a model can run spans of a prompt between others, by a pass in which no layer computes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.answerable import why_not_answering
from hf_kvcaches.core.attention import previous_implementation
from hf_kvcaches.core.partial import StandIn, with_layers
from hf_kvcaches.core.prefill import run_module
from hf_kvcaches.reuse.sparse import SparsePass

# A layer that calls one of these computes with a length that is right only for consecutive tokens.
_LENGTHS = frozenset({"get_seq_length", "get_mask_sizes"})
_PADDING, _TOKENS = (3, 0), 8

_refusals: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, str]] = weakref.WeakKeyDictionary()


def parts_refused(model: PreTrainedModel) -> str:
    """Say why a model can't run spans of a prompt between others, as the end of a sentence; "" if it can."""
    implementation = previous_implementation(compat.decoder_config(model.config))
    refusals = _refusals.setdefault(model, {})
    if implementation not in refusals:
        refusals[implementation] = _refusal(model, implementation)
    return refusals[implementation]


def _refusal(model: PreTrainedModel, implementation: str) -> str:
    reason = why_not_answering(model)
    if reason is not None:
        return reason
    if implementation not in ("sdpa", "eager"):
        return f"attention {implementation!r} takes no ready masks; load the model with attn_implementation='sdpa'"
    layers = compat.decoder_layers(model)[2]
    if len(compat.layer_plan(compat.decoder_config(model.config))) != len(layers):
        return f"not all layers of {type(model).__name__} have keys and values"
    measuring = next((kind for kind in _kinds(layers) if _LENGTHS & set(_names_in(kind))), None)
    if measuring is not None:
        return f"{measuring.__name__} computes with the number of tokens in the cache"
    try:
        return _compare_masks(model, layers)
    except Exception as error:  # a model may raise anything here; its error is the reason
        return f"a pass without layers fails in {type(model).__name__} ({type(error).__name__}: {error})"


def _kinds(layers: nn.ModuleList) -> list[type[nn.Module]]:
    return list(dict.fromkeys(type(module) for module in layers.modules()))


def _names_in(kind: type[nn.Module]) -> tuple[str, ...]:
    function = kind.forward
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_names


class _TriedLayer(StandIn):
    """A layer that computes nothing, and records the arguments of its call."""

    def __init__(self, stood: nn.Module, index: int, calls: list[tuple[int, torch.Tensor, Any]]) -> None:
        super().__init__(stood)
        self._index, self._calls = index, calls

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        names = compat.parameter_names(type(self.stood))
        mask = kwargs["attention_mask"] if "attention_mask" in kwargs else args[names.index("attention_mask")]
        self._calls.append((self._index, hidden, mask))
        return hidden


@torch.no_grad()
def _compare_masks(model: PreTrainedModel, layers: nn.ModuleList) -> str:
    """Compare the masks that a model makes for a padded batch with those of a sparse pass; say what differs, "" for nothing."""
    calls: list[tuple[int, torch.Tensor, Any]] = []
    twin = with_layers(model, [_TriedLayer(layer, index, calls) for index, layer in enumerate(layers)])
    device = compat.input_device(model)
    slots, padding = torch.arange(_TOKENS, device=device).expand(2, -1), torch.tensor(_PADDING, device=device)
    sparse = SparsePass(slots, padding, _TOKENS)
    real = slots >= padding[:, None]
    with torch.autocast(device.type, enabled=False):
        run_module(twin, DynamicCache(config=model.config), torch.ones_like(slots), sparse.positions, real.long())
    config = compat.decoder_config(model.config)
    masks = sparse.masks(model)
    if [index for index, _, _ in calls] != list(range(len(layers))):
        return f"{type(model).__name__} does not run its layers one after the other"
    for index, hidden, mask in calls:
        if hidden.shape != (*slots.shape, config.hidden_size):
            return f"{type(model).__name__} passes more than hidden states from layer to layer"
        expected = masks(index, hidden)
        if not isinstance(mask, torch.Tensor) or mask.dtype != expected.dtype or mask.shape != expected.shape:
            return f"{type(model).__name__} makes masks of another kind"
        different = (_visible(mask) != _visible(expected))[:, 0]
        if bool((different & real[..., None].to(mask.device)).any()):  # queries of padding may see anything
            return f"tokens of {type(model).__name__} see others than those before them in their window"
    return ""


def _visible(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask == 0
