"""Caches as they are written on the command line: `EquipCache(policy='streaming', budget=512)`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from hf_kvcaches.cli.arguments import CACHE_HELP
from hf_kvcaches.errors import ConfigError, require_choice

CACHES = ("GrowingCache", "EquipCache", "SubspaceCache", "SegmentReuseCache", "WarmStartCache")
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
