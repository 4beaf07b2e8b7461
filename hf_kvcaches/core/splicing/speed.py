"""How fast a model computes prompts in this process, so that what takes longer to fetch than to compute is computed."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from transformers import PreTrainedModel

# The latest passes that are remembered.
_PASSES = 8
_lock = threading.Lock()
_passes: weakref.WeakKeyDictionary[PreTrainedModel, deque[float]] = weakref.WeakKeyDictionary()


def note_pass(model: PreTrainedModel, operations: float, seconds: float) -> None:
    """Remembers how long a prompt took, until the next pass began.

    Args:
        operations: Floating-point operations in the decoder layers.
    """
    if operations > 0:
        with _lock:
            _passes.setdefault(model, deque(maxlen=_PASSES)).append(seconds / operations)


def seconds_to_compute(model: PreTrainedModel, operations: float) -> float | None:
    """How long so many operations take at the speed of the fastest of the latest prompts; None before the first one."""
    with _lock:
        passes = _passes.get(model)
        # The others waited for something: a caller, a server, another thread.
        return min(passes) * operations if passes else None
