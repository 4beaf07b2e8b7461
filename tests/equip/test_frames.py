"""Rotations are exact, keys stand where the layer says, and how many tokens were seen does not matter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.equip.frames import rotated_to
from hf_kvcaches.equip.rotation import PairRotation, SlotRotation, rotation_between, swap_pairs
from tests.conformance import models
from tests.conformance.driving import feed
from tests.equip.cases import COMPACT, build, text

FAR = 4_000_000


@pytest.fixture(autouse=True)
def _no_grad() -> Iterable[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def geometry(layout: str, rotary: int, head_dim: int = 12) -> RotaryGeometry:
    exponents = torch.arange(0, rotary, 2).double() / rotary
    return RotaryGeometry((10_000.0**-exponents).float().double(), head_dim, layout=layout)


both_layouts = pytest.mark.parametrize("layout", ["half", "interleaved"])
whole_or_part = pytest.mark.parametrize("rotary", [12, 8, 2])


@both_layouts
@whole_or_part
def test_a_turn_is_a_shift_by_as_many_positions(layout: str, rotary: int) -> None:
    angles, rotations = geometry(layout, rotary), SlotRotation("frames", geometry(layout, rotary))
    keys = torch.randn(2, 3, 5, 12)
    for delta in (torch.tensor([7]), torch.randint(-90, 90, (5,)), torch.randint(-90, 90, (2, 3, 5)), torch.randint(-9, 9, (2, 1, 5))):
        by = delta if delta.ndim != 1 or delta.numel() > 1 else int(delta)
        torch.testing.assert_close(rotations.by(delta)(keys), angles.shift(keys, by), rtol=0, atol=2e-6)


@both_layouts
@whole_or_part
def test_a_table_of_turns_rotates_fresh_keys_to_their_places(layout: str, rotary: int) -> None:
    angles, rotations = geometry(layout, rotary), SlotRotation("on_read", geometry(layout, rotary))
    keys, places = torch.randn(2, 3, 5, 12), torch.tensor([0, 40, 3, 199, 2])
    rotations.table(8, keys.device)
    table = rotations.table(200, keys.device)
    turn = PairRotation(table.cos[places], table.sin[places], layout)
    torch.testing.assert_close(turn(keys), angles.rotate(keys, places), rtol=0, atol=2e-6)
    # Once a pair, as kernels take it.
    cos, sin = turn.halves()
    exact = angles.cos_sin(places)
    torch.testing.assert_close(cos, exact[0])
    torch.testing.assert_close(sin, exact[1])


@both_layouts
def test_a_rotated_key_is_its_cosines_and_the_swapped_key_its_sines(layout: str) -> None:
    rotations, keys = SlotRotation("rotated_keys", geometry(layout, 12)), torch.randn(1, 2, 4, 12)
    turn = rotations.by(torch.tensor([3, 9, -4, 0]))
    torch.testing.assert_close(keys * turn.cos + swap_pairs(keys, layout) * turn.sin, turn(keys), rtol=0, atol=2e-6)
    assert torch.equal(swap_pairs(swap_pairs(keys, layout), layout), keys)


@both_layouts
def test_queries_of_one_group_turn_as_their_key_head(layout: str) -> None:
    rotations, queries = SlotRotation("frames", geometry(layout, 8)), torch.randn(2, 6, 1, 12)
    delta = torch.randint(-50, 50, (2, 2, 1))
    expected = geometry(layout, 8).shift(queries, delta.repeat_interleave(3, 1))
    torch.testing.assert_close(rotations.by(delta)(queries), expected, rtol=0, atol=2e-6)


def stream(cache: EquipCache, start: int = 0) -> torch.Tensor:
    """Logits of a prompt's end and 60 tokens after it, at positions from `start` on."""
    model, ids = models.tiny("llama"), torch.cat([text(60), text(30, 17)], 1)
    logits = []
    for begin, end in [(0, 30), *((t, t + 1) for t in range(30, 90))]:
        positions = torch.arange(start + begin, start + end)[None]
        logits.append(model(input_ids=ids[:, begin:end], past_key_values=cache, logits_to_keep=1, position_ids=positions).logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
@pytest.mark.parametrize("rope", COMPACT)
def test_after_four_million_tokens_logits_are_those_of_the_start_of_a_stream(policy: str, rope: str) -> None:
    model = models.tiny("llama")
    near, far = (build(model, policy, rope=rope) for _ in range(2))
    expected, found = stream(near), stream(far, FAR)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_angles_are_exact_where_those_of_float32_are_not() -> None:
    angles = geometry("half", 12)
    positions = torch.tensor([[5_000_000]])
    rotation = rotation_between(angles, positions, positions[:, None])
    exact = positions.double() * angles.inv_freq - (positions.float() * angles.inv_freq.float()).double()
    torch.testing.assert_close(rotation.halves()[0][0, 0], exact.cos().float(), atol=2e-7, rtol=0)
    torch.testing.assert_close(rotation.halves()[1][0, 0], exact.sin().float(), atol=2e-7, rtol=0)


# Where a layer says that its keys stand, they stand.


class Watch:
    """Remembers every key that a one-layer model made, without its rotation."""

    def __init__(self, model: Any) -> None:
        self.model, self.keys = model, []

    def feed(self, cache: EquipCache, ids: torch.Tensor) -> None:
        feed(self.model, cache, ids, [ids.shape[1]])
        decoder = self.model.model
        states = decoder.layers[0].input_layernorm(decoder.embed_tokens(ids))
        projected = decoder.layers[0].self_attn.k_proj(states)
        self.keys.append(projected.unflatten(-1, (-1, 16)).transpose(1, 2))

    def expected(self, positions: torch.Tensor) -> torch.Tensor:
        whole = torch.cat(self.keys, 2)
        return whole.gather(2, positions[..., None].expand(*positions.shape, 16))


ONE_LAYER = models.build("llama", num_hidden_layers=1)


@given(
    policy=st.sampled_from(["streaming", "h2o", "tova", "knorm", "lagkv"]),
    spans=st.lists(st.sampled_from([1, 1, 1, 1, 2, 3, 9, 20]), min_size=1, max_size=14),
    recent=st.sampled_from([None, 0, 3]),
    taken_back=st.booleans(),
    seed=st.integers(0, 999),
)
def test_a_key_turned_back_from_where_it_stands_is_the_key_of_its_token(
    policy: str, spans: list[int], recent: int | None, taken_back: bool, seed: int
) -> None:
    with torch.no_grad():
        watch = Watch(ONE_LAYER)
        cache = build(ONE_LAYER, policy, 12, sinks=2, recent=recent)
        layer = cache.layers[0]
        generator = torch.Generator().manual_seed(seed)
        for number, span in enumerate(spans):
            ids = torch.randint(1, models.VOCABULARY, (2, span + 2), generator=generator)
            if taken_back and number == 2:
                cache.activate_past_recording()
                feed(ONE_LAYER, cache, ids, [span + 2])
                cache.crop(-span - 2)
            watch.feed(cache, ids[:, :span])
            kept = layer.text_positions()
            now = rotated_to(layer).expand(kept.shape)
            keys = layer.rotation.geometry.unrotate(layer.store.read(kept.shape[-1])[0], now)
            torch.testing.assert_close(keys, watch.expected(kept), rtol=0, atol=2e-5)
            # Each is rotated to its rank, or behind the sinks of a stream as in the text that is left.
            ranks = kept.argsort(-1).argsort(-1)
            lost = cache.seen - int((kept[0, 0] >= 0).sum()) if policy == "streaming" else 0
            assert torch.equal(now, torch.where(ranks < 2, ranks, ranks + lost))
