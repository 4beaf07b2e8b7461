"""Times a decode step of EquipCache beside the ways in which pruned caches are kept elsewhere, and beside the forward pass alone.

    python scripts/bench_equip.py [--device auto] [--preset cpu|gpu] [--csv docs/benchmarks/equip.csv] [--plot docs/benchmarks/equip.png]

Before anything is timed, logits are compared: with slow references on a tiny model, with the baselines on the benchmark's own model, and
in each cell between all sides that must agree. All sides of a cell are filled, and decode greedily in turns in one process: the median over
rounds of the time per token is what is called end to end, and every ratio is taken within a round. The floor is the same forward
pass over keys and values that never change, by the fastest of three ways to attend. The full cache holds the text that the
others have pruned to half. Weights are random and the vocabulary is small: the smaller the model around the cache, the larger the ratios.

Every cell is added to the CSV when it is done; the same command goes on with the cells that are missing. Delete the file to measure anew.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _common import environment, pick_device, run_script
from _equip_checks import TABLE_6, far_away, flatness, memory, prove, write_alone
from _equip_report import bars, show, write_plot
from _equip_sides import Cell, Models, Shape, bytes_free, bytes_needed, measure
from tqdm import tqdm

from hf_kvcaches.errors import ConfigError, require

POLICIES = (("streaming", "compact"), ("h2o", "compact"), ("h2o", "original"))


@dataclass(frozen=True)
class Size:
    """The model around the cache, the grid, and how long to measure."""

    shape: Shape
    batches: tuple[int, ...] = (1, 8, 32)
    budgets: tuple[int, ...] = (256, 512, 1024)
    kv: tuple[str, ...] = ("mha", "gqa")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    writes: tuple[tuple[int, int, int], ...] = tuple(TABLE_6)
    single: tuple[int, int] = (8, 512)
    """Batch and budget of what is measured once: memory, and very long texts."""
    rounds: int = 5
    steps: int = 3
    heavy: float = 16_000
    """Rows x slots, beyond which a round is a single step."""
    window: int = 64
    """Budget for the text of millions of tokens, of which three times as many are read."""
    quick: bool = False


PRESETS = {
    "cpu": Size(Shape(512, 4, 8, 1408, 512), rounds=9),
    # The width of a 7B model. Each of its layers does the same work, so a few show what all cost.
    "gpu": Size(Shape(4096, 8, 32, 11008, 32000), rounds=7, steps=16, heavy=float("inf")),
}
QUICK = Size(
    Shape(64, 2, 4, 128, 96), (1, 2), (32,), ("gqa",), ("float32",), ((1, 4, 8),), (2, 32), rounds=2, steps=2, window=16, quick=True
)

FIELDS = (
    "hidden layers heads kv_heads head_dim measure policy positions dtype kv batch budget side tokens rounds steps round_ms round_q1_ms "
    "round_q3_ms step_ms step_q1_ms step_q3_ms ratio ratio_q1 ratio_q3 error value all_value"
).split()
KEY = "hardware device threads torch transformers hidden layers heads rounds".split()


class Table:
    """The rows measured so far, in a file if there is one.

    Args:
        path: The CSV, or None to keep rows in memory only.
        fixed: Columns that are the same in all rows.
    """

    def __init__(self, path: Path | None, fixed: dict[str, Any]) -> None:
        self.path, self.fixed = path, {name: str(value) for name, value in fixed.items()}
        self.rows: list[dict[str, str]] = []
        self.foreign: list[dict[str, str]] = []
        self.header = list(dict.fromkeys([*environment(torch.device("cpu")), *FIELDS]))
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                if reader.fieldnames != self.header:
                    raise ConfigError.of("--csv", "a file that this script wrote", str(path), "Name another file, or delete it.")
                for row in reader:
                    (self.rows if all(row[name] == self.fixed[name] for name in KEY) else self.foreign).append(row)
        else:
            self._append([dict(zip(self.header, self.header, strict=True))])

    def has(self, point: dict[str, Any]) -> bool:
        return any(all(row[name] == str(value) for name, value in point.items()) for row in self.rows)

    def add(self, point: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
        new = [{name: str({**self.fixed, **point, **row}.get(name, "")) for name in self.header} for row in rows]
        self.rows += new
        self._append(new)

    def _append(self, rows: list[dict[str, str]]) -> None:
        if self.path is not None:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, fieldnames=self.header, lineterminator="\n").writerows(rows)


class Run:
    """One run of the benchmark: what is measured already is left out."""

    def __init__(self, size: Size, device: torch.device, table: Table) -> None:
        self.size, self.device, self.table = size, device, table
        self.skipped: list[str] = []
        self._models: tuple[tuple[str, str, bool], Models] | None = None

    def models(self, cell: Cell) -> Models:
        # Only policies that choose by attention need it to be like a trained model's, which half precision rounds more.
        key = (cell.kv, cell.dtype, cell.policy != "streaming")
        if self._models is None or self._models[0] != key:
            self._models = None  # before the next ones are made
            self._models = key, Models.make(self.size.shape, cell.kv, cell.dtype, self.device, sharp=key[2])
        return self._models[1]

    def grid(self) -> list[Cell]:
        size = self.size
        points = itertools.product(size.dtypes, size.kv, POLICIES, size.batches, size.budgets)
        return [Cell(dtype, kv, batch, budget, *policy) for dtype, kv, policy, batch, budget in points]

    def jobs(self) -> list[tuple[str, dict[str, Any], Callable[[], list[dict[str, Any]] | None]]]:
        """Everything there is to measure: its name, what stands in its columns, and the work."""
        size, jobs = self.size, []
        for batch, heads, head_dim in size.writes:
            point = {"measure": "write", "dtype": "float32", "kv": f"{heads}x{head_dim}", "batch": batch, "budget": 1024}
            jobs.append((f"write alone {batch} x {heads} x {head_dim}", point, self._write_job(batch, heads, head_dim)))
        batch, budget = size.single
        for kv, (policy, positions) in itertools.product(size.kv, POLICIES):
            cell = Cell("float32", kv, batch, budget, policy, positions)
            jobs.append((f"memory {cell}", {"measure": "memory", **asdict(cell)}, self._memory_job(cell)))
            if positions == "compact":
                jobs.append((f"long text {cell}", {"measure": "flat", **asdict(cell)}, self._flat_job(cell)))
        point = {"measure": "far", "policy": "streaming", "positions": "compact", "dtype": "float32", "budget": size.window}
        jobs.append(("four million tokens", point, lambda: [far_away(self.device, size.window)]))
        jobs += [(str(cell), {"measure": "decode", **asdict(cell)}, self._decode_job(cell)) for cell in self.grid()]
        return jobs

    def _write_job(self, batch: int, heads: int, head_dim: int) -> Callable[[], list[dict[str, Any]] | None]:
        def work() -> list[dict[str, Any]] | None:
            rows = write_alone(batch, heads, head_dim, "float32", self.device, max(5, self.size.rounds))
            return rows and [{**row, "kv_heads": heads, "head_dim": head_dim} for row in rows]

        return work

    def _memory_job(self, cell: Cell) -> Callable[[], list[dict[str, Any]]]:
        return lambda: [memory(cell, self.models(cell), self.size.shape)]

    def _flat_job(self, cell: Cell) -> Callable[[], list[dict[str, Any]]]:
        return lambda: flatness(cell, self.models(cell), self.size.rounds if self.size.quick else 25, self.size.steps)

    def _decode_job(self, cell: Cell) -> Callable[[], list[dict[str, Any]] | None]:
        def work() -> list[dict[str, Any]] | None:
            if bytes_needed(cell, self.size.shape) > bytes_free(self.device):
                return None
            steps = self.size.steps if cell.batch * cell.budget <= self.size.heavy else 1
            rows = measure(cell, self.models(cell), self.size.rounds, steps)
            own = {"kv_heads": self.size.shape.kv_heads(cell.kv), "head_dim": self.size.shape.head_dim, "steps": steps}
            return [{**row, **own} for row in rows]

        return work

    @torch.no_grad()
    def go(self) -> None:
        todo = [job for job in self.jobs() if not self.table.has(job[1])]
        if not todo:
            return
        print("\n".join(prove(self.size.shape, self.device, quick=self.size.quick)))
        with tqdm(todo, unit="cell") as progress:
            for name, point, work in progress:
                progress.set_description(name)
                rows = work()
                if rows is None:
                    self.skipped.append(f"{name}: not enough memory, not measured")
                else:
                    self.table.add(point, rows)


def chosen_size(args: argparse.Namespace) -> Size:
    size = QUICK if args.quick else PRESETS[args.preset]
    changes = {name: value for name in ("hidden", "layers", "heads", "intermediate") if (value := getattr(args, name)) is not None}
    for name, value in changes.items():
        if value < 1:
            raise ConfigError.of(f"--{name}", "at least 1", value)
    shape = replace(size.shape, **changes)
    if shape.hidden % shape.heads or shape.head_dim % 2:
        raise ConfigError.of("--hidden", f"a multiple of 2 x {shape.heads} heads", shape.hidden)
    parts = {name: tuple(value) for name in ("batches", "budgets", "kv", "dtypes") if (value := getattr(args, name)) is not None}
    return replace(size, shape=shape, **parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="sizes for a CPU or a GPU; default: those for the device")
    for name in ("hidden", "layers", "heads", "intermediate"):
        parser.add_argument(f"--{name}", type=int, help="instead of the preset's")
    parser.add_argument("--batches", nargs="+", type=int, help="only these")
    parser.add_argument("--budgets", nargs="+", type=int, help="only these")
    parser.add_argument("--kv", nargs="+", choices=("mha", "gqa"), help="only these: multi-head, or four query heads to a key head")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), help="only these")
    parser.add_argument("--csv", type=Path, help="write every number here, cell by cell, and go on where the file ends")
    parser.add_argument("--plot", type=Path, help="write a picture here (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="a tiny grid, to see that everything runs; its numbers mean nothing")
    args = parser.parse_args()
    device = pick_device(args.device)
    args.preset = args.preset or ("cpu" if device.type == "cpu" else "gpu")
    size = chosen_size(args)
    if args.plot:
        require("matplotlib", "plots", "The plot")
    where = environment(device)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    shape = size.shape
    fixed = {**where, "hidden": shape.hidden, "layers": shape.layers, "heads": shape.heads, "rounds": size.rounds, "steps": size.steps}
    run = Run(size, device, Table(args.csv, fixed))
    run.go()
    print("\n".join([show(run.table.rows), *run.skipped, "", *bars(run.table.rows)]))
    if args.plot:
        write_plot(args.plot, run.table.rows, where)


if __name__ == "__main__":
    run_script(main)
