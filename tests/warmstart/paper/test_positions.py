"""Integer positions that stay different, and keys of learned positions that move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.reuse.layout import LayerStates
from hf_kvcaches.warmstart.paper.maps import PositionCorrection, repaired
from hf_kvcaches.warmstart.paper.slots import Slots, summary
from tests import tiny


@st.composite
def rows_and_bound(draw) -> tuple[list[int], int]:
    row = draw(st.lists(st.integers(-30, 60), min_size=1, max_size=12).map(sorted))
    return row, draw(st.integers(len(row) - 1, 40))


@given(rows_and_bound())
def test_repaired_positions_differ_ascend_and_stay_inside(case: tuple[list[int], int]) -> None:
    row, last = case
    fixed = repaired(torch.tensor(row), last).tolist()
    assert len(set(fixed)) == len(fixed)
    assert 0 <= min(fixed) <= max(fixed) <= last
    assert fixed == sorted(fixed)
    # What ran into no bound is where the paper's rule puts it.
    expected, before = [], -1
    for position in row:
        before = max(position, before + 1)
        expected.append(before)
    if expected[-1] <= last:
        assert fixed == expected


def test_positions_that_can_not_be_repaired_are_refused() -> None:
    with pytest.raises(ConfigError, match="last: expected an integer of at least 2"):
        repaired(torch.tensor([1, 2, 3]), 1)


@torch.no_grad()
def keys_at(model, ids: torch.Tensor, start: int) -> list[torch.Tensor]:
    cache = DynamicCache()
    model(ids[None], position_ids=torch.arange(start, start + len(ids))[None], past_key_values=cache)
    return [layer.keys[0] for layer in cache.layers]


@pytest.fixture(scope="module")
def model():
    return tiny.gpt2()


@pytest.fixture(scope="module")
def correction(model) -> PositionCorrection:
    # Prompts start anywhere, so that all positions of the model are seen about as often.
    starts = range(0, 201, 8)
    prompts = [(keys_at(model, tiny.ids(48, seed=seed), start), torch.arange(start, start + 48)) for seed, start in enumerate(starts)]
    return PositionCorrection.fit(model.transformer.wpe.weight, prompts)


def exact_slots(keys: list[torch.Tensor]) -> Slots:
    tokens = keys[0].shape[1]
    return Slots([LayerStates(own[:, :-1], own[:, :-1]) for own in keys], torch.arange(tokens - 1).float(), tokens)


def test_a_corrected_shift_is_nearer_to_the_moved_tokens_than_no_correction(model, correction: PositionCorrection) -> None:
    ids = tiny.ids(41, seed=500)
    before, after = keys_at(model, ids, 0), keys_at(model, ids, 60)
    moved = correction.shifted(exact_slots(before), 60)
    assert moved.length == 101
    assert torch.equal(moved.positions, torch.arange(60, 100).float())
    shares = []
    for own, stayed, true in zip(moved.layers, before, after, strict=True):
        wanted = true[:, :-1]
        shares.append(float((own.keys - wanted).norm() / (stayed[:, :-1] - wanted).norm()))
    # In the first layer only the LayerNorm's length is missing; what layers of random weights make of positions is hardly linear.
    assert shares[0] < 0.35, shares
    assert all(share < 1 for share in shares), shares


def test_without_a_layer_norm_the_first_layer_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings, weight = torch.randn(80, 12, generator=generator), torch.randn(2, 12, 6, generator=generator)

    def keys(words: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return (words + embeddings[where]) @ weight

    prompts = []
    for start in range(0, 61, 5):
        where = torch.arange(start, start + 20)
        # The same words everywhere: nothing but positions tells keys apart.
        prompts.append(([keys(torch.ones(20, 12), where)], where))
    correction = PositionCorrection.fit(embeddings, prompts, gamma=1e-9)
    words, where = torch.randn(11, 12, generator=generator), torch.arange(11)
    moved = correction.shifted(exact_slots([keys(words, where)]), 37)
    torch.testing.assert_close(moved.layers[0].keys, keys(words, where + 37)[:, :-1], atol=1e-3, rtol=1e-3)


@given(delta=st.integers(-20, 150))
def test_moved_slots_stay_before_the_last_token_at_places_of_their_own(model, correction: PositionCorrection, delta: int) -> None:
    keys = keys_at(model, tiny.ids(61, seed=3), 0)
    slots = summary([LayerStates(own[:, :-1], own[:, :-1]) for own in keys], 61, 12)
    moved = correction.shifted(slots, delta)
    if delta == 0:
        assert moved is slots
        return
    assert bool((moved.positions.diff() > 0).all())
    assert 0 <= float(moved.positions[0]) <= float(moved.positions[-1]) <= moved.length - 2


def test_what_can_not_work_is_refused_by_name(model, correction: PositionCorrection) -> None:
    slots = exact_slots(keys_at(model, tiny.ids(41), 0))
    with pytest.raises(ConfigError, match="delta: expected what makes a prompt of 1 to 256 tokens"):
        correction.shifted(slots, 300)
    with pytest.raises(ConfigError, match="last: expected an integer of at least 39"):
        correction.shifted(slots, -5)
    for positions in ([], [3, 3], [1, 2, 256], [-1, 2]):
        with pytest.raises(ConfigError, match="two positions at least, from 0 to 255"):
            PositionCorrection.fit(model.transformer.wpe.weight, [([torch.randn(4, len(positions), 8)], torch.tensor(positions).long())])
