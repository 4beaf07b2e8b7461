"""Calibrate the limits of a `WarmStartGate` on pairs of prompts.

Each pair is served from a summary and by alignment, and compared with a cold run at the first token and at the following ones, for which
the cache is fed the cold run's greedy continuation. A false hit is a pair that the gate admits although the divergence of the first token,
or the mean over the following ones, is above `FALSE`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import DynamicCache

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.errors import ConfigError, is_number, whole_number
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.evaluate.runner import next_tokens
from hf_kvcaches.evaluate.texts import require_whole
from hf_kvcaches.reuse.tokens import as_ids
from hf_kvcaches.warmstart.cache import WarmStartCache
from hf_kvcaches.warmstart.changes import changes
from hf_kvcaches.warmstart.gate import WarmStartGate
from hf_kvcaches.warmstart.library import Prompt, WarmStartLibrary, token_ids
from hf_kvcaches.warmstart.planning import Strategy, reusable_blocks

# The paper's limit on the divergence, in nats.
FALSE = 0.05
# A limit that rejects everything.
CLOSED = 1.01
# A gate that rejects nothing.
_OPEN = WarmStartGate(tau=-1.0, lengths=(0.0, math.inf), reusable=0.0, content=None, lexical=False)
# The most rows of a calibrated gate's table.
_MOST_ROWS = 40


class ServedDivergence(NamedTuple):
    """The divergences of a served prompt's tokens from those of a cold run, in nats."""

    first: float
    following: float = 0.0  # the mean
    right: float = 1.0  # the share of the following tokens whose most probable token is the cold run's

    @property
    def worst(self) -> float:
        """The greater of both divergences."""
        return max(self.first, self.following)


@dataclass(frozen=True)
class MeasuredPair:
    """A pair, with its divergences when served from a summary and by alignment; None if that is not possible."""

    similarity: float
    reusable: float  # share of the target's tokens
    refused: str  # the gate's check that rejects a summary whatever its similarity, or ""
    slots: ServedDivergence | None
    align: ServedDivergence | None


def calibrate_gate(
    model: Any,
    tokenizer: Any,
    library_options: Mapping[str, Any] | None,
    pairs: Iterable[tuple[Prompt, Prompt]],
    *,
    budget: float = 0.01,
    gate: WarmStartGate | None = None,
    guard: int = 8,
    tail: int = 16,
    following: int = 16,
    progress: bool = True,
) -> WarmStartGate:
    """Return the most permissive gate that keeps a budget of false hits.

    `tau` is the lowest similarity, among pairs that pass the gate's other checks, at which the share of false hits from summaries keeps the
    budget; `reusable` is the lowest share of tokens at which alignment keeps it. A limit that no value keeps rejects everything. If all
    pairs keep the budget, the limit of `gate` stands if it is lower; else the limit is the lowest measured value.

    The tokens behind the prompts are compared, so pairs should end with text that depends on their differences, and some pairs must be
    rejected. A budget of 1% needs more than a hundred admitted pairs: with no false hit among n, the true share may be 3 / n.

    Args:
        library_options: Options of the `WarmStartLibrary` that the gate is for: `slots`, `encoder`, `layout`, `tail`, `full`,
            `quantization`, `adapters`.
        pairs: (earlier prompt, new prompt), as texts or token ids.
        budget: The largest share of false hits among admitted pairs.
        gate: The gate with the other limits; None for the defaults. Limits without measurements stay.
        guard: That of the caches that the gate is for, as `tail`.
        following: How many tokens behind the first one are compared; the model's greedy continuation.
    """
    if not is_number(budget) or not 0 <= budget < 1:
        raise ConfigError.of("budget", "a share of at least 0, below 1", budget)
    following = whole_number("following", following, 0)
    require_whole(model)
    options = dict(library_options or {})
    for name in ("location", "max_bytes"):
        if name in options:
            raise ConfigError(f"library_options: {name} does not matter for a gate. Leave it out.")
    base = gate or WarmStartGate()
    pairs = list(pairs)
    if not pairs:
        raise ConfigError.of("pairs", "at least one pair of prompts", pairs)
    with closing(WarmStartLibrary(model, tokenizer, **options)) as library:
        bar = tqdm(pairs, unit=" pairs", disable=not progress)
        settings = {"guard": guard, "tail": tail, "following": following}
        measured = [measure_pair(library, source, target, base, **settings) for source, target in bar]
        encoder = library.encoder.name
    summaries = [(pair.similarity, pair.slots) for pair in measured if pair.slots is not None and not pair.refused]
    alignments = [(pair.reusable, pair.align) for pair in measured if pair.align is not None]
    tau, tau_rows = limit(summaries, budget, base.tau)
    reusable, reusable_rows = limit(alignments, budget, base.reusable)
    rows = [{"limit": "tau", **row} for row in tau_rows] + [{"limit": "reusable", **row} for row in reusable_rows]
    calibrated = replace(
        base,
        tau=tau if any(pair.slots is not None for pair in measured) else base.tau,
        reusable=reusable if alignments else base.reusable,
        encoder=encoder,
        measured=tuple(rows),
    )
    object.__setattr__(calibrated, "fingerprint", ModelFingerprint.of(compat.base_model(model), tokenizer))
    return calibrated


def limit(measured: Sequence[tuple[float, ServedDivergence]], budget: float, default: float) -> tuple[float, list[dict[str, Any]]]:
    """Return the lowest limit at which the share of false hits keeps a budget, and rows for the limits that were tried.

    `measured` holds (the limited value, divergences) of each pair; if all of them keep the budget, a lower `default` stands.
    """
    rows: list[dict[str, Any]] = []
    chosen = None
    ordered = sorted(measured, reverse=True)
    for count, (value, _) in enumerate(ordered, start=1):
        if count < len(ordered) and ordered[count][0] == value:
            continue
        admitted = [served for _, served in ordered[:count]]
        false = sum(served.worst > FALSE for served in admitted)
        if false <= budget * count:
            chosen = len(rows)
        means = {name: fmean(values) for name, values in zip(ServedDivergence._fields, zip(*admitted, strict=True), strict=True)}
        counts = {"admitted": count, "pairs": len(ordered), "false": false}
        rows.append({"value": value, **counts, **means, "worst": max(served.worst for served in admitted), "chosen": False})
    result = CLOSED
    if chosen is not None:
        rows[chosen]["chosen"] = True
        # Rounding may bring the cosine of a prompt with itself above 1.
        result = min(1.0, rows[chosen]["value"], default if chosen == len(rows) - 1 else math.inf)
    step = max(1, math.ceil(len(rows) / _MOST_ROWS))
    return result, [row for index, row in enumerate(rows) if index % step == 0 or index == len(rows) - 1 or row["chosen"]]


@torch.no_grad()
def measure_pair(
    library: WarmStartLibrary,
    source: Prompt,
    target: Prompt,
    gate: WarmStartGate,
    *,
    guard: int = 8,
    tail: int = 16,
    following: int = 16,
) -> MeasuredPair:
    """Serve one prompt from another; `refused` is from the gate's checks other than similarity."""
    model: Any = library.model
    before, after = (token_ids(prompt, model, library.tokenizer) for prompt in (source, target))
    (key,) = library.add([before])
    assert key is not None
    try:
        neighbours = library.near(as_ids(after), k=1)
        if not neighbours:
            raise ConfigError("library_options: the encoder finds no neighbour in a library of one prompt. Use another encoder.")
        similarity = neighbours[0].similarity
        assert similarity is not None
        blocks = reusable_blocks(as_ids(before), as_ids(after), guard=guard, tail=tail)
        chosen, expected = _greedy(model, after, following)

        def divergence_of(strategy: Strategy) -> ServedDivergence | None:
            # A prefix with a share of `reusable` is served before a summary, so no prefix may reach it.
            gate = replace(_OPEN, reusable=CLOSED) if strategy == "slots" else _OPEN
            cache = WarmStartCache(model, library, strategy=strategy, gate=gate, guard=guard, tail=tail)
            # One more token, because the last one is not fed.
            logits = next_tokens(model, after, [*chosen, 0], cache)
            if cache.report().strategy != strategy:
                return None
            first, *rest = divergence(expected, logits).tolist()
            right = (expected.argmax(-1) == logits.argmax(-1))[1:].float().tolist()
            return ServedDivergence(first, fmean(rest), fmean(right)) if rest else ServedDivergence(first)

        end = max(1, tail)
        has_summary = library.slots and (before[-end:] == after[-end:] or not gate.lexical)
        verdict = gate.decide(lengths=(len(before), len(after)), changes=changes(library.text(before), library.text(after)))
        return MeasuredPair(
            similarity=similarity,
            reusable=sum(block.length for block in blocks) / len(after),
            refused=verdict.check,
            slots=divergence_of("slots") if has_summary else None,
            align=divergence_of("align") if library.full and blocks else None,
        )
    finally:
        library.delete(key)


def _greedy(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Return the greedy continuation of a prompt without a warm start, and the logits behind the prompt and each of its tokens."""
    cache, fed, chosen, logits = DynamicCache(config=model.config), list(prompt), list[int](), list[torch.Tensor]()
    for _ in range(count + 1):
        ids = torch.tensor([fed], device=compat.input_device(model))
        logits.append(model(input_ids=ids, **compat.cache_kwargs(model, cache), logits_to_keep=1).logits[0, -1])
        fed = [int(logits[-1].argmax())]
        chosen += fed
    return chosen[:count], torch.stack(logits)
