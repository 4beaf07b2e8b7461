"""Rebuilding a layer's keys and values from codes equals decoding, rotating and writing one token at a time."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.kernels import rebuild as kernels
from hf_kvcaches.kernels.rebuild import Decoder, RowSpan, rebuild
from tests.kernels.cases import NAN, Draws, within

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CASES = {
    "heads": st.sampled_from([1, 2, 3]),
    "tokens": st.sampled_from([0, 1, 2, 7, 17, 130]),
    "key_dim": st.sampled_from([1, 2, 7, 20, 60]),
    "value_dim": st.sampled_from([1, 5, 16, 80]),
    "width": st.sampled_from([0, 1, 9]),
    "rank": st.sampled_from([None, 0, 1, 5, 33]),
    "shared": st.booleans(),
    "given": st.sampled_from(DTYPES),
    "weights": st.sampled_from([None, *DTYPES]),
    "dtype": st.sampled_from(DTYPES),
    "places": st.sampled_from(["one", "rows", "cut"]),
    "turn": st.sampled_from(["", "half", "interleaved"]),
    "rest": st.sampled_from([0, 1, 5]),
    "fine": st.booleans(),
    "views": st.booleans(),
    "seed": st.integers(0, 1000),
}

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")


class Case(Draws):
    """Codes of some tokens, weights, and buffers that hold nothing but NaN.

    A token has `width` numbers beside its `rank` codes, None where there are none; `shared` tokens share what is known of them. `given` is
    the dtype of what is multiplied, `weights` that of the weights where it is another, `dtype` that of the buffers.
    At least `rest` dimensions of keys don't turn. With `fine` tables are float64, and with `views` every tensor is part of a larger one.
    """

    def __init__(
        self, heads=2, tokens=5, key_dim=8, value_dim=8, width=6, rank: int | None = 3, shared=False,
        given=torch.float32, weights=None, dtype=torch.float32, places="rows", turn="", rest=0, fine=False, views=False, seed=0,
    ) -> None:  # fmt: skip
        super().__init__(1, heads, tokens, given, seed)
        columns, weighing, larger = heads * (key_dim + value_dim), weights or given, (lambda x: within(x, 99)) if views else lambda x: x
        self.out_dtype = dtype
        self.side = larger(self.randn(tokens // 2 + 1 if shared else tokens, width))
        self.codes = None if rank is None else larger(self.randn(tokens, rank) + self.randn(rank) * 3)
        self.decoder = Decoder(
            larger((self.randn(width, columns) / max(1, width) ** 0.5).to(weighing)),
            None if rank is None else larger((self.randn(rank, columns) / max(1, rank) ** 0.5).to(weighing)),
            larger(self.randn(columns).to(weighing)),
        )
        self.spans, batch, capacity = self.placed(places, tokens)
        self.options: dict[str, Any] = {}
        if shared:
            self.options["side_rows"] = torch.randint(0, len(self.side), (tokens,), generator=self.generator)
        self.geometry = None
        if turn and key_dim - rest > 1:
            frequencies = torch.rand((key_dim - rest) // 2, generator=self.generator, dtype=torch.float64)
            self.geometry = RotaryGeometry(frequencies, key_dim, 1.3, layout=turn)
            self.positions = torch.randint(0, 900, (tokens,), generator=self.generator)
            tables = self.geometry.cos_sin(self.positions, torch.float64 if fine else torch.float32)
            self.options |= {"cos": larger(tables[0] * 1.3), "sin": larger(tables[1] * 1.3), "layout": turn}
        self.noise = 1e-11 if dtype == torch.float64 and (fine or not turn) else 1e-4
        shape = (batch, capacity, heads) if views else (batch, heads, capacity)
        self.outs = [torch.full((*shape, dim), NAN, dtype=dtype) for dim in (key_dim, value_dim)]
        if views:
            self.outs = [torch.cat([out, out], 3)[..., out.shape[3] :].transpose(1, 2) for out in self.outs]

    def placed(self, places: str, tokens: int) -> tuple[list[RowSpan], int, int]:
        """Spans, rows and slots."""
        first, some = int(torch.randint(0, 5, (), generator=self.generator)), tokens // 3
        if places == "one":
            return [RowSpan(0, first, tokens)], 1, tokens + 5
        if places == "rows":
            return [RowSpan(2, first, some), RowSpan(1, 0, 0), RowSpan(0, 1, tokens - some)], 3, tokens + 5
        return [RowSpan(1, first + tokens - some, some), RowSpan(0, 3, 0), RowSpan(1, first, tokens - some)], 2, tokens + 5

    def expected(self) -> list[torch.Tensor]:
        """What the buffers must hold, not yet cast to their dtype."""
        outs = [torch.full(out.shape, NAN, dtype=torch.float64) for out in self.outs]
        heads = self.shape[1]
        side = self.side[self.options["side_rows"]] if "side_rows" in self.options else self.side
        numbers = torch.einsum("ni,ic->nc", side.double(), self.decoder.side.double()) + self.decoder.bias.double()
        if self.codes is not None and self.decoder.codes is not None:
            numbers += torch.einsum("ni,ic->nc", self.codes.double(), self.decoder.codes.double())
        parts = numbers.split([heads * out.shape[3] for out in outs], 1)
        keys, values = (part.unflatten(1, (heads, part.shape[1] // heads)).transpose(0, 1).unsqueeze(0) for part in parts)
        if self.geometry is not None:
            keys = self.geometry.rotate(keys, self.positions)
        for made, out in ((keys, outs[0]), (values, outs[1])):
            token = 0
            for row, first, count in self.spans:
                for slot in range(first, first + count):
                    out[row, :, slot] = made[0, :, token]
                    token += 1
        return outs


def tensors(case: Case) -> list[torch.Tensor]:
    """Copies of all that is only read."""
    given = [case.side, case.codes, *case.decoder, *(case.options.get(name) for name in ("cos", "sin"))]
    return [part.clone() for part in given if part is not None]


def assert_rebuilds(case: Case) -> None:
    """The buffers hold what they must, rounded once, and NaN wherever nothing was to be written; what is only read stays as it is."""
    before, step = tensors(case), torch.finfo(case.out_dtype).eps / 2 * 1.01
    rebuild(case.side, case.codes, case.decoder, *case.outs, case.spans, torch.promote_types(case.out_dtype, torch.float32), **case.options)
    for got, expected in zip(case.outs, case.expected(), strict=True):
        torch.testing.assert_close(got.double(), expected, equal_nan=True, rtol=step + case.noise / 10, atol=case.noise)
        assert not got.requires_grad
    assert all(map(torch.equal, tensors(case), before))


@pytest.mark.parametrize("block", [2**23, 100])
def test_rebuilding_equals_the_slow_way_and_touches_nothing_else(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", block)

    @settings(max_examples=100, deadline=None)
    @given(chosen=st.fixed_dictionaries(CASES))
    def check(chosen: dict[str, Any]) -> None:
        assert_rebuilds(Case(**chosen))

    check()


def test_weights_that_learn_leave_no_gradient() -> None:
    case = Case()
    case.decoder = Decoder(*(part.requires_grad_() for part in case.decoder if part is not None))
    rebuild(case.side, case.codes, case.decoder, *case.outs, case.spans, torch.float32)
    assert not any(out.requires_grad for out in case.outs)


def test_numbers_beyond_float16_become_its_largest() -> None:
    """One of them is infinite beside others that are not."""
    decoder = Decoder(torch.tensor([[1e6, -1e6, 3.0, 0.0, 1e6, 2.0]]), None, torch.tensor([0, 0, 0, float("inf"), 0, 0]))
    outs = [torch.zeros(1, 1, 1, 3, dtype=torch.float16) for _ in "kv"]
    rebuild(torch.ones(1, 1), None, decoder, *outs, [RowSpan(0, 0, 1)], torch.float32, cos=torch.ones(1, 1), sin=torch.zeros(1, 1))
    assert [out.flatten().tolist() for out in outs] == [[65504, -65504, 3], [65504, 65504, 2]]


def test_half_precision_is_rounded_once() -> None:
    """2^-8 from the side, and as much from the codes, make a step of bfloat16 above 1, which either alone does not."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    decoder = Decoder(torch.full((1, 2), 2**-8, dtype=torch.bfloat16), torch.full((1, 2), 2**-8, dtype=torch.bfloat16), one[0].expand(2))
    outs = [torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16) for _ in "kv"]
    rebuild(one, one, decoder, *outs, [RowSpan(0, 0, 1)], torch.float32)
    assert [out.item() for out in outs] == [1 + 2**-7] * 2


@pytest.mark.parametrize("shared", [False, True])
def test_products_in_bfloat16_are_rounded_once_each_and_summed_up_in_float32(shared: bool) -> None:
    random = torch.Generator().manual_seed(5)
    side, codes, *weights = (torch.randn(shape, generator=random) for shape in ((9, 6), (20, 5), (6, 16), (5, 16), (16,)))
    rows = torch.arange(20) % 9
    given = (side, {"side_rows": rows}) if shared else (side[rows], {})
    outs = [torch.zeros(1, 2, 20, 4) for _ in "kv"]
    rebuild(given[0], codes, Decoder(*weights), *outs, [RowSpan(0, 0, 20)], torch.bfloat16, **given[1])
    products = [(x.bfloat16() @ part.bfloat16()).float() for x, part in ((side[rows], weights[0]), (codes, weights[1]))]
    expected = (products[0] + products[1] + weights[2]).unflatten(1, (2, 2, 4)).permute(1, 2, 0, 3)
    torch.testing.assert_close(torch.stack(outs)[:, 0], expected, rtol=1e-2, atol=1e-2)
    exact = (side[rows] @ weights[0] + codes @ weights[1] + weights[2]).unflatten(1, (2, 2, 4)).permute(1, 2, 0, 3)
    assert 0 < float((torch.stack(outs)[:, 0] - exact).norm()) < 2**-7 * float(exact.norm())
