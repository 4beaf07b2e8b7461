"""The named parts of a model's identity, each a flat dict of readable fields from which its digest follows."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_kvcaches.core._model_state import AdapterLayer, ModelState
from hf_kvcaches.core._plain import attributes, plain, type_name
from hf_kvcaches.core.checksum import Deferred, Sketch, describe, digest_of, head_of, why_unreadable
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_tokenizer


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Configuration keys by the part they belong to. A key that is in none of them belongs to the architecture, so an unknown one counts.
_ROPE = _words("""
    rope_parameters rope_theta rope_scaling rope_local_base_freq partial_rotary_factor rotary_pct rotary_dim rotary_emb_base rotary
    rope_interleave no_rope_layers no_rope_layer_interval max_position_embeddings n_positions original_max_position_embeddings
    position_embedding_type alibi
""")
_ATTENTION = _words("""
    sliding_window use_sliding_window max_window_layers sliding_window_pattern layer_types attn_logit_softcapping is_causal is_decoder
    query_pre_attn_scalar attention_bias attention_chunk_size scale_attn_weights scale_attn_by_inverse_layer_idx attention_multiplier
    use_bidirectional_attention attention_types window_size num_kv_shared_layers use_qk_norm clip_qkv attn_config
""")
_GEOMETRY = _words("""
    model_type hidden_size n_embd d_model num_hidden_layers n_layer n_layers num_attention_heads n_head n_heads num_key_value_heads
    head_dim multi_query
""")
# Bookkeeping, generation defaults, training, and what a program switches while it runs (which attention implementation above all).
_WITHOUT_EFFECT = _words("""
    transformers_version architectures output_hidden_states output_attentions return_dict id2label label2id problem_type use_cache
    initializer_range bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tie_word_embeddings dtype torch_dtype
    attn_implementation experts_implementation quantization_config gradient_checkpointing pretraining_tp chunk_size_feed_forward
    task_specific_params name_or_path auto_map embd_pdrop attn_pdrop resid_pdrop layerdrop
""")
# RoPE types whose run-time frequencies follow the length of what was read last; their starting frequencies are compared instead.
CHANGING_ROPE = ("dynamic", "longrope")

# What is said of frequencies that are those of the configuration.
AS_CONFIGURED = "as configured"

# Field -> JSON value.
Part = dict[str, Any]


def digest_of_part(part: Mapping[str, Any]) -> str:
    """The digest of a part, the same in every process and after a round trip through JSON."""
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()


def config_parts(config: Any) -> dict[str, Part]:
    """The configuration, sorted into `rope`, `attention`, `geometry` and `architecture`."""
    text = config.get_text_config(decoder=True)
    parts: dict[str, Part] = {"rope": {}, "attention": {}, "geometry": {}, "architecture": {}}
    for key, value in plain(text.to_dict(), _WITHOUT_EFFECT).items():
        home = "rope" if key in _ROPE else "attention" if key in _ATTENTION else "geometry" if key in _GEOMETRY else "architecture"
        parts[home][key] = value
    if text is not config:
        inner = {name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is text}
        for key, value in plain(config.to_dict(), _WITHOUT_EFFECT).items():
            if isinstance(value, dict) and key not in inner:
                parts["architecture"] |= {f"{key}.{name}": item for name, item in value.items()}
            elif key not in inner:
                parts["architecture"][f"whole model's {key}"] = value
    return parts


def weights_part(state: ModelState, given: Part | None) -> Part:
    """The parameters and buffers of the base, but for frequencies of rotary embeddings, which `modules_parts` compares.

    Args:
        state: Of the model.
        given: The same part of a fingerprint that the caller gave, for tensors that can't be read.
    """
    rotary = {f"{path}.{name}".lstrip(".") for path, module in state.modules.items() for name in _frequencies(module)}
    entries = {name: value for name, value in state.base.items() if name not in rotary}
    unreadable = {name: value for name, value in entries.items() if given is not None and why_unreadable(value)}
    described = describe({name: value for name, value in entries.items() if name not in unreadable})
    for name, value in unreadable.items():
        text = (given or {}).get(name, "no such tensor")
        if not text.startswith(head_of(value)):
            raise UnsupportedError(
                f"{name}: expected the fingerprint given with set_fingerprint to be of this model, which has {head_of(value)}here; it has "
                f"{text[:60]}. Take it of the same model in the same precision."
            )
        described[name] = text
    return {name: described[name] for name in entries}


def modules_parts(state: ModelState, config: Any) -> dict[str, Part]:
    """What the modules really hold, which may have been changed after the configuration was read: `rope`, `attention`, `architecture`.

    An attribute of modules that differ in nothing but the numbers in their names is one field.
    """
    fields: dict[str, dict[str, dict[str, Any]]] = {"rope": {}, "attention": {}, "architecture": {}}
    configs = _configs_within(config)
    for path, module in state.modules.items():
        own = {name: plain(value, _WITHOUT_EFFECT) for name, value in attributes(module).items()}
        own["class"] = type_name(type(module))
        steps = path.split(".")
        numbers = ".".join(step for step in steps if step.isdigit())
        if own.get("layer_idx", "") in (int(step) for step in steps if step.isdigit()):
            own["layer_idx"] = "as named"
        other = vars(module).get("config")
        if other is not None and id(other) not in configs and hasattr(other, "to_dict"):
            own["config"] = digest_of_part(plain(other.to_dict(), _WITHOUT_EFFECT))
        frequencies = _frequencies(module)
        own |= _frequencies_in_use(module, frequencies)
        home = "rope" if frequencies else "attention" if hasattr(module, "is_causal") and hasattr(module, "layer_idx") else "architecture"
        pattern = ".".join("*" if step.isdigit() else step for step in steps) or "model"
        for name, value in own.items():
            fields[home].setdefault(f"{pattern}.{name}", {})[numbers] = value
    return {home: {name: _joined(values) for name, values in group.items()} for home, group in fields.items()}


def _joined(values: Mapping[str, Any]) -> Any:
    """The value that most modules of a kind have, and which have others."""
    texts = {numbers: str(value) for numbers, value in values.items()}
    common = Counter(texts.values()).most_common(1)[0][0]
    others = [f"{text} in {numbers}" for numbers, text in texts.items() if text != common]
    return "; ".join([common, *others]) if others else next(iter(values.values()))


def _configs_within(config: Any) -> set[int]:
    """The model's configuration and those in it, which are read for themselves."""
    inside = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return {id(config), *(number for part in inside if part is not None for number in _configs_within(part))}


def _frequencies(module: nn.Module) -> dict[str, Tensor]:
    """The frequencies of a rotary embedding that a forward does not change, by their buffers' names."""
    return {name: value for name, value in module._buffers.items() if name.endswith("inv_freq") and value is not None}


def _frequencies_in_use(module: nn.Module, frequencies: Mapping[str, Tensor]) -> Part:
    """For each, "as configured", or a digest where they are others."""
    fresh = _fresh_rotary(module) if frequencies else {}
    return {
        name: _as_configured(value, fresh.get(name)) or digest_of(value)
        for name, value in frequencies.items()
        if name.endswith("original_inv_freq") or _rope_type(module, name) not in CHANGING_ROPE
    }


def _rope_type(module: nn.Module, buffer: str) -> str:
    kind = getattr(module, "rope_type", "default")
    if isinstance(kind, Mapping):
        layer_type = buffer.removesuffix("inv_freq").rstrip("_").removesuffix("original").rstrip("_")
        kind = kind.get(layer_type, "default")
    return str(kind)


def _fresh_rotary(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that the configuration asks for, computed on the CPU."""
    try:
        with torch.device("cpu"):
            again = type(module)(config=getattr(module, "config"))  # noqa: B009 - nn.Module types it as a tensor
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    return {name: value for name, value in again._buffers.items() if value is not None}


def _as_configured(here: Tensor, configured: Tensor | None) -> str:
    """Whether frequencies are the configured ones, cast with the model where it was, in words; "" where they are others.

    Accelerators round powers otherwise than CPUs in the last place, and that must not make another model of the same one.
    """
    if configured is None or here.is_meta or here.shape != configured.shape:
        return ""
    cast = here.dtype != configured.dtype
    rounding = torch.finfo(here.dtype).eps if cast and here.is_floating_point() else 0.0
    # Half of float16's smallest number, below which it rounds by more.
    same = torch.allclose(here.detach().cpu().to(configured.dtype), configured, rtol=5e-7 + rounding / 2, atol=2.0**-25 * cast)
    return f"{AS_CONFIGURED}, as {str(here.dtype).removeprefix('torch.')}" * cast or AS_CONFIGURED if same else ""


def precision_part(state: ModelState, config: Any) -> Part:
    """The dtypes that the base weights have now, and how they were quantised."""
    counts: dict[str, int] = {}

    def count(value: Any) -> None:
        if isinstance(value, Deferred):
            count(value.placeholder)
        elif isinstance(value, Tensor):
            kind = str(value.dtype) if type(value).__module__.startswith("torch") else f"{type(value).__name__} of {value.dtype}"
            counts[kind] = counts.get(kind, 0) + 1
        elif isinstance(value, tuple | list):
            for item in value:
                count(item)

    for entry in state.base.values():
        count(entry)
    quantization = getattr(config, "quantization_config", None)
    return {"tensors by dtype": dict(sorted(counts.items())), "quantization_config": plain(quantization)}


def adapters_part(state: ModelState, given: Part | None) -> Part:
    """The adapters that take part in the forward, in order, with their weights and scaling; merged ones by name.

    Args:
        state: Of the model.
        given: The same part of a fingerprint that the caller gave, for adapters that can't be read.
    """
    active = list(dict.fromkeys(name for layer in state.layers for name in layer.active))
    part: Part = {"active": active, "merged": list(dict.fromkeys(name for layer in state.layers for name in layer.merged))}
    for name in active:
        layers = [layer for layer in state.layers if name in layer.active]
        entries = {entry: value for layer in layers for entry, value in layer.state[name].items()}
        weights = f"weights of {name!r}"
        known = weights in (given or {}) and any(map(why_unreadable, entries.values()))
        part[weights] = (given or {})[weights] if known else digest_of_part(describe(entries))
        part[f"scaling of {name!r}"] = _one_or_each({layer.path: layer.settings[name].get("scaling") for layer in layers})
        part[f"kind of {name!r}"] = digest_of_part({layer.path: [layer.kind, layer.settings[name]] for layer in layers})
    part |= _irregular(state.layers, active, part["merged"])
    return part


def sketches_of(state: ModelState) -> dict[str, Sketch]:
    """A sketch of each floating-point tensor that takes part in the forward, by its name; adapters' names begin with the adapter's."""
    entries = dict(state.base)
    for layer in state.layers:
        for adapter in layer.active:
            entries |= {adapter_entry(adapter, name): value for name, value in layer.state[adapter].items()}
    sketches = {name: Sketch.of(value, name) for name, value in entries.items()}
    return {name: sketch for name, sketch in sketches.items() if sketch is not None}


def adapter_entry(adapter: str, name: str) -> str:
    """What an adapter's tensor is called among others."""
    return f"{adapter!r} {name}"


def _one_or_each(values: dict[str, Any]) -> Any:
    distinct = set(values.values())
    return distinct.pop() if len(distinct) == 1 else values


def _irregular(layers: list[AdapterLayer], active: list[str], merged: list[str]) -> Part:
    """Says which layers are exceptions to the order, or have merged what others have not."""
    part: Part = {}
    ordered = {layer.path: layer.active for layer in layers if layer.active != [name for name in active if name in layer.active]}
    if ordered:
        part["layers in another order"] = ordered
    partly = {layer.path: layer.merged for layer in layers if layer.merged != [name for name in merged if name in layer.state]}
    if partly:
        part["layers merged otherwise"] = partly
    return part


def tokenizer_part(tokenizer: Any) -> Part:
    """What decides which tokens a text becomes; padding, truncation and what concerns decoding alone are left out."""
    require_tokenizer(tokenizer)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(tokenizer, "get_vocab"):
        raise ConfigError.of(
            "tokenizer", "a transformers tokenizer or processor", tokenizer, "Pass what AutoTokenizer.from_pretrained returned."
        )
    vocabulary = tokenizer.get_vocab()
    added = {str(index): [str(token), *_flags(token)] for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    part: Part = {
        "vocabulary size": len(vocabulary),
        "vocabulary": digest_of(vocabulary),
        "added tokens": digest_of(added),
        "special tokens": {key: _text(value) for key, value in tokenizer.special_tokens_map.items()},
        "chat template": None if tokenizer.chat_template is None else digest_of(tokenizer.chat_template),
    }
    for switch in ("add_bos_token", "add_eos_token", "split_special_tokens", "do_lower_case"):
        if isinstance(value := getattr(tokenizer, switch, None), bool):
            part[switch] = value
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        for stage, content in json.loads(backend.to_str()).items():
            if stage not in ("version", "truncation", "padding", "added_tokens"):
                part[stage] = digest_of(json.dumps(content, sort_keys=True))
    elif hasattr(tokenizer, "sp_model"):
        part["model"] = digest_of(tokenizer.sp_model.serialized_model_proto())
    elif hasattr(tokenizer, "bpe_ranks"):
        part["model"] = digest_of([repr(pair) for pair in sorted(tokenizer.bpe_ranks.items(), key=lambda item: item[1])])
    return part


def _text(value: Any) -> Any:
    return [str(item) for item in value] if isinstance(value, list | tuple) else str(value)


def _flags(token: Any) -> list[bool]:
    return [bool(getattr(token, flag, False)) for flag in ("special", "single_word", "lstrip", "rstrip", "normalized")]
