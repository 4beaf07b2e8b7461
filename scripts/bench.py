"""Times every cache beside DynamicCache: prompts, decode steps, first tokens, on any device.

    python scripts/bench.py [speed] [reuse] [equip] [--device cpu] [--dtype float32] [--cells 1x2048 8x8192] [--csv docs/benchmarks]

**speed**: prompts and decode steps of all caches at each batch x tokens, at the size of Qwen3-0.6B. SegmentReuseCache finds nine tenths of
a prompt in its store, WarmStartCache a prompt that differs in ten words in its library (one row), TranslatedCache codes of all tokens but
the last; what a cache needs beforehand is not in its times.
**reuse**: the first token of a prompt of which most is stored, by back-end, bit-equal or rounded to 8 bits. `prefix`: nine tenths begin an
earlier prompt. `moved`: five of its pages in another order, mode="approximate". `aligned`: ten other words, a warm start. `possible` is
what the saved FLOPs allow, `efficiency` the share of it that is reached, `extra` the peak memory beside what the cache keeps, as a share of
the reused keys and values. `no repeats` are requests of which nothing is stored.
**equip**: EquipCache beside pruned caches as they are published, and beside the forward pass alone, at each batch x budget.

Weights are random. All sides of a cell run in turns in one process, and only once their logits agree. Times are those of the processor on
a CPU (one thread but for equip), of the clock on a GPU. Rows are written when they are done; the same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shared import BENCHMARKS, ROOT, equip_cells, reuse_cells
from shared.cli import arguments, begin, check_counts, run_script
from shared.models import Shape, bytes_free
from shared.results import Results, read_csv, tabulated
from shared.sides import FULL, SIDES, Bench, Side, ask, check
from tqdm import tqdm

from hf_kvcaches.cli.measure import in_turns
from hf_kvcaches.cli.tables import Row, environment, print_environment, write_csv
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.measures import cache_bytes

PACKAGED = ROOT / "hf_kvcaches" / "cli" / "speed.csv"
QUICK = Shape(64, 2, 4, 2, 16, 96, 256)
CELLS, QUICK_CELLS = ((1, 2048), (1, 8192), (8, 2048), (8, 8192)), ((1, 400), (2, 400))
ROUNDS, STEPS = 5, 4  # of decode steps
# Of speed tables, the packaged one too.
SPEED_COLUMNS = (
    *("hardware", "device", "threads", "dtype", "cache", "setting", "hidden", "layers", "heads", "kv_heads", "head_dim"),
    *("batch", "context", "prefill_s", "decode_ms", "prefill_ratio", "decode_ratio", "mib"),
)
SHOWN = "cache setting dtype batch context prefill_s prefill_ratio decode_ms decode_ratio mib"


@torch.no_grad()
def speed_rows(bench: Bench, side: Side, batch: int, context: int, runs: int) -> list[Row]:
    """The rows of a cache and of DynamicCache beside it in one cell."""
    first = bench.prompt(batch, context)
    (*prompts, spare), way = side.source(bench, first, runs + 1)
    if way.saved:  # the first prompt takes longer, for what is loaded at the first use
        ask(way.model, way.cache, spare)
    base, ours, cache = [], [], None
    for ids in prompts:
        cache = None
        full = ask(bench.model, bench.full_cache, ids)
        base.append(full.seconds)
        full = full._replace(cache=None)
        seconds, cache, logits = ask(way.model, way.cache, ids)
        ours.append(seconds)
        if way.saved and not way.saved(cache, context) > 0.5:
            raise SystemExit(f"{side}: nothing was reused, so nothing is timed: {cache.report()}")
        check(logits, full.logits if way.exact else None, bench.dtype, str(side))
    way.close()
    steps, sizes = decode(bench, cache, first[:, :1], context)
    shape, median = {**bench.shape.labels(), "dtype": bench.dtype, "batch": batch, "context": context}, statistics.median
    rows = []
    for name, setting, prompt in ((FULL, "", base), (side.cache, side.setting, ours)):
        row = {"cache": name, "setting": setting, "prefill_s": median(prompt), "decode_ms": 1e3 * median(steps[name])}
        row["prefill_ratio"] = median(a / b for a, b in zip(base, prompt, strict=True))
        row["decode_ratio"] = median(a / b for a, b in zip(steps[FULL], steps[name], strict=True))
        row = {column: round(value, 4) if isinstance(value, float) else value for column, value in row.items()}
        rows.append({**shape, **row, "mib": round(sizes[name] / 2**20, 1)})
    return rows


def decode(bench: Bench, cache: Any, ids: torch.Tensor, context: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of steps in turns with a DynamicCache of random numbers, since the clock does not know what is in it; bytes before."""
    model, shape, base = bench.model, bench.shape, bench.full_cache()
    random = torch.Generator(bench.device).manual_seed(3)
    for layer in range(shape.layers):
        size = (len(ids), shape.kv_heads, context, shape.head_dim)
        base.update(*(torch.randn(size, generator=random, device=bench.device, dtype=model.dtype) for _ in range(2)), layer)
    sides = {FULL: base, type(cache).__name__: cache}

    def steps(name: str) -> float:
        answer = ask(model, lambda: sides[name], ids, STEPS)
        check(answer.logits, None, bench.dtype, name)
        return answer.seconds / STEPS

    sizes = {name: cache_bytes(past) for name, past in sides.items()}
    return in_turns({name: lambda _, name=name: steps(name) for name in sides}, ROUNDS, warm_up=1), sizes


def bytes_needed(shape: Shape, dtype: str, batch: int, context: int) -> int:
    """Of weights and a cache with its reserve, beside a DynamicCache or a store, or beside the weights of a producer."""
    weights = shape.layers * shape.hidden * (3 * shape.intermediate + 2 * (shape.heads + shape.kv_heads) * shape.head_dim)
    states = 2 * shape.layers * shape.kv_heads * shape.head_dim * batch * context
    return int(getattr(torch, dtype).itemsize * max(weights + 2.2 * states, 2 * weights + 1.2 * states))


def speed(args: argparse.Namespace, device: torch.device) -> None:
    shape, fixed = QUICK if args.quick else Shape(), {name: environment(device)[name] for name in ("hardware", "device", "threads")}
    results, bench = Results(args.csv and args.csv / f"speed-{device.type}.csv", SPEED_COLUMNS, fixed), None
    for batch, context in args.cells or (QUICK_CELLS if args.quick else CELLS):
        if bytes_needed(shape, args.dtype, batch, context) > bytes_free(device):
            print(f"{args.dtype} {batch} x {context}: not enough memory, not measured")
            continue
        cell = {"dtype": args.dtype, "batch": batch, "context": context, **shape.labels()}
        chosen = [side for side in SIDES if side.cache in (args.caches or [side.cache]) and not (side.single and batch > 1)]
        for side in tqdm(chosen, desc=f"{args.dtype} {batch} x {context}", unit="row"):
            if not results.has(cache=side.cache, setting=side.setting, **cell):
                bench = bench or Bench(shape, args.dtype, device)
                for row in speed_rows(bench, side, batch, context, args.runs or (3 if batch * context <= 4096 else 1)):
                    results.add([row], cache=row["cache"], setting=row["setting"], **cell)
    print(tabulated(results.rows, SHOWN))
    if args.csv == BENCHMARKS and not args.quick:
        write_csv(PACKAGED, [row for path in sorted(args.csv.glob("speed-*.csv")) for row in read_csv(path)], columns=SPEED_COLUMNS)


def reuse(args: argparse.Namespace, device: torch.device) -> None:
    shape, tokens, hits = (QUICK, 400, 2) if args.quick else (Shape(), 2048, 3)
    results = Results(
        args.csv and args.csv / f"reuse-speed-{device.type}.csv", [*environment(device), *reuse_cells.COLUMNS], environment(device)
    )
    point = {"model": f"{shape.layers} x {shape.hidden}", "dtype": args.dtype, "tokens": tokens}
    missing = [section for section in reuse_cells.SECTIONS if not results.has(section=section, **point)]
    if missing:
        run = reuse_cells.Reuse(Bench(shape, args.dtype, device), tokens, hits, args.redis)
        for section in missing:
            for row in run.rows(section):
                named = {name: row.pop(name, "") for name in ("side", "stored")}
                results.add([row], section=section, **named, **point)
    print(tabulated(results.rows, reuse_cells.SHOWN))


@torch.no_grad()
def equip(args: argparse.Namespace, device: torch.device) -> None:
    grid = equip_cells.GRIDS["quick" if args.quick else "cpu" if device.type == "cpu" else "gpu"]
    grid = replace(grid, cells=tuple(args.cells or grid.cells))
    sizes = {"hidden": grid.shape.hidden, "layers": grid.shape.layers, "heads": grid.shape.heads, "rounds": grid.rounds}
    fixed = {**environment(device), **sizes}
    results = Results(args.csv and args.csv / f"equip-{device.type}.csv", [*environment(device), *equip_cells.COLUMNS], fixed)
    todo = [(point, work) for point, work in equip_cells.jobs(grid, args.dtype, device) if not results.has(**point)]
    for point, work in tqdm(todo, unit="cell"):
        results.add([{"steps": grid.steps, **row} for row in work()], **point)
    print(tabulated(results.rows, equip_cells.SHOWN))


def cell(text: str) -> tuple[int, int]:
    """A cell as a user types it."""
    try:
        batch, tokens = map(int, text.split("x"))
    except ValueError:
        raise ConfigError.of("--cells", "a batch and a number of tokens such as 8x2048", text) from None
    return batch, tokens


WHAT = {"speed": speed, "reuse": reuse, "equip": equip}


def main() -> None:
    parser = arguments(__doc__, "threads", "device", "quick")
    parser.add_argument("what", nargs="*", choices=[*WHAT, "all"], default="all")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--cells", nargs="+", metavar="BATCHxTOKENS", help="of speed, or batch x budget of equip")
    parser.add_argument("--caches", nargs="+", choices=sorted({side.cache for side in SIDES}), help="only these rows of speed")
    parser.add_argument("--runs", type=int, help="prompts of each cache in speed; default: 3, and 1 in cells of more than 4,096 tokens")
    parser.add_argument("--redis", metavar="URL", help="an empty database, to measure reuse through it, too; it is cleared")
    parser.add_argument("--csv", type=Path, metavar="FOLDER", help="of the files speed-, reuse-speed- and equip-DEVICE.csv")
    args = parser.parse_args()
    args.cells = [cell(text) for text in args.cells or ()]
    check_counts(args, ["threads", "runs"])
    device = begin(args)
    for name in WHAT if "all" in args.what else args.what:
        if device.type == "cpu" and args.threads is None:
            torch.set_num_threads(2 if name == "equip" else 1)
        print_environment(device)
        WHAT[name](args, device)


if __name__ == "__main__":
    run_script(main)
