"""What a model consists of as JSON values: weights, adapters and settings, with names as before any adapter was added; and tokenizers."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.model_state import changes_with_length, counted, is_counted
from hf_kvcaches.errors import ConfigError, require_tokenizer
from hf_kvcaches.kernels.checksum import digest_of

# What PEFT's wrappers call the module that they wrap, and what is no setting of a single adapter.
_WRAPPED = ("base_layer", "original_module", "token_adapter")
_NOT_OF_AN_ADAPTER = ("_active_adapter", "_disable_adapters", "merged_adapters", "kwargs")
_tokenizers: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()

# Describes an entry of a state dict: its name, the entry, and what fetches it where accelerate has offloaded it.
Read = Callable[[str, Any, Callable[[], Any] | None], str]


def parts_of(root: PreTrainedModel, read: Read) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """Return the weights, the adapters that take part in the forward, and the settings of a model without an outer wrapper."""
    wrapping, modules, wrappers = compat.adapter_wrappers(), dict[str, nn.Module](), dict[str, Any]()
    waiting: list[tuple[str, nn.Module]] = [("", root)]
    while waiting:
        path, module = waiting.pop()
        wraps = isinstance(module, wrapping)
        (wrappers if wraps else modules)[path] = module
        for name, child in reversed(list(module.named_children())):
            if not wraps or name in _WRAPPED:
                waiting.append((path if wraps or name == "_orig_mod" else f"{path}.{name}".lstrip("."), child))
    weights = {}
    for path, module in modules.items():
        for name, value, fetch in _entries(module, path):
            if not changes_with_length(module, name.rpartition(".")[2]):
                weights[name] = read(name, value, fetch)
    return weights, _adapters(wrappers, read), _flat("config", plain(root.config.to_dict())) | _settings(modules)


def _entries(module: nn.Module, path: str) -> Iterator[tuple[str, Any, Callable[[], Any] | None]]:
    home = compat.offloaded_weights(module)
    for name, value in compat.state_of(module).items():
        fetch = None if home is None or not isinstance(value, Tensor) or not value.is_meta else functools.partial(home.__getitem__, name)
        yield f"{path}.{name}".lstrip("."), value, fetch


def _adapters(wrappers: Mapping[str, Any], read: Read) -> dict[str, Any]:
    use: dict[str, tuple[list[str], list[str]]] = {}
    weights: dict[str, str] = {}
    settings: dict[str, dict[str, dict[str, Any]]] = {}
    for path, wrapper in wrappers.items():
        entries = [
            (kind, *entry)
            for kind, container in wrapper.named_children()
            for inner_path, inner in (container.named_modules() if kind not in _WRAPPED else ())
            for entry in _entries(inner, inner_path)
        ]
        known = {name.partition(".")[0] for _, name, _, _ in entries}
        merged = [name for name in getattr(wrapper, "merged_adapters", ()) if name in known]
        # Once an adapter is merged the layer computes with its base alone.
        active = [] if wrapper.disable_adapters or merged else [name for name in wrapper.active_adapters if name in known]
        if active or merged:
            use[path] = active, merged
        for kind, name, value, fetch in entries:
            adapter, _, rest = name.partition(".")
            if adapter in active:
                key = f"{adapter!r} {path}.{kind}.{rest}".rstrip(".")
                weights[key] = read(key, value, fetch)
        for adapter in active:
            settings.setdefault(adapter, {})[path] = _settings_of_adapter(wrapper, adapter)
    active, merged = (list(dict.fromkeys(name for names in use.values() for name in names[index])) for index in (0, 1))
    by_adapter = {f"{name} of {key!r}": value for key, group in settings.items() for name, value in _joined(group).items()}
    return {"active": active, "merged": merged, **({"layers": digest_of(use)} if use else {}), **by_adapter, **weights}


def _settings_of_adapter(wrapper: Any, adapter: str) -> dict[str, Any]:
    values = {name: vars(wrapper)[name] for name in counted(wrapper) if name not in _NOT_OF_AN_ADAPTER}
    chosen = {name: value.get(adapter) if isinstance(value, dict) and adapter in value else value for name, value in values.items()}
    return {"class": type(wrapper).__name__, **{name: plain(value) for name, value in chosen.items()}}


def _settings(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The class and plain attributes of modules; of those that differ in nothing but the numbers in their names, together."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for path, module in modules.items():
        attributes = {name: plain(vars(module)[name]) for name in counted(module) if _is_setting(module, name)}
        groups.setdefault(re.sub(r"\b\d+\b", "*", path), {})[path] = {"class": _class_name(type(module)), **attributes}
    return {f"{pattern}.{name}".lstrip("."): value for pattern, group in groups.items() for name, value in _joined(group).items()}


def _is_setting(module: nn.Module, name: str) -> bool:
    dropout = name == "p" and "Dropout" in type(module).__name__
    return not dropout and not isinstance(vars(module)[name], nn.Module | torch.device | PreTrainedConfig)


def _joined(group: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """For each attribute its value, or the values by owner where they differ."""
    names = dict.fromkeys(name for values in group.values() for name in values)
    columns = {name: {path: values.get(name) for path, values in group.items()} for name in names}
    return {name: next(iter(by.values())) if len(set(map(str, by.values()))) == 1 else by for name, by in columns.items()}


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {key: item for part, inner in value.items() for key, item in _flat(f"{name}.{part}", inner).items()}


def plain(value: Any) -> Any:
    """Return a value as JSON, equal in every process. What can't be looked into counts as its type alone."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if str(key)[:1] != "_" and is_counted(str(key))}
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(item) for item in value]
        return items if isinstance(value, list | tuple) else sorted(items, key=str)
    if isinstance(value, Tensor):
        return digest_of(value)
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    function = getattr(value, "__func__", value)
    name = getattr(function, "__qualname__", None)
    return str(value) if isinstance(value, torch.dtype) else f"{function.__module__}.{name}" if name else _class_name(type(value))


def _class_name(kind: type) -> str:
    """The full name of a class; what FSDP puts in its place is the same."""
    kind = next((base for base in kind.__mro__ if not base.__module__.startswith("torch.distributed.fsdp")), kind)
    return f"{kind.__module__}.{kind.__qualname__}"


def tokenizer_parts(tokenizer: Any) -> dict[str, str]:
    """Return the digests of what decides which token ids stand for which words: vocabulary, special tokens and chat template."""
    require_tokenizer(tokenizer)
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(inner, "get_vocab"):
        hint = "Pass what AutoTokenizer.from_pretrained returned."
        raise ConfigError.of("tokenizer", "a transformers tokenizer or processor", tokenizer, hint)
    special = {key: str(value) for key, value in inner.special_tokens_map.items()}
    parts = {"vocabulary": sorted(inner.get_vocab().items()), "special tokens": special, "chat template": inner.chat_template}
    return {name: hash_of(part) for name, part in parts.items()}


def digest_of_tokenizer(tokenizer: Any) -> str:
    """Return the digest of a tokenizer or processor, computed once, and again when tokens, special tokens or the template have changed.

    How a text is cut into tokens (normalizer, merges) is left out: keys and values are stored by token id, and another cut looks up others.
    """
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(inner, "get_vocab"):
        return hash_of(tokenizer_parts(tokenizer))
    state = [str(getattr(inner, name, None)) for name in ("vocab_size", "added_tokens_decoder", "special_tokens_map", "chat_template")]
    known = _tokenizers.get(inner)
    if known is None or known[0] != state:
        known = _tokenizers[inner] = state, hash_of(tokenizer_parts(tokenizer))
    return known[1]


def hash_of(value: Any) -> str:
    """Return the SHA-256 of JSON values, the same in every process and after a round trip through JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
