"""Ways to answer a prompt of which most is stored: by segments or by a library, in a back-end, bit-equal or rounded to 8 bits."""

from __future__ import annotations

import copy
import ctypes
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from shared.models import Pair, random_ids, word_tokenizer
from shared.timing import synchronize
from transformers import DynamicCache

from hf_kvcaches import SegmentReuseCache, SegmentStore, WarmStartCache, WarmStartLibrary
from hf_kvcaches.segments.flops import Costs

PAGES, CHANGES = 5, 10
TIMEOUT = 60.0  # seconds, as hundreds of MiB may come in one answer
BIT_EQUAL, INT8, COPIED = "bit-equal", "int8", "copied"
STORED: dict[str, Any] = {BIT_EQUAL: None, INT8: "int8"}


class Answer(NamedTuple):
    """One request."""

    seconds: float  # of the processor, or on a GPU of the clock, until the last new token was there; with the making of the cache
    saved: float = 0.0  # share of the FLOPs
    reused: int = 0  # tokens
    extra: float = 0.0  # bytes at the peak, beside the weights, the store and what the cache keeps, where that was measured


@dataclass(frozen=True)
class Way:
    """A way to answer prompts."""

    model: Any
    cache: Callable[[], Any]  # a new one, for the next prompt
    saved: Callable[[Any, torch.Tensor], float] = lambda cache, ids: 0.0  # the share of a prompt's FLOPs that a cache did not need
    settle: Callable[[], object] = lambda: None  # waits for what is stored behind a prompt
    close: Callable[[], object] = lambda: None


def cold(pair: Pair) -> Way:
    """Without reuse."""
    return Way(pair.plain, lambda: DynamicCache(config=pair.plain.config))


@torch.no_grad()
def copied(pair: Pair, prefix: torch.Tensor) -> Way:
    """From a copy of a `DynamicCache` that holds the prefix already: what transformers offers, without a store or a look-up."""
    filled, costs = DynamicCache(config=pair.plain.config), Costs.of(pair.plain)
    pair.plain(input_ids=prefix, past_key_values=filled, logits_to_keep=1)
    saved = lambda cache, ids: 1 - costs.of_prompt(prefix.shape[1], ids.shape[1]) / costs.of_prompt(0, ids.shape[1])  # noqa: E731
    return Way(pair.plain, lambda: copy.deepcopy(filled), saved)


def segments(pair: Pair, location: str, stored: str, mode: Any, spans: list[tuple[int, int]] | None = None) -> Way:
    """From a `SegmentStore`.

    Args:
        spans: Where segments of a prompt begin and end; None where the cache finds out.
    """
    store, own = SegmentStore(location, quantization=STORED[stored], timeout=TIMEOUT), None if spans is None else [spans]
    make = lambda: SegmentReuseCache(pair.switched, store, mode=mode, spans=own)  # noqa: E731
    return Way(pair.switched, make, lambda cache, ids: float(cache.report().flops_saved), store.flush, store.close)


def aligned(pair: Pair, location: str, stored: str, prompt: torch.Tensor) -> Way:
    """From a `WarmStartLibrary`."""
    options: dict[str, Any] = {"quantization": STORED[stored], "timeout": TIMEOUT}
    library = WarmStartLibrary(pair.switched, word_tokenizer(pair.plain.config.vocab_size), location=location, **options)
    library.add(prompt[0].tolist())

    def saved(cache: Any, ids: torch.Tensor) -> float:
        report, costs = cache.report(), Costs.of(pair.plain)
        if report.strategy != "align":
            raise SystemExit(f"aligned: served by {report.strategy} ({report.refused}): nothing timed")
        return 1 - costs.of_row(cache.plans[0]) / costs.of_prompt(0, len(ids[0]))

    return Way(pair.switched, lambda: WarmStartCache(pair.switched, library, strategy="align"), saved, close=library.close)


def ask(way: Way, ids: torch.Tensor, new_tokens: int = 1, memory: bool = False) -> Answer:
    """Generate exactly so many tokens greedily behind a prompt, (1, tokens).

    Args:
        memory: Whether to measure the peak. The process gives all its free memory back for that first, and to get it again takes time.
    """
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    peak = Peak(ids.device) if memory else None
    clock = time.process_time if ids.device.type == "cpu" else time.perf_counter
    synchronize(ids.device)
    begin = clock()
    cache = way.cache()
    way.model.generate(ids, past_key_values=cache, do_sample=False, **lengths)
    synchronize(ids.device)
    seconds = clock() - begin
    report = cache.report() if hasattr(cache, "report") else None
    extra = 0 if report is None or peak is None else peak.bytes() - report.bytes
    answer = Answer(seconds, way.saved(cache, ids), 0 if report is None else report.reused_tokens, extra)
    del cache  # what it computed goes to the store when it goes
    way.settle()
    return answer


class Peak:
    """The most memory that is used from here on; on a CPU that of the process, where the kernel tells."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is where it is
        self.before = self._status("VmRSS", "memory_allocated")

    def bytes(self) -> int:
        return self._status("VmHWM", "max_memory_allocated") - self.before

    def _status(self, of_process: str, of_device: str) -> int:
        if self.device.type == "cuda":
            return int(getattr(torch.cuda, of_device)(self.device))
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(of_process)), 0)


def begun_alike(first: torch.Tensor, count: int, vocabulary: int) -> list[torch.Tensor]:
    """Prompts of which nine tenths are the beginning of the first one."""
    shared = first.shape[1] * 9 // 10
    ends = [random_ids(vocabulary, len(first), first.shape[1] - shared, seed=10 + number).to(first.device) for number in range(count)]
    return [torch.cat([first[:, :shared], end], 1) for end in ends]


def pages_of(tokens: int) -> list[tuple[int, int]]:
    """Where the pages of a prompt begin and end; what is left before the first is new."""
    size = tokens * 98 // 100 // PAGES
    start = tokens - PAGES * size - tokens // 100
    return [(start + number * size, start + (number + 1) * size) for number in range(PAGES)]


def moved_pages(first: torch.Tensor, count: int, vocabulary: int) -> list[torch.Tensor]:
    """Prompts with the pages of the first one, in another order, behind and before something new."""
    edges = pages_of(first.shape[1])
    prompts = []
    for number in range(count):
        new = random_ids(vocabulary, 1, first.shape[1], seed=20 + number).to(first.device)
        order = [(index * 2 + 1 + number) % PAGES for index in range(PAGES)]
        for (start, stop), index in zip(edges, order, strict=True):
            new[:, start:stop] = first[:, slice(*edges[index])]
        prompts.append(new)
    return prompts


def changed_words(first: torch.Tensor, count: int, vocabulary: int) -> list[torch.Tensor]:
    """The first prompt with ten other words, about equally far apart."""
    prompts, step = [], first.shape[1] // (CHANGES + 1)
    for number in range(count):
        ids = first.clone()
        for place in range(CHANGES):
            at = (place + 1) * step + number * 3
            ids[:, at] = (ids[:, at] + number) % (vocabulary - 1) + 1
        prompts.append(ids)
    return prompts


class Locations:
    """Empty places for stores: memory, folders, a Redis server's database, by the names of the back-ends."""

    def __init__(self, names: Sequence[str], redis: str | None) -> None:
        self.names, self._redis, self._count = names, redis, 0
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


def ways(section: str, pair: Pair, locations: Locations, first: torch.Tensor) -> dict[tuple[str, str], Way]:
    """A way for each back-end and each form of what is stored, with the first prompt in it."""
    made: dict[tuple[str, str], Way] = {}
    if section == "prefix":
        made["DynamicCache", COPIED] = copied(pair, first[:, : first.shape[1] * 9 // 10])
    for backend in locations.names:
        for stored in STORED:
            location = locations.new(backend)
            if section == "aligned":
                made[backend, stored] = aligned(pair, location, stored, first)
                continue
            kind = ("approximate", pages_of(first.shape[1])) if section == "moved" else ("exact", None)
            made[backend, stored] = segments(pair, location, stored, *kind)
            ask(made[backend, stored], first)
    return made


PROMPTS: dict[str, Callable[[torch.Tensor, int, int], Sequence[torch.Tensor]]] = {
    "prefix": begun_alike,
    "moved": moved_pages,
    "aligned": changed_words,
}
