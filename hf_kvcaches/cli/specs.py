"""Caches of the calls that are written on the command line."""

from __future__ import annotations

import inspect
from typing import Any

import hf_kvcaches
from hf_kvcaches.cli.calls import CACHES, CallSpec
from hf_kvcaches.cli.calls import parse as parse
from hf_kvcaches.core.per_call import PerCall, per_call
from hf_kvcaches.errors import ConfigError, require_choice

# What arguments of a cache may be made of, beside policies.
ARGUMENTS = tuple(
    "AdaptiveSubspace HeadBudgets KVCodec KeepProbe PagePool QueryStatistics SegmentPolicy SegmentStore SlotProjector WarmStartGate "
    "WarmStartLibrary".split()
)


def caches_of(spec: CallSpec, model: Any = None, tokenizer: Any = None) -> PerCall:
    """Caches by the spec, a new one for each text; what the spec calls is loaded or made once.

    Classes that are saved in folders (`KVCodec`, `SegmentPolicy`, `WarmStartLibrary` and others) are loaded from the folder or Hub
    repository that they are given, and other classes are called. The model and its tokenizer are passed where a class takes them.

    Args:
        spec: Of a cache.
        model: For what is loaded and checked.
        tokenizer: The model's.
    """
    cache_class = getattr(hf_kvcaches, spec.name)
    args, options = _arguments(spec, model, tokenizer)
    names = list(inspect.signature(cache_class).parameters)[1:]
    if tokenizer is not None and "tokenizer" in names[len(args) :]:
        options.setdefault("tokenizer", tokenizer)
    return per_call(cache_class, *args, **options)


def _arguments(spec: CallSpec, model: Any, tokenizer: Any) -> tuple[list[Any], dict[str, Any]]:
    made = lambda value: _made(value, model, tokenizer) if isinstance(value, CallSpec) else value  # noqa: E731
    return [made(value) for value in spec.args], {name: made(value) for name, value in spec.options.items()}


def _made(spec: CallSpec, model: Any, tokenizer: Any) -> Any:
    """What an argument of a cache stands for."""
    if spec.name in CACHES:
        return caches_of(spec, model, tokenizer)
    policies = [name for name in hf_kvcaches.__all__ if name.endswith("Policy") and name not in ("Policy", "SegmentPolicy")]
    require_choice("--cache", spec.name, (*ARGUMENTS, *policies))
    kind = getattr(hf_kvcaches, spec.name)
    make = getattr(kind, "from_pretrained", kind)
    args, options = _arguments(spec, model, tokenizer)
    names = list(inspect.signature(make).parameters)
    if names[:1] == ["model"]:
        args = [model, *args]
    for name, value in (("model", model), ("tokenizer", tokenizer)):
        if name in names[len(args) :]:
            options.setdefault(name, value)
    try:
        inspect.signature(make).bind(*args, **options)
    except TypeError as error:
        raise ConfigError(f"--cache: {spec}: {error}. Look up the arguments of {kind.__name__}.") from None
    return make(*args, **options)
