"""The errors that a user can meet. Each is also the builtin that one would expect, and says what to do.

KVCacheError
├── ConfigError             (ValueError)           an argument is wrong
├── UnsupportedError        (NotImplementedError)  this cache or model can't do that
├── FingerprintMismatch     (ValueError)           made for a model with other weights, adapters or tokenizer
├── ArtifactError           (ValueError)           a file is damaged, foreign or of a newer format
├── MissingDependencyError  (ImportError)          an extra is not installed
└── PoolExhausted           (MemoryError)          the pages that caches share are all in use
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral
from types import ModuleType
from typing import Any

_SHOWN = 80  # characters of a wrong value in a message: some print as long as a model


class KVCacheError(Exception):
    """The root of all errors raised on purpose by this package."""


class ConfigError(KVCacheError, ValueError):
    """An argument has a value that can't work."""

    @classmethod
    def of(cls, argument: str, expected: str, got: object, hint: str = "") -> ConfigError:
        """Build the error from the argument, what was expected, what came, and what to do."""
        return cls(f"{argument}: expected {expected}, got {_shown(got)}." + (f" {hint}" if hint else ""))


class UnsupportedError(KVCacheError, NotImplementedError):
    """The cache, the layer or the model can't do what was asked, and pretending would give wrong results."""


class FingerprintMismatch(KVCacheError, ValueError):
    """Stored state belongs to another model than the one at hand."""


class ArtifactError(KVCacheError, ValueError):
    """A stored file can't be used: truncated, damaged, of another kind, or written by a newer version."""


class MissingDependencyError(KVCacheError, ImportError):
    """An optional dependency is not installed."""


class PoolExhausted(KVCacheError, MemoryError):
    """The pages that caches share are all in use. Nothing was changed; it can be tried again when some are free."""


@dataclass(frozen=True)
class Refusal:
    """Why something can't be done, as a sentence or the end of one. Of what can be done functions return None, or what was asked for."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def _shown(got: object) -> str:
    """A value on one line of bounded length; of a long one its type and beginning."""
    text = " ".join(repr(got).split()) if not isinstance(got, str) else repr(got)
    if len(text) <= _SHOWN:
        return text
    kind = type(got).__name__
    return f"{text if text.startswith(kind) else f'{kind} {text}'}"[: _SHOWN - 3] + "..."


def whole_number(argument: str, value: Any, least: int, expected: str = "", hint: str = "", *, most: float = float("inf")) -> int:
    """A whole number as an int, also one of NumPy's; a bool is none. `expected` says in words what is right."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise ConfigError.of(argument, expected or f"an integer of at least {least}", value, hint)
    return int(value)


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_choice(argument: str, value: object, known: Collection[str | None], *, also: str = "", hint: str = "") -> None:
    """Refuses a value that is none of the known ones, and says which it was perhaps meant to be."""
    if (value is None or isinstance(value, str)) and value in known:
        return
    names = [name for name in known if name is not None]
    near = difflib.get_close_matches(value.lower(), names, n=1) if isinstance(value, str) else []
    meant = f"Did you mean {near[0]!r}?" if near else ""
    listed = f"one of {', '.join(map(repr, known))}{also}" if len(known) > 1 else f"{next(iter(known))!r}{also}"
    raise ConfigError.of(argument, listed, value, " ".join(filter(None, (meant, hint))))


def require_instance(argument: str, value: object, kind: type | tuple[type, ...], others: Mapping[str, object], hint: str = "") -> None:
    """Refuses a value of another class than `kind`, and says so where such a one was given as another argument."""
    if isinstance(value, kind):
        return
    kinds = kind if isinstance(kind, tuple) else (kind,)
    elsewhere = next((name for name, other in others.items() if isinstance(other, kind)), None)
    swapped = f"{elsewhere} is one: {argument} and {elsewhere} seem to be swapped." if elsewhere else ""
    expected = with_article(" or ".join(each.__name__ for each in kinds))
    raise ConfigError.of(argument, expected, value, " ".join(filter(None, (swapped, hint))))


def require_tokenizer(tokenizer: object) -> None:
    """Refuses a tokenizer's name in place of the tokenizer, or None."""
    if isinstance(tokenizer, str):
        hint = f"Pass AutoTokenizer.from_pretrained({_shown(tokenizer)})."
        raise ConfigError.of("tokenizer", "a tokenizer and not its name", tokenizer, hint)


def with_article(noun: str) -> str:
    """A noun with its indefinite article."""
    return f"{'an' if noun[:1].lower() in tuple('aeiou') else 'a'} {noun}"


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Imports an optional dependency, or says which extra brings it; `purpose`, what needs it, is the subject of the message."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise  # It is there, and misses something of its own.
        raise MissingDependencyError(
            f"{purpose} needs the module {module!r}, which is not installed. Install it with: pip install 'hf-kvcaches[{extra}]'"
        ) from error
