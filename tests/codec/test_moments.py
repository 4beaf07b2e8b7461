"""Moments against sums over the vectors themselves."""

import pytest
import torch

from hf_kvcaches.codec.moments import Moments, root_of
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
    for block in rows.split(1400, -2):
        moments.add(block)
    assert int(moments.count) == 6000
    assert moments.total.dtype == torch.float64
    assert torch.allclose(moments.mean, moment_of(rows.transpose(0, 1).flatten(1, 2)))


def test_moments_count_in_half_types_and_without_leading_dimensions() -> None:
    rows = torch.randn(70, 4).to(torch.bfloat16)
    moments = Moments((), 4)
    assert (moments.mean == 0).all()
    moments.add(rows)
    assert moments.count == 70
    assert torch.allclose(moments.mean, moment_of(rows.double()))


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_root_of_a_metric_is_damped_where_the_metric_says_nothing(rank: int) -> None:
    metric = moment_of(torch.nn.functional.pad(cloud(7, 3, 50, 6)[..., :rank], (0, 6 - rank))) * 1e-9
    root = root_of(metric, damping=1e-6)
    mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    identity = torch.eye(6, dtype=torch.float64)
    assert torch.allclose(root @ root, metric + 1e-6 * mean * identity, rtol=1e-6, atol=1e-12 * float(mean.max()))
    assert torch.equal(root_of(torch.zeros(6, 6), 1e-6), identity)


def test_wrong_arguments_are_named() -> None:
    for rows in (torch.zeros(3, 5, 4), torch.zeros(2, 5, 3)):
        with pytest.raises(ConfigError, match=r"^rows: expected"):
            Moments((2,), 4).add(rows)
