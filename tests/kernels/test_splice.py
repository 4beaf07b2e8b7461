"""Splicing stored tokens into a running cache: each back-end equals decoding, shifting and writing one token at a time."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.kernels import splice as kernels
from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.splice import splice
from tests.kernels.splice_cases import CASES, Case, assert_copies_bit_for_bit, assert_written, largest_of_float16
from tests.kernels.triton_process import BACKEND, DEVICE, DTYPES, IN_TRITON, moved, of_triton

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")


def copies(packed: Packed) -> list[torch.Tensor]:
    return [part.clone() for part in packed[:3] if part is not None]


def assert_splices(case: Case) -> None:
    """The back-end writes what it must into a copy of the case's buffers."""
    pool = torch.empty_like(case.pool, device=DEVICE).copy_(case.pool)
    splice(moved(case.packed), case.outs(pool), moved(case.slots), **moved(case.given), backend=BACKEND)
    # Triton's interpreter truncates what it makes bfloat16; GPUs round.
    assert_written(case, pool, truncated=IN_TRITON and DEVICE == "cpu" and case.out_dtype == torch.bfloat16)


@pytest.mark.parametrize("block", [2**18] if IN_TRITON else [2**18, 64])
def test_splicing_equals_decoding_shifting_and_writing_and_touches_nothing_else(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", block)

    @settings(max_examples=60 if IN_TRITON else 150, deadline=None, derandomize=IN_TRITON)
    @given(chosen=st.fixed_dictionaries(CASES))
    def check(chosen: dict[str, Any]) -> None:
        case = Case(**chosen)
        before = copies(case.packed)
        assert_splices(case)
        assert all(map(torch.equal, copies(case.packed), before))

    check()


@pytest.mark.parametrize("tokens", [1, 15, 16, 63, 64, 65, 130])
@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splicing_equals_the_slow_way_at_lengths_about_a_block(
    tokens: int, bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 64 * 2 * 60)
    assert_splices(Case(layers=1, tokens=tokens, dim=60, bits=bits, group=16, stored=dtype, dtype=dtype, turn="half"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_data_in_the_dtype_of_the_buffers_are_copied_bit_for_bit(dtype: torch.dtype) -> None:
    assert_copies_bit_for_bit(dtype, DEVICE, partial(splice, backend=BACKEND))


def test_numbers_beyond_float16_become_its_largest() -> None:
    assert largest_of_float16(DEVICE, partial(splice, backend=BACKEND)).tolist() == [-65504, 65504, 65504]


@of_triton
def test_a_slot_beyond_a_row_does_not_reach_the_next_one() -> None:
    rows = torch.zeros(3, 2, 4, 8, device=DEVICE)
    data, slots = torch.ones(1, 2, 3, 8, device=DEVICE), torch.tensor([4, -1, 2], device=DEVICE)
    splice(Packed(data), [rows[1]], slots, backend="triton")
    assert rows[1, :, 2].all()
    assert int(rows.count_nonzero()) == 2 * 8
