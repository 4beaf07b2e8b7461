"""The caches that every family is run with, each in a setting that must equal a `DynamicCache` (a pruned one where it prunes)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel

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
from tests.conformance.entries import ReadBefore
from tests.families.models import TOKEN_LIMIT, VOCABULARY
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
