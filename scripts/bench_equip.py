"""Times EquipCache beside the ways in which pruned caches are kept elsewhere, and beside the forward pass alone.

    python scripts/bench_equip.py [--device auto] [--preset cpu|gpu] [--csv docs/benchmarks/equip.csv] [--plot docs/benchmarks/equip.png]

**decode**: all sides of a cell are filled and decode in turns in one process, once the logits of those that must agree are the same;
ratios are taken within a round. The floor is the same forward pass over keys and values that never change, by the fastest of three ways
to attend. The full cache holds twice the budget. **write**: 64 of 1,024 tokens are replaced. **flat**: a step after many tokens.
**drafts**: prompt lookup. **prune**: a prompt is read and pruned to a quarter. Weights are random.

Every cell is added to the CSV when it is done; the same command goes on with the cells that are missing. Delete the file to measure anew.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from shared.cli import arguments, begin, check_counts, run_script
from shared.models import Pair, Shape, bytes_free
from shared.plot import Panel, draw, title_of
from shared.results import Results, Row, print_environment, rows_where, show
from shared.timing import in_turns, ratios, seconds_of, spread, synchronize
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_kvcaches import EquipCache, KeepProbe
from hf_kvcaches.core.view import LayerView
from hf_kvcaches.kernels.slots import slot_attention, write_slots
from tests.reference.baselines import FrozenKV, FrozenLayer, GatherAppendH2O, RerotateAllStreaming, ShiftAppendStreaming

OURS, FULL = "EquipCache", "DynamicCache"
PUBLISHED, FUSED = "re-rotate all (published formula)", "re-rotate all (fused)"
SHIFT, GATHER, PAGES = "shift and append, no rotation", "gather and append", "EquipCache, pages of 16"
FLOORS = ("floor, sdpa", "floor, dense", "floor, slots")
TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2}  # of a logit; the logits are of the order of 1
SINKS, SLOTS, EVICTED = 4, 1024, 64
SEEN = (1_000, 10_000, 100_000)
POLICIES = (("streaming", "compact"), ("streaming", "original"), ("h2o", "compact"), ("h2o", "original"), ("future", "compact"))
PROBE = "KeepProbe"
PRUNED = ("future", "compactor", PROBE, "kvzip")
PARTS = ("write", "flat", "drafts", "prune", "decode")
PICTURE = "a decode step of EquipCache, by batch x budget"
COLUMNS = (
    "hidden layers heads kv_heads head_dim measure policy positions dtype kv batch budget side tokens rounds steps round_ms round_q1_ms "
    "round_q3_ms step_ms step_q1_ms step_q3_ms ratio ratio_q1 ratio_q3 error"
).split()
SHOWN = {
    "": "{measure} {policy} {positions} {dtype} {kv} {batch} x {budget}",
    "side": "{side}",
    "tokens": "{tokens}",
    "ms a round": "{round_ms:.3f}",
    "EquipCache's ratio": "{ratio:.2f}x",
    "quartiles": "{ratio_q1:.2f}-{ratio_q3:.2f}",
    "logit error": "{error:.1e}",
}


@dataclass(frozen=True)
class Size:
    """The model around the cache, the grid, and how long to measure."""

    shape: Shape
    batches: tuple[int, ...] = (1, 8, 32)
    budgets: tuple[int, ...] = (256, 512, 1024)
    kv: tuple[str, ...] = ("mha", "gqa")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    writes: tuple[tuple[int, int, int], ...] = ((1, 64, 64), (1, 64, 128), (8, 64, 64), (8, 64, 128))  # batch, heads, head size
    single: tuple[int, int] = (8, 512)  # batch and budget of what is measured once: very long texts
    prompt: int = 4096  # tokens that are pruned to a quarter
    rounds: int = 9
    steps: int = 3
    flat_rounds: int = 25
    heavy: float = 16_000  # rows x slots, beyond which a round is a single step


PRESETS = {
    "cpu": Size(Shape(1024, 2, 16, 16, 64, 2816, 512)),
    # The width of a 7B model. Each of its layers does the same work, so a few show what all cost.
    "gpu": Size(Shape(4096, 8, 32, 32, 128, 11008, 32000), rounds=7, steps=16, heavy=float("inf")),
}
QUICK = Size(Shape(64, 2, 4, 4, 16, 128, 96), (1, 2), (32,), ("gqa",), ("float32",), ((1, 4, 8),), (2, 32), 512, 2, 2, flat_rounds=2)


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


class FrozenSlotsView(LayerView):
    """Attention over buffers that never change, by the kernel that EquipCache uses."""

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


class Side:
    """A model with its cache, filled by one row that was then repeated: what is in the rows does not matter to the clock."""

    def __init__(self, name: str, model: PreTrainedModel, cache: Cache, cell: Cell) -> None:
        self.name, self.model, self.cache, self.cell = name, model, cache, cell
        random, vocabulary = torch.Generator().manual_seed(1), model.config.vocab_size
        prompt = torch.randint(vocabulary, (1, 2 * cell.budget), generator=random)
        prompt = (prompt if name == FULL else prompt[:, : cell.budget + 8]).to(model.device)
        model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if cell.batch > 1:
            cache.batch_repeat_interleave(cell.batch)
        self.ids = torch.randint(vocabulary, (cell.batch, 1), generator=random).to(model.device)

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def decode(self, steps: int) -> list[float]:
        """Seconds of each of so many greedy steps; the full cache is as long afterwards as before."""
        ids, seconds = self.ids, []
        for _ in range(steps):
            synchronize(self.model.device)
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


def compared(rounds: Mapping[str, Sequence[Sequence[float]]], ours: str) -> list[Row]:
    """A row for each side: milliseconds of rounds and of single steps, and how many times as fast ours is, round by round."""
    means = {name: [statistics.fmean(steps) for steps in times] for name, times in rounds.items()}
    return [
        {"side": name, **spread("round", means[name], 1e3), **spread("step", list(itertools.chain(*times)), 1e3)}
        | ratios(means[name], means[ours])
        for name, times in rounds.items()
    ]


def decode(cell: Cell, pair: Pair, rounds: int, steps: int) -> list[Row]:
    """Decode steps of all sides of a cell, after their logits agree."""
    sides = {name: Side(name, model, cache, cell) for name, (model, cache) in competitors(cell, pair).items()}
    alike = {OURS, PAGES, GATHER, *((PUBLISHED, FUSED) if cell.positions == "compact" else (SHIFT,))}
    logits = {name: side.logits(2) for name, side in sides.items() if name in alike}
    error = max(float((found - logits[OURS]).abs().max()) for found in logits.values())
    # In half precision nearly equal scores may fall either way, so policies that choose are not held to it there.
    if not error <= TOLERANCE[cell.dtype] and (cell.policy == "streaming" or cell.dtype == "float32"):
        raise SystemExit(f"{cell}: the logits differ by {error:.3g}, more than {TOLERANCE[cell.dtype]:.0e}: nothing timed")
    times = in_turns({name: lambda _, side=side: side.decode(steps) for name, side in sides.items()}, rounds, warm_up=1)
    return [row | ({"error": error} if row["side"] == OURS else {}) for row in compared(times, OURS)]


def write_alone(batch: int, heads: int, size: int, device: torch.device, rounds: int) -> list[Row]:
    """Replace 64 of 1,024 tokens, keys and values: rebuilding the tensors and in place."""
    random = torch.Generator(device).manual_seed(0)
    draw = lambda tokens: torch.randn(batch, heads, tokens, size, generator=random, device=device)  # noqa: E731
    kept, new = [draw(SLOTS), draw(SLOTS)], [draw(EVICTED), draw(EVICTED)]
    order = torch.rand(batch, heads, SLOTS - SINKS, generator=random, device=device).argsort(-1) + SINKS
    victims = order[..., :EVICTED].sort(-1).values
    stays = torch.ones(batch, heads, SLOTS, dtype=torch.bool, device=device).scatter_(-1, victims, False)
    ring = torch.arange(SINKS, SINKS + EVICTED, device=device)[None, None]

    def shift_append() -> list[torch.Tensor]:
        return [torch.cat([t[:, :, :SINKS], t[:, :, SINKS + EVICTED :], n], 2) for t, n in zip(kept, new, strict=True)]

    def gather_append() -> list[torch.Tensor]:
        return [torch.cat([t[stays].view(batch, heads, -1, size), n], 2) for t, n in zip(kept, new, strict=True)]

    written = [tensor.clone() for tensor in kept]  # must hold the same tokens as rebuilt tensors, in other slots
    write_slots(*written, ring.expand(batch, heads, -1), *new)
    for rebuilt, t in zip(shift_append(), written, strict=True):
        if not torch.equal(rebuilt, torch.cat([t[:, :, :SINKS], t[:, :, SINKS + EVICTED :], t[:, :, SINKS : SINKS + EVICTED]], 2)):
            raise SystemExit("write_slots: not the same tokens as by rebuilding the tensors: nothing timed")
    rows: list[Row] = []
    for policy, slots, copying in (("streaming", ring, shift_append), ("h2o", victims, gather_append)):
        # Writing is so short that a round of it has to be repeated to be read off the clock.
        in_place = lambda slots=slots: write_slots(*kept, slots, *new)  # noqa: E731
        works = {
            "tensors rebuilt": lambda _, copying=copying: [seconds_of(copying, device)],
            "in place": lambda _, in_place=in_place: [seconds_of(in_place, device, 8)],
        }
        labels = {"policy": policy, "kv_heads": heads, "head_dim": size}
        rows += [labels | row for row in compared(in_turns(works, rounds, warm_up=1), "in place")]
    return rows


def flat(cell: Cell, pair: Pair, rounds: int, steps: int) -> list[Row]:
    """The time of a step after a thousand tokens and after many more, in turns."""
    sides = {}
    for seen in SEEN:
        sides[str(seen)] = Side(OURS, pair.switched, cell.cache(pair.switched), cell)
        for layer in sides[str(seen)].cache.layers:
            layer.table.advance(max(0, seen - layer.seen))
    times = in_turns({seen: lambda _, side=side: side.decode(steps) for seen, side in sides.items()}, rounds, warm_up=1)
    return [row | {"side": OURS, "tokens": int(row["side"])} for row in compared(times, str(SEEN[0]))]


def drafts(cell: Cell, pair: Pair, rounds: int) -> list[Row]:
    """Greedy decoding with and without prompt lookup behind a text that repeats itself, in turns, and with the full cache."""
    ids = torch.randint(1, pair.plain.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(5)).to(pair.device)
    ids = ids.repeat(1, 2 * cell.budget // 64)

    texts = set()

    def generate(_: int, ours: bool, options: dict[str, int]) -> list[float]:
        model = pair.switched if ours else pair.plain
        cache = EquipCache(model, cell.policy, cell.budget) if ours else DynamicCache(config=model.config)
        model(input_ids=ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        start = time.perf_counter()
        written = model.generate(ids, past_key_values=cache, max_new_tokens=48, do_sample=False, **options)[0].tolist()
        if ours:
            texts.add(tuple(written))
        return [(time.perf_counter() - start) / 48]

    ways = {"one by one": {}, "prompt lookup": {"prompt_lookup_num_tokens": 8}}
    sides = {way if ours else f"{FULL}, {way}": partial(generate, ours=ours, options=ways[way]) for ours in (True, False) for way in ways}
    times = in_turns(sides, rounds, warm_up=1)
    if len(texts) > 1 and cell.policy == "streaming":  # rounding decides between tokens of equal score
        raise SystemExit("prompt lookup writes another text than greedy decoding")
    return compared(times, "prompt lookup")


def prune(cell: Cell, pair: Pair, rounds: int) -> list[Row]:
    """A prompt that is read whole, and one that is read and pruned to a quarter, in turns."""
    ids = torch.randint(1, pair.plain.config.vocab_size, (1, cell.budget), generator=torch.Generator().manual_seed(6)).to(pair.device)
    is_probe = cell.policy == PROBE
    policy = KeepProbe.calibrate(pair.switched, None, ids.view(4, -1).tolist(), progress=False) if is_probe else cell.policy

    def read(pruned: bool) -> None:
        model = pair.switched if pruned else pair.plain
        cache = EquipCache(model, policy, 0.25) if pruned else DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        if isinstance(cache, EquipCache) and cache.policy.deferred:
            cache.compress(model, input_ids=ids)

    works = {name: lambda _, name=name: [seconds_of(lambda: read(name == "pruned"), pair.device)] for name in ("whole", "pruned")}
    return [row | {"tokens": cell.budget} for row in compared(in_turns(works, rounds, warm_up=1), "whole")]


def jobs(size: Size, device: torch.device) -> Iterator[tuple[Row, Callable[[], list[Row]]]]:
    """Everything there is to measure: its columns, and the work."""

    def shape_of(kv: str) -> Shape:
        """With multi-head attention (`mha`), or with four query heads to a key head (`gqa`)."""
        return size.shape if kv == "mha" else replace(size.shape, kv_heads=max(1, size.shape.heads // 4))

    @lru_cache(1)
    def make_pair(kv: str, dtype: str, sharp: bool) -> Pair:
        return shape_of(kv).random(device, dtype, sharp=sharp)

    # Only policies that choose by attention need it to be like a trained model's, which half precision rounds more.
    pair_of = lambda cell: make_pair(cell.kv, cell.dtype, cell.policy != "streaming")  # noqa: E731
    for batch, heads, dim in size.writes:
        point = {"measure": "write", "dtype": "float32", "kv": f"{heads}x{dim}", "batch": batch, "budget": SLOTS}
        yield point, partial(write_alone, batch, heads, dim, device, max(5, size.rounds))
    for kv, (policy, positions) in itertools.product(size.kv, POLICIES):
        if positions == "compact":
            cell = Cell("float32", kv, *size.single, policy, positions)
            yield {"measure": "flat", **asdict(cell)}, lambda c=cell: flat(c, pair_of(c), size.flat_rounds, size.steps)
    for policy in ("streaming", "h2o", "future"):
        cell = Cell("float32", "gqa", 1, size.single[1], policy, "auto")
        # A model that comes to repeat itself, as prompt lookup needs it.
        yield {"measure": "drafts", **asdict(cell)}, lambda c=cell: drafts(c, make_pair(c.kv, c.dtype, False), size.rounds)
    for policy in PRUNED:
        cell = Cell("float32", "gqa", 1, size.prompt, policy, "auto")
        yield {"measure": "prune", **asdict(cell)}, lambda c=cell: prune(c, pair_of(c), size.rounds)
    for dtype, kv, policy, batch, budget in itertools.product(size.dtypes, size.kv, POLICIES, size.batches, size.budgets):
        cell, heads = Cell(dtype, kv, batch, budget, *policy), shape_of(kv).kv_heads
        needed = 2 * batch * heads * budget * size.shape.head_dim * getattr(torch, dtype).itemsize * size.shape.layers
        if 14 * needed > bytes_free(device):  # of all sides at once
            print(f"{cell}: not enough memory, not measured")
            continue
        steps = size.steps if batch * budget <= size.heavy else 1
        point = {"measure": "decode", **asdict(cell), "steps": steps, "kv_heads": heads, "head_dim": size.shape.head_dim}
        yield point, lambda c=cell, n=steps: decode(c, pair_of(c), size.rounds, n)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """A step of each side, for each policy, precision and number of heads; of the floors the fastest one of each cell."""
    made = []
    for (policy, positions), dtype, kv in itertools.product(POLICIES, ("float32", "bfloat16"), ("mha", "gqa")):
        steps = rows_where(rows, measure="decode", policy=policy, positions=positions, dtype=dtype, kv=kv)
        floors: dict[tuple[int, int], Row] = {}
        for row in sorted((row for row in steps if row["side"] in FLOORS), key=lambda row: row["step_ms"]):
            floors.setdefault((row["batch"], row["budget"]), row | {"side": "fastest floor"})
        sides = [row for row in sorted(steps, key=lambda row: (row["batch"], row["budget"])) if row["side"] not in FLOORS]
        title = f"{policy}, {positions} positions, {dtype}, {kv}"
        made.append(Panel(title, [*sides, *floors.values()], "{side}", "{batch} x {budget}", "step_ms", log="y", unit="ms a step"))
    return made


@torch.no_grad()
def main() -> None:
    parser = arguments(__doc__, "device", "csv", "plot", "quick")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="sizes for a CPU or a GPU; default: those for the device")
    for name in ("batches", "budgets"):
        parser.add_argument(f"--{name}", nargs="+", type=int, help="only these")
    parser.add_argument("--kv", nargs="+", choices=("mha", "gqa"), help="only these: multi-head, or four query heads to a key head")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), help="only these")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    args = parser.parse_args()
    check_counts(args, ["batches", "budgets"])
    device = begin(args)
    size = QUICK if args.quick else PRESETS[args.preset or ("cpu" if device.type == "cpu" else "gpu")]
    size = replace(size, **{name: tuple(value) for name in ("batches", "budgets", "kv", "dtypes") if (value := getattr(args, name))})
    print_environment(device)
    sizes = {"hidden": size.shape.hidden, "layers": size.shape.layers, "heads": size.shape.heads, "rounds": size.rounds}
    results = Results(args.csv, COLUMNS, device, **sizes)
    todo = [(point, work) for point, work in jobs(size, device) if point["measure"] in args.part and not results.has(**point)]
    for point, work in tqdm(todo, unit="cell"):
        results.add({"steps": size.steps, **point, **row} for row in work())
    print(show(results.rows, SHOWN))
    if args.plot:
        draw(args.plot, title_of(device, PICTURE), panels(results.rows))


if __name__ == "__main__":
    run_script(main)
