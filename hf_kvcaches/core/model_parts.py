"""Reads a model: the tensors of its base and adapters, and all else that decides what it computes, as named parts of JSON values."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.checksum import Deferred, TensorSketch, describe, digest_of, dtype_name, head_of, plain, type_name, why_unreadable
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
# Attributes of modules that every module has, that say nothing about the forward, or that a forward writes. Replaced forwards are looked
# for elsewhere.
_BOOKKEEPING = frozenset(vars(nn.Module())) | _words("""
    forward to cuda config generation_config
    gradient_checkpointing loss_type all_tied_weights_keys kernel_config hf_device_map hf_quantizer peft_config
    peft_type quantization_method is_quantized is_loaded_in_8bit is_loaded_in_4bit device_mesh warnings_issued max_seq_len_cached
    rope_deltas _tp_size _fsdp_size
    name_or_path model_tags active_adapter base_model_torch_dtype aux_loss_coef router_aux_loss_coef z_loss_coefficient
""")
# Has an effect in training mode alone, which is looked for elsewhere.
FOR_TRAINING = re.compile(r"drop|jitter|noise")
# RoPE types whose run-time frequencies follow the length of what was read last; their starting frequencies are compared instead.
CHANGING_ROPE = ("dynamic", "longrope")
# What is said of frequencies that are those of the configuration.
AS_CONFIGURED = "as configured"
# What PEFT's wrappers call the module that they wrap, and what is no setting of theirs: the adapters in use are read for themselves.
_WRAPPED, _NOT_SETTINGS = ("base_layer", "original_module", "token_adapter"), ("merged_adapters", "kwargs")

# Field -> JSON value.
Part = dict[str, Any]


class _Adapted(NamedTuple):
    """A module that adapters work on: its name in the base, the wrapper's class, and tensors and settings of each adapter."""

    path: str
    kind: str
    active: list[str]
    merged: list[str]
    tensors: dict[str, dict[str, Any]]
    settings: dict[str, dict[str, Any]]


@dataclass
class ModelState:
    """The parts of a model, named as before any adapter was added.

    Args:
        root: The transformers model itself, without its wrappers.
        base: Entries of its state dict, and its other buffers.
    """

    root: PreTrainedModel
    base: dict[str, Any] = field(default_factory=dict)
    adapted: list[_Adapted] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)


def take_apart(model: nn.Module) -> ModelState:
    """Reads names and tensors of the base and of every adapter; copies nothing."""
    state = ModelState(compat.base_model(model))
    _walk(state.root, "", state, compat.adapter_wrappers())
    prompt = None if model is state.root else compat.learned_prompt(model)
    if prompt is not None:
        name, encoder, enabled = prompt
        tensors = {entry: value for path, module in encoder.named_modules() for entry, value in _entries(module, path).items()}
        state.adapted.append(_Adapted("prompt", type(encoder).__name__, [name] * enabled, [], {name: tensors}, {name: {}}))
    return state


def _walk(module: nn.Module, path: str, state: ModelState, wrappers: tuple[type[nn.Module], ...]) -> None:
    wrapper = isinstance(module, wrappers)
    if not wrapper:
        state.modules[path] = module
        state.base |= _entries(module, path)
    containers = []
    for name, child in module.named_children():
        if wrapper and name not in _WRAPPED:
            containers.append((name, child))
        else:
            _walk(child, path if wrapper or name == "_orig_mod" else f"{path}.{name}".lstrip("."), state, wrappers)
    if wrapper:
        state.adapted.append(_adapted(module, path, containers))


def _adapted(module: Any, path: str, containers: Iterable[tuple[str, nn.Module]]) -> _Adapted:
    tensors: dict[str, dict[str, Any]] = {}
    for kind, container in containers:
        for inner_path, inner in container.named_modules():
            for entry, value in _entries(inner, inner_path).items():
                adapter, _, rest = entry.partition(".")
                tensors.setdefault(adapter, {})[f"{path}.{kind}.{rest}".rstrip(".")] = value
    settings: dict[str, dict[str, Any]] = {adapter: {} for adapter in tensors}
    for name, value in _attributes(module).items():
        by_adapter = isinstance(value, Mapping) and set(value) & set(tensors)
        for adapter in settings if name not in _NOT_SETTINGS else ():
            settings[adapter][name] = plain(value.get(adapter) if by_adapter else value)
    merged = [name for name in getattr(module, "merged_adapters", []) if name in tensors]
    # Once something is merged the layer computes with its base weights alone.
    idle = bool(module.disable_adapters) or bool(merged)
    active = [] if idle else [name for name in module.active_adapters if name in tensors]
    return _Adapted(path, type(module).__name__, active, merged, tensors, settings)


def _entries(module: nn.Module, path: str) -> dict[str, Any]:
    state, home = compat.state_of(module), compat.offloaded_weights(module)
    if home is not None:
        state = {name: Deferred(home, name, value) if why_unreadable(value) else value for name, value in state.items()}
    return {f"{path}.{name}".lstrip("."): value for name, value in state.items()}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes with an effect on what it computes, tensors and modules apart, by name."""
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if counts(name)
        # Of private attributes only numbers count, like a scale that is kept beside its tensor.
        and (name[0] != "_" or type(value) in (int, float))
        and not isinstance(value, nn.Module | torch.device | PreTrainedConfig)
        # The probability of a dropout module.
        and not (name == "p" and compat.is_dropout(module))
    }


@functools.cache
def counts(name: str) -> bool:
    """Whether a module's attribute may have an effect on what it computes."""
    return name not in _BOOKKEEPING and name != "prepare_inputs_for_generation" and not FOR_TRAINING.search(name)


def digest_of_part(part: Mapping[str, Any]) -> str:
    """The digest of a part, the same in every process and after a round trip through JSON."""
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()


def parts_of(state: ModelState, supplied: Mapping[str, Part]) -> dict[str, Part]:
    """All parts of a model's identity, by the names of `ModelFingerprint`'s components.

    Args:
        supplied: The same of a fingerprint that the caller gave, for tensors that can't be read.
    """
    parts = _config_parts(state.root.config)
    for name, part in _modules_parts(state).items():
        parts[name] |= part
    parts["weights"] = _weights_part(state, supplied.get("weights"))
    parts["adapters"] = _adapters_part(state, supplied.get("adapters", {}))
    parts["precision"] = _precision_part(state)
    if supplied and any(map(why_unreadable, state.base.values())):
        merged, expected = parts["adapters"]["merged"], supplied["adapters"]["merged"]
        if merged != expected:
            raise UnsupportedError(
                f"model: expected the merged adapters {expected} of the fingerprint given with set_fingerprint, got {merged}, which "
                "change weights that can't be read. Give the fingerprint of the model as it is now."
            )
    return parts


def _config_parts(config: Any) -> dict[str, Part]:
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


def _modules_parts(state: ModelState) -> dict[str, Part]:
    """What the modules really hold, which may have been changed after the configuration was read: `rope`, `attention`, `architecture`.

    An attribute of modules that differ in nothing but the numbers in their names is one field.
    """
    fields: dict[str, dict[str, dict[str, Any]]] = {"rope": {}, "attention": {}, "architecture": {}}
    configs = _configs_within(state.root.config)
    for path, module in state.modules.items():
        values = {name: plain(value, _WITHOUT_EFFECT) for name, value in _attributes(module).items()}
        values["class"] = type_name(type(module))
        steps = path.split(".")
        numbers = [step for step in steps if step.isdigit()]
        if values.get("layer_idx", "") in map(int, numbers):
            values["layer_idx"] = "as named"
        config = vars(module).get("config")
        if config is not None and id(config) not in configs and hasattr(config, "to_dict"):
            values["config"] = digest_of_part(plain(config.to_dict(), _WITHOUT_EFFECT))
        frequencies = _frequencies(module)
        values |= _frequencies_in_use(module, frequencies)
        home = "rope" if frequencies else "attention" if hasattr(module, "is_causal") and hasattr(module, "layer_idx") else "architecture"
        pattern = ".".join("*" if step.isdigit() else step for step in steps) or "model"
        for name, value in values.items():
            fields[home].setdefault(f"{pattern}.{name}", {})[".".join(numbers)] = value
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
    """The frequencies of a rotary embedding, by their buffers' names."""
    return {name: value for name, value in module.named_buffers(recurse=False) if name.endswith("inv_freq")}


def _frequencies_in_use(module: nn.Module, frequencies: Mapping[str, Tensor]) -> Part:
    """For each that a forward does not change, "as configured", or a digest where they are others."""
    if not frequencies:
        return {}
    try:
        with torch.device("cpu"):
            fresh = dict(type(module)(config=getattr(module, "config")).named_buffers())  # noqa: B009 - nn.Module types it as a tensor
    except (AttributeError, KeyError, TypeError, ValueError):
        fresh = {}
    part = {}
    for name, value in frequencies.items():
        kind = getattr(module, "rope_type", "default")
        if isinstance(kind, Mapping):
            kind = kind.get(name.removesuffix("inv_freq").rstrip("_").removesuffix("original").rstrip("_"), "default")
        if name.endswith("original_inv_freq") or kind not in CHANGING_ROPE:
            part[name] = _as_configured(value, fresh.get(name)) or digest_of(value, name)
    return part


def _as_configured(here: Tensor, configured: Tensor | None) -> str:
    """Whether frequencies are the configured ones, cast with the model where it was, in words; "" where they are others.

    Accelerators round powers otherwise than CPUs in the last place, and that must not make another model of the same one.
    """
    if configured is None or here.is_meta or here.shape != configured.shape:
        return ""
    cast = here.dtype != configured.dtype
    rounding = torch.finfo(here.dtype).eps / 2 if cast and here.is_floating_point() else 0.0
    # Half of float16's smallest number, below which it rounds by more.
    same = torch.allclose(here.detach().cpu().to(configured.dtype), configured, rtol=5e-7 + rounding, atol=2.0**-25 * cast)
    return "" if not same else f"{AS_CONFIGURED}, as {dtype_name(here)}" if cast else AS_CONFIGURED


def _weights_part(state: ModelState, supplied: Part | None) -> Part:
    """The parameters and buffers of the base, but for frequencies of rotary embeddings, which `_modules_parts` compares."""
    rotary = {f"{path}.{name}".lstrip(".") for path, module in state.modules.items() for name in _frequencies(module)}
    entries = {name: value for name, value in state.base.items() if name not in rotary}
    unreadable = {name: value for name, value in entries.items() if supplied is not None and why_unreadable(value)}
    described = describe({name: value for name, value in entries.items() if name not in unreadable})
    for name, value in unreadable.items():
        described[name] = str((supplied or {}).get(name, "no such tensor"))
        if not described[name].startswith(head_of(value)):
            raise UnsupportedError(
                f"{name}: expected the fingerprint given with set_fingerprint to be of this model, which has {head_of(value)}here; it has "
                f"{described[name][:60]}. Take it of the same model in the same precision."
            )
    return {name: described[name] for name in entries}


def _precision_part(state: ModelState) -> Part:
    """The dtypes that the base weights have now, and how they were quantised."""
    tensors = [tensor for entry in state.base.values() for tensor in _tensors_in(entry)]
    kinds = Counter(str(x.dtype) if type(x).__module__.startswith("torch") else f"{type(x).__name__} of {x.dtype}" for x in tensors)
    return {
        "tensors by dtype": dict(sorted(kinds.items())),
        "quantization_config": plain(getattr(state.root.config, "quantization_config", None)),
    }


def _tensors_in(entry: Any) -> list[Tensor]:
    if isinstance(entry, tuple | list):
        return [tensor for item in entry for tensor in _tensors_in(item)]
    entry = entry.placeholder if isinstance(entry, Deferred) else entry
    return [entry] if isinstance(entry, Tensor) else []


def facts_of(state: ModelState, parts: Mapping[str, Part]) -> dict[str, Any]:
    """What a person wants to know of a model."""
    tensors = [value.placeholder if isinstance(value, Deferred) else value for value in state.base.values()]
    name = str(getattr(state.root.config, "name_or_path", "") or "")
    return {
        # A local path says something about the machine and nothing about the model.
        "name": os.path.basename(os.path.normpath(name)) if os.path.isdir(name) else name,
        "class": type(state.root).__name__,
        "parameters": sum({id(tensor): tensor.numel() for tensor in tensors if isinstance(tensor, Tensor)}.values()),
        "dtypes": ", ".join(kind.removeprefix("torch.") for kind in parts["precision"]["tensors by dtype"]),
    }


def _adapters_part(state: ModelState, supplied: Part) -> Part:
    """The adapters that take part in the forward, in order, with their weights and scaling; merged ones by name."""
    active, merged = (list(dict.fromkeys(name for each in state.adapted for name in getattr(each, use))) for use in ("active", "merged"))
    part: Part = {"active": active, "merged": merged}
    for name in active:
        layers = [layer for layer in state.adapted if name in layer.active]
        tensors = {entry: value for layer in layers for entry, value in layer.tensors[name].items()}
        weights, scaling = f"weights of {name!r}", {layer.path: layer.settings[name].get("scaling") for layer in layers}
        known = weights in supplied and any(map(why_unreadable, tensors.values()))
        part[weights] = supplied[weights] if known else digest_of_part(describe(tensors))
        part[f"scaling of {name!r}"] = next(iter(scaling.values())) if len(set(scaling.values())) == 1 else scaling
        part[f"kind of {name!r}"] = digest_of_part({layer.path: [layer.kind, layer.settings[name]] for layer in layers})
    # Exceptions to the order, and layers that have merged what others have not.
    ordered = {x.path: x.active for x in state.adapted if x.active != [name for name in active if name in x.active]}
    partly = {x.path: x.merged for x in state.adapted if x.merged != [name for name in merged if name in x.tensors]}
    return part | ({"layers in another order": ordered} if ordered else {}) | ({"layers merged otherwise": partly} if partly else {})


def sketches_of(state: ModelState) -> dict[str, TensorSketch]:
    """A sketch of each floating-point tensor that takes part in the forward, by its name; adapters' names begin with the adapter's."""
    entries = dict(state.base)
    for layer in state.adapted:
        entries |= {f"{adapter!r} {name}": value for adapter in layer.active for name, value in layer.tensors[adapter].items()}
    sketches = {name: TensorSketch.of(value, name) for name, value in entries.items()}
    return {name: sketch for name, sketch in sketches.items() if sketch is not None}


def tokenizer_part(tokenizer: Any) -> Part:
    """What decides which tokens a text becomes; padding, truncation and what concerns decoding alone are left out."""
    require_tokenizer(tokenizer)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(tokenizer, "get_vocab"):
        hint = "Pass what AutoTokenizer.from_pretrained returned."
        raise ConfigError.of("tokenizer", "a transformers tokenizer or processor", tokenizer, hint)
    vocabulary, flags = tokenizer.get_vocab(), ("special", "single_word", "lstrip", "rstrip", "normalized")
    tokens = getattr(tokenizer, "added_tokens_decoder", {}).items()
    added = {str(index): [str(token), *(bool(getattr(token, flag, False)) for flag in flags)] for index, token in tokens}
    special = tokenizer.special_tokens_map.items()
    part: Part = {
        "vocabulary size": len(vocabulary),
        "vocabulary": digest_of(vocabulary),
        "added tokens": digest_of(added),
        "special tokens": {key: [*map(str, value)] if isinstance(value, list | tuple) else str(value) for key, value in special},
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
