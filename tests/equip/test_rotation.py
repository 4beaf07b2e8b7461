"""Rotations are exact, keys are rotated to where the layer says, and how many tokens were seen does not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.equip.policies import FuturePolicy, KeyDiffPolicy, Policy
from hf_kvcaches.equip.rotation import LONGEST, KeyRotation
from hf_kvcaches.equip.slots import SlotTable
from hf_kvcaches.kernels.slots import rotated_keys
from tests.conformance import models
from tests.conformance.driving import feed
from tests.equip.cases import BUDGET, SINKS, build, text

pytestmark = pytest.mark.usefixtures("no_grad")

FAR = 4_000_000


def geometry(layout: str, rotary: int, head_dim: int = 12) -> RotaryGeometry:
    exponents = torch.arange(0, rotary, 2).double() / rotary
    return RotaryGeometry((10_000.0**-exponents).float().double(), head_dim, layout=layout)


both_layouts = pytest.mark.parametrize("layout", ["half", "interleaved"])
whole_or_part = pytest.mark.parametrize("rotary", [12, 8, 2])


@both_layouts
@whole_or_part
def test_a_turn_is_a_shift_by_as_many_positions(layout: str, rotary: int) -> None:
    angles, keys = geometry(layout, rotary), torch.randn(2, 3, 5, 12)
    for delta in (torch.randint(-90, 90, (1, 5)), torch.randint(-90, 90, (2, 3, 5)), torch.randint(-9, 9, (2, 1, 5))):
        keys_at = KeyRotation(angles).frame(keys, delta if delta.ndim == 3 else delta[:, None])
        torch.testing.assert_close(keys_at, angles.shift(keys, delta), rtol=0, atol=2e-6)


@both_layouts
@whole_or_part
def test_tables_by_distance_rotate_keys_back_and_grow(layout: str, rotary: int) -> None:
    angles, rotation = geometry(layout, rotary), KeyRotation(geometry(layout, rotary))
    keys, distances = torch.randn(2, 3, 5, 12), torch.tensor([0, 40, 3, 199, 2])
    rotation.on_read(distances.clamp(max=7), 8)
    tables = rotation.on_read(distances, 200)
    torch.testing.assert_close(rotated_keys(keys, tables), angles.rotate(keys, -distances), rtol=0, atol=2e-6)
    assert torch.equal(tables.cos, tables.full[:, : rotary // 2] if layout == "half" else tables.full[:, :rotary:2])
    assert torch.equal(tables.sin, -tables.full[:, rotary : rotary + rotary // 2] if layout == "half" else -tables.full[:, rotary::2])


def test_angles_are_exact_where_those_of_float32_are_not() -> None:
    angles, positions = geometry("half", 12), torch.tensor([[5_000_000]])
    rounded = (positions.float()[..., None] * angles.inv_freq.float()).double()
    rotation = KeyRotation(angles)
    unit = torch.tensor([1.0] * 6 + [0.0] * 6).expand(1, 1, 1, 12)
    torch.testing.assert_close(rotation.undo(positions)(unit)[0, 0, 0, :6], rounded[0, 0].cos().float(), atol=2e-7, rtol=0)
    exact = (positions[0, 0].double() * angles.inv_freq - rounded[0, 0]).sin().float()
    table = SlotTable(positions=torch.zeros(1, 1, 1, dtype=torch.int32), distances=torch.zeros(1, 1, 1), filled=1)
    torch.testing.assert_close(rotation.to_frame(unit, positions, positions, table)[0, 0, 0, 6:], exact, atol=2e-7, rtol=0)


@pytest.mark.parametrize("policy", ["h2o", KeyDiffPolicy(interval=5), FuturePolicy(interval=5)], ids=str)
def test_logits_are_the_same_four_million_positions_further_on(policy: str | Policy) -> None:
    model, ids = models.tiny("llama"), torch.cat([text(60), text(30, 17)], 1)
    logits = []
    for gap in (0, FAR):
        cache = EquipCache(model, policy, BUDGET, positions="compact")
        for begin, end in [(0, 30), *((t, t + 1) for t in range(30, 60)), (60, 70), *((t, t + 1) for t in range(70, 90))]:
            positions = torch.arange(begin, end)[None] + (gap if begin else 0)
            logits.append(model(input_ids=ids[:, begin:end], past_key_values=cache, logits_to_keep=1, position_ids=positions).logits)
    near, far = torch.cat(logits).chunk(2)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-3)


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
@pytest.mark.parametrize("evicted", [[], [1, 8]], ids=str)
def test_from_which_number_the_model_counts_makes_no_difference(policy: str, evicted: list[int]) -> None:
    model, ids = models.tiny("llama"), text(60)
    logits = []
    for first in (0, 1, 150):
        cache = build(model, policy)
        for begin, end in [(0, 12), *((t, t + 1) for t in range(12, 40)), (40, 45), *((t, t + 1) for t in range(45, 60))]:
            if begin == 14:
                cache.evict(evicted)
            positions = torch.arange(begin, end)[None] + first
            logits.append(model(input_ids=ids[:, begin:end], past_key_values=cache, logits_to_keep=1, position_ids=positions).logits)
    expected, *others = torch.cat(logits).chunk(3)
    for found in others:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


ONE_LAYER = models.build("llama", num_hidden_layers=1)


@pytest.mark.full
def test_a_long_stream_equals_a_fresh_pass_over_its_sinks_and_window() -> None:
    # In one layer keys and values depend on their token alone.
    model = models.build("llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    ids = torch.randint(1, models.VOCABULARY, (1, 70_010))
    cache = build(model, "streaming", 64)
    layer = cache.layers[0]

    def decode(until: int, tolerance: float) -> None:
        for stop in range(cache.seen + 1, until + 1):
            logits = feed(model, cache, ids[:, stop - 1 : stop])
            kept = torch.cat([ids[:, :SINKS], ids[:, stop - 64 + SINKS : stop]], 1)
            fresh = model(kept, use_cache=False, logits_to_keep=1).logits
            torch.testing.assert_close(logits, fresh, rtol=0, atol=tolerance)

    near = LONGEST - 5
    feed(model, cache, ids[:, :near], [*[2000] * (near // 2000), near % 2000])
    decode(LONGEST, 5e-3)
    assert layer.rotation.streams, "up to here the model's own angles do"
    decode(LONGEST + 5, 1e-4)
    assert layer.rotation.unrotated
    feed(model, cache, ids[:, cache.seen : 70_000], [2000, 2000, 70_000 - cache.seen - 4000])
    decode(70_010, 1e-4)
    assert cache.report().kept == (64,)


# Where a layer says that its keys are rotated to, they are.


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


@given(
    policy=st.sampled_from(["streaming", "h2o", "tova", "keydiff"]),
    spans=st.lists(st.sampled_from([1, 1, 1, 1, 2, 3, 9, 20]), min_size=1, max_size=14),
    recent=st.sampled_from([None, 0, 3]),
    taken_back=st.booleans(),
    seed=st.integers(0, 999),
)
def test_a_key_is_rotated_to_its_rank(policy: str, spans: list[int], recent: int | None, taken_back: bool, seed: int) -> None:
    with torch.no_grad():
        watch = Watch(ONE_LAYER)
        cache = build(ONE_LAYER, policy, 12, sinks=2, recent=recent, positions="compact")
        layer = cache.layers[0]
        generator = torch.Generator().manual_seed(seed)
        for number, span in enumerate(spans):
            ids = torch.randint(1, models.VOCABULARY, (2, span + 2), generator=generator)
            if taken_back and number == 2:
                cache.activate_past_recording()
                feed(ONE_LAYER, cache, ids, [span + 2])
                cache.crop(-span - 2)
            watch.feed(cache, ids[:, :span])
            used = layer.table.used
            kept, keys = layer.kept_positions()[..., :used], layer.storage.read(used)[0]
            ranks = kept.argsort(-1).argsort(-1)
            if policy == "streaming":  # the newest token is where it was in the text, and all others are as far from it as in the cache
                keys = layer.rotation.geometry.unrotate(keys, ranks + cache.seen - used)
            else:
                assert torch.equal(layer.table.distances[..., :used].expand_as(ranks), (used - 1 - ranks).int())
            torch.testing.assert_close(keys, watch.expected(kept), rtol=0, atol=2e-5)


def test_a_stream_of_padded_rows_rotates_on_the_way() -> None:
    cache, mask = build(models.tiny("llama"), "streaming"), torch.ones(2, 40, dtype=torch.long)
    mask[0, :9] = 0
    feed(models.tiny("llama"), cache, text(40).expand(2, -1), [40], mask)
    assert all(layer.rotation.unrotated and layer.kept == BUDGET for layer in cache.layers)
