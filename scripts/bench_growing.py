"""Times one decode step with the growing cache beside transformers' DynamicCache, which copies itself for every token.

    python scripts/bench_growing.py [--device auto] [--csv docs/benchmarks/growing.csv] [--plot docs/benchmarks/growing.png]

Both sides run in one process, round by round in turns, on the same random weights and the same filled cache; before a cell is timed, the
logits of both sides are compared. A round is a fixed number of decode steps from the same length, and what it added is cropped before the
next. So the time in which a growing buffer is replaced by a larger one is not in the numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from shared.cli import arguments, begin, run_script
from shared.models import Pair, Shape
from shared.plot import Panel, draw, title_of
from shared.results import Row, environment, print_environment, show, write_csv
from shared.timing import in_turns, ratios, seconds_of, spread
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_kvcaches import GrowingCache

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # of a logit; the logits are of the order of 1
LONGEST_BATCHED = 2048  # longer caches are measured for a single row only
PICTURE = "GrowingCache over DynamicCache"
MOST_ON_CPU = 20_000  # rows x tokens, beyond which a step takes seconds
CELL = "{dtype} {kv} {batch} x {tokens}"
COLUMNS = {
    "cell": CELL,
    "DynamicCache ms": "{step_dynamic_ms:.2f}",
    "growing ms": "{step_growing_ms:.2f}",
    "step ratio": "{step_ratio:.2f}x",
    "quartiles": "{step_ratio_q1:.2f}-{step_ratio_q3:.2f}",
    "update ratio": "{update_ratio:.2f}x",
    "quartiles of it": "{update_ratio_q1:.2f}-{update_ratio_q3:.2f}",
    "logit error": "{max_logit_error:.1e}",
}


@dataclass(frozen=True)
class Size:
    """The model around the cache, and how long to measure."""

    shape: Shape
    batches: tuple[int, ...] = (1, 8, 32)
    tokens: tuple[int, ...] = (512, 2048, 8192)
    kv: tuple[str, ...] = ("mha", "gqa")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    rounds: int = 7
    steps: int = 16


FULL = Size(Shape(512, 8, 8, 1536, 512))
QUICK = Size(Shape(64, 2, 8, 192, 512), (1, 2), (32,), ("gqa",), ("float32",), rounds=2, steps=4)


class Side:
    """A model with its cache, filled with random keys and values."""

    def __init__(self, model: PreTrainedModel, cache: Cache, batch: int, tokens: int) -> None:
        self.model, self.cache, self.tokens = model, cache, tokens
        config, random = model.config, torch.Generator().manual_seed(1)
        states = lambda *shape: torch.randn(batch, *shape, config.head_dim, generator=random).to(model.device, model.dtype)  # noqa: E731
        for layer in range(config.num_hidden_layers):
            cache.update(*(states(config.num_key_value_heads, tokens) for _ in range(2)), layer)
        self.new = [states(config.num_key_value_heads, 1) for _ in range(2)]
        self.ids = torch.randint(config.vocab_size, (batch, 1), generator=random).to(model.device)

    def forward(self, step: int) -> torch.Tensor:
        positions = torch.full((1, 1), self.tokens + step, device=self.model.device)
        return self.model(input_ids=self.ids, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits

    def update(self, step: int) -> None:
        for layer in range(self.model.config.num_hidden_layers):
            self.cache.update(*self.new, layer)

    def seconds(self, work: Callable[[int], object], steps: int) -> float:
        """Seconds of a step, the mean of a round; the cache is as long afterwards as before."""
        seconds = seconds_of(lambda: [work(step) for step in range(steps)], self.model.device) / steps
        self.cache.crop(-steps)
        return seconds


def measure(cell: dict[str, object], pair: Pair, size: Size) -> Row:
    """A row with the times of both sides, for the whole forward pass and for `cache.update` of all layers alone."""
    batch, tokens, tolerance = cell["batch"], cell["tokens"], TOLERANCE[str(cell["dtype"])]
    caches = {"dynamic": (pair.plain, DynamicCache(config=pair.plain.config)), "growing": (pair.switched, GrowingCache(pair.switched))}
    sides = {name: Side(model, cache, batch, tokens) for name, (model, cache) in caches.items()}
    logits = [torch.stack([side.forward(step) for step in range(size.steps)]) for side in sides.values()]
    error = float((logits[0] - logits[1]).abs().max())
    if not error <= tolerance:
        raise SystemExit(f"{CELL.format(**cell)}: the logits differ by {error:.3g}, more than {tolerance:.0e}: nothing timed")
    for side in sides.values():
        side.cache.crop(-size.steps)
    row = {**cell, "rounds": size.rounds, "steps": size.steps, "max_logit_error": error}
    for name, method in (("step", Side.forward), ("update", Side.update)):
        works = {side: lambda _, at=at, method=method: at.seconds(lambda step: method(at, step), size.steps) for side, at in sides.items()}
        seconds = in_turns(works, size.rounds, warm_up=1)
        for side, times in seconds.items():
            row |= spread(f"{name}_{side}", times, 1e3)
        row |= {f"{name}_{column}": value for column, value in ratios(seconds["dynamic"], seconds["growing"]).items()}
    return row


@torch.no_grad()
def run(size: Size, device: torch.device) -> list[Row]:
    most = MOST_ON_CPU if device.type == "cpu" else float("inf")
    fits = lambda batch, tokens: (tokens <= LONGEST_BATCHED or batch == 1) and batch * tokens <= most  # noqa: E731
    points = [point for point in itertools.product(size.batches, size.tokens) if fits(*point)]
    rows = []
    for dtype, kv in itertools.product(size.dtypes, size.kv):
        pair = Pair.random(size.shape, kv, device, dtype)
        for batch, tokens in tqdm(points, desc=f"{dtype} {kv}", unit="cell"):
            rows.append(measure({"dtype": dtype, "kv": kv, "batch": batch, "tokens": tokens}, pair, size))
    return rows


def panels(rows: Sequence[Row]) -> list[Panel]:
    """How many times as fast a whole step is, and the cache's own part of it."""
    named = {"step": "a whole decode step", "update": "the update of the cache alone"}
    title = "{}, times as fast as DynamicCache, by batch x tokens"
    return [
        Panel(title.format(text), rows, "{dtype} {kv}", "{batch} x {tokens}", f"{name}_ratio", log="y", levels=(1.0,))
        for name, text in named.items()
    ]


def main() -> None:
    args = arguments(__doc__, "device", "csv", "plot", "quick").parse_args()
    device = begin(args)
    print_environment(device)
    rows = run(QUICK if args.quick else FULL, device)
    print(show(rows, COLUMNS))
    if args.csv:
        write_csv(args.csv, rows, environment(device))
    if args.plot:
        draw(args.plot, title_of(device, PICTURE), panels(rows))


if __name__ == "__main__":
    run_script(main)
