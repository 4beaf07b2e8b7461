"""A small cache of every kind, for what holds for all of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from hf_kvcaches import (
    AdaptiveSubspace,
    EquipCache,
    GrowingCache,
    SegmentReuseCache,
    SegmentStore,
    SubspaceCache,
    WarmStartCache,
    WarmStartLibrary,
)
from tests.warmstart.warm import words

Make = Callable[[PreTrainedModel], Any]


def segments(model: PreTrainedModel, decode_with: Make | None = None, mode: str = "exact") -> SegmentReuseCache:
    """A cache with a store of its own."""
    return SegmentReuseCache(model, SegmentStore("memory"), mode=mode, decode_with=None if decode_with is None else decode_with(model))


_streaming = partial(EquipCache, policy="streaming", budget=8, recent=2)
SMALL: dict[str, Make] = {
    "growing": GrowingCache,
    "equip": _streaming,
    "equip, scores": partial(EquipCache, policy="h2o", budget=8, recent=2),
    "equip, int8": partial(_streaming, storage="int8"),
    "equip, pages": partial(_streaming, page_size=4),
    "equip, original": partial(EquipCache, policy="keydiff", budget=8, recent=2, positions="original"),
    "subspace": partial(SubspaceCache, adaptive=AdaptiveSubspace(rank=4, warmup=16), sinks=1, recent=2),
    "segments": segments,
    "segments, equip": partial(segments, decode_with=_streaming),
    "warm start": lambda model: WarmStartCache(model, WarmStartLibrary(model, words())),
}


def small(*names: str) -> dict[str, Make]:
    """Some of them, to be parametrized over."""
    return {name: SMALL[name] for name in names}
