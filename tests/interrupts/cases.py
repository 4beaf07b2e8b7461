"""Caches that take prompts over, each in every way that it does so, on one model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as remembered
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvcaches import KVCache, SegmentPolicy, SegmentReuseCache, SegmentStore, WarmStartCache, WarmStartLibrary
from hf_kvcaches.translate.cache import TranslatedCache
from tests import tiny
from tests.helpers.prompts import greedy
from tests.translate.pairs import fit
from tests.warmstart.warm import OPEN, library_of

EARLIER = tiny.ids(1, 130, seed=1)
# Begins like the earlier prompt, and has some of it elsewhere.
LIKE = torch.cat([EARLIER[:, :60], tiny.ids(1, 9, seed=2), EARLIER[:, 64:], tiny.ids(1, 7, seed=3)], 1)
# Shares enough of its beginning with the earlier prompt for a warm start from that alone.
BEGINNING = torch.cat([EARLIER[:, :110], tiny.ids(1, 9, seed=2)], 1)
MOVED = torch.cat([tiny.ids(1, 9, seed=4), EARLIER[:, 20:120], tiny.ids(1, 7, seed=3)], 1)

Make = Callable[[], KVCache]


@remembered
def model() -> PreTrainedModel:
    """One for all tests: none of them may change it."""
    return tiny.llama()


def segments(prompt: torch.Tensor, mode: Any, policy: dict[str, Any] | None = None, **options: Any) -> tuple[torch.Tensor, Make]:
    """A store that has seen the earlier prompt; each cache gets one of its own."""

    def make() -> SegmentReuseCache:
        store = SegmentStore("memory", **{"quantization": None, **options})
        answer(EARLIER, SegmentReuseCache(model(), store, mode="exact"))
        return SegmentReuseCache(model(), store, mode=mode, policy=None if policy is None else SegmentPolicy(**policy))

    return prompt, make


def warm(prompt: torch.Tensor, library: WarmStartLibrary, **options: Any) -> tuple[torch.Tensor, Make]:
    """Caches of one library."""
    return prompt, lambda: WarmStartCache(model(), library, gate=OPEN, **options)


def translated(**options: Any) -> tuple[torch.Tensor, Make]:
    """Codes of the prompt from another model."""
    producer = tiny.llama(seed=1)
    translator = fit(producer, model(), **{"payload": 0.5, "layers_per_code": 1, **options})
    codes = translator.encode(producer, EARLIER)
    return EARLIER, lambda: TranslatedCache(model(), translator, codes)


CASES: dict[str, Callable[[], tuple[torch.Tensor, Make]]] = {
    "segments, prefix": lambda: segments(LIKE, "exact"),
    "segments, between": lambda: segments(MOVED, "approximate"),
    "segments, repaired in lower layers": lambda: segments(MOVED, "approximate", {"repair_depth": 0.5}),
    "warm start, align": lambda: warm(LIKE, library_of(model(), EARLIER), strategy="align"),
    "warm start, prefix": lambda: warm(BEGINNING, library_of(model(), EARLIER), strategy="exact"),
    "translated": lambda: translated(),
    "translated, one layer run": lambda: translated(recompute_layers=1),
}


def answer(ids: torch.Tensor, cache: Any, new: int = 3) -> torch.Tensor:
    """The logits of the first tokens that `generate` gives, (1, new, vocabulary)."""
    return torch.stack(greedy(model(), ids, cache, new).logits, 1)
