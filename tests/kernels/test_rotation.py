"""The one rotation and the one table of angles that all kernels share, and the one checker of arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.checks import check_tensor
from hf_kvcaches.kernels.rotation import Layout, angle_table, cos_sin, rotate_


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [6, 7, 8, 33])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_pairs_rotate_as_complex_numbers_wherever_they_lie(layout: Layout, dim: int, offset: int, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(2, 3, dim + 2, 5 + dim, generator=generator)
    x = (x.mT if transposed else x)[..., offset : offset + dim]
    angles = torch.randn(x.shape[2], 3, generator=generator)
    first, second = (torch.arange(3), torch.arange(3) + 3) if layout == "half" else (torch.arange(3) * 2, torch.arange(3) * 2 + 1)
    numbers = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angles), angles)
    expected = x.clone()
    expected[..., first], expected[..., second] = numbers.real, numbers.imag
    assert rotate_(x, angles.cos(), angles.sin(), layout) is x
    torch.testing.assert_close(x, expected)
    assert torch.equal(x[..., 6:], expected[..., 6:])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_gradients_pass_through_a_rotation(layout: Layout) -> None:
    x, angles = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True), torch.randn(5, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate_(x.clone(), angles.cos(), angles.sin(), layout), (x,))


def test_a_table_is_made_once_and_as_exact_as_each_angle() -> None:
    frequencies = 1e4 ** -(torch.arange(8, dtype=torch.float64) / 8)
    tables = [angle_table(frequencies, length, torch.float32, torch.device("cpu")) for length in (1, 400, 512)]
    assert all(table[0] is tables[0][0] for table in tables)
    assert len(angle_table(frequencies, 513, torch.float32, torch.device("cpu"))[1]) >= 513
    for table, exact in zip(tables[0], cos_sin(frequencies, torch.arange(512), torch.float64), strict=True):
        assert torch.equal(table, exact.float())


@pytest.mark.parametrize(
    ("shape", "given", "message"),
    [
        ((2, 3), {}, "expected float32 or bfloat16 or float16 or float64 of shape (2, 3)"),
        ((2, (1, 5), None), {"dtype": torch.bool}, "expected bool of shape (2, 1 or 5, any)"),
        ((2, 4, None), {"device": torch.device("meta")}, "expected a tensor on meta"),
        ((2, 4, 6), {"contiguous": True}, "expected a contiguous last dimension"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_what_was_expected(shape: Any, given: dict[str, Any], message: str) -> None:
    x = torch.zeros(2, 6, 4).mT
    with pytest.raises(ConfigError) as error:
        check_tensor("x", x, shape, **given)
    assert str(error.value).startswith(f"x: {message}, got")
    check_tensor("x", x, (2, (1, 4), None), x.dtype, x.device)
