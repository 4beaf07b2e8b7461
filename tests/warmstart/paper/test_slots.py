"""From keys and values to slots, against a slow loop, and moving slots to the end of a prompt of another length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.reuse.layout import LayerStates
from hf_kvcaches.warmstart.entries import prompt_states
from hf_kvcaches.warmstart.paper.slots import summary
from tests.testbed import held_out, load


def made_up(kv_heads: int, tokens: int, dim: int, seed: int = 0) -> LayerStates:
    """Keys and values of no model."""
    generator = torch.Generator().manual_seed(seed)
    return LayerStates(*(torch.randn(kv_heads, tokens, dim, generator=generator) for _ in range(2)))


def attend(layer: LayerStates, query: torch.Tensor) -> torch.Tensor:
    """The output of attention of a scaled query of each key head over slots alone, (kv_heads, head_dim)."""
    weights = (query.double()[:, None] @ layer.keys.double().mT).softmax(-1)
    return (weights @ layer.values.double())[:, 0]


@given(kv_heads=st.integers(1, 3), tokens=st.integers(2, 40), slots=st.integers(1, 24), seed=st.integers(0, 999))
def test_slots_are_those_of_a_slow_loop(kv_heads: int, tokens: int, slots: int, seed: int) -> None:
    states = made_up(kv_heads, tokens, 8, seed)
    found = summary([states], tokens + 1, slots)
    if tokens <= slots:
        assert torch.equal(found.layers[0].keys, states.keys)
        assert torch.equal(found.layers[0].values, states.values)
        assert found.positions.tolist() == list(range(tokens))
        return
    assert found.layers[0].keys.shape[1] == slots
    for slot in range(slots):
        heights = [max(0.0, 1 - abs(token / tokens - (slot + 0.5) / slots) * slots) for token in range(1, tokens + 1)]
        weights = [height / sum(heights) for height in heights]
        assert float(found.positions[slot]) == pytest.approx(sum(w * t for t, w in enumerate(weights)), abs=1e-3)
        for mean, part in zip(found.layers[0], states, strict=True):
            expected = sum(w * part[:, t].double() for t, w in enumerate(weights))
            torch.testing.assert_close(mean[:, slot].double(), expected, atol=1e-5, rtol=1e-4)


@given(tokens=st.integers(2, 80), slots=st.integers(1, 40))
def test_slots_are_finite_in_order_and_inside_the_prompt(tokens: int, slots: int) -> None:
    found = summary([made_up(2, tokens, 8)], tokens + 1, slots)
    assert all(bool(part.isfinite().all()) for part in found.layers[0])
    assert bool((found.positions.diff() >= 0).all())
    assert 0 <= float(found.positions[0]) <= float(found.positions[-1]) <= tokens - 1


def test_the_error_of_attention_falls_with_the_number_of_slots() -> None:
    model, tokenizer = load()
    layers = prompt_states(model, tokenizer(held_out()[:4000])["input_ids"][:300])
    queries = [layer.keys[:, -1] * layer.keys.shape[-1] ** -0.5 for layer in layers]

    def outputs(slots: int) -> list[torch.Tensor]:
        return [attend(layer, query) for layer, query in zip(summary(layers, 301, slots).layers, queries, strict=True)]

    true, errors = outputs(300), []
    for slots in (8, 32, 128):
        errors.append(sum(float((own - wanted).norm() / wanted.norm()) for own, wanted in zip(outputs(slots), true, strict=True)))
    assert errors == sorted(errors, reverse=True), errors


@given(delta=st.integers(-40, 5000), seed=st.integers(0, 99), pairs=st.sampled_from(["half", "interleaved"]))
def test_attention_over_shifted_slots_is_attention_at_the_source(delta: int, seed: int, pairs: str) -> None:
    geometry = RotaryGeometry(1e4 ** -(torch.arange(6, dtype=torch.float64) / 6), 16, layout=pairs)
    states = made_up(2, 41, 16, seed)
    slots, query = summary([LayerStates(states.keys[:, :-1], states.values[:, :-1])], 41, 8), states.keys[:, -1] / 4
    moved = slots.shifted(delta, [geometry])
    after = attend(moved.layers[0], geometry.shift(query[None, :, None], delta)[0, :, 0])
    torch.testing.assert_close(after, attend(slots.layers[0], query), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved.length - moved.positions, slots.length - slots.positions, atol=1e-3, rtol=0)
    assert moved.length == 41 + delta
