"""Splicing stored tokens into a running cache: each back-end equals decoding, shifting and writing one token at a time."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.kernels import splice as kernels
from hf_kvcaches.kernels.quantization import Packed, quantize
from hf_kvcaches.kernels.splice import splice
from tests.kernels.cases import NAN, Draws, restored
from tests.kernels.triton_process import BACKEND, DEVICE, DTYPES, IN_TRITON, moved, of_triton

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")

CASES = {
    "layers": st.integers(1, 3),
    "heads": st.integers(1, 3),
    "tokens": st.sampled_from([1, 2, 7, 15, 16, 17, 33, 65] if IN_TRITON else [1, 2, 7, 17, 65]),
    "dim": st.sampled_from([1, 2, 7, 16, 20, 60] if IN_TRITON else [1, 2, 7, 8, 20]),
    "bits": st.sampled_from([8, 4, 0]),
    "group": st.sampled_from([None, 1, 3, 16, 100]),
    "stored": st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    "dtype": st.sampled_from(DTYPES),
    "slots": st.sampled_from(["run", "backwards", "scattered"]),
    "turn": st.sampled_from(["", "half", "interleaved"]),
    "fine": st.booleans(),
    "views": st.booleans(),
    "seed": st.integers(0, 1000),
}


class Case(Draws):
    """Tokens of several layers as they are stored, and buffers that hold nothing but NaN.

    With 0 bits data are plain; tokens were of the dtype `stored`, buffers are of `dtype`; `group` channels share a scale. With `fine`
    tables are float64, and with `views` every tensor is part of a larger one, in another order.
    """

    def __init__(
        self, layers=2, heads=2, tokens=5, dim=8, bits=8, group=None, stored=torch.float32, dtype=torch.float32,
        slots="scattered", turn="", fine=False, views=False, seed=0,
    ) -> None:  # fmt: skip
        super().__init__(layers, heads, tokens, stored, seed)
        self.out_dtype, self.exact = dtype, torch.promote_types(dtype, torch.float32)
        x = self.randn(layers, heads, tokens, dim) * 3 + self.randn(dim) * 9  # channels of keys sit far off 0
        self.packed = Packed(*quantize(x, bits, group), group) if bits else Packed(x)
        self.decoded = restored(x, bits, group, self.exact) if bits else x.to(self.exact)
        start = int(torch.randint(0, 8, (), generator=self.generator))
        run = torch.arange(start, start + tokens)
        scattered = torch.randperm(tokens + 7, generator=self.generator)[:tokens]
        self.slots = {"run": run, "backwards": run.flip(0), "scattered": scattered}[slots]
        self.given: dict[str, Any] = {}
        self.geometry = None
        if turn and dim > 1:
            frequencies = torch.rand(max(1, dim // 3), generator=self.generator, dtype=torch.float64)
            self.geometry = RotaryGeometry(frequencies, dim, layout=turn)  # type: ignore[arg-type]
            self.delta = torch.randint(-900, 900, (tokens,), generator=self.generator)
            cos, sin = self.geometry.cos_sin(self.delta, torch.float64 if fine else torch.float32)
            self.given = {"cos": cos, "sin": sin, "layout": turn}
        if views:
            self.packed = Packed(*(None if part is None else within_a_larger(part) for part in self.packed[:3]), group)
            self.slots = torch.stack([self.slots, self.slots], 1)[:, 0]
            self.given |= {name: self.given[name].t().contiguous().t() for name in ("cos", "sin") if self.given}
        # In the dtype of the scale, the arithmetic of `dequantize` is no finer than this.
        rough = (bits and stored != torch.float64) or (self.given and not fine)
        self.noise = 1e-12 if dtype == torch.float64 and not rough else 5e-5
        self.pool = torch.full((layers, 2, tokens + 7, heads, dim), NAN, dtype=dtype)
        if not views:
            self.pool = self.pool.transpose(2, 3).contiguous().transpose(2, 3)

    def outs(self, pool: torch.Tensor) -> list[torch.Tensor]:
        """One row of a copy of the buffers, as `splice` wants them."""
        return [layer[1].transpose(0, 1) for layer in pool]

    def expected(self) -> torch.Tensor:
        """What the buffers must hold, not yet cast to their dtype."""
        pool = torch.full_like(self.pool, NAN, dtype=self.exact)
        outs = self.outs(pool)
        for layer, head, token in product(*map(range, self.shape)):
            key = self.decoded[layer, head, token].view(1, 1, 1, -1)
            if self.geometry is not None:
                key = self.geometry.shift(key, int(self.delta[token]))
            outs[layer][head, int(self.slots[token])] = key.view(-1)
        return pool


def within_a_larger(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as part of a larger tensor of large ones, heads before layers."""
    layers, heads, tokens, width = x.shape
    larger = torch.full((heads, layers, tokens + 3, width + 2), 99, dtype=x.dtype)
    part = larger.transpose(0, 1)[:, :, 1 : tokens + 1, 1 : width + 1]
    part.copy_(x)
    return part


def assert_written(case: Case, pool: torch.Tensor) -> None:
    """The buffers hold what they must, rounded once, and NaN wherever nothing was to be written."""
    # Triton's interpreter truncates what it makes bfloat16; GPUs round.
    truncated = IN_TRITON and DEVICE == "cpu" and case.out_dtype == torch.bfloat16
    step = torch.finfo(case.out_dtype).eps / (1 if truncated else 2) * 1.01
    torch.testing.assert_close(pool.cpu().double(), case.expected().double(), equal_nan=True, rtol=step, atol=case.noise)


def assert_splices(case: Case) -> None:
    """The back-end writes what it must into a copy of the case's buffers, and nothing into what is stored."""
    before = [part.clone() for part in case.packed[:3] if part is not None]
    pool = torch.empty_like(case.pool, device=DEVICE).copy_(case.pool)
    splice(moved(case.packed), case.outs(pool), moved(case.slots), **moved(case.given), backend=BACKEND)
    assert_written(case, pool)
    assert all(map(torch.equal, case.packed[:3], before))


@pytest.mark.parametrize("block", [2**18] if IN_TRITON else [2**18, 64])
def test_splicing_equals_decoding_shifting_and_writing_and_touches_nothing_else(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", block)

    @settings(max_examples=60 if IN_TRITON else 150, deadline=None, derandomize=IN_TRITON)
    @given(chosen=st.fixed_dictionaries(CASES))
    def check(chosen: dict[str, Any]) -> None:
        assert_splices(Case(**chosen))

    check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_data_in_the_dtype_of_the_buffers_are_copied_bit_for_bit(dtype: torch.dtype) -> None:
    """Also what is not a number, of which there are several."""
    odd = torch.tensor([0.0, -0.0, float("inf"), NAN, float("inf"), 1e-7, 1.5], dtype=dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    odd.view(bits)[4] += 1  # one more that is not a number, which arithmetic would turn into another
    x = odd.to(DEVICE).view(1, 1, 7, 1).repeat(1, 1, 1, 3)
    out, slots = torch.zeros(1, 9, 3, dtype=dtype, device=DEVICE), torch.tensor([3, 2, 8, 0, 1, 5, 4], device=DEVICE)
    splice(Packed(x), [out], slots, backend=BACKEND)
    assert torch.equal(out.view(bits)[0, slots], x.view(bits)[0, 0])
    assert not out[0, [6, 7]].any()


def test_numbers_beyond_float16_become_its_largest() -> None:
    """Of levels 0 and 254 of a grid that is wider."""
    data = torch.tensor([-127, 127, 0], dtype=torch.int8, device=DEVICE).view(1, 1, 1, 3)
    scale, zero = (torch.full((1, 1, 1, 1), number, device=DEVICE) for number in (1e4, -1e6))
    out = torch.zeros(1, 1, 3, dtype=torch.float16, device=DEVICE)
    splice(Packed(data, scale, zero), [out], torch.zeros(1, dtype=torch.int64, device=DEVICE), backend=BACKEND)
    assert out.flatten().tolist() == [-65504, 65504, 65504]


@of_triton
def test_a_slot_beyond_a_row_does_not_reach_the_next_one() -> None:
    rows = torch.zeros(3, 2, 4, 8, device=DEVICE)
    data, slots = torch.ones(1, 2, 3, 8, device=DEVICE), torch.tensor([4, -1, 2], device=DEVICE)
    splice(Packed(data), [rows[1]], slots, backend="triton")
    assert rows[1, :, 2].all()
    assert int(rows.count_nonzero()) == 2 * 8


@pytest.mark.parametrize("bits", [8, 4])
def test_a_group_of_equal_numbers_comes_back_exactly(bits: int) -> None:
    width = 8 if bits == 8 else 4
    data = torch.full((1, 1, 3, width), -127 if bits == 8 else 0, dtype=torch.int8 if bits == 8 else torch.uint8)
    zero, out = torch.tensor([0.1, -70.3, 1e-5]).view(1, 1, 3, 1), torch.zeros(1, 3, 8, device=DEVICE)
    splice(moved(Packed(data, torch.zeros_like(zero), zero)), [out], torch.arange(3, device=DEVICE), backend=BACKEND)
    assert torch.equal(out.cpu(), zero[0].expand(1, 3, 8))


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
    outs = case.outs(case.pool)
    longer = torch.cat([outs[1], torch.ones(2, 4, 8)], 1)
    splice(case.packed, [outs[0], longer], case.slots)
    outs[1].copy_(longer[:, :-4])
    assert_written(case, case.pool)
    assert (longer[:, -4:] == 1).all()


@pytest.mark.parametrize("turn", ["half", "interleaved"])
@pytest.mark.parametrize("bits", [8, 4, 0])
def test_nothing_is_made_on_the_way_that_is_larger_than_a_block(bits: int, turn: str, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 512)
    case, made = Case(layers=3, heads=2, tokens=40, dim=16, bits=bits, turn=turn), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            known = {part.untyped_storage().data_ptr() for part in args if isinstance(part, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
                made.append(out.numel())
            return out

    with Watch():
        splice(case.packed, case.outs(case.pool), case.slots, **case.given, backend="torch")
    assert 0 < max(made) <= 512
    assert_written(case, case.pool)
