"""Every bit of every direction has its place in a token's bytes, and no byte is counted that is not there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.codec.layout import PLANES, Layout, packed_bytes
from hf_kvcaches.codec.sides import WIDTHS


@st.composite
def widths(draw: st.DrawFn) -> torch.Tensor:
    heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    choice = st.lists(st.sampled_from((0, *WIDTHS)), min_size=heads * dim, max_size=heads * dim)
    return torch.tensor(draw(choice)).view(heads, dim)


@given(widths=widths())
def test_the_levels_of_a_direction_hold_each_of_its_bits_once(widths: torch.Tensor) -> None:
    layout = Layout.of(widths)
    bits: dict[tuple[int, int], list[int]] = {}
    for head, direction, shift, size, real in zip(
        *(each.tolist() for each in (layout.heads, layout.directions, layout.shifts, layout.bits, layout.real)), strict=True
    ):
        if real:
            bits.setdefault((head, direction), []).extend(range(shift, shift + size))
    found = {place: sorted(each) for place, each in bits.items()}
    assert found == {tuple(place): list(range(int(widths[tuple(place)]))) for place in widths.nonzero().tolist()}


@given(widths=widths())
def test_planes_are_whole_bytes_and_as_few_as_their_codes_need(widths: torch.Tensor) -> None:
    layout = Layout.of(widths)
    assert sum(layout.counts) == len(layout.bits) == len(layout.real)
    assert layout.bits.tolist() == [plane for plane, count in zip(PLANES, layout.counts, strict=True) for _ in range(count)]
    for plane, count in zip(PLANES, layout.counts, strict=True):
        real = int(layout.real[layout.bits == plane].sum())
        assert count * plane % 8 == 0
        assert 0 <= count - real < 8 // plane
    assert packed_bytes(widths) == sum(plane * count for plane, count in zip(PLANES, layout.counts, strict=True)) // 8


@given(widths=widths())
def test_each_head_finds_its_own_levels(widths: torch.Tensor) -> None:
    layout = Layout.of(widths)
    index, there = layout.by_head(len(widths))
    found = [index[head][there[head]].tolist() for head in range(len(widths))]
    assert sorted(level for own in found for level in own) == layout.real.nonzero()[:, 0].tolist()
    assert all(int(layout.heads[level]) == head for head, own in enumerate(found) for level in own)


@pytest.mark.parametrize(
    ("widths", "expected"),
    [([0, 0], 0), ([1], 1), ([1] * 8, 1), ([1] * 9, 2), ([3], 2), ([5, 3], 3), ([6, 2], 2), ([16], 2), ([24, 1], 4), ([8, 4, 4], 2)],
)
def test_bytes_of_a_token(widths: list[int], expected: int) -> None:
    assert packed_bytes(torch.tensor([widths])) == expected
