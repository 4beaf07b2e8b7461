"""Renews the speed table: prefill and decode step of every cache beside DynamicCache, at the size of a real model.

    python scripts/bench_speed_table.py [--device cpu] [--dtype float32] [--cells 1x2048 8x8192] [--memory 6]

The model is a Llama with random weights: 28 layers of hidden size 1,024 with 16 query and 8 key heads of 128. A cell is a batch and a
number of tokens. In each cell every cache is measured beside DynamicCache in the same process: prefills in turns (the median of `--runs`),
then decode steps in turns. On a CPU times are those of the processor on one thread, so that other jobs matter little; on a GPU those of the
clock. Nothing is timed before logits are compared: a prompt must have those of DynamicCache wherever a cache is exact about it, a growing
cache and a prefix from a store in decode steps too, and all must be finite.

What a cache needs beforehand is not in its times: a codec, what a store or library holds, codes of another model. SegmentReuseCache finds
nine tenths of a prompt in its store, WarmStartCache a prompt that differs in ten words in its library (one row), TranslatedCache codes of
all tokens but the last.

Every row is kept in `.speed/` when it is done, and the same command goes on with those that are missing. Cells that memory is too small
for are left out, and named. Then the table is written: docs/benchmarks/speed-DEVICE.csv, that of all devices in hf_kvcaches/cli/speed.csv,
and docs/benchmarks/speed.md between its markers.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _speed_sides import QUICK, SIDES, Bench, Side, Size, Source
from shared import ROOT
from shared.cli import OPTIONS, arguments, begin, check_counts, run_script
from shared.models import bytes_free
from shared.results import Results, Row, environment, print_environment, rows_where, write_csv
from shared.timing import MIB, in_turns, synchronize
from tqdm import tqdm
from transformers import DynamicCache

from hf_kvcaches import GrowingCache, SegmentReuseCache, SegmentStore
from hf_kvcaches.cli.bench import SPEED_COLUMNS
from hf_kvcaches.core.report import measured_bytes
from hf_kvcaches.errors import ConfigError

ROW = list(SPEED_COLUMNS)
KEY = ROW[: ROW.index("prefill_s")]  # what a row is found by
FULL = "DynamicCache"
BENCHMARKS, PACKAGED = Path("docs", "benchmarks"), Path("hf_kvcaches", "cli", "speed.csv")
MARKERS = "<!-- speed table: begin -->", "<!-- speed table: end -->"


def write_reports(results: Results, device: torch.device, size: Any, root: Path) -> None:
    """Renew all files with the rows of a device; rows of the committed file that were not measured anew stay.

    Args:
        size: Of the model, with `labels()`.
        root: Of the checkout.
    """
    where = {name: environment(device)[name] for name in ("hardware", "device", "threads")}
    measured = [{**where, **row} for row in rows_where(results.rows, **size.labels())]
    path = root / BENCHMARKS / f"speed-{device.type}.csv"
    rows = merged(read(path), [as_text(row) for row in [*full_rows(measured), *measured]])
    write_csv(path, rows, columns=ROW)
    together = [row for file in sorted(path.parent.glob("speed-*.csv")) for row in read(file)]
    write_csv(root / PACKAGED, together, columns=ROW)
    document = path.with_name("speed.md")
    if document.exists():
        begin, end = MARKERS
        text = document.read_text(encoding="utf-8")
        tables = f"{begin}\n{tables_of(together)}\n{end}"
        document.write_text(re.sub(f"{begin}.*{end}", lambda _: tables, text, flags=re.S), encoding="utf-8")
    print(tables_of(rows))


def full_rows(rows: Sequence[Row]) -> list[Row]:
    """DynamicCache's row of each cell: the medians of what it took beside the others."""
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["dtype"], row["batch"], row["context"]), []).append(row)
    found = []
    for sides in cells.values():
        row = sides[0]
        median = lambda name, sides=sides: round(statistics.median(side[name] for side in sides), 4)  # noqa: E731
        itemsize = getattr(torch, row["dtype"]).itemsize
        nbytes = 2 * row["layers"] * row["kv_heads"] * row["head_dim"] * row["batch"] * row["context"] * itemsize
        times = {"prefill_s": median("base_prefill_s"), "decode_ms": median("base_decode_ms"), "prefill_ratio": 1.0, "decode_ratio": 1.0}
        found.append({**row, "cache": FULL, "setting": "", **times, "mib": round(nbytes / 2**20, 1)})
    return found


def as_text(row: Row) -> dict[str, str]:
    """The columns of the table as a file has them."""
    return {name: str(row.get(name, "")) for name in ROW}


def read(path: Path) -> list[dict[str, str]]:
    """A table's rows; none where the file is not there yet."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def merged(old: Sequence[dict[str, str]], new: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """All rows, the new ones in place of old ones of the same key, ordered by cell with DynamicCache first."""
    rows = {tuple(row[name] for name in KEY): row for row in [*old, *new]}

    def order(row: dict[str, str]) -> tuple[Any, ...]:
        batch, context = int(row["batch"]), int(row["context"])
        return row["hardware"], row["dtype"] != "float32", batch * context, batch, row["cache"] != FULL

    return sorted(rows.values(), key=order)


def tables_of(rows: Sequence[dict[str, str]]) -> str:
    """A Markdown table for each processor and precision."""
    groups = dict.fromkeys((row["hardware"], row["device"], row["threads"], row["dtype"]) for row in rows)
    parts = []
    for hardware, device, threads, dtype in groups:
        group = rows_where(rows, hardware=hardware, device=device, threads=threads, dtype=dtype)
        cells = list(dict.fromkeys((row["batch"], row["context"]) for row in group))
        sides = list(dict.fromkeys((row["cache"], row["setting"]) for row in group))
        lines = [["cache", *(f"{batch} x {int(context):,}" for batch, context in cells)], ["---"] * (len(cells) + 1)]
        for cache, setting in sides:
            found = {(row["batch"], row["context"]): row for row in rows_where(group, cache=cache, setting=setting)}
            lines.append([f"`{cache}({setting})`" if setting else f"`{cache}`", *(cell_text(found.get(cell)) for cell in cells)])
        where = f"{threads} thread{'' if threads == '1' else 's'} of {hardware}" if device == "cpu" else hardware
        parts.append(f"### {dtype}, {where}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def cell_text(row: dict[str, str] | None) -> str:
    if row is None:
        return "-"
    memory = f"{float(row['mib']):,.0f} MiB"
    if row["cache"] == FULL:
        return f"{float(row['prefill_s']):.2f} s, {float(row['decode_ms']):.0f} ms, {memory}"
    return f"{float(row['prefill_ratio']):.2f}x, {float(row['decode_ratio']):.2f}x, {memory}"


CELLS = ((1, 2048), (1, 8192), (8, 2048), (8, 8192))
QUICK_CELLS = ((1, 400), (2, 400))
TOLERANCE = {"float32": 1e-3, "bfloat16": 6e-2, "float16": 6e-2}  # of logits of the order of 1
RUNS, FEW = 3, 4096  # prefills of a cell of so few tokens
COLUMNS = [*ROW, "base_prefill_s", "base_decode_ms", "runs"]


@dataclass(frozen=True)
class Times:
    """Seconds of a side and of DynamicCache, run by run or round by round."""

    ours: list[float]
    base: list[float]

    def ratio(self) -> float:
        """How many times as fast as DynamicCache, the median over pairs."""
        return round(statistics.median(base / ours for ours, base in zip(self.ours, self.base, strict=True)), 4)


class Cell:
    """One batch and context on a bench."""

    def __init__(self, bench: Bench, batch: int, context: int, runs: int | None) -> None:
        self.bench, self.batch, self.context = bench, batch, context
        self.first = bench.prompt(batch, context)
        self.runs = runs or (RUNS if batch * context <= FEW else 1)
        self._clock = time.process_time if bench.device.type == "cpu" else time.perf_counter

    def measure(self, side: Side) -> Row:
        """A row of the table."""
        source = side.source(self.bench, self.first, self.runs + 1)
        prefill, cache = self._prefill(source, str(side))
        source.close()
        decode, nbytes = self._decode(cache, str(side))
        row = {"cache": side.cache, "setting": side.setting, **self.bench.size.labels(), "batch": self.batch, "context": self.context}
        row |= {"prefill_s": seconds(prefill.ours), "prefill_ratio": prefill.ratio(), "base_prefill_s": seconds(prefill.base)}
        row |= {"decode_ms": seconds(decode.ours, 1e3), "decode_ratio": decode.ratio(), "base_decode_ms": seconds(decode.base, 1e3)}
        return row | {"mib": round(nbytes / MIB, 1), "runs": self.runs}

    def _timed(self, model: Any, make: Callable[[], Any], ids: torch.Tensor) -> tuple[float, Any, torch.Tensor]:
        """Seconds of a prompt with the making of its cache, the cache, and the last logits."""
        synchronize(self.bench.device)
        begin = self._clock()
        cache = make()
        logits = feed(model, cache, ids)
        synchronize(self.bench.device)
        return self._clock() - begin, cache, logits

    def _prefill(self, source: Source, name: str) -> tuple[Times, Any]:
        """Prompts in turns with DynamicCache."""
        pair, times, cache = self.bench.pair, Times([], []), None
        if source.warm_up:
            self._timed(pair.switched, source.cache, source.prompts[-1])
        for number in range(self.runs):
            ids, cache = source.prompts[number], None
            base, expected = self._timed(pair.plain, self.bench.full_cache, ids)[::2]  # its cache is not kept
            ours, cache, logits = self._timed(pair.switched, source.cache, ids)
            if not source.reuses(cache):
                raise SystemExit(f"{name}: nothing was reused, so nothing is timed: {cache.report()}")
            check(logits, expected if source.exact else None, self.bench.dtype, name)
            times.ours.append(ours)
            times.base.append(base)
        return times, cache

    def _decode(self, cache: Any, name: str) -> tuple[Times, int]:
        """Steps in turns with a DynamicCache of random numbers, since the clock does not know what is in it."""
        pair, size, base = self.bench.pair, self.bench.size, self.bench.full_cache()
        random = torch.Generator(self.bench.device).manual_seed(3)
        shape = (self.batch, size.kv_heads, self.context, size.head_dim)
        for layer in range(size.layers):
            states = (torch.randn(shape, generator=random, device=self.bench.device, dtype=pair.plain.dtype) for _ in range(2))
            base.update(*states, layer)
        ids = self.first[:, :1]

        def steps(model: Any, past: Any) -> float:
            synchronize(self.bench.device)
            begin = self._clock()
            for _ in range(size.steps):
                logits = feed(model, past, ids)
            synchronize(self.bench.device)
            check(logits, None, self.bench.dtype, name)
            return (self._clock() - begin) / size.steps

        works = {"ours": lambda _: steps(pair.switched, cache), "base": lambda _: steps(pair.plain, base)}
        return Times(**in_turns(works, size.rounds, warm_up=1)), bytes_of(cache)


def feed(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits


def check(logits: torch.Tensor, expected: torch.Tensor | None, dtype: str, name: str) -> None:
    """End the run where logits are not those that are expected, or not finite."""
    if not bool(logits.isfinite().all()):
        raise SystemExit(f"{name}: logits are not finite: nothing timed")
    if expected is not None and not (error := float((logits.float() - expected.float()).abs().max())) <= TOLERANCE[dtype]:
        raise SystemExit(f"{name}: logits differ by {error:.3g}, more than {TOLERANCE[dtype]:.0e}: nothing timed")


def seconds(values: list[float], factor: float = 1.0) -> float:
    return round(statistics.median(values) * factor, 4)


def bytes_of(cache: Any) -> int:
    if isinstance(cache, DynamicCache):
        return measured_bytes(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    return int(cache.report().bytes)


def prove(bench: Bench) -> None:
    """Compare logits of decode steps behind a short prompt: of a growing cache, and of a prefix from a store."""
    prompt, *tokens = bench.prompt(2, 72).split([64, *[1] * 8], 1)
    store = SegmentStore("memory")
    makers = {"store": lambda: SegmentReuseCache(bench.pair.switched, store), "growing": lambda: GrowingCache(bench.pair.switched)}
    feed(bench.pair.switched, makers["store"](), prompt[:, :50])
    store.flush()
    full = bench.full_cache()
    expected = [feed(bench.pair.plain, full, ids) for ids in (prompt, *tokens)]
    for name, make in makers.items():
        cache = make()
        for ids, logits in zip((prompt, *tokens), expected, strict=True):
            check(feed(bench.pair.switched, cache, ids), logits, bench.dtype, name)
    store.close()


def bytes_needed(size: Size, dtype: str, batch: int, context: int) -> int:
    """Of weights and a cache with its reserve, beside a DynamicCache or a store, or beside the weights of a producer."""
    itemsize = getattr(torch, dtype).itemsize
    weights = size.layers * size.hidden * (3 * size.intermediate + 2 * (size.heads + size.kv_heads) * size.head_dim)
    states = 2 * size.layers * size.kv_heads * size.head_dim * batch * context
    return int(itemsize * max(weights + 2.2 * states, 2 * weights + 1.2 * states))


def jobs(args: argparse.Namespace, size: Size, device: torch.device, results: Results) -> Iterator[tuple[int, int, Side]]:
    """What is to be measured and is not there yet; cells that do not fit into memory are named."""
    for batch, context in args.cells or (QUICK_CELLS if args.quick else CELLS):
        if bytes_needed(size, args.dtype, batch, context) > min(args.memory * 1024 * MIB, bytes_free(device)):
            print(f"{args.dtype} {batch} x {context}: not enough memory, not measured")
            continue
        for side in SIDES:
            if args.caches and side.cache not in args.caches:
                continue
            point = {"dtype": args.dtype, "cache": side.cache, "batch": batch, "context": context, **size.labels()}
            same = [row for row in results.rows if row.get("setting", "") == side.setting and point.items() <= row.items()]
            if not same and not (side.single and batch > 1):
                yield batch, context, side


def cell(text: str) -> tuple[int, int]:
    """A cell as a user types it."""
    try:
        batch, context = map(int, text.split("x"))
    except ValueError:
        raise ConfigError.of("--cells", "a batch and a number of tokens such as 8x2048", text) from None
    return batch, context


@torch.no_grad()
def main() -> None:
    parser = arguments(__doc__, "threads", "quick")
    parser.add_argument("--device", **OPTIONS["device"] | {"default": "cpu"})
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--cells", nargs="+", metavar="BATCHxTOKENS", help="default: all of 1 and 8 times 2,048 and 8,192")
    parser.add_argument("--caches", nargs="+", choices=sorted({side.cache for side in SIDES}), help="default: all")
    parser.add_argument("--runs", type=int, help="prefills of each cache; default: 3, and 1 in cells of more than 4,096 tokens")
    parser.add_argument("--memory", type=float, default=float("inf"), metavar="GIB", help="cells that need more are left out")
    parser.add_argument("--state", type=Path, default=ROOT / ".speed", help="where rows and artifacts are kept between runs")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the checkout whose table is renewed")
    args = parser.parse_args()
    args.cells = [cell(text) for text in args.cells or ()]
    if args.threads is None and args.device == "cpu":
        args.threads = 1
    check_counts(args, ["threads", "runs"])
    device, size = begin(args), QUICK if args.quick else Size()
    print_environment(device)
    results = Results(args.state / f"rows-{device.type}.csv", COLUMNS, device)
    bench: Bench | None = None
    for batch, context, side in (progress := tqdm(list(jobs(args, size, device, results)), unit="row")):
        progress.set_description(f"{args.dtype} {batch} x {context} {side.cache}")
        if bench is None:
            bench = Bench(size, args.dtype, device, args.state)
            prove(bench)
        results.add([{"dtype": args.dtype, **Cell(bench, batch, context, args.runs).measure(side)}])
    write_reports(results, device, size, args.root)


if __name__ == "__main__":
    run_script(main)
