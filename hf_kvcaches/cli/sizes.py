"""Bytes of caches from a model's config: the model is built without weights and asked what a token leaves in its cache."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedConfig

from hf_kvcaches import compat
from hf_kvcaches.core.layers import capacity_for
from hf_kvcaches.core.report import foreign_tensors
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels.code_format import TILE
from hf_kvcaches.subspace.rows import Ends, room_for

# Of families that can't be run without weights, only these layers are known from the config.
_PLAIN = ("full_attention", "sliding_attention")
# What a `SubspaceCache` keeps exact by default.
_ENDS = Ends(sinks=4, recent=64)
# Bits of the methods of quantization whose configs do not say them.
_METHODS = {"fp8": 8, "fp4": 4, "eetq": 8, "bitnet": 2}
# Tokens that the model without weights is fed.
_FED = 2


@dataclass(frozen=True)
class LayerSize:
    """What one row of a `DynamicCache` holds in a layer.

    Args:
        numbers: Of a token's keys and values, all heads together.
        heads: Key heads.
        window: The most tokens that are kept; None for all.
        state: Bytes that do not grow with the text.
    """

    numbers: int
    heads: int
    window: int | None = None
    state: int = 0

    def slots(self, tokens: int) -> int:
        return tokens if self.window is None else min(tokens, self.window)


@dataclass(frozen=True)
class ModelSize:
    """What a model and its caches are made of.

    Args:
        weight_bytes: Of all weights.
        element: Bytes of a number of keys and values.
        weight_bits: Of a number of a quantized matrix; None where weights are not quantized.
    """

    layers: tuple[LayerSize, ...]
    weight_bytes: int
    element: int
    weight_bits: int | None = None

    def full(self, tokens: int) -> float:
        """Bytes of a row of a `DynamicCache`."""
        return sum(self._token(layer) * layer.slots(tokens) + layer.state for layer in self.layers)

    def growing(self, tokens: int) -> float:
        """Bytes of a row of a `GrowingCache`, with its reserve."""
        return self._with(tokens, lambda layer: capacity_for(tokens) * self._token(layer))

    def slots(self, tokens: int, budget: int) -> float:
        """Bytes of a row of an `EquipCache`: beside keys and values, a slot has a position, a score, a place and a mask."""
        slots = min(budget, capacity_for(tokens))
        return self._with(tokens, lambda layer: slots * (self._token(layer) + (12 + self.element) * layer.heads))

    def quantized_slots(self, tokens: int, budget: int, bits: int) -> float:
        """The same with `storage`, of 8 or 4 bits."""
        slots = min(budget, capacity_for(tokens))

        def of_layer(layer: LayerSize) -> float:
            scales = layer.numbers / layer.heads / 2 / 32 if bits == 4 else 1
            value_scales = scales * (4 if self.element <= 2 else 8)
            # Beside the slots, the centers and sizes of the channels of keys.
            return slots * (layer.numbers * bits / 8 + (4 + value_scales + 12) * layer.heads) + self._token(layer)

        return self._with(tokens, of_layer)

    def codes(self, tokens: int, ratio: float) -> float:
        """Bytes of a row of a `SubspaceCache` with a codec of that share of the bytes of 16 bits."""
        coded = TILE * _ENDS.tiles(tokens)
        capacity = room_for(coded) if coded else 0
        return self._with(tokens, lambda layer: (tokens - coded) * self._token(layer) + capacity * 2 * layer.numbers * ratio)

    def _token(self, layer: LayerSize) -> int:
        return layer.numbers * self.element

    def _with(self, tokens: int, of_layer: Callable[[LayerSize], float]) -> float:
        """The bytes of layers with full attention, and of the others as transformers keeps them."""
        others = [layer for layer in self.layers if layer.window is not None or not layer.numbers]
        held = sum(of_layer(layer) for layer in self.layers if layer not in others)
        return held + sum(self._token(layer) * layer.slots(tokens) + layer.state for layer in others)


def model_size(config: PreTrainedConfig, dtype: torch.dtype) -> ModelSize:
    """Sizes of a model and of its caches; nothing but the config is read.

    Args:
        dtype: Of weights, keys and values.
    """
    model = _without_weights(config)
    element, bits = dtype.itemsize, _weight_bits(config)
    weights = _weight_bytes(model, element, bits)
    cache = DynamicCache(config=model.config)
    tokens = torch.zeros(1, _FED, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(input_ids=tokens, **compat.cache_kwargs(model, cache))
    except (RuntimeError, ValueError, TypeError):  # some models look at what is in a tensor, and here it has nothing in it
        return ModelSize(_from_config(config), weights, element, bits)
    return ModelSize(tuple(_measured(layer, element) for layer in cache.layers), weights, element, bits)


def _weight_bits(config: PreTrainedConfig) -> int | None:
    """How many bits a number of a quantized matrix has, as the config says; None where weights are not quantized, or it does not say."""
    quantization: Any = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    options = quantization if isinstance(quantization, dict) else vars(quantization)
    if isinstance(bits := options.get("bits", options.get("w_bit")), int):
        return bits
    if options.get("load_in_4bit") or options.get("load_in_8bit"):
        return 4 if options.get("load_in_4bit") else 8
    method = str(getattr(options.get("quant_method"), "value", options.get("quant_method")))
    return next((bits for part, bits in _METHODS.items() if part in method), None)


def _weight_bytes(model: Any, element: int, bits: int | None) -> int:
    """Bytes of a model's weights; embeddings, the output head and vectors are never quantized, and scales are not counted."""
    if bits is None:
        return sum(parameter.numel() for parameter in model.parameters()) * element
    kept = [module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    exact = {id(parameter) for parameter in kept}
    return sum(
        parameter.numel() * element if parameter.ndim < 2 or id(parameter) in exact else parameter.numel() * bits // 8
        for parameter in model.parameters()
    )


def _without_weights(config: PreTrainedConfig) -> Any:
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        with contextlib.suppress(ValueError), torch.device("meta"):
            return auto.from_config(config, dtype=torch.bfloat16)
    raise UnsupportedError(f"recommend: transformers has no model that writes text with a {type(config).__name__}.")


def _measured(layer: Any, element: int) -> LayerSize:
    """The size of a layer that has been fed `_FED` tokens in bfloat16."""
    keys: Any = getattr(layer, "keys", None)
    values: Any = getattr(layer, "values", None)
    has_tokens = isinstance(keys, torch.Tensor) and keys.ndim == 4
    numbers = sum(tensor.numel() for tensor in (keys, values) if tensor is not None) // _FED if has_tokens else 0
    states = (tensor for tensor in foreign_tensors(layer).values() if not (has_tokens and (tensor is keys or tensor is values)))
    state = sum(tensor.numel() * (element if tensor.dtype == torch.bfloat16 else tensor.element_size()) for tensor in states)
    window = getattr(layer, "sliding_window", None)
    heads = keys.shape[1] if has_tokens else 1
    return LayerSize(numbers, heads, None if window is None else window - 1, state)


def _from_config(config: PreTrainedConfig) -> tuple[LayerSize, ...]:
    """The same for models of plain layers, from what their config says."""
    text = compat.decoder_config(config)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    layers = []
    for index, (layer_type, layer) in enumerate(compat.layer_plan(text)):
        sizes = head_sizes(text, index)
        if layer_type not in _PLAIN or sizes is None or heads is None or getattr(text, "kv_lora_rank", None):
            raise UnsupportedError(f"recommend: the sizes of {type(text).__name__} can't be told without weights. Use hf-kvcaches bench.")
        window = getattr(layer, "sliding_window", None)
        layers.append(LayerSize(heads * sum(sizes), heads, None if window is None else window - 1))
    return tuple(layers)
