"""Refusing arguments of kernels."""

from __future__ import annotations

from hf_kvcaches.errors import ConfigError


def check_layout(name: str, layout: str) -> None:
    """Refuse what is no layout."""
    if layout not in ("half", "interleaved"):
        raise ConfigError.of(name, "'half' or 'interleaved'", layout)
