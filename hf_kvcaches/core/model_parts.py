"""What a model consists of, read as JSON values: its tensors, adapters and settings, with names as before any adapter was added."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.model_state import changes_with_length, counted, is_counted
from hf_kvcaches.errors import ConfigError, require_tokenizer
from hf_kvcaches.kernels.checksum import describe, digest_of, head_of

# What PEFT's wrappers call the module that they wrap, and what is no setting of a single adapter.
_WRAPPED = ("base_layer", "original_module", "token_adapter")
_NOT_OF_AN_ADAPTER = ("_active_adapter", "_disable_adapters", "merged_adapters", "kwargs")
# Elements of each tensor by which a cast of the model is told from another model.
_SAMPLES = 4
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_tokenizers: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


class Entry(NamedTuple):
    """A tensor of a model, or another entry of its state dict.

    Args:
        fetch: Returns it from where accelerate has offloaded it.
    """

    name: str
    value: Any
    fetch: Callable[[], Tensor] | None

    @property
    def is_unreadable(self) -> bool:
        """Whether its numbers are not in this process."""
        return is_placeholder(self.value) and self.fetch is None


@dataclass(frozen=True, eq=False)
class ModelParts:
    """The parts of a model.

    Args:
        modules: By name.
        wrappers: PEFT's wrappers by the names of the modules that they wrap.
    """

    root: PreTrainedModel
    modules: dict[str, nn.Module] = field(default_factory=dict)
    wrappers: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, root: PreTrainedModel) -> ModelParts:
        """Take a model (without an outer wrapper) apart; nothing is copied or read."""
        parts, kinds = cls(root), compat.adapter_wrappers()
        waiting: list[tuple[str, nn.Module]] = [("", root)]
        while waiting:
            path, module = waiting.pop()
            wraps = isinstance(module, kinds)
            (parts.wrappers if wraps else parts.modules)[path] = module
            for name, child in reversed(list(module.named_children())):
                if not wraps or name in _WRAPPED:
                    waiting.append((path if wraps or name == "_orig_mod" else f"{path}.{name}".lstrip("."), child))
        return parts

    def weights(self) -> Iterator[Entry]:
        """Yield the tensors of the base, but for frequencies that change with the length of the text."""
        for path, module in self.modules.items():
            yield from (entry for entry in _entries(module, path) if not changes_with_length(module, entry.name.rpartition(".")[2]))

    def adapters(self) -> dict[str, Any]:
        """Return the adapters that take part in the forward, by name and with their settings."""
        layers = {path: [self.active(path), _merged(wrapper)] for path, wrapper in self.wrappers.items()}
        layers = {path: use for path, use in layers.items() if use != [[], []]}
        active, merged = (list(dict.fromkeys(name for use in layers.values() for name in use[index])) for index in (0, 1))
        settings = {
            f"{name} of {adapter!r}": value
            for adapter in active
            for name, value in _joined({path: self._settings(path, adapter) for path in layers if adapter in layers[path][0]}).items()
        }
        return {"active": active, "merged": merged, **({"layers": digest_of(layers)} if layers else {}), **settings}

    def active(self, path: str) -> list[str]:
        """Return the names of the adapters that a wrapper computes with; once one is merged it computes with the base alone."""
        wrapper = self.wrappers[path]
        return [] if wrapper.disable_adapters or _merged(wrapper) else [name for name in wrapper.active_adapters if name in _known(wrapper)]

    def adapter_weights(self) -> Iterator[Entry]:
        """Yield the tensors of the adapters that take part in the forward."""
        for path, wrapper in self.wrappers.items():
            active = self.active(path)
            for kind, container in _containers(wrapper):
                for inner_path, inner in container.named_modules():
                    for name, value, fetch in _entries(inner, inner_path):
                        adapter, _, rest = name.partition(".")
                        if adapter in active:
                            yield Entry(f"{adapter!r} {path}.{kind}.{rest}".rstrip("."), value, fetch)

    def _settings(self, path: str, adapter: str) -> dict[str, Any]:
        wrapper = self.wrappers[path]
        values = {name: value for name, value in vars(wrapper).items() if name in counted(wrapper) and name not in _NOT_OF_AN_ADAPTER}
        chosen = {name: value.get(adapter) if isinstance(value, dict) and adapter in value else value for name, value in values.items()}
        return {"class": type(wrapper).__name__} | {
            name: plain(value) for name, value in chosen.items() if not isinstance(value, nn.Module)
        }

    def settings(self) -> dict[str, Any]:
        """Return the configuration, and the class and plain attributes of all modules.

        What modules have that differ in nothing but the numbers in their names is one value, or one for each where they differ.
        """
        values: dict[str, dict[str, dict[str, Any]]] = {}
        for path, module in self.modules.items():
            pattern = re.sub(r"\b\d+\b", "*", path)
            values.setdefault(pattern, {})[path] = {"class": _class_name(type(module))} | _settings_of(module)
        modules = {f"{pattern}.{name}".lstrip("."): value for pattern, group in values.items() for name, value in _joined(group).items()}
        return _flat("config", plain(self.root.config.to_dict())) | modules


def _entries(module: nn.Module, path: str) -> Iterator[Entry]:
    home = compat.offloaded_weights(module)
    for name, value in compat.state_of(module).items():
        fetch = None if home is None or not is_placeholder(value) else functools.partial(home.__getitem__, name)
        yield Entry(f"{path}.{name}".lstrip("."), value, fetch)


def is_placeholder(value: Any) -> bool:
    """Whether a tensor has no data here: one on the meta device, or a shard of a distributed one."""
    return isinstance(value, Tensor) and (value.is_meta or hasattr(value, "full_tensor"))


def _containers(wrapper: Any) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in wrapper.named_children() if name not in _WRAPPED]


def _known(wrapper: Any) -> set[str]:
    """The names of the adapters that a wrapper has tensors of."""
    return {name for _, container in _containers(wrapper) for name in (*dict(container.named_children()), *container.state_dict())}


def _merged(wrapper: Any) -> list[str]:
    return [name for name in getattr(wrapper, "merged_adapters", ()) if name in _known(wrapper)]


def _settings_of(module: nn.Module) -> dict[str, Any]:
    attributes = {name: vars(module)[name] for name in counted(module)}
    dropout = "Dropout" in type(module).__name__
    return {
        name: plain(value)
        for name, value in attributes.items()
        if not isinstance(value, nn.Module | torch.device | PreTrainedConfig) and not (dropout and name == "p")
    }


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
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
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


def description_of(name: str, value: Any) -> str:
    """Return a text that is equal for equal tensors; rotary frequencies are rounded to 1%, as devices compute powers differently."""
    if name.endswith("inv_freq") and isinstance(value, Tensor) and value.is_floating_point():
        return f"{head_of(value)}{digest_of((value.detach().cpu().float().log2() * 64 + 0.23).round())}"
    return describe(value, name)


def sample_of(value: Any) -> list[float]:
    """Return a few elements of a tensor of floating-point numbers; none of others."""
    if not isinstance(value, Tensor) or value.dtype not in _FLOATS or value.layout != torch.strided or hasattr(value, "__tensor_flatten__"):
        return []
    flat = value.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLES) | 1][:_SAMPLES].tolist()


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
    state = tuple(
        map(str, (getattr(inner, name, None) for name in ("vocab_size", "added_tokens_decoder", "special_tokens_map", "chat_template")))
    )
    known = _tokenizers.get(inner) if hasattr(inner, "get_vocab") else None
    if known is None or known[0] != state:
        known = state, hash_of(tokenizer_parts(tokenizer))
        _tokenizers[inner] = known
    return known[1]


def hash_of(value: Any) -> str:
    """Return the SHA-256 of JSON values, the same in every process and after a round trip through JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def facts_of(parts: ModelParts) -> dict[str, Any]:
    """Return what people want to know of a model."""
    tensors = {id(entry.value): entry.value for entry in parts.weights() if isinstance(entry.value, Tensor)}.values()
    name = str(getattr(parts.root.config, "name_or_path", "") or "")
    return {
        # A local path says something about the machine and nothing about the model.
        "name": os.path.basename(os.path.normpath(name)) if os.path.isdir(name) else name,
        "class": type(parts.root).__name__,
        "parameters": sum(tensor.numel() for tensor in tensors),
        "dtypes": ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})),
    }
