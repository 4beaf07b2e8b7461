"""Which settings of `SegmentPolicy` save most for a model and its prompts.

Prompts go through a store one after another, as they came. The last tokens of each are withheld and asked for: how much their
distributions differ from those without reuse is what a setting costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
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

# Nothing is let in that stands behind another text, but for what guards allow.
CLOSED = 1.01
_THRESHOLDS = (-1.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_REPAIRS = (0.0, 0.05, 0.15, 0.3)
_SIMILARITIES = (0.3, 0.5, 0.8)
_WINDOWS = (16, 64)
_QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4", None)
# Differences of the divergence below this share of the bound are chance.
_SAME = 0.05
_APPROXIMATE = ("guarded", "repaired", "probed")


class Answered(NamedTuple):
    """One prompt with reuse, against the same without.

    Args:
        kl: The mean divergence of the next tokens' distributions, in nats.
        saved: The share of the prefill's operations that was saved, less what probes took.
        approximate: Tokens that were taken from behind another text.
        lowest: The lowest score of its probes, or None without.
        scores: (score, tokens) of each probe.
    """

    kl: float
    saved: float
    approximate: int
    refused: int
    lowest: float | None
    scores: tuple[tuple[float, int], ...]
    tokens: int


@dataclass(frozen=True)
class Setting:
    """What is tried: a policy, and how the store keeps keys and values."""

    policy: SegmentPolicy
    quantization: Quantization

    def row(self) -> dict[str, Any]:
        """As it stands in a policy's table; `window` is the guard of all layers."""
        policy = self.policy
        return {
            "quantization": label_of(self.quantization),
            "check_layer": policy.check_layer,
            "probe": policy.probe,
            "similarity": policy.similarity,
            "repair": policy.repair,
            "repair_by": policy.repair_by,
            "window": next((tokens for share, tokens in policy.guard if share == 1), None),
        }


class Measured(NamedTuple):
    """A setting, and what became of each prompt of each series."""

    setting: Setting
    series: dict[str, list[Answered]]

    @property
    def kl(self) -> float:
        """Of the worst series: the mean over those prompts in which something stood behind another text."""
        kls = [[answer.kl for answer in answers if answer.approximate] for answers in self.series.values()]
        return max((statistics.fmean(series) for series in kls if series), default=0.0)

    @property
    def saved(self) -> float:
        """The mean over the series, so that a long one counts no more."""
        return statistics.fmean(statistics.fmean(answer.saved for answer in answers) for answers in self.series.values())

    def row(self, chosen: bool) -> dict[str, Any]:
        """Plain values, for `SegmentPolicy.measured`."""
        answers = [answer for series in self.series.values() for answer in series]
        kls = sorted(answer.kl for answer in answers if answer.approximate) or [0.0]
        admitted, refused = sum(answer.approximate for answer in answers), sum(answer.refused for answer in answers)
        return {
            **self.setting.row(),
            "saved": self.saved,
            "kl": self.kl,
            "kl_p99": kls[min(len(kls) - 1, int(0.99 * len(kls)))],
            "kl_max": kls[-1],
            "accepted": admitted / (admitted + refused) if admitted + refused else 0.0,
            "chosen": chosen,
        }


def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Tokens] | Series,
    *,
    bound: float = 0.05,
    slack: float = 0.05,
    asked: int = 16,
    quantization: Quantization = None,
    check_layers: Sequence[int] | None = None,
    progress: bool = True,
) -> SegmentPolicy:
    """A policy that saves most with a mean KL divergence of at most `bound` on the next tokens.

    One setting is swept after another, each measured by runs of all prompts: the similarity of surroundings, the layer and threshold of
    probes, the share to repair and by what, the guard of all layers. Of those that keep the bound and save as much as the best of them
    within `slack`, the one with the least divergence is taken, and where that makes no difference the strictest. The policy is as good
    as the prompts: where nothing drifts in them, its bound says nothing of prompts where something does.

    Args:
        tokenizer: Its tokenizer, or None; use the cache with the same.
        prompts: Token ids in the order in which they come; or several such lists by name, each with a store of its own. The bound
            holds in each.
        bound: In nats, for the mean over the prompts in which something was taken from behind another text.
        slack: The share of operations that may be given up for less divergence, or for stricter thresholds.
        asked: How many tokens at the end of each prompt are withheld, and compared.
        quantization: As for the `SegmentStore` that the policy is for: "int8", "int4", a `KVCodec`, or None. A policy is for one of them,
            because probes compare stored keys with exact ones. The others, but for codecs, are measured with the chosen policy, too.
        check_layers: The layers to try for probes; None: 1, 2 and the middle one.
    """
    for name, number in (("bound", bound), ("slack", slack)):
        if not is_number(number) or not 0 <= number < float("inf"):
            raise ConfigError.of(name, "a number of at least 0", number)
    series = _series(prompts, asked)
    quantization = check_quantization(quantization)
    with closing(SegmentStore("memory", quantization=quantization)) as store:
        # Refuses models whose keys can't be moved, and a codec of another model.
        layers = len(SegmentReuseCache(model, store, tokenizer, mode="approximate").layers)
    depths = sorted({1, 2, layers // 2} if check_layers is None else set(check_layers))
    depths = [depth for depth in depths if 1 <= depth < layers]
    if not depths:
        raise ConfigError.of("check_layers", f"layers from 1 to {layers - 1}", check_layers)
    with tqdm(desc="Calibrating", unit=" prompts", disable=not progress) as bar:
        sweep = _Sweep(model, tokenizer, series, asked, bound, slack, quantization, bar)
        sweep.all_of(depths)
    best = sweep.best()
    rows = tuple(measured.row(measured is best) for measured in sweep.done)
    policy = replace(best.setting.policy, bound=float(bound), measured=rows)
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
    bound: float
    slack: float
    quantization: Quantization
    bar: tqdm[Any]
    done: list[Measured] = field(default_factory=list)
    expected: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def all_of(self, depths: Iterable[int]) -> None:
        """Measures everything, one kind of setting after the other."""
        closed = SegmentPolicy(similarity=CLOSED, probe=CLOSED)
        self.measure(closed)
        for similarity in _SIMILARITIES:
            self.measure(replace(closed, similarity=similarity))
        alike = self.best().setting.policy
        for depth in depths:
            self._threshold(replace(alike, check_layer=depth))
        for repair in _REPAIRS:
            self._try(repair=repair)
        # Where probes let in what is good, surroundings may not have to.
        for similarity in (*_SIMILARITIES, CLOSED):
            self._try(similarity=similarity)
        self._try(repair=0.15, repair_by="deviation")
        for window in _WINDOWS:
            self._try(guard=(*(pair for pair in closed.guard if pair[1] <= window and pair[0] < 1), (1.0, window)))
        best = self.best().setting.policy
        for quantization in _QUANTIZATIONS:
            if quantization != self.quantization:
                self.measure(best, quantization)

    def best(self) -> Measured:
        """Of all that keep the bound and save about most: the least divergence, and where that is about the same the strictest."""
        comparable = [measured for measured in self.done if measured.setting.quantization == self.quantization]
        # The first lets nothing in, and so has no divergence. Probes that let everything in are no guard against what these prompts lack.
        bounded = [measured for measured in comparable if measured.kl <= self.bound and measured.setting.policy.probe > _THRESHOLDS[0]]
        most = max(measured.saved for measured in bounded)
        return min((measured for measured in bounded if measured.saved >= most - self.slack), key=self._looseness)

    def _looseness(self, measured: Measured) -> tuple[float, ...]:
        policy = measured.setting.policy
        window = measured.setting.row()["window"]
        kl = round(measured.kl / self.bound / _SAME) if self.bound else 0
        # A later layer has seen more of what differs to the left.
        strictness = (policy.probe > 1, policy.check_layer, policy.probe, policy.similarity, window or float("inf"), policy.repair)
        return (kl, *(-number for number in strictness), -measured.saved)

    def measure(self, policy: SegmentPolicy, quantization: Quantization | str = "") -> Measured:
        """Runs all prompts, if that has not been done with these settings."""
        setting = Setting(policy, self.quantization if quantization == "" else quantization)  # type: ignore[arg-type]
        measured = next((measured for measured in self.done if measured.setting.row() == setting.row()), None)
        if measured is None:
            measured = Measured(setting, {name: self._replay(name, setting) for name in self.series})
            self.done.append(measured)
        return measured

    def _try(self, **changes: Any) -> None:
        self.measure(replace(self.best().setting.policy, **changes))

    def _threshold(self, closed: SegmentPolicy) -> None:
        """Lets everything in, reads off the scores which thresholds may do, and measures those."""
        opened = self.measure(replace(closed, probe=_THRESHOLDS[0]))
        likely = [threshold for threshold in _THRESHOLDS[1:] if _foreseen(opened, threshold)[0] <= self.bound]
        if not likely:
            return
        most = max(_foreseen(opened, threshold)[1] for threshold in likely)
        strictest = max(threshold for threshold in likely if _foreseen(opened, threshold)[1] >= most - self.slack)
        for threshold in _THRESHOLDS[_THRESHOLDS.index(strictest) :]:
            if self.measure(replace(closed, probe=threshold)).kl <= self.bound:
                return

    def _replay(self, name: str, setting: Setting) -> list[Answered]:
        answers = []
        with closing(SegmentStore("memory", quantization=setting.quantization)) as store:
            for number, ids in enumerate(self.series[name]):
                prompt, asked = ids[: -self.asked], ids[-self.asked :]
                if (name, number) not in self.expected:
                    self.expected[name, number] = next_tokens(self.model, prompt, asked).cpu()
                cache = SegmentReuseCache(self.model, store, self.tokenizer, mode="auto", policy=setting.policy)
                logits = next_tokens(self.model, prompt, asked, cache).cpu()
                answers.append(_answered(cache, len(prompt), divergence(self.expected[name, number], logits)))
                self.bar.update()
        return answers


def _answered(cache: SegmentReuseCache, tokens: int, kl: torch.Tensor) -> Answered:
    tiers = cache.report().tiers or {}
    scores = tuple((probe.score, probe.stop - probe.start) for probe in cache.probes)
    return Answered(
        kl=float(kl.mean()),
        saved=cache.report().flops_saved,
        approximate=sum(tiers.get(tier, 0) for tier in _APPROXIMATE),
        refused=sum(length for score, length in scores if score < cache.policy.probe),
        lowest=min((score for score, _ in scores), default=None),
        scores=scores,
        tokens=tokens,
    )


def _foreseen(opened: Measured, threshold: float) -> tuple[float, float]:
    """The divergence and the saving to expect of a threshold, from a run that let everything in.

    What a prompt costs of which only a part is refused is not known, and left out; a run of its own will tell.
    """
    kls, saved = [], []
    for answers in opened.series.values():
        passed = [answer.kl for answer in answers if answer.approximate and (answer.lowest is None or answer.lowest >= threshold)]
        kls.append(statistics.fmean(passed) if passed else 0.0)
        kept = 1 - opened.setting.policy.repair
        lost = (kept * sum(length for score, length in answer.scores if score < threshold) / answer.tokens for answer in answers)
        saved.append(statistics.fmean(answer.saved for answer in answers) - statistics.fmean(lost))
    return max(kls), statistics.fmean(saved)
