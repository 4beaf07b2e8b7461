"""What a config says about how its keys carry positions, read without building the model.

Which pairs of dimensions are rotated together, and which way round, is in no config: the family's own rotary function is called on a few
numbers. Where neither that nor `families.toml` tells, keys are not rotated: a wrong layout would show in the text alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from itertools import product
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.rotation import Layout, rotate_

Kind = Literal["rope", "none", "learned", "alibi", "unknown"]

# Their frequencies follow from the config alone. "proportional" gives frequency 0 to the dimensions that are not rotated.
_LENGTH_INDEPENDENT = {"default", "linear", "llama3", "yarn", "proportional"}
_LENGTH_DEPENDENT = {"dynamic", "longrope"}
_LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")


def read_rotary_facts(text: Any, layer_type: str | None, layer_idx: int, latents: bool) -> dict[str, Any]:
    """Return the arguments of a `RotaryGeometry` for one layer, whose type is its key where `rope_parameters` are nested."""
    config, parameters = text.per_layer_config[layer_idx], getattr(text, "rope_parameters", None) or {}
    nested = any(isinstance(value, dict) for value in parameters.values())
    parameters = parameters.get(layer_type) if nested else parameters
    if (head_dim := _head_dim(config)) is None:
        raise ConfigError.of("config", "head_dim, or hidden_size and num_attention_heads", type(config).__name__)
    facts: dict[str, Any] = {"inv_freq": torch.zeros(0, dtype=torch.float64), "head_dim": head_dim}

    for kind in ("alibi", "learned"):
        if compat.is_family(text, kind) or (kind == "alibi" and getattr(text, "alibi", False)):
            return facts | {"kind": kind, "rope_type": "none", "refusal": f"its keys can't be moved (positions of the kind {kind!r})"}
    facts["layout"], direction = _layout(text) or ("half", 0)
    if compat.is_family(text, "fixed_base"):
        return facts | {"inv_freq": _default_frequencies(10000.0, text.rotary_dim)}
    if not latents and (getattr(config, "kv_lora_rank", None) or getattr(config, "qk_rope_head_dim", None)):
        return facts | {"refusal": "multi-head latent attention keeps its rotated dimensions apart from the rest"}
    unrotated = not _layer_rotates(text, config, layer_idx) if parameters else nested
    if unrotated or compat.is_family(text, "latents_unrotated"):
        return facts | {"kind": "none", "rope_type": "none"}
    if parameters:
        return facts | _rotation_facts(text, config, parameters, layer_type if nested else None, direction)
    refusal = "its config does not say how its keys carry positions (kind 'unknown')"
    return facts | {"kind": "unknown", "rope_type": "none", "refusal": refusal}


def _rotation_facts(text: Any, config: Any, parameters: dict[str, Any], key: str | None, direction: int) -> dict[str, Any]:
    """Return what is known of a layer that rotates its keys, in a direction of 1 or -1, or 0 if the layout is not known."""
    rope_type = parameters.get("rope_type", "default")
    try:
        inv_freq, scaling = _frequencies(config, parameters, rope_type, key)
    except (KeyError, TypeError) as error:
        expected = f"the keys that rope_type {rope_type!r} needs"
        raise ConfigError.of("config.rope_parameters", expected, parameters, f"Reading it failed on {error!r}.") from error
    facts: dict[str, Any] = {"rope_type": rope_type, "axes": compat.is_family(text, "axes"), "attention_scaling": float(scaling)}
    facts |= {"inv_freq": inv_freq * (direction or 1), "refusal": _refusal(text, config, parameters, rope_type, 2 * inv_freq.numel())}
    if latent_dim := getattr(config, "kv_lora_rank", None):
        facts["head_dim"] = config.qk_rope_head_dim + latent_dim
    if facts["refusal"] is not None:
        return facts
    if not direction:
        whose = f"the rotary function of {text.model_type} was not understood"
        if _modeling_module(text.__class__) is None:
            whose = f"{type(text).__name__} is not transformers' own"
        if rope_type in _LENGTH_DEPENDENT:
            del facts["inv_freq"]
        return facts | {"kind": "unknown", "refusal": f"{whose}, so it is not known which dimensions of its keys are rotated together"}
    if rope_type not in _LENGTH_DEPENDENT:
        return facts
    facts["refusal"] = f"with rope_type {rope_type!r} the frequencies depend on the length of the text, so cached keys have no fixed angles"
    if rope_type == "dynamic":
        # A shorter text than the limit brings the first frequencies back, one of just that length does not.
        facts["changes_at"] = int(config.max_position_embeddings) - 1
    elif "short_mscale" not in parameters:  # PhiMoE changes the norm of its keys instead
        facts["changes_at"] = limit = int(parameters["original_max_position_embeddings"])
        facts["inv_freq_beyond"] = _frequencies(config, parameters, rope_type, key, limit + 1)[0] * direction
    return facts


def _frequencies(config: Any, parameters: Any, rope_type: str, key: str | None, tokens: int | None = None) -> tuple[Tensor, float]:
    """Return the frequencies of a layer, exactly the model's in float32, and its attention scaling, for a text of so many tokens."""
    if rope_type in ROPE_INIT_FUNCTIONS:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=tokens, layer_type=key)
        return inv_freq.float().double(), scaling
    dim = int((_head_dim(config) or 0) * (parameters.get("partial_rotary_factor") or 1.0))
    return _default_frequencies(parameters["rope_theta"], dim), 1.0


def _default_frequencies(base: float, dim: int) -> Tensor:
    # In float32 and in the models' own order of operations: these are the numbers that the model multiplies its positions by.
    return (1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))).double()


def _refusal(text: Any, config: Any, parameters: dict[str, Any], rope_type: str, rotary_dim: int) -> str | None:
    """Return why the keys of a layer can't be rotated, whatever the length of the text."""
    if rope_type not in _LENGTH_INDEPENDENT | _LENGTH_DEPENDENT:
        return f"rope_type {rope_type!r} is not known"
    if compat.is_family(text, "scaled_after"):
        return f"{text.model_type} scales the dimensions of its keys after the rotation"
    if set(filter(None, getattr(text, "layer_rope_theta", None) or ())) - {parameters.get("rope_theta")}:
        return f"the layers of this {text.model_type} model have a theta each, which is not supported"
    head_dim = config.qk_rope_head_dim if getattr(config, "kv_lora_rank", None) else _head_dim(config)
    if rotary_dim > (head_dim or 0):
        return f"{text.model_type} rotates {rotary_dim} dimensions in heads of {head_dim}, in a way that is not known"
    return None


def _layer_rotates(text: Any, config: Any, layer_idx: int) -> bool:
    unrotated = compat.is_family(text, "rotation_switched_off") and text.position_embedding_type != "rope"
    if unrotated or getattr(text, "use_mem_rope", True) is False:
        return False
    for flags in ("no_rope_layers", "layer_rope_theta"):  # Either is false for a layer that is not rotated.
        if getattr(text, flags, None):
            return bool(getattr(text, flags)[layer_idx])
    has_window = getattr(config, "sliding_window", None) is not None
    if compat.is_family(text, "sliding_only") or (compat.is_family(text, "sliding_only_with_window") and has_window):
        # Cohere 2 MoE rotates its leading dense layers as well.
        dense_too = getattr(text, "prefix_dense_sliding_window_pattern", None) == 1 and text.mlp_layer_types[layer_idx] == "dense"
        return dense_too or (has_window and text.layer_types[layer_idx] == "sliding_attention")
    return True


def _head_dim(config: Any) -> int | None:
    head_dim, width, heads = (getattr(config, name, None) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if head_dim is not None:
        return int(head_dim)
    return width // heads if isinstance(width, int) and isinstance(heads, int) else None


def head_sizes(text: Any, layer_idx: int) -> tuple[int, int] | None:
    """Return the sizes of a layer's keys and values; None where the config of the decoder does not tell."""
    config = text.per_layer_config[layer_idx]
    size = _head_dim(config)
    return None if size is None else (size, getattr(config, "v_head_dim", None) or size)


def _layout(text: Any) -> tuple[Layout, int] | None:
    """Return which dimensions of a decoder's keys form a pair, and 1 or -1 for the direction of the rotation; None if that is not known."""
    for layout in _LAYOUTS:
        if compat.is_family(text, layout):
            return layout, 1
    function = getattr(_modeling_module(text.__class__), "apply_rotary_pos_emb", None)
    return None if function is None else _probed_layout(function)


@cache
def _modeling_module(config_class: type) -> ModuleType | None:
    base_class = next((base for base in config_class.__mro__ if base.__module__.startswith("transformers.models.")), None)
    if base_class is None:
        return None
    try:
        return importlib.import_module(base_class.__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError:  # a config that shares another family's code
        return importlib.import_module(MODEL_MAPPING[base_class].__module__) if base_class in MODEL_MAPPING else None


@cache
def _probed_layout(function: Callable[..., Any]) -> tuple[Layout, int] | None:
    """Return the layout and direction by which an `apply_rotary_pos_emb` rotates eight numbers by a quarter of a circle."""
    key = torch.arange(1.0, 9.0).view(1, 1, 1, 8)
    # Tables are as wide as a head, or have one number for each pair; some functions take queries before the keys.
    for width, queries in product((8, 4), ([key], [])):
        arguments = (*queries, key, torch.zeros(1, 1, width), torch.ones(1, 1, width))
        try:
            result = function(*(argument.clone() for argument in arguments))
        except (TypeError, RuntimeError, IndexError):
            continue
        rotated = result[1] if isinstance(result, tuple) else result
        for layout, direction in product(_LAYOUTS, (1, -1)):
            if torch.equal(rotated, rotate_(key.clone(), torch.zeros(4), direction * torch.ones(4), layout)):
                return layout, direction
    return None
