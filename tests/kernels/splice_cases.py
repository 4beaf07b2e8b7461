"""Cases for all back-ends of `splice.py`, and what they must write: decoded, turned and written by the slow parts of `core`, one by one."""

from itertools import product
from typing import Any

import torch
from hypothesis import strategies as st

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.quantization import quantize
from tests.kernels.cases import NAN, Draws, restored
from tests.kernels.triton_process import DTYPES, IN_TRITON

SLOTS = ["run", "backwards", "scattered"]
CASES = {
    "layers": st.integers(1, 3),
    "heads": st.integers(1, 3),
    "tokens": st.sampled_from([1, 2, 7, 15, 17, 33] if IN_TRITON else [1, 2, 7, 17]),
    "dim": st.sampled_from([1, 2, 7, 16, 20, 60] if IN_TRITON else [1, 2, 7, 8, 20]),
    "bits": st.sampled_from([8, 4, 0]),
    "group": st.sampled_from([None, 1, 3, 16, 100]),
    "stored": st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    "dtype": st.sampled_from(DTYPES),
    "slots": st.sampled_from(SLOTS),
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
        if bits:
            quantized = quantize(x, bits, group)
            self.packed = Packed(quantized.data, quantized.scale, quantized.zero, group)
            self.decoded = restored(x, bits, group, self.exact)
        else:
            self.packed, self.decoded = Packed(x), x.to(self.exact)
        capacity = tokens + 7
        start = int(torch.randint(0, 8, (), generator=self.generator))
        run = torch.arange(start, start + tokens)
        scattered = torch.randperm(capacity, generator=self.generator)[:tokens]
        self.slots = {"run": run, "backwards": run.flip(0), "scattered": scattered}[slots]
        self.given: dict[str, Any] = {}
        self.geometry = None
        if turn and dim > 1:
            pairs = max(1, dim // 3)
            frequencies = torch.rand(pairs, generator=self.generator, dtype=torch.float64)
            self.geometry = RotaryGeometry(frequencies, dim, layout=turn)  # type: ignore[arg-type]
            self.delta = torch.randint(-900, 900, (tokens,), generator=self.generator)
            cos, sin = self.geometry.cos_sin(self.delta, torch.float64 if fine else torch.float32)
            self.given = {"cos": cos, "sin": sin, "layout": turn}
        if views:
            self.packed = Packed(*(None if part is None else within_a_larger(part) for part in self.packed[:3]), group)
            self.slots = torch.stack([self.slots, self.slots], 1)[:, 0]
            if self.given:
                self.given |= {name: self.given[name].t().contiguous().t() for name in ("cos", "sin")}
        # In the dtype of the scale, the arithmetic of `dequantize` is no finer than this.
        rough = (bits and stored != torch.float64) or (self.given and not fine)
        self.noise = 1e-12 if dtype == torch.float64 and not rough else 5e-5
        self.pool = torch.full((layers, 2, capacity, heads, dim), NAN, dtype=dtype)
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
    heads, layers, tokens, width = x.shape[1], x.shape[0], x.shape[2], x.shape[3]
    larger = torch.full((heads, layers, tokens + 3, width + 2), 99, dtype=x.dtype)
    part = larger.transpose(0, 1)[:, :, 1 : tokens + 1, 1 : width + 1]
    part.copy_(x)
    return part


def assert_written(case: Case, pool: torch.Tensor, truncated: bool = False) -> None:
    """The buffers hold what they must: rounded once, or truncated once, and NaN wherever nothing was to be written."""
    step = torch.finfo(case.out_dtype).eps / (1 if truncated else 2) * 1.01
    got, expected = pool.cpu().double(), case.expected().double()
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=step, atol=case.noise)


def largest_of_float16(device: str, splice: Any) -> torch.Tensor:
    """What becomes of levels 0 and 254 of a grid that is wider than float16."""
    data = torch.tensor([-127, 127, 0], dtype=torch.int8, device=device).view(1, 1, 1, 3)
    scale, zero = (torch.full((1, 1, 1, 1), number, device=device) for number in (1e4, -1e6))
    out = torch.zeros(1, 1, 3, dtype=torch.float16, device=device)
    splice(Packed(data, scale, zero), [out], torch.zeros(1, dtype=torch.int64, device=device))
    return out.view(3).cpu()


def assert_copies_bit_for_bit(dtype: torch.dtype, device: str, splice: Any) -> None:
    """Plain data in the dtype of the buffers are copied as they are, also what is not a number, of which there are several."""
    odd = torch.tensor([0.0, -0.0, float("inf"), NAN, float("inf"), 1e-7, 1.5], dtype=dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    odd.view(bits)[4] += 1  # one more that is not a number, which arithmetic would turn into another
    x = odd.to(device).view(1, 1, 7, 1).repeat(1, 1, 1, 3)
    out = torch.zeros(1, 9, 3, dtype=dtype, device=device)
    slots = torch.tensor([3, 2, 8, 0, 1, 5, 4], device=device)
    splice(Packed(x), [out], slots)
    assert torch.equal(out.view(bits)[0, slots], x.view(bits)[0, 0])
    assert not out[0, [6, 7]].any()
