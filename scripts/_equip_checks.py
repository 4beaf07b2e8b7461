"""What `bench_equip.py` measures beside decode steps: correctness first, writing alone, memory, and very long texts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import synchronize
from _equip_sides import OURS, SINKS, TOLERANCE, Cell, Models, Shape, Side, bytes_free, compared, in_turns

from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.kernels.slots import write_slots
from tests import testbed, tiny
from tests.reference.baselines import GatherAppendH2O, RerotateAllStreaming
from tests.reference.policies import H2OReference, StreamingReference

SLOTS, EVICTED = 1024, 64  # of the paper's table 6
# (batch, heads, head size): the paper's speedups over H2O and over StreamingLLM on Intel SPR, from the same table
TABLE_6 = {
    (1, 64, 64): (11.62, 26.54),
    (1, 64, 128): (27.32, 36.04),
    (1, 128, 64): (19.36, 27.65),
    (8, 64, 64): (35.73, 47.94),
    (8, 64, 128): (38.12, 46.67),
    (8, 128, 64): (39.90, 45.04),
    (32, 64, 64): (39.75, 50.58),
    (32, 64, 128): (31.43, 47.34),
}
SEEN = (1_000, 10_000, 100_000)
FAR = 4_000_000


def logits_of(model: Any, cache: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """After each token that follows the prompt, fed one by one: (batch, tokens, vocabulary)."""
    parts = [ids[:, :prompt], *ids[:, prompt:].split(1, 1)]
    return torch.stack([model(input_ids=part, past_key_values=cache, use_cache=True).logits[:, -1] for part in parts], 1).float()


def prove(shape: Shape, device: torch.device, *, quick: bool = False) -> list[str]:
    """Ours against slow references on a tiny model, and against the baselines on the benchmark's own; ends the run where they differ.

    Args:
        shape: Of the benchmark's model.
        device: Of the same; the tiny ones are on the CPU.
        quick: Only grouped heads on the tiny model.
    """
    lines = []
    # Half as many again as the budget for a prompt, and three times the budget behind it.
    ids = tiny.ids(2, 72, seed=1)
    kinds = (("streaming", StreamingReference), ("h2o", H2OReference))
    for (policy, reference), positions, kv_heads in itertools.product(kinds, ("compact", "original"), (2,) if quick else (2, 4)):
        model = tiny.llama(num_key_value_heads=kv_heads)
        expected = logits_of(model, reference(model, budget=16, positions=positions), ids, 24)
        actual = logits_of(model, EquipCache(model, policy, 16, positions=positions), ids, 24)
        lines.append(_judge(f"{policy} {positions}, tiny model, {kv_heads} KV heads, the reference", expected, actual))
    budget, tokens = 32, 5 * 32
    for kv in ("mha", "gqa"):
        models = Models.make(shape, kv, "float32", device, sharp=True)
        plain, switched = models.plain, models.switched
        ids = torch.randint(shape.vocabulary, (2, tokens), generator=torch.Generator().manual_seed(2)).to(device)
        expected = logits_of(plain, RerotateAllStreaming(plain.config, budget=budget, sinks=SINKS), ids, budget + 8)
        for rope in ("auto", "rotated_keys"):
            actual = logits_of(switched, EquipCache(switched, "streaming", budget, rope=rope), ids, budget + 8)
            lines.append(_judge(f"streaming compact, rope={rope!r}, {kv}, re-rotate all", expected, actual))
        for positions in ("compact", "original"):
            expected = logits_of(switched, GatherAppendH2O(switched, budget=budget, positions=positions), ids, budget + 8)
            actual = logits_of(switched, EquipCache(switched, "h2o", budget, positions=positions), ids, budget + 8)
            lines.append(_judge(f"h2o {positions}, {kv}, gather and append", expected, actual))
    return lines


def _judge(what: str, expected: torch.Tensor, actual: torch.Tensor) -> str:
    error = float((expected - actual).abs().max())
    if not error <= TOLERANCE["float32"]:
        raise SystemExit(f"{what}: the logits differ by {error:.3g}, more than {TOLERANCE['float32']:.0e}: nothing timed")
    return f"same logits as {what}: {error:.1e}"


def write_alone(batch: int, heads: int, size: int, dtype: str, device: torch.device, rounds: int) -> list[dict[str, Any]] | None:
    """Replacing 64 of 1,024 tokens, keys and values: a row for each way, or None where there is no memory for it."""
    kind = getattr(torch, dtype)
    held = 2 * batch * heads * SLOTS * size * torch.empty((), dtype=kind).element_size()
    if 3 * held > bytes_free(device):
        return None
    random = torch.Generator(device).manual_seed(0)

    def states(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(batch, heads, tokens, size, generator=random, device=device, dtype=kind) for _ in range(2)]

    held_now, new = states(SLOTS), states(EVICTED)
    order = torch.rand(batch, heads, SLOTS - SINKS, generator=random, device=device).argsort(-1) + SINKS
    chosen = order[..., :EVICTED].sort(-1).values
    stays = torch.ones(batch, heads, SLOTS, dtype=torch.bool, device=device).scatter_(-1, chosen, False)
    ring = torch.arange(SINKS, SINKS + EVICTED, device=device)[None, None]

    def shift_append() -> list[torch.Tensor]:
        return [torch.cat([t[:, :, :SINKS], t[:, :, SINKS + EVICTED :], n], 2) for t, n in zip(held_now, new, strict=True)]

    def gather_append() -> list[torch.Tensor]:
        return [torch.cat([t[stays].view(batch, heads, -1, size), n], 2) for t, n in zip(held_now, new, strict=True)]

    _prove_write(shift_append(), held_now, new, ring.expand(batch, heads, -1))
    rows = []
    for policy, slots, copying in (("streaming", ring, shift_append), ("h2o", chosen, gather_append)):
        sides: dict[str, Callable[[], object]] = {
            "tensors rebuilt": copying,
            "in place": lambda slots=slots: write_slots(*held_now, slots, *new),
        }
        rounds = min(rounds, 3) if held > 2**30 else rounds
        # Writing is so short that a round of it has to be repeated to be read off the clock.
        repeats = {"tensors rebuilt": 1, "in place": 8}
        seconds = in_turns([_timed(work, repeats[name], device) for name, work in sides.items()], rounds)
        columns = compared(dict(zip(sides, seconds, strict=True)), "in place")
        rows += [{"policy": policy, "side": name, **values} for name, values in columns.items()]
    return rows


def _prove_write(rebuilt: list[torch.Tensor], held: list[torch.Tensor], new: list[torch.Tensor], slots: torch.Tensor) -> None:
    """Both ways must hold the same tokens: ours in other places."""
    written = [tensor.clone() for tensor in held]
    write_slots(*written, slots, *new)
    for way, other in zip(rebuilt, written, strict=True):
        moved = torch.cat([other[:, :, :SINKS], other[:, :, SINKS + EVICTED :], other[:, :, SINKS : SINKS + EVICTED]], 2)
        if not torch.equal(way, moved):
            raise SystemExit("write_slots: not the same tokens as by rebuilding the tensors: nothing timed")


def _timed(work: Callable[[], object], repeats: int, device: torch.device) -> Callable[[], list[float]]:
    def seconds() -> list[float]:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(device)
        return [(time.perf_counter() - start) / repeats]

    return seconds


def memory(cell: Cell, models: Models, shape: Shape) -> dict[str, Any]:
    """Bytes of a full cache against budget x bytes per token: keys and values alone, and every tensor that it owns."""
    cache = EquipCache(models.switched, cell.policy, cell.budget, sinks=SINKS, positions=cell.positions)
    side = Side(OURS, models.switched, cache, cell)
    side.decode(4)
    item = 4 if cell.dtype == "float32" else 2
    per_token = 2 * cell.batch * shape.kv_heads(cell.kv) * shape.head_dim * item * shape.layers
    blocks = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for name, tensor in cache.owned_tensors().items()
        if name.rpartition(".")[2] in ("keys", "values")
    }
    promised = cell.budget * per_token
    return {"side": OURS, "value": sum(blocks.values()) / promised, "all_value": cache.report().bytes / promised}


def set_forward(cache: EquipCache, tokens: int) -> None:
    """Makes the model believe that so many more tokens were fed in: its positions go on from there."""
    for layer in cache.layers:
        layer.seen += tokens


def flatness(cell: Cell, models: Models, rounds: int, steps: int) -> list[dict[str, Any]]:
    """The time of a step after a thousand tokens and after many more, in turns."""
    sides = []
    for seen in SEEN:
        cache = EquipCache(models.switched, cell.policy, cell.budget, sinks=SINKS, positions=cell.positions)
        side = Side(OURS, models.switched, cache, cell)
        set_forward(cache, max(0, seen - cache.seen))
        sides.append(side)
    seconds = in_turns([lambda side=side: side.decode(steps) for side in sides], rounds)
    columns = compared({str(seen): each for seen, each in zip(SEEN, seconds, strict=True)}, str(SEEN[0]))
    return [{"side": OURS, "tokens": int(seen), **values} for seen, values in columns.items()]


def far_away(device: torch.device, budget: int) -> dict[str, Any]:
    """How far logits of the small trained model over real text are from themselves when four million tokens came between.

    Sinks are read at the start of a text, then either what follows them, or the same after a leap of the model's positions. The counterpart
    without a cache is the model over a whole passage at its start and there, where float32 angles are far off.
    """
    model, tokenizer = testbed.load("base")
    model = model.to(device)
    tokens = tokenizer(testbed.held_out()[: 20 * budget], return_tensors="pt")["input_ids"][:, : 3 * budget].to(device)
    at_start, moved = (_after_leap(model, tokens, budget, leap) for leap in (0, FAR))
    places = torch.arange(tokens.shape[1], device=device)[None]
    alone = [model(input_ids=tokens, position_ids=places + leap, use_cache=False).logits for leap in (0, FAR)]
    error, without = (float((a - b).abs().max()) for a, b in ((at_start, moved), alone))
    return {"side": OURS, "tokens": FAR, "error": error, "value": without}


def _after_leap(model: Any, tokens: torch.Tensor, budget: int, leap: int) -> torch.Tensor:
    cache = EquipCache(model, "streaming", budget, sinks=SINKS)
    model(input_ids=tokens[:, :SINKS], past_key_values=cache, use_cache=True)
    set_forward(cache, leap)
    return logits_of(model, cache, tokens[:, SINKS:], 1)


__all__ = ["SLOTS", "TABLE_6", "far_away", "flatness", "memory", "prove", "write_alone"]
