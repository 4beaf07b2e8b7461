"""Quantising against a slow loop in plain Python, and the bound on the error as a property."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.kernels.quantize import Quantized, quantize

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def slow_round_trip(x: torch.Tensor, q: Quantized) -> torch.Tensor:
    """Each element by itself in Python's floats: the nearest level of its group's grid."""
    steps = 254 if q.bits == 8 else 15
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.group or max(q.shape[q.axis], 1)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in x.shape)).reshape(-1, x.ndim).tolist():
        others = (*index[: q.axis], *index[q.axis + 1 :])
        place = (*others, index[q.axis] // group)
        scale, zero = float(q.scale[place]), float(q.zero[place])
        level = min(max(round((float(x[tuple(index)]) - zero) / scale), 0), steps) if scale else 0
        out[tuple(index)] = zero + scale * level
    return out


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


@given(x=tensors(), bits=st.sampled_from([8, 4]), group=st.sampled_from([None, 1, 2, 3, 7, 64]), data=st.data())
def test_every_element_comes_back_within_the_bound(x: torch.Tensor, bits: int, group: int | None, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    q = quantize(x, bits=bits, group=group, axis=axis)
    back, bound = q.dequantize(), q.error_bound()
    assert back.shape == bound.shape == x.shape
    assert back.dtype == x.dtype
    assert back.is_contiguous()
    assert ((back.double() - x.double()).abs() <= bound).all()
    if x.dtype != torch.float64:
        assert ((q.dequantize(torch.float32).double() - x.double()).abs() <= q.error_bound(torch.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("group", "axis"), [(None, -1), (None, 1), (4, -1), (3, 0), (5, 1)])
def test_levels_are_the_nearest_on_each_groups_grid(dtype: torch.dtype, bits: int, group: int | None, axis: int) -> None:
    torch.manual_seed(1)
    x = (torch.randn(3, 7, 6) * 5 + torch.arange(6) * 10).to(dtype)
    q = quantize(x, bits, group, axis)
    slow = slow_round_trip(x, q)
    # Ties may fall either way in the type that computes; the distance to the original is what counts.
    error, best = (q.dequantize(torch.float64) - x.double()).abs(), (slow - x.double()).abs()
    torch.testing.assert_close(error, best, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_is_half_a_step_and_little_more(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = torch.rand(16, 64).to(dtype)
    q = quantize(x, bits, group=32)
    ideal = 1 / (254 if bits == 8 else 15) / 2
    assert q.error_bound(torch.float32).max() < 1.012 * ideal
    assert (q.dequantize(torch.float32).double() - x.double()).abs().max() > 0.4 * ideal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 1 / 3, -1e-7, 60000.0])
def test_equal_elements_come_back_exactly(dtype: torch.dtype, bits: int, value: float) -> None:
    x = torch.full((3, 5), value, dtype=torch.float64).to(dtype)
    assert torch.equal(quantize(x, bits, group=2).dequantize(), x)
    rows = torch.tensor([[value], [2.0], [0.0]]).to(dtype).expand(3, 5)
    assert torch.equal(quantize(rows, bits).dequantize(), rows)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_whole_range_of_half_types_stays_finite(bits: int) -> None:
    x = torch.tensor([-65504.0, 65504.0, 61000.0, 0.0], dtype=torch.float16)
    q = quantize(x, bits)
    assert ((q.dequantize().double() - x.double()).abs() <= q.error_bound()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_numbers_keep_the_bound(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = (torch.arange(9, dtype=torch.float64) * tiny).to(dtype)
    for bits in (8, 4):
        q = quantize(x, bits)
        assert ((q.dequantize().double() - x.double()).abs() <= q.error_bound()).all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 5)])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [None, 2])
def test_empty_tensors_round_trip(shape: tuple[int, ...], bits: int, group: int | None) -> None:
    for axis in range(len(shape)):
        q = quantize(torch.zeros(shape, dtype=torch.bfloat16), bits, group, axis)
        assert q.dequantize().shape == q.error_bound().shape == shape
        assert Quantized.from_tensors(q.tensors(), q.meta()).dequantize().dtype == torch.bfloat16


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
    assert quantize(x, 8, group=32).nbytes == x.numel() + x.numel() // 32 * per_group
    assert quantize(x, 4, group=32).nbytes == x.numel() // 2 + x.numel() // 32 * per_group
    assert quantize(x, 4, axis=-2).nbytes == x.numel() // 2 + x.numel() // 8 * per_group


def test_one_scale_per_channel_keeps_an_outlier_channel_from_hurting_the_others() -> None:
    torch.manual_seed(3)
    x = torch.randn(1, 2, 32, 16)
    x[..., 5] += 500
    per_channel, per_token = (quantize(x, 4, axis=axis).dequantize() for axis in (-2, -1))
    calm = torch.arange(16) != 5
    assert (per_channel - x)[..., calm].abs().max() < 0.5
    assert (per_token - x)[..., calm].abs().max() > 1


def test_quantising_again_changes_nothing_more() -> None:
    torch.manual_seed(4)
    once = quantize(torch.randn(4, 33), 4, group=8)
    again = quantize(once.dequantize(), 4, group=8)
    assert ((again.dequantize() - once.dequantize()).abs() <= again.error_bound()).all()
    assert (again.dequantize() - once.dequantize()).abs().max() < 1e-5


@pytest.mark.parametrize("bits", [8, 4])
def test_it_is_stored_in_safetensors_and_json(tmp_path, bits: int) -> None:
    x = torch.randn(2, 3, 7).to(torch.bfloat16)
    q = quantize(x, bits, group=4, axis=-2)
    save_file({name: tensor.contiguous() for name, tensor in q.tensors().items()}, tmp_path / "q.safetensors")
    (tmp_path / "q.json").write_text(json.dumps(q.meta()))
    back = Quantized.from_tensors(load_file(tmp_path / "q.safetensors"), json.loads((tmp_path / "q.json").read_text()))
    assert torch.equal(back.dequantize(), q.dequantize())
    assert back.meta() == q.meta()


WRONG_META = [{"shape": [2, 5]}, {"shape": [2, "3"]}, {"shape": None}, {"dtype": "int8"}, {"dtype": "float32"}, {"bits": 8}, {"bits": 3}]
WRONG_META += [{"group": 2}, {"group": 0}, {"axis": 0}, {"axis": 2}, {"axis": -1}]


@pytest.mark.parametrize("change", WRONG_META)
def test_meta_data_that_do_not_fit_the_tensors_are_refused(change: dict[str, object]) -> None:
    q = quantize(torch.randn(2, 3).to(torch.float16), 4)
    with pytest.raises(ArtifactError):
        Quantized.from_tensors(q.tensors(), {**q.meta(), **change})


@pytest.mark.parametrize("missing", ["data", "scale", "zero", "shape", "dtype", "bits", "group", "axis"])
def test_incomplete_storage_is_refused(missing: str) -> None:
    q = quantize(torch.randn(2, 3))
    kept_tensors = {name: value for name, value in q.tensors().items() if name != missing}
    kept_meta = {name: value for name, value in q.meta().items() if name != missing}
    with pytest.raises(ArtifactError, match=missing):
        Quantized.from_tensors(kept_tensors, kept_meta)


def test_moving_keeps_everything() -> None:
    q = quantize(torch.randn(3, 5), 4, group=2)
    moved = q.to("meta")
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}
    assert moved.meta() == q.meta()
    assert torch.equal(q.to("cpu").dequantize(), q.dequantize())


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"bits": 3}, "bits"),
        ({"bits": True}, "bits"),
        ({"group": 0}, "group"),
        ({"group": -4}, "group"),
        ({"group": 2.0}, "group"),
        ({"axis": 2}, "axis"),
        ({"axis": -3}, "axis"),
        ({"x": torch.zeros(2, 3, dtype=torch.long)}, "x"),
        ({"x": torch.zeros(2, 3, dtype=torch.complex64)}, "x"),
        ({"x": [1.0, 2.0]}, "x"),
        ({"x": torch.tensor(1.0)}, "axis"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], argument: str) -> None:
    with pytest.raises(ConfigError, match=f"^{argument}: expected"):
        quantize(**{"x": torch.zeros(2, 3), **arguments})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_values_are_refused_unless_unchecked(dtype: torch.dtype, bits: int, bad: float) -> None:
    x = torch.ones(2, 6, dtype=dtype)
    x[0, 3:] = torch.tensor([2, 3, 4])
    x[0, 2] = x[1, 4] = bad
    with pytest.raises(ConfigError, match=r"x: expected finite"):
        quantize(x, bits, group=3)
    unchecked = quantize(x, bits, group=3, check_finite=False)
    assert torch.equal(unchecked.dequantize()[1, :3], x[1, :3])
    assert ((unchecked.dequantize() - x).abs() <= unchecked.error_bound())[0, 3:].all()


def test_a_range_wider_than_the_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="finite difference"):
        quantize(torch.tensor([-3e38, 3e38]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_dequantising_to_no_float_is_refused(dtype: torch.dtype) -> None:
    q = quantize(torch.ones(3))
    for use in (q.dequantize, q.error_bound):
        with pytest.raises(ConfigError, match="dtype"):
            use(dtype)
