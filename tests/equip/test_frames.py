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
from hf_kvcaches.equip.frames import Frames, Turn, swap_pairs
from tests.conformance import models
from tests.conformance.driving import feed, left_padded
from tests.equip.cases import COMPACT, build, held, text

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
    angles, frames = geometry(layout, rotary), Frames("frames", geometry(layout, rotary))
    keys = torch.randn(2, 3, 5, 12)
    for delta in (torch.tensor([7]), torch.randint(-90, 90, (5,)), torch.randint(-90, 90, (2, 3, 5)), torch.randint(-9, 9, (2, 1, 5))):
        by = delta if delta.ndim != 1 or delta.numel() > 1 else int(delta)
        torch.testing.assert_close(frames.by(delta)(keys), angles.shift(keys, by), rtol=0, atol=2e-6)


@both_layouts
@whole_or_part
def test_a_table_of_turns_rotates_fresh_keys_to_their_places(layout: str, rotary: int) -> None:
    angles, frames = geometry(layout, rotary), Frames("on_read", geometry(layout, rotary))
    keys, places = torch.randn(2, 3, 5, 12), torch.tensor([0, 40, 3, 199, 2])
    frames.table(8, keys.device)
    table = frames.table(200, keys.device)
    turn = Turn(table.cos[places], table.sin[places], layout)
    torch.testing.assert_close(turn(keys), angles.rotate(keys, places), rtol=0, atol=2e-6)
    # Once a pair, as kernels take it.
    cos, sin = turn.halves()
    exact = angles.cos_sin(places)
    torch.testing.assert_close(cos, exact[0])
    torch.testing.assert_close(sin, exact[1])


@both_layouts
def test_a_rotated_key_is_its_cosines_and_the_swapped_key_its_sines(layout: str) -> None:
    frames, keys = Frames("rotated_keys", geometry(layout, 12)), torch.randn(1, 2, 4, 12)
    turn = frames.by(torch.tensor([3, 9, -4, 0]))
    torch.testing.assert_close(keys * turn.cos + swap_pairs(keys, layout) * turn.sin, turn(keys), rtol=0, atol=2e-6)
    assert torch.equal(swap_pairs(swap_pairs(keys, layout), layout), keys)


@both_layouts
def test_queries_of_one_group_turn_as_their_key_head(layout: str) -> None:
    frames, queries = Frames("frames", geometry(layout, 8)), torch.randn(2, 6, 1, 12)
    delta = torch.randint(-50, 50, (2, 2, 1))
    expected = geometry(layout, 8).shift(queries, delta.repeat_interleave(3, 1))
    torch.testing.assert_close(frames.by(delta)(queries), expected, rtol=0, atol=2e-6)


def stream(cache: EquipCache, start: int = 0, *, tell: bool = True) -> torch.Tensor:
    """Logits of a prompt's end and 60 tokens after it, at positions from `start` on (or wherever the cache says that they are)."""
    model, ids = models.tiny("llama"), torch.cat([text(60), text(30, 17)], 1)
    logits = []
    for begin, end in [(0, 30), *((t, t + 1) for t in range(30, 90))]:
        places = {"position_ids": torch.arange(start + begin, start + end)[None]} if tell else {}
        logits.append(model(input_ids=ids[:, begin:end], past_key_values=cache, logits_to_keep=1, **places).logits[0])
        if not tell and begin == 0:
            for layer in cache.layers:
                layer.seen += FAR
    return torch.cat(logits)


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
@pytest.mark.parametrize("rope", COMPACT)
@pytest.mark.parametrize("tell", [True, False], ids=["by position ids", "by the count of tokens"])
def test_after_four_million_tokens_logits_are_those_of_the_start_of_a_stream(policy: str, rope: str, tell: bool) -> None:
    model = models.tiny("llama")
    near, far = (build(model, policy, rope=rope) for _ in range(2))
    expected, found = stream(near), stream(far, FAR if tell else 0, tell=tell)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    if not tell:
        assert far.seen == FAR + 90
        for one, other in zip(held(near), held(far), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "tova"])
@pytest.mark.parametrize("padded", [False, True])
def test_bringing_the_frames_together_changes_nothing(policy: str, padded: bool) -> None:
    model = models.tiny("llama")
    ids, mask = left_padded([text(70), text(52, 20)] if padded else [text(70)])
    logits = []
    for limit in (8192, 7):
        cache = build(model, policy)
        for layer in cache.layers:
            layer.frames.limit = limit
        logits.append(feed(model, cache, ids, [30, *[1] * 20, 10, *[1] * 10], mask))
        offsets = [torch.as_tensor(layer.frame_offset).max() for layer in cache.layers]
        assert all(offset < limit for offset in offsets)
        assert limit == 7 or all(offset > 7 for offset in offsets)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)


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
    limit=st.sampled_from([4, 8192]),
    taken_back=st.booleans(),
    seed=st.integers(0, 999),
)
def test_a_key_turned_back_from_where_it_stands_is_the_key_of_its_token(
    policy: str, spans: list[int], recent: int | None, limit: int, taken_back: bool, seed: int
) -> None:
    with torch.no_grad():
        watch = Watch(ONE_LAYER)
        cache = build(ONE_LAYER, policy, 12, sinks=2, recent=recent)
        layer = cache.layers[0]
        layer.frames.limit = limit
        generator = torch.Generator().manual_seed(seed)
        for number, span in enumerate(spans):
            ids = torch.randint(1, models.VOCABULARY, (2, span + 2), generator=generator)
            if taken_back and number == 2:
                cache.activate_past_recording()
                feed(ONE_LAYER, cache, ids, [span + 2])
                cache.crop(-span - 2)
            watch.feed(cache, ids[:, :span])
            kept = cache.kept_positions(0)[..., : layer.used]
            standing = layer.standing()
            keys = layer.frames.geometry.unrotate(layer.held_now()[0], standing.expand(kept.shape))
            torch.testing.assert_close(keys, watch.expected(kept), rtol=0, atol=2e-5)
            # Near tokens are as far apart as in the text, far ones as in the cache.
            near = kept >= layer.fed - layer.near
            places = kept.argsort(-1).argsort(-1)
            assert torch.equal(standing.expand(kept.shape), places + near * layer.frame_offset)
