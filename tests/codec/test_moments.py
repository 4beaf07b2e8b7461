"""Moments against sums over the vectors themselves."""

import torch

from hf_kvcaches.codec.moments import Moments


def moment_of(rows: torch.Tensor) -> torch.Tensor:
    return torch.einsum("...ni,...nj->...ij", rows, rows) / rows.shape[-2]


def test_moments_sum_over_batches_and_blocks() -> None:
    rows, moments = torch.randn(2, 3, 3000, 5, dtype=torch.float64), Moments((3,), 5)
    assert (moments.mean == 0).all()
    for block in rows.split(1400, -2):
        moments.add(block)
    assert int(moments.count) == 6000
    assert torch.allclose(moments.mean, moment_of(rows.transpose(0, 1).flatten(1, 2)))


def test_moments_of_half_types_without_leading_dimensions_are_float64() -> None:
    rows, moments = torch.randn(70, 4).to(torch.bfloat16), Moments((), 4)
    moments.add(rows)
    assert torch.equal(moments.mean, moment_of(rows.double()))
