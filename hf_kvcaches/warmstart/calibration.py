"""Calibrate a `WarmStartGate` on pairs of prompts, of which each new one is served from the earlier one and compared with a cold run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from statistics import fmean
from typing import Any

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


def calibrate_gate(
    model: Any,
    tokenizer: Any,
    library_options: Mapping[str, Any] | None,
    pairs: Iterable[tuple[Prompt, Prompt]],
    *,
    bound: float = 0.02,
    worst: float = 0.05,
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
        following: How many tokens behind the first one are compared; the model's greedy continuation.
    """
    for name, value in (("bound", bound), ("worst", worst)):
        if not is_number(value) or not 0 <= value < math.inf:
            raise ConfigError.of(name, "a number of nats of at least 0", value)
    following = whole_number("following", following, 0)
    require_whole(model)
    options = dict(library_options or {})
    if {"location", "max_bytes"} & set(options):
        raise ConfigError("library_options: location and max_bytes do not matter for a gate. Leave them out.")
    if not (pairs := list(pairs)):
        raise ConfigError.of("pairs", "at least one pair of prompts", pairs)
    gates = [WarmStartGate(reusable=0.0, repair=repair) for repair in _REPAIRS]
    with closing(WarmStartLibrary(model, tokenizer, **options)) as library:
        bar = tqdm(pairs, unit=" pairs", disable=not progress)
        measured = [measure_pair(library, source, target, gates, following) for source, target in bar]
        encoder = library.encoder.name
    by_repair = {gate.repair: [pair for pair in served if pair is not None] for gate, *served in zip(gates, *measured, strict=True)}
    best, rows = _chosen(by_repair, bound, worst)
    gate = WarmStartGate(repair=best["repair"], reusable=best["value"], encoder=encoder, bound=float(bound), measured=rows)
    object.__setattr__(gate, "fingerprint", ModelFingerprint.of(compat.base_model(model), tokenizer))
    return gate


def _chosen(
    measured: Mapping[float, Sequence[tuple[float, float]]], bound: float, worst: float
) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]]:
    """Return the row that keeps the bounds and saves most, and all rows: for each repair the limits of reused tokens, the highest first."""
    best, most, rows = {"repair": min(measured), "value": CLOSED}, 0.0, list[tuple[bool, dict[str, Any]]]()
    for repair, pairs in measured.items():
        limits = sorted({reused for reused, _ in pairs}, reverse=True)
        for number, limit in enumerate(limits):
            shares, divergences = zip(*(pair for pair in pairs if pair[0] >= limit), strict=True)
            kl, largest = fmean(divergences), max(divergences)
            row: dict[str, Any] = {"repair": repair, "value": limit, "admitted": len(shares), "pairs": len(pairs)}
            row |= {"kl": kl, "worst": largest, "kept": kl <= bound and largest <= worst}
            if row["kept"] and sum(shares) > most:
                best, most = row, sum(shares)
            rows.append((number % math.ceil(len(limits) / _MOST_ROWS) == 0, row))
    return best, tuple(row | {"chosen": row is best} for shown, row in rows if shown or row is best)


@torch.no_grad()
def measure_pair(
    library: WarmStartLibrary, source: Prompt, target: Prompt, gates: Sequence[WarmStartGate], following: int = 16
) -> list[tuple[float, float] | None]:
    """Serve one prompt from another by some gates: the share of reused tokens, and the divergence; None where no spans are reused.

    The divergence is that of the first token, in nats, or the mean over the following ones if that is greater.
    """
    model: Any = library.model
    (before, _), (after, _) = rows_of([source, target], model, library.tokenizer)
    (key,) = library.add([before])
    assert key is not None
    try:
        steps, _ = ModelRunner(model, torch.tensor([after])).steps(DynamicCache(config=model.config), following + 1)
        expected, chosen = torch.cat([step.logits for step in steps]), [int(step.token) for step in steps]
        served = list[tuple[float, float] | None]()
        for gate in gates:
            cache = WarmStartCache(model, library, gate=gate)
            first, *rest = divergence(expected, next_tokens(model, after, chosen, cache)).tolist()
            report = cache.report()
            pair = report.reused_tokens / len(after), max(first, fmean(rest or [0.0]))
            served.append(pair if report.strategy == "align" else None)
        return served
    finally:
        library.delete(key)
