"""The caches that every family is run with, in settings that must equal a `DynamicCache`, pruned where they prune, and what is asked."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_kvcaches import (
    AdaptiveSubspace,
    EquipCache,
    GrowingCache,
    KVCodec,
    SegmentReuseCache,
    SegmentStore,
    SubspaceCache,
    WarmStartCache,
    WarmStartLibrary,
)
from hf_kvcaches.errors import UnsupportedError
from tests.conformance.entries import ReadBefore
from tests.families.models import TOKEN_LIMIT, VOCABULARY
from tests.helpers.prompts import greedy, left_padded
from tests.translate.pairs import fit
from tests.warmstart.warm import words

BUDGET, SINKS = 16, 4


class Bench:
    """What the caches of one model share: a codec, a store, a library, a translator."""

    def __init__(self, model: PreTrainedModel, **settings: Any) -> None:
        self.model, self.settings = model, settings

    def make(self, **options: Any) -> Any:
        """An empty cache."""
        raise NotImplementedError

    def prepare(self, prompts: Iterable[torch.Tensor]) -> None:
        """What must have been there before a prompt comes, once for each of its rows."""

    def settle(self) -> None:
        """Waits for what is stored in the background."""

    def stored(self) -> int:
        """How many things are stored for later requests."""
        return 0


class Growing(Bench):
    def make(self, **options: Any) -> GrowingCache:
        return GrowingCache(self.model)


class Equip(Bench):
    """A budget that nothing outgrows, unless a scenario asks for less. Of a window alone, compact positions differ by a number."""

    def make(self, **options: Any) -> EquipCache:
        return EquipCache(self.model, **{"policy": "streaming", "budget": 128, "sinks": 0, **self.settings, **options})


def _texts(number: int, length: int) -> list[list[int]]:
    return [torch.randint(3, TOKEN_LIMIT, (length,), generator=torch.Generator().manual_seed(90 + seed)).tolist() for seed in range(number)]


class Subspace(Bench):
    @cached_property
    def codec(self) -> KVCodec:
        return KVCodec.calibrate(self.model, None, _texts(2, 48), bytes_ratio=1.5, progress=False, **self.settings)

    def make(self, **options: Any) -> SubspaceCache:
        return SubspaceCache(self.model, self.codec, sinks=1, recent=3)


class Adaptive(Bench):
    def make(self, **options: Any) -> SubspaceCache:
        return SubspaceCache(self.model, adaptive=AdaptiveSubspace(energy=1.0, warmup=16, chunk=16), sinks=1, recent=3)


class Segments(Bench):
    @cached_property
    def store(self) -> SegmentStore:
        return SegmentStore("memory", max_bytes="64MiB", quantization=None)

    def make(self, **options: Any) -> SegmentReuseCache:
        return SegmentReuseCache(self.model, self.store, **self.settings, **options)

    def settle(self) -> None:
        self.store.flush()

    def stored(self) -> int:
        return self.store.report().segments


class WarmStart(Bench):
    @cached_property
    def library(self) -> WarmStartLibrary:
        return WarmStartLibrary(self.model, words(VOCABULARY), quantization=None)

    def make(self, **options: Any) -> WarmStartCache:
        return WarmStartCache(self.model, self.library, strategy="exact")

    def prepare(self, prompts: Iterable[torch.Tensor]) -> None:
        self.library.add([prompt[0] for prompt in prompts])

    def stored(self) -> int:
        return len(self.library) if "library" in vars(self) else 0


class Translated(Bench):
    @cached_property
    def translator(self) -> Any:
        lossless: dict[str, Any] = {"payload": 2.0, "metric": "plain", "ridge": 1e-8, "layers_per_code": 1}
        return fit(self.model, self.model, _texts(6, 64), **lossless)

    def make(self, **options: Any) -> ReadBefore:
        return ReadBefore(self.model, self.translator)


@dataclass(frozen=True)
class Kind:
    """A column of the table, and the scenarios that it is run through."""

    name: str
    bench: Callable[[PreTrainedModel], Bench]
    scenarios: tuple[str, ...]


_ALL = ("single", "padded", "second", "chunks", "chat", "beams", "lookup", "loop")
_FEW = ("single", "padded", "chat", "loop")
KINDS = (
    Kind("growing", Growing, _ALL),
    Kind("equip", Equip, (*_ALL, "pruned")),
    Kind("equip_original", partial(Equip, sinks=SINKS, positions="original"), (*_FEW, "pruned")),
    Kind("equip_scored", partial(Equip, policy="h2o"), ("single", "padded")),  # looks at attention weights
    Kind("subspace", partial(Subspace, rotation="aware"), _ALL),
    Kind("subspace_post", partial(Subspace, rotation="post"), _FEW),
    Kind("subspace_adaptive", Adaptive, _FEW),
    Kind("segments", partial(Segments, mode="exact"), _ALL),
    Kind("segments_moved", partial(Segments, mode="approximate", repair=0.0), ("moved",)),  # from anywhere, as they are
    Kind("warmstart", WarmStart, _ALL),
    Kind("translated", Translated, _ALL),
)


Logits = list[torch.Tensor]


def tokens(length: int, seed: int) -> torch.Tensor:
    """Text, (1, length)."""
    return torch.randint(3, TOKEN_LIMIT, (1, length), generator=torch.Generator().manual_seed(seed))


PROMPT, SHORT = tokens(24, 1), tokens(15, 2)
CONTINUED = torch.cat([PROMPT[:, :18], tokens(7, 3)], 1)
REPEATING = torch.cat([PROMPT[:, :10], PROMPT[:, :10], PROMPT[:, :4]], 1)
SEGMENT, BEFORE, AFTER = tokens(20, 4), 5, 11
FIRST = torch.cat([tokens(BEFORE, 5), SEGMENT, tokens(4, 6)], 1)
SECOND = torch.cat([tokens(AFTER, 7), SEGMENT, tokens(8, 8)], 1)


class Oracle(Bench):
    """Transformers' own."""

    def make(self, **options: Any) -> DynamicCache:
        return DynamicCache(config=self.model.config)


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether a model's forward has an argument."""
    return name in inspect.signature(model.forward).parameters


def single(bench: Bench) -> Logits:
    """One prompt."""
    cache = bench.make()
    bench.prepare([PROMPT])
    return list(greedy(bench.model, PROMPT, cache).logits)


def padded(bench: Bench) -> Logits:
    """Two prompts of different lengths."""
    cache = bench.make()
    bench.prepare([PROMPT, SHORT])
    ids, mask = left_padded([PROMPT, SHORT])
    return list(greedy(bench.model, ids, cache, mask=mask).logits)


def second(bench: Bench) -> Logits:
    """A prompt that begins like one that was there."""
    first = greedy(bench.model, PROMPT, bench.make(), new=2).logits
    bench.settle()
    again = greedy(bench.model, PROMPT, bench.make(), new=2).logits
    bench.settle()
    return [*first, *again, *greedy(bench.model, CONTINUED, bench.make(), new=3).logits]


def chunks(bench: Bench) -> Logits:
    """A prompt in pieces."""
    return list(greedy(bench.model, PROMPT, bench.make(), prefill_chunk_size=9).logits)


def chat(bench: Bench) -> Logits:
    """A second turn with the same cache."""
    cache = bench.make()
    bench.prepare([PROMPT])
    first = greedy(bench.model, PROMPT, cache, new=3)
    turn = torch.cat([PROMPT, torch.stack(first.logits, 1).argmax(-1)[:1], tokens(5, 9)], 1)
    return [*first.logits, *greedy(bench.model, turn, cache, new=3).logits]


def beams(bench: Bench) -> Logits:
    """Two beams."""
    return list(greedy(bench.model, PROMPT, bench.make(), num_beams=2, new=3).logits)


def lookup(bench: Bench) -> Logits:
    """Guesses from the prompt, which are taken back."""
    return list(greedy(bench.model, REPEATING, bench.make(), prompt_lookup_num_tokens=2, new=5).logits)


@torch.no_grad()
def loop(bench: Bench) -> Logits:
    """A loop of the user's own: padding on the left, logits of the last token, and no positions."""
    model, cache = bench.model, bench.make()
    bench.prepare([PROMPT, SHORT])
    ids, mask = left_padded([PROMPT, SHORT])
    text, found = ids, []
    extra = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
    for step in range(4):
        output = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra)
        found.append(output.logits[:, -1])
        ids = torch.cat([tokens(1, 20 + step), tokens(1, 30 + step)])
        text, mask = torch.cat([text, ids], 1), torch.cat([mask, torch.ones_like(ids)], 1)
    if isinstance(bench, Oracle):
        whole = model(input_ids=text[:, :-1], attention_mask=mask[:, :-1], use_cache=False).logits[:, -1]
        if float((whole - found[-1]).abs().max() / whole.std()) > 1e-3:
            raise UnsupportedError("without positions, the model itself answers otherwise with a cache than without")
    return found


def moved(bench: Bench) -> Logits:
    """A segment that stood elsewhere in an earlier prompt, taken as it is."""
    if isinstance(bench, Oracle):
        return _moved_by_hand(bench)
    stop = BEFORE + SEGMENT.shape[1]
    greedy(bench.model, FIRST, bench.make(spans=[[(BEFORE, stop)]]), new=1)
    bench.settle()
    cache = bench.make(spans=[[(AFTER, AFTER + stop - BEFORE)]])
    found = list(greedy(bench.model, SECOND, cache, new=3).logits)
    reused = cache.report().reused_tokens
    if not reused:
        plain = greedy(bench.model, SECOND, Oracle(bench.model).make(), new=3).logits
        assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(found, plain, strict=True)), "nothing was reused, and yet it differs"
        raise UnsupportedError("No error is raised, but nothing is reused.")
    assert reused == SEGMENT.shape[1], f"reused {reused} tokens"
    return found


@torch.no_grad()
def _moved_by_hand(bench: Bench) -> Logits:
    """The model itself computes the earlier prompt where its segment stands in the later one, which is the same with relative positions."""
    model = bench.model
    plain, source = model(input_ids=FIRST, past_key_values=DynamicCache(), use_cache=True).logits, DynamicCache()
    places = torch.arange(FIRST.shape[1])[None] + AFTER - BEFORE
    shifted = model(input_ids=FIRST, position_ids=places, past_key_values=source, use_cache=True).logits
    if float((plain - shifted).abs().max() / plain.std()) > 1e-3:
        raise UnsupportedError("positions are not relative")
    cache, slots = DynamicCache(), slice(BEFORE, BEFORE + SEGMENT.shape[1])
    model(input_ids=SECOND[:, :AFTER], past_key_values=cache, use_cache=True)
    for layer, other in zip(cache.layers, source.layers, strict=True):
        layer.keys = torch.cat([layer.keys, other.keys[:, :, slots]], -2)
        layer.values = torch.cat([layer.values, other.values[:, :, slots]], -2)
    return list(greedy(model, SECOND, cache, new=3).logits)


def _windows(model: PreTrainedModel) -> list[int]:
    """Of the layers that have one."""
    return [layer.sliding_window for layer in DynamicCache(config=model.config).layers if isinstance(layer, DynamicSlidingWindowLayer)]


@torch.no_grad()
def pruned(bench: Bench, sinks: int | None = None) -> Logits:
    """More tokens than the budget; what is dropped is hidden by the mask from a `DynamicCache` that keeps it."""
    model, cache = bench.model, bench.make(budget=BUDGET)
    if sinks == 0 and "chunked_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        raise UnsupportedError("chunks are counted from the first token that the mask shows")
    if sinks is not None and any(window > BUDGET - sinks for window in _windows(model)):
        raise UnsupportedError("a window shows more than the budget holds, and the mask hides it from all layers alike")
    ids, mask = PROMPT, torch.ones_like(PROMPT)
    found, keeps_all = [], isinstance(bench, Oracle)
    for step in range(6):
        seen = mask.shape[1]
        shown = mask.clone()
        if keeps_all and step:
            shown[:, sinks : seen - (BUDGET - sinks)] = 0
        extra = {"position_ids": torch.arange(seen - ids.shape[1], seen)[None]} if takes(model, "position_ids") else {}
        output = model(input_ids=ids, attention_mask=shown, past_key_values=cache, use_cache=True, **extra)
        found.append(output.logits[:, -1])
        ids = tokens(1, 40 + step)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return found


SCENARIOS: dict[str, Callable[..., Logits]] = {
    function.__name__: function for function in (single, padded, second, chunks, chat, beams, lookup, loop, moved, pruned)
}
