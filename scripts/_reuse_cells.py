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
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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


class Way(Protocol):
    """A way to answer prompts."""

    def cache(self) -> Any:
        """A new one, for the next prompt."""

    def saved(self, cache: Any, ids: torch.Tensor) -> float:
        """The share of a prompt's FLOPs that a cache did not need."""

    def settle(self) -> None:
        """Wait for what is stored behind a prompt."""

    def close(self) -> None: ...


class Cold:
    """Without reuse."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def cache(self) -> Any:
        return DynamicCache(config=self.pair.plain.config)

    def saved(self, cache: Any, ids: torch.Tensor) -> float:
        return 0.0

    def settle(self) -> None: ...

    def close(self) -> None: ...


class Copied:
    """From a copy of a `DynamicCache` that holds the prefix already: what transformers offers, without a store or a look-up."""

    def __init__(self, pair: Pair, prefix: torch.Tensor) -> None:
        self.pair, self.tokens = pair, prefix.shape[1]
        self.filled = DynamicCache(config=pair.plain.config)
        with torch.no_grad():
            pair.plain(input_ids=prefix, past_key_values=self.filled, logits_to_keep=1)

    def cache(self) -> Any:
        return copy.deepcopy(self.filled)

    def saved(self, cache: Any, ids: torch.Tensor) -> float:
        costs, tokens = Costs.of(self.pair.plain), ids.shape[1]
        return 1 - costs.of_prompt(self.tokens, tokens) / costs.of_prompt(0, tokens)

    def settle(self) -> None: ...

    def close(self) -> None: ...


class Segments:
    """From a `SegmentStore`.

    Args:
        spans: Where segments of a prompt begin and end; None where the cache finds out.
    """

    def __init__(self, pair: Pair, location: str, stored: str, mode: str, spans: list[tuple[int, int]] | None) -> None:
        self.pair, self.mode, self.spans = pair, mode, None if spans is None else [spans]
        self.store = SegmentStore(location, quantization=STORED[stored], timeout=TIMEOUT)

    def cache(self) -> Any:
        return SegmentReuseCache(self.pair.switched, self.store, mode=self.mode, spans=self.spans)  # type: ignore[arg-type]

    def saved(self, cache: Any, ids: torch.Tensor) -> float:
        return float(cache.report().flops_saved)

    def settle(self) -> None:
        self.store.flush()

    def close(self) -> None:
        self.store.close()


class Aligned:
    """From a `WarmStartLibrary`."""

    def __init__(self, pair: Pair, location: str, stored: str, prompt: torch.Tensor) -> None:
        self.pair, self.prompt = pair, prompt
        tokenizer = word_tokenizer(pair.plain.config.vocab_size)
        options: dict[str, Any] = {"quantization": STORED[stored], "timeout": TIMEOUT}
        self.library = WarmStartLibrary(pair.switched, tokenizer, location=location, **options)
        self.library.add(prompt[0].tolist())

    def cache(self) -> Any:
        return WarmStartCache(self.pair.switched, self.library, strategy="align")

    def saved(self, cache: Any, ids: torch.Tensor) -> float:
        report, costs = cache.report(), Costs.of(self.pair.plain)
        if report.strategy != "align":
            raise SystemExit(f"aligned: served by {report.strategy} ({report.refused}): nothing timed")
        return 1 - costs.of_row(cache.plans[0]) / costs.of_prompt(0, len(ids[0]))

    def settle(self) -> None: ...

    def close(self) -> None:
        self.library.close()


def ask(way: Way, model: Any, ids: torch.Tensor, new_tokens: int = 1, memory: bool = False) -> Answer:
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
    model.generate(ids, past_key_values=cache, do_sample=False, **lengths)
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
    """Empty places for stores: memory, folders, a Redis server's database.

    Args:
        names: Of the back-ends.
        redis: The server's URL, where one of them is Redis.
    """

    def __init__(self, names: Sequence[str], redis: str | None) -> None:
        self.names, self._redis = names, redis
        self._folders: list[str] = []
        self._count = 0

    def new(self, name: str) -> str:
        if name == "disk":
            self._folders.append(tempfile.mkdtemp())
            return f"disk:{self._folders[-1]}/store"
        self._count += 1
        return f"{self._redis}?prefix=bench{self._count}" if name == "Redis" else name

    def clear(self) -> None:
        for folder in self._folders:
            shutil.rmtree(folder)
        self._folders.clear()
        if self._redis:
            import redis

            redis.Redis.from_url(self._redis).flushdb()


def ways(section: str, pair: Pair, locations: Locations, first: torch.Tensor) -> dict[tuple[str, str], Way]:
    """A way for each back-end and each form of what is stored, with the first prompt in it."""
    made: dict[tuple[str, str], Way] = {}
    if section == "prefix":
        made["DynamicCache", COPIED] = Copied(pair, first[:, : first.shape[1] * 9 // 10])
    for backend in locations.names:
        for stored in STORED:
            location = locations.new(backend)
            if section == "aligned":
                made[backend, stored] = Aligned(pair, location, stored, first)
                continue
            kind = ("approximate", pages_of(first.shape[1])) if section == "moved" else ("exact", None)
            made[backend, stored] = Segments(pair, location, stored, *kind)
            ask(made[backend, stored], pair.switched, first)
    return made


PROMPTS: dict[str, Callable[[torch.Tensor, int, int], Sequence[torch.Tensor]]] = {
    "prefix": begun_alike,
    "moved": moved_pages,
    "aligned": changed_words,
}
