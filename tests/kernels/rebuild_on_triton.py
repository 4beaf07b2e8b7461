"""The Triton back-end of `rebuild.py` equals decoding, rotating and writing one by one. Run by `test_rebuild_triton.py` in its own process.

On a machine without a GPU that process has TRITON_INTERPRET=1, which Triton and its own library must see when they are first imported.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.kernels import rebuild_triton
from hf_kvcaches.kernels.arguments import Decoder, RowSpan
from hf_kvcaches.kernels.rebuild import rebuild
from tests.kernels.rebuild_cases import PLACES, Case, assert_written, largest_of_float16
from tests.kernels.triton_process import DEVICE, moved

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = {
    "heads": st.sampled_from([1, 2, 3]),
    "tokens": st.sampled_from([1, 15, 17, 63]),
    "key_dim": st.sampled_from([1, 2, 7, 20, 60]),
    "value_dim": st.sampled_from([1, 5, 16, 80]),
    "width": st.sampled_from([None, 1, 31, 40]),
    "rank": st.sampled_from([None, 0, 1, 5, 33]),
    "shared": st.booleans(),
    "bias": st.just(True),
    "given": st.sampled_from([*DTYPES, torch.float64]),
    "weights": st.sampled_from([None, *DTYPES]),
    "dtype": st.sampled_from(DTYPES),
    "places": st.sampled_from(PLACES),
    "turn": st.sampled_from(["", "half", "interleaved"]),
    "rest": st.sampled_from([0, 1, 5]),
    "fine": st.booleans(),
    "views": st.booleans(),
    "seed": st.integers(0, 1000),
}


def assert_rebuilds(case: Case) -> None:
    """The kernel writes what it must into the case's buffers."""
    outs = [torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=DEVICE).copy_(out) for out in case.outs]
    rebuild(*moved(case.arguments()), *outs, case.spans, **moved(case.options), backend="triton")
    # Triton's interpreter truncates what it makes bfloat16; GPUs round.
    assert_written(case, outs, truncated=DEVICE == "cpu" and case.out_dtype == torch.bfloat16)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chosen=st.fixed_dictionaries(CASES))
def test_rebuilding_equals_the_slow_way_and_touches_nothing_else(chosen: dict[str, Any]) -> None:
    assert_rebuilds(Case(**chosen))


@pytest.mark.parametrize("turn", ["half", "interleaved"])
@pytest.mark.parametrize(("key_dim", "rest"), [(60, 0), (80, 0), (80, 48), (33, 1), (128, 64)])
def test_heads_of_any_size_turn_wholly_or_in_part(turn: str, key_dim: int, rest: int) -> None:
    assert_rebuilds(Case(heads=3, tokens=20, key_dim=key_dim, value_dim=24, rank=5, turn=turn, rest=rest))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_rebuilding_equals_the_slow_way_at_lengths_about_a_block(tokens: int) -> None:
    half = {"given": torch.bfloat16, "dtype": torch.bfloat16}
    assert_rebuilds(Case(heads=1, tokens=tokens, key_dim=60, value_dim=60, rank=33, turn="half", **half))


def test_rebuilding_a_long_prompt_equals_the_slow_way() -> None:
    assert_rebuilds(Case(heads=3, tokens=900, key_dim=20, value_dim=20, rank=33, shared=True, turn="half", places="cut"))


@pytest.mark.parametrize(("width", "rank", "bias"), [(None, 3, False), (8, None, False), (None, None, True), (0, 0, False)])
def test_any_term_may_be_missing(width: int | None, rank: int | None, bias: bool) -> None:
    assert_rebuilds(Case(width=width, rank=rank, bias=bias, turn="half"))


def test_float32_keeps_its_precision() -> None:
    """As it would not in the tensor cores' own type."""
    case = Case(heads=1, tokens=17, width=64, rank=64, places="one")
    outs = moved(tuple(case.outs))
    rebuild(*moved(case.arguments()), *outs, case.spans, backend="triton")
    for got, expected in zip(outs, case.expected(), strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, equal_nan=True, rtol=1e-6, atol=5e-6)


def test_numbers_beyond_float16_become_its_largest() -> None:
    assert largest_of_float16(DEVICE, partial(rebuild, backend="triton")) == [[65504, -65504, 3], [65504, 65504, 2]]


def test_layers_of_a_prompt_share_where_their_tokens_go() -> None:
    rebuild_triton._slots_of.cache_clear()
    spans, ones = [RowSpan(0, 0, 2)], torch.ones(2, 1, device=DEVICE)
    for _ in range(3):
        outs = [torch.zeros(1, 1, 2, 1, device=DEVICE) for _ in "kv"]
        rebuild(None, ones, Decoder(codes=torch.ones(1, 2, device=DEVICE)), *outs, spans, backend="triton")
    assert rebuild_triton._slots_of.cache_info().misses == 1
