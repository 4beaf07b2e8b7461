"""The caches that every family is run with, each in a setting that must equal a `DynamicCache` (a pruned one where it prunes)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

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

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

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

    sinks = 0
    options: ClassVar[dict[str, Any]] = {}

    def make(self, **options: Any) -> EquipCache:
        return EquipCache(self.model, **{"policy": "streaming", "budget": 128, "sinks": self.sinks, **self.options, **options})


class EquipOriginal(Equip):
    sinks = SINKS
    options: ClassVar[dict[str, Any]] = {"positions": "original"}


class EquipScored(Equip):
    """A policy that looks at attention weights."""

    options: ClassVar[dict[str, Any]] = {"policy": "h2o"}


def _texts(number: int, length: int) -> list[list[int]]:
    return [torch.randint(3, TOKEN_LIMIT, (length,), generator=torch.Generator().manual_seed(90 + seed)).tolist() for seed in range(number)]


class Subspace(Bench):
    rotation = "aware"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.codec: KVCodec | None = None

    def make(self, **options: Any) -> SubspaceCache:
        if self.codec is None:
            self.codec = KVCodec.calibrate(self.model, None, _texts(2, 48), rotation=self.rotation, bytes_ratio=1.5, progress=False)
        return SubspaceCache(self.model, self.codec, sinks=1, recent=3)


class SubspacePost(Subspace):
    rotation = "post"


class Adaptive(Bench):
    def make(self, **options: Any) -> SubspaceCache:
        return SubspaceCache(self.model, adaptive=AdaptiveSubspace(energy=1.0, warmup=16, chunk=16), sinks=1, recent=3)


class Segments(Bench):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.store = SegmentStore("memory", max_bytes="64MiB", quantization=None)

    def make(self, **options: Any) -> SegmentReuseCache:
        return SegmentReuseCache(self.model, self.store, mode="exact", **options)

    def settle(self) -> None:
        self.store.flush()

    def stored(self) -> int:
        return self.store.report().segments


class Moved(Segments):
    """Takes segments from anywhere as they are."""

    def make(self, **options: Any) -> SegmentReuseCache:
        return SegmentReuseCache(self.model, self.store, mode="approximate", repair=0.0, **options)


class WarmStart(Bench):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.library: WarmStartLibrary | None = None

    def make(self, **options: Any) -> WarmStartCache:
        return WarmStartCache(self.model, self._library(), strategy="exact")

    def _library(self) -> WarmStartLibrary:
        if self.library is None:
            self.library = WarmStartLibrary(self.model, words(VOCABULARY), quantization=None)
        return self.library

    def prepare(self, prompts: Iterable[torch.Tensor]) -> None:
        self._library().add([prompt[0] for prompt in prompts])

    def stored(self) -> int:
        return 0 if self.library is None else len(self.library)


class Translated(Bench):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.translator: Any = None

    def make(self, **options: Any) -> ReadBefore:
        if self.translator is None:
            lossless: dict[str, Any] = {"payload": 2.0, "metric": "plain", "ridge": 1e-8, "layers_per_code": 1}
            self.translator = fit(self.model, self.model, _texts(6, 64), **lossless)
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
    Kind("equip_original", EquipOriginal, (*_FEW, "pruned")),
    Kind("equip_scored", EquipScored, ("single", "padded")),
    Kind("subspace", Subspace, _ALL),
    Kind("subspace_post", SubspacePost, _FEW),
    Kind("subspace_adaptive", Adaptive, _FEW),
    Kind("segments", Segments, _ALL),
    Kind("segments_moved", Moved, ("moved",)),
    Kind("warmstart", WarmStart, _ALL),
    Kind("translated", Translated, _ALL),
)
