"""Times SubspaceCache: attention over coefficients alone, whole decode steps, and what sketching adds.

    python scripts/bench_subspace.py [--device auto] [--csv docs/benchmarks/subspace.csv] [--plot docs/benchmarks/subspace.png]

`decode` is one layer's attention of one new token a row, with ranks of a quarter of the head's dimensions, beside SDPA on the full keys
and values: where heads share keys, the faster of the ways in which models call it. Each call reads other keys and values than the one
before, as the layers of a model do: what it reads is not in the processor's caches (`--warm`: it may be). `step` is the whole forward pass
of a small Llama; GrowingCache shows how much of the gain is from not copying a DynamicCache for every token. `adaptive` is the time of
adaptive bases over that of static ones, while they stay and while each chunk gets new ones; sketches work in bursts, so decoding is judged
by the time of all steps together.

Before anything is timed, what both sides give is compared. All sides of a cell run in turns in one process: a ratio is the median over
rounds of the baseline's time by ours. The floor is the time in which the bytes that must be read can be read, at the measured speed of
reading a large tensor. Weights are random, the vocabulary is small, and all heads have equal ranks: the smaller the model around the
cache, the larger the ratios of steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from _common import environment, pick_device, run_script, table, write_table
from _equip_sides import Models, Shape, bytes_free
from _subspace_sides import (
    ADAPTIVE,
    FULL,
    GROWING,
    STATIC,
    VARIANTS,
    Cell,
    Clock,
    Kernels,
    Makers,
    Stepping,
    adaptive_makers,
    attention_alone,
    prefills,
    prove_caches,
    rows_that_fit,
    step_makers,
)
from tqdm import tqdm

from hf_kvcaches.errors import ConfigError, require

SECTIONS = ("decode", "step", "adaptive")
LONG = (8, 32768)  # batch and tokens of what only GPUs are asked for
FIELDS = (
    "caches section measure dtype kv head_dim batch tokens rounds steps side baseline time_ms time_q1_ms time_q3_ms "
    "ratio ratio_q1 ratio_q3 total_ratio error bytes gb_per_second floor_share"
).split()

Row = dict[str, Any]
Job = tuple[str, Callable[[], list[Row]]]


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
    calls: int = 25
    """Of one kernel."""
    rounds: int = 9
    steps: int = 16
    """Of a round: as many as tokens in a tile, so that each has one that is rounded to 8 bits."""
    sketching: tuple[int, int, int] = (4096, 16, 64)
    warmup: int = 256
    """Tokens of the prompt; rounds and steps of a round after it, together more than a chunk."""
    prefills: int = 7
    calibration: int = 2048
    most: float = 4e9
    """Bytes of a cell."""


FULL_SIZE = Size(Shape(512, 4, 8, 1408, 512))
QUICK = Size(
    Shape(128, 2, 8, 128, 96),
    (96,),
    (1, 2),
    head_dims=(16,),
    calls=3,
    rounds=2,
    steps=2,
    sketching=(96, 2, 2),
    prefills=2,
    calibration=256,
    warmup=16,
)


@dataclass
class Run:
    """One run: what is measured where."""

    size: Size  # what to measure
    clock: Clock  # of the device
    rows: list[Row] = field(default_factory=list)  # what is measured so far
    _stepping: tuple[Any, Any] | None = None

    def cells(self, points: Iterable[tuple[int, int]], head_dims: Iterable[int], layers: int = 0) -> list[Cell]:
        """Cells of these batches and tokens, with as many rows as there is memory for."""
        size = self.size
        grid = [Cell(dtype, kv, dim, *point) for dtype, kv, dim, point in itertools.product(size.dtypes, size.kv, head_dims, points)]
        return list(dict.fromkeys(replace(cell, batch=rows_that_fit(cell, size.most, layers)) for cell in grid))

    def decode_cells(self) -> list[Cell]:
        size = self.size
        return self.cells([*itertools.product(size.batches, size.tokens), *size.long], size.head_dims)

    def model_cells(self, tokens: Iterable[int]) -> list[Cell]:
        # Shorter ones come first: the caches of one are those of the next, which read on.
        points = [(batch, each) for each in sorted(tokens) for batch in self.size.batches]
        return self.cells(points, [self.size.shape.head_dim], self.size.shape.layers)

    def jobs(self, sections: Sequence[str]) -> list[Job]:
        """Everything there is to measure: its name, and the work."""
        jobs: list[Job] = []
        if "decode" in sections:
            jobs += [(f"decode {cell}", lambda cell=cell: self.decode(cell)) for cell in self.decode_cells()]
        if "step" in sections:
            jobs += [(f"step {cell}", lambda cell=cell: self.step(cell)) for cell in self.model_cells(self.size.tokens)]
        if "adaptive" in sections:
            cells = self.model_cells(self.size.sketching[:1])
            jobs += [
                (f"prefill {cell}", lambda cell=cell: self.prefill(cell))
                for cell in dict.fromkeys(replace(cell, batch=1) for cell in cells)
            ]
            jobs += [(f"adaptive {cell}", lambda cell=cell: self.adaptive(cell)) for cell in cells]
        return jobs

    def decode(self, cell: Cell) -> list[Row]:
        return self._labelled(attention_alone(cell, self.clock, self.size.calls), cell, "decode", "attention", self.size.calls)

    def step(self, cell: Cell) -> list[Row]:
        stepping = self._filled("step", cell, lambda models: step_makers(models, self.size.calibration))
        # On one or two threads a step of many tokens takes half a second.
        steps = self.size.steps if self.clock.device.type == "cuda" or cell.batch * cell.tokens <= 20_000 else min(4, self.size.steps)
        rows = stepping.measure(cell, self.clock, self.size.rounds, steps, FULL)
        return self._labelled(rows, cell, "step", "step", self.size.rounds)

    def prefill(self, cell: Cell) -> list[Row]:
        models = self._models(cell)
        rows = prefills(cell, models, self._adaptive_makers(models), self.size.prefills)
        return self._labelled(rows, cell, "adaptive", "prefill", self.size.prefills)

    def adaptive(self, cell: Cell) -> list[Row]:
        stepping = self._filled("adaptive", cell, self._adaptive_makers)
        _, rounds, steps = self.size.sketching
        return self._labelled(stepping.measure(cell, self.clock, rounds, steps, STATIC), cell, "adaptive", "step", rounds)

    def _adaptive_makers(self, models: Models) -> Makers:
        return adaptive_makers(models, self.size.calibration, self.size.warmup)

    def _models(self, cell: Cell) -> Models:
        return Models.make(self.size.shape, cell.kv, cell.dtype, self.clock.device, sharp=False)

    def _filled(self, section: str, cell: Cell, makers: Callable[[Models], Makers]) -> Stepping:
        """The caches of the cell before, if they only have to read on."""
        key = (section, cell.dtype, cell.kv)
        if self._stepping is None or self._stepping[0] != key:
            self._stepping = None  # before the next ones are filled
            models = self._models(cell)
            self._stepping = key, Stepping(models, makers(models))
        return self._stepping[1]

    def _labelled(self, rows: list[Row], cell: Cell, section: str, measure: str, rounds: int) -> list[Row]:
        own = {"caches": ("warm" if self.clock.warm else "cold") if section == "decode" else "", "section": section}
        own |= {"measure": measure, **asdict(cell), "rounds": rounds, "gb_per_second": round(self.clock.bandwidth / 1e9, 2)}
        return [own | row for row in rows]

    @torch.no_grad()
    def go(self, sections: Sequence[str]) -> None:
        size = self.size
        if set(sections) & {"step", "adaptive"}:
            print("\n".join(prove_caches(size.shape, size.kv, size.dtypes, self.clock.device)))
        with tqdm(self.jobs(sections), unit="cell") as progress:
            for name, work in progress:
                progress.set_description(name)
                self.rows += work()


def cell_of(row: Row) -> str:
    return str(Cell(row["dtype"], row["kv"], row["head_dim"], row["batch"], row["tokens"]))


def spread_of(row: Row) -> str:
    return f"{row['ratio_q1']:.2f}-{row['ratio_q3']:.2f}"


def show(rows: Sequence[Row]) -> str:
    """A table for each section."""
    tables = []
    for section in dict.fromkeys(row["section"] for row in rows):
        lines = []
        for row in (row for row in rows if row["section"] == section):
            line = [f"{row['measure']} {cell_of(row)}", row["side"], f"{row['time_ms']:.3f}"]
            line += [f"{row['time_q1_ms']:.3f}-{row['time_q3_ms']:.3f}", f"{row['ratio']:.2f}x", spread_of(row)]
            line += [f"{row['total_ratio']:.2f}x", f"{row['floor_share']:.0%}" if "floor_share" in row else "-", row["baseline"]]
            lines.append(line)
        header = [section, "side", "ms", "quartiles", "ratio", "quartiles", "in all", "floor", "ratio to"]
        tables.append(table(header, lines))
    return "\n\n".join(tables)


@dataclass(frozen=True)
class Bar:
    """What is promised."""

    text: str  # in words
    least: float  # ratio
    section: str  # of the rows that it is about; `side` and `measure` too
    side: str
    measure: str = "attention"
    column: str = "ratio"  # which ratio
    points: tuple[tuple[int, int], ...] | None = None  # batch and tokens, or None for all

    def about(self, rows: Sequence[Row], dtype: str) -> list[Row]:
        wanted = {"section": self.section, "side": self.side, "measure": self.measure, "dtype": dtype}
        own = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
        return [row for row in own if self.points is None or (row["batch"], row["tokens"]) in self.points]

    def verdict(self, rows: Sequence[Row], dtype: str) -> list[str]:
        """One line, and one more for each cell in which it is not met."""
        own = self.about(rows, dtype)
        name = f"{dtype}, {self.text}"
        if not own:
            return [f"{name}: not measured"]
        ratios = [row[self.column] for row in own]
        missed = [row for row in own if not row[self.column] >= self.least]
        met = f"NOT MET in {len(missed)} of {len(own)} cells" if missed else f"met in all of {len(own)} cells"
        line = f"{name}: {met}; {statistics.geometric_mean(ratios):.2f}x in geometric mean, {min(ratios):.2f}x to {max(ratios):.2f}x"
        return [line, *(self._missed(row, rows) for row in missed)]

    def _missed(self, row: Row, rows: Sequence[Row]) -> str:
        keys = ("section", "measure", "dtype", "kv", "head_dim", "batch", "tokens", "baseline")
        other = next(each for each in rows if each["side"] == row["baseline"] and all(each[key] == row[key] for key in keys))
        line = f"    {cell_of(row)}: {row[self.column]:.2f}x ({spread_of(row)}), {row['time_ms']:.3f} ms"
        if "floor_share" not in row:
            return line
        shares = f"the floor is {row['floor_share']:.0%} of that, and {other['floor_share']:.0%} of the {other['time_ms']:.3f} ms"
        return f"{line}; {shares} of {other['side']}"


def bars(device: torch.device) -> list[Bar]:
    promised = []
    for variant in VARIANTS if device.type == "cpu" else ():
        fast = variant.startswith("post")
        text = "at least 3x as fast as SDPA" if fast else "at most 1.5x the time of SDPA (0.667x)"
        promised.append(Bar(f"{variant} {text}", 3.0 if fast else 1 / 1.5, "decode", variant))
    if device.type == "cuda":
        promised.append(Bar("aware int8 at least 2x as fast as SDPA at 8 x 32768", 2.0, "decode", "aware int8", points=(LONG,)))
    promised.append(Bar("sketching takes at most 10% more of a prefill (0.909x)", 1 / 1.10, "adaptive", ADAPTIVE, "prefill"))
    text = "sketching takes at most 5% more of decoding (0.952x)"
    return [*promised, Bar(text, 1 / 1.05, "adaptive", ADAPTIVE, "step", "total_ratio")]


def write_plot(path: Path, rows: Sequence[Row], device: torch.device) -> None:
    """How many times as fast each side is, by tokens: a panel for each shape of a section."""
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["section"] != "adaptive" and row["side"] in (*VARIANTS, GROWING):
            groups.setdefault((row["section"], row["dtype"], row["kv"], row["head_dim"]), []).append(row)
    wide, tall = min(3, max(1, len(groups))), max(1, -(-len(groups) // 3))
    figure, axes = plots.subplots(tall, wide, figsize=(5 * wide, 3.6 * tall), squeeze=False, layout="constrained")
    colors = dict(zip((*VARIANTS, GROWING), ("tab:blue", "tab:orange", "tab:cyan", "tab:red", "tab:gray"), strict=True))
    for axis, ((section, dtype, kv, dim), own) in zip(axes.flat, groups.items(), strict=False):
        for side, batch in dict.fromkeys((row["side"], row["batch"]) for row in own):
            line = [row for row in own if (row["side"], row["batch"]) == (side, batch)]
            ratios = [row["ratio"] for row in line]
            away = [[row["ratio"] - row["ratio_q1"] for row in line], [row["ratio_q3"] - row["ratio"] for row in line]]
            tokens, style = [row["tokens"] for row in line], "-" if batch == 1 else "--"
            axis.errorbar(tokens, ratios, away, label=f"{side}, batch {batch}", color=colors[side], linestyle=style, marker=".", capsize=2)
        axis.axhline(1.0, color="black", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set(title=f"{section}, {dtype}, {kv}, head size {dim}", xlabel="tokens", ylabel="times as fast")
        axis.legend(fontsize=6)
    for axis in list(axes.flat)[len(groups) :]:
        axis.axis("off")
    where = environment(device)
    figure.suptitle(
        f"{where['hardware']}, {where['threads']} threads, torch {where['torch']}: attention over SDPA, steps over DynamicCache", fontsize=9
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plots.close(figure)


@torch.no_grad()
def profile(run: Run) -> str:
    """Which operations the time of one decode cell goes to."""
    cell = run.decode_cells()[0]
    kernels = Kernels(cell, run.clock.device)
    kernels.prove()
    parts = []
    for variant in VARIANTS:
        work = kernels.ours(variant)
        with torch.profiler.profile() as seen:
            for _ in range(run.size.calls):
                work()
        order = "self_cuda_time_total" if run.clock.device.type == "cuda" else "self_cpu_time_total"
        parts.append(f"{variant}, {cell}\n{seen.key_averages().table(sort_by=order, row_limit=12)}")
    return "\n".join(parts)


def chosen(args: argparse.Namespace, device: torch.device) -> tuple[Size, list[str], list[str]]:
    """What to measure, and why some of it is left out."""
    size = QUICK if args.quick else FULL_SIZE
    if device.type == "cuda" and not args.quick:
        size = replace(size, dtypes=("bfloat16",), long=(LONG,), calls=50, most=32e9)
    given = {"dtypes": args.dtype, "tokens": args.tokens, "batches": args.batches, "head_dims": args.head_dims}
    for name, values in given.items():
        if values and name != "dtypes" and min(values) < 1:
            raise ConfigError.of(f"--{name.replace('_', '-')}", "at least 1", min(values))
    size = replace(size, **{name: tuple(values) for name, values in given.items() if values})
    size = replace(size, most=min(size.most, 0.7 * bytes_free(device)))
    sections = list(args.sections)
    return size, sections


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="of the CPU; default: as torch has it")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), help="default: float32 on CPUs, bfloat16 on GPUs")
    for name in ("tokens", "batches", "head-dims"):
        parser.add_argument(f"--{name}", nargs="+", type=int, help="only these" + (", in decode" if name == "head-dims" else ""))
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="only these")
    parser.add_argument("--warm", action="store_true", help="decode on a CPU: all calls read the same keys and values")
    parser.add_argument("--profile", action="store_true", help="only show where the time of one decode cell goes")
    parser.add_argument("--csv", type=Path, help="write every number here")
    parser.add_argument("--plot", type=Path, help="write a picture here (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="a tiny grid, to see that everything runs; its numbers mean nothing")
    args = parser.parse_args()
    if args.threads is not None:
        if args.threads < 1:
            raise ConfigError.of("--threads", "at least 1", args.threads)
        torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    if args.plot:
        require("matplotlib", "plots", "The plot")
    size, sections = chosen(args, device)
    clock = Clock(device, warm=args.warm, small=args.quick)
    print(", ".join(f"{name} {value}" for name, value in environment(device).items()), f"\nreads {clock.bandwidth / 1e9:.1f} GB/s")
    run = Run(size, clock)
    if args.profile:
        print(profile(run))
        return
    try:
        run.go(sections)
    finally:  # what is measured is kept, also when it is interrupted
        if args.csv and run.rows:
            write_table(args.csv, FIELDS, run.rows, environment(device))
    print(show(run.rows))
    print("\n".join(line for dtype in size.dtypes for bar in bars(device) for line in bar.verdict(run.rows, dtype)))
    if args.plot:
        write_plot(args.plot, run.rows, device)


if __name__ == "__main__":
    run_script(main)
