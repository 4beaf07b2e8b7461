"""What a config says about how its keys carry positions, read without building the model.

Three facts are not in any config, only in the modeling code: which pairs of dimensions turn together, which layers leave the rotation
out, and whether something is done to the keys after it. They are kept here as small tables by `model_type`. A guess would be worse than a
table: a wrong layout still gives keys of the right shape and norm, and only the text gets worse. A model of transformers' own that is not
listed has the layout of the great majority, the halves; of other models' code nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hf_kvcaches.errors import ConfigError

Layout = Literal["half", "interleaved"]
Kind = Literal["rope", "none", "learned", "alibi", "unknown"]

# These turn the pair (2i, 2i + 1); all others turn (i, i + rotary_dim / 2).
INTERLEAVED = frozenset(
    {
        "blt_global_transformer",
        "blt_local_decoder",
        "blt_local_encoder",
        "blt_patcher",
        "codegen",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "ernie4_5",
        "ernie4_5_moe",
        "ernie4_5_vl_moe_text",
        "glm",
        "glm4",
        "glm4v_text",
        "glm_ocr_text",
        "gptj",
        "helium",
        "llama4_text",
        "moonshine",
        "moonshine_streaming",
    }
)

# These turn the other way round: by -position * inv_freq.
REVERSED = frozenset({"nanochat"})

# These put a learned per-dimension scale on keys that are already rotated, which a rotation doesn't commute with.
NORMED_AFTER = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"})

# These rotate the keys of sliding layers only; those of the second group rotate all if there is no window.
SLIDING_ONLY = frozenset({"afmoe", "cohere2", "cohere2_moe", "flint"})
SLIDING_ONLY_WITH_WINDOW = frozenset({"exaone4", "exaone_moe", "kolibri1"})

# Positions are added to the token embeddings, from a learned or a sinusoidal table.
LEARNED = frozenset(
    {
        "bart",
        "bigbird_pegasus",
        "biogpt",
        "blenderbot",
        "blenderbot-small",
        "ctrl",
        "git",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "imagegpt",
        "marian",
        "mbart",
        "musicgen_decoder",
        "musicgen_melody_decoder",
        "mvp",
        "openai-gpt",
        "opt",
        "pegasus",
        "plbart",
        "trocr",
        "whisper",
        "xglm",
    }
)

ALIBI = frozenset({"bloom", "mpt"})

# Models from before `rope_parameters`: `rotary_dim` dimensions and a fixed base.
FIXED_BASE = {"codegen": 10000.0, "gptj": 10000.0}

# Their frequencies follow from the config alone. "proportional" gives frequency 0 to the dimensions that don't turn.
LENGTH_INDEPENDENT = frozenset({"default", "linear", "llama3", "yarn", "proportional"})


@dataclass(frozen=True)
class RotaryFacts:
    """What `RotaryGeometry` is made of; described there."""

    inv_freq: torch.Tensor
    head_dim: int
    attention_scaling: float = 1.0
    layout: Layout = "half"
    rope_type: str = "default"
    kind: Kind = "rope"
    refusal: str | None = None


def read_rotary_facts(config: Any, layer_type: str | None, layer_idx: int | None) -> RotaryFacts:
    """Reads the facts of one kind of layer.

    Args:
        config: A model's config; of a multimodal one, the text decoder's part is read.
        layer_type: One of the config's `layer_types`, where layers differ.
        layer_idx: The layer, where even layers of one type differ.
    """
    if not hasattr(config, "get_text_config"):
        raise ConfigError.of("config", "a transformers config", type(config).__name__, "Pass model.config.")
    text = config.get_text_config(decoder=True)
    layer_type = _known_layer_type(text, layer_type, layer_idx)
    layer_config = _layer_config(text, layer_type, layer_idx)
    head_dim = _head_dim(layer_config)
    nothing = torch.zeros(0, dtype=torch.float64)
    if text.model_type in ALIBI or getattr(text, "alibi", False):
        return RotaryFacts(nothing, head_dim, kind="alibi", rope_type="none")
    if text.model_type in LEARNED:
        return RotaryFacts(nothing, head_dim, kind="learned", rope_type="none")
    if text.model_type in FIXED_BASE:
        inv_freq = _default_frequencies(FIXED_BASE[text.model_type], text.rotary_dim)
        return RotaryFacts(inv_freq.double(), head_dim, layout="interleaved")
    if getattr(text, "kv_lora_rank", None) or getattr(text, "qk_rope_head_dim", None):
        return RotaryFacts(nothing, head_dim, refusal="multi-head latent attention keeps its rotated dimensions apart from the rest")
    parameters, nested = _rope_parameters(text, layer_type)
    if parameters is None:
        return RotaryFacts(nothing, head_dim, kind="none" if nested else "unknown", rope_type="none")
    if not _layer_rotates(text, layer_type, layer_idx):
        return RotaryFacts(nothing, head_dim, kind="none", rope_type="none")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    try:
        inv_freq, scaling = _frequencies(layer_config, parameters, rope_type, layer_type if nested else None, head_dim)
    except (KeyError, TypeError) as error:
        raise ConfigError.of(
            "config.rope_parameters", f"the keys that rope_type {rope_type!r} needs", parameters, f"Reading it failed on {error!r}."
        ) from error
    refusal = _refusal(text, parameters, rope_type, 2 * inv_freq.numel(), head_dim)
    if refusal is None and not any(kind.__module__.startswith("transformers.models.") for kind in type(text).__mro__):
        why = f"{type(text).__name__} is not transformers' own, so it is not known which dimensions of its keys are rotated together"
        return RotaryFacts(nothing, head_dim, rope_type=rope_type, kind="unknown", refusal=why)
    return RotaryFacts(
        inv_freq.double() * (-1.0 if text.model_type in REVERSED else 1.0),
        head_dim,
        float(scaling),
        "interleaved" if text.model_type in INTERLEAVED else "half",
        rope_type,
        "rope",
        refusal,
    )


def _known_layer_type(text: Any, layer_type: str | None, layer_idx: int | None) -> str | None:
    types = getattr(text, "layer_types", None)
    if layer_idx is not None:
        count = text.num_hidden_layers
        if not 0 <= layer_idx < count:
            raise ConfigError.of("layer_idx", f"0 to {count - 1}", layer_idx)
        own = types[layer_idx] if types else None
        if layer_type is not None and own is not None and layer_type != own:
            raise ConfigError.of("layer_type", f"{own!r}, the type of layer {layer_idx}", layer_type, "Pass one of the two.")
        return own or layer_type
    labels = {*(types or ()), *_nested_keys(text)}
    if layer_type is not None and labels and layer_type not in labels:
        raise ConfigError.of("layer_type", f"one of {sorted(labels)}", layer_type)
    return layer_type


def _nested_keys(text: Any) -> list[str]:
    """The layer types that have their own parameters; none when one flat set serves all layers."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if not any(isinstance(value, dict) for value in parameters.values()):
        return []
    return [key for key, value in parameters.items() if isinstance(value, dict) or (value is None and key in (text.layer_types or ()))]


def _rope_parameters(text: Any, layer_type: str | None) -> tuple[dict[str, Any] | None, bool]:
    """The parameters of one layer type (None: it isn't rotated), and whether the config nests them by layer type."""
    parameters = getattr(text, "rope_parameters", None) or None
    keys = _nested_keys(text)
    if not keys:
        return parameters, False
    assert parameters is not None
    if layer_type is None:
        if any(parameters[key] != parameters[keys[0]] for key in keys):
            raise ConfigError.of("layer_type", f"one of {sorted(keys)}, since this config rotates them differently", None)
        layer_type = keys[0]
    if layer_type not in keys:
        raise ConfigError.of("layer_type", f"one of {sorted(keys)}", layer_type)
    return parameters[layer_type], True


def _layer_config(text: Any, layer_type: str | None, layer_idx: int | None) -> Any:
    """The config of one layer, in models whose layers have different head sizes."""
    if not getattr(text, "is_heterogeneous", False):
        return text
    if layer_idx is not None:
        return text.per_layer_config[layer_idx]
    if layer_type is not None:
        return text.per_layer_config[layer_type]
    raise ConfigError.of("layer_type", f"one of {sorted(set(text.layer_types))}, since this config's layers differ", None)


def _head_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
        if not isinstance(width, int) or not isinstance(heads, int):
            raise ConfigError.of("config", "head_dim, or hidden_size and num_attention_heads", type(config).__name__)
        head_dim = width // heads
    return int(head_dim)


def head_sizes(config: Any, layer_idx: int) -> tuple[int, int] | None:
    """The sizes of a layer's keys and values; None where the config does not tell.

    Args:
        config: Of the decoder.
        layer_idx: The layer.
    """
    own = _layer_config(config, None, layer_idx)
    if getattr(own, "head_dim", None) is None and not (getattr(own, "hidden_size", None) and getattr(own, "num_attention_heads", None)):
        return None
    size = _head_dim(own)
    return size, getattr(own, "v_head_dim", None) or size


def _layer_rotates(text: Any, layer_type: str | None, layer_idx: int | None) -> bool:
    """False for a layer without rotation in a model that rotates elsewhere."""
    if getattr(text, "use_mem_rope", True) is False:
        return False
    if text.model_type == "granitemoehybrid" and text.position_embedding_type != "rope":
        return False
    count = text.num_hidden_layers
    types = getattr(text, "layer_types", None) or [None] * count
    has_window = getattr(text, "sliding_window", None) is not None
    if getattr(text, "no_rope_layers", None):
        rotates = [bool(flag) for flag in text.no_rope_layers]
    elif getattr(text, "layer_rope_theta", None):
        rotates = [bool(theta) for theta in text.layer_rope_theta]
    elif text.model_type in SLIDING_ONLY or (text.model_type in SLIDING_ONLY_WITH_WINDOW and has_window):
        rotates = [has_window and kind == "sliding_attention" for kind in types]
        if getattr(text, "prefix_dense_sliding_window_pattern", None) == 1:  # Cohere 2 MoE rotates its leading dense layers as well.
            rotates = [own or mlp == "dense" for own, mlp in zip(rotates, text.mlp_layer_types, strict=True)]
    else:
        return True
    layers = [layer_idx] if layer_idx is not None else [i for i in range(count) if layer_type in (None, types[i])]
    answers = {rotates[i] for i in layers}
    if len(answers) > 1:
        by_type: dict[str | None, set[bool]] = {}
        for i in range(count):
            by_type.setdefault(types[i], set()).add(rotates[i])
        argument, choices = "layer_idx", f"0 to {count - 1}"
        if layer_type is None and all(len(found) == 1 for found in by_type.values()):
            argument, choices = "layer_type", f"one of {sorted(filter(None, by_type))}"
        raise ConfigError.of(argument, f"{choices}, since {text.model_type} rotates the keys of some layers only", None)
    return answers != {False}


def _refusal(text: Any, parameters: dict[str, Any], rope_type: str, rotary_dim: int, head_dim: int) -> str | None:
    if rope_type in ("dynamic", "longrope"):
        return f"with rope_type {rope_type!r} the frequencies depend on the length of the text, so cached keys have no fixed angles"
    if rope_type not in LENGTH_INDEPENDENT:
        return f"rope_type {rope_type!r} is not known"
    if text.model_type in NORMED_AFTER:
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


def _frequencies(
    config: Any, parameters: dict[str, Any], rope_type: str, layer_type: str | None, head_dim: int
) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope_type in ROPE_INIT_FUNCTIONS:
        with _on_cpu():
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), layer_type=layer_type)
        return inv_freq.float(), scaling
    base = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    if base is None:
        raise ConfigError.of("config.rope_parameters", "a rope_theta", parameters)
    partial = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return _default_frequencies(base, int(head_dim * partial)), 1.0
