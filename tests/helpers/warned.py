"""Warnings, in any thread."""

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """What was warned of meanwhile, in any thread, once the context is left."""
    sentences: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield sentences
    sentences += [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
