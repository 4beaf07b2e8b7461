"""Rebuilding a layer's keys and values from codes: both back-ends equal decoding, rotating and writing one token at a time."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels import rebuild as kernels
from hf_kvcaches.kernels.arguments import Decoder, RowSpan
from hf_kvcaches.kernels.rebuild import rebuild
from tests.kernels import reference_rebuild as reference
from tests.kernels.rebuild_cases import PLACES, Case, assert_written, largest_of_float16

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CASES = {
    "heads": st.sampled_from([1, 2, 3]),
    "tokens": st.sampled_from([0, 1, 2, 7, 17]),
    "key_dim": st.sampled_from([1, 2, 7, 8, 20]),
    "value_dim": st.sampled_from([1, 5, 8]),
    "width": st.sampled_from([None, 0, 1, 9]),
    "rank": st.sampled_from([None, 0, 1, 5]),
    "shared": st.booleans(),
    "bias": st.just(True),
    "given": st.sampled_from(DTYPES),
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


@pytest.mark.parametrize(("write", "block"), [(rebuild, 2**23), (rebuild, 100), (reference.rebuild, 0)])
def test_rebuilding_equals_the_slow_way_and_touches_nothing_else(write: Any, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", block)

    @settings(max_examples=150 if write is rebuild else 60, deadline=None)
    @given(chosen=st.fixed_dictionaries(CASES))
    def check(chosen: dict[str, Any]) -> None:
        case = Case(**chosen)
        before = tensors(case)
        write(*case.arguments(), *case.outs, case.spans, **case.options)
        assert_written(case, case.outs)
        assert all(map(torch.equal, tensors(case), before))

    check()


@pytest.mark.parametrize("turn", ["half", "interleaved"])
@pytest.mark.parametrize(("key_dim", "rest"), [(60, 0), (80, 0), (80, 48), (33, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_any_size_turn_wholly_or_in_part(turn: str, key_dim: int, rest: int, dtype: torch.dtype) -> None:
    case = Case(heads=3, tokens=63, key_dim=key_dim, value_dim=24, rank=33, turn=turn, rest=rest, given=dtype, dtype=dtype)
    rebuild(*case.arguments(), *case.outs, case.spans, **case.options)
    assert_written(case, case.outs)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 900])
def test_rebuilding_equals_the_slow_way_at_lengths_about_a_block(tokens: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(heads=3, tokens=tokens, rank=33, shared=shared, places="cut", turn="half")
    monkeypatch.setattr(kernels, "BLOCK", 64 * 3 * 16)
    rebuild(*case.arguments(), *case.outs, case.spans, **case.options)
    assert_written(case, case.outs)


@pytest.mark.parametrize("write", [rebuild, reference.rebuild])
@pytest.mark.parametrize(("width", "rank", "bias"), [(None, 3, False), (8, None, False), (None, None, True), (0, 0, False), (8, 3, False)])
def test_any_term_may_be_missing(width: int | None, rank: int | None, bias: bool, write: Any) -> None:
    case = Case(width=width, rank=rank, bias=bias, turn="half")
    write(*case.arguments(), *case.outs, case.spans, **case.options)
    assert_written(case, case.outs)


@pytest.mark.parametrize("write", [rebuild, reference.rebuild])
def test_numbers_beyond_float16_become_its_largest(write: Any) -> None:
    assert largest_of_float16("cpu", write) == [[65504, -65504, 3], [65504, 65504, 2]]


def test_half_precision_is_rounded_once() -> None:
    """2^-8 from the side, and as much from the codes, make a step of bfloat16 above 1, which either alone does not."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    decoder = Decoder(torch.full((1, 2), 2**-8, dtype=torch.bfloat16), torch.full((1, 2), 2**-8, dtype=torch.bfloat16), one[0].expand(2))
    outs = [torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16) for _ in "kv"]
    rebuild(one, one, decoder, *outs, [RowSpan(0, 0, 1)])
    assert [out.item() for out in outs] == [1 + 2**-7] * 2


@pytest.mark.parametrize("shared", [False, True])
def test_products_in_bfloat16_are_rounded_once_each_and_summed_up_in_float32(shared: bool) -> None:
    random = torch.Generator().manual_seed(5)
    side, codes, *weights = (torch.randn(shape, generator=random) for shape in ((9, 6), (20, 5), (6, 16), (5, 16), (16,)))
    rows = torch.arange(20) % 9
    decoder = Decoder(*weights)
    given = (side, {"side_rows": rows}) if shared else (side[rows], {})
    outs = [torch.zeros(1, 2, 20, 4) for _ in "kv"]
    rebuild(given[0], codes, decoder, *outs, [RowSpan(0, 0, 20)], product=torch.bfloat16, **given[1])
    products = [(x.bfloat16() @ part.bfloat16()).float() for x, part in ((side[rows], weights[0]), (codes, weights[1]))]
    expected = (products[0] + products[1] + weights[2]).unflatten(1, (2, 2, 4)).permute(1, 2, 0, 3)
    torch.testing.assert_close(torch.stack(outs)[:, 0], expected, rtol=1e-2, atol=1e-2)
    exact = (side[rows] @ weights[0] + codes @ weights[1] + weights[2]).unflatten(1, (2, 2, 4)).permute(1, 2, 0, 3)
    assert 0 < float((torch.stack(outs)[:, 0] - exact).norm()) < 2**-7 * float(exact.norm())


def test_weights_that_learn_leave_no_gradient() -> None:
    case = Case()
    decoder = Decoder(*(part.requires_grad_() for part in case.decoder if part is not None))
    rebuild(case.side, case.codes, decoder, *case.outs, case.spans)
    assert not any(out.requires_grad for out in case.outs)
    case.decoder = Decoder(*(part.detach() for part in decoder if part is not None))
    assert_written(case, case.outs)


def test_no_tokens_write_nothing() -> None:
    case = Case(tokens=0)
    rebuild(*case.arguments(), *case.outs, [])
    assert all(out.isnan().all() for out in case.outs)


def test_triton_is_refused_where_it_cannot_run() -> None:
    pytest.importorskip("triton")
    case, fine = Case(), Case(dtype=torch.float64)
    with pytest.raises(ConfigError, match="'torch' for tensors that are not on a CUDA device"):
        rebuild(*case.arguments(), *case.outs, case.spans, backend="triton")
    with pytest.raises(UnsupportedError, match="no gradients and no float64"):
        rebuild(*fine.arguments(), *fine.outs, fine.spans, backend="triton")


@pytest.mark.full
def test_the_wrapper_alone_imports_no_triton() -> None:
    code = f"import sys, {kernels.__name__}; print('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
