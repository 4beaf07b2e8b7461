"""Calibrate a `WarmStartGate` on pairs of prompts.

Each new prompt of a pair is served from the earlier one, and compared with a cold run at the first token and at the following ones, for
which the cache is fed the cold run's greedy continuation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.errors import ConfigError, is_number, whole_number
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.evaluate.runner import ModelRunner, next_tokens
from hf_kvcaches.evaluate.texts import require_whole
from hf_kvcaches.warmstart.cache import WarmStartCache
from hf_kvcaches.warmstart.entries import Prompt, rows_of
from hf_kvcaches.warmstart.gate import WarmStartGate
from hf_kvcaches.warmstart.library import WarmStartLibrary

# A limit that rejects everything.
CLOSED = 1.01
_REPAIRS = (0.05, 0.15, 0.3, 0.5)
# The most rows of a calibrated gate's table for each repair.
_MOST_ROWS = 12


class MeasuredPair(NamedTuple):
    """A pair that was served: the share of tokens that were reused, and the divergence from a cold run, in nats.

    The divergence is that of the first token, or the mean over the following ones if that is greater.
    """

    reused: float
    divergence: float


def calibrate_gate(
    model: Any,
    tokenizer: Any,
    library_options: Mapping[str, Any] | None,
    pairs: Iterable[tuple[Prompt, Prompt]],
    *,
    bound: float = 0.02,
    worst: float = 0.05,
    gate: WarmStartGate | None = None,
    tail: int = 16,
    following: int = 16,
    progress: bool = True,
) -> WarmStartGate:
    """Return the gate that reuses most tokens and keeps bounds on the KL divergence.

    For each of some shares of repaired tokens, `reusable` is the least share of reused tokens at which the admitted pairs keep the bounds;
    a gate that keeps them nowhere rejects everything. Pairs should end with text that depends on their differences.

    Args:
        library_options: Options of the `WarmStartLibrary` that the gate is for: `encoder`, `quantization`.
        pairs: (earlier prompt, new prompt), as texts or token ids.
        bound: The bound on the mean over the admitted pairs, in nats: at the first token and over the following ones.
        worst: The bound on each admitted pair.
        gate: The gate with the other limits; None for the defaults.
        tail: That of the caches that the gate is for.
        following: How many tokens behind the first one are compared; the model's greedy continuation.
    """
    for name, value in (("bound", bound), ("worst", worst)):
        if not is_number(value) or not 0 <= value < math.inf:
            raise ConfigError.of(name, "a number of nats of at least 0", value)
    following = whole_number("following", following, 0)
    require_whole(model)
    options, base = dict(library_options or {}), gate or WarmStartGate()
    if {"location", "max_bytes"} & set(options):
        raise ConfigError("library_options: location and max_bytes do not matter for a gate. Leave them out.")
    if not (pairs := list(pairs)):
        raise ConfigError.of("pairs", "at least one pair of prompts", pairs)
    gates = [replace(base, reusable=0.0, repair=repair) for repair in sorted({*_REPAIRS, base.repair})]
    measured: list[list[MeasuredPair]] = [[] for _ in gates]
    with closing(WarmStartLibrary(model, tokenizer, **options)) as library:
        for source, target in tqdm(pairs, unit=" pairs", disable=not progress):
            for served, pair in zip(measured, measure_pair(library, source, target, gates, tail=tail, following=following), strict=True):
                served += [] if pair is None else [pair]
        encoder = library.encoder.name
    best, rows = _chosen(gates, measured, bound, worst)
    calibrated = replace(base, repair=best["repair"], reusable=best["value"], encoder=encoder, bound=float(bound), measured=rows)
    object.__setattr__(calibrated, "fingerprint", ModelFingerprint.of(compat.base_model(model), tokenizer))
    return calibrated


def _chosen(
    gates: Sequence[WarmStartGate], measured: Sequence[Sequence[MeasuredPair]], bound: float, worst: float
) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]]:
    """Return the row that keeps the bounds and saves most, and all rows: for each gate the limits of reused tokens, the highest first."""
    best, most, rows = {"repair": gates[0].repair, "value": CLOSED}, 0.0, list[tuple[bool, dict[str, Any]]]()
    for gate, pairs in zip(gates, measured, strict=True):
        limits = sorted({pair.reused for pair in pairs}, reverse=True)
        for number, reusable in enumerate(limits):
            admitted = [pair for pair in pairs if pair.reused >= reusable]
            kl, largest = fmean(pair.divergence for pair in admitted), max(pair.divergence for pair in admitted)
            row: dict[str, Any] = {"repair": gate.repair, "value": reusable, "admitted": len(admitted), "pairs": len(pairs)}
            row |= {"kl": kl, "worst": largest, "kept": kl <= bound and largest <= worst}
            if row["kept"] and (saved := sum(pair.reused for pair in admitted)) > most:
                best, most = row, saved
            rows.append((number % math.ceil(len(limits) / _MOST_ROWS) == 0, row))
    return best, tuple(row | {"chosen": row is best} for shown, row in rows if shown or row is best)


@torch.no_grad()
def measure_pair(
    library: WarmStartLibrary, source: Prompt, target: Prompt, gates: Sequence[WarmStartGate], *, tail: int = 16, following: int = 16
) -> list[MeasuredPair | None]:
    """Serve one prompt from another by some gates; None where nothing is reused behind changed text."""
    model: Any = library.model
    (before, _), (after, _) = rows_of([source, target], model, library.tokenizer)
    (key,) = library.add([before])
    assert key is not None
    try:
        steps, _ = ModelRunner(model, torch.tensor([after])).steps(DynamicCache(config=model.config), following + 1)
        expected, chosen = torch.cat([step.logits for step in steps]), [int(step.token) for step in steps]
        served: list[MeasuredPair | None] = []
        for gate in gates:
            cache = WarmStartCache(model, library, gate=gate, tail=tail)
            first, *rest = divergence(expected, next_tokens(model, after, chosen, cache)).tolist()
            pair = MeasuredPair(cache.report().reused_tokens / len(after), max(first, fmean(rest or [0.0])))
            served.append(pair if cache.report().strategy == "align" else None)
        return served
    finally:
        library.delete(key)
