"""Which settings of `SegmentPolicy` save most for a model and its prompts.

Prompts go through a store one after another, as they came. The last tokens of each are withheld and asked for: how much their
distributions differ from those without reuse is what a setting costs.
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

from hf_kvcaches.core.calibrating import divergence, next_tokens
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.splicing.packing import Quantization, check_quantization, label_of
from hf_kvcaches.errors import ConfigError, is_number, whole_number
from hf_kvcaches.segments.cache import SegmentReuseCache
from hf_kvcaches.segments.policy import SegmentPolicy
from hf_kvcaches.segments.store import SegmentStore

Tokens = Sequence[int]
Series = Mapping[str, Sequence[Tokens]]

# A threshold that no score reaches, and one that every score reaches.
CLOSED, OPEN = 1.01, -1.0
# Shares of the probes that the thresholds to try reject.
_REJECTED = (0.0, 0.1, 0.3)
_REPAIRS = (0.0, 0.05, 0.3)
_SIMILARITIES = (0.3, 0.5, 0.8)
# Equal tokens to the left: for all layers, and for a share of the lowest ones.
_WINDOWS, _PARTIAL_WINDOWS = (16, 64), (0, 16, 64, 256)
_SHARES = (0.25, 0.5, 0.75)
_QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4", None)
# Differences of the divergence below this share of the bound are chance.
_CHANCE = 0.05
_APPROXIMATE = ("guarded", "repaired", "probed")


class Answered(NamedTuple):
    """One prompt with reuse, against the same without.

    Args:
        kl: The mean divergence of the next tokens' distributions, in nats.
        same: The share of the next tokens whose most likely token is the same.
        saved: The share of the prefill's operations that was saved, less what probes took.
        approximate: Tokens that were taken from behind another text.
        scores: (score, tokens) of each probe.
    """

    kl: float
    same: float
    saved: float
    approximate: int
    scores: tuple[tuple[float, int], ...] = ()


class Measured(NamedTuple):
    """A policy with a kind of store, and what became of each prompt of each series."""

    policy: SegmentPolicy
    quantization: Quantization
    series: dict[str, list[Answered]]

    @property
    def approximated(self) -> list[list[Answered]]:
        """Of each series the prompts in which something stood behind another text, if there are any."""
        series = ([answer for answer in answers if answer.approximate] for answers in self.series.values())
        return [answers for answers in series if answers]

    @property
    def kl(self) -> float:
        """Of the worst series: the mean over those prompts in which something stood behind another text."""
        return max((fmean(answer.kl for answer in answers) for answers in self.approximated), default=0.0)

    @property
    def same(self) -> float:
        """Of the worst series: the share of next tokens that are the model's own, over the same prompts."""
        return min((fmean(answer.same for answer in answers) for answers in self.approximated), default=1.0)

    @property
    def saved(self) -> float:
        """The mean over the series, so that a long one counts no more."""
        return fmean(fmean(answer.saved for answer in answers) for answers in self.series.values())

    def thresholds(self) -> list[float]:
        """Ascending thresholds, of which the first rejects none of the probes."""
        scores = sorted(score for answers in self.series.values() for answer in answers for score, _ in answer.scores)
        return sorted({math.floor(1e4 * scores[int(share * len(scores))]) / 1e4 for share in _REJECTED}) if scores else []

    def row(self, chosen: bool) -> dict[str, Any]:
        """Plain values, for `SegmentPolicy.measured`."""
        names = ("check_layer", "probe", "similarity", "repair", "repair_by")
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
    """What a setting must keep; see `calibrate`."""

    kl: float
    same: float = 0.0
    slack: float = 0.05

    def kept(self, measured: Measured) -> bool:
        """Whether the setting may be used."""
        return measured.kl <= self.kl and measured.same >= self.same

    def best(self, done: Sequence[Measured]) -> Measured:
        """Of all that keep the bounds and save about most: the least divergence, and where that is about the same the strictest."""
        # Probes that admit everything are no guard against what these prompts lack.
        bounded = [measured for measured in done if self.kept(measured) and measured.policy.probe > OPEN]
        most = max(measured.saved for measured in bounded)
        return min((measured for measured in bounded if measured.saved >= most - self.slack), key=self._looseness)

    def _looseness(self, measured: Measured) -> tuple[float, ...]:
        policy = measured.policy
        window = policy.window(1, 1)
        kl = round(measured.kl / self.kl / _CHANCE) if self.kl else 0
        # A later layer has seen more of what differs to the left.
        strictness = (policy.probe > 1, policy.check_layer, policy.probe, policy.similarity, window or float("inf"), policy.repair)
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
    """A policy that saves most with a mean KL divergence of at most `bound` on the next tokens.

    One setting is swept after another, each measured by runs of all prompts: with `cuts` the guards of the lower layers, then the
    similarity of surroundings, the layer and threshold of probes, the share to repair and by what, the guard of all layers. Of those
    that keep the bound and save as much as the best of them within `slack`, the one with the least divergence is taken, and where that
    makes no difference the strictest. The policy is as good as the prompts: where nothing drifts in them, its bound says nothing of
    prompts where something does.

    Args:
        tokenizer: Its tokenizer, or None; use the cache with the same.
        prompts: Token ids in the order in which they come; or several such lists by name, each with a store of its own. The bounds
            hold in each.
        bound: In nats, for the mean over the prompts in which something was taken from behind another text.
        least_same: The least share of the next tokens, in the same prompts, whose most likely token is the one of the model alone.
        slack: The share of operations that may be given up for less divergence, or for stricter thresholds.
        asked: How many tokens at the end of each prompt are withheld, and compared.
        quantization: As for the `SegmentStore` that the policy is for: "int8", "int4", a `KVCodec`, or None. A policy is for one of them,
            because probes compare stored keys with exact ones. The others, but for codecs, are measured with the chosen policy, too.
        cuts: As for the `SegmentStore`. Without cuts lower layers can't be reused alone, and their guards stay the paper's.
        check_layers: The layers to try for probes; None: 1, 2 and the middle one.
    """
    for name, number, most in (("bound", bound, float("inf")), ("slack", slack, float("inf")), ("least_same", least_same, 1)):
        if not is_number(number) or not 0 <= number <= most or number == float("inf"):
            raise ConfigError.of(name, "a number of at least 0" + (", up to 1" if most == 1 else ""), number)
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
    object.__setattr__(policy, "fingerprint", ModelFingerprint.of(model, tokenizer, any_precision=True))
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
    """The settings that have been measured so far, and what is needed to measure one more."""

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
        """Measures everything, one kind of setting after the other."""
        closed = SegmentPolicy(similarity=CLOSED, probe=CLOSED)
        closed = replace(closed, guard=self._guards(replace(closed, guard=()))) if self.cuts else closed
        for similarity in (CLOSED, *_SIMILARITIES):
            self.measure(replace(closed, similarity=similarity))
        alike = self._best()
        for depth in depths:
            for probe in self.measure(replace(alike, check_layer=depth, probe=OPEN)).thresholds():
                self.measure(replace(alike, check_layer=depth, probe=probe))
        changes: list[dict[str, Any]] = [{"repair": repair} for repair in _REPAIRS]
        # Where probes admit what is good, surroundings may not have to.
        changes += [{"similarity": similarity} for similarity in (*_SIMILARITIES, CLOSED)]
        changes += [{"repair": 0.15, "repair_by": "deviation"}]
        changes += [{"guard": (*(pair for pair in closed.guard if pair[1] <= window), (1.0, window))} for window in _WINDOWS]
        for change in changes:
            self.measure(replace(self._best(), **change))
        return self.bounds.best(self.done)

    def _best(self) -> SegmentPolicy:
        return self.bounds.best(self.done).policy

    def _guards(self, closed: SegmentPolicy) -> tuple[tuple[float, int], ...]:
        """For each share of the layers the fewest equal tokens to the left with which it keeps the bounds, and saves something."""
        last, windows = self.measure(closed), list(_PARTIAL_WINDOWS)
        for share in _SHARES:
            for tokens in windows:
                measured = self.measure(replace(closed, guard=(*last.policy.guard, (share, tokens))))
                if self.bounds.kept(measured) and measured.saved > last.saved:
                    # More layers need no fewer tokens.
                    last, windows = measured, windows[windows.index(tokens) :]
                    break
        return last.policy.guard

    def measure(self, policy: SegmentPolicy) -> Measured:
        """Runs all prompts, if that has not been done with this policy."""
        measured = next((measured for measured in self.done if measured.policy == policy), None)
        if measured is None:
            measured = self.replay(policy, self.quantization)
            self.done.append(measured)
        return measured

    def replay(self, policy: SegmentPolicy, quantization: Quantization) -> Measured:
        """Runs all prompts, each series with a store of its own."""
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
