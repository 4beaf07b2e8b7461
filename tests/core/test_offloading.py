"""Layers that wait in CPU memory: what moves them away, and when. Another device is played by tensors that can't be computed with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hf_kvcaches import EquipCache, KVCache
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.errors import UnsupportedError
from tests import tiny
from tests.helpers.caches import small

MAKERS = small("growing", "equip", "equip, scores", "equip, int8", "equip, original", "subspace")


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


def _crop(cache: EquipCache, model: Any) -> None:
    cache.activate_past_recording()
    model(input_ids=tiny.ids(1, 3, seed=1), past_key_values=cache)
    cache.crop(-2)


BETWEEN: dict[str, Callable[[EquipCache, Any], None]] = {
    "crop": _crop,
    "evict": lambda cache, model: cache.evict([3, *range(20, 24)]),
    "edit": lambda cache, model: cache.edit(model, 20, 22, [7, 8, 9]),
    "compress": lambda cache, model: cache.compress(model, input_ids=tiny.ids(1, 24)),
}


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


@torch.no_grad()
@pytest.mark.parametrize("shared", [None, "layer"])
@pytest.mark.parametrize("change", BETWEEN)
def test_layers_are_there_for_what_is_asked_between_passes(change: str, shared: Any, away: dict[KVLayer, Any]) -> None:
    model, policy = tiny.llama(), "kvzip" if change == "compress" else "h2o"
    plain, moved = (EquipCache(model, policy, 12, recent=2, head_budgets=shared) for _ in range(2))
    offloading(moved)
    found = []
    for cache in (plain, moved):
        model(input_ids=tiny.ids(1, 24), past_key_values=cache)
        BETWEEN[change](cache, model)
        found.append(model(input_ids=tiny.ids(1, 8, seed=2), past_key_values=cache).logits)
    assert len(away) == 3
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


def test_layers_that_wait_elsewhere_share_no_slots_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "Stream", Stream)
    model = tiny.llama()
    assert EquipCache(model, offloading=True).settings()["head_budgets"] == "layer"
    with pytest.raises(UnsupportedError, match="head_budgets"):
        EquipCache(model, head_budgets="global", offloading=True)
