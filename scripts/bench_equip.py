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
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from _equip_checks import PROBE, WRITES, drafting, flatness, prove, pruning, write_alone
from _equip_sides import FLOORS, FULL, FUSED, GATHER, OURS, PAGES, PUBLISHED, SHIFT, Cell, DisagreementError, bytes_needed, measure
from shared.bars import Bar, verdicts
from shared.cli import arguments, begin, check_counts, run_script
from shared.models import Pair, Shape, bytes_free
from shared.plot import Panel, draw, title_of
from shared.results import Results, Row, print_environment, rows_where, show
from tqdm import tqdm

POLICIES = (("streaming", "compact"), ("streaming", "original"), ("h2o", "compact"), ("h2o", "original"), ("future", "compact"))
PARTS = ("write", "flat", "drafts", "prune", "decode")
PRUNED = {"future": 1.08, "compactor": 1.08, PROBE: 1.08, "kvzip": 2.2}  # times a prefill that reading and pruning may take
LARGE_BATCH = 8
PICTURE = "a decode step of EquipCache, by batch x budget"


@dataclass(frozen=True)
class Size:
    """The model around the cache, the grid, and how long to measure."""

    shape: Shape
    batches: tuple[int, ...] = (1, 8, 32)
    budgets: tuple[int, ...] = (256, 512, 1024)
    kv: tuple[str, ...] = ("mha", "gqa")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    writes: tuple[tuple[int, int, int], ...] = WRITES
    single: tuple[int, int] = (8, 512)  # batch and budget of what is measured once: very long texts
    prompt: int = 4096  # tokens that are pruned to a quarter
    rounds: int = 9
    steps: int = 3
    flat_rounds: int = 25
    heavy: float = 16_000  # rows x slots, beyond which a round is a single step


PRESETS = {
    "cpu": Size(Shape(1024, 2, 16, 2816, 512)),
    # The width of a 7B model. Each of its layers does the same work, so a few show what all cost.
    "gpu": Size(Shape(4096, 8, 32, 11008, 32000), rounds=7, steps=16, heavy=float("inf")),
}
QUICK = Size(Shape(64, 2, 4, 128, 96), (1, 2), (32,), ("gqa",), ("float32",), ((1, 4, 8),), (2, 32), 512, 2, 2, flat_rounds=2)

COLUMNS = (
    "hidden layers heads kv_heads head_dim measure policy positions dtype kv batch budget side tokens rounds steps round_ms round_q1_ms "
    "round_q3_ms step_ms step_q1_ms step_q3_ms ratio ratio_q1 ratio_q3 error"
).split()
SHOWN = {"ours ms": "{ours_ms:.2f}", "floor ms": "{floor_ms:.2f}", "ours/floor": "{overhead:.3f}"}
SHOWN |= {f"over {side}": f"{{{side}}}" for side in (FULL, SHIFT, PUBLISHED, FUSED, GATHER, PAGES)} | {"logit error": "{error:.1e}"}


class Run:
    """One run of the benchmark: what is measured already is left out."""

    def __init__(self, size: Size, device: torch.device, results: Results, parts: Sequence[str] = PARTS) -> None:
        self.size, self.device, self.results, self.parts = size, device, results, parts
        self.skipped: list[str] = []
        self._pair: tuple[tuple[str, str, bool], Pair] | None = None

    def pair(self, cell: Cell) -> Pair:
        # Only policies that choose by attention need it to be like a trained model's, which half precision rounds more.
        key = (cell.kv, cell.dtype, cell.policy != "streaming")
        if self._pair is None or self._pair[0] != key:
            self._pair = None  # before the next ones are made
            self._pair = key, Pair.random(self.size.shape, cell.kv, self.device, cell.dtype, sharp=key[2])
        return self._pair[1]

    def jobs(self) -> Iterator[tuple[str, Row, Callable[[], list[Row] | None]]]:
        """Everything there is to measure: its name, its columns, and the work."""
        size = self.size
        for batch, heads, dim in size.writes:
            point = {"measure": "write", "dtype": "float32", "kv": f"{heads}x{dim}", "batch": batch, "budget": 1024}
            yield (
                f"write alone {batch} x {heads} x {dim}",
                point,
                lambda a=(batch, heads, dim): write_alone(*a, self.device, max(5, size.rounds)),
            )
        for kv, (policy, positions) in itertools.product(size.kv, POLICIES):
            cell = Cell("float32", kv, *size.single, policy, positions)
            if positions == "compact":
                work = lambda cell=cell: flatness(cell, self.pair(cell), size.flat_rounds, size.steps)  # noqa: E731
                yield f"long text {cell}", {"measure": "flat", **asdict(cell)}, work
        for policy in ("streaming", "h2o", "future"):
            cell = Cell("float32", "gqa", 1, size.single[1], policy, "auto")
            # A model that comes to repeat itself, as prompt lookup needs it.
            pair = replace(cell, policy="streaming")
            work = lambda cell=cell, pair=pair: drafting(cell.policy, self.pair(pair), cell.budget, size.rounds)  # noqa: E731
            yield f"drafts {cell}", {"measure": "drafts", **asdict(cell)}, work
        for policy in PRUNED:
            cell = Cell("float32", "gqa", 1, size.prompt, policy, "auto")
            work = lambda cell=cell: pruning(cell.policy, self.pair(cell), cell.budget, size.rounds)  # noqa: E731
            yield f"prune {cell}", {"measure": "prune", **asdict(cell)}, work
        for dtype, kv, policy, batch, budget in itertools.product(size.dtypes, size.kv, POLICIES, size.batches, size.budgets):
            cell = Cell(dtype, kv, batch, budget, *policy)
            yield str(cell), {"measure": "decode", **asdict(cell)}, lambda cell=cell: self.decode(cell)

    def decode(self, cell: Cell) -> list[Row] | None:
        shape = self.size.shape
        if bytes_needed(cell, shape) > bytes_free(self.device):
            return None
        steps = self.size.steps if cell.batch * cell.budget <= self.size.heavy else 1
        settings = {"kv_heads": shape.kv_heads(cell.kv), "head_dim": shape.head_dim, "steps": steps}
        return [settings | row for row in measure(cell, self.pair(cell), self.size.rounds, steps)]

    @torch.no_grad()
    def go(self) -> None:
        todo = [job for job in self.jobs() if job[1]["measure"] in self.parts and not self.results.has(**job[1])]
        if todo:
            print("\n".join(prove(self.size.shape, self.device, quick=self.size.flat_rounds == 2)))
        for name, point, work in (progress := tqdm(todo, unit="cell")):
            progress.set_description(name)
            try:
                rows = work()
            except DisagreementError as error:
                self.skipped.append(f"{name}: {error}")
                continue
            if rows is None:
                self.skipped.append(f"{name}: not enough memory, not measured")
            else:
                self.results.add({"steps": self.size.steps, **point, **row} for row in rows)


def summaries(rows: Sequence[Row]) -> list[Row]:
    """A row for each cell: ours beside the floor and beside all other sides."""
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows_where(rows, measure="decode"):
        cells.setdefault(tuple(row[name] for name in Cell.__annotations__), {})[row["side"]] = row
    found = []
    for key, sides in cells.items():
        floor = min(sides[name]["step_ms"] for name in FLOORS if name in sides)
        summary = dict(zip(Cell.__annotations__, key, strict=True)) | {"side": OURS, "error": sides[OURS]["error"]}
        summary |= {"ours_ms": sides[OURS]["step_ms"], "floor_ms": floor, "overhead": sides[OURS]["step_ms"] / floor}
        summary |= {name: f"{row['ratio']:.2f}x ({row['ratio_q1']:.2f}-{row['ratio_q3']:.2f})" for name, row in sides.items()}
        found.append(summary)
    return found


def report(rows: Sequence[Row]) -> str:
    """One table a policy, and one for writing alone."""
    cells, parts = summaries(rows), []
    for policy, positions in POLICIES:
        group = rows_where(cells, policy=policy, positions=positions)
        parts += [show(group, {f"{policy}, {positions}": "{dtype} {kv} {batch} x {budget}", **SHOWN})] if group else []
    writes = rows_where(rows, measure="write", side="tensors rebuilt")
    columns = {"KV update alone, 64 of 1,024 tokens": "{batch} x {kv}", "policy": "{policy}", "rebuilt ms": "{round_ms:.2f}"}
    parts.append(show(writes, columns | {"in place": "{ratio:.1f}x"}))
    drafts = rows_where(rows, measure="drafts")
    parts.append(show(drafts, {"drafts of 8 tokens": "{policy}, {side}", "ms a token": "{round_ms:.2f}"}))
    columns = {"4,096 tokens pruned to a quarter": "{policy}, {side}", "ms": "{round_ms:.0f}", "of the prefill": "{ratio:.3f}"}
    parts.append(show(rows_where(rows, measure="prune"), columns))
    return "\n\n".join(parts)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """A step of each side, for each policy, precision and number of heads; of the floors the fastest one of each cell."""
    made = []
    for (policy, positions), dtype, kv in itertools.product(POLICIES, ("float32", "bfloat16"), ("mha", "gqa")):
        where = {"policy": policy, "positions": positions, "dtype": dtype, "kv": kv}
        steps = rows_where(rows, measure="decode", **where)
        floors: dict[tuple[int, int], Row] = {}
        for row in sorted((row for row in steps if row["side"] in FLOORS), key=lambda row: row["step_ms"]):
            floors.setdefault((row["batch"], row["budget"]), row | {"side": "fastest floor"})
        sides = [row for row in sorted(steps, key=lambda row: (row["batch"], row["budget"])) if row["side"] not in FLOORS]
        title = f"{policy}, {positions} positions, {dtype}, {kv}"
        made.append(Panel(title, [*sides, *floors.values()], "{side}", "{batch} x {budget}", "step_ms", log="y", unit="ms a step"))
    return made


def bars() -> list[Bar]:
    """What is promised; the paper's numbers are beside the claims."""
    large = {"also": lambda row: row["batch"] >= LARGE_BATCH, "mean": True}
    promised = []
    for dtype, kv in itertools.product(("float32", "bfloat16"), ("mha", "gqa")):
        where = {"measure": "decode", "dtype": dtype, "kv": kv, "policy": "streaming", "positions": "compact", "side": PUBLISHED}
        least = 2.5 if kv == "mha" else 1.4
        text = f"streaming at least {least}x as fast as {PUBLISHED}, {dtype} {kv}, batch >= {LARGE_BATCH} (paper: 1.62x on 60 cores)"
        promised.append(Bar(text, where, least=least, **large))
        for positions in ("compact", "original"):
            where = {"measure": "decode", "dtype": dtype, "kv": kv, "policy": "h2o", "positions": positions, "side": GATHER}
            text = f"h2o {positions} at least 4x as fast as {GATHER}, {dtype} {kv}, batch >= {LARGE_BATCH} (paper: 3.45x to 4.48x)"
            promised.append(Bar(text, where, least=4.0, **large))
        where = {"policy": "streaming", "positions": "compact", "dtype": dtype, "kv": kv}
        promised.append(Bar(f"streaming, a step at most 1.15x the floor, {dtype} {kv}", where, "overhead", most=1.15, name="batch"))
    for policy, paper in (("streaming", "26.5x to 50.6x"), ("h2o", "11.6x to 39.9x")):
        where = {"measure": "write", "policy": policy, "side": "tensors rebuilt"}
        promised.append(Bar(f"KV update alone at least 25x as fast, {policy} (paper: {paper})", where, least=25.0, mean=True))
    where = {"measure": "drafts", "side": "one by one"}
    promised.append(Bar("prompt lookup faster than one token at a time", where, least=1.0, name="policy"))
    for policy, most in PRUNED.items():
        where = {"measure": "prune", "policy": policy, "side": "pruned"}
        promised.append(Bar(f"reading and pruning 4,096 tokens at most {most}x their prefill, {policy}", where, most=most))
    where = {"measure": "flat", "tokens": 100_000}
    promised.append(Bar("a step after 100,000 tokens at most 1.10x that after 1,000", where, most=1.10, name="kv"))
    return promised


def size_of(args: argparse.Namespace, device: torch.device) -> Size:
    size = QUICK if args.quick else PRESETS[args.preset or ("cpu" if device.type == "cpu" else "gpu")]
    chosen = {name: tuple(value) for name in ("batches", "budgets", "kv", "dtypes") if (value := getattr(args, name)) is not None}
    return replace(size, **chosen)


def main() -> None:
    parser = arguments(__doc__, "device", "csv", "plot", "quick")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="sizes for a CPU or a GPU; default: those for the device")
    parser.add_argument("--batches", nargs="+", type=int, help="only these")
    parser.add_argument("--budgets", nargs="+", type=int, help="only these")
    parser.add_argument("--kv", nargs="+", choices=("mha", "gqa"), help="only these: multi-head, or four query heads to a key head")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), help="only these")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    args = parser.parse_args()
    check_counts(args, ["batches", "budgets"])
    device = begin(args)
    size = size_of(args, device)
    print_environment(device)
    sizes = {"hidden": size.shape.hidden, "layers": size.shape.layers, "heads": size.shape.heads, "rounds": size.rounds}
    run = Run(size, device, Results(args.csv, COLUMNS, device, **sizes), args.part)
    run.go()
    rows = run.results.rows
    print("\n".join([report(rows), *run.skipped, "", verdicts(bars(), [*rows, *summaries(rows)])]))
    if args.plot:
        draw(args.plot, title_of(device, PICTURE), panels(rows))


if __name__ == "__main__":
    run_script(main)
