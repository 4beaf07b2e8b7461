"""The sides of `bench_equip.py`: one filled cache each, and how their decode steps are compared and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shared.models import Pair, Shape
from shared.results import Row
from shared.timing import in_turns, ratios, spread, synchronize
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache
from hf_kvcaches.core.view import LayerView
from hf_kvcaches.kernels.slots import slot_attention
from tests.reference.baselines import FrozenKV, FrozenLayer, GatherAppendH2O, RerotateAllStreaming, ShiftAppendStreaming

OURS, FULL = "EquipCache", "DynamicCache"
PUBLISHED, FUSED = "re-rotate all (published formula)", "re-rotate all (fused)"
SHIFT, GATHER, PAGES = "shift and append, no rotation", "gather and append", "EquipCache, pages of 16"
FLOORS = ("floor, sdpa", "floor, dense", "floor, slots")
TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2}  # of a logit; the logits are of the order of 1
FULL_TEXT = 2  # how many times the budget the full cache holds
SINKS = 4


class DisagreementError(Exception):
    """Sides that must give the same logits don't."""


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    dtype: str
    kv: str
    batch: int
    budget: int
    policy: str
    positions: str

    def __str__(self) -> str:
        return f"{self.policy} {self.positions} {self.dtype} {self.kv} {self.batch} x {self.budget}"

    @property
    def same(self) -> tuple[str, ...]:
        """The sides that give the logits of ours."""
        return (PUBLISHED, FUSED, GATHER, PAGES) if self.positions == "compact" else (SHIFT, GATHER, PAGES)

    def cache(self, model: PreTrainedModel, **options: Any) -> EquipCache:
        return EquipCache(model, self.policy, self.budget, sinks=SINKS, positions=self.positions, **options)


class FrozenSlotsView(LayerView):
    """Attention over buffers that never change, by the kernel that our own cache uses."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def attend(self, module: Any, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return slot_attention(query, self.keys, self.values, kwargs["scaling"])[0], None


class FrozenSlotsLayer(FrozenLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        is_prompt = not self.seen
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return (keys, values) if is_prompt else (FrozenSlotsView(keys, values),) * 2


class FrozenSlots(FrozenKV):
    """As `FrozenKV`: whichever way to attend is fastest is the floor."""

    needs_attention = True
    layer_class = FrozenSlotsLayer


def competitors(cell: Cell, pair: Pair) -> dict[str, tuple[PreTrainedModel, Cache]]:
    """Each side's model and empty cache. What returns plain tensors gets the model with its own attention."""
    plain, switched = pair.plain, pair.switched
    settings: dict[str, Any] = {"budget": cell.budget, "sinks": SINKS}
    sides: dict[str, tuple[PreTrainedModel, Cache]] = {FULL: (plain, DynamicCache(config=plain.config))}
    if cell.policy == "h2o":
        sides[GATHER] = switched, GatherAppendH2O(switched, positions=cell.positions, **settings)
    if cell.policy == "streaming":
        sides[SHIFT] = plain, ShiftAppendStreaming(plain.config, **settings)
    if cell.policy == "streaming" and cell.positions == "compact":
        sides[PUBLISHED] = plain, RerotateAllStreaming(plain.config, fused=False, **settings)
        sides[FUSED] = plain, RerotateAllStreaming(plain.config, fused=True, **settings)
    if cell.policy != "future":  # whose heads keep different numbers of tokens
        sides[PAGES] = switched, cell.cache(switched, page_size=16)
    return sides | {
        OURS: (switched, cell.cache(switched)),
        FLOORS[0]: (plain, FrozenKV(plain.config, slots=cell.budget)),
        FLOORS[1]: (switched, FrozenKV(switched, slots=cell.budget, dense=True)),
        FLOORS[2]: (switched, FrozenSlots(switched, slots=cell.budget)),
    }


def bytes_needed(cell: Cell, shape: Shape) -> int:
    """A generous estimate of what all sides of a cell hold at once."""
    item = getattr(torch, cell.dtype).itemsize
    full = 2 * cell.batch * shape.kv_heads(cell.kv) * cell.budget * shape.head_dim * item * shape.layers
    caches = FULL_TEXT + (11.5 if cell.policy == "streaming" else 8.0)
    return int(full * caches) + 4 * full // shape.layers


class Side:
    """A model with its cache, filled by one row that was then repeated: what is in the rows does not matter to the clock."""

    def __init__(self, name: str, model: PreTrainedModel, cache: Cache, cell: Cell) -> None:
        self.name, self.model, self.cache, self.cell = name, model, cache, cell
        random, vocabulary = torch.Generator().manual_seed(1), model.config.vocab_size
        tokens = FULL_TEXT * cell.budget if name == FULL else cell.budget + 8
        prompt = torch.randint(vocabulary, (1, FULL_TEXT * cell.budget), generator=random)[:, :tokens].to(model.device)
        model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if cell.batch > 1:
            cache.batch_repeat_interleave(cell.batch)
        self.ids = torch.randint(vocabulary, (cell.batch, 1), generator=random).to(model.device)

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def decode(self, steps: int) -> list[float]:
        """Seconds of each of so many greedy steps; the full cache is as long afterwards as before."""
        ids, seconds = self.ids, []
        synchronize(self.model.device)
        for _ in range(steps):
            start = time.perf_counter()
            ids = self.feed(ids).argmax(-1, keepdim=True)
            synchronize(self.model.device)
            seconds.append(time.perf_counter() - start)
        self._crop(steps)
        return seconds

    def logits(self, steps: int) -> torch.Tensor:
        """Logits after tokens that are the same for all sides, (steps, batch, vocabulary)."""
        random = torch.Generator().manual_seed(3)
        ids = torch.randint(self.model.config.vocab_size, (steps, self.cell.batch, 1), generator=random).to(self.model.device)
        logits = torch.stack([self.feed(step) for step in ids])
        self._crop(steps)
        return logits.float()

    def _crop(self, steps: int) -> None:
        if self.name == FULL:
            self.cache.crop(-steps)


def disagreement(sides: Mapping[str, Side], steps: int) -> float:
    """The greatest difference of a logit between ours and the sides that must give the same; an error if it is too great.

    In half precision nearly equal scores may fall either way, so policies that choose are not held to it there.
    """
    cell, logits = sides[OURS].cell, {name: side.logits(steps) for name, side in sides.items()}
    worst = max((float((logits[name] - logits[OURS]).abs().max()) for name in cell.same if name in logits), default=0.0)
    chooses = cell.policy != "streaming" and cell.dtype != "float32"
    if not worst <= TOLERANCE[cell.dtype] and not chooses:
        raise DisagreementError(f"the logits differ by {worst:.3g}, more than {TOLERANCE[cell.dtype]:.0e}, not timed")
    return worst


def compared(rounds: Mapping[str, Sequence[Sequence[float]]], ours: str) -> dict[str, Row]:
    """Columns of each side: milliseconds a token of whole rounds and of single steps, and how many times as fast ours is."""
    means = {name: [statistics.fmean(steps) for steps in times] for name, times in rounds.items()}
    return {
        name: spread("round", means[name], 1e3)
        | spread("step", [step for steps in times for step in steps], 1e3)
        # Round by round: what slows the computer for a while slows all sides.
        | ratios(means[name], means[ours])
        for name, times in rounds.items()
    }


def measure(cell: Cell, pair: Pair, rounds: int, steps: int) -> list[Row]:
    """A row for each side of a cell, with its time over that of the fastest way to attend to keys and values that never change."""
    sides = {name: Side(name, model, cache, cell) for name, (model, cache) in competitors(cell, pair).items()}
    error = disagreement(sides, 2)
    times = in_turns({name: lambda _, side=side: side.decode(steps) for name, side in sides.items()}, rounds, warm_up=1)
    columns = compared(times, OURS)
    return [{"side": name, **({"error": error} if name == OURS else {}), **row} for name, row in columns.items()]
