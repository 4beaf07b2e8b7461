"""What `eval_translation.py` compares: ways to fill a consumer's cache with what a producer has read, and the translators for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from inspect import signature
from statistics import fmean
from typing import Any, Literal

import torch

from hf_kvcaches.core.calibrating import divergence
from hf_kvcaches.core.growing import GrowingCache
from hf_kvcaches.core.quantize import quantize
from hf_kvcaches.core.verify import evaluating
from hf_kvcaches.translate.calibration import Pair, Sums, Wanted, add_gradients
from hf_kvcaches.translate.patching import Trial
from hf_kvcaches.translate.routing import Route, select
from hf_kvcaches.translate.solving import Solver
from hf_kvcaches.translate.translator import CacheTranslator, TranslatorSettings

# Of the int4 baseline, along tokens.
GROUP = 64
# Texts that the layers of selective recompute are chosen on.
TRIALS = 8

States = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Side:
    """One way to fill the consumer's cache."""

    name: str  # in tables
    # `oracle`: its own prefill. `raw`, `int4`: the producer's keys and values. `selective`: the same, but half of the layers are the consum
    kind: Literal["oracle", "raw", "int4", "selective", "solved", "fitted", "alone"]
    # `baseline`, `paper`, `ours`, `variant`, or `explanation`; in pictures and tables
    family: Literal["baseline", "paper", "ours", "variant", "explanation"]
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)  # of `CacheTranslator.fit`
    of: str = ""  # for `alone`: the name of the other side
    layer: int | None = None  # for `alone`


ORACLE = Side("own prefill", "oracle", "baseline")
RAW = Side("raw K/V", "raw", "baseline")
INT4 = Side("int4 K/V", "int4", "baseline")
SELECTIVE = Side("selective recompute", "selective", "baseline")
REUSE = Side("paper's Reuse 0.25x", "solved", "paper", {"method": "paper", "payload": 0.25})
# Metrics play no part in the paper's method; a plain one saves the gradients.
_PATCH = {"method": "paper", "payload": 0.25, "aligner": "mlp", "metric": "plain"}
REUSE_PATCH = Side("paper's Reuse + Patch 0.25x", "fitted", "paper", _PATCH)
DEFAULT = Side("joint 1/8 int4 (default)", "fitted", "ours")
ZERO = Side("zero bytes", "solved", "ours", {"payload": 0.0})
FULL_RANK = Side("full rank, float32", "solved", "explanation", {"payload": 1.0, "dtype": "float32"})
# With the default and the zero bytes, by bytes.
SWEEP = tuple(Side(f"joint 1/{parts} int4", "solved", "ours", {"payload": 1 / parts}) for parts in (32, 16, 4, 2))
VARIANTS = (
    # Beside which the metrics and int8 are to be seen: from the same texts, and nothing patched.
    Side("joint 1/8 int4, no patches", "solved", "variant"),
    Side("joint 1/8 int8", "solved", "variant", {"dtype": "int8"}),
    Side("joint 1/8 int4, attention metric", "solved", "variant", {"metric": "attention"}),
    Side("joint 1/8 int4, plain metric", "solved", "variant", {"metric": "plain"}),
    Side("cross_layer 1/8 int4", "fitted", "variant", {"method": "cross_layer", "patch_layers": None}),
    Side("joint 1/8 int4, 1 layer run", "fitted", "variant", {"recompute_layers": 1, "patch_layers": None}),
)
SIDES = (ORACLE, RAW, INT4, SELECTIVE, REUSE, REUSE_PATCH, ZERO, *SWEEP[:2], DEFAULT, *SWEEP[2:], *VARIANTS, FULL_RANK)
# Shares of the keys' and of the values' width.
RANKS = (1 / 8, 1 / 4, 1 / 2)


def rank_sides(keys: int, values: int) -> list[Side]:
    """The paper's method with each pair of ranks but the one that `REUSE` has."""
    pairs = [(int(k * keys), int(v * values)) for k in RANKS for v in RANKS if (k, v) != (0.25, 0.25)]
    return [Side(f"paper's Reuse, ranks {k} + {v}", "solved", "paper", {"method": "paper", "ranks": (k, v)}) for k, v in pairs]


def budget_sides(layers: int) -> list[Side]:
    """The paper's method with one, two and more patched layers, from the lowest one up."""
    budgets = [list(range(1, last + 1)) for last in range(1, layers)]
    return [Side(f"paper's Reuse + Patch of {own}", "fitted", "paper", {**_PATCH, "patch_layers": own}) for own in budgets]


def alone_sides(layers: int) -> list[Side]:
    """The default and full rank in one layer at a time, but for layer 0, which the consumer has for nothing."""
    named = (("default", DEFAULT), ("full rank, float32", FULL_RANK))
    return [
        Side(f"{name}, layer {layer} alone", "alone", "explanation", of=side.name, layer=layer)
        for name, side in named
        for layer in range(1, layers)
    ]


def wanted_of(options: Mapping[str, Any]) -> Wanted:
    """What `CacheTranslator.fit` would be asked for with these options, without patched layers."""
    defaults = {name: each.default for name, each in signature(CacheTranslator.fit).parameters.items()}
    return Wanted(**{each.name: defaults[each.name] for each in fields(Wanted)} | {"patch_layers": None} | dict(options))


class Workshop:
    """Makes translators for two models from the same texts."""

    def __init__(self, producer: Any, consumer: Any, tokenizer: Any, texts: Sequence[Sequence[int]]) -> None:
        self.pair, self.tokenizer, self.texts = Pair(producer, consumer, tokenizer), tokenizer, texts
        self.reading_seconds = 0.0

    @cached_property
    def sums(self) -> Sums:
        """What all `solved` sides follow from: as in `CacheTranslator.fit`, but read once."""
        start, pair = time.perf_counter(), self.pair
        made = Sums(pair, wanted_of({}), range(1, pair.layers))
        with evaluating(pair.producer), evaluating(pair.consumer):
            for number, ids in enumerate(map(torch.tensor, self.texts)):
                made.add(*pair.states(ids, 0, queries=made.look))
                add_gradients(pair.consumer, made, ids, number)
        self.reading_seconds = time.perf_counter() - start
        return made

    def translator(self, side: Side) -> CacheTranslator:
        """The translator of a side."""
        if side.kind == "fitted":
            pair = self.pair
            return CacheTranslator.fit(pair.producer, pair.consumer, self.tokenizer, self.texts, progress=False, **side.options)
        wanted, sums = wanted_of(side.options), self.sums
        start = time.perf_counter()
        sums.wanted = wanted
        maps = Solver(sums, wanted).solve()
        settings = TranslatorSettings(
            method=wanted.method,
            payload=float(wanted.payload),
            dtype=wanted.code_dtype,
            group=wanted.group,
            recompute_layers=0,
            metric=wanted.metric,
            ridge=wanted.ridge,
            layers=self.pair.layers,
            prefixes=len(self.texts),
            tokens=sum(map(len, self.texts)),
            seconds={"reading": round(self.reading_seconds, 3), "fit": round(time.perf_counter() - start, 3)},
        )
        return CacheTranslator(maps, settings, Route(()), *self.pair.fingerprints())

    @cached_property
    def selected(self) -> tuple[int, ...]:
        """Half of the layers, side by side, which help most where they are the consumer's own and the others the producer's."""
        layers = self.pair.layers
        texts = [torch.tensor(ids) for ids in self.texts]
        trials = [Trial(self.pair, ids, 0) for ids in texts[:: max(1, len(texts) // TRIALS)][:TRIALS]]

        def score(starts: frozenset[int]) -> float:
            exact = {layer for start in starts for layer in range(start, start + layers // 2)}
            found = []
            for trial in trials:
                raw = {layer: (state.keys, state.values) for layer, state in trial.producer.items() if layer not in exact}
                found.append(float(divergence(trial.alone, trial.answer(raw)).mean()))
            return -fmean(found)

        route = select(score, range(layers - layers // 2 + 1), pool=None, least=1, most=1)
        # Even where none helps, one has to be taken: the side is one that recomputes.
        start = route.patched[0] if route.patched else max(route.sensitivity, key=lambda layer: route.sensitivity[layer])
        return tuple(range(start, start + layers // 2))


def read(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rotated keys and values of all layers, (1, kv_heads, tokens, head_dim) each."""
    cache = GrowingCache(model.config)
    model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    return held(cache)


def held(cache: GrowingCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is in a cache now; it may grow."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def filled(model: Any, states: States) -> GrowingCache:
    """A cache with these states."""
    cache = GrowingCache(model.config)
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        layer.update(keys, values)
    return cache


def as_sent(states: States, *, int4: bool) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[int]]:
    """Keys and values as they arrive, and each layer's bytes."""
    arrived, sizes = [], []
    for pair in states:
        if int4:
            packed = [quantize(part.bfloat16(), 4, GROUP, axis=-2) for part in pair]
            arrived.append((packed[0].dequantize(pair[0].dtype), packed[1].dequantize(pair[1].dtype)))
            sizes.append(sum(part.nbytes for part in packed))
        else:
            arrived.append((pair[0].bfloat16().to(pair[0].dtype), pair[1].bfloat16().to(pair[1].dtype)))
            sizes.append(plain_bytes([pair]))
    return arrived, sizes


def plain_bytes(states: States) -> int:
    """In bfloat16."""
    return sum(2 * part.numel() for pair in states for part in pair)


def translators(workshop: Workshop, sides: Sequence[Side]) -> Iterator[tuple[str, CacheTranslator]]:
    """By names of their sides, one after the other."""
    for side in sides:
        if side.kind in ("solved", "fitted"):
            yield side.name, workshop.translator(side)
