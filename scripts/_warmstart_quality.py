"""What `eval_warmstart.py` compares, and its tables, files, pictures and bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from shared.bars import bar
from shared.numbers import mean
from shared.plot import Panel, draw
from shared.results import Row, rows_where, show, write_csv
from transformers import PreTrainedModel

from hf_kvcaches import WarmStartCache, WarmStartGate, WarmStartLibrary
from hf_kvcaches.core.prompt import PrefillCall
from hf_kvcaches.evaluate.measures import divergence
from hf_kvcaches.warmstart.calibration import FALSE
from hf_kvcaches.warmstart.reading import PromptStates
from hf_kvcaches.warmstart.summaries.compressor import SlotCompressor
from hf_kvcaches.warmstart.summaries.slots import Slots
from tests.testbed.pairs import Pair

# What is answered from something that is no beginning of the prompt, or from the same prompt.
HITS = ("exact", "align", "slots")
# Of these, what a prompt that has nothing to do with the other must never be served by.
APPROXIMATE = ("align", "slots")
# Bars.
CONTROL, KL, WITHIN, FORWARDED, SUMMARY_KL, SAME_LOGITS, FEWER_RIGHT = 0.5, 0.01, 0.95, 0.35, 0.05, 1e-3, 0.01
SLIGHT = ("identical", "no_content")
SUMMARY_SLOTS = 64


@dataclass(frozen=True)
class Side:
    """One way to start; with none of the settings: cold."""

    name: str  # as in tables
    strategy: Literal["auto", "slots", "align", "exact"] | None = None  # of a `WarmStartCache` with the library
    layout: Literal["salient", "paper"] | None = None  # of slots of the pair's source, whatever a gate would say
    control: Literal["tail", "mismatch"] | None = None  # the last tokens of the target alone, or behind another pair's source

    def __str__(self) -> str:
        return self.name


COLD = Side("cold")
EXACT, AUTO, ALIGN, GATED = Side("exact prefix", "exact"), Side("auto", "auto"), Side("align", "align"), Side("slots, gated", "slots")
TAIL_ONLY, MISMATCH = Side("tail only", control="tail"), Side("mismatched source", control="mismatch")
SALIENT, PAPER = (Side(f"slots {layout}, m={SUMMARY_SLOTS}", layout=layout) for layout in ("salient", "paper"))
SIDES = (COLD, EXACT, AUTO, ALIGN, GATED, SALIENT, PAPER, TAIL_ONLY, MISMATCH)


class SummaryCache(WarmStartCache):
    """Starts every prompt from one summary, and runs its last token."""

    def __init__(self, model: PreTrainedModel, library: WarmStartLibrary, summary: Slots) -> None:
        super().__init__(model, library, strategy="slots", gate=WarmStartGate())
        self.summary = summary

    def take_prefill(self, call: PrefillCall) -> int:
        if self.seen:
            return 0
        length = call.input_ids.shape[1]
        self.start_from(self.summary.shifted(length - self.summary.length, self.library.rotation.layers), length - 1)
        return length - 1


def summarise(states: PromptStates, length: int, layout: Any, slots: int = SUMMARY_SLOTS) -> Slots:
    """Slots of all tokens of a prompt but the last, which is run again."""
    keys, values = zip(*((keys[:, :-1], values[:, :-1]) for keys, values in states.layers), strict=True)
    return SlotCompressor(slots, layout).compress(keys, values, states.queries, length, states.scaling)


@dataclass(frozen=True)
class Answer:
    """What became of one prompt."""

    kind: str  # of the pair
    asks: str  # whether source and target end with the same question
    served: str  # "exact", "align", "slots", "prefix" or "cold"; the controls are "control"
    refused: str  # why nothing better was done, or ""
    cosine: float  # of source and target
    tokens: int  # of the prompt
    forwarded: int  # of these, those that were run
    kls: tuple[float, ...] = ()  # at each place of the continuation, in nats; nothing where only the admission was looked at
    right: tuple[bool, ...] = ()  # which answers are right
    right_cold: tuple[bool, ...] = ()  # which are without a warm start
    # For each question, whether the answer is the source's and wrong; None where the source says nothing else.
    stale: tuple[bool | None, ...] = ()
    stale_cold: tuple[bool | None, ...] = ()  # the same without a warm start: there it is the model's mistake

    @property
    def hit(self) -> bool:
        return self.served in HITS

    @property
    def following(self) -> float:
        """The mean divergence of all tokens behind the first."""
        return mean(self.kls[1:])

    @property
    def worst(self) -> float:
        """What a calibration judges by: the first token's divergence, or the mean of the following ones."""
        return max(self.kls[0], self.following)


Answers = Mapping[Side, Sequence[Answer]]


@dataclass(frozen=True)
class Extra:
    """What is measured on other pairs than the tables."""

    risky: Sequence[Answer]  # of `AUTO`, where the true answer is another than the source's
    unrelated: Answers  # of `AUTO`, `ALIGN` and `GATED`, only what served them
    swapped: Sequence[float]  # largest differences of logits behind the swap from the cold ones


def judged(pair: Pair, cold: torch.Tensor, logits: torch.Tensor) -> dict[str, Any]:
    """The fields of an answer that come of logits at each place of the continuation, (places, vocabulary): cold ones and a side's."""
    guesses, alone = (values.argmax(-1).tolist() for values in (logits, cold))
    return {
        "kls": tuple(divergence(cold, logits).tolist()),
        "right": tuple(pair.target.right(guesses)),
        "right_cold": tuple(pair.target.right(alone)),
        "stale": tuple(_stale(pair, number, guesses) for number in range(len(pair.stale))),
        "stale_cold": tuple(_stale(pair, number, alone) for number in range(len(pair.stale))),
    }


def _stale(pair: Pair, number: int, guesses: Sequence[int]) -> bool | None:
    """By the first token in which the two answers differ: what was fed in before it is part of both."""
    start, stop = pair.target.answers[number]
    answer, stale = pair.target.continuation[start:stop], pair.stale[number]
    differ = [place for place, (a, b) in enumerate(zip(answer, stale or (), strict=False)) if a != b]
    return guesses[start + differ[0]] == stale[differ[0]] if stale and differ else None


def summary(kind: str, side: Side, answers: Sequence[Answer]) -> Row:
    """One row of the table and of the file; divergences are those of what was admitted."""
    hits = [answer for answer in answers if answer.hit or side.control]
    stale = [flag for answer in answers for flag in answer.stale if flag is not None]
    shares = lambda chosen: mean([answer.forwarded / answer.tokens for answer in chosen])  # noqa: E731
    return {
        "kind": kind,
        "side": side.name,
        "pairs": len(answers),
        "admitted": mean([answer.hit for answer in answers]),
        "served": " ".join(f"{name} {count}" for name, count in Counter(answer.served for answer in answers).most_common()),
        "forwarded": shares(answers),
        "forwarded_admitted": shares(hits),
        "kl_first": mean([answer.kls[0] for answer in hits]),
        "kl_following": mean([answer.following for answer in hits]),
        **{f"kl_following_{asks}": mean([answer.following for answer in hits if answer.asks == asks]) for asks in ("same", "other")},
        "kl_worst": max((answer.worst for answer in hits), default=float("nan")),
        "within": mean([answer.worst <= FALSE for answer in hits]),
        "kl_first_all": mean([answer.kls[0] for answer in answers]),
        "kl_following_all": mean([answer.following for answer in answers]),
        "right": mean([flag for answer in answers for flag in answer.right]),
        "right_cold": mean([flag for answer in answers for flag in answer.right_cold]),
        "stale": sum(stale),
        "could_be_stale": len(stale),
    }


SHOWN = {"admitted": "{admitted:.0%}", "served": "{served}", "forwarded": "{forwarded:.2f} T", "first": "{kl_first:.2g}"}
SHOWN |= {"following, same": "{kl_following_same:.2g}", "other": "{kl_following_other:.2g}", "within": "{within:.0%}"}
SHOWN |= {"right": "{right:.0%}", "cold": "{right_cold:.0%}", "stale": "{stale} of {could_be_stale}"}


def report(rows: Sequence[Row]) -> str:
    """A table for each kind; KL of the first token and of all following ones, where the source ends with the same question or another."""
    groups = [rows_where(rows, kind=kind) for kind in dict.fromkeys(row["kind"] for row in rows)]
    return "\n\n".join(show(group, {f"{group[0]['kind']}: {group[0]['pairs']} pairs": "{side}", **SHOWN}) for group in groups)


def controls(answers: Answers) -> list[str]:
    """Whether the pairs prove anything: without the right source the next token should be another."""
    means = {side: mean([answer.kls[0] for answer in answers[side]]) for side in (TAIL_ONLY, MISMATCH)}
    lines = ["Controls", *(bar(f"{side}: mean KL above {CONTROL}", kl > CONTROL, f"{kl:.3g}") for side, kl in means.items())]
    if not all(kl > CONTROL for kl in means.values()):
        lines.append("  The pairs prove nothing: what is asked for can be told without the source.")
    return lines


def bars(answers: Answers, extra: Extra) -> Iterator[str]:
    """One line for each thing that the cache is asked to reach."""
    hits = [answer for answer in answers[AUTO] if answer.hit]
    first, following = mean([answer.kls[0] for answer in hits]), mean([answer.following for answer in hits])
    yield "Bars"
    numbers = f"{following:.2g} in {len(hits)} of {len(answers[AUTO])}, {first:.2g} of the first token"
    yield bar(f"auto, admitted: mean KL of all following tokens of at most {KL}", max(first, following) <= KL, numbers)
    within = mean([answer.worst <= FALSE for answer in hits])
    yield bar(f"auto, admitted: {WITHIN:.0%} within {FALSE}", within >= WITHIN, f"{within:.1%}")
    right, cold = (mean([flag for answer in hits for flag in getattr(answer, name)]) for name in ("right", "right_cold"))
    claim = f"auto, admitted: all answers right as often as cold, within {FEWER_RIGHT:.0%}"
    yield bar(claim, right >= cold - FEWER_RIGHT, f"{right:.1%} of them, cold {cold:.1%}")
    share = mean([answer.forwarded / answer.tokens for answer in hits])
    yield bar(f"auto, admitted: at most {FORWARDED} of the tokens are run", share <= FORWARDED, f"{share:.3f}")
    risky = [pair for answer in extra.risky for pair in zip(answer.stale, answer.stale_cold, strict=True) if pair[0] is not None]
    stale = [cold for ours, cold in risky if ours]
    counts = [sum(map(sum, (getattr(answer, name) for answer in extra.risky))) for name in ("right", "right_cold")]
    numbers = f"{len(stale)} of {len(risky)}, {sum(map(bool, stale))} of which the model gives cold, too; "
    numbers += f"{sum(answer.hit for answer in extra.risky)} admitted; of all answers right {counts[0]}, cold {counts[1]}"
    yield bar("auto: no stale answers where a fact, a digit or a negation changed", not stale and len(risky) > 0, numbers)
    for side, group in extra.unrelated.items():
        false = sum(answer.served in APPROXIMATE for answer in group)
        yield bar(f"{side}: no false hits on unrelated pairs", false == 0 and len(group) > 0, f"{false} of {len(group)}")
    worst = max(extra.swapped, default=float("nan"))
    numbers = f"{worst:.2g} in {len(extra.swapped)} prompts"
    yield bar(f"after the swap: logits within {SAME_LOGITS:g} of cold ones", worst <= SAME_LOGITS, numbers)
    slight = _slight(answers[SALIENT])
    first, following = mean([answer.kls[0] for answer in slight]), mean([answer.following for answer in slight])
    numbers = f"{following:.2g}, {first:.2g} of the first token"
    claim = f"{SALIENT}, same tail, no content changed: mean KL of all following tokens of at most {SUMMARY_KL}"
    yield bar(claim, max(first, following) <= SUMMARY_KL, numbers)


def _slight(answers: Sequence[Answer]) -> list[Answer]:
    """Of pairs that end alike and differ in no word of content."""
    return [answer for answer in answers if answer.kind in SLIGHT and answer.asks == "same"]


def write_files(folder: Path, rows: Sequence[Row], answers: Answers, fixed: dict[str, Any]) -> None:
    """`warmstart-quality.csv`, and `warmstart-pairs.csv` with a line for each pair and side."""
    names = ("kind", "asks", "served", "refused", "cosine", "tokens", "forwarded")
    lines = [
        {"side": side.name, **{name: getattr(answer, name) for name in names}}
        | {"kl_first": answer.kls[0], "kl_following": answer.following}
        | {"right": sum(answer.right), "answers": len(answer.right), "stale_first": answer.stale[0]}
        for side, group in answers.items()
        for answer in group
    ]
    write_csv(folder / "warmstart-quality.csv", rows, fixed)
    write_csv(folder / "warmstart-pairs.csv", lines)


def write_plot(folder: Path, rows: Sequence[Row]) -> None:
    """`warmstart-quality.png`."""
    draw(folder / "warmstart-quality.png", "WarmStartCache", panels(rows))


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Divergence by kind, and tokens run by kind."""
    forwarded = [row for row in rows if row["side"] in (AUTO.name, ALIGN.name, GATED.name)]
    warm = [row for row in rows if row["side"] != COLD.name]
    return [
        Panel("KL of all tokens behind the first, all pairs", warm, "{side}", "{kind}", "kl_following_all", log="y", unit="nats"),
        Panel("share of the tokens that are run", forwarded, "{side}", "{kind}", "forwarded"),
    ]
