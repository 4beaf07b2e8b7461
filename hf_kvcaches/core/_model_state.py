"""Takes a model apart into the weights of its base and its adapters, whichever way the adapters were put in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hf_kvcaches.core._plain import attributes, plain
from hf_kvcaches.core.checksum import Deferred

# What PEFT's wrappers call the module that they wrap.
_WRAPPED = ("base_layer", "original_module", "token_adapter")
# Its classes around a whole model, and in the place of a module.
_MODELS, _TUNERS = ("PeftModel", "PeftMixedModel"), ("BaseTuner",)
_LAYERS = ("BaseTunerLayer", "AuxiliaryTrainingWrapper")
# What says which of a wrapper's adapters take part, which is read for itself, and what says nothing about the forward.
_NOT_SETTINGS = frozenset(("merged_adapters", "kwargs"))


@dataclass
class AdapterLayer:
    """One module that an adapter works on.

    Args:
        path: The wrapped module's name in the base model.
        kind: The wrapper's class.
        active: The adapters that take part in the forward, in order.
        merged: The adapters that are added into the base weights.
        state: Adapter name -> entry name -> tensor.
        settings: Adapter name -> scaling and what else the wrapper has as plain values.
    """

    path: str
    kind: str
    active: list[str]
    merged: list[str]
    state: dict[str, dict[str, Any]]
    settings: dict[str, dict[str, Any]]


@dataclass
class ModelState:
    """The parts of a model.

    Args:
        root: The transformers model itself, without its wrappers.
        base: Entry name -> tensor, named as in the model before any adapter was added.
        layers: Where adapters sit.
        modules: Name in the base -> module.
    """

    root: nn.Module
    base: dict[str, Any] = field(default_factory=dict)
    layers: list[AdapterLayer] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)


def take_apart(model: nn.Module) -> ModelState:
    """Reads names and tensors of the base and of every adapter; copies nothing, except what is offloaded."""
    root, prompts = _unwrap(model)
    state = ModelState(root)
    _walk(root, "", state)
    state.layers += prompts
    return state


def _is_peft(kind: type, *names: str) -> bool:
    """Whether a class is, or inherits from, one of these of PEFT's. They are known by name: a program without PEFT has none of them."""
    return any(base.__name__ in names and base.__module__.partition(".")[0] == "peft" for base in kind.__mro__)


def _unwrap(model: Any) -> tuple[nn.Module, list[AdapterLayer]]:
    prompts: list[AdapterLayer] = []
    while True:
        if _is_peft(type(model), *_MODELS):
            prompts += _prompt_layers(model)
            model = model.base_model
        elif _is_peft(type(model), *_TUNERS):
            model = model.model
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._orig_mod
        else:
            return model, prompts


def _prompt_layers(model: Any) -> list[AdapterLayer]:
    """Learned prompts and prefixes, which PEFT keeps beside the model rather than in it."""
    encoders = model._modules.get("prompt_encoder") or {}
    name = model.active_adapter if isinstance(model.active_adapter, str) else None
    if name is None or name not in encoders:
        return []
    active = [] if getattr(model, "_adapters_disabled", False) else [name]
    encoder = encoders[name]
    entries = {entry: value for path, module in encoder.named_modules() for entry, value in _own_entries(module, path)}
    return [AdapterLayer("prompt", type(encoder).__name__, active, [], {name: entries}, {name: {}})]


def _walk(module: nn.Module, path: str, state: ModelState) -> None:
    if _is_peft(type(module), *_LAYERS):
        _walk_wrapper(module, path, state)
        return
    state.modules[path] = module
    state.base.update(_own_entries(module, path))
    for name, child in module._modules.items():
        if child is not None:
            _walk(child, path if name == "_orig_mod" else f"{path}.{name}".lstrip("."), state)


def _walk_wrapper(module: Any, path: str, state: ModelState) -> None:
    containers: dict[str, nn.Module] = {}
    for name, child in module._modules.items():
        if child is None:
            continue
        if name in _WRAPPED:
            _walk(child, path, state)
        else:
            containers[name] = child
    entries: dict[str, dict[str, Any]] = {}
    for kind, container in containers.items():
        for inner_path, inner in container.named_modules():
            for entry, value in _own_entries(inner, inner_path):
                adapter, _, rest = entry.partition(".")
                entries.setdefault(adapter, {})[f"{path}.{kind}.{rest}".rstrip(".")] = value
    settings = {adapter: _settings(module, adapter, entries) for adapter in entries}
    merged = [name for name in getattr(module, "merged_adapters", []) if name in entries]
    # Once something is merged the layer computes with its base weights alone.
    idle = bool(module.disable_adapters) or bool(merged)
    active = [] if idle else [name for name in module.active_adapters if name in entries]
    state.layers.append(AdapterLayer(path, type(module).__name__, active, merged, entries, settings))


def _settings(module: nn.Module, adapter: str, adapters: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in attributes(module).items():
        if name in _NOT_SETTINGS:
            continue
        if isinstance(value, Mapping) and set(value) & set(adapters):
            value = value.get(adapter)
        found[name] = plain(value)
    return found


def _own_entries(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """What a module contributes to the state dict, which for quantized modules is more than its parameters, and its other buffers."""
    prefix = f"{path}." if path else ""
    entries: dict[str, Any] = {}
    module._save_to_state_dict(entries, prefix, True)
    entries.update((f"{prefix}{name}", value) for name, value in module._buffers.items() if value is not None)
    for name, value in entries.items():
        deferred = _offloaded(module, name.removeprefix(prefix), value) if isinstance(value, Tensor) and value.is_meta else None
        yield name, value if deferred is None else deferred


def _offloaded(module: nn.Module, name: str, placeholder: Tensor) -> Deferred | None:
    """The way to the data of a tensor that accelerate keeps on the CPU or on disk, or `None`."""
    hook = getattr(module, "_hf_hook", None)
    for candidate in getattr(hook, "hooks", (hook,)):
        weights = getattr(candidate, "weights_map", None)
        if weights is not None:
            return Deferred(weights, name, placeholder)
    return None
