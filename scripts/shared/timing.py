"""Timing: sides in turns, medians with quartiles, a clock for single calls, and the package's share of a call."""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import hf_kvcaches
from hf_kvcaches.cli.timing import in_turns, ratios, spread

__all__ = ["MIB", "Clock", "compared", "in_turns", "last_cache", "own_share", "ratios", "seconds_of", "spread", "synchronize"]
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


def compared(seconds: Mapping[str, Sequence[float]], baselines: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each side: milliseconds, and how many times as fast as the best baseline (by its median) it is."""
    best = min(baselines, key=lambda name: statistics.median(seconds[name]))
    rows = []
    for name, times in seconds.items():
        row = {"side": name, "baseline": best, **spread("time", times, 1e3), **ratios(seconds[best], times)}
        rows.append({**row, "total_ratio": round(sum(seconds[best]) / sum(times), 4)})
    return rows


def last_cache(device: torch.device) -> int:
    """Bytes of the largest cache of the processor, 0 if nothing says so."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * (2**10 if size[-1] == "K" else MIB) for size in sizes if size[:-1].isdigit()), default=0)


class Clock:
    """Times single calls, and knows how fast memory is read."""

    def __init__(self, device: torch.device, *, small: bool = False) -> None:
        self.device = device
        size = 4 * MIB if small else 2048 * MIB if device.type == "cuda" else min(1024 * MIB, max(256 * MIB, 2 * last_cache(device)))
        self._other = torch.ones(size // 4, device=device)
        target = torch.empty_like(self._other)
        # Bytes a second: the best of summing a large tensor and of copying it, which reads and writes.
        works = ((self._other.sum, size), (lambda: target.copy_(self._other), 2 * size))
        self.bandwidth = max(amount / min(self.of(work) for _ in range(9)) for work, amount in works)

    def layers(self, size: int, calls: int) -> int:
        """How many tensors of that size to read in turns, so that none is in a cache when its turn comes again."""
        if self.device.type == "cuda":
            return 1
        return max(1, min(calls, -(-2 * last_cache(self.device) // size)))

    def of(self, work: Callable[[], object]) -> float:
        """Seconds of a call; on CUDA those of the device."""
        if self.device.type != "cuda":
            return seconds_of(work, self.device)
        # Empties the caches, and takes longer than Python takes to launch the call that is timed.
        self._other.sum()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1e3


def own_share(work: Callable[[], object]) -> float:
    """The share of a call's time in this package's functions and in what they call of torch, as cProfile sees it."""
    profile = cProfile.Profile()
    profile.runcall(work)
    package, stats = str(Path(hf_kvcaches.__file__).parent), pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = sum(entry[2] for (file, _, _), entry in stats.items() if file.startswith(package))
    builtin = [callers for (file, _, _), (*_, callers) in stats.items() if file == "~"]
    own += sum(entry[2] for callers in builtin for (file, _, _), entry in callers.items() if file.startswith(package))
    return own / sum(entry[2] for entry in stats.values())
