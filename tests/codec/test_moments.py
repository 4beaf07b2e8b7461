"""Moments against sums over the vectors themselves, and explicit rotations."""

from __future__ import annotations

import pytest
import torch

from hf_kvcaches.codec.moments import Moments, roots, rotation_average
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.rotation import Layout


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


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(8, 8), (4, 8), (4, 7), (2, 3)])
def test_rotation_average_is_the_sum_over_explicit_rotations(layout: Layout, rotary_dim: int, head_dim: int) -> None:
    geometry = RotaryGeometry(10.0 ** -torch.arange(rotary_dim // 2, dtype=torch.float64), head_dim, layout=layout)
    moment = moment_of(cloud(11, 2, 30, head_dim))
    distances, weights = torch.tensor([0, 1, 2, 7, 1000]), torch.tensor([0.5, 0.2, 0.1, 0.1, 0.3])
    expected = torch.zeros_like(moment)
    for distance, weight in zip(distances.tolist(), weights.double().tolist(), strict=True):
        # Each row is where one axis goes: the transpose of the rotation.
        turn = geometry.shift(torch.eye(head_dim, dtype=torch.float64)[None, None], distance)[0, 0].mT
        expected += weight * turn @ moment @ turn.mT
    assert torch.allclose(rotation_average(moment, geometry, distances, weights), expected, atol=1e-12)
    uniform = rotation_average(moment, geometry, distances)
    assert torch.allclose(uniform, rotation_average(moment, geometry, distances, torch.full((5,), 0.2)), atol=1e-7)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_averaged_metric_gives_the_logits_of_rotated_queries_and_keys(layout: Layout) -> None:
    geometry = RotaryGeometry(10.0 ** -torch.arange(3, dtype=torch.float64), 6, layout=layout)
    queries, key = cloud(12, 20, 6), cloud(13, 1, 6)
    logits = [geometry.rotate(queries[None, None], 40) @ geometry.rotate(key[None, None], 40 - distance).mT for distance in (0, 3, 11)]
    metric = rotation_average(moment_of(queries), geometry, torch.tensor([0, 3, 11]))
    assert torch.allclose(torch.stack(logits).square().mean(), key @ metric @ key.mT)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_root_of_a_metric_and_its_inverse_undo_each_other_also_where_the_metric_says_nothing(rank: int) -> None:
    metric = moment_of(torch.nn.functional.pad(cloud(7, 3, 50, 6)[..., :rank], (0, 6 - rank))) * 1e-9
    root, inverse = roots(metric, damping=1e-6)
    mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    identity = torch.eye(6, dtype=torch.float64)
    assert torch.allclose(root @ root, metric + 1e-6 * mean * identity, rtol=1e-6, atol=1e-12 * float(mean.max()))
    assert torch.allclose(root @ inverse, identity.expand(3, 6, 6), atol=1e-6)
    assert all(torch.equal(each, identity) for each in roots(torch.zeros(6, 6)))


def test_wrong_arguments_are_named() -> None:
    gram, geometry = torch.eye(4), RotaryGeometry(torch.ones(2, dtype=torch.float64), 4)
    for call, argument in [
        (lambda: Moments((2,), 4).add(torch.zeros(3, 5, 4)), "rows"),
        (lambda: Moments((2,), 4).add(torch.zeros(2, 5, 3)), "rows"),
        (lambda: rotation_average(torch.eye(3), geometry, torch.arange(3)), "moment"),
        (lambda: rotation_average(gram, geometry, torch.tensor(3)), "distances"),
        (lambda: rotation_average(gram, geometry, torch.arange(3), torch.ones(2)), "weights"),
    ]:
        with pytest.raises(ConfigError, match=rf"^{argument}: expected"):
            call()
    with pytest.raises(UnsupportedError):
        rotation_average(gram, RotaryGeometry(torch.ones(0, dtype=torch.float64), 4, kind="none"), torch.arange(3))
