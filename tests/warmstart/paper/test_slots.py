"""Slots: what they hold, and moving them to the end of a prompt of another length."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.warmstart.paper.compressor import SlotCompressor
from hf_kvcaches.warmstart.paper.slots import LayerSlots, Slots
from tests import tiny
from tests.warmstart.paper.prompts import attend, geometries, made_up, read

LAYOUTS = ("salient", "paper")


def random_slots(*shapes: tuple[int, int, int], length: int = 50) -> Slots:
    layers = []
    for heads, slots, dim in shapes:
        positions = torch.rand(heads, slots).sort(-1).values * (length - 1)
        layers.append(LayerSlots(torch.randn(heads, slots, dim), torch.randn(heads, slots, dim), positions, torch.rand(heads, slots) + 1))
    return Slots(layers, length)


def same(one: Slots, other: Slots) -> bool:
    return one.length == other.length and all(
        torch.equal(a, b) for x, y in zip(one.layers, other.layers, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_slots_that_do_not_fit_together_are_refused() -> None:
    slots = random_slots((2, 4, 8))
    with pytest.raises(ConfigError, match="layer 0: expected keys and values"):
        Slots([slots.layers[0]._replace(counts=torch.ones(2, 3))], 50)
    with pytest.raises(ConfigError, match="length"):
        dataclasses.replace(slots, length=0)


@given(
    delta=st.integers(-40, 5000), seed=st.integers(0, 99), layout=st.sampled_from(LAYOUTS), pairs=st.sampled_from(["half", "interleaved"])
)
def test_attention_over_shifted_slots_is_attention_at_the_source(delta: int, seed: int, layout: str, pairs: str) -> None:
    inv_freq = 1e4 ** -(torch.arange(6, dtype=torch.float64) / 6)
    geometry = RotaryGeometry(inv_freq, 16, layout=pairs)
    prompt = made_up(2, 2, 41, 16, seed=seed)
    slots = SlotCompressor(8, layout).compress(*prompt.before(1))
    moved = slots.shifted(delta, [geometry])
    query = geometry.shift(prompt.query[0][None, :, None], delta)[0, :, 0]
    before, after = attend(slots.layers[0], prompt.query[0]), attend(moved.layers[0], query)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved.length - moved.layers[0].positions, slots.length - slots.layers[0].positions, atol=1e-3, rtol=0)
    assert moved.length == 41 + delta


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shifted_slots_are_the_slots_of_shifted_tokens(layout: str) -> None:
    model = tiny.llama()
    where, prompt = geometries(model), read(model, tiny.ids(60))
    compressor = SlotCompressor(12, layout)
    shifted = compressor.compress(*prompt.before(3)).shifted(17, where)
    keys, values, query, length = prompt.before(3)
    keys = [geometry.shift(own[None], 17)[0] for geometry, own in zip(where, keys, strict=True)]
    query = [geometry.shift(own[None, :, None], 17)[0, :, 0] for geometry, own in zip(where, query, strict=True)]
    fresh = compressor.compress(keys, values, query, length)
    for one, other in zip(shifted.layers, fresh.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(one.positions, other.positions + 17, atol=1e-3, rtol=0)


def test_slots_of_a_model_with_learned_positions_are_not_turned() -> None:
    slots = random_slots((4, 4, 8))
    geometry = RotaryGeometry.from_config(tiny.gpt2().config)
    assert same(slots.shifted(0, [geometry]), slots)
    with pytest.raises(UnsupportedError, match="learned"):
        slots.shifted(3, [geometry])


def test_a_shift_needs_a_geometry_for_each_layer() -> None:
    with pytest.raises(ConfigError, match="geometries"):
        random_slots((2, 4, 8)).shifted(1, [])
