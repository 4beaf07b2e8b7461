"""Attention over slots and writing into them: each back-end equals the plain reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.kernels.arguments import SlotOptions
from hf_kvcaches.kernels.slots import slot_attention, write_slots
from tests.kernels import reference_slots as reference
from tests.kernels.cases import NAN
from tests.kernels.slots_cases import Case, assert_same, write_arguments
from tests.kernels.triton_process import BACKEND, DTYPES, IN_TRITON, moved

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")

CASES = {
    "batch": st.integers(1, 2 if IN_TRITON else 3),
    "kv_heads": st.integers(1, 2 if IN_TRITON else 3),
    "group": st.sampled_from([1, 2, 3, 4, 8]),
    "slots": st.sampled_from([1, 15, 16, 17, 63, 65] if IN_TRITON else [1, 2, 7, 19]),
    "dim": st.sampled_from([2, 10, 16, 60] if IN_TRITON else [2, 6, 8, 20]),
    "value_dim": st.sampled_from([1, 16, 20]),
    "dtype": st.sampled_from([dtype for dtype in DTYPES if dtype != torch.float16]),
    "seed": st.integers(0, 1000),
    "poison": st.just(NAN if IN_TRITON else 0.0),
}
OPTIONS = {
    "valid": st.just(True) if IN_TRITON else st.booleans(),
    "turn": st.sampled_from(["", "half", "interleaved"]),
    "softcap": st.sampled_from([None, 2.0]),
    "want_weights": st.booleans(),
    "sinks": st.booleans(),
}
EXAMPLES = settings(max_examples=10, deadline=None, derandomize=True) if IN_TRITON else settings(deadline=None)


def attend(query: Any, keys: Any, values: Any, tables: Any, slots: int, options: Any, splits: int | None = None) -> Any:
    """The function in PyTorch, or Triton's launcher itself, which takes the number of splits and the size of a block as well."""
    if not IN_TRITON:
        return slot_attention(query, keys, values, 0.3, tables=tables, **options)
    from hf_kvcaches.kernels import slots_triton

    tuning = {} if splits is None else {"splits": splits, "block": 16}
    got = slots_triton.attend(*moved((query, keys, values, tables)), slots, 0.3, moved(SlotOptions(**options)), **tuning)
    return tuple(None if part is None else part.cpu() for part in got)


@EXAMPLES
@given(shape=st.fixed_dictionaries(CASES), chosen=st.fixed_dictionaries(OPTIONS), splits=st.sampled_from([1, 2, 5]))
def test_attention_equals_the_reference(shape: dict[str, Any], chosen: dict[str, Any], splits: int) -> None:
    case = Case(**shape)
    options = case.options(**chosen)
    got = attend(case.query, case.keys, case.values, None, shape["slots"], options, splits)
    assert got[0].shape == (shape["batch"], 1, case.query.shape[1], shape["value_dim"])
    assert not got[0].isnan().any()
    assert_same(got, reference.slot_attention(case.query, case.keys, case.values, 0.3, **options), case.dtype)


@EXAMPLES
@given(
    shape=st.fixed_dictionaries(CASES),
    chosen=st.fixed_dictionaries(OPTIONS | {"valid": st.just(True)}),
    page=st.sampled_from([1, 3, 7, 16]),
    splits=st.sampled_from([1, 3]),
)
def test_paged_attention_equals_the_reference_with_unreadable_invalid_slots(
    shape: dict[str, Any], chosen: dict[str, Any], page: int, splits: int
) -> None:
    case = Case(**shape)
    options = case.options(**chosen)
    *pages, tables, valid = case.paged(page)
    options |= {"valid": valid}
    got = attend(case.query, *pages, tables, shape["slots"], options, splits)
    assert not got[0].isnan().any()
    assert_same(got, reference.paged_attention(case.query, *pages, tables, 0.3, **options), case.dtype)
    assert_same(got, reference.slot_attention(case.query, case.keys, case.values, 0.3, **options), case.dtype)


@pytest.mark.parametrize("slots", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_as_it_is_called_equals_the_reference(slots: int, group: int, dtype: torch.dtype) -> None:
    case = Case(batch=1, kv_heads=2, group=group, slots=slots, dim=60, value_dim=64, dtype=dtype)
    arguments = (case.query, case.keys, case.values, 60**-0.5)
    got = slot_attention(*moved(arguments), want_weights=True, backend=BACKEND)
    assert_same(tuple(part.cpu() for part in got), reference.slot_attention(*arguments, want_weights=True), dtype)


def test_buffers_and_masks_may_be_repeated_or_lie_in_any_order() -> None:
    case = Case(slots=20)
    options = case.options(True, "half")
    options["valid"] = options["valid"][:1]
    keys, values = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (case.keys, case.values))
    got = attend(case.query, keys, values, None, 20, options)
    assert_same(got, reference.slot_attention(case.query, case.keys, case.values, 0.3, **options), case.dtype)


@EXAMPLES
@given(
    shape=st.fixed_dictionaries(CASES | {"slots": st.sampled_from([20])}),
    tokens=st.sampled_from([1, 3, 17]),
    kind=st.sampled_from(["flat", "shared", "pages", "pages in another order"]),
    skipped=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_writing_equals_the_reference_and_touches_nothing_else(shape: dict[str, Any], tokens: int, kind: str, skipped: float) -> None:
    case = Case(**shape)
    paged = kind.startswith("pages")
    where, *new = write_arguments(case, tokens, kind == "shared")
    if paged:
        where[torch.rand(where.shape, generator=case.generator) < skipped] = -1
    *buffers, tables, _ = case.paged(7) if paged else (*(torch.full_like(each, NAN) for each in (case.keys, case.values)), None, None)
    if "another order" in kind:
        buffers = [pool.transpose(0, 1).contiguous().transpose(0, 1) for pool in buffers]
    expected, given = [tensor.clone() for tensor in buffers], moved(tuple(tensor.clone() for tensor in buffers))
    write_slots(*given, *moved((where, *new)), tables=moved(tables), backend=BACKEND)
    if paged:
        reference.write_pages(*expected, tables, where, *new)
    else:
        reference.write_slots(*expected, where, *new)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, equal_nan=True, atol=0, rtol=0)
