"""Times SubspaceCache: attention over coefficients alone, whole decode steps, and what sketching adds.

    python scripts/bench_subspace.py [--device auto] [--csv docs/benchmarks/subspace.csv] [--plot docs/benchmarks/subspace.png]

`decode` is one layer's attention of one new token a row, with ranks of a quarter of the head's dimensions, beside SDPA on the full keys
and values: where heads share keys, the faster of the ways in which models call it. No call finds what it reads in the processor's caches.
`step` is the whole forward pass of a small Llama. `adaptive` is the time of adaptive bases over that of static ones, while they stay and
while each chunk gets new ones; sketches work in bursts, so decoding is judged by the time of all steps together.

Before anything is timed, what both sides give is compared. All sides of a cell run in turns in one process: a ratio is the median over
rounds of the baseline's time by ours. The floor is the time in which the bytes that must be read can be read. Weights are random.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import _subspace_sides as sides
import torch
from _subspace_sides import ADAPTIVE, FULL, GROWING, STATIC, VARIANTS, Cell, Makers, Stepping
from shared.bars import Bar
from shared.cli import check_counts, run_script
from shared.models import Pair, Shape, bytes_free
from shared.plot import Panel
from shared.results import Row, rows_where
from shared.sections import TIMES, Output, begin_sections, run_sections, section_arguments
from shared.timing import Clock
from tqdm import tqdm

SECTIONS = ("decode", "step", "adaptive")
LONG = (8, 32768)  # batch and tokens of what only GPUs are asked for
COLUMNS = (
    "caches section measure dtype kv head_dim batch tokens rounds steps side baseline time_ms time_q1_ms time_q3_ms "
    "ratio ratio_q1 ratio_q3 total_ratio error bytes gb_per_second floor_share"
).split()
CELL = "{dtype} {kv} {head_dim} {batch} x {tokens}"
SHOWN = {
    "": "{measure} " + CELL,
    "side": "{side}",
    **TIMES,
    "in all": "{total_ratio:.2f}x",
    "floor": "{floor_share:.0%}",
    "ratio to": "{baseline}",
}


@dataclass(frozen=True)
class Size:
    """The grids, the model of `step` and `adaptive`, and how long to measure."""

    shape: Shape
    tokens: tuple[int, ...] = (4096, 8192, 16384)
    batches: tuple[int, ...] = (1, 8)
    kv: tuple[str, ...] = ("mha", "gqa")
    head_dims: tuple[int, ...] = (64, 128)
    dtypes: tuple[str, ...] = ("float32",)
    long: tuple[tuple[int, int], ...] = ()
    calls: int = 25  # of one kernel
    rounds: int = 9
    steps: int = 16  # of a round: as many as tokens in a tile, so that each has one that is rounded to 8 bits
    # Tokens of the prompt; rounds and steps of a round after it, together more than a chunk.
    sketching: tuple[int, int, int] = (4096, 16, 64)
    warmup: int = 256
    prefills: int = 7
    calibration: int = 2048
    most: float = 4e9  # bytes of a cell


FULL_SIZE = Size(Shape(512, 4, 8, 1408, 512))
QUICK = Size(
    Shape(128, 2, 8, 128, 96), (96,), (1, 2), head_dims=(16,), calls=3, rounds=2, steps=2,
    sketching=(96, 2, 2), prefills=2, calibration=256, warmup=16,
)  # fmt: skip


class Run:
    """One run: what is measured where."""

    def __init__(self, size: Size, clock: Clock) -> None:
        self.size, self.clock = size, clock
        self._stepping: tuple[Any, Stepping] | None = None

    def cells(self, points: Iterable[tuple[int, int]], head_dims: Iterable[int], layers: int = 0) -> list[Cell]:
        """Cells of these batches and tokens, with as many rows as there is memory for."""
        size = self.size
        grid = (Cell(dtype, kv, dim, *point) for dtype, kv, dim, point in itertools.product(size.dtypes, size.kv, head_dims, points))
        return list(dict.fromkeys(sides.that_fits(cell, size.most, layers) for cell in grid))

    def model_cells(self, tokens: Iterable[int]) -> list[Cell]:
        # Shorter ones come first: the caches of one are those of the next, which read on.
        points = [(batch, count) for count in sorted(tokens) for batch in self.size.batches]
        return self.cells(points, [self.size.shape.head_dim], self.size.shape.layers)

    def decode(self) -> Iterator[Row]:
        size = self.size
        for cell in tqdm(self.cells([*itertools.product(size.batches, size.tokens), *size.long], size.head_dims), unit="cell"):
            yield from self._labelled(sides.attention_alone(cell, self.clock, size.calls), cell, "attention", size.calls)

    def step(self) -> Iterator[Row]:
        size = self.size
        for cell in tqdm(self.model_cells(size.tokens), unit="cell"):
            stepping = self._filled("step", cell, lambda pair: sides.step_makers(pair, size.calibration))
            # On one or two threads a step of many tokens takes half a second.
            steps = size.steps if self.clock.device.type == "cuda" or cell.batch * cell.tokens <= 20_000 else min(4, size.steps)
            yield from self._labelled(stepping.measure(cell, self.clock, size.rounds, steps, FULL), cell, "step", size.rounds)

    def adaptive(self) -> Iterator[Row]:
        tokens, rounds, steps = self.size.sketching
        cells = self.model_cells([tokens])
        for cell in tqdm(dict.fromkeys(replace(cell, batch=1) for cell in cells), unit="cell"):
            pair = self._pair(cell)
            yield from self._labelled(
                sides.prefills(cell, pair, self._makers(pair), self.size.prefills), cell, "prefill", self.size.prefills
            )
        for cell in tqdm(cells, unit="cell"):
            stepping = self._filled("adaptive", cell, self._makers)
            yield from self._labelled(stepping.measure(cell, self.clock, rounds, steps, STATIC), cell, "step", rounds)

    def _makers(self, pair: Pair) -> Makers:
        return sides.adaptive_makers(pair, self.size.calibration, self.size.warmup)

    def _pair(self, cell: Cell) -> Pair:
        return Pair.random(self.size.shape, cell.kv, self.clock.device, cell.dtype)

    def _filled(self, section: str, cell: Cell, makers: Callable[[Pair], Makers]) -> Stepping:
        """The caches of the cell before, if they only have to read on."""
        key = (section, cell.dtype, cell.kv)
        if self._stepping is None or self._stepping[0] != key:
            self._stepping = None  # before the next ones are filled
            pair = self._pair(cell)
            self._stepping = key, Stepping(pair, makers(pair))
        return self._stepping[1]

    def _labelled(self, rows: Iterable[Row], cell: Cell, measure: str, rounds: int) -> Iterator[Row]:
        labels = {"measure": measure, **asdict(cell), "rounds": rounds, "gb_per_second": round(self.clock.bandwidth / 1e9, 2)}
        yield from (labels | row for row in rows)


def bars(device: torch.device, dtypes: Iterable[str]) -> list[Bar]:
    promised = []
    for dtype in dtypes:
        for variant in VARIANTS if device.type == "cpu" else ():
            fast = variant.startswith("post")
            text = "at least 3x as fast as SDPA" if fast else "at most 1.5x the time of SDPA (0.667x)"
            where = {"section": "decode", "side": variant, "dtype": dtype}
            promised.append(Bar(f"{dtype}, {variant} {text}", where, least=3.0 if fast else 1 / 1.5, name="kv"))
        if device.type == "cuda":
            where = {"section": "decode", "side": "aware int8", "dtype": dtype, "batch": LONG[0], "tokens": LONG[1]}
            promised.append(Bar(f"{dtype}, aware int8 at least 2x as fast as SDPA at 8 x 32768", where, least=2.0, name="kv"))
        where = {"section": "adaptive", "side": ADAPTIVE, "dtype": dtype}
        text = f"{dtype}, sketching takes at most 10% more of a prefill (0.909x)"
        promised.append(Bar(text, where | {"measure": "prefill"}, least=1 / 1.10, name="kv"))
        # Sketches work in bursts, so decoding is judged by the time of all steps together.
        text = f"{dtype}, sketching takes at most 5% more of decoding (0.952x)"
        promised.append(Bar(text, where | {"measure": "step"}, "total_ratio", least=1 / 1.05, name="kv"))
    return promised


def size_of(args: argparse.Namespace, device: torch.device) -> Size:
    size = QUICK if args.quick else FULL_SIZE
    if device.type == "cuda" and not args.quick:
        size = replace(size, dtypes=("bfloat16",), long=(LONG,), calls=50, most=32e9)
    chosen = {"dtypes": args.dtype, "tokens": args.tokens, "batches": args.batches, "head_dims": args.head_dims}
    size = replace(size, **{name: tuple(values) for name, values in chosen.items() if values})
    return replace(size, most=min(size.most, 0.7 * bytes_free(device)))


def panels(rows: Sequence[Row]) -> list[Panel]:
    timed = [row for row in rows if row["side"] in (*VARIANTS, GROWING) and row["section"] != "adaptive"]
    keys = dict.fromkeys((row["section"], row["dtype"], row["kv"], row["head_dim"]) for row in timed)
    groups = [(key, rows_where(timed, section=key[0], dtype=key[1], kv=key[2], head_dim=key[3])) for key in keys]
    return [Panel(" ".join(map(str, key)), group, "{side}, batch {batch}", "tokens", "ratio", "x", levels=(1.0,)) for key, group in groups]


@torch.no_grad()
def main() -> None:
    parser = section_arguments(__doc__, SECTIONS)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), help="default: float32 on CPUs, bfloat16 on GPUs")
    for name in ("tokens", "batches", "head-dims"):
        parser.add_argument(f"--{name}", nargs="+", type=int, help="only these" + (", in decode" if name == "head-dims" else ""))
    args = parser.parse_args()
    check_counts(args, ["tokens", "batches", "head_dims"])
    device = begin_sections(args)
    size, clock = size_of(args, device), Clock(device, small=args.quick)
    print(f"reads {clock.bandwidth / 1e9:.1f} GB/s")
    run = Run(size, clock)
    if {"step", "adaptive"} & set(args.sections):
        print("\n".join(sides.prove_caches(size.shape, size.kv, size.dtypes, device)))
    title = "attention over SDPA, steps over DynamicCache, times as fast"
    output = Output(title, COLUMNS, SHOWN, bars(device, size.dtypes), panels)
    run_sections(args, device, {"decode": run.decode, "step": run.step, "adaptive": run.adaptive}, output)


if __name__ == "__main__":
    run_script(main)
