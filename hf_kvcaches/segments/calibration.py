"""Find the settings of `SegmentPolicy` that save most for a model and its prompts.

Prompts run with a store one after another. The last tokens of each are withheld from the prompt: the divergence of their distributions from
those without reuse is the cost of a setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
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
Series = Mapping[str, Sequence[Tokens]]

SETTINGS = ("similarity", "repair", "repair_depth", "guard")
# A similarity that no surroundings have.
CLOSED = 1.01
_SIMILARITIES = (0.0, 0.3, 0.5, 0.8)
_REPAIRS, _REPAIR_DEPTHS, _GUARDS = (0.05, 0.3, 0.0), (0.5, 0.75), (16, 64)
_QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4", None)
# Smaller differences of the divergence, as a share of the bound, are chance.
_CHANCE = 0.05


class Answered(NamedTuple):
    """A prompt with reuse, compared with the same prompt without.

    Args:
        kl: The mean divergence of the next tokens' distributions, in nats.
        same: The share of the next tokens whose most likely token is the same.
        saved: The share of the prefill's operations that was saved.
        approximate: How many tokens were reused behind another text.
    """

    kl: float
    same: float
    saved: float
    approximate: int


def measured(policy: SegmentPolicy, quantization: Quantization, series: Sequence[Sequence[Answered]]) -> dict[str, Any]:
    """Return a row of `SegmentPolicy.measured`, with the worst of all series; `saved` is the mean of their means.

    Divergences (`kl`, `kl_max`) and `same` are of prompts that reused tokens behind another text.
    """
    approximated = [some for answers in series if (some := [answer for answer in answers if answer.approximate])]
    return {
        "quantization": label_of(quantization),
        **{name: getattr(policy, name) for name in SETTINGS},
        "saved": fmean(fmean(answer.saved for answer in answers) for answers in series),
        "kl": max((fmean(answer.kl for answer in answers) for answers in approximated), default=0.0),
        "kl_max": max((answer.kl for answers in approximated for answer in answers), default=0.0),
        "same": min((fmean(answer.same for answer in answers) for answers in approximated), default=1.0),
        "reused": sum(answer.approximate for answers in series for answer in answers),
    }


@dataclass(frozen=True)
class Bounds:
    """The bounds that a setting must keep; see `calibrate`."""

    kl: float
    worst: float = math.inf
    same: float = 0.0
    slack: float = 0.05

    def best(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Choose among settings that keep the bounds and save about most: the least divergence, at about equal ones the strictest."""
        bounded = [row for row in rows if row["kl"] <= self.kl and row["kl_max"] <= self.worst and row["same"] >= self.same]
        most = max(row["saved"] for row in bounded)
        return min((row for row in bounded if row["saved"] >= most - self.slack), key=self._looseness)

    def _looseness(self, row: dict[str, Any]) -> tuple[float, ...]:
        kl = round(row["kl"] / self.kl / _CHANCE) if self.kl else 0
        guard = math.inf if row["guard"] is None else row["guard"]
        return (kl, -row["similarity"], -guard, -row["repair"], -row["repair_depth"], -row["saved"])


def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Tokens] | Series,
    *,
    bound: float = 0.05,
    worst: float = math.inf,
    least_same: float = 0.0,
    slack: float = 0.05,
    asked: int = 16,
    quantization: Quantization = None,
    progress: bool = True,
) -> SegmentPolicy:
    """Return the policy that saves most with a mean KL divergence of at most `bound` on the next tokens.

    One setting is swept after another, each measured by runs of all prompts: the similarity of surroundings, the share of repaired tokens,
    the layers that repair them, the guard. Of the settings that keep the bounds and save as much as the best within `slack`, the one with
    the least divergence is chosen, at about equal divergence the strictest one. The policy is as good as the prompts: without drift in
    them, the bound says nothing about prompts with drift.

    Args:
        tokenizer: The model's tokenizer, or None; the cache must be used with the same one.
        prompts: Token ids of prompts in their order; or several such lists by name, each with a store of its own. The bounds hold in each.
        bound: The bound in nats, on the mean over the prompts that reused tokens behind another text.
        worst: The bound on each of these prompts.
        least_same: The least share of the next tokens, in the same prompts, whose most likely token is that of the model alone.
        slack: The share of operations that may be given up for less divergence, or for stricter thresholds.
        asked: How many tokens at the end of each prompt are withheld and compared.
        quantization: That of the `SegmentStore` that the policy is for: "int8", "int4", a `KVCodec`, or None. The others, except codecs,
            are measured with the chosen policy, too.
    """
    for name, number, most in (("bound", bound, math.inf), ("slack", slack, math.inf), ("least_same", least_same, 1)):
        if not is_number(number) or not 0 <= number <= most or number == math.inf:
            raise ConfigError.of(name, "a number of at least 0" + (", up to 1" if most == 1 else ""), number)
    require_whole(model)
    series = _series(prompts, asked)
    quantization = check_quantization(quantization)
    with closing(SegmentStore("memory", quantization=quantization)) as store:
        SegmentReuseCache(model, store, tokenizer, mode="approximate")  # refuses models whose keys can't be moved, and another's codec
    with tqdm(desc="Calibrating", unit=" prompts", disable=not progress) as bar:
        sweep = _Sweep(model, tokenizer, series, asked, Bounds(bound, worst, least_same, slack), quantization, bar)
        best = sweep.best()
        policy = SegmentPolicy(**{name: best[name] for name in SETTINGS}, bound=float(bound))
        others = [sweep.replay(policy, other) for other in _QUANTIZATIONS if other != quantization]
    rows = tuple(row | {"chosen": row is best} for row in (*sweep.rows, *others))
    return replace(policy, measured=rows, fingerprint=ModelFingerprint.of(model, tokenizer))


def _series(prompts: Sequence[Tokens] | Series, asked: int) -> list[list[list[int]]]:
    asked = whole_number("asked", asked, 1)
    named = dict(prompts) if isinstance(prompts, Mapping) else {"prompts": prompts}
    series = [[[int(token) for token in ids] for ids in texts] for texts in named.values()]
    if not series or any(len(texts) < 2 for texts in series):
        raise ConfigError.of("prompts", "at least two in each series", {name: len(texts) for name, texts in named.items()})
    if (shortest := min(len(ids) for texts in series for ids in texts)) < asked + 2:
        raise ConfigError.of("prompts", f"at least {asked + 2} tokens in each", shortest, "Or ask for fewer tokens.")
    return series


@dataclass
class _Sweep:
    """The settings that were measured so far, and the inputs to measure one more."""

    model: PreTrainedModel
    tokenizer: Any
    series: list[list[list[int]]]
    asked: int
    bounds: Bounds
    quantization: Quantization
    bar: tqdm[Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    expected: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def best(self) -> dict[str, Any]:
        """Measure one kind of setting after the other, and return the best."""
        for similarity in (CLOSED, *_SIMILARITIES):
            self.measure(SegmentPolicy(similarity=similarity))
        # More repair may make more surroundings good enough.
        for name, values in (("repair", _REPAIRS), ("repair_depth", _REPAIR_DEPTHS), ("guard", _GUARDS), ("similarity", _SIMILARITIES)):
            for value in values:
                best = self.bounds.best(self.rows)
                self.measure(SegmentPolicy(**{setting: best[setting] for setting in SETTINGS} | {name: value}))
        return self.bounds.best(self.rows)

    def measure(self, policy: SegmentPolicy) -> None:
        """Run all prompts with a policy, unless it was measured before."""
        if all(any(row[name] != getattr(policy, name) for name in SETTINGS) for row in self.rows):
            self.rows.append(self.replay(policy, self.quantization))

    def replay(self, policy: SegmentPolicy, quantization: Quantization) -> dict[str, Any]:
        """Run all prompts, each series with a store of its own."""
        series = []
        for texts in self.series:
            with closing(SegmentStore("memory", quantization=quantization)) as store:
                series.append([self._answered(ids, policy, store) for ids in texts])
        return measured(policy, quantization, series)

    def _answered(self, ids: list[int], policy: SegmentPolicy, store: SegmentStore) -> Answered:
        prompt, asked = ids[: -self.asked], ids[-self.asked :]
        if (expected := self.expected.get(tuple(ids))) is None:
            expected = self.expected[tuple(ids)] = next_tokens(self.model, prompt, asked).cpu()
        cache = SegmentReuseCache(self.model, store, self.tokenizer, mode="auto", policy=policy)
        logits, report = next_tokens(self.model, prompt, asked, cache).cpu(), cache.report()
        store.flush()
        self.bar.update()
        return Answered(
            kl=float(divergence(expected, logits).mean()),
            same=float((expected.argmax(-1) == logits.argmax(-1)).float().mean()),
            saved=report.flops_saved,
            approximate=sum(tokens for rule, tokens in (report.tiers or {}).items() if rule not in (EXACT, COMPUTED)),
        )
