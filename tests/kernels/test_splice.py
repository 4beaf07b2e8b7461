"""Splicing stored tokens into a running cache: both back-ends equal decoding, shifting and writing one token at a time."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels import splice as kernels
from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.splice import splice
from tests.kernels import reference_splice as reference
from tests.kernels.splice_cases import SLOTS, Case, assert_copies_bit_for_bit, assert_written, largest_of_float16

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CASES = {
    "layers": st.integers(1, 3),
    "heads": st.integers(1, 3),
    "tokens": st.sampled_from([1, 2, 7, 17]),
    "dim": st.sampled_from([1, 2, 7, 8, 20]),
    "bits": st.sampled_from([8, 4, 0]),
    "group": st.sampled_from([None, 1, 3, 4, 30]),
    "stored": st.sampled_from(DTYPES),
    "dtype": st.sampled_from(DTYPES),
    "slots": st.sampled_from(SLOTS),
    "turn": st.sampled_from(["", "half", "interleaved"]),
    "fine": st.booleans(),
    "views": st.booleans(),
    "seed": st.integers(0, 1000),
}


def copies(packed: Packed) -> list[torch.Tensor]:
    return [part.clone() for part in packed[:3] if part is not None]


@pytest.mark.parametrize(("write", "block"), [(splice, 2**18), (splice, 64), (reference.splice, 0)])
def test_splicing_equals_decoding_shifting_and_writing_and_touches_nothing_else(write: Any, block: int, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", block)

    @settings(max_examples=150 if write is splice else 30, deadline=None)
    @given(chosen=st.fixed_dictionaries(CASES))
    def check(chosen: dict[str, Any]) -> None:
        case = Case(**chosen)
        pool, before = case.pool.clone(), copies(case.packed)
        write(case.packed, case.outs(pool), case.slots, **case.given)
        assert_written(case, pool)
        assert all(map(torch.equal, copies(case.packed), before))

    check()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splicing_equals_the_slow_way_at_lengths_about_a_block(tokens: int, bits: int, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 64 * 2 * 60)
    case = Case(layers=1, tokens=tokens, dim=60, bits=bits, group=16, stored=dtype, dtype=dtype, turn="half")
    splice(case.packed, case.outs(case.pool), case.slots, **case.given)
    assert_written(case, case.pool)


@pytest.mark.parametrize("turn", ["half", "interleaved"])
@pytest.mark.parametrize("bits", [8, 4, 0])
def test_nothing_is_made_on_the_way_that_is_larger_than_a_block(bits: int, turn: str, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 512)
    case = Case(layers=3, heads=2, tokens=40, dim=16, bits=bits, turn=turn)
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            known = {part.untyped_storage().data_ptr() for part in args if isinstance(part, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
                made.append(out.numel())
            return out

    with Watch():
        splice(case.packed, case.outs(case.pool), case.slots, **case.given)
    assert 0 < max(made) <= 512
    assert_written(case, case.pool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("write", [splice, reference.splice])
def test_plain_data_in_the_dtype_of_the_buffers_are_copied_bit_for_bit(dtype: torch.dtype, write: Any) -> None:
    assert_copies_bit_for_bit(dtype, "cpu", write)


@pytest.mark.parametrize("write", [splice, reference.splice])
def test_numbers_beyond_float16_become_its_largest(write: Any) -> None:
    assert largest_of_float16("cpu", write).tolist() == [-65504, 65504, 65504]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("write", [splice, reference.splice])
def test_a_group_of_equal_numbers_comes_back_exactly(bits: int, write: Any) -> None:
    width = 8 if bits == 8 else 4
    data = torch.full((1, 1, 3, width), -127 if bits == 8 else 0, dtype=torch.int8 if bits == 8 else torch.uint8)
    zero = torch.tensor([0.1, -70.3, 1e-5]).view(1, 1, 3, 1)
    out = torch.zeros(1, 3, 8)
    write(Packed(data, torch.zeros_like(zero), zero), [out], torch.arange(3))
    assert torch.equal(out, zero[0].expand(1, 3, 8))


def test_tokens_in_a_run_of_slots_and_in_scattered_ones_are_the_same_to_the_last_bit() -> None:
    case = Case(tokens=12, dim=64, turn="half", dtype=torch.bfloat16, slots="run")
    run, scattered = (torch.zeros(2, 2, 19, 64, dtype=torch.bfloat16) for _ in range(2))
    splice(case.packed, list(run), case.slots, **case.given)
    slots = case.slots[torch.randperm(12, generator=case.generator)]
    splice(case.packed, list(scattered), slots, **case.given)
    assert torch.equal(run[:, :, case.slots], scattered[:, :, slots])


def test_no_tokens_and_no_layers_write_nothing() -> None:
    case = Case()
    none = Packed(*(part[:, :, :0] for part in case.packed[:3]))
    splice(none, case.outs(case.pool), case.slots[:0], cos=torch.zeros(0, 4), sin=torch.zeros(0, 4))
    assert case.pool.isnan().all()
    splice(Packed(*(part[:0] for part in case.packed[:3])), [], case.slots)


def test_layers_may_have_buffers_of_different_capacities() -> None:
    case = Case(slots="run")
    expected = case.pool.clone()
    splice(case.packed, case.outs(expected), case.slots)
    outs = case.outs(case.pool)
    longer = torch.cat([outs[1], torch.ones(2, 4, 8)], 1)
    splice(case.packed, [outs[0], longer], case.slots)
    torch.testing.assert_close(torch.stack([outs[0], longer[:, :-4]]), torch.stack(case.outs(expected)), equal_nan=True)
    assert (longer[:, -4:] == 1).all()


def test_triton_is_refused_where_it_cannot_run() -> None:
    pytest.importorskip("triton")
    case, fine = Case(), Case(dtype=torch.float64)
    with pytest.raises(ConfigError, match="'torch' for tensors that are not on a CUDA device"):
        splice(case.packed, case.outs(case.pool), case.slots, backend="triton")
    with pytest.raises(UnsupportedError, match="no gradients and no float64"):
        splice(fine.packed, fine.outs(fine.pool), fine.slots, backend="triton")


@pytest.mark.full
def test_the_wrapper_alone_imports_no_triton() -> None:
    code = f"import sys, {kernels.__name__}; print('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
