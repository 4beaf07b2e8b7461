"""Splicing in PyTorch, and by the plain reference that other tests use: roundings, memory on the way, and where Triton is refused."""

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
from tests.kernels.reference_splice import splice as reference
from tests.kernels.splice_cases import CASES, Case, assert_copies_bit_for_bit, assert_written, largest_of_float16


@settings(max_examples=30, deadline=None)
@given(chosen=st.fixed_dictionaries(CASES))
def test_the_reference_equals_decoding_shifting_and_writing(chosen: dict[str, Any]) -> None:
    case = Case(**chosen)
    reference(case.packed, case.outs(case.pool), case.slots, **case.given)
    assert_written(case, case.pool)
    assert largest_of_float16("cpu", reference).tolist() == [-65504, 65504, 65504]
    assert_copies_bit_for_bit(torch.float32, "cpu", reference)


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


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("write", [splice, reference])
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
