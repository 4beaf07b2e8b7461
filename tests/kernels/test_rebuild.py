"""Rebuilding a layer's keys and values from codes: each back-end equals decoding, rotating and writing one token at a time."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.kernels import rebuild as kernels
from hf_kvcaches.kernels.rebuild import rebuild
from tests.kernels.rebuild_cases import PLACES, Case, assert_written, largest_of_float16
from tests.kernels.triton_process import BACKEND, DEVICE, DTYPES, IN_TRITON, moved

CASES = {
    "heads": st.sampled_from([1, 2, 3]),
    "tokens": st.sampled_from([1, 2, 7, 15, 17, 63] if IN_TRITON else [0, 1, 2, 7, 17]),
    "key_dim": st.sampled_from([1, 2, 7, 20, 60]),
    "value_dim": st.sampled_from([1, 5, 16, 80]),
    "width": st.sampled_from([None, 1, 9, 31, 40] if IN_TRITON else [None, 0, 1, 9]),
    "rank": st.sampled_from([None, 0, 1, 5, 33]),
    "shared": st.booleans(),
    "bias": st.just(True),
    "given": st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    "weights": st.sampled_from([None, *DTYPES]),
    "dtype": st.sampled_from(DTYPES),
    "places": st.sampled_from(PLACES),
    "turn": st.sampled_from(["", "half", "interleaved"]),
    "rest": st.sampled_from([0, 1, 5]),
    "fine": st.booleans(),
    "views": st.booleans(),
    "seed": st.integers(0, 1000),
}

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")


def tensors(case: Case) -> list[torch.Tensor]:
    """Copies of all that is only read."""
    given = [case.side, case.codes, *case.decoder, *(case.options.get(name) for name in ("cos", "sin"))]
    return [part.clone() for part in given if part is not None]


def rebuilt(case: Case) -> list[torch.Tensor]:
    """The case's buffers, on the device that they are written on."""
    outs = [torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=DEVICE).copy_(out) for out in case.outs]
    rebuild(*moved(case.arguments()), *outs, case.spans, **moved(case.options), backend=BACKEND)
    return outs


def assert_rebuilds(case: Case) -> None:
    # Triton's interpreter truncates what it makes bfloat16; GPUs round.
    assert_written(case, rebuilt(case), truncated=IN_TRITON and DEVICE == "cpu" and case.out_dtype == torch.bfloat16)


@pytest.mark.parametrize("block", [2**23] if IN_TRITON else [2**23, 100])
def test_rebuilding_equals_the_slow_way_and_touches_nothing_else(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", block)

    @settings(max_examples=60 if IN_TRITON else 100, deadline=None, derandomize=IN_TRITON)
    @given(chosen=st.fixed_dictionaries(CASES))
    def check(chosen: dict[str, Any]) -> None:
        case = Case(**chosen)
        before = tensors(case)
        assert_rebuilds(case)
        assert all(map(torch.equal, tensors(case), before))

    check()


@pytest.mark.parametrize("turn", ["half", "interleaved"])
@pytest.mark.parametrize(("key_dim", "rest"), [(60, 0), (80, 0), (80, 48), (33, 1), (128, 64)])
def test_heads_of_any_size_turn_wholly_or_in_part(turn: str, key_dim: int, rest: int) -> None:
    assert_rebuilds(Case(heads=3, tokens=20, key_dim=key_dim, value_dim=24, rank=33, turn=turn, rest=rest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_rebuilding_equals_the_slow_way_at_lengths_about_a_block(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 64 * 3 * 16)
    assert_rebuilds(Case(heads=1, tokens=tokens, key_dim=60, value_dim=60, rank=33, turn="half", given=dtype, dtype=dtype))


@pytest.mark.parametrize("shared", [False, True])
def test_rebuilding_a_long_prompt_equals_the_slow_way(shared: bool) -> None:
    assert_rebuilds(Case(heads=3, tokens=900, key_dim=20, value_dim=20, rank=33, shared=shared, turn="half", places="cut"))


@pytest.mark.parametrize(("width", "rank", "bias"), [(None, 3, False), (8, None, False), (None, None, True), (0, 0, False), (8, 3, False)])
def test_any_term_may_be_missing(width: int | None, rank: int | None, bias: bool) -> None:
    assert_rebuilds(Case(width=width, rank=rank, bias=bias, turn="half"))


def test_float32_keeps_its_precision() -> None:
    """As it would not in the tensor cores' own type."""
    case = Case(heads=1, tokens=17, width=64, rank=64, places="one")
    for got, expected in zip(rebuilt(case), case.expected(), strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, equal_nan=True, rtol=1e-6, atol=5e-6)


def test_numbers_beyond_float16_become_its_largest() -> None:
    assert largest_of_float16(DEVICE, partial(rebuild, backend=BACKEND)) == [[65504, -65504, 3], [65504, 65504, 2]]
