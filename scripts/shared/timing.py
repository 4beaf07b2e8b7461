"""Timing: sides in turns, medians with quartiles, a clock for single calls, and where inside the package the time goes."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch

T = TypeVar("T")
MIB = 2**20
REST = "the rest"  # what is in no file of the package


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


def in_turns(works: Mapping[str, Callable[[int], T]], rounds: int, warm_up: int = 0) -> dict[str, list[T]]:
    """Call every work with the number of the round, round by round, each time another one first: what slows the computer for a while
    slows all. Results of the warm-up rounds are dropped."""
    names = list(works)
    results: dict[str, list[T]] = {name: [] for name in names}
    for index in range(-warm_up, rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            result = works[name](max(index, 0))
            if index >= 0:
                results[name].append(result)
    return results


def spread(name: str, values: Sequence[float], factor: float = 1.0) -> dict[str, float]:
    """Median and quartiles as columns; in milliseconds with a factor of 1,000."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    unit = "" if factor == 1 else "_ms"
    numbers = {"": statistics.median(values), "_q1": low, "_q3": high}
    return {f"{name}{quartile}{unit}": round(value * factor, 4) for quartile, value in numbers.items()}


def ratios(base: Sequence[float], seconds: Sequence[float]) -> dict[str, float]:
    """Columns of how many times as fast a side is, taken round by round."""
    return spread("ratio", [before / after for before, after in zip(base, seconds, strict=True)])


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


@cache
def _module_of(code: CodeType) -> str | None:
    """The file of this package that a function is from, `model` for transformers' models, None for the rest: it counts for its caller."""
    path = code.co_filename.replace("\\", "/")
    if "/transformers/models/" in path:
        return "model"
    if "/hf_kvcaches/" not in path:
        return None
    return path.rpartition("/hf_kvcaches/")[2].removesuffix(".py")


def profiled(work: Callable[[], T], device: torch.device) -> tuple[T, Counter[str]]:
    """Call something, and count the seconds in each file of the package, with what is called from there but for other files of it.

    Calls of other threads are not seen. Counting adds a little to everything.
    """
    seconds: Counter[str] = Counter()
    stack, last = [REST], [0.0]

    def charge() -> None:
        synchronize(device)
        now = time.perf_counter()
        seconds[stack[-1]] += now - last[0]
        last[0] = now

    def event(frame: FrameType, kind: str, _: Any) -> None:
        if kind == "call":
            label = _module_of(frame.f_code) or stack[-1]
            if label != stack[-1]:
                charge()
            stack.append(label)
        elif kind == "return" and len(stack) > 1:
            if stack[-1] != stack[-2]:
                charge()
            stack.pop()

    last[0] = time.perf_counter()
    sys.setprofile(event)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    del stack[1:]
    charge()
    return result, seconds
