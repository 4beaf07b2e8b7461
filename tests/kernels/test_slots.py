"""Attention over slots and writing into them: the PyTorch back-end equals the plain reference, and the reference equals PyTorch."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels import slots as kernels
from hf_kvcaches.kernels.arguments import RotationTables
from hf_kvcaches.kernels.slots import slot_attention, write_slots
from tests.kernels import reference_slots as reference
from tests.kernels.cases import NAN
from tests.kernels.slots_cases import Case, assert_same, write_arguments

CASES = {
    "batch": st.integers(1, 3),
    "kv_heads": st.integers(1, 3),
    "group": st.sampled_from([1, 2, 3, 8]),
    "slots": st.sampled_from([1, 2, 7, 19]),
    "dim": st.sampled_from([2, 6, 8, 20]),
    "value_dim": st.sampled_from([1, 8, 12]),
    "dtype": st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    "seed": st.integers(0, 1000),
}
OPTIONS = {
    "valid": st.booleans(),
    "turn": st.sampled_from(["", "half", "interleaved"]),
    "softcap": st.sampled_from([None, 2.0]),
    "want_weights": st.booleans(),
    "sinks": st.booleans(),
}


@given(shape=st.fixed_dictionaries(CASES), chosen=st.fixed_dictionaries(OPTIONS))
def test_attention_equals_the_reference(shape: dict[str, Any], chosen: dict[str, Any]) -> None:
    case = Case(**shape)
    options = case.options(**chosen)
    arguments = (case.query, case.keys, case.values, 0.3)
    got = slot_attention(*arguments, **options)
    assert got[0].shape == (shape["batch"], 1, case.query.shape[1], shape["value_dim"])
    assert_same(got, reference.slot_attention(*arguments, **options), case.dtype)


@pytest.mark.parametrize("slots", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_the_reference_at_lengths_about_a_block(slots: int, dtype: torch.dtype) -> None:
    case = Case(batch=1, kv_heads=2, group=3, slots=slots, dim=60, value_dim=20, dtype=dtype)
    options = case.options(True, "")
    arguments = (case.query, case.keys, case.values, 60**-0.5)
    assert_same(reference.slot_attention(*arguments, **options), slot_attention(*arguments, **options), dtype)


@given(
    shape=st.fixed_dictionaries(CASES),
    chosen=st.fixed_dictionaries(OPTIONS | {"valid": st.just(True)}),
    page=st.sampled_from([1, 3, 16]),
)
def test_paged_attention_equals_the_reference_with_unreadable_invalid_slots(
    shape: dict[str, Any], chosen: dict[str, Any], page: int
) -> None:
    case = Case(**shape)
    options = case.options(**chosen)
    *pages, tables, valid = case.paged(page)
    options |= {"valid": valid}
    got = slot_attention(case.query, *pages, 0.3, tables=tables, **options)
    assert not got[0].isnan().any()
    assert_same(got, reference.paged_attention(case.query, *pages, tables, 0.3, **options), case.dtype)
    assert_same(got, reference.slot_attention(case.query, case.keys, case.values, 0.3, **options), case.dtype)


@pytest.mark.parametrize("page", [4, 8])
@pytest.mark.parametrize("slots", [16, 19])
def test_paged_and_flat_attention_are_equal_to_the_last_bit(page: int, slots: int) -> None:
    case = Case(slots=slots, dim=64, group=4)
    *pages, tables, valid = case.paged(page)
    options = {"valid": valid, "want_weights": True}
    flat = slot_attention(case.query, case.keys, case.values, 0.125, **options)
    paged = slot_attention(case.query, *pages, 0.125, tables=tables, **options)
    assert torch.equal(flat[0], paged[0])
    assert torch.equal(flat[1], paged[1])


@pytest.mark.parametrize("valid", [False, True])
def test_the_reference_equals_pytorch(valid: bool) -> None:
    case = Case(group=3, slots=17, dtype=torch.float64)
    case.valid[..., -1] = True
    options = case.options(valid, "", want_weights=False)
    mask = case.valid.repeat_interleave(3, 1).unsqueeze(2) if valid else None
    keys, values = (tensor.repeat_interleave(3, 1) for tensor in (case.keys, case.values))
    expected = torch.nn.functional.scaled_dot_product_attention(case.query, keys, values, attn_mask=mask, scale=0.3)
    got = reference.slot_attention(case.query, case.keys, case.values, 0.3, **options)
    torch.testing.assert_close(got[0], expected.transpose(1, 2))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("attend", [slot_attention, reference.slot_attention])
def test_rotating_keys_on_the_way_equals_keys_that_were_rotated_pair_by_pair_before(layout: str, attend: Any) -> None:
    case = Case(dim=8, dtype=torch.float64)
    turn = case.options(False, layout)["rotation"]
    pairs = turn.cos.shape[-1]
    turned = case.keys.clone()
    for s, i in ((s, i) for s in range(9) for i in range(pairs)):
        a, b = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        for row in range(2):
            angle = turn.positions[row, 0, s]
            number = torch.complex(turn.cos[angle, i], turn.sin[angle, i]) * torch.complex(case.keys[row, :, s, a], case.keys[row, :, s, b])
            turned[row, :, s, a], turned[row, :, s, b] = number.real, number.imag
    got = attend(case.query, case.keys, case.values, 0.3, rotation=turn)[0]
    torch.testing.assert_close(got, slot_attention(case.query, turned, case.values, 0.3)[0])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [12, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_for_each_dimension_give_the_attention_of_those_for_each_pair(layout: Any, rotary_dim: int, dtype: torch.dtype) -> None:
    case = Case(slots=19, dim=20, dtype=dtype)
    angles = torch.rand((40, rotary_dim // 2), generator=case.generator) * 6
    positions = torch.where(case.valid, torch.randint(0, 40, case.shape, generator=case.generator), -1)
    rotation = RotationTables(positions, angles.cos(), angles.sin(), layout)
    # Tables of both dimensions of each pair: all first ones before all second ones, or in turns.
    axis = 1 if layout == "half" else 2
    cos, sin = (torch.stack(tables, axis).flatten(1) for tables in ([rotation.cos, rotation.cos], [-rotation.sin, rotation.sin]))
    arguments, options = (case.query, case.keys, case.values, 0.3), {"valid": case.valid, "want_weights": True}
    got = slot_attention(*arguments, **options, rotation=rotation._replace(full=torch.cat([cos, sin], 1)), backend="torch")
    assert_same(got, slot_attention(*arguments, **options, rotation=rotation, backend="torch"), dtype)


def test_weights_of_a_row_sum_to_one_and_a_row_without_valid_slots_gives_zeros() -> None:
    case = Case(group=3)
    output, weights = slot_attention(case.query, case.keys, case.values, 0.3, **case.options(True, ""))
    assert weights is not None
    torch.testing.assert_close(weights.sum(-1), case.valid.any(-1).float())
    assert not output[0, 0, :3].any()
    assert not weights[~case.valid].any()


def test_keys_of_invalid_slots_may_hold_anything() -> None:
    case = Case()
    before = slot_attention(case.query, case.keys, case.values, 0.3, valid=case.valid)[0]
    case.keys[~case.valid] = NAN
    assert torch.equal(slot_attention(case.query, case.keys, case.values, 0.3, valid=case.valid)[0], before)


def test_the_order_of_slots_does_not_matter() -> None:
    case = Case(slots=30, dtype=torch.float64)
    shuffled = torch.randperm(30, generator=case.generator)
    output, weights = slot_attention(case.query, case.keys, case.values, 0.3, valid=case.valid, want_weights=True)
    arguments = (case.query, case.keys[:, :, shuffled], case.values[:, :, shuffled], 0.3)
    other = slot_attention(*arguments, valid=case.valid[..., shuffled], want_weights=True)
    assert weights is not None
    torch.testing.assert_close(other[0], output)
    torch.testing.assert_close(other[1], weights[..., shuffled])


@pytest.mark.parametrize("turn", ["", "half", "interleaved"])
def test_attention_has_gradients_also_of_a_row_without_valid_slots(turn: str) -> None:
    case = Case(batch=1, slots=5, dim=6, dtype=torch.float64)
    options = case.options(True, turn, softcap=3.0, want_weights=False)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return slot_attention(*tensors, 0.3, **options)[0]

    assert torch.autograd.gradcheck(attend, [tensor.requires_grad_() for tensor in (case.query, case.keys, case.values)])


def test_everything_runs_as_one_compiled_graph() -> None:
    case = Case(slots=8, dim=6)
    options = case.options(True, "half", softcap=3.0)
    *pages, tables, valid = case.paged(4)
    where, *new = write_arguments(case, 2)
    where_pages = where.clone()
    where_pages[0] = -1

    def step(keys: torch.Tensor, values: torch.Tensor, *pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        write_slots(keys, values, where, *new)
        write_slots(*pages, where_pages, *new, tables=tables)
        flat = slot_attention(case.query, keys, values, 0.3, **options)
        return *flat, slot_attention(case.query, *pages, 0.3, tables=tables, valid=valid)[0]

    def buffers() -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (case.keys, case.values, *pages)]

    eager, compiled = buffers(), buffers()
    expected = step(*eager)
    got = torch.compile(step, fullgraph=True, backend="eager")(*compiled)
    for one, other in zip((*got, *compiled), (*expected, *eager), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("layout", ["transposed", "reserve"])
def test_buffers_may_lie_in_memory_in_any_order(layout: str) -> None:
    case = Case()
    given = []
    for tensor in (case.keys, case.values):
        if layout == "transposed":
            given.append(tensor.transpose(1, 2).contiguous().transpose(1, 2))
        else:
            larger = torch.full((*tensor.shape[:2], tensor.shape[2] + 5, tensor.shape[3]), NAN)
            larger[:, :, : tensor.shape[2]] = tensor
            given.append(larger[:, :, : tensor.shape[2]])
    expected = slot_attention(case.query, case.keys, case.values, 0.3)
    assert_same(slot_attention(case.query, *given, 0.3), expected, case.dtype)


@given(
    shape=st.fixed_dictionaries(CASES | {"slots": st.sampled_from([3, 8])}),
    tokens=st.integers(1, 3),
    shared=st.booleans(),
)
def test_writing_equals_the_reference_and_touches_nothing_else(shape: dict[str, Any], tokens: int, shared: bool) -> None:
    case = Case(**shape)
    arguments = write_arguments(case, tokens, shared)
    buffers = [torch.full_like(tensor, NAN) for tensor in (case.keys, case.values)]
    expected = [tensor.clone() for tensor in buffers]
    write_slots(*buffers, *arguments)
    reference.write_slots(*expected, *arguments)
    for one, other in zip(buffers, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, atol=0, rtol=0)
        assert int((~one[0, 0, :, 0].isnan()).sum()) == tokens


@given(
    shape=st.fixed_dictionaries(CASES | {"slots": st.sampled_from([3, 8])}),
    tokens=st.integers(1, 3),
    skipped=st.sampled_from(["some", "none", "all"]),
    contiguous=st.booleans(),
)
def test_writing_pages_equals_the_reference_and_skips(shape, tokens: int, skipped: str, contiguous: bool) -> None:
    case = Case(**shape)
    where, *new = write_arguments(case, tokens)
    if skipped != "none":
        where[torch.rand(where.shape, generator=case.generator) < (0.5 if skipped == "some" else 2)] = -1
    *pages, tables, _ = case.paged(4)
    if not contiguous:
        pages = [pool.transpose(0, 1).contiguous().transpose(0, 1) for pool in pages]
    expected = [pool.clone() for pool in pages]
    write_slots(*pages, where, *new, tables=tables)
    reference.write_pages(*expected, tables, where, *new)
    for one, other in zip(pages, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, atol=0, rtol=0)


def test_backends_that_cannot_run_are_refused() -> None:
    pytest.importorskip("triton")
    case = Case()
    with pytest.raises(ConfigError, match=r"^backend: expected"):
        slot_attention(case.query, case.keys, case.values, 0.3, backend="cuda")
    with pytest.raises(ConfigError, match="'torch' for tensors that are not on a CUDA device"):
        slot_attention(case.query, case.keys, case.values, 0.3, backend="triton")
    with pytest.raises(UnsupportedError, match="no gradients and no float64"):
        slot_attention(case.query.requires_grad_(), case.keys, case.values, 0.3, backend="triton")


@pytest.mark.full
def test_the_wrapper_alone_imports_no_triton() -> None:
    code = f"import sys, {kernels.__name__}; print('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
