"""Moments against sums over the vectors themselves."""

import pytest
import torch

from hf_kvcaches.codec.moments import Moments
from hf_kvcaches.errors import ConfigError


def cloud(seed: int, *shape: int) -> torch.Tensor:
    """Vectors with directions of very different energy."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(*shape[:-2], shape[-1], shape[-1], generator=generator, dtype=torch.float64)
    return torch.randn(shape, generator=generator, dtype=torch.float64) @ (spread * 0.6 ** torch.arange(shape[-1]).unsqueeze(-1))


def moment_of(rows: torch.Tensor) -> torch.Tensor:
    return torch.einsum("...ni,...nj->...ij", rows, rows) / rows.shape[-2]


def test_moments_sum_over_batches_and_blocks() -> None:
    rows, moments = cloud(0, 2, 3, 3000, 5), Moments((3,), 5)
    assert (moments.mean == 0).all()
    for block in rows.split(1400, -2):
        moments.add(block)
    assert int(moments.count) == 6000
    assert torch.allclose(moments.mean, moment_of(rows.transpose(0, 1).flatten(1, 2)))


def test_moments_of_half_types_without_leading_dimensions_are_float64() -> None:
    rows, moments = torch.randn(70, 4).to(torch.bfloat16), Moments((), 4)
    moments.add(rows)
    assert torch.equal(moments.mean, moment_of(rows.double()))


def test_wrong_arguments_are_named() -> None:
    for rows in (torch.zeros(3, 5, 4), torch.zeros(2, 5, 3)):
        with pytest.raises(ConfigError, match=r"^rows: expected"):
            Moments((2,), 4).add(rows)
