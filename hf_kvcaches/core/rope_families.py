"""What a config says about how its keys carry positions, read without building the model.

Some facts are not in any config, only in the modeling code. Which pairs of dimensions are rotated together, and which way round, is found
out by calling the family's own rotary function on a few numbers; where that is not possible and `families.toml` does not know it, keys are
not rotated at all. A guess would be worse: a wrong layout still gives keys of the right shape and norm, and only the text gets worse.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.rotation import Layout, rotate_

Kind = Literal["rope", "none", "learned", "alibi", "unknown"]

# Their frequencies follow from the config alone. "proportional" gives frequency 0 to the dimensions that are not rotated.
LENGTH_INDEPENDENT = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})


def read_rotary_facts(config: Any, layer_type: str | None, layer_idx: int | None, latents: bool = False) -> dict[str, Any]:
    """What a `RotaryGeometry` is made of, for one layer or for layers that are alike.

    Args:
        config: A model's config; of a multimodal one, the text decoder's part is read.
        layer_type: One of the config's `layer_types`, where layers differ.
        latents: As in `RotaryGeometry.from_config`.
    """
    if not hasattr(config, "get_text_config"):
        raise ConfigError.of("config", "a transformers config", type(config).__name__, "Pass model.config.")
    text = config.get_text_config(decoder=True)
    count = getattr(text, "num_hidden_layers", 1)
    count = count if isinstance(count, int) else 1
    types = [*(getattr(text, "layer_types", None) or ()), *[None] * count][:count]
    if layer_idx is not None:
        if not 0 <= layer_idx < count:
            raise ConfigError.of("layer_idx", f"0 to {count - 1}", layer_idx)
        if None not in (layer_type, types[layer_idx]) and layer_type != types[layer_idx]:
            wanted = f"{types[layer_idx]!r}, the type of layer {layer_idx}"
            raise ConfigError.of("layer_type", wanted, layer_type, "Pass one of the two.")
        return _facts_of(text, types[layer_idx] or layer_type, layer_idx, latents)
    labels = sorted({*filter(None, types), *(_nested_parameters(text) or ())})
    if layer_type is not None and labels and layer_type not in labels:
        raise ConfigError.of("layer_type", f"one of {labels}", layer_type)
    layers = [index for index in range(count) if layer_type in (None, types[index])] if any(types) or layer_type is None else []
    facts = {index: _facts_of(text, types[index], index, latents) for index in layers} or {0: _facts_of(text, layer_type, None, latents)}
    distinct = {str([fact.tolist() if isinstance(fact, torch.Tensor) else fact for fact in one.values()]): one for one in facts.values()}
    if len(distinct) > 1:
        by_type = {(types[index], str(one)) for index, one in facts.items()}
        if layer_type is None and len(by_type) == len(set(types)):
            raise ConfigError.of("layer_type", f"one of {labels}, since this config rotates them differently", None)
        raise ConfigError.of("layer_idx", f"0 to {count - 1}, since {text.model_type} rotates its layers differently", None)
    return next(iter(distinct.values()))


def _facts_of(text: Any, layer_type: str | None, layer_idx: int | None, latents: bool) -> dict[str, Any]:
    layer_config = _layer_config(text, layer_type, layer_idx)
    facts: dict[str, Any] = {"inv_freq": torch.zeros(0, dtype=torch.float64), "head_dim": _head_dim(layer_config)}
    if compat.is_family(text, "alibi") or getattr(text, "alibi", False):
        return facts | {"kind": "alibi", "rope_type": "none"}
    if compat.is_family(text, "learned"):
        return facts | {"kind": "learned", "rope_type": "none"}
    layout, direction = known_layout(text) or (None, 1)
    if layout is not None:
        facts["layout"] = layout
    if compat.is_family(text, "fixed_base"):
        return facts | {"inv_freq": _default_frequencies(10000.0, text.rotary_dim).double()}
    if getattr(layer_config, "kv_lora_rank", None) or getattr(layer_config, "qk_rope_head_dim", None):
        if not latents:
            return facts | {"refusal": "multi-head latent attention keeps its rotated dimensions apart from the rest"}
        if compat.is_family(text, "latents_unrotated"):
            return facts | {"kind": "none", "rope_type": "none"}
    nested = _nested_parameters(text)
    parameters = (getattr(text, "rope_parameters", None) or None) if nested is None else nested.get(layer_type)
    if parameters is None:
        return facts | {"kind": "unknown" if nested is None else "none", "rope_type": "none"}
    if layer_idx is not None and not _layer_rotates(text, layer_config, layer_idx):
        return facts | {"kind": "none", "rope_type": "none"}
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    facts |= {"rope_type": rope_type, "axes": compat.is_family(text, "axes")}
    try:
        inv_freq, scaling = _frequencies(layer_config, parameters, rope_type, None if nested is None else layer_type, facts["head_dim"])
    except (KeyError, TypeError) as error:
        raise ConfigError.of(
            "config.rope_parameters", f"the keys that rope_type {rope_type!r} needs", parameters, f"Reading it failed on {error!r}."
        ) from error
    latent_dim = getattr(layer_config, "kv_lora_rank", None)
    if latent_dim:
        facts["head_dim"] = layer_config.qk_rope_head_dim + latent_dim
    refusal = _refusal(
        text, parameters, rope_type, 2 * inv_freq.numel(), layer_config.qk_rope_head_dim if latent_dim else facts["head_dim"]
    )
    if refusal is None and layout is None:
        whose = f"the rotary function of {text.model_type} was not understood"
        if _modeling_module(text.__class__) is None:
            whose = f"{type(text).__name__} is not transformers' own"
        refusal = f"{whose}, so it is not known which dimensions of its keys are rotated together"
        return facts | {"kind": "unknown", "refusal": refusal}
    facts |= {"inv_freq": inv_freq.double() * direction, "attention_scaling": float(scaling), "refusal": refusal}
    if refusal is None and rope_type in LENGTH_DEPENDENT:
        facts["refusal"] = (
            f"with rope_type {rope_type!r} the frequencies depend on the length of the text, so cached keys have no fixed angles"
        )
        if "short_mscale" not in parameters:  # PhiMoE changes the norm of its keys instead
            facts |= _changes(layer_config, parameters, rope_type, None if nested is None else layer_type, direction)
    return facts


def _changes(config: Any, parameters: dict[str, Any], rope_type: str, layer_type: str | None, direction: int) -> dict[str, Any]:
    """From which position on a forward pass rotates by other frequencies, and by which."""
    if rope_type == "dynamic":
        # A shorter text than the limit brings the first frequencies back, one of just that length does not.
        return {"changes_at": int(config.max_position_embeddings) - 1}
    limit = int(parameters["original_max_position_embeddings"])
    beyond = _init_frequencies(config, rope_type, layer_type, seq_len=limit + 1)[0]
    return {"changes_at": limit, "inv_freq_beyond": beyond.double() * direction}


def _nested_parameters(text: Any) -> dict[str | None, dict[str, Any] | None] | None:
    """The rotary parameters of each layer type, None for one that isn't rotated; None when one flat set serves all layers."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if not any(isinstance(value, dict) for value in parameters.values()):
        return None
    return {key: value for key, value in parameters.items() if isinstance(value, dict) or value is None}


def known_layout(text: Any) -> tuple[Layout, int] | None:
    """Which dimensions of a decoder's keys form a pair, and 1 or -1 for the direction of the rotation; None if that is not known."""
    if compat.is_family(text, "interleaved"):
        return "interleaved", 1
    if compat.is_family(text, "half"):
        return "half", 1
    function = getattr(_modeling_module(text.__class__), "apply_rotary_pos_emb", None)
    return None if function is None else probed_layout(function)


@cache
def _modeling_module(config_class: type) -> ModuleType | None:
    """The modeling code of a config of transformers' own, or of one that inherits from it; else None."""
    from transformers import MODEL_MAPPING

    base_class = next((base for base in config_class.__mro__ if base.__module__.startswith("transformers.models.")), None)
    if base_class is None:
        return None
    try:
        return importlib.import_module(base_class.__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError:  # a config that shares another family's code
        return importlib.import_module(MODEL_MAPPING[base_class].__module__) if base_class in MODEL_MAPPING else None


@cache
def probed_layout(function: Callable[..., Any]) -> tuple[Layout, int] | None:
    """What a function that rotates queries and keys, or one of these, by cosines and sines does to eight numbers.

    Args:
        function: Such as a modeling module's `apply_rotary_pos_emb`.
    """
    with _on_cpu():
        key = torch.arange(1.0, 9.0).view(1, 1, 1, 8)
        for width in (8, 4):  # Tables are as wide as a head, or have one number for each pair.
            cos, sin = torch.zeros(1, 1, width), torch.ones(1, 1, width)  # a quarter of a circle
            for arguments in ((key, key, cos, sin), (key, cos, sin)):
                try:
                    result = function(*(argument.clone() for argument in arguments))
                except (TypeError, RuntimeError, IndexError):
                    continue
                rotated = result[1] if isinstance(result, tuple) else result
                layouts: tuple[Layout, ...] = ("half", "interleaved")
                for layout in layouts:
                    for direction in (1, -1):
                        if torch.equal(rotated, rotate_(key.clone(), torch.zeros(4), direction * torch.ones(4), layout)):
                            return layout, direction
    return None


def _layer_config(text: Any, layer_type: str | None, layer_idx: int | None) -> Any:
    """The config of one layer, in models whose layers have different head sizes."""
    if not getattr(text, "is_heterogeneous", False):
        return text
    if layer_idx is None and layer_type is None:
        raise ConfigError.of("layer_type", f"one of {sorted(set(text.layer_types))}, since this config's layers differ", None)
    return text.per_layer_config[layer_type if layer_idx is None else layer_idx]


def _head_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
        if not isinstance(width, int) or not isinstance(heads, int):
            raise ConfigError.of("config", "head_dim, or hidden_size and num_attention_heads", type(config).__name__)
        head_dim = width // heads
    return int(head_dim)


def head_sizes(config: Any, layer_idx: int) -> tuple[int, int] | None:
    """The sizes of a layer's keys and values; None where the config of the decoder does not tell."""
    layer_config = _layer_config(config, None, layer_idx)
    if not any(getattr(layer_config, name, None) for name in ("head_dim", "hidden_size")):
        return None
    try:
        size = _head_dim(layer_config)
    except ConfigError:
        return None
    return size, getattr(layer_config, "v_head_dim", None) or size


def _layer_rotates(text: Any, layer_config: Any, layer_idx: int) -> bool:
    """False for a layer without rotation in a model that rotates elsewhere."""
    if getattr(text, "use_mem_rope", True) is False:
        return False
    if compat.is_family(text, "rotation_switched_off") and text.position_embedding_type != "rope":
        return False
    has_window = getattr(layer_config, "sliding_window", None) is not None
    for flags in ("no_rope_layers", "layer_rope_theta"):  # Either is false for a layer that is not rotated.
        if getattr(text, flags, None):
            return bool(getattr(text, flags)[layer_idx])
    if compat.is_family(text, "sliding_only") or (compat.is_family(text, "sliding_only_with_window") and has_window):
        # Cohere 2 MoE rotates its leading dense layers as well.
        dense_too = getattr(text, "prefix_dense_sliding_window_pattern", None) == 1 and text.mlp_layer_types[layer_idx] == "dense"
        return dense_too or (has_window and text.layer_types[layer_idx] == "sliding_attention")
    return True


def _refusal(text: Any, parameters: dict[str, Any], rope_type: str, rotary_dim: int, head_dim: int) -> str | None:
    if rope_type not in LENGTH_INDEPENDENT | LENGTH_DEPENDENT:
        return f"rope_type {rope_type!r} is not known"
    if compat.is_family(text, "scaled_after"):
        return f"{text.model_type} scales the dimensions of its keys after the rotation"
    if set(filter(None, getattr(text, "layer_rope_theta", None) or ())) - {parameters.get("rope_theta")}:
        return f"the layers of this {text.model_type} model have a theta each, which is not supported"
    if rotary_dim > head_dim:
        return f"{text.model_type} rotates {rotary_dim} dimensions in heads of {head_dim}, in a way that is not known"
    return None


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Real numbers, also when the caller builds a model under `torch.device("meta")`."""
    with torch.device("cpu"), torch.no_grad():
        yield


def _default_frequencies(base: float, dim: int) -> torch.Tensor:
    # In float32 and in the models' own order of operations: these are the numbers that the model multiplies its positions by.
    with _on_cpu():
        return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _init_frequencies(config: Any, rope_type: str, layer_type: str | None, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    with _on_cpu():
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=seq_len, layer_type=layer_type)
    return inv_freq.float(), scaling


def _frequencies(
    config: Any, parameters: dict[str, Any], rope_type: str, layer_type: str | None, head_dim: int
) -> tuple[torch.Tensor, float]:
    if rope_type in ROPE_INIT_FUNCTIONS:
        return _init_frequencies(config, rope_type, layer_type)
    base = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    if base is None:
        raise ConfigError.of("config.rope_parameters", "a rope_theta", parameters)
    partial = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return _default_frequencies(base, int(head_dim * partial)), 1.0
