"""Times one decode step with the growing cache beside transformers' DynamicCache, which copies itself for every token.

    python scripts/bench_growing.py [--device auto] [--csv docs/benchmarks/growing.csv] [--plot docs/benchmarks/growing.png]

Both sides run in one process, round by round in turns, on the same random weights and the same filled cache; before a
cell is timed, the logits of both sides are compared. A round is a fixed number of decode steps from the same length, and
what it added is cropped before the next. So the time in which a growing buffer is replaced by a larger one is not in the
numbers: that copy happens once in an eighth of the tokens that the cache holds. Weights are random and the vocabulary is
small: the numbers show what a step costs, and the smaller the model around the cache, the larger the ratio.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _common import environment, pick_device, run_script, synchronize, table, write_table
from tqdm import tqdm
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_kvcaches import GrowingCache, verify
from hf_kvcaches.errors import require

KV_HEADS = {"mha": 8, "gqa": 2}
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # of a logit; the logits are of the order of 1
LONGEST_BATCHED = 2048  # longer caches are measured for a single row only
MOST_ON_CPU = 20_000  # rows x tokens, beyond which a step takes seconds


@dataclass(frozen=True)
class Size:
    """The model around the cache, and how long to measure."""

    hidden: int
    layers: int
    heads: int
    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    kv: tuple[str, ...]
    dtypes: tuple[str, ...]
    rounds: int
    steps: int


FULL = Size(512, 8, 8, (1, 8, 32), (512, 2048, 8192), ("mha", "gqa"), ("float32", "bfloat16"), rounds=7, steps=16)
QUICK = Size(64, 2, 8, (1, 2), (32,), ("gqa",), ("float32",), rounds=2, steps=4)


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    dtype: str
    kv: str
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.dtype} {self.kv} {self.batch} x {self.tokens}"


@dataclass(frozen=True)
class Times:
    """Seconds per step, one entry per round, of both sides in turns."""

    dynamic: list[float]
    growing: list[float]

    @property
    def ratios(self) -> list[float]:
        """How many times faster the growing side is, round by round: what slows the computer for a while slows both sides."""
        return [a / b for a, b in zip(self.dynamic, self.growing, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def columns(self, name: str) -> dict[str, float]:
        """Medians with their quartiles, the times in milliseconds."""
        row: dict[str, float] = {}
        for side, seconds in (("dynamic", self.dynamic), ("growing", self.growing)):
            low, high = quartiles(seconds)
            row |= {
                f"{name}_{side}_ms": round(statistics.median(seconds) * 1e3, 4),
                f"{name}_{side}_q1_ms": round(low * 1e3, 4),
                f"{name}_{side}_q3_ms": round(high * 1e3, 4),
            }
        low, high = quartiles(self.ratios)
        return row | {f"{name}_ratio": round(self.ratio, 3), f"{name}_ratio_q1": round(low, 3), f"{name}_ratio_q3": round(high, 3)}


@dataclass(frozen=True)
class Result:
    cell: Cell
    error: float  # the greatest difference of a logit between both sides
    step: Times  # the model's whole forward call
    update: Times  # `cache.update` of all layers and nothing else


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def grid(size: Size, device: torch.device) -> list[Cell]:
    cells = [Cell(*point) for point in itertools.product(size.dtypes, size.kv, size.batches, size.tokens)]
    most = MOST_ON_CPU if device.type == "cpu" else float("inf")
    return [cell for cell in cells if (cell.tokens <= LONGEST_BATCHED or cell.batch == 1) and cell.batch * cell.tokens <= most]


def make_model(size: Size, kv: str, dtype: str, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 3,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=KV_HEADS[kv],
        head_dim=64,
        max_position_embeddings=2 * max(size.tokens) + 1024,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(device, getattr(torch, dtype)).eval()


class Side:
    """A model with its filled cache."""

    def __init__(self, model: LlamaForCausalLM, cache: Cache, cell: Cell) -> None:
        self.model, self.cache, self.cell = model, cache, cell
        config, device = model.config, model.device
        self.device = device
        random = torch.Generator().manual_seed(1)

        def states(length: int) -> torch.Tensor:
            shape = (cell.batch, config.num_key_value_heads, length, config.head_dim)
            return torch.randn(shape, generator=random).to(device, model.dtype)

        for layer in range(config.num_hidden_layers):
            cache.update(states(cell.tokens), states(cell.tokens), layer)
        self.new = [(states(1), states(1)) for _ in range(config.num_hidden_layers)]
        self.ids = torch.randint(config.vocab_size, (cell.batch, 1), generator=random).to(device)

    def forward(self, step: int) -> torch.Tensor:
        positions = torch.full((1, 1), self.cell.tokens + step, device=self.device)
        return self.model(input_ids=self.ids, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits

    def update(self, step: int) -> None:
        for layer, (keys, values) in enumerate(self.new):
            self.cache.update(keys, values, layer)

    def seconds(self, work: Callable[[int], object], steps: int) -> float:
        """The mean of one round; the cache is as long afterwards as before."""
        synchronize(self.device)
        start = time.perf_counter()
        for step in range(steps):
            work(step)
        synchronize(self.device)
        spent = time.perf_counter() - start
        self.cache.crop(-steps)
        return spent / steps


def compare(dynamic: Side, growing: Side, steps: int) -> float:
    """The greatest difference between both sides' logits over some steps, an error if it is too great."""
    error = max((dynamic.forward(step) - growing.forward(step)).abs().max().item() for step in range(steps))
    dynamic.cache.crop(-steps)
    growing.cache.crop(-steps)
    if not error <= TOLERANCE[dynamic.cell.dtype]:
        raise SystemExit(f"{dynamic.cell}: the logits differ by {error:.3g}, more than {TOLERANCE[dynamic.cell.dtype]:.0e}: nothing timed")
    return error


def in_turns(dynamic: Side, growing: Side, work: str, rounds: int, steps: int) -> Times:
    times: dict[Side, list[float]] = {dynamic: [], growing: []}
    for index in range(rounds + 1):
        for side in (dynamic, growing) if index % 2 else (growing, dynamic):
            seconds = side.seconds(getattr(side, work), steps)
            if index:  # the first round warms up
                times[side].append(seconds)
    return Times(times[dynamic], times[growing])


def measure(cell: Cell, plain: LlamaForCausalLM, grown: LlamaForCausalLM, size: Size) -> Result:
    dynamic = Side(plain, DynamicCache(config=plain.config), cell)
    growing = Side(grown, GrowingCache(grown), cell)
    error = compare(dynamic, growing, size.steps)
    step = in_turns(dynamic, growing, "forward", size.rounds, size.steps)
    update = in_turns(dynamic, growing, "update", size.rounds, size.steps)
    return Result(cell, error, step, update)


def prove(model: LlamaForCausalLM, cell: Cell) -> None:
    """The growing cache must give the full cache's logits from a real prompt on, before anything is timed."""
    ids = torch.randint(model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(2))
    report = verify(model, lambda: GrowingCache(model), ids, max_new_tokens=24)
    if not report.max_logit_error <= TOLERANCE[cell.dtype]:
        raise SystemExit(f"{cell.dtype} {cell.kv}: the growing cache is not exact, nothing timed\n{report}")


@torch.no_grad()
def run(size: Size, device: torch.device) -> list[Result]:
    results: list[Result] = []
    cells = grid(size, device)
    with tqdm(total=len(cells), unit="cell") as progress:
        for (dtype, kv), group in itertools.groupby(cells, key=lambda cell: (cell.dtype, cell.kv)):
            plain = make_model(size, kv, dtype, device)
            grown = copy.deepcopy(plain)  # its attention is switched by its cache; the plain one's stays as it is
            for index, cell in enumerate(group):
                progress.set_description(str(cell))
                if index == 0:
                    prove(grown, cell)
                results.append(measure(cell, plain, grown, size))
                progress.update()
    return results


def show(results: list[Result]) -> str:
    header = ["cell", "DynamicCache ms", "IQR", "growing ms", "IQR", "step ratio", "quartiles", "update ratio", "quartiles", "logit error"]
    rows = []
    for result in results:
        row = [str(result.cell)]
        for seconds in (result.step.dynamic, result.step.growing):
            low, high = quartiles(seconds)
            row += [f"{statistics.median(seconds) * 1e3:.2f}", f"{(high - low) * 1e3:.2f}"]
        for times in (result.step, result.update):
            low, high = quartiles(times.ratios)
            row += [f"{times.ratio:.2f}x", f"{low:.2f}-{high:.2f}"]
        rows.append([*row, f"{result.error:.1e}"])
    return table(header, rows)


def bars(results: list[Result], device: torch.device) -> list[str]:
    """What is promised of a whole decode step, and whether it was met."""
    promised = [("at least as fast at 512 tokens", 1.0, [r for r in results if r.cell.tokens == 512])]
    if device.type == "cpu":
        promised.append(("at least 2x at batch 8 x 2048 tokens", 2.0, [r for r in results if (r.cell.batch, r.cell.tokens) == (8, 2048)]))
    lines = []
    for text, least, cells in promised:
        if not cells:
            lines.append(f"{text}: not measured")
        for result in cells:
            met = "met" if result.step.ratio >= least else "NOT MET"
            lines.append(f"{text}: {met} with {result.step.ratio:.2f}x ({result.cell})")
    return lines


def write_csv(path: Path, results: list[Result], size: Size, device: torch.device) -> None:
    rows = [
        environment(device)
        | {"hidden": size.hidden, "layers": size.layers, "heads": size.heads, "kv_heads": KV_HEADS[result.cell.kv], "head_dim": 64}
        | {"dtype": result.cell.dtype, "batch": result.cell.batch, "tokens": result.cell.tokens, "rounds": size.rounds, "steps": size.steps}
        | {"max_logit_error": result.error}
        | result.step.columns("step")
        | result.update.columns("update")
        for result in results
    ]
    write_table(path, rows[0], rows)


def write_plot(path: Path, results: list[Result], device: torch.device) -> None:
    require("matplotlib", "plots", "The plot").use("Agg")
    plots = require("matplotlib.pyplot", "plots", "The plot")
    figure, axes = plots.subplots(1, 2, figsize=(13, 1.5 + 0.3 * len(results)), sharey=True, layout="constrained")
    labels = [str(result.cell) for result in results]
    for axis, name, title in ((axes[0], "step", "whole decode step"), (axes[1], "update", "cache update only")):
        times = [getattr(result, name) for result in results]
        ratios = [time.ratio for time in times]
        spread = [quartiles(time.ratios) for time in times]
        below = [ratio - low for ratio, (low, _) in zip(ratios, spread, strict=True)]
        above = [high - ratio for ratio, (_, high) in zip(ratios, spread, strict=True)]
        axis.barh(labels, ratios, xerr=(below, above), color="tab:blue", ecolor="black", capsize=2)
        axis.axvline(1.0, color="tab:red", linewidth=1)
        axis.set(title=title, xlabel="times as fast as DynamicCache (bars: quartiles)")
    axes[0].invert_yaxis()
    axes[1].set_xscale("log")
    where = environment(device)
    figure.suptitle(
        f"{where['hardware']}, {where['threads']} threads, torch {where['torch']}, transformers {where['transformers']}", fontsize=9
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--csv", type=Path, help="write every number here")
    parser.add_argument("--plot", type=Path, help="write a picture here (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="a tiny grid, to see that everything runs; its numbers mean nothing")
    args = parser.parse_args()
    device, size = pick_device(args.device), QUICK if args.quick else FULL
    if args.plot:
        require("matplotlib", "plots", "The plot")
    print(", ".join(f"{name} {value}" for name, value in environment(device).items()))
    results = run(size, device)
    print(show(results))
    print("\n".join(bars(results, device)))
    if args.csv:
        write_csv(args.csv, results, size, device)
    if args.plot:
        write_plot(args.plot, results, device)


if __name__ == "__main__":
    run_script(main)
