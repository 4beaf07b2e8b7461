"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

# What marks a temporary file as ours, so that one left by a killed process can be swept.
TEMPORARY_SUFFIX = ".hf_kvcaches.tmp"


@contextlib.contextmanager
def temporary_beside(target: Path) -> Iterator[Path]:
    """An unused path in the same folder, to write a file that is renamed once it is whole. What was not renamed is removed."""
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
