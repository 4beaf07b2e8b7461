"""Find the settings of `SegmentPolicy` that save most for a model and its prompts.

Prompts run with a store one after another. The last tokens of each are withheld from the prompt: the divergence of their distributions from
those without reuse is the cost of a setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.errors import ConfigError, is_number, whole_number
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.evaluate.runner import next_tokens
from hf_kvcaches.evaluate.texts import require_whole
from hf_kvcaches.reuse.index import COMPUTED, EXACT
from hf_kvcaches.reuse.layout import Quantization, check_quantization, label_of
from hf_kvcaches.reuse.policy import SegmentPolicy
from hf_kvcaches.segments.cache import SegmentReuseCache
from hf_kvcaches.segments.store import SegmentStore

Tokens = Sequence[int]

SETTINGS = ("similarity", "repair", "repair_depth", "guard")
CLOSED = 1.01  # a similarity that no surroundings have
_SIMILARITIES = (0.0, 0.3, 0.5, 0.8)
_REPAIRS, _REPAIR_DEPTHS, _GUARDS = (0.05, 0.3, 0.0), (0.5, 0.75), (16, 64)
_CHANCE = 0.05  # smaller differences of the divergence, as a share of the bound, are chance
_SLACK = 0.05  # the share of operations that is given up for less divergence, or for stricter thresholds


class Answered(NamedTuple):
    """A prompt with reuse, compared with the same prompt without."""

    kl: float  # the mean divergence of the next tokens' distributions, in nats
    same: float  # the share of the next tokens whose most likely token is the same
    saved: float  # the share of the prefill's operations that was saved
    approximate: int  # how many tokens were reused behind another text


def measured(policy: SegmentPolicy, quantization: Quantization, answers: Sequence[Answered]) -> dict[str, Any]:
    """Return a row of `SegmentPolicy.measured`; `kl`, `kl_max` and `same` are of prompts that reused tokens behind another text."""
    approximated = [answer for answer in answers if answer.approximate] or [Answered(0.0, 1.0, 0.0, 0)]
    return {
        "quantization": label_of(quantization),
        **{name: getattr(policy, name) for name in SETTINGS},
        "saved": fmean(answer.saved for answer in answers),
        "kl": fmean(answer.kl for answer in approximated),
        "kl_max": max(answer.kl for answer in approximated),
        "same": fmean(answer.same for answer in approximated),
        "reused": sum(answer.approximate for answer in answers),
    }


def best_row(rows: Sequence[dict[str, Any]], bound: float, worst: float = math.inf, same: float = 0.0) -> dict[str, Any]:
    """Choose among settings that keep the bounds and save about most: the least divergence, at about equal ones the strictest."""

    def looseness(row: dict[str, Any]) -> tuple[float, ...]:
        kl = round(row["kl"] / bound / _CHANCE) if bound else 0
        guard = math.inf if row["guard"] is None else row["guard"]
        return (kl, -row["similarity"], -guard, -row["repair"], -row["repair_depth"], -row["saved"])

    bounded = [row for row in rows if row["kl"] <= bound and row["kl_max"] <= worst and row["same"] >= same]
    most = max(row["saved"] for row in bounded)
    return min((row for row in bounded if row["saved"] >= most - _SLACK), key=looseness)


def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Tokens],
    *,
    bound: float = 0.05,
    worst: float = math.inf,
    least_same: float = 0.0,
    asked: int = 16,
    quantization: Quantization = None,
    progress: bool = True,
) -> SegmentPolicy:
    """Return the policy that saves most with a mean KL divergence of at most `bound` on the next tokens.

    One setting is swept after another, each measured by runs of all prompts: the similarity of surroundings, the share of repaired tokens,
    the layers that repair them, the guard. Of the settings that keep the bounds and save about as much as the best, the one with
    the least divergence is chosen, at about equal divergence the strictest one. The policy is as good as the prompts: without drift in
    them, the bound says nothing about prompts with drift.

    Args:
        tokenizer: The model's tokenizer, or None; the cache must be used with the same one.
        prompts: Token ids of prompts in their order.
        bound: The bound in nats, on the mean over the prompts that reused tokens behind another text.
        worst: The bound on each of these prompts.
        least_same: The least share of the next tokens, in the same prompts, whose most likely token is that of the model alone.
        asked: How many tokens at the end of each prompt are withheld and compared.
        quantization: That of the `SegmentStore` that the policy is for: "int8", "int4", a `KVCodec`, or None.
    """
    for name, number, most in (("bound", bound, math.inf), ("least_same", least_same, 1)):
        if not is_number(number) or not 0 <= number <= most or number == math.inf:
            raise ConfigError.of(name, "a number of at least 0" + (", up to 1" if most == 1 else ""), number)
    require_whole(model)
    asked, quantization = whole_number("asked", asked, 1), check_quantization(quantization)
    if isinstance(prompts, Mapping) or len(prompts) < 2:
        raise ConfigError.of("prompts", "at least two rows of token ids", f"{type(prompts).__name__} of {len(prompts)}")
    rows_of_ids = [[int(token) for token in ids] for ids in prompts]
    if (shortest := min(map(len, rows_of_ids))) < asked + 2:
        raise ConfigError.of("prompts", f"at least {asked + 2} tokens in each", shortest, "Or ask for fewer tokens.")
    with closing(SegmentStore("memory", quantization=quantization)) as store:
        SegmentReuseCache(model, store, tokenizer, mode="approximate")  # refuses models whose keys can't be moved, and another's codec
    with tqdm(desc="Calibrating", unit=" prompts", disable=not progress) as bar:
        expected = [_next(model, ids, asked) for ids in rows_of_ids]
        choose = partial(best_row, bound=bound, worst=worst, same=least_same)
        sweep = _Sweep(model, tokenizer, rows_of_ids, expected, choose, quantization, bar)
        best = sweep.best()
    rows = tuple(row | {"chosen": row is best} for row in sweep.rows)
    settings = {name: best[name] for name in SETTINGS}
    return SegmentPolicy(**settings, bound=float(bound), measured=rows, fingerprint=ModelFingerprint.of(model, tokenizer))


@dataclass
class _Sweep:
    """The settings that were measured so far, and the inputs to measure one more."""

    model: PreTrainedModel
    tokenizer: Any
    prompts: list[list[int]]
    expected: list[torch.Tensor]
    choose: Callable[[list[dict[str, Any]]], dict[str, Any]]
    quantization: Quantization
    bar: tqdm[Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def best(self) -> dict[str, Any]:
        """Measure one kind of setting after the other, and return the best."""
        for similarity in (CLOSED, *_SIMILARITIES):
            self.measure(SegmentPolicy(similarity=similarity))
        # More repair may make more surroundings good enough.
        for name, values in (("repair", _REPAIRS), ("repair_depth", _REPAIR_DEPTHS), ("guard", _GUARDS), ("similarity", _SIMILARITIES)):
            for value in values:
                best = self.choose(self.rows)
                self.measure(SegmentPolicy(**{setting: best[setting] for setting in SETTINGS} | {name: value}))
        return self.choose(self.rows)

    def measure(self, policy: SegmentPolicy) -> None:
        """Run all prompts with a policy and a new store, unless it was measured before."""
        if any(all(row[name] == getattr(policy, name) for name in SETTINGS) for row in self.rows):
            return
        answers = list[Answered]()
        with closing(SegmentStore("memory", quantization=self.quantization)) as store:
            for ids, expected in zip(self.prompts, self.expected, strict=True):
                cache = SegmentReuseCache(self.model, store, self.tokenizer, mode="auto", policy=policy)
                logits, report = _next(self.model, ids, len(expected), cache), cache.report()
                store.flush()
                self.bar.update()
                kl, same = divergence(expected, logits).mean(), (expected.argmax(-1) == logits.argmax(-1)).float().mean()
                approximate = sum(tokens for rule, tokens in (report.tiers or {}).items() if rule not in (EXACT, COMPUTED))
                answers.append(Answered(float(kl), float(same), report.flops_saved, approximate))
        self.rows.append(measured(policy, self.quantization, answers))


def _next(model: PreTrainedModel, ids: list[int], asked: int, cache: SegmentReuseCache | None = None) -> torch.Tensor:
    return next_tokens(model, ids[:-asked], ids[-asked:], cache).cpu()
