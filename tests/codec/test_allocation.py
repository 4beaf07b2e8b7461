"""Bits lie where they save most, against all allocations of tiny layers, and keep to a budget."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.codec.fixed import allot
from hf_kvcaches.kernels.code_format import WIDTHS, packed_bytes
from tests import testbed, tiny
from tests.codec.measured import calibrate


@given(seed=st.integers(0, 2**31), share=st.floats(0.2, 1), falling=st.booleans(), copies=st.sampled_from([(1, 1), (1, 3), (2, 1)]))
def test_no_other_allocation_of_as_many_bits_loses_less(seed: int, share: float, falling: bool, copies: tuple[int, int]) -> None:
    generator, widths = torch.Generator().manual_seed(seed), (1, 2, 4, 8)
    distortions = torch.rand(6, 1 + len(WIDTHS), generator=generator)
    if falling:
        distortions = distortions.sort(-1, descending=True).values
    sides, counts = distortions.split([4, 2]), torch.tensor(copies).repeat_interleave(torch.tensor([4, 2]))
    budget = share * int(counts.sum())
    found = allot(sides, budget, copies, widths)
    assert sum(count * packed_bytes(side) for count, side in zip(copies, found, strict=True)) <= budget
    bits = int((torch.cat(found) * counts).sum())
    columns = torch.tensor([(0, *WIDTHS).index(width) for width in torch.cat(found).tolist()])
    lost = float(distortions.double().gather(1, columns[:, None]).sum())
    choices = torch.tensor(list(product(range(5), repeat=6)))
    used = (torch.tensor([0, *widths])[choices] * counts).sum(1)
    chosen = distortions.double()[:, [0, *(1 + WIDTHS.index(width) for width in widths)]]
    losses = chosen.expand(len(choices), -1, -1).gather(2, choices[..., None]).sum((1, 2))
    assert float(losses[used <= bits].min()) >= lost - 1e-6


@pytest.mark.parametrize("ratio", [0.05, 0.125, 0.5, 1.0])
def test_a_budget_of_bytes_is_respected_and_nearly_used(ratio: float) -> None:
    for model, slack in ((tiny.llama(), 0.04), (testbed.load()[0], 0.004)):
        codec = calibrate(model, metric="plain").at(ratio)
        assert ratio - slack <= codec.bytes_ratio <= ratio
        assert ratio - 2 * slack <= codec.slots.nbytes / (2 * codec.slots.elements) <= ratio
        assert codec.settings.bytes_ratio == ratio


def test_directions_that_lose_nothing_get_no_bits() -> None:
    distortions = torch.zeros(4, 1 + len(WIDTHS))
    distortions[1] = torch.tensor([0.5 ** (2 * width) for width in (0, *WIDTHS)])
    found, none = allot([distortions, torch.zeros_like(distortions)], 100.0, [1, 1])
    assert found.nonzero().tolist() == [[1]]
    assert not none.any()


def test_a_byte_and_a_half_for_two_are_all_bits_of_all_directions() -> None:
    for layer in calibrate().at(1.5).in_place.layers.values():
        assert set(layer.widths.tolist()) == {24}
