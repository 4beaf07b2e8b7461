"""The bound on the error of quantizing as a property, and its edges."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.quantization import quantize
from tests.kernels.cases import restored

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TOP_LEVEL = {8: 254, 4: 15}


def error_bound(x: torch.Tensor, bits: int, group: int | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """How far each element can be from the original: half a step, and the roundings of the arithmetic and of the result's dtype."""
    quantized, length = quantize(x, bits, group), x.shape[-1]
    compute, kind = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32), torch.finfo(dtype or x.dtype)
    scale, zero = quantized.scale.double(), quantized.zero.double()
    largest = zero.abs() + TOP_LEVEL[bits] * scale
    bound = scale / 2 + (2 * compute.eps + kind.eps / 2) * largest + kind.smallest_normal * kind.eps / 2
    return bound.repeat_interleave(group or max(length, 1), -1)[..., :length]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = x * 10.0 ** draw(st.integers(-9, 4)) + draw(st.sampled_from([0.0, 1.0, -300.0, 1e4]))
    if draw(st.booleans()) and x.numel():
        # Single far outliers, ends of the type's range included.
        x.view(-1)[:: draw(st.integers(1, 7))] *= draw(st.sampled_from([0.0, -1.0, 1e3, 1e30]))
    return x.clamp(-torch.finfo(dtype).max / 4, torch.finfo(dtype).max / 4).to(dtype)


@given(x=tensors(), bits=st.sampled_from([8, 4]), group=st.sampled_from([None, 1, 2, 3, 7, 64]))
def test_every_element_comes_back_within_the_bound(x: torch.Tensor, bits: int, group: int | None) -> None:
    back = restored(x, bits, group)
    assert back.shape == x.shape
    assert ((back.double() - x.double()).abs() <= error_bound(x, bits, group)).all()
    if x.dtype != torch.float64:
        exact = restored(x, bits, group, torch.float32)
        assert ((exact.double() - x.double()).abs() <= error_bound(x, bits, group, torch.float32)).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_half_a_step_and_little_more(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = torch.rand(16, 64).to(dtype)
    ideal = 1 / TOP_LEVEL[bits] / 2
    assert 0.4 * ideal < (restored(x, bits, 32, torch.float32).double() - x.double()).abs().max() < 1.012 * ideal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 1 / 3, -1e-7, 60000.0])
def test_equal_elements_come_back_exactly(dtype: torch.dtype, bits: int, value: float) -> None:
    x = torch.full((3, 5), value, dtype=torch.float64).to(dtype)
    assert torch.equal(restored(x, bits, 2), x)
    rows = torch.tensor([[value], [2.0], [0.0]]).to(dtype).expand(3, 5)
    assert torch.equal(restored(rows, bits, None), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_the_whole_range_and_subnormal_numbers_keep_the_bound(bits: int, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    subnormal = (torch.arange(9, dtype=torch.float64) * info.smallest_normal * info.eps).to(dtype)
    largest = min(info.max, torch.finfo(torch.float32).max / 4 if dtype != torch.float16 else info.max)
    for x in (subnormal, torch.tensor([-largest, largest, 0.9 * largest, 0.0], dtype=dtype)):
        assert ((restored(x, bits, None).double() - x.double()).abs() <= error_bound(x, bits, None)).all()


def test_int8_levels_are_symmetric_and_int4_levels_share_bytes() -> None:
    x = torch.linspace(-3, 9, 255)
    eight, four = quantize(x), quantize(x, bits=4)
    assert (eight.data.dtype, eight.data.min().item(), eight.data.max().item()) == (torch.int8, -127, 127)
    assert (four.data.dtype, four.data.shape) == (torch.uint8, (128,))
    assert four.data[-1] == 15
    assert quantize(torch.tensor([0.0, 15.0, 3.0]), bits=4).data.tolist() == [15 << 4, 3]


@pytest.mark.parametrize(("dtype", "per_group"), [(torch.float16, 4), (torch.bfloat16, 4), (torch.float32, 8), (torch.float64, 16)])
def test_bytes_are_as_documented(dtype: torch.dtype, per_group: int) -> None:
    x = torch.randn(2, 3, 8, 64).to(dtype)
    eight, four = (sum(tensor.nbytes for tensor in quantize(x, bits, 32)) for bits in (8, 4))
    assert eight == x.numel() + x.numel() // 32 * per_group
    assert four == x.numel() // 2 + x.numel() // 32 * per_group


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_values_are_refused_unless_unchecked_and_spoil_their_group_alone(dtype: torch.dtype, bits: int, bad: float) -> None:
    x = torch.ones(2, 6, dtype=dtype)
    x[0, 3:] = torch.tensor([2, 3, 4])
    x[0, 2] = x[1, 4] = bad
    with pytest.raises(ConfigError, match=r"x: expected finite"):
        quantize(x, bits, group=3)
    unchecked, whole = quantize(x, bits, 3, check_finite=False), quantize(torch.tensor([[2, 3, 4]], dtype=dtype), bits, 3)
    assert torch.equal(unchecked.scale[0, 1:], whole.scale[0])
    assert torch.equal(unchecked.zero[0, 1:], whole.zero[0])
    assert unchecked.zero[1, 0] == 1
    assert unchecked.scale[1, 0] == 0


def test_a_range_wider_than_the_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="finite difference"):
        quantize(torch.tensor([-3e38, 3e38]))
