"""How each cache answers a prompt at the size of a real model: from nothing, from a store, from a library, from another model's codes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

import hf_kvcaches as kv
from hf_kvcaches.evaluate.runner import synchronize
from shared.models import Shape, random_ids, word_tokenizer

FULL = "DynamicCache"
TOLERANCE = {"float32": 1e-3, "bfloat16": 6e-2, "float16": 6e-2}  # of logits of the order of 1
PAGES, CHANGES = 5, 10
TIMEOUT = 60.0  # seconds of a store, as hundreds of MiB may come in one answer
BIT_EQUAL, INT8 = "bit-equal", "int8"
STORED: dict[str, Any] = {BIT_EQUAL: None, INT8: "int8"}


class Answer(NamedTuple):
    """A prompt that was answered."""

    seconds: float  # of the processor, or on a GPU of the clock, with the making of the cache
    cache: Any
    logits: torch.Tensor  # after the prompt, (batch, vocabulary)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Processor time on a CPU, so that other jobs matter little."""
    return time.process_time if device.type == "cpu" else time.perf_counter


def feed(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits after these tokens, (batch, vocabulary)."""
    logits: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    return logits


@torch.no_grad()
def ask(model: Any, make: Callable[[], Any], ids: torch.Tensor, new_tokens: int = 1) -> Answer:
    """Make a cache, read a prompt and write so many tokens greedily."""
    clock = clock_of(ids.device)
    synchronize(ids.device)
    begin = clock()
    cache = make()
    logits = last = feed(model, cache, ids)
    for _ in range(new_tokens - 1):
        last = feed(model, cache, last.argmax(-1, keepdim=True))
    synchronize(ids.device)
    return Answer(clock() - begin, cache, logits)


def check(logits: torch.Tensor, expected: torch.Tensor | None, dtype: str, name: str) -> None:
    """End the run where logits are not finite, or not those that are expected."""
    if not bool(logits.isfinite().all()):
        raise SystemExit(f"{name}: logits are not finite: nothing timed")
    if expected is not None and not (error := float((logits.float() - expected.float()).abs().max())) <= TOLERANCE[dtype]:
        raise SystemExit(f"{name}: logits differ by {error:.3g}, more than {TOLERANCE[dtype]:.0e}: nothing timed")


class Bench:
    """The model of one precision, and the artifacts that caches need."""

    def __init__(self, shape: Shape, dtype: str, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.model = shape.random(device, dtype)

    def prompt(self, batch: int, tokens: int, seed: int = 5) -> torch.Tensor:
        return random_ids(self.shape.vocabulary, batch, tokens, seed=seed).to(self.device)

    def full_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    @cached_property
    def codec(self) -> kv.KVCodec:
        """Calibrated on random tokens, with the default bytes."""
        texts = random_ids(self.shape.vocabulary, 2, 512, seed=2).tolist()
        return kv.KVCodec.calibrate(self.model, None, texts, metric="plain", progress=False)

    @cached_property
    def translator(self) -> kv.CacheTranslator:
        """Fitted to random tokens, with the default bytes."""
        texts = random_ids(self.shape.vocabulary, 4, 512, seed=3).tolist()
        return kv.CacheTranslator.fit(self.producer(), self.model, None, texts, progress=False)

    def producer(self) -> Any:
        """Another model: a little noise away from the one that answers. It is made anew each time, as it takes memory."""
        model: Any = copy.deepcopy(self.model)
        random = torch.Generator(self.device).manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=random, device=self.device).to(weight)
        return model

    def flops(self, computed: int, tokens: int) -> float:
        """Multiplications of a prompt's last `computed` tokens: by weights, and by the keys and values before them."""
        shape = self.shape
        weights = 3 * shape.hidden * shape.intermediate + 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
        return computed * (weights + 2 * shape.heads * shape.head_dim * (tokens - computed / 2))

    def saved(self, computed: int, tokens: int) -> float:
        """The share of a prompt's multiplications that a cache did not need."""
        return 1 - self.flops(computed, tokens) / self.flops(tokens, tokens)


@dataclass(frozen=True)
class Way:
    """A way to answer prompts."""

    model: Any  # that answers
    cache: Callable[[], Any]  # makes a cache for the next prompt
    exact: bool = True  # whether a prompt has the logits of a `DynamicCache`
    saved: Callable[[Any, int], float] | None = None  # the share of a prompt's FLOPs that was saved; None where nothing is reused
    held: int = 0  # first tokens that the cache has when it is made
    settle: Callable[[], object] = lambda: None  # waits for what is stored after a prompt
    close: Callable[[], object] = lambda: None


def cold(bench: Bench) -> Way:
    """Without reuse."""
    return Way(bench.model, bench.full_cache)


@torch.no_grad()
def copied(bench: Bench, prefix: torch.Tensor) -> Way:
    """From a copy of a `DynamicCache` that holds the prefix: what transformers offers, without a store or a look-up."""
    filled = bench.full_cache()
    feed(bench.model, filled, prefix)
    saved = lambda cache, tokens: bench.saved(tokens - prefix.shape[1], tokens)  # noqa: E731
    return Way(bench.model, lambda: copy.deepcopy(filled), saved=saved, held=prefix.shape[1])


def segments(bench: Bench, location: str, stored: str, mode: Any, spans: list[tuple[int, int]] | None = None) -> Way:
    """From a `SegmentStore`; the cache finds segments where there are no `spans`."""
    store, model = kv.SegmentStore(location, quantization=STORED[stored], timeout=TIMEOUT), bench.model
    make = lambda: kv.SegmentReuseCache(model, store, mode=mode, spans=None if spans is None else [spans])  # noqa: E731
    exact = mode == "exact" and stored == BIT_EQUAL
    return Way(model, make, exact, lambda cache, _: float(cache.report().flops_saved), settle=store.flush, close=store.close)


def aligned(bench: Bench, location: str, stored: str, prompt: torch.Tensor) -> Way:
    """From a `WarmStartLibrary` that holds one prompt."""
    model, options = bench.model, {"quantization": STORED[stored], "timeout": TIMEOUT}
    library = kv.WarmStartLibrary(model, word_tokenizer(bench.shape.vocabulary), location=location, **options)
    library.add(prompt[0].tolist())
    saved = lambda cache, tokens: bench.saved(cache.report().computed_tokens, tokens)  # noqa: E731
    return Way(model, lambda: kv.WarmStartCache(model, library, strategy="align"), False, saved, close=library.close)


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
    """Prompts with the pages of the first one in another order, between something new."""
    edges, prompts = pages_of(first.shape[1]), []
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
        places = [(place + 1) * step + number * 3 for place in range(CHANGES)]
        ids[:, places] = (ids[:, places] + number) % (vocabulary - 1) + 1
        prompts.append(ids)
    return prompts


PROMPTS: dict[str, Callable[[torch.Tensor, int, int], list[torch.Tensor]]] = {
    "prefix": begun_alike,
    "moved": moved_pages,
    "aligned": changed_words,
}
Source = tuple[Sequence[torch.Tensor], Way]  # prompts of a cell, and a way to answer them


@dataclass(frozen=True)
class Side:
    """A row of the speed table: the cache's class, its arguments as a user types them, and what opens its source."""

    cache: str
    setting: str
    source: Callable[[Bench, torch.Tensor, int], Source]
    single: bool = False  # whether it is for one row alone

    def __str__(self) -> str:
        return f"{self.cache}({self.setting})"


def fresh(make: Callable[..., Any], *artifacts: str, **options: Any) -> Callable[..., Source]:
    """Prompts of which nothing is known. Artifacts are attributes of the bench, and calibrated before times are taken."""

    def source(bench: Bench, first: torch.Tensor, count: int) -> Source:
        values, model = [getattr(bench, name) for name in artifacts], bench.model
        return [first] * count, Way(model, lambda: make(model, *values, **options))

    return source


def stored_prefix(bench: Bench, first: torch.Tensor, count: int) -> Source:
    """Nine tenths of each prompt are in a store."""
    way, shared = segments(bench, "memory", BIT_EQUAL, "exact"), first.shape[1] * 9 // 10
    ask(way.model, way.cache, first[:, :shared])
    way.settle()
    return begun_alike(first, count, bench.shape.vocabulary), way


def similar(bench: Bench, first: torch.Tensor, count: int) -> Source:
    """A library has a prompt with ten other words."""
    return changed_words(first, count, bench.shape.vocabulary), aligned(bench, "memory", BIT_EQUAL, first)


def coded(bench: Bench, first: torch.Tensor, count: int) -> Source:
    """Another model has read the prompt, and its codes are at hand."""
    codes, model = bench.translator.encode(bench.producer(), first), bench.model
    make = lambda: kv.TranslatedCache(model, bench.translator, codes)  # noqa: E731
    return [first] * count, Way(model, make, False, lambda cache, tokens: cache.report().translated / tokens)


def pruned(policy: str, more: str = "", **options: Any) -> Side:
    """A quarter of the tokens."""
    return Side("EquipCache", f"policy={policy!r}, budget=0.25{more}", fresh(kv.EquipCache, policy=policy, budget=0.25, **options))


QUARTER = kv.AdaptiveSubspace(bytes_ratio=0.25)
SIDES = (
    Side("GrowingCache", "", fresh(kv.GrowingCache)),
    pruned("streaming"),
    Side("SubspaceCache", "codec", fresh(kv.SubspaceCache, "codec")),
    Side("SegmentReuseCache", "store", stored_prefix),
    Side("WarmStartCache", "library, strategy='align'", similar, single=True),
    Side("TranslatedCache", "translator, codes", coded),
    *(pruned(policy) for policy in ("future", "snapkv", "compactor")),
    Side("SubspaceCache", "adaptive=AdaptiveSubspace(bytes_ratio=0.25)", fresh(kv.SubspaceCache, adaptive=QUARTER)),
    pruned("keydiff", ", page_size=16", page_size=16),
)
