"""Rows of token ids, what two of them share, and arrays as text for the heads of blobs."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_kvcaches.core.token_log import Ids as Ids


def as_ids(values: Any) -> Ids:
    """Return token ids as an array, from a list, a tensor on the CPU or an array."""
    return np.ascontiguousarray(np.asarray(values), dtype=np.uint32)


def array_as_text(values: npt.ArrayLike, dtype: str) -> str:
    """Return an array as a string for JSON; `dtype` is NumPy's name with the byte order, such as "<u4"."""
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def array_of_text(text: str, dtype: str) -> npt.NDArray[Any]:
    """Undo `array_as_text`; raise a `ValueError` or `TypeError` for any other string."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)


def common_prefix(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Return how many tokens two rows share at their starts."""
    length = min(len(a), len(b))
    different = (a[:length] != b[:length]).nonzero()[0]
    return int(different[0]) if len(different) else length


def common_suffix(a: Ids, b: Ids) -> int:
    """Return how many tokens two rows share at their ends."""
    return common_prefix(a[::-1], b[::-1])


def window_hashes(ids: Ids, width: int) -> npt.NDArray[np.uint64]:
    """Hash every window of `width` consecutive tokens, (tokens - width + 1,); equal windows have equal hashes."""
    if len(ids) < width:
        return np.zeros(0, np.uint64)
    mixed = ids.astype(np.uint64)
    # The finaliser of splitmix64: small ids fill all 64 bits.
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB) + np.uint64(0x9E3779B97F4A7C15)
    windows = np.lib.stride_tricks.sliding_window_view(mixed, width)
    hashes: npt.NDArray[np.uint64] = (windows * _powers(width)).sum(axis=1, dtype=np.uint64)
    return hashes


@cache
def _powers(width: int) -> npt.NDArray[np.uint64]:
    return np.array([pow(0x9E3779B97F4A7C15, width - 1 - i, 2**64) for i in range(width)], dtype=np.uint64)
