"""What a `WarmStartGate` should ask for, with a model and pairs of prompts as they come.

Each pair is served in both ways that are approximate, from a summary and from stretches, whatever a gate would say, and compared with the
model alone. A false hit is a pair that a gate lets through although its next token's distribution is another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.core.calibrating import divergence
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.splicing.tokens import as_ids
from hf_kvcaches.errors import ConfigError, is_number
from hf_kvcaches.warmstart.cache import Strategy, WarmStartCache
from hf_kvcaches.warmstart.changes import changes
from hf_kvcaches.warmstart.gate import WarmStartGate
from hf_kvcaches.warmstart.library import WarmStartLibrary
from hf_kvcaches.warmstart.planning import reusable_blocks
from hf_kvcaches.warmstart.prompts import Prompt, token_ids

# The paper's limit, in nats.
FALSE = 0.05
# Refuses everything.
CLOSED = 1.01
# Lets everything through. A common beginning is taken before a summary where it has the share that stretches must have.
_OPEN = WarmStartGate(tau=-1.0, lengths=(0.0, math.inf), reusable=0.0, content=None, lexical=False)
_OPEN_FOR: dict[Strategy, WarmStartGate] = {"slots": replace(_OPEN, reusable=CLOSED), "align": _OPEN}
_FORBIDDEN = ("location", "max_bytes")


@dataclass(frozen=True)
class MeasuredPair:
    """One pair.

    Args:
        ratio: Tokens of the source, as a multiple of those of the target.
        reusable: Share of the target's tokens that stretches of the source can stand for.
        refused: The gate's check that refuses a summary whatever its similarity, or "".
        slots: Divergence of the next token when served from a summary; None where none can be (the library has none, or the two don't end
            alike).
    """

    similarity: float
    ratio: float
    reusable: float
    refused: str
    slots: float | None
    align: float | None


def calibrate_gate(
    model: PreTrainedModel,
    tokenizer: Any,
    library_options: Mapping[str, Any] | None,
    pairs: Iterable[tuple[Prompt, Prompt]],
    *,
    budget: float = 0.01,
    gate: WarmStartGate | None = None,
    guard: int = 8,
    tail: int = 16,
    progress: bool = True,
) -> WarmStartGate:
    """A gate as permissive as a budget of false hits allows.

    `tau` is the lowest similarity, among pairs that pass the gate's other checks, at which the share of false hits (a divergence above
    0.05) in what is served from summaries keeps the budget; `reusable` is the lowest share at which what is served from stretches does.
    Where nothing keeps it, the limit refuses everything. Where all that was seen keeps it, the given gate's limit stands if it is lower
    still; else no limit is below what was seen.

    It is the next token that is compared, so pairs should end with what makes a difference, and should hold such as must be refused. A
    budget of 1% shows nothing in fewer than a hundred pairs that are let through: with none false among n, 3 / n may be.

    Args:
        library_options: Of the `WarmStartLibrary` that the gate is for: `slots`, `encoder`, `layout`, `tail`, `full`, `adapters`.
        pairs: (earlier prompt, new prompt), as texts or token ids.
        budget: The largest share of false hits in what is let through.
        gate: Where the other limits come from; None for the defaults. Limits that nothing was measured for stay.
    """
    if not is_number(budget) or not 0 <= budget < 1:
        raise ConfigError.of("budget", "a share of at least 0, below 1", budget)
    options = dict(library_options or {})
    for name in _FORBIDDEN:
        if name in options:
            raise ConfigError(f"library_options: {name} is none of the gate's business. Leave it out.")
    base = gate or WarmStartGate()
    given = list(pairs)
    if not given:
        raise ConfigError.of("pairs", "at least one pair of prompts", given)
    with closing(WarmStartLibrary(model, tokenizer, **options)) as library:
        bar = tqdm(given, unit=" pairs", disable=not progress)
        found = [measure_pair(library, source, target, base, guard=guard, tail=tail) for source, target in bar]
        encoder = library.encoder.name
    return _chosen(model, tokenizer, replace(base, encoder=encoder), found, budget)


def _chosen(model: Any, tokenizer: Any, base: WarmStartGate, found: Sequence[MeasuredPair], budget: float) -> WarmStartGate:
    summaries = [(each.similarity, each.slots) for each in found if each.slots is not None and not each.refused]
    stretches = [(each.reusable, each.align) for each in found if each.align is not None]
    tau, for_slots = limit(summaries, budget, base.tau)
    reusable, for_align = limit(stretches, budget, base.reusable)
    if not any(each.slots is not None for each in found):
        tau = base.tau
    if not stretches:
        reusable = base.reusable
    rows = [{"limit": "tau", **row} for row in for_slots] + [{"limit": "reusable", **row} for row in for_align]
    gate = replace(base, tau=tau, reusable=reusable, measured=tuple(rows))
    object.__setattr__(gate, "fingerprint", ModelFingerprint.of(compat.base_model(model), tokenizer, any_precision=True))
    return gate


def limit(seen: Sequence[tuple[float, float]], budget: float, given: float) -> tuple[float, list[dict[str, Any]]]:
    """The lowest limit at which the share of false hits keeps a budget, and a row for each that was tried.

    Args:
        seen: (what the limit is for, divergence) of each pair.
        given: The limit that stands if it is lower than all that was seen, and all that was seen keeps the budget.
    """
    rows: list[dict[str, Any]] = []
    chosen = -1
    ordered = sorted(seen, reverse=True)
    for number, (value, _) in enumerate(ordered):
        if number + 1 < len(ordered) and ordered[number + 1][0] == value:
            continue
        kls = [kl for _, kl in ordered[: number + 1]]
        false = sum(kl > FALSE for kl in kls)
        if false <= budget * len(kls):
            chosen = len(rows)
        counts = {"admitted": len(kls), "pairs": len(ordered), "false": false}
        rows.append({"value": value, **counts, "kl": sum(kls) / len(kls), "kl_max": max(kls), "chosen": False})
    if chosen < 0:
        return CLOSED, _thinned(rows)
    rows[chosen]["chosen"] = True
    # Rounding may bring the cosine of a prompt with itself above 1.
    value = min(1.0, rows[chosen]["value"])
    return min(value, given) if chosen == len(rows) - 1 else value, _thinned(rows)


def _thinned(rows: list[dict[str, Any]], most: int = 40) -> list[dict[str, Any]]:
    """Of thousands of values most are of no interest."""
    step = max(1, math.ceil(len(rows) / most))
    return [row for number, row in enumerate(rows) if number % step == 0 or number == len(rows) - 1 or row["chosen"]]


@torch.no_grad()
def measure_pair(
    library: WarmStartLibrary, source: Prompt, target: Prompt, gate: WarmStartGate, *, guard: int = 8, tail: int = 16
) -> MeasuredPair:
    """Serves one prompt from another.

    Args:
        gate: Its checks but for the similarity say what is refused.
    """
    before, after = (token_ids(prompt, library.model, library.tokenizer) for prompt in (source, target))
    (key,) = library.add([before])
    assert key is not None
    try:
        ids = as_ids(after)
        neighbours = library.near(ids, k=1)
        if not neighbours:
            raise ConfigError("library_options: the encoder finds no neighbour in a library of one prompt. Use another encoder.")
        similarity = neighbours[0].similarity
        assert similarity is not None
        blocks = reusable_blocks(as_ids(before), ids, guard=guard, tail=tail)
        expected = library.model(
            input_ids=torch.tensor([after], device=compat.input_device(library.model)), use_cache=False, logits_to_keep=1
        ).logits

        def served(strategy: Strategy) -> float | None:
            cache = WarmStartCache(library.model, library, strategy=strategy, gate=_OPEN_FOR[strategy], guard=guard, tail=tail)
            return _served(cache, strategy, after, expected)

        end = max(1, tail)
        summed_up = library.slots and (before[-end:] == after[-end:] or not gate.lexical)
        verdict = gate.decide(lengths=(len(before), len(after)), changes=changes(library.text(before), library.text(after)))
        return MeasuredPair(
            similarity=similarity,
            ratio=len(before) / len(after),
            reusable=sum(block.length for block in blocks) / len(after),
            refused=verdict.check,
            slots=served("slots") if summed_up else None,
            align=served("align") if library.full is not None and blocks else None,
        )
    finally:
        library.delete(key)


def _served(cache: WarmStartCache, strategy: Strategy, ids: list[int], expected: torch.Tensor) -> float | None:
    """The divergence, or None where it was served in another way."""
    model: Callable[..., Any] = cache.model
    prompt = torch.tensor([ids], device=compat.input_device(cache.model))
    logits = model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return float(divergence(expected[0, -1], logits[0, -1])) if cache.report().strategy == strategy else None
