"""What `bench.py reuse` times: the first token of a prompt of which most is stored, against what the saved FLOPs allow."""

from __future__ import annotations

import ctypes
import gc
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_kvcaches.cli.measure import in_turns, ratios, spread
from hf_kvcaches.cli.tables import Row
from shared.sides import FULL, PROMPTS, STORED, Bench, Way, aligned, ask, check, cold, copied, pages_of, segments

SECTIONS = (*PROMPTS, "no repeats")
NO_REUSE, NEW_TOKENS = "no reuse", 64
COLUMNS = (
    "section side stored model dtype tokens count cold_ms time_ms time_q1_ms time_q3_ms ratio ratio_q1 ratio_q3 saved possible "
    "efficiency extra"
).split()
SHOWN = "section side stored cold_ms time_ms ratio ratio_q1 ratio_q3 saved possible efficiency extra"


class Locations:
    """Empty places for stores, by the names of their back-ends: memory, folders, a Redis server's database."""

    def __init__(self, redis: str | None) -> None:
        self.names, self._redis, self._count = ("memory", "disk", *(["Redis"] if redis else [])), redis, 0
        self._folder = tempfile.TemporaryDirectory()

    def new(self, name: str) -> str:
        self._count += 1
        places = {"disk": f"disk:{self._folder.name}/store{self._count}", "Redis": f"{self._redis}?prefix=bench{self._count}"}
        return places.get(name, name)

    def clear(self) -> None:
        for folder in Path(self._folder.name).iterdir():
            shutil.rmtree(folder)
        if self._redis:
            import redis

            redis.Redis.from_url(self._redis).flushdb()


def ways(section: str, bench: Bench, locations: Locations, first: torch.Tensor) -> dict[tuple[str, str], Way]:
    """A way for each back-end and each form of what is stored, with the first prompt in it."""
    made: dict[tuple[str, str], Way] = {}
    if section == "prefix":
        made[FULL, "copied"] = copied(bench, first[:, : first.shape[1] * 9 // 10])
    for backend in locations.names:
        for stored in STORED:
            location = locations.new(backend)
            if section == "aligned":
                made[backend, stored] = aligned(bench, location, stored, first)
                continue
            kind = ("approximate", pages_of(first.shape[1])) if section == "moved" else ("exact", None)
            way = made[backend, stored] = segments(bench, location, stored, *kind)
            ask(way.model, way.cache, first)
            way.settle()
    return made


def peak_bytes(device: torch.device, work: Callable[[], Any]) -> tuple[int, Any]:
    """The most memory that a work takes beside what was there; on a CPU that of the process, where the kernel tells."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before, result = torch.cuda.memory_allocated(device), work()
        return torch.cuda.max_memory_allocated(device) - before, result
    if sys.platform != "linux":
        return 0, work()

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is where it is
    before = status("VmRSS")
    result = work()
    return status("VmHWM") - before, result


class Hit(NamedTuple):
    """One request; the share of its FLOPs that was saved, and its cache's report."""

    seconds: float
    logits: torch.Tensor
    saved: float = 0.0
    report: Any = None


class Reuse:
    """Measures sections on one model: prompts of so many tokens, and so many hits after one that does not count."""

    def __init__(self, bench: Bench, tokens: int, hits: int, redis: str | None) -> None:
        self.bench, self.tokens, self.hits, self.locations = bench, tokens, hits, Locations(redis)
        self.first = bench.prompt(1, tokens, seed=0)

    def rows(self, section: str) -> Iterator[Row]:
        for row in self.stored(section) if section in PROMPTS else self.no_repeats():
            yield {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}

    def request(self, way: Way, ids: torch.Tensor, new_tokens: int = 1) -> Hit:
        """Answer a prompt, and wait until what it computed is stored."""
        seconds, cache, logits = ask(way.model, way.cache, ids[:, way.held :], new_tokens)
        hit = Hit(seconds, logits)
        if way.saved:
            hit = hit._replace(saved=way.saved(cache, self.tokens), report=cache.report() if hasattr(cache, "report") else None)
        del cache  # what it computed goes to the store when it goes
        way.settle()
        return hit

    def stored(self, section: str) -> Iterator[Row]:
        *prompts, last = PROMPTS[section](self.first, self.hits + 2, self.bench.shape.vocabulary)
        sides: dict[Any, Way] = {NO_REUSE: cold(self.bench), **ways(section, self.bench, self.locations, self.first)}
        works = {side: lambda number, way=way: self.request(way, prompts[number]) for side, way in sides.items()}
        hits = {side: own[1:] for side, own in in_turns(works, len(prompts)).items()}
        cold_hits = hits.pop(NO_REUSE)
        for (backend, stored), own in hits.items():
            way = sides[backend, stored]
            for hit, other in zip(own, cold_hits, strict=True):
                check(hit.logits, other.logits if way.exact else None, self.bench.dtype, f"{section}, {backend}, {stored}")
            peak, hit = peak_bytes(self.bench.device, lambda way=way: self.request(way, last))  # type: ignore[misc]
            way.close()
            yield {"side": backend, "stored": stored, **self._hit([hit.seconds for hit in cold_hits], own), **self._extra(peak, hit)}
        self.locations.clear()

    def _hit(self, base: Sequence[float], hits: Sequence[Hit]) -> Row:
        seconds, saved = [hit.seconds for hit in hits], statistics.median(hit.saved for hit in hits)
        if not saved > 0:
            raise SystemExit(f"nothing was reused, so nothing is timed: {hits[-1].report}")
        row = {"count": len(hits), "cold_ms": statistics.median(base) * 1e3, **spread("time", seconds, 1e3), **ratios(base, seconds)}
        return row | {"saved": saved, "possible": 1 / (1 - saved), "efficiency": row["ratio"] * (1 - saved)}

    def _extra(self, peak: int, hit: Hit) -> Row:
        """Bytes beside the weights, the store and what the cache keeps, as a share of those of the reused keys and values."""
        if hit.report is None:
            return {}
        shape, itemsize = self.bench.shape, self.bench.model.dtype.itemsize
        token = 2 * shape.kv_heads * shape.head_dim * shape.layers * itemsize
        return {"extra": (peak - hit.report.bytes) / (hit.report.reused_tokens * token)}

    def no_repeats(self) -> Iterator[Row]:
        sides: dict[str, Way] = {NO_REUSE: cold(self.bench)}
        sides |= {mode: segments(self.bench, "memory", "bit-equal", mode) for mode in ("exact", "approximate")}
        prompts = [self.bench.prompt(1, self.tokens, seed=100 + number) for number in range(self.hits + 1)]
        works = {side: lambda number, way=way: self.request(way, prompts[number], NEW_TOKENS) for side, way in sides.items()}
        seconds = {side: [hit.seconds for hit in own[1:]] for side, own in in_turns(works, len(prompts)).items()}
        for side, own in seconds.items():
            sides[side].close()
            cold_ms = 1e3 * statistics.median(seconds[NO_REUSE])
            yield {"side": side, "count": len(own), "cold_ms": cold_ms, **spread("time", own, 1e3), **ratios(seconds[NO_REUSE], own)}
