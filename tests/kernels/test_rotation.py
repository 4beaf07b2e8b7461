"""The one rotation and the one table of angles that all kernels share."""

import pytest
import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.rotation import Layout, check_layout, rotate_, rotated_back


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
@pytest.mark.parametrize("dim", [8, 9])
def test_a_rotation_back_undoes_a_rotation(layout: Layout, dim: int) -> None:
    x, angles = torch.randn(2, 5, dim, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    tables = angles.cos(), angles.sin()
    rotated = rotate_(x.clone(), *tables, layout)
    assert not torch.allclose(rotated[..., :6], x[..., :6])
    torch.testing.assert_close(rotated_back(rotated, *tables, layout), x)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_gradients_pass_through_a_rotation(layout: Layout) -> None:
    x, angles = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True), torch.randn(5, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate_(x.clone(), angles.cos(), angles.sin(), layout), (x,))


def test_what_is_no_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^layout: expected 'half' or 'interleaved', got 'thirds'"):
        check_layout("layout", "thirds")
