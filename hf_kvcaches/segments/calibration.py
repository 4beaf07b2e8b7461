"""Find the settings of `SegmentPolicy` that save most for a model and its prompts.

Prompts run with a store one after another. The last tokens of each are withheld from the prompt: the divergence of their distributions from
those without reuse is the cost of a setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
from hf_kvcaches.reuse.layout import Quantization, check_quantization, label_of
from hf_kvcaches.segments.cache import SegmentReuseCache
from hf_kvcaches.segments.policy import SegmentPolicy
from hf_kvcaches.segments.store import SegmentStore

Tokens = Sequence[int]
Series = Mapping[str, Sequence[Tokens]]

# A threshold above all scores, and one that every score reaches.
CLOSED, OPEN = 1.01, -1.0
# The thresholds to try reject these shares of the probes.
_REJECTED = (0.0, 0.1, 0.3)
_REPAIRS, _REPAIR_DEPTHS = (0.0, 0.05, 0.3), (0.5, 0.75)
_SIMILARITIES = (0.3, 0.5, 0.8)
# Numbers of equal tokens to try in guards: for all layers, and for a share of the lowest ones.
_WINDOWS, _PARTIAL_WINDOWS = (16, 64), (0, 16, 64, 256)
_SHARES = (0.25, 0.5, 0.75)
_QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4", None)
# Smaller differences of the divergence, as a share of the bound, are chance.
_CHANCE = 0.05
_APPROXIMATE = ("guarded", "repaired", "probed")


class Answered(NamedTuple):
    """A prompt with reuse, compared with the same prompt without.

    Args:
        kl: The mean divergence of the next tokens' distributions, in nats.
        same: The share of the next tokens whose most likely token is the same.
        saved: The share of the prefill's operations that was saved; operations of probes count against it.
        approximate: How many tokens were reused behind another text.
        scores: (score, tokens) of each probe.
    """

    kl: float
    same: float
    saved: float
    approximate: int
    scores: tuple[tuple[float, int], ...] = ()


class Measured(NamedTuple):
    """A policy and a quantization, with the result of each prompt of each series."""

    policy: SegmentPolicy
    quantization: Quantization
    series: dict[str, list[Answered]]

    @property
    def approximated(self) -> list[list[Answered]]:
        """The prompts of each series that reused tokens behind another text; series without any are left out."""
        series = ([answer for answer in answers if answer.approximate] for answers in self.series.values())
        return [answers for answers in series if answers]

    @property
    def kl(self) -> float:
        """The mean over the `approximated` prompts of the worst series."""
        return max((fmean(answer.kl for answer in answers) for answers in self.approximated), default=0.0)

    @property
    def same(self) -> float:
        """The share of equal next tokens in the `approximated` prompts of the worst series."""
        return min((fmean(answer.same for answer in answers) for answers in self.approximated), default=1.0)

    @property
    def saved(self) -> float:
        """The mean of the series' means, so that long series count no more than short ones."""
        return fmean(fmean(answer.saved for answer in answers) for answers in self.series.values())

    def thresholds(self) -> list[float]:
        """Return the thresholds to try, ascending; the first one rejects no probe."""
        scores = sorted(score for answers in self.series.values() for answer in answers for score, _ in answer.scores)
        return sorted({math.floor(1e4 * scores[int(share * len(scores))]) / 1e4 for share in _REJECTED}) if scores else []

    def row(self, chosen: bool) -> dict[str, Any]:
        """Return plain values for `SegmentPolicy.measured`."""
        names = ("check_layer", "probe", "similarity", "repair", "repair_depth", "repair_by")
        kls = sorted(answer.kl for answers in self.approximated for answer in answers) or [0.0]
        answers = [answer for answers in self.series.values() for answer in answers]
        admitted = sum(answer.approximate for answer in answers)
        rejected = sum(tokens for answer in answers for score, tokens in answer.scores if score < self.policy.probe)
        return {
            "quantization": label_of(self.quantization),
            **{name: getattr(self.policy, name) for name in names},
            "guard": " ".join(f"{share:g}:{tokens}" for share, tokens in self.policy.guard),
            "saved": self.saved,
            "kl": self.kl,
            "kl_p99": kls[min(len(kls) - 1, int(0.99 * len(kls)))],
            "kl_max": kls[-1],
            "same": self.same,
            "accepted": admitted / (admitted + rejected) if admitted + rejected else 0.0,
            "chosen": chosen,
        }


@dataclass(frozen=True)
class Bounds:
    """The bounds that a setting must keep; see `calibrate`."""

    kl: float
    same: float = 0.0
    slack: float = 0.05

    def kept(self, measured: Measured) -> bool:
        """Whether the setting may be used."""
        return measured.kl <= self.kl and measured.same >= self.same

    def best(self, done: Sequence[Measured]) -> Measured:
        """Choose among settings that keep the bounds and save about most: the least divergence, at about equal ones the strictest."""
        # Probes that admit everything do not protect prompts that differ from these.
        bounded = [measured for measured in done if self.kept(measured) and measured.policy.probe > OPEN]
        most = max(measured.saved for measured in bounded)
        return min((measured for measured in bounded if measured.saved >= most - self.slack), key=self._looseness)

    def _looseness(self, measured: Measured) -> tuple[float, ...]:
        policy = measured.policy
        window = policy.window(1, 1)
        kl = round(measured.kl / self.kl / _CHANCE) if self.kl else 0
        # A later layer depends on more of the tokens before.
        probes = (policy.probe > 1, policy.check_layer, policy.probe)
        strictness = (*probes, policy.similarity, window or float("inf"), policy.repair, policy.repair_depth)
        return (kl, *(-number for number in strictness), -measured.saved)


def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Tokens] | Series,
    *,
    bound: float = 0.05,
    least_same: float = 0.0,
    slack: float = 0.05,
    asked: int = 16,
    quantization: Quantization = None,
    cuts: int | None = None,
    check_layers: Sequence[int] | None = None,
    progress: bool = True,
) -> SegmentPolicy:
    """Return the policy that saves most with a mean KL divergence of at most `bound` on the next tokens.

    One setting is swept after another, each measured by runs of all prompts: with `cuts` the guards of the lower layers, then the
    similarity of surroundings, the layer and threshold of probes, the share and choice of repaired tokens, the guard of all layers. Of the
    settings that keep the bound and save as much as the best within `slack`, the one with the least divergence is chosen, at about equal
    divergence the strictest one. The policy is as good as the prompts: without drift in them, the bound says nothing about prompts with
    drift.

    Args:
        tokenizer: The model's tokenizer, or None; the cache must be used with the same one.
        prompts: Token ids of prompts in their order; or several such lists by name, each with a store of its own. The bounds hold in each.
        bound: The bound in nats, on the mean over the prompts that reused tokens behind another text.
        least_same: The least share of the next tokens, in the same prompts, whose most likely token is that of the model alone.
        slack: The share of operations that may be given up for less divergence, or for stricter thresholds.
        asked: How many tokens at the end of each prompt are withheld and compared.
        quantization: That of the `SegmentStore` that the policy is for: "int8", "int4", a `KVCodec`, or None. A policy is for one of them,
            because probes compare stored keys with exact ones. The others, except codecs, are measured with the chosen policy, too.
        cuts: Those of the `SegmentStore`. Without cuts lower layers can't be reused alone, and their guards stay the paper's.
        check_layers: The layers to try for probes; None: 1, 2 and the middle one.
    """
    for name, number, most in (("bound", bound, float("inf")), ("slack", slack, float("inf")), ("least_same", least_same, 1)):
        if not is_number(number) or not 0 <= number <= most or number == float("inf"):
            raise ConfigError.of(name, "a number of at least 0" + (", up to 1" if most == 1 else ""), number)
    require_whole(model)
    series = _series(prompts, asked)
    quantization = check_quantization(quantization)
    with closing(SegmentStore("memory", quantization=quantization, cuts=cuts)) as store:
        # Refuses models whose keys can't be moved, and a codec of another model.
        layers = len(SegmentReuseCache(model, store, tokenizer, mode="approximate").layers)
    depths = sorted({1, 2, layers // 2} if check_layers is None else set(check_layers))
    depths = [depth for depth in depths if 1 <= depth < layers]
    if not depths:
        raise ConfigError.of("check_layers", f"layers from 1 to {layers - 1}", check_layers)
    with tqdm(desc="Calibrating", unit=" prompts", disable=not progress) as bar:
        sweep = _Sweep(model, tokenizer, series, asked, Bounds(bound, least_same, slack), quantization, cuts, bar)
        best = sweep.best_of(depths)
        others = [sweep.replay(best.policy, other) for other in _QUANTIZATIONS if other != quantization]
    rows = tuple(measured.row(measured is best) for measured in (*sweep.done, *others))
    policy = replace(best.policy, bound=float(bound), measured=rows)
    object.__setattr__(policy, "fingerprint", ModelFingerprint.of(model, tokenizer))
    return policy


def _series(prompts: Sequence[Tokens] | Series, asked: int) -> dict[str, list[list[int]]]:
    asked = whole_number("asked", asked, 1)
    named = dict(prompts) if isinstance(prompts, Mapping) else {"prompts": prompts}
    series = {name: [[int(token) for token in ids] for ids in texts] for name, texts in named.items()}
    if not series or any(len(texts) < 2 for texts in series.values()):
        raise ConfigError.of("prompts", "at least two in each series", {name: len(texts) for name, texts in series.items()})
    for texts in series.values():
        for ids in texts:
            if len(ids) < asked + 2:
                raise ConfigError.of("prompts", f"at least {asked + 2} tokens in each", len(ids), "Or ask for fewer tokens.")
    return series


@dataclass
class _Sweep:
    """The settings that were measured so far, and the inputs to measure one more."""

    model: PreTrainedModel
    tokenizer: Any
    series: dict[str, list[list[int]]]
    asked: int
    bounds: Bounds
    quantization: Quantization
    cuts: int | None
    bar: tqdm[Any]
    done: list[Measured] = field(default_factory=list)
    expected: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def best_of(self, depths: Iterable[int]) -> Measured:
        """Measure one kind of setting after the other, and return the best."""
        closed = SegmentPolicy(similarity=CLOSED, probe=CLOSED)
        closed = replace(closed, guard=self._guards(replace(closed, guard=()))) if self.cuts else closed
        for similarity in (CLOSED, *_SIMILARITIES):
            self.measure(replace(closed, similarity=similarity))
        alike = self._best()
        for depth in depths:
            for probe in self.measure(replace(alike, check_layer=depth, probe=OPEN)).thresholds():
                self.measure(replace(alike, check_layer=depth, probe=probe))
        changes: list[dict[str, Any]] = [{"repair": repair} for repair in _REPAIRS]
        changes += [{"repair_depth": share} for share in _REPAIR_DEPTHS]
        # Where probes admit segments, the similarity of surroundings may not be needed.
        changes += [{"similarity": similarity} for similarity in (*_SIMILARITIES, CLOSED)]
        changes += [{"repair": 0.15, "repair_by": "deviation"}]
        changes += [{"guard": (*(pair for pair in closed.guard if pair[1] <= window), (1.0, window))} for window in _WINDOWS]
        for change in changes:
            self.measure(replace(self._best(), **change))
        return self.bounds.best(self.done)

    def _best(self) -> SegmentPolicy:
        return self.bounds.best(self.done).policy

    def _guards(self, closed: SegmentPolicy) -> tuple[tuple[float, int], ...]:
        """Find for each share of the layers the fewest equal tokens with which the guard keeps the bounds and saves something."""
        last, windows = self.measure(closed), list(_PARTIAL_WINDOWS)
        for share in _SHARES:
            for tokens in windows:
                measured = self.measure(replace(closed, guard=(*last.policy.guard, (share, tokens))))
                if self.bounds.kept(measured) and measured.saved > last.saved:
                    # A guard of more layers needs at least as many tokens.
                    last, windows = measured, windows[windows.index(tokens) :]
                    break
        return last.policy.guard

    def measure(self, policy: SegmentPolicy) -> Measured:
        """Run all prompts with a policy, unless it was measured before."""
        measured = next((measured for measured in self.done if measured.policy == policy), None)
        if measured is None:
            measured = self.replay(policy, self.quantization)
            self.done.append(measured)
        return measured

    def replay(self, policy: SegmentPolicy, quantization: Quantization) -> Measured:
        """Run all prompts, each series with a store of its own."""
        return Measured(policy, quantization, {name: self._answers(name, policy, quantization) for name in self.series})

    def _answers(self, name: str, policy: SegmentPolicy, quantization: Quantization) -> list[Answered]:
        answers = []
        with closing(SegmentStore("memory", quantization=quantization, cuts=self.cuts)) as store:
            for number, ids in enumerate(self.series[name]):
                prompt, asked = ids[: -self.asked], ids[-self.asked :]
                if (name, number) not in self.expected:
                    self.expected[name, number] = next_tokens(self.model, prompt, asked).cpu()
                cache = SegmentReuseCache(self.model, store, self.tokenizer, mode="auto", policy=policy)
                logits = next_tokens(self.model, prompt, asked, cache).cpu()
                answers.append(_answered(cache, self.expected[name, number], logits))
                self.bar.update()
        return answers


def _answered(cache: SegmentReuseCache, expected: torch.Tensor, logits: torch.Tensor) -> Answered:
    report = cache.report()
    return Answered(
        kl=float(divergence(expected, logits).mean()),
        same=float((expected.argmax(-1) == logits.argmax(-1)).float().mean()),
        saved=report.flops_saved,
        approximate=sum((report.tiers or {}).get(tier, 0) for tier in _APPROXIMATE),
        scores=tuple((probe.score, probe.stop - probe.start) for probe in cache.probes),
    )
