"""What `bench_equip.py` measures beside decode steps: correctness first, writing alone, and very long texts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _equip_sides import FULL, OURS, SINKS, TOLERANCE, Cell, Side, compared
from shared.models import Pair, Shape, bytes_free
from shared.results import Row
from shared.timing import in_turns, seconds_of, synchronize
from transformers import DynamicCache

from hf_kvcaches import EquipCache, KeepProbe
from hf_kvcaches.kernels.slots import write_slots
from tests import tiny
from tests.reference.baselines import GatherAppendH2O, RerotateAllStreaming, ShiftAppendStreaming
from tests.reference.policies import EQUIP, H2OReference, StreamingReference

SLOTS, EVICTED = 1024, 64  # of the paper's table 6
WRITES = ((1, 64, 64), (1, 64, 128), (8, 64, 64), (8, 64, 128))  # batch, heads, head size, of the same table
SEEN = (1_000, 10_000, 100_000)
PROBE = "KeepProbe"


def logits_of(model: Any, cache: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """After each token that follows the prompt, fed one by one: (batch, tokens, vocabulary)."""
    parts = [ids[:, :prompt], *ids[:, prompt:].split(1, 1)]
    return torch.stack([model(input_ids=part, past_key_values=cache, use_cache=True).logits[:, -1] for part in parts], 1).float()


def prove(shape: Shape, device: torch.device, *, quick: bool = False) -> list[str]:
    """Compare ours with slow references on a tiny model, and with the baselines on the benchmark's; end the run where they differ."""
    lines = []

    def judge(what: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
        error = float((expected - actual).abs().max())
        if not error <= TOLERANCE["float32"]:
            raise SystemExit(f"{what}: the logits differ by {error:.3g}, more than {TOLERANCE['float32']:.0e}: nothing timed")
        lines.append(f"same logits as {what}: {error:.1e}")

    # Half as many again as the budget for a prompt, and three times the budget behind it.
    ids = tiny.ids(2, 72, seed=1)
    kinds = (("streaming", StreamingReference), ("h2o", H2OReference))
    for (policy, reference), positions, kv_heads in itertools.product(kinds, ("compact", "original"), (2,) if quick else (2, 4)):
        model = tiny.llama(num_key_value_heads=kv_heads)
        expected = logits_of(model, reference(model, budget=16, sinks=SINKS, positions=positions, **EQUIP), ids, 24)
        actual = logits_of(model, EquipCache(model, policy, 16, positions=positions), ids, 24)
        judge(f"{policy} {positions}, tiny model, {kv_heads} KV heads, the reference", expected, actual)
    budget = 32
    for kv in ("mha", "gqa"):
        pair = Pair.random(shape, kv, device, sharp=True)
        plain, switched = pair.plain, pair.switched
        ids = torch.randint(shape.vocabulary, (2, 5 * budget), generator=torch.Generator().manual_seed(2)).to(device)
        baselines = {"compact": (RerotateAllStreaming, "re-rotate all"), "original": (ShiftAppendStreaming, "shift and append")}
        for positions, (baseline, name) in baselines.items():
            expected = logits_of(plain, baseline(plain.config, budget=budget, sinks=SINKS), ids, budget + 8)
            actual = logits_of(switched, EquipCache(switched, "streaming", budget, positions=positions), ids, budget + 8)
            judge(f"streaming {positions}, {kv}, {name}", expected, actual)
        for positions in ("compact", "original"):
            expected = logits_of(switched, GatherAppendH2O(switched, budget=budget, positions=positions), ids, budget + 8)
            actual = logits_of(switched, EquipCache(switched, "h2o", budget, positions=positions), ids, budget + 8)
            judge(f"h2o {positions}, {kv}, gather and append", expected, actual)
    return lines


def write_alone(batch: int, heads: int, size: int, device: torch.device, rounds: int) -> list[Row] | None:
    """Replace 64 of 1,024 tokens, keys and values: a row for each way, or None where there is no memory for it."""
    total = 2 * batch * heads * SLOTS * size * 4
    if 3 * total > bytes_free(device):
        return None
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

    # Both ways must hold the same tokens: ours in other slots.
    written = [tensor.clone() for tensor in kept]
    write_slots(*written, ring.expand(batch, heads, -1), *new)
    for rebuilt, tensor in zip(shift_append(), written, strict=True):
        ordered = torch.cat([tensor[:, :, :SINKS], tensor[:, :, SINKS + EVICTED :], tensor[:, :, SINKS:][:, :, :EVICTED]], 2)
        if not torch.equal(rebuilt, ordered):
            raise SystemExit("write_slots: not the same tokens as by rebuilding the tensors: nothing timed")
    rows = []
    rounds = min(rounds, 3) if total > 2**30 else rounds
    for policy, slots, copying in (("streaming", ring, shift_append), ("h2o", victims, gather_append)):
        # Writing is so short that a round of it has to be repeated to be read off the clock.
        sides: dict[str, tuple[Callable[[], object], int]] = {
            "tensors rebuilt": (copying, 1),
            "in place": (lambda slots=slots: write_slots(*kept, slots, *new), 8),
        }
        works = {name: lambda _, work=work, n=n: [seconds_of(work, device, n)] for name, (work, n) in sides.items()}
        columns = compared(in_turns(works, rounds, warm_up=1), "in place")
        rows += [{"policy": policy, "side": name, "kv_heads": heads, "head_dim": size, **values} for name, values in columns.items()]
    return rows


def drafting(policy: str, pair: Pair, budget: int, rounds: int) -> list[Row]:
    """Greedy decoding with and without prompt lookup behind a text that repeats itself, in turns; the texts must be the same.

    The full cache goes along: it shows what a pass over nine tokens costs this machine, whatever the cache.
    """
    texts = set()
    ids = torch.randint(1, pair.plain.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(5)).to(pair.device)
    ids = ids.repeat(1, 2 * budget // 64)

    def decode(_: int, ours: bool, options: dict[str, int]) -> list[float]:
        model = pair.switched if ours else pair.plain
        cache = EquipCache(model, policy, budget) if ours else DynamicCache(config=model.config)
        model(input_ids=ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        start = time.perf_counter()
        output = model.generate(ids, past_key_values=cache, max_new_tokens=48, do_sample=False, **options)
        if ours:
            texts.add(tuple(output[0].tolist()))
        return [(time.perf_counter() - start) / 48]

    ways = {"one by one": {}, "prompt lookup": {"prompt_lookup_num_tokens": 8}}
    sides = {way if ours else f"{FULL}, {way}": partial(decode, ours=ours, options=ways[way]) for ours in (True, False) for way in ways}
    times = in_turns(sides, rounds, warm_up=1)
    if len(texts) > 1 and policy == "streaming":  # rounding decides between tokens of equal score
        raise SystemExit(f"{policy}: prompt lookup writes another text than greedy decoding")
    return [{"side": name, **values} for name, values in compared(times, "prompt lookup").items()]


def pruning(name: str, pair: Pair, tokens: int, rounds: int) -> list[Row]:
    """A prompt that is read whole, and one that is read and pruned to a quarter, in turns."""
    ids = torch.randint(1, pair.plain.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(6)).to(pair.device)
    policy = KeepProbe.calibrate(pair.switched, None, ids.view(4, -1).tolist(), progress=False) if name == PROBE else name

    def read(_: int, pruned: bool) -> list[float]:
        model = pair.switched if pruned else pair.plain
        cache = EquipCache(model, policy, 0.25) if pruned else DynamicCache(config=model.config)
        start = time.perf_counter()
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        if isinstance(cache, EquipCache) and cache.policy.deferred:
            cache.compress(model, input_ids=ids)
        synchronize(pair.device)
        return [time.perf_counter() - start]

    times = in_turns({"whole": partial(read, pruned=False), "pruned": partial(read, pruned=True)}, rounds, warm_up=1)
    return [{"side": name, "tokens": tokens, **values} for name, values in compared(times, "whole").items()]


def flatness(cell: Cell, pair: Pair, rounds: int, steps: int) -> list[Row]:
    """The time of a step after a thousand tokens and after many more, in turns."""
    sides = {}
    for seen in SEEN:
        sides[str(seen)] = Side(OURS, pair.switched, cell.cache(pair.switched), cell)
        for layer in sides[str(seen)].cache.layers:
            layer.table.advance(max(0, seen - layer.seen))
    times = in_turns({seen: lambda _, side=side: side.decode(steps) for seen, side in sides.items()}, rounds, warm_up=1)
    return [{"side": OURS, "tokens": int(seen), **values} for seen, values in compared(times, str(SEEN[0])).items()]
