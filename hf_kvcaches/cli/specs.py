"""Caches as they are written on the command line: `EquipCache(policy='streaming', budget=512)`."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import Any

import hf_kvcaches
from hf_kvcaches.cli.arguments import CACHE_HELP
from hf_kvcaches.core.per_call import PerCall, per_call
from hf_kvcaches.errors import ConfigError, require_choice

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
    """Reads a cache, without evaluating anything.

    Args:
        text: A name, or a call.
    """
    try:
        spec = _read(ast.parse(text.strip(), mode="eval").body)
    except _UNREADABLE:
        expected = "a class, or a call of it with literals and other calls as arguments"
        raise ConfigError.of("--cache", expected, text, f"Write it {CACHE_HELP}.") from None
    if not isinstance(spec, CallSpec):
        raise ConfigError.of("--cache", "a class, or a call of it", text, f"Write it {CACHE_HELP}.")
    if spec.name == "TranslatedCache":
        hint = "Call hf_kvcaches.verify with a function that makes it."
        raise ConfigError.of("--cache", f"one of {', '.join(CACHES)}", spec.name, f"It starts from the codes of a single prompt. {hint}")
    require_choice("--cache", spec.name, CACHES)
    return spec


def _read(node: ast.expr) -> Any:
    """A call as a `CallSpec`, anything else as the literal that it must be."""
    if isinstance(node, ast.Name):
        return CallSpec(node.id, (), {})
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    names = [keyword.arg for keyword in node.keywords]
    if not isinstance(node.func, ast.Name) or len(set(names)) != len(names):
        raise ValueError
    options = {keyword.arg: _read(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    if len(options) != len(names):
        raise ValueError
    return CallSpec(node.func.id, tuple(_read(value) for value in node.args), options)


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
