"""What `bench.py equip` times: `EquipCache` beside pruned caches as they are published, and beside the forward pass alone."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache
from hf_kvcaches.cli.measure import in_turns, ratios, spread
from hf_kvcaches.cli.tables import Row
from hf_kvcaches.evaluate.runner import synchronize
from shared import baselines
from shared.models import Shape, bytes_free, random_ids, with_attention
from shared.sides import feed

OURS, FULL, PAGES = "EquipCache", "DynamicCache", "EquipCache, pages of 16"
PUBLISHED, FUSED = "re-rotate all (published formula)", "re-rotate all (fused)"
SHIFT, GATHER = "shift and append, no rotation", "gather and append"
TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2}  # of a logit; the logits are of the order of 1
SINKS = 4
POLICIES = (("streaming", "compact"), ("streaming", "original"), ("h2o", "compact"), ("h2o", "original"), ("future", "compact"))
COLUMNS = (
    "hidden layers heads kv_heads head_dim measure policy positions dtype kv batch budget side tokens rounds steps round_ms round_q1_ms "
    "round_q3_ms step_ms step_q1_ms step_q3_ms ratio ratio_q1 ratio_q3 error"
).split()
SHOWN = "measure policy positions dtype kv batch budget side tokens round_ms ratio ratio_q1 ratio_q3 error"


@dataclass(frozen=True)
class Grid:
    """The model around the cache, the cells, and how long to measure."""

    shape: Shape
    cells: tuple[tuple[int, int], ...] = ((1, 256), (1, 512), (1, 1024), (8, 256), (8, 512), (8, 1024), (32, 512))  # batch, budget
    kv: tuple[str, ...] = ("mha", "gqa")
    single: tuple[int, int] = (8, 512)  # batch and budget of what is measured once
    seen: tuple[int, ...] = (1_000, 10_000, 100_000)
    rounds: int = 9
    steps: int = 3


GRIDS = {
    "cpu": Grid(Shape(1024, 2, 16, 16, 64, 2816, 512)),
    # The width of a 7B model. Each of its layers does the same work, so a few show what all cost.
    "gpu": Grid(Shape(4096, 8, 32, 32, 128, 11008, 32000), rounds=7, steps=16),
    "quick": Grid(Shape(64, 2, 4, 4, 16, 128, 96), ((2, 32),), ("gqa",), (2, 32), (50, 200), 2, 2),
}


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    dtype: str
    kv: str
    batch: int
    budget: int
    policy: str
    positions: str

    def cache(self, model: PreTrainedModel, **options: Any) -> EquipCache:
        return EquipCache(model, self.policy, self.budget, sinks=SINKS, positions=self.positions, **options)


def competitors(cell: Cell, model: PreTrainedModel, positions: int) -> dict[str, tuple[PreTrainedModel, Cache]]:
    """Each side's model and empty cache; `positions` are those that baselines may rotate keys to."""
    of = baselines.cache_of
    settings = (cell.budget, SINKS)
    sides: dict[str, tuple[PreTrainedModel, Cache]] = {FULL: (model, DynamicCache(config=model.config))}
    if cell.policy == "h2o":
        rotation = baselines.Rotation(model, positions) if cell.positions == "compact" else None
        make = lambda: baselines.GatherAppendLayer(*settings, rotation)  # noqa: E731
        sides[GATHER] = with_attention(model, baselines.GATHER_ATTENTION), of(model, make)
    if cell.policy == "streaming":
        sides[SHIFT] = model, of(model, lambda: baselines.ShiftAppendLayer(*settings))
    if cell.policy == "streaming" and cell.positions == "compact":
        for name, fused in ((PUBLISHED, False), (FUSED, True)):
            rotation = baselines.Rotation(model, positions, fused)
            sides[name] = model, of(model, lambda rotation=rotation: baselines.RerotateAllLayer(*settings, rotation))
    if cell.policy != "future":  # whose heads keep different numbers of tokens
        sides[PAGES] = model, cell.cache(model, page_size=16)
    sides[OURS] = model, cell.cache(model)
    return sides | {"floor": (model, of(model, lambda: baselines.FrozenLayer(cell.budget, 0)))}


class Side:
    """A model with its cache, filled by one row that was then repeated: what is in the rows does not matter to the clock."""

    def __init__(self, name: str, model: PreTrainedModel, cache: Cache, cell: Cell, tokens: int) -> None:
        self.name, self.model, self.cache, self.cell = name, model, cache, cell
        self.vocabulary = model.config.vocab_size
        for block in random_ids(self.vocabulary, 1, tokens, seed=1).to(model.device).split(2048, 1):
            feed(model, cache, block)
        if cell.batch > 1:
            cache.batch_repeat_interleave(cell.batch)
        self.ids = random_ids(self.vocabulary, cell.batch, 1, seed=2).to(model.device)

    def decode(self, steps: int) -> list[float]:
        """Seconds of each of so many greedy steps; the full cache is as long afterwards as before."""
        ids, seconds = self.ids, []
        for _ in range(steps):
            synchronize(self.model.device)
            start = time.perf_counter()
            ids = feed(self.model, self.cache, ids).argmax(-1, keepdim=True)
            synchronize(self.model.device)
            seconds.append(time.perf_counter() - start)
        if self.name == FULL:
            self.cache.crop(-steps)
        return seconds

    def logits(self, steps: int) -> torch.Tensor:
        """Logits after tokens that are the same for all sides, (steps, batch, vocabulary)."""
        ids = random_ids(self.vocabulary, steps, self.cell.batch, 1, seed=3).to(self.model.device)
        return torch.stack([feed(self.model, self.cache, step) for step in ids]).float()


def compared(rounds: Mapping[str, Sequence[Sequence[float]]], ours: str) -> list[Row]:
    """A row for each side: milliseconds of rounds and of single steps, and how many times as fast ours is, round by round."""
    means = {name: [statistics.fmean(steps) for steps in times] for name, times in rounds.items()}
    return [
        {"side": name, **spread("round", means[name], 1e3), **spread("step", list(itertools.chain(*times)), 1e3)}
        | ratios(means[name], means[ours])
        for name, times in rounds.items()
    ]


def decode(cell: Cell, model: PreTrainedModel, grid: Grid) -> list[Row]:
    """Decode steps of all sides of a cell, after the logits of those that must agree do."""
    limit = 4 * cell.budget + 2 * grid.rounds * grid.steps
    made = competitors(cell, model, limit)
    sides = {name: Side(name, *side, cell, 2 * cell.budget if name == FULL else cell.budget + 8) for name, side in made.items()}
    alike = {OURS, PAGES, GATHER, *((PUBLISHED, FUSED) if cell.positions == "compact" else (SHIFT,))}
    logits = {name: side.logits(2) for name, side in sides.items() if name in alike}
    error = max(float((other - logits[OURS]).abs().max()) for other in logits.values())
    # In half precision nearly equal scores may fall either way, so policies that choose are not held to it there.
    if not error <= TOLERANCE[cell.dtype] and (cell.policy == "streaming" or cell.dtype == "float32"):
        raise SystemExit(f"{cell}: the logits differ by {error:.3g}, more than {TOLERANCE[cell.dtype]:.0e}: nothing timed")
    times = in_turns({name: lambda _, side=side: side.decode(grid.steps) for name, side in sides.items()}, grid.rounds, warm_up=1)
    labels = {"kv_heads": model.config.num_key_value_heads, "head_dim": model.config.head_dim}
    return [labels | row | ({"error": error} if row["side"] == OURS else {}) for row in compared(times, OURS)]


def flat(cell: Cell, model: PreTrainedModel, grid: Grid) -> list[Row]:
    """The time of a step after a thousand tokens and after many more, in turns."""
    sides = {str(seen): Side(OURS, model, cell.cache(model), cell, seen) for seen in grid.seen}
    times = in_turns({seen: lambda _, side=side: side.decode(grid.steps) for seen, side in sides.items()}, 2 * grid.rounds, warm_up=1)
    return [row | {"side": OURS, "tokens": int(row["side"])} for row in compared(times, str(grid.seen[0]))]


def jobs(grid: Grid, dtype: str, device: torch.device) -> Iterator[tuple[Row, Callable[[], list[Row]]]]:
    """Everything there is to measure: its columns, and the work."""

    # With multi-head attention, or with four query heads to a key head.
    shapes = {"mha": grid.shape, "gqa": replace(grid.shape, kv_heads=max(1, grid.shape.heads // 4))}
    # Only policies that choose by attention need it to be like a trained model's, which half precision rounds more.
    make = lru_cache(1)(lambda kv, sharp: shapes[kv].random(device, dtype, sharp=sharp))
    model_of = lambda cell: make(cell.kv, cell.policy != "streaming")  # noqa: E731
    for kv, (policy, positions) in itertools.product(grid.kv, POLICIES):
        if positions == "compact":
            cell = Cell(dtype, kv, *grid.single, policy, positions)
            yield {"measure": "flat", **asdict(cell)}, lambda c=cell: flat(c, model_of(c), grid)
    for kv, policy, (batch, budget) in itertools.product(grid.kv, POLICIES, grid.cells):
        cell, shape = Cell(dtype, kv, batch, budget, *policy), shapes[kv]
        needed = 2 * batch * shape.kv_heads * budget * shape.head_dim * getattr(torch, dtype).itemsize * shape.layers
        if 14 * needed > bytes_free(device):  # of all sides at once
            print(f"{cell}: not enough memory, not measured")
            continue
        yield {"measure": "decode", **asdict(cell)}, lambda c=cell: decode(c, model_of(c), grid)
