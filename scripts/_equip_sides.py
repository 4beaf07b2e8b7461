"""The competitors of `bench_equip.py`: one filled cache each, and how their decode steps are timed and compared."""

from __future__ import annotations

import copy
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _common import synchronize
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_kvcaches.core.attention import LayerView
from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.kernels.slots import slot_attention
from tests.reference.baselines import FrozenKV, FrozenLayer, GatherAppendH2O, RerotateAllStreaming, ShiftAppendStreaming

OURS = "EquipCache"
FULL = "DynamicCache"
ROTATED = "rotated keys (paper)"
PUBLISHED = "re-rotate all (published formula)"
FUSED = "re-rotate all (fused)"
SHIFT = "shift and append, no rotation"
GATHER = "gather and append"
FLOORS = ("floor, sdpa", "floor, dense", "floor, slots")
TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2}  # of a logit; the logits are of the order of 1
FULL_TEXT = 2  # how many times the budget the full cache holds
SINKS = 4
SCORES_SPREAD = 3.0  # standard deviation of the attention scores


@dataclass(frozen=True)
class Shape:
    """The model around the cache."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def kv_heads(self, kv: str) -> int:
        return self.heads if kv == "mha" else max(1, self.heads // 4)


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


@dataclass(frozen=True)
class Models:
    """The same weights twice: with the model's own attention, and with this package's."""

    plain: LlamaForCausalLM
    switched: LlamaForCausalLM

    @classmethod
    def make(cls, shape: Shape, kv: str, dtype: str, device: torch.device, *, sharp: bool) -> Models:
        """Random weights.

        Args:
            shape: Of the model.
            kv: "mha" or "gqa".
            dtype: Of the weights.
            device: Where they are.
            sharp: Let attention differ from token to token as in a trained model. As they come, small models attend to all tokens nearly
                alike. Then the one with the lowest score is always among the youngest that may go, and a cache with compact
                positions has next to nothing to turn.
        """
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads(kv),
            head_dim=shape.head_dim,
            max_position_embeddings=8192,
            bos_token_id=None,
            eos_token_id=None,
        )
        with device:
            plain = LlamaForCausalLM(config)
        if sharp:
            std = (SCORES_SPREAD / shape.hidden) ** 0.5
            for layer in plain.model.layers:
                for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                    torch.nn.init.normal_(projection.weight, std=std)
        plain = plain.to(getattr(torch, dtype)).eval()
        shared = {id(tensor): tensor for tensor in itertools.chain(plain.parameters(), plain.buffers())}
        return cls(plain, copy.deepcopy(plain, shared))


class FrozenSlotsView(LayerView):
    """Attention over buffers that never change, by the kernel that our own cache uses."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def attend(self, module: Any, query: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return slot_attention(query, self.keys, self.values, kwargs["scaling"])[0], None


class FrozenSlotsLayer(FrozenLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        first = not self.seen
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if first:
            return keys, values
        view = FrozenSlotsView(keys, values)
        return view, view


class FrozenSlots(FrozenKV):
    """As `FrozenKV`: whichever way to attend is fastest is the floor."""

    needs_attention = True
    layer_class = FrozenSlotsLayer


def competitors(cell: Cell, models: Models) -> dict[str, tuple[LlamaForCausalLM, Cache]]:
    """Each side's model and empty cache. What returns plain tensors gets the model with its own attention."""
    plain, switched = models.plain, models.switched
    settings: dict[str, Any] = {"budget": cell.budget, "sinks": SINKS}
    ours: dict[str, Any] = {**settings, "policy": cell.policy, "positions": cell.positions}
    sides: dict[str, tuple[LlamaForCausalLM, Cache]] = {}
    if cell.policy == "streaming":
        sides |= {
            FULL: (plain, DynamicCache(config=plain.config)),
            SHIFT: (plain, ShiftAppendStreaming(plain.config, **settings)),
            PUBLISHED: (plain, RerotateAllStreaming(plain.config, fused=False, **settings)),
            FUSED: (plain, RerotateAllStreaming(plain.config, fused=True, **settings)),
            ROTATED: (switched, EquipCache(switched, rope="rotated_keys", **ours)),
        }
    else:
        sides[GATHER] = (switched, GatherAppendH2O(switched, positions=cell.positions, **settings))
    sides[OURS] = (switched, EquipCache(switched, **ours))
    sides |= {
        FLOORS[0]: (plain, FrozenKV(plain.config, slots=cell.budget)),
        FLOORS[1]: (switched, FrozenKV(switched, slots=cell.budget, dense=True)),
        FLOORS[2]: (switched, FrozenSlots(switched, slots=cell.budget)),
    }
    return sides


def bytes_needed(cell: Cell, shape: Shape) -> int:
    """A generous estimate of what all sides of a cell hold at once, in bytes."""
    item = 4 if cell.dtype == "float32" else 2
    one = 2 * cell.batch * shape.kv_heads(cell.kv) * cell.budget * shape.head_dim * item * shape.layers
    caches = FULL_TEXT + 8.5 if cell.policy == "streaming" else 5.0
    return int(one * (caches + 1)) + 4 * one // shape.layers


def bytes_free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
    return os.sysconf(names[0]) * os.sysconf(names[1]) if all(name in os.sysconf_names for name in names) else 2**62


class Side:
    """A model with its cache, filled by one row that was then repeated: what is in the rows does not matter to the clock."""

    def __init__(self, name: str, model: LlamaForCausalLM, cache: Cache, cell: Cell) -> None:
        self.name, self.model, self.cache, self.cell = name, model, cache, cell
        random = torch.Generator().manual_seed(1)
        vocabulary, device = model.config.vocab_size, model.device
        tokens = FULL_TEXT * cell.budget if name == FULL else cell.budget + 8
        prompt = torch.randint(vocabulary, (1, FULL_TEXT * cell.budget), generator=random)[:, :tokens].to(device)
        model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if cell.batch > 1:
            cache.batch_repeat_interleave(cell.batch)
        self.ids = torch.randint(vocabulary, (cell.batch, 1), generator=random).to(device)

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
        self._back(steps)
        return seconds

    def _back(self, steps: int) -> None:
        if self.name == FULL:
            self.cache.crop(-steps)

    def given(self, steps: int) -> torch.Tensor:
        """Logits after tokens that are the same for all sides, (steps, batch, vocabulary)."""
        random = torch.Generator().manual_seed(3)
        ids = torch.randint(self.model.config.vocab_size, (steps, self.cell.batch, 1), generator=random).to(self.model.device)
        logits = torch.stack([self.feed(each) for each in ids])
        self._back(steps)
        return logits


def disagreement(sides: Sequence[Side], steps: int) -> float:
    """The greatest difference of a logit between ours and those that must give the same, and an error if it is too great.

    In half precision nearly equal scores may fall either way, so policies that choose are not held to it there.
    """
    alike = [PUBLISHED, FUSED, ROTATED, GATHER]
    ours = next(side for side in sides if side.name == OURS)
    expected, worst = ours.given(steps).float(), 0.0
    for side in sides:
        if side is ours:
            continue
        logits = side.given(steps).float()
        if side.name in alike:
            worst = max(worst, float((logits - expected).abs().max()))
    chooses = ours.cell.policy != "streaming" and ours.cell.dtype != "float32"
    if not worst <= TOLERANCE[ours.cell.dtype] and not chooses:
        raise SystemExit(f"{ours.cell}: the logits differ by {worst:.3g}, more than {TOLERANCE[ours.cell.dtype]:.0e}: nothing timed")
    return worst


def in_turns(works: Sequence[Callable[[], list[float]]], rounds: int) -> list[list[list[float]]]:
    """For each work its rounds, done in turns and each time in another order; a first one warms up."""
    results: list[list[list[float]]] = [[] for _ in works]
    for index in range(rounds + 1):
        order = list(range(len(works)))
        order = order[index % len(order) :] + order[: index % len(order)]
        for place in order[::-1] if index % 2 else order:
            seconds = works[place]()
            if index:
                results[place].append(seconds)
    return results


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def spread(name: str, values: Sequence[float], factor: float = 1.0, digits: int = 4) -> dict[str, float]:
    """Median and quartiles as columns."""
    low, high = quartiles(values)
    middle = statistics.median(values)
    suffix = "_ms" if factor != 1.0 else ""
    return {
        f"{name}{suffix}": round(middle * factor, digits),
        f"{name}_q1{suffix}": round(low * factor, digits),
        f"{name}_q3{suffix}": round(high * factor, digits),
    }


def compared(times: dict[str, list[list[float]]], ours: str) -> dict[str, dict[str, Any]]:
    """Columns of each side: milliseconds a token of whole rounds and of single steps, and how many times as fast ours is.

    Args:
        times: Seconds of the steps of each round, by side.
        ours: The side that the others are divided by, round by round: what slows the computer for a while slows all sides.
    """
    means = {name: [statistics.fmean(steps) for steps in rounds] for name, rounds in times.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, rounds in times.items():
        steps = list(itertools.chain.from_iterable(rounds))
        ratios = [a / b for a, b in zip(means[name], means[ours], strict=True)]
        rows[name] = spread("round", means[name], 1e3) | spread("step", steps, 1e3) | spread("ratio", ratios)
    return rows


def measure(cell: Cell, models: Models, rounds: int, steps: int) -> list[dict[str, Any]]:
    """All sides of a cell, one row each."""
    sides = [Side(name, model, cache, cell) for name, (model, cache) in competitors(cell, models).items()]
    error = disagreement(sides, 2)
    seconds = in_turns([lambda side=side: side.decode(steps) for side in sides], rounds)
    columns = compared({side.name: rounds for side, rounds in zip(sides, seconds, strict=True)}, OURS)
    return [{"side": name, "error": error if name == OURS else "", **values} for name, values in columns.items()]
