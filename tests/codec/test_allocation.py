"""Bits lie where they save most: against all allocations of tiny layers, and all swaps of a measured codec."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.codec.allocation import by_bytes, by_energy, by_rank
from hf_kvcaches.codec.layout import packed_bytes
from hf_kvcaches.codec.sides import WIDTHS, CalibratedLayer, CalibratedSide
from hf_kvcaches.errors import ConfigError
from tests import testbed, tiny
from tests.codec.measured import calibrate, energies


def side_of(distortions: torch.Tensor) -> CalibratedSide:
    """A side that loses so much at each width, (kv_heads, d, 1 + widths)."""
    heads, dim, _ = distortions.shape
    steps, widths = torch.ones(heads, dim, len(WIDTHS)), torch.zeros(heads, dim, dtype=torch.uint8)
    whole, tails = torch.eye(dim).expand(heads, -1, -1), torch.zeros(heads, 1 + dim)
    return CalibratedSide(torch.zeros(heads, dim), whole, distortions[..., 0], tails, steps, distortions, widths)


def lost(side: CalibratedSide) -> float:
    """What is lost at the widths of a side."""
    columns = torch.tensor([(0, *WIDTHS).index(width) for width in side.widths.flatten().tolist()])
    return float(side.distortions.flatten(0, 1).double().gather(1, columns[:, None]).sum())


@given(seed=st.integers(0, 2**31), ratio=st.floats(0.2, 1), falling=st.booleans())
def test_no_other_allocation_of_as_many_bits_loses_less(seed: int, ratio: float, falling: bool) -> None:
    generator, widths = torch.Generator().manual_seed(seed), (1, 2, 4, 8)
    distortions = torch.rand(2, 2, 2, 1 + len(WIDTHS), generator=generator)
    if falling:
        distortions = distortions.sort(-1, descending=True).values
    layer = CalibratedLayer(side_of(distortions[0, :, :2]), side_of(distortions[1, :1]))  # 2 heads of keys, 1 of values
    try:
        [found] = by_bytes([layer], ratio, widths)
    except ConfigError:
        return
    assert sum(packed_bytes(side.widths.long()) for side in found) <= ratio * 2 * layer.elements
    bits, total = sum(int(side.widths.sum()) for side in found), sum(map(lost, found))
    flat = torch.cat([side.distortions.flatten(0, 1) for side in layer]).double()
    columns = [0, *(1 + WIDTHS.index(width) for width in widths)]
    choices = torch.tensor(list(product(range(5), repeat=len(flat))))
    counts = torch.tensor([0, *widths])[choices].sum(1)
    losses = flat[:, columns].expand(len(choices), -1, -1).gather(2, choices[..., None]).sum((1, 2))
    assert float(losses[counts <= bits].min()) >= total - 1e-6


@pytest.mark.parametrize("metric", ["loss", "plain"])
@pytest.mark.parametrize("ratio", [0.08, 0.25, 0.6])
def test_no_swap_of_bits_in_a_measured_codec_loses_less(ratio: float, metric: str) -> None:
    codec = calibrate(metric=metric).at(ratio)
    sides = [side for layer in codec.layers for side in layer]
    allowed = torch.tensor([0, *codec.settings.widths])
    columns = torch.tensor([(0, *WIDTHS).index(width) for width in allowed.tolist()])
    losses = torch.cat([side.distortions.flatten(0, 1) for side in sides]).double()[:, columns]
    held = torch.cat([side.widths.flatten() for side in sides]).long()
    place = (allowed == held[:, None]).long().argmax(1, keepdim=True)
    change, bits = losses - losses.gather(1, place), allowed - held[:, None]
    for size in range(1, int(allowed.max()) + 1):
        freed = change.masked_fill(bits > -size, torch.inf).amin(1)
        gained = change.masked_fill((bits > size) | (bits <= 0), torch.inf).amin(1)
        pairs = freed[:, None] + gained[None]
        assert float(pairs.fill_diagonal_(torch.inf).min()) >= -1e-6 * float(change.abs().max())


@pytest.mark.parametrize("ratio", [0.05, 0.125, 0.5, 1.0])
def test_a_budget_of_bytes_is_respected_and_nearly_used(ratio: float) -> None:
    for model, slack in ((tiny.llama(), 0.04), (testbed.load()[0], 0.002)):
        codec = calibrate(model, metric="plain").at(ratio, widths=WIDTHS)
        assert ratio - slack <= codec.bytes_ratio <= ratio
        assert codec.settings.rule == {"bytes_ratio": ratio}


def test_a_budget_for_less_than_one_direction_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes_ratio: expected enough for at least one direction"):
        calibrate(metric="plain").at(1e-4)


def test_only_the_given_widths_are_used() -> None:
    codec = calibrate(metric="plain")
    for widths in ((2,), (4, 1), (3, 5, 16), 8):
        chosen = codec.at(0.3, widths=widths)
        used = {int(width) for layer in chosen.layers for side in layer for width in side.widths.unique()}
        expected = {widths} if isinstance(widths, int) else set(widths)
        assert used - {0} <= expected
        assert chosen.settings.widths == tuple(sorted(expected))


def test_directions_that_lose_nothing_get_no_bits() -> None:
    distortions = torch.zeros(2, 4, 1 + len(WIDTHS))
    distortions[0, 1] = torch.tensor([0.5 ** (2 * width) for width in (0, *WIDTHS)])
    empty = side_of(torch.zeros(2, 4, 1 + len(WIDTHS)))
    [found] = by_bytes([CalibratedLayer(side_of(distortions), empty)], 1.0, (1, 2, 4, 8))
    assert found.keys.widths.nonzero().tolist() == [[0, 1]]
    assert not found.values.widths.any()
    assert found.values.kept == 1


def test_a_rank_is_the_same_for_all_heads() -> None:
    codec = calibrate(metric="plain").at(rank=(3, 5), widths=4)
    assert codec.ranks == [[(3, 5)] * 2] * 4
    assert all(set(side.widths.unique().tolist()) == {0, 4} for layer in codec.layers for side in layer)
    assert codec.at(rank=2).ranks == [[(2, 2)] * 2] * 4
    with pytest.raises(ConfigError, match="rank: expected at most 8"):
        by_rank(list(codec.layers), (8, 9), 16)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_an_energy_target_takes_the_fewest_directions_of_each_head(share: float) -> None:
    codec = calibrate(metric="loss").at(energy=share)
    sides = [side for layer in codec.layers for side in layer]
    for side, own in zip(sides, energies(codec), strict=True):
        for widths, energy in zip(side.widths, own.double(), strict=True):
            rank, shares = int((widths > 0).sum()), energy.cumsum(0) / energy.sum()
            assert bool((widths[:rank] > 0).all())
            assert shares[rank - 1] >= share - 1e-9
            assert rank == 1 or shares[rank - 2] < share
        assert side.kept >= share - 1e-6


def test_all_of_the_energy_is_all_directions_also_those_without() -> None:
    [found] = by_energy([CalibratedLayer(*(side_of(torch.zeros(1, 3, 1 + len(WIDTHS))) for _ in range(2)))], 1, 8)
    assert all(bool((side.widths == 8).all()) for side in found)
