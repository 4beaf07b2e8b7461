"""Bytes of caches from a model's config: the model is built without weights and asked what a token leaves in its cache."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, NamedTuple

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

# What a `SubspaceCache` keeps exact by default.
_ENDS = Ends(sinks=4, recent=64)
# Bits of the methods of quantization whose configs do not say them.
_METHODS = {"fp8": 8, "fp4": 4, "eetq": 8, "bitnet": 2}
# Tokens that the model without weights is fed.
_FED = 2


class LayerSize(NamedTuple):
    """What one row of a `DynamicCache` holds in a layer."""

    numbers: int  # of a token's keys and values, all heads together; 0 without attention
    heads: int  # key heads
    window: int | None = None  # the most tokens that are kept; None for all
    state: int = 0  # bytes that do not grow with the text


class ModelSize:
    """What a model and its caches are made of; the methods give the bytes of one row of a cache."""

    def __init__(self, layers: list[LayerSize], weight_bytes: int, element: int, weight_bits: int | None) -> None:
        self.layers, self.weight_bytes, self.element, self.weight_bits = layers, weight_bytes, element, weight_bits
        # The other layers have windows or states, which are in every cache as transformers has them.
        self.full_layers = [layer for layer in layers if layer.window is None and layer.numbers]
        self.numbers = sum(layer.numbers for layer in self.full_layers)
        self.heads = sum(layer.heads for layer in self.full_layers)

    def full(self, tokens: int, kept: int | None = None) -> float:
        """A `DynamicCache`; with `kept`, as many tokens in the layers that would hold all."""
        windows = sum(layer.numbers * min(tokens, layer.window) for layer in self.layers if layer.window is not None)
        whole = self.numbers * (tokens if kept is None else kept)
        return sum(layer.state for layer in self.layers) + self.element * (windows + whole)

    def growing(self, tokens: int) -> float:
        """A `GrowingCache`, with its reserve."""
        return self.full(tokens, capacity_for(tokens))

    def slots(self, tokens: int, budget: int) -> float:
        """An `EquipCache`: beside keys and values, a slot has a position, a score, a place and a mask."""
        slots = min(budget, capacity_for(tokens))
        return self.full(tokens, slots) + slots * (12 + self.element) * self.heads

    def int8_slots(self, tokens: int, budget: int) -> float:
        """The same with `storage="int8"`: keys and values have scales, and each channel of keys a center and a size."""
        slots, scales = min(budget, capacity_for(tokens)), 4 + (4 if self.element <= 2 else 8)
        return self.full(tokens, 1) + slots * (self.numbers + (scales + 12) * self.heads)

    def codes(self, tokens: int, ratio: float) -> float:
        """A `SubspaceCache` with a codec of that share of the bytes of 16 bits."""
        coded = TILE * _ENDS.tiles(tokens)
        return self.full(tokens, tokens - coded) + (room_for(coded) if coded else 0) * 2 * ratio * self.numbers


def model_size(config: PreTrainedConfig, dtype: torch.dtype) -> ModelSize:
    """Sizes of a model and of its caches with weights, keys and values of a dtype; nothing but the config is read."""
    model = _without_weights(config)
    element, bits = dtype.itemsize, _weight_bits(config)
    cache = DynamicCache(config=model.config)
    tokens = torch.zeros(1, _FED, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(input_ids=tokens, **compat.cache_kwargs(model, cache))
        layers = [_measured(layer, element) for layer in cache.layers]
    except (RuntimeError, ValueError, TypeError, AttributeError):  # some models look at what is in a tensor, and here it has nothing in it
        layers = _from_config(config)
    return ModelSize(layers, _weight_bytes(model, element, bits), element, bits)


def _without_weights(config: PreTrainedConfig) -> Any:
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        with contextlib.suppress(ValueError), torch.device("meta"):
            return auto.from_config(config, dtype=torch.bfloat16)
    raise UnsupportedError(f"recommend: transformers has no model that writes text with a {type(config).__name__}.")


def _weight_bits(config: PreTrainedConfig) -> int | None:
    """How many bits a number of a quantized matrix has, as the config says; None where weights are not quantized, or it does not say."""
    quantization: Any = getattr(config, "quantization_config", None) or {}
    options = quantization if isinstance(quantization, dict) else vars(quantization)
    if isinstance(bits := options.get("bits", options.get("w_bit")), int):
        return bits
    if options.get("load_in_4bit") or options.get("load_in_8bit"):
        return 4 if options.get("load_in_4bit") else 8
    method = str(getattr(options.get("quant_method"), "value", options.get("quant_method")))
    return next((bits for part, bits in _METHODS.items() if part in method), None)


def _weight_bytes(model: Any, element: int, bits: int | None) -> int:
    """Bytes of a model's weights; embeddings, the output head and vectors are never quantized, and scales are not counted."""
    ends = [module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    exact = {id(parameter) for parameter in ends}
    total = 0
    for parameter in model.parameters():
        is_exact = bits is None or parameter.ndim < 2 or id(parameter) in exact
        total += parameter.numel() * element if is_exact else parameter.numel() * bits // 8
    return total


def _measured(layer: Any, element: int) -> LayerSize:
    """The size of a layer that has been fed `_FED` tokens in bfloat16."""
    tensors = foreign_tensors(layer)
    tokens = [tensors.pop(name) for name in ("keys", "values") if name in tensors and tensors[name].ndim == 4]
    state = sum(tensor.numel() * (element if tensor.dtype == torch.bfloat16 else tensor.element_size()) for tensor in tensors.values())
    window = getattr(layer, "sliding_window", None)
    numbers = sum(tensor.numel() for tensor in tokens) // _FED
    return LayerSize(numbers, tokens[0].shape[1] if tokens else 1, None if window is None else window - 1, state)


def _from_config(config: PreTrainedConfig) -> list[LayerSize]:
    """The sizes of plain layers, from what their config says."""
    text = compat.decoder_config(config)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    layers = []
    for index, (layer_type, layer) in enumerate(compat.layer_plan(text)):
        sizes = head_sizes(text, index)
        plain = layer_type in ("full_attention", "sliding_attention") and not getattr(text, "kv_lora_rank", None)
        if not plain or sizes is None or heads is None:
            raise UnsupportedError(f"recommend: the sizes of {type(text).__name__} can't be told without weights. Use hf-kvcaches bench.")
        window = getattr(layer, "sliding_window", None)
        layers.append(LayerSize(heads * sum(sizes), heads, None if window is None else window - 1))
    return layers
