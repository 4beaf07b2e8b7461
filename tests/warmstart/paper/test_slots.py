"""From keys and values to slots, against a slow loop, and moving slots to the end of a prompt of another length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.warmstart.paper.slots import LayerSlots, attended_by, summary
from tests.testbed import held_out, load
from tests.warmstart.paper.prompts import attend, made_up

LAYOUTS = ("salient", "paper")


def slow_salient(keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, slots: int) -> list[list[tuple]]:
    """For each key head its slots (position, key, value, count), one after the other, in float64."""
    kv_heads, tokens, _ = keys.shape
    group = query.shape[0] // kv_heads
    made = []
    for head in range(kv_heads):
        attention = [0.0] * tokens
        for own in range(head * group, (head + 1) * group):
            logits = [float(query[own].double() @ keys[head, token].double()) for token in range(tokens)]
            total = sum(math.exp(logit) for logit in logits)
            attention = [before + math.exp(logit) / total for before, logit in zip(attention, logits, strict=True)]
        pooled, window = max(1, slots // 8), slots // 4
        places = slots - pooled - window
        sinks = list(range(min(2, places // 4)))
        last = list(range(tokens - window, tokens))
        others = sorted((token for token in range(tokens) if token not in sinks + last), key=lambda token: -attention[token])
        alone = sinks + last + others[: places - len(sinks)]
        rest = [token for token in range(tokens) if token not in alone]
        mine = [(float(token), keys[head, token].double(), values[head, token].double(), 1.0) for token in alone]
        for run in range(pooled):
            members = [token for index, token in enumerate(rest) if index * pooled // len(rest) == run]
            total = sum(attention[token] ** 0.5 for token in members)
            weights = [attention[token] ** 0.5 / total for token in members]
            count = math.exp(-sum(weight * math.log(weight) for weight in weights))
            mean = [sum(w * part[head, t].double() for w, t in zip(weights, members, strict=True)) for part in (keys, values)]
            mine.append((sum(w * t for w, t in zip(weights, members, strict=True)), *mean, count))
        made.append(sorted(mine, key=lambda slot: slot[0]))
    return made


def slow_paper(keys: torch.Tensor, values: torch.Tensor, slots: int) -> list[list[tuple]]:
    kv_heads, tokens, _ = keys.shape
    made = []
    for head in range(kv_heads):
        mine = []
        for slot in range(1, slots + 1):
            heights = [max(0.0, 1 - abs(token / tokens - (slot - 0.5) / slots) * slots) for token in range(1, tokens + 1)]
            weights = [height / sum(heights) for height in heights]
            mean = [sum(w * part[head, t].double() for t, w in enumerate(weights)) for part in (keys, values)]
            mine.append((sum(w * t for t, w in enumerate(weights)), *mean, 1.0))
        made.append(mine)
    return made


def assert_same(slots: LayerSlots, slow: list[list[tuple]]) -> None:
    for head, mine in enumerate(slow):
        assert slots.keys.shape[1] == len(mine)
        for place, (position, key, value, count) in enumerate(mine):
            assert float(slots.positions[head, place]) == pytest.approx(position, abs=1e-3)
            assert float(slots.counts[head, place]) == pytest.approx(count, rel=1e-4)
            torch.testing.assert_close(slots.keys[head, place].double(), key, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(slots.values[head, place].double(), value, atol=1e-5, rtol=1e-4)


@given(kv_heads=st.integers(1, 3), group=st.integers(1, 3), tokens=st.integers(2, 40), slots=st.integers(1, 24), seed=st.integers(0, 999))
def test_slots_are_those_of_a_slow_loop(kv_heads: int, group: int, tokens: int, slots: int, seed: int) -> None:
    prompt = made_up(kv_heads, group, tokens + 1, 8, seed=seed)
    keys, values, query, length = prompt.before(1)
    for layout in LAYOUTS:
        made = summary(keys, values, query, length, slots, layout).layers[0]
        if tokens <= slots:
            assert_same(
                made,
                [
                    [(float(t), k.double(), v.double(), 1.0) for t, (k, v) in enumerate(zip(*kv, strict=True))]
                    for kv in zip(keys[0], values[0], strict=True)
                ],
            )
        elif layout == "salient":
            assert_same(made, slow_salient(keys[0], values[0], query[0], slots))
        else:
            assert_same(made, slow_paper(keys[0], values[0], slots))


@given(tokens=st.integers(9, 80), slots=st.integers(1, 40), tail=st.integers(1, 4), size=st.sampled_from([0.0, 1.0, 300.0]))
def test_slots_are_finite_in_order_and_before_the_tail(tokens: int, slots: int, tail: int, size: float) -> None:
    prompt = made_up(2, 2, tokens, 8, seed=tokens)
    keys, values, query, length = prompt.before(tail)
    for layout in LAYOUTS:
        made = summary(keys, values, [own * size for own in query], length, slots, layout)
        layer = made.layers[0]
        assert all(bool(part.isfinite().all()) for part in layer)
        assert layer.keys.shape[1] == min(slots, tokens - tail)
        assert bool((layer.positions.diff(dim=-1) >= 0).all())
        assert bool((made.length - layer.positions > tail - 1e-3).all())
        assert bool((layer.positions >= 0).all())
        assert bool((layer.counts > 1 - 1e-4).all())
        if layout == "salient":
            assert bool((layer.counts.sum(-1) < tokens - tail + 1e-2).all())


def test_the_error_of_attention_falls_with_the_number_of_slots() -> None:
    model, tokenizer = load()
    read = attended_by(model, torch.tensor([tokenizer(held_out()[:4000])["input_ids"][:300]]))
    keys, values = ([states[0, :, :-1] for states in side] for side in zip(*((layer.keys, layer.values) for layer in read), strict=True))
    queries = [layer.query[0, :, -1] * layer.scaling for layer in read]

    def outputs(layout: str, slots: int) -> list[torch.Tensor]:
        return [
            attend(layer, query, 1.0)
            for layer, query in zip(summary(keys, values, queries, 300, slots, layout).layers, queries, strict=True)
        ]

    true, errors = outputs("salient", 299), {}
    for layout in LAYOUTS:
        found = [zip(outputs(layout, slots), true, strict=True) for slots in (8, 32, 128)]
        errors[layout] = [sum(float((own - wanted).norm() / wanted.norm()) for own, wanted in pairs) for pairs in found]
        assert errors[layout] == sorted(errors[layout], reverse=True), errors
    assert all(salient < paper / 2 for salient, paper in zip(errors["salient"], errors["paper"], strict=True)), errors


@given(
    delta=st.integers(-40, 5000), seed=st.integers(0, 99), layout=st.sampled_from(LAYOUTS), pairs=st.sampled_from(["half", "interleaved"])
)
def test_attention_over_shifted_slots_is_attention_at_the_source(delta: int, seed: int, layout: str, pairs: str) -> None:
    inv_freq = 1e4 ** -(torch.arange(6, dtype=torch.float64) / 6)
    geometry = RotaryGeometry(inv_freq, 16, layout=pairs)
    prompt = made_up(2, 2, 41, 16, seed=seed)
    slots = summary(*prompt.before(1), 8, layout)
    moved = slots.shifted(delta, [geometry])
    query = geometry.shift(prompt.query[0][None, :, None], delta)[0, :, 0]
    before, after = attend(slots.layers[0], prompt.query[0]), attend(moved.layers[0], query)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved.length - moved.layers[0].positions, slots.length - slots.layers[0].positions, atol=1e-3, rtol=0)
    assert moved.length == 41 + delta
