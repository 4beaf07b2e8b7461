"""Cases for all back-ends of `rebuild.py`, and what they must write: multiplied, rotated and written by slow parts of `core`."""

from typing import Any

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.kernels.arguments import Decoder, RowSpan
from tests.kernels.cases import NAN, Draws

PLACES = ["one", "rows", "cut"]


class Case(Draws):
    """Codes of some tokens, weights, and buffers that hold nothing but NaN.

    A token has `width` numbers beside its `rank` codes, None of either where there are none; `shared` tokens share what is known of
    them. `given` is the dtype of what is multiplied, `weights` that of the weights where it is another, `dtype` that of the buffers.
    At least `rest` dimensions of keys don't turn. With `fine` tables are float64, and with `views` every tensor is part of a larger one.
    """

    def __init__(
        self, heads=2, tokens=5, key_dim=8, value_dim=8, width: int | None = 6, rank: int | None = 3, shared=False,
        bias=True, given=torch.float32, weights=None, dtype=torch.float32, places="rows", turn="", rest=0, fine=False, views=False, seed=0,
    ) -> None:  # fmt: skip
        super().__init__(1, heads, tokens, given, seed)
        self.dtype = given
        self.out_dtype, self.exact = dtype, torch.promote_types(dtype, torch.float32)
        columns = heads * (key_dim + value_dim)
        weighing = weights or given
        self.side = None if width is None else self.randn(tokens // 2 + 1 if shared else tokens, width)
        self.codes = None if rank is None else self.randn(tokens, rank) + self.randn(rank) * 3
        self.decoder = Decoder(
            None if width is None else (self.randn(width, columns) / max(1, width) ** 0.5).to(weighing),
            None if rank is None else (self.randn(rank, columns) / max(1, rank) ** 0.5).to(weighing),
            self.randn(columns).to(weighing) if bias else None,
        )
        self.spans, batch, capacity = self.placed(places, tokens)
        self.options: dict[str, Any] = {}
        if shared and self.side is not None:
            self.options["side_rows"] = torch.randint(0, len(self.side), (tokens,), generator=self.generator)
        self.geometry = None
        if turn and key_dim - rest > 1:
            frequencies = torch.rand((key_dim - rest) // 2, generator=self.generator, dtype=torch.float64)
            self.geometry = RotaryGeometry(frequencies, key_dim, 1.3, layout=turn)
            self.positions = torch.randint(0, 900, (tokens,), generator=self.generator)
            tables = self.geometry.cos_sin(self.positions, torch.float64 if fine else torch.float32)
            self.options |= {"cos": tables[0] * 1.3, "sin": tables[1] * 1.3, "layout": turn}
        if views:
            self.within_larger_ones()
        self.noise = 1e-11 if dtype == torch.float64 and (fine or not turn) else 1e-4
        shape = (batch, capacity, heads) if views else (batch, heads, capacity)
        self.outs = [torch.full((*shape, dim), NAN, dtype=dtype) for dim in (key_dim, value_dim)]
        if views:
            self.outs = [torch.cat([out, out], 3)[..., out.shape[3] :].transpose(1, 2) for out in self.outs]

    def placed(self, places: str, tokens: int) -> tuple[list[RowSpan], int, int]:
        """Spans, rows and slots."""
        first = int(torch.randint(0, 5, (), generator=self.generator))
        some = tokens // 3
        if places == "one":
            return [RowSpan(0, first, tokens)], 1, tokens + 5
        if places == "rows":
            return [RowSpan(2, first, some), RowSpan(1, 0, 0), RowSpan(0, 1, tokens - some)], 3, tokens + 5
        return [RowSpan(1, first + tokens - some, some), RowSpan(0, 3, 0), RowSpan(1, first, tokens - some)], 2, tokens + 5

    def within_larger_ones(self) -> None:
        """Puts the same numbers into parts of larger tensors of large ones."""
        self.side = None if self.side is None else within(self.side)
        self.decoder = Decoder(*(None if part is None else within(part) for part in self.decoder))
        self.codes = None if self.codes is None else within(self.codes)
        self.options |= {name: self.options[name].t().contiguous().t() for name in ("cos", "sin") if name in self.options}

    def arguments(self) -> tuple[Any, ...]:
        """All but the buffers and what comes after them."""
        return self.side, self.codes, self.decoder

    def expected(self) -> list[torch.Tensor]:
        """What the buffers must hold, not yet cast to their dtype."""
        outs = [torch.full(out.shape, NAN, dtype=torch.float64) for out in self.outs]
        _, heads, tokens = self.shape
        numbers = torch.zeros(tokens, heads * sum(out.shape[3] for out in outs), dtype=torch.float64)
        side = self.side[self.options["side_rows"]] if self.side is not None and "side_rows" in self.options else self.side
        for x, weights in ((side, self.decoder.side), (self.codes, self.decoder.codes)):
            if x is not None and weights is not None:
                numbers += torch.einsum("ni,ic->nc", x.double(), weights.double())
        if self.decoder.bias is not None:
            numbers += self.decoder.bias.double()
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


def within(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as part of a larger tensor of large ones."""
    larger = torch.full((*(size + 3 for size in x.shape),), 99, dtype=x.dtype)
    part = larger[tuple(slice(1, size + 1) for size in x.shape)]
    part.copy_(x)
    return part


def assert_written(case: Case, outs: list[torch.Tensor], truncated: bool = False) -> None:
    """The buffers hold what they must: rounded once, or truncated once, and NaN wherever nothing was to be written."""
    step = torch.finfo(case.out_dtype).eps / (1 if truncated else 2) * 1.01
    for got, expected in zip(outs, case.expected(), strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, equal_nan=True, rtol=step + case.noise / 10, atol=case.noise)


def largest_of_float16(device: str, rebuild: Any) -> list[list[float]]:
    """Keys and values that are too large for float16, one of them infinite beside others that are not."""
    weights = torch.tensor([[1e6, -1e6, 3.0, 0.0, 1e6, 2.0]], device=device)
    decoder = Decoder(side=weights, bias=torch.tensor([0, 0, 0, float("inf"), 0, 0], device=device))
    outs = [torch.zeros(1, 1, 1, 3, dtype=torch.float16, device=device) for _ in "kv"]
    tables = {"cos": torch.ones(1, 1, device=device), "sin": torch.zeros(1, 1, device=device)}
    rebuild(torch.ones(1, 1, device=device), None, decoder, *outs, [RowSpan(0, 0, 1)], **tables)
    return [out.flatten().tolist() for out in outs]
