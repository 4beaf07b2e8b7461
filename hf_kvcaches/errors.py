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

import importlib
from types import ModuleType


class KVCacheError(Exception):
    """The root of all errors raised on purpose by this package."""


class ConfigError(KVCacheError, ValueError):
    """An argument has a value that can't work."""

    @classmethod
    def of(cls, argument: str, expected: str, got: object, hint: str = "") -> ConfigError:
        """The message in the house's order: the argument, what was expected, what came, what to do."""
        return cls(f"{argument}: expected {expected}, got {got!r}." + (f" {hint}" if hint else ""))


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


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Imports an optional dependency, or says which extra brings it.

    Args:
        module: The module's import name.
        extra: The extra of this package that installs it.
        purpose: What it is needed for, as the subject of the message.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise  # It is there, and misses something of its own.
        raise MissingDependencyError(
            f"{purpose} needs the module {module!r}, which is not installed. Install it with: pip install 'hf-kvcaches[{extra}]'"
        ) from error
