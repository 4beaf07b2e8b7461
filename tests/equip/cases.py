"""Texts and policies that the tests of `EquipCache` share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvcaches.core.holder import LastQueries
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.equip.layer import EquipLayer
from hf_kvcaches.equip.policies import KeyDiffPolicy, SnapKVPolicy
from tests import tiny
from tests.conformance import models
from tests.conformance.driving import feed
from tests.reference.oracles import ReferenceCache
from tests.reference.policies import (
    H2OReference,
    KeyDiffReference,
    SnapKVReference,
    StreamingReference,
    TOVAReference,
)

BUDGET, SINKS = 16, 4

# For each policy: how EquipCache is told, the reference, and how that is told what EquipCache does otherwise than the paper.
POLICIES: dict[str, tuple[Any, type[ReferenceCache], dict[str, Any]]] = {
    "streaming": ("streaming", StreamingReference, {}),
    "h2o": ("h2o", H2OReference, {}),
    "tova": ("tova", TOVAReference, {}),
    "snapkv": (SnapKVPolicy(window=6, kernel_size=3), SnapKVReference, {"window": 6, "kernel_size": 3}),
    "keydiff": (KeyDiffPolicy(interval=5), KeyDiffReference, {"interval": 5}),
}
POSITIONS = ("compact", "original")
both_positions = pytest.mark.parametrize("positions", POSITIONS)

_ORDER = 1 + torch.randperm(models.VOCABULARY - 1, generator=torch.Generator().manual_seed(3))


def text(length: int, offset: int = 0) -> torch.Tensor:
    """Token ids, (1, length), none of them twice: equal tokens have keys of equal norm, and rounding would choose between them."""
    return _ORDER.roll(-offset)[:length][None].to(models.DEVICE)


def steps(prompt: int, total: int) -> list[int]:
    """A prompt, and one token at a time after it."""
    return [prompt] + [1] * (total - prompt)


def build(model: Any, policy: str, budget: Any = BUDGET, **options: Any) -> EquipCache:
    """An `EquipCache` with the policy of that name in `POLICIES`."""
    return EquipCache(model, POLICIES[policy][0], budget, **{"sinks": SINKS, "head_budgets": None, **options})


def build_reference(model: PreTrainedModel, policy: str, budget: int = BUDGET, **options: Any) -> ReferenceCache:
    """The reference of that policy."""
    _, reference, settings = POLICIES[policy]
    return reference(model, **{"budget": budget, "sinks": SINKS, **settings, **options})


def held(cache: EquipCache | ReferenceCache) -> list[torch.Tensor]:
    """What each layer keeps, in order of position, empty slots first."""
    return [cache.kept_positions(layer).sort(-1).values for layer in range(len(cache.layers))]


def feed_all(model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of new tokens that come in one call."""
    return feed(model, cache, ids, [ids.shape[1]], mask, keep=0)


def padded(rows: int, tokens: int, *padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids with padding at the start of rows, and the mask."""
    ids, mask = tiny.ids(rows, tokens, seed=3), torch.ones(rows, tokens, dtype=torch.long)
    for row, count in enumerate(padding):
        ids[row, :count], mask[row, :count] = 0, 0
    return ids, mask


def positions_of(cache: EquipCache, layer: int = 0, row: int = 0, head: int = 0) -> list[int]:
    """Of the tokens that one head of a row keeps."""
    return sorted(position for position in cache.kept_positions(layer)[row, head].tolist() if position >= 0)


def stay(scores: list[list[float]], positions: list[list[int]], budget: int, sinks: int, recent: int) -> list[list[int]]:
    """For each head the indices of the tokens that stay, in plain loops; an empty slot has the position -1."""
    ranked, guarded = [], []
    newest = max(map(max, positions)) - recent
    for head, (worths, places) in enumerate(zip(scores, positions, strict=True)):
        tokens = [
            (place < sinks or place > newest, worth, place, head, index)
            for index, (worth, place) in enumerate(zip(worths, places, strict=True))
            if place >= 0
        ]
        tokens.sort(reverse=True)
        first = sum(token[0] for token in tokens)
        floor = first + math.ceil((budget - first) / 20)
        guarded += tokens[:floor]
        ranked += tokens[floor:]
    ranked.sort(reverse=True)
    chosen = guarded + ranked[: max(0, budget * len(scores) - len(guarded))]
    return [sorted(index for *_, of, index in chosen if of == head) for head in range(len(scores))]


def state(cache: EquipCache) -> dict[str, Any]:
    """All that a sequence owns: tensors, without the clock that there is while steps may be compiled, and counters."""
    tensors = {name: tensor.clone() for name, tensor in cache.owned_tensors().items() if not name.endswith(".clock")}
    return tensors | {f"{index}": layer.export_state()[1] for index, layer in enumerate(cache.layers) if isinstance(layer, KVLayer)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states are, bit for bit."""
    equal = lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b  # noqa: E731
    return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())


def with_queries(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, monkeypatch: Any, **settings: Any) -> tuple[Any, list[Any]]:
    """A prefilled `EquipCache`, and the queries of each layer."""
    queries: dict[int, LastQueries] = {}
    cache = EquipCache(model, **settings)
    attend = EquipLayer.attend

    def recording(self: Any, query: Any, keys: Any, values: Any, call: Any) -> Any:
        queries[cache.layers.index(self)] = LastQueries(query.clone(), call.scaling, call.softcap, call.sink_logits)
        return attend(self, query, keys, values, call)

    with monkeypatch.context() as patch:
        patch.setattr(EquipLayer, "attend", recording)
        feed(model, cache, ids, [ids.shape[1]], mask)
    return cache, [queries.get(index) for index in range(len(cache.layers))]
