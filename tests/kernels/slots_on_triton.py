"""The Triton back-end of `slots.py` equals the reference. Run by `test_slots_triton.py` in a process of its own.

On a machine without a GPU that process has TRITON_INTERPRET=1, which Triton and its own library must see when they are first imported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.kernels import slots_triton
from hf_kvcaches.kernels.arguments import SlotOptions
from hf_kvcaches.kernels.slots import slot_attention, write_slots
from tests.kernels import reference_slots as reference
from tests.kernels.cases import NAN
from tests.kernels.slots_cases import Case, assert_same, write_arguments
from tests.kernels.triton_process import moved

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")

CASES = {
    "batch": st.integers(1, 2),
    "kv_heads": st.integers(1, 2),
    "group": st.sampled_from([1, 3, 4, 8]),
    "slots": st.sampled_from([1, 15, 16, 17, 63, 65]),
    "dim": st.sampled_from([2, 10, 16, 60]),
    "value_dim": st.sampled_from([1, 16, 20]),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    "seed": st.integers(0, 1000),
    "poison": st.just(NAN),
}
OPTIONS = {
    "valid": st.just(True),
    "turn": st.sampled_from(["", "half", "interleaved"]),
    "softcap": st.sampled_from([None, 2.0]),
    "want_weights": st.booleans(),
    "sinks": st.booleans(),
}
FEW = settings(max_examples=10, deadline=None, derandomize=True)


def attend(query, keys, values, tables, slots, options, **tuning):
    """The launcher itself, which takes the number of splits and the size of a block as well."""
    got = slots_triton.attend(*moved((query, keys, values, tables)), slots, 0.3, moved(SlotOptions(**options)), **tuning)
    return tuple(None if part is None else part.cpu() for part in got)


@FEW
@given(shape=st.fixed_dictionaries(CASES), chosen=st.fixed_dictionaries(OPTIONS), splits=st.sampled_from([1, 2, 5]))
def test_attention_equals_the_reference(shape: dict[str, Any], chosen: dict[str, Any], splits: int) -> None:
    case = Case(**shape)
    options = case.options(**chosen)
    got = attend(case.query, case.keys, case.values, None, shape["slots"], options, splits=splits, block=16)
    assert not got[0].isnan().any()
    assert_same(got, reference.slot_attention(case.query, case.keys, case.values, 0.3, **options), case.dtype)


@FEW
@given(
    shape=st.fixed_dictionaries(CASES),
    chosen=st.fixed_dictionaries(OPTIONS),
    page=st.sampled_from([1, 7, 16]),
    splits=st.sampled_from([1, 3]),
)
def test_paged_attention_equals_the_reference(shape: dict[str, Any], chosen: dict[str, Any], page: int, splits: int) -> None:
    case = Case(**shape)
    options = case.options(**chosen)
    *pages, tables, valid = case.paged(page)
    options |= {"valid": valid}
    got = attend(case.query, *pages, tables, shape["slots"], options, splits=splits, block=16)
    assert not got[0].isnan().any()
    assert_same(got, reference.paged_attention(case.query, *pages, tables, 0.3, **options), case.dtype)


@pytest.mark.parametrize("slots", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_as_it_is_called_equals_the_reference(slots: int, group: int, dtype: torch.dtype) -> None:
    case = Case(batch=1, kv_heads=2, group=group, slots=slots, dim=60, value_dim=64, dtype=dtype)
    arguments = (case.query, case.keys, case.values, 60**-0.5)
    got = slot_attention(*moved(arguments), want_weights=True, backend="triton")
    got = tuple(part.cpu() for part in got)
    assert_same(got, reference.slot_attention(*arguments, want_weights=True), dtype)


def test_buffers_and_masks_may_be_repeated_or_lie_in_any_order() -> None:
    case = Case(slots=20)
    options = case.options(True, "half")
    options["valid"] = options["valid"][:1]
    keys, values = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (case.keys, case.values))
    got = attend(case.query, keys, values, None, 20, options)
    assert_same(got, reference.slot_attention(case.query, case.keys, case.values, 0.3, **options), case.dtype)


@FEW
@given(
    shape=st.fixed_dictionaries(CASES | {"slots": st.sampled_from([20])}),
    tokens=st.sampled_from([1, 3, 17]),
    paged=st.booleans(),
)
def test_writing_equals_the_reference_and_touches_nothing_else(shape: dict[str, Any], tokens: int, paged: bool) -> None:
    case = Case(**shape)
    where, *new = write_arguments(case, tokens)
    if paged:
        where[torch.rand(where.shape, generator=case.generator) < 0.3] = -1
    *buffers, tables, _ = case.paged(7) if paged else (case.keys, case.values, None, None)
    expected, given = [tensor.clone() for tensor in buffers], moved(tuple(tensor.clone() for tensor in buffers))
    write_slots(*given, *moved((where, *new)), tables=moved(tables), backend="triton")
    if paged:
        reference.write_pages(*expected, tables, where, *new)
    else:
        reference.write_slots(*expected, where, *new)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, equal_nan=True, atol=0, rtol=0)
