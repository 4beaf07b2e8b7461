"""The Triton back-end of `splice.py` equals decoding, shifting and writing one by one. Run by `test_splice_triton.py` in its own process.

On a machine without a GPU that process has TRITON_INTERPRET=1, which Triton and its own library must see when they are first imported.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.splice import splice
from tests.kernels.splice_cases import SLOTS, Case, assert_copies_bit_for_bit, assert_written, largest_of_float16
from tests.kernels.triton_process import DEVICE, moved

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = {
    "layers": st.integers(1, 3),
    "heads": st.integers(1, 3),
    "tokens": st.sampled_from([1, 15, 17, 33]),
    "dim": st.sampled_from([1, 2, 7, 16, 60]),
    "bits": st.sampled_from([8, 4, 0]),
    "group": st.sampled_from([None, 1, 3, 16, 100]),
    "stored": st.sampled_from([*DTYPES, torch.float64]),
    "dtype": st.sampled_from(DTYPES),
    "slots": st.sampled_from(SLOTS),
    "turn": st.sampled_from(["", "half", "interleaved"]),
    "fine": st.booleans(),
    "views": st.booleans(),
    "seed": st.integers(0, 1000),
}


def assert_splices(case: Case) -> None:
    """The kernel writes what it must into the case's buffers."""
    pool = torch.empty_like(case.pool, device=DEVICE).copy_(case.pool)
    splice(moved(case.packed), case.outs(pool), moved(case.slots), **moved(case.given), backend="triton")
    # Triton's interpreter truncates what it makes bfloat16; GPUs round.
    assert_written(case, pool, truncated=DEVICE == "cpu" and case.out_dtype == torch.bfloat16)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chosen=st.fixed_dictionaries(CASES))
def test_splicing_equals_decoding_shifting_and_writing_and_touches_nothing_else(chosen: dict[str, Any]) -> None:
    case = Case(**chosen)
    assert_splices(case)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 130])
@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize("turn", ["", "half"])
def test_splicing_equals_the_slow_way_at_lengths_about_a_block(tokens: int, bits: int, turn: str) -> None:
    case = Case(layers=1, tokens=tokens, dim=60, bits=bits, stored=torch.bfloat16, dtype=torch.bfloat16, turn=turn)
    assert_splices(case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_data_in_the_dtype_of_the_buffers_are_copied_bit_for_bit(dtype: torch.dtype) -> None:
    assert_copies_bit_for_bit(dtype, DEVICE, partial(splice, backend="triton"))


def test_numbers_beyond_float16_become_its_largest() -> None:
    assert largest_of_float16(DEVICE, partial(splice, backend="triton")).tolist() == [-65504, 65504, 65504]


def test_a_slot_beyond_a_row_does_not_reach_the_next_one() -> None:
    rows = torch.zeros(3, 2, 4, 8, device=DEVICE)
    data, slots = torch.ones(1, 2, 3, 8, device=DEVICE), torch.tensor([4, -1, 2], device=DEVICE)
    splice(Packed(data), [rows[1]], slots, backend="triton")
    assert rows[1, :, 2].all()
    assert int(rows.count_nonzero()) == 2 * 8
