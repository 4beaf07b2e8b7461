"""What `bench_subspace.py` measures: attention alone, decode steps, and what sketching adds. Sides are made, compared and timed."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import synchronize
from _equip_sides import Models, Shape, in_turns, spread
from transformers import Cache, DynamicCache, LlamaForCausalLM

from hf_kvcaches import AdaptiveSubspace, GrowingCache, SubspaceBases, SubspaceCache
from hf_kvcaches.core.cache import measured_bytes
from hf_kvcaches.kernels.coefficients import Coefficients, Rotation, coefficient_attention, quantize_tiles

VARIANTS = ("post", "aware", "post int8", "aware int8")
SDPA, ENABLED, REPEATED, GROUPED = "SDPA", "SDPA, enable_gqa", "SDPA, repeated", "SDPA, one head of many queries"
FULL, GROWING = "DynamicCache", "GrowingCache"
STATIC, ADAPTIVE, CHANGING = "static", "adaptive", "adaptive, new bases"
HEADS, KV_HEADS = 8, {"mha": 8, "gqa": 2}
TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2}  # of outputs and logits of the order of 1
SCORES_SPREAD = 3.0  # standard deviation of the scores: outputs are then made of few tokens, and of the order of 1
CHUNK = 1024  # tokens of a prompt that are fed at once
MIB = 2**20

Makers = dict[str, Callable[[], Cache]]


@dataclass(frozen=True)
class Cell:
    """One point of the grids."""

    dtype: str
    kv: str
    head_dim: int
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.dtype} {self.kv} {self.head_dim} {self.batch} x {self.tokens}"

    @property
    def kv_heads(self) -> int:
        return KV_HEADS[self.kv]

    @property
    def full_bytes(self) -> int:
        """Of the keys and values of one layer."""
        return 2 * self.batch * self.kv_heads * self.tokens * self.head_dim * getattr(torch, self.dtype).itemsize


def needed(cell: Cell, layers: int = 0) -> int:
    """A generous estimate of the bytes that all sides of a cell hold at once."""
    if layers:  # two full caches, three of coefficients, and the copies that one of them makes of a layer
        return int(cell.full_bytes * (3.2 * layers + 2))
    copies = 1 if cell.kv == "mha" else 1 + HEADS // cell.kv_heads
    return int(cell.full_bytes * (copies + 0.5) + 1.5 * cell.full_bytes * (4 / getattr(torch, cell.dtype).itemsize))


def rows_that_fit(cell: Cell, most: float, layers: int = 0) -> int:
    """The cell's batch, halved until it takes no more than so many bytes."""
    batch = cell.batch
    while batch > 1 and needed(Cell(cell.dtype, cell.kv, cell.head_dim, batch, cell.tokens), layers) > most:
        batch //= 2
    return batch


def last_cache(device: torch.device) -> int:
    """Bytes of the largest cache of the processor, 0 if nothing says so."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * (2**10 if size[-1] == "K" else MIB) for size in sizes if size[:-1].isdigit()), default=0)


class Clock:
    """Times single calls."""

    def __init__(self, device: torch.device, *, warm: bool = False, small: bool = False) -> None:
        self.device, self.warm = device, warm
        size = 4 * MIB if small else 2048 * MIB if device.type == "cuda" else min(1024 * MIB, max(256 * MIB, 2 * last_cache(device)))
        self._other = torch.ones(size // 4, device=device)
        self.bandwidth = self._bandwidth()

    def layers(self, size: int, calls: int) -> int:
        """How many tensors of that size are to be read in turns, so that none is in a cache when its turn comes again."""
        if self.warm or self.device.type == "cuda":
            return 1
        return max(1, min(calls, -(-2 * last_cache(self.device) // size)))

    def of(self, work: Callable[[], object]) -> float:
        """Seconds of a call; on CUDA those of the device."""
        if self.device.type == "cuda":
            # Empties the caches, and takes longer than Python takes to give the call that is timed.
            self._other.sum()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            torch.cuda.synchronize(self.device)
            return start.elapsed_time(end) / 1e3
        synchronize(self.device)
        begin = time.perf_counter()
        work()
        synchronize(self.device)
        return time.perf_counter() - begin

    def _bandwidth(self) -> float:
        """Bytes a second: the best of summing a large tensor and copying it, which reads and writes."""
        target, size = torch.empty_like(self._other), self._other.nbytes
        works = ((self._other.sum, size), (lambda: target.copy_(self._other), 2 * size))
        return max(size / min(self.of(work) for _ in range(9)) for work, size in works)


def compared(seconds: dict[str, list[float]], baselines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Columns of each side: milliseconds, and how many times as fast as the best baseline it is."""
    best = min(baselines, key=lambda name: statistics.median(seconds[name]))
    rows: dict[str, dict[str, Any]] = {}
    for name, own in seconds.items():
        ratios = [base / mine for base, mine in zip(seconds[best], own, strict=True)]
        rows[name] = {"side": name, "baseline": best, **spread("time", own, 1e3), **spread("ratio", ratios)}
        rows[name]["total_ratio"] = round(sum(seconds[best]) / sum(own), 4)
    return rows


class Kernels:
    """One layer's keys and values as coefficients of a quarter of the dimensions, and as what these stand for."""

    def __init__(self, cell: Cell, device: torch.device, seed: int = 0) -> None:
        self.cell, self.device, self.dtype = cell, device, getattr(torch, cell.dtype)
        random = torch.Generator(device).manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=random, device=device)  # noqa: E731
        dim, rank = cell.head_dim, cell.head_dim // 4
        self.scaling = dim**-0.5
        query = normal(cell.batch, HEADS, 1, dim) * (SCORES_SPREAD / (self.scaling * rank**0.5))
        self.query = query.to(self.dtype)
        self.plain: list[Coefficients] = []
        self.small: list[Coefficients] = []
        for _ in range(2):
            data = normal(cell.batch, cell.kv_heads, cell.tokens, rank).to(self.dtype)
            decode = torch.linalg.qr(normal(cell.kv_heads, dim, dim))[0][..., :rank].contiguous().to(self.dtype)
            self.plain.append(Coefficients(data, decode))
            rounded, scale = quantize_tiles(data)
            self.small.append(Coefficients(rounded, decode, scale))
        # As in a layer, frequencies are on the CPU: they are read as numbers.
        self.inv_freq = 1 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def held(self, variant: str) -> list[Coefficients]:
        return self.small if variant.endswith("int8") else self.plain

    def ours(self, variant: str) -> Callable[[], torch.Tensor]:
        keys, values = self.held(variant)
        rotation = Rotation(self.inv_freq) if variant.startswith("aware") else None
        return lambda: coefficient_attention(self.query, keys, values, self.scaling, rotation=rotation, check=False)[0]

    def bytes_of(self, variant: str) -> int:
        """What a call must read at least."""
        tensors = [tensor for side in self.held(variant) for tensor in side if tensor is not None]
        return sum(tensor.nbytes for tensor in [self.query, *tensors])

    def full(self, variant: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What the coefficients stand for, (batch, kv_heads, tokens, head_dim)."""
        keys, values = (self._decoded(side) for side in self.held(variant))
        if variant.startswith("aware"):
            angles = torch.arange(self.cell.tokens, dtype=torch.float64)[:, None] * self.inv_freq
            cos, sin = (turn.float().to(self.device) for turn in (angles.cos(), angles.sin()))
            first, second = keys.chunk(2, -1)
            keys = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return keys.to(self.dtype), values.to(self.dtype)

    def _decoded(self, side: Coefficients) -> torch.Tensor:
        data = side.data.float()
        if side.scale is not None:
            data = data * side.scale.float().repeat_interleave(16, 2)[:, :, : data.shape[2], None]
        return data @ side.decode.float().mT

    def baselines(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
        """The ways to attend to full keys and values; what a way needs besides is made before it is timed."""
        attend = torch.nn.functional.scaled_dot_product_attention
        if self.cell.kv == "mha":
            return {SDPA: lambda: attend(self.query, keys, values)}
        shared = HEADS // self.cell.kv_heads
        many = [each.repeat_interleave(shared, 1) for each in (keys, values)]
        # The only query token sees all: the heads of a group may stand where its tokens would.
        grouped = self.query.view(self.cell.batch, self.cell.kv_heads, shared, -1)
        return {
            ENABLED: lambda: attend(self.query, keys, values, enable_gqa=True),
            REPEATED: lambda: attend(self.query, *many),
            GROUPED: lambda: attend(grouped, keys, values).view_as(self.query),
        }

    def prove(self) -> float:
        """The greatest difference between any two ways to attend, an error if it is too great."""
        worst = 0.0
        for variant in VARIANTS:
            expected, *others = (work().float() for work in self.baselines(*self.full(variant)).values())
            others.append(self.ours(variant)().float().transpose(1, 2))
            error = max(float((other - expected).abs().max()) for other in others)
            if not error <= TOLERANCE[self.cell.dtype]:
                raise SystemExit(f"{self.cell} {variant}: outputs differ by {error:.3g}, more than {TOLERANCE[self.cell.dtype]:.0e}")
            worst = max(worst, error)
        return worst


def attention_alone(cell: Cell, clock: Clock, rounds: int) -> list[dict[str, Any]]:
    """Attention of one new token a row in one layer: all variants and all ways of SDPA, one row each."""
    layers = [Kernels(cell, clock.device, seed) for seed in range(clock.layers(cell.full_bytes, rounds + 1))]
    error, first = layers[0].prove(), layers[0]
    ways: dict[str, list[Callable[[], object]]] = {}
    for layer in layers:
        for name, work in (layer.baselines(*layer.full("post")) | {variant: layer.ours(variant) for variant in VARIANTS}).items():
            ways.setdefault(name, []).append(work)
    # Each call reads the next layer's numbers, as in a model: alone, a layer would find its own in the processor's caches.
    turns = [lambda works=works: [clock.of(next(works))] for works in map(itertools.cycle, ways.values())]
    seconds = {name: [each[0] for each in own] for name, own in zip(ways, in_turns(turns, rounds), strict=True)}
    # How models call it; that heads of a group can stand where tokens would is a trick that can be had with full keys, too, and is shown.
    rows = compared(seconds, [name for name in ways if name not in (*VARIANTS, GROUPED)])
    for name, row in rows.items():
        size = first.bytes_of(name) if name in VARIANTS else cell.full_bytes + first.query.nbytes
        row |= floor(size, row["time_ms"], clock) | {"error": error}
    return list(rows.values())


def floor(size: int, milliseconds: float, clock: Clock) -> dict[str, Any]:
    """The columns of the least time: how long the reading of so many bytes takes, as a share of the time that was measured."""
    return {"bytes": size, "floor_share": round(size / clock.bandwidth / (milliseconds / 1e3), 4)}


class Stepping:
    """A model with a cache for each side, all of which read one prompt."""

    def __init__(self, models: Models, makers: Makers) -> None:
        self.models, self.filled = models, 0
        self.caches = {name: make() for name, make in makers.items()}
        self._random = torch.Generator().manual_seed(1)

    def model(self, name: str) -> LlamaForCausalLM:
        return self.models.plain if name == FULL else self.models.switched

    def ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(self.models.plain.config.vocab_size, shape, generator=self._random).to(self.models.plain.device)

    def fill(self, tokens: int) -> None:
        """Feeds one row until every cache has read so many tokens."""
        while self.filled < tokens:
            chunk = self.ids(1, min(CHUNK, tokens - self.filled))
            for name, cache in self.caches.items():
                feed(self.model(name), cache, chunk)
            self.filled += chunk.shape[1]

    def rows(self, batch: int) -> dict[str, Cache]:
        """Copies of the filled caches with so many equal rows: what is in the rows does not matter to the clock."""
        caches = copy.deepcopy(self.caches)
        for cache in caches.values():
            if batch > 1:
                cache.batch_repeat_interleave(batch)
        return caches

    def seconds(self, cell: Cell, rounds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, int]]:
        """Of a step, the mean of each round; and the bytes that a step must read. Caches go on growing, all alike."""
        self.fill(cell.tokens)
        caches, ids = self.rows(cell.batch), self.ids(cell.batch, 1)
        turns = [lambda name=name, cache=cache: [_mean_step(self.model(name), cache, ids, steps)] for name, cache in caches.items()]
        measured = in_turns(turns, rounds)
        weights = measured_bytes(self.models.plain.parameters())
        sizes = {name: weights + cache_bytes(cache) for name, cache in caches.items()}
        return {name: [each[0] for each in own] for name, own in zip(caches, measured, strict=True)}, sizes

    def measure(self, cell: Cell, clock: Clock, rounds: int, steps: int, baseline: str) -> list[dict[str, Any]]:
        seconds, sizes = self.seconds(cell, rounds, steps)
        rows = compared(seconds, [baseline])
        return [row | floor(sizes[name], row["time_ms"], clock) | {"steps": steps} for name, row in rows.items()]


def feed(model: LlamaForCausalLM, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits


def _mean_step(model: LlamaForCausalLM, cache: Cache, ids: torch.Tensor, steps: int) -> float:
    synchronize(model.device)
    begin = time.perf_counter()
    for _ in range(steps):
        feed(model, cache, ids)
    synchronize(model.device)
    return (time.perf_counter() - begin) / steps


def cache_bytes(cache: Cache) -> int:
    if isinstance(cache, DynamicCache):
        return measured_bytes(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    return int(cache.report().bytes)


def calibrated(models: Models, tokens: int, **options: Any) -> SubspaceBases:
    """Bases of random weights, from random tokens: what is in them does not matter to the clock."""
    ids = torch.randint(models.plain.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(2))
    return SubspaceBases.calibrate(models.switched, None, [ids.tolist()], block=512, progress=False, **options)


def step_makers(models: Models, tokens: int) -> Makers:
    """The full caches, and `SubspaceCache` with ranks of a quarter of the dimensions."""
    plain, model = models.plain, models.switched
    rank = plain.config.head_dim // 4
    post, aware = (calibrated(models, tokens, rank=rank, rotation=rotation) for rotation in ("post", "aware"))
    return {
        FULL: lambda: DynamicCache(config=plain.config),
        GROWING: lambda: GrowingCache(model),
        "post": lambda: SubspaceCache(model, post),
        "aware": lambda: SubspaceCache(model, aware),
        "aware int8": lambda: SubspaceCache(model, aware, coefficients="int8"),
    }


def adaptive_makers(models: Models, tokens: int, warmup: int) -> Makers:
    """Bases from calibration, and those that follow the text, of the same ranks.

    Random weights make keys that no basis fits, so that with the defaults each chunk gets new ones: both that and bases that are looked at
    after each chunk but stay, as on real text they nearly always do, are measured.
    """
    model, rank = models.switched, models.plain.config.head_dim // 4
    bases = calibrated(models, tokens, rank=(rank, rank), rotation="aware")
    options = {"rank": (rank, rank), "warmup": warmup}
    return {
        STATIC: lambda: SubspaceCache(model, bases),
        ADAPTIVE: lambda: SubspaceCache(model, adaptive=AdaptiveSubspace(**options, tau_k=1.0, tau_v=1.0, agreement=1.0)),
        CHANGING: lambda: SubspaceCache(model, adaptive=AdaptiveSubspace(**options)),
    }


def prefills(cell: Cell, models: Models, makers: Makers, rounds: int) -> list[dict[str, Any]]:
    """A whole prompt at once into an empty cache."""
    ids = Stepping(models, {}).ids(cell.batch, cell.tokens)
    turns = [lambda make=make: [_mean_step(models.switched, make(), ids, 1)] for make in makers.values()]
    seconds = {name: [each[0] for each in own] for name, own in zip(makers, in_turns(turns, rounds), strict=True)}
    return list(compared(seconds, [STATIC]).values())


def prove_caches(shape: Shape, kvs: Sequence[str], dtypes: Sequence[str], device: torch.device) -> Iterator[str]:
    """With as many coefficients as dimensions nothing is lost: the full cache's logits, before any step is timed."""
    for dtype, kv in itertools.product(dtypes, kvs):
        models = Models.make(shape, kv, dtype, device, sharp=False)
        for rotation in ("post", "aware"):
            error = _lost(models, calibrated(models, 256, rank=shape.head_dim, rotation=rotation, gamma="one"))
            if not error <= TOLERANCE[dtype]:
                raise SystemExit(f"{dtype} {kv} {rotation}: logits differ by {error:.3g}, more than {TOLERANCE[dtype]:.0e}: nothing timed")
            yield f"{dtype} {kv} {rotation}: same logits as {FULL} with all coefficients, to {error:.1e}"


def _lost(models: Models, bases: SubspaceBases) -> float:
    """The greatest difference from the full cache's logits over some steps."""
    makers = {FULL: lambda: DynamicCache(config=models.plain.config), "ours": lambda: SubspaceCache(models.switched, bases)}
    sides = Stepping(models, makers)
    sides.fill(160)
    ids = sides.ids(8, 1, 1)
    full, ours = (torch.stack([feed(sides.model(name), sides.caches[name], each).float() for each in ids]) for name in makers)
    return float((full - ours).abs().max())
