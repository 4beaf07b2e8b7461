"""Timing: sides in turns, and medians with quartiles."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hf_kvcaches.cli.timing import in_turns, ratios, spread

__all__ = ["MIB", "in_turns", "ratios", "seconds_of", "spread", "synchronize"]
MIB = 2**20


def synchronize(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Seconds of a call, the mean of several."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - begin) / repeats
