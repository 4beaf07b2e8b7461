"""Layers that wait in CPU memory: what moves them away, and when. Another device is played by tensors that can't be computed with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hf_kvcaches import AdaptiveSubspace, EquipCache, GrowingCache, KVCache, SubspaceCache
from hf_kvcaches.core.layers import KVLayer
from tests import tiny

MAKERS: dict[str, Any] = {
    "growing": GrowingCache,
    "equip": lambda model: EquipCache(model, "streaming", budget=12, recent=2),
    "equip, scores": lambda model: EquipCache(model, "h2o", budget=12, recent=2),
    "equip, int8": lambda model: EquipCache(model, "streaming", budget=12, recent=2, storage="int8"),
    "equip, original": lambda model: EquipCache(model, "keydiff", budget=12, recent=2, positions="original"),
    "subspace": lambda model: SubspaceCache(model, adaptive=AdaptiveSubspace(rank=4, warmup=16), sinks=1, recent=2),
}


class Stream(nullcontext[None]):
    """A stream that waits for nobody."""

    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> dict[KVLayer, list[torch.Tensor]]:
    """The tensors of the layers that have been moved away, which hold NaN meanwhile."""
    there: dict[KVLayer, list[torch.Tensor]] = {}

    def move(layer: KVLayer, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "to", lambda tensor, *_, **__: replace(tensor))
            layer._move("cpu")

    def offload(layer: KVLayer) -> None:
        if layer not in there:
            there[layer] = []
            move(layer, lambda tensor: _unusable(tensor, there[layer]))

    def prefetch(layer: KVLayer) -> None:
        tensors = iter(there.pop(layer, []))
        move(layer, lambda tensor: next(tensors, tensor))

    monkeypatch.setattr(KVLayer, "offload", offload)
    monkeypatch.setattr(KVLayer, "prefetch", prefetch)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: Stream())
    return there


def _unusable(tensor: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    kept.append(tensor)
    return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0)


def offloading(cache: KVCache) -> KVCache:
    cache.offloading, cache.only_non_sliding, cache.prefetch_stream = True, True, Stream()
    return cache


@torch.no_grad()
@pytest.mark.parametrize("build", [tiny.llama, tiny.gemma2], ids=["llama", "hybrid"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_layer_is_moved_away_when_its_queries_are_answered(make: Any, build: Any, away: dict[KVLayer, Any]) -> None:
    model = build(num_hidden_layers=4)
    plain, moved, text = make(model), offloading(make(model)), tiny.ids(1, 40)
    own = [layer for layer in moved.layers if isinstance(layer, KVLayer)]
    for start, stop in ((0, 24), *((step, step + 1) for step in range(24, 32)), (32, 40)):
        expected, found = (model(input_ids=text[:, start:stop], past_key_values=cache).logits for cache in (plain, moved))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert own[-1] in away
        assert 1 <= len(own) - len(away) <= 1, "all layers but the one that is next wait elsewhere"
