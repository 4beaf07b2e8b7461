"""Measure how fast a model computes prompts, so that spans that take longer to fetch than to compute are computed."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from transformers import PreTrainedModel

# How many of the latest passes are remembered.
_PASSES = 8
_lock = threading.Lock()
_passes: weakref.WeakKeyDictionary[PreTrainedModel, deque[float]] = weakref.WeakKeyDictionary()


def note_pass(model: PreTrainedModel, operations: float, seconds: float) -> None:
    """Remember the seconds from the start of a prompt's pass to the next pass.

    Args:
        operations: Floating-point operations in the decoder layers.
    """
    if operations > 0:
        with _lock:
            _passes.setdefault(model, deque(maxlen=_PASSES)).append(seconds / operations)


def seconds_to_compute(model: PreTrainedModel, operations: float) -> float | None:
    """Estimate the seconds for a number of operations, at the fastest speed of the latest prompts; None before the first one."""
    with _lock:
        passes = _passes.get(model)
        # Slower passes include waiting: for the caller, a server or another thread.
        return min(passes) * operations if passes else None
