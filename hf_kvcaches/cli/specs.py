"""Caches as they are written on the command line: `EquipCache(policy='streaming', budget=512)`. Torch is imported when one is made."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import hf_kvcaches
from hf_kvcaches.errors import ConfigError, require_choice

CACHE_HELP = (
    "such as \"EquipCache(policy='streaming', budget=512)\", \"SubspaceCache(KVCodec('FOLDER'))\" or "
    "\"SegmentReuseCache(SegmentStore('memory'))\""
)
CACHES = ("GrowingCache", "EquipCache", "SubspaceCache", "SegmentReuseCache", "WarmStartCache")
# What arguments of a cache may be made of, beside policies.
ARGUMENTS = tuple(
    "AdaptiveSubspace HeadBudgets KVCodec KeepProbe PagePool QueryStatistics SegmentPolicy SegmentStore SlotProjector WarmStartGate "
    "WarmStartLibrary".split()
)
# What `ast` raises on text that is no literal.
_UNREADABLE = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)


@dataclass(frozen=True, repr=False)
class CallSpec:
    """A call of a public class, whose arguments are literals and other calls."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def arguments(self) -> str:
        """The arguments as they are typed."""
        return ", ".join([*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.options.items())])

    def __repr__(self) -> str:
        return f"{self.name}({self.arguments})"


def parse(text: str) -> CallSpec:
    """Read the name or the call of a cache, without evaluating anything."""
    try:
        spec = _read(ast.parse(text.strip(), mode="eval").body)
    except _UNREADABLE:
        spec = None
    if not isinstance(spec, CallSpec):
        expected = "a class, or a call of it with literals and other calls as arguments"
        raise ConfigError.of("cache", expected, text, f"Write it {CACHE_HELP}.")
    hint = "It starts from the codes of a single prompt: call hf_kvcaches.verify with a function that makes it."
    require_choice("cache", spec.name, CACHES, hint=hint if spec.name == "TranslatedCache" else "")
    return spec


def _read(node: ast.expr) -> Any:
    """A call as a `CallSpec`, anything else as the literal that it must be."""
    if isinstance(node, ast.Name):
        return CallSpec(node.id, (), {})
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    options = {keyword.arg: _read(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    if not isinstance(node.func, ast.Name) or len(options) != len(node.keywords):
        raise ValueError
    return CallSpec(node.func.id, tuple(map(_read, node.args)), options)


def makers(specs: Sequence[CallSpec], model: Any, tokenizer: Any = None) -> dict[str, Callable[[], Any]]:
    """By the spec, what makes a new cache for each text; stores, codecs and what else a spec calls are made or loaded once.

    Classes that are saved in folders (`KVCodec`, `SegmentPolicy`, `WarmStartLibrary` and others) are loaded from the folder or Hub
    repository that they are given, and other classes are called. The model and its tokenizer are passed where a class takes them.
    """
    return {repr(spec): partial(_recipe(spec, model, tokenizer).new_cache, model) for spec in specs}


def _recipe(spec: CallSpec, model: Any, tokenizer: Any) -> Any:
    """The `per_call` of a cache's spec."""
    cache_class = getattr(hf_kvcaches, spec.name)
    (_, *args), options = _arguments(spec, cache_class, model, tokenizer)
    return hf_kvcaches.per_call(cache_class, *args, **options)


def _made(spec: CallSpec, model: Any, tokenizer: Any) -> Any:
    """What an argument of a cache stands for."""
    if spec.name in CACHES:
        return _recipe(spec, model, tokenizer)
    policies = [name for name in hf_kvcaches.__all__ if name.endswith("Policy") and name not in ("Policy", "SegmentPolicy")]
    require_choice("--cache", spec.name, (*ARGUMENTS, *policies))
    kind = getattr(hf_kvcaches, spec.name)
    make = getattr(kind, "from_pretrained", kind)
    args, options = _arguments(spec, make, model, tokenizer)
    try:
        inspect.signature(make).bind(*args, **options)
    except TypeError as error:
        raise ConfigError(f"--cache: {spec}: {error}. Look up the arguments of {spec.name}.") from None
    return make(*args, **options)


def _arguments(spec: CallSpec, make: Callable[..., Any], model: Any, tokenizer: Any) -> tuple[list[Any], dict[str, Any]]:
    """What a call passes, with the model and its tokenizer where these are taken."""
    made = lambda value: _made(value, model, tokenizer) if isinstance(value, CallSpec) else value  # noqa: E731
    args, options = [made(value) for value in spec.args], {name: made(value) for name, value in spec.options.items()}
    names = list(inspect.signature(make).parameters)
    if names[:1] == ["model"]:
        args.insert(0, model)
    return args, {name: value for name, value in (("model", model), ("tokenizer", tokenizer)) if name in names[len(args) :]} | options
