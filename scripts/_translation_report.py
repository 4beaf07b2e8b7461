"""Tables, files, pictures and bars of `eval_translation.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from _translation_quality import DEFAULT, FULL_RANK, ORACLE, RAW, REUSE, SWEEP, WORKLOADS, ZERO, Answer, Side
from shared.bars import bar
from shared.plot import Panel, draw
from shared.results import Row, rows_where, show, write_csv

# Bars.
SHARE, OF_RAW, OF_REUSE, RECALL, SECONDS = 0.0253, 1 / 10, 1 / 3, 3.0, 60.0
ALL = "all"
# By growing bytes.
PAYLOADS = (ZERO, SWEEP[0], DEFAULT, *SWEEP[1:])


@dataclass(frozen=True)
class Details:
    """What is known of a side but for its answers."""

    seconds: Mapping[str, float] | None = None  # of each stage of the calibration


class Found:
    """All answers."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, Side, str], list[Answer]] = {}
        self.details: dict[tuple[str, Side], Details] = {}

    @property
    def pairs(self) -> list[str]:
        """In their order."""
        return list(dict.fromkeys(pair for pair, _, _ in self.answers))

    def sides(self, pair: str) -> list[Side]:
        """Those of a pair, in their order."""
        return list(dict.fromkeys(side for own, side, _ in self.answers if own == pair))

    def of(self, pair: str, side: Side, workload: str = ALL) -> list[Answer]:
        """Answers, of all workloads if none is named."""
        names = WORKLOADS if workload == ALL else (workload,)
        return [answer for name in names for answer in self.answers.get((pair, side, name), ())]

    def kl(self, pair: str, side: Side, workload: str = ALL) -> float:
        """The mean divergence."""
        return fmean(kl for each in self.of(pair, side, workload) for kl in each.kls)

    def share(self, pair: str, side: Side) -> float:
        """Bytes that are sent, of those of bfloat16 keys and values."""
        own = self.of(pair, side)
        return sum(each.bytes for each in own) / sum(each.plain for each in own)


def recall(answers: Sequence[Answer]) -> tuple[float, float]:
    """Percent of right answers, and behind the consumer's own prefill."""
    asked = sum(each.asked for each in answers)
    if not asked:
        return math.nan, math.nan
    return 100 * sum(each.right for each in answers) / asked, 100 * sum(each.right_alone for each in answers) / asked


def summary(found: Found, pair: str, side: Side, workload: str) -> Row:
    """One row of the file, or over all workloads one of the table."""
    answers, details = found.of(pair, side, workload), found.details.get((pair, side), Details())
    total = lambda name: sum(getattr(answer, name) for answer in answers)  # noqa: E731
    right, alone = recall(answers)
    return {
        "pair": pair,
        "side": side.name,
        "workload": workload,
        "texts": len(answers),
        "tokens": total("tokens"),
        "bytes": total("bytes"),
        "share": round(total("bytes") / total("plain"), 5),
        "kl": round(fmean(kl for answer in answers for kl in answer.kls), 6),
        "recall": "" if math.isnan(right) else round(right, 2),
        "recall_alone": "" if math.isnan(alone) else round(alone, 2),
        "questions": total("asked"),
        "fit_seconds": "" if details.seconds is None else round(sum(details.seconds.values()), 2),
    }


SHOWN = {"bytes": "{bytes:,}", "share": "{share:.4f}", "KL": "{kl:.4f}", **{name: f"{{{name}:.4f}}" for name in WORKLOADS}}
SHOWN |= {"recall": "{recall:.1f}%"}


def report(found: Found) -> str:
    """A table for each pair, over all workloads where none is named."""
    tables = []
    for pair in found.pairs:
        rows = [
            summary(found, pair, side, ALL) | {workload: found.kl(pair, side, workload) for workload in WORKLOADS}
            for side in found.sides(pair)
        ]
        tables.append(show(rows, {pair: "{side}", **SHOWN}))
    return "\n\n".join(tables)


def bars(found: Found) -> Iterator[str]:
    """One line for each thing that the default is asked to reach, and for what it is measured beside.

    Divergences are judged over all workloads together; ratios of each stand beside, because a few answers that a side gets wrong outweigh
    all other places.
    """
    yield "Bars"
    for pair in found.pairs:
        kl = {side: found.kl(pair, side) for side in (RAW, REUSE, ZERO, DEFAULT, FULL_RANK)}
        share, default = found.share(pair, DEFAULT), kl[DEFAULT]
        yield bar(f"{pair}, default: at most {SHARE}x of the bytes", share <= SHARE, f"{share:.4f}x")
        for side, part, name in ((RAW, OF_RAW, "1/10"), (REUSE, OF_REUSE, "1/3")):
            parts = [f"{workload} {_ratio(found.kl(pair, DEFAULT, workload), found.kl(pair, side, workload))}" for workload in WORKLOADS]
            numbers = f"{default:.4f} against {kl[side]:.4f}, {_ratio(default, kl[side])}; {', '.join(parts)}"
            yield bar(f"{pair}, default: KL at most {name} of {side.name}", default <= part * kl[side], numbers)
        reach = f"{kl[FULL_RANK]:.4f}, {_ratio(kl[FULL_RANK], kl[RAW])} of {RAW.name}"
        yield f"  {pair}: zero bytes {kl[ZERO]:.4f}, {_ratio(kl[ZERO], default)} of the default's; at full rank in float32 {reach}"
        yield _recall_bar(found, pair)
        stages = found.details[pair, DEFAULT].seconds or {}
        total = sum(stages.values())
        numbers = f"{total:.1f} s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items())
        yield bar(f"{pair}, default: calibrated in under {SECONDS:g} s", total < SECONDS, numbers)


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.3g}x" if other else "nothing to compare with"


def _recall_bar(found: Found, pair: str) -> str:
    """At the smallest payload for which recall holds, and for all that are larger, too: one that holds by chance is none."""
    own = recall(found.of(pair, ORACLE, "documents"))[0]
    shown = {side: recall(found.of(pair, side, "documents"))[0] for side in PAYLOADS if found.of(pair, side)}
    least = None
    for side in reversed(shown):
        if round(own - shown[side], 6) > RECALL:
            break
        least = side
    claim = f"{pair}: recall within {RECALL:g} points of its own prefill"
    numbers = f"own prefill {own:.1f}%; " + ", ".join(f"{side.name} {value:.1f}%" for side, value in shown.items())
    at = "at no payload" if least is None else f"from {least.name} on, {found.share(pair, least):.4f}x"
    return bar(claim, least is not None, f"{at}; {numbers}")


def rows_of(found: Found) -> list[Row]:
    """All rows of the file, by pair, side and workload."""
    return [summary(found, *key) for key in found.answers]


def write_file(folder: Path, found: Found, fixed: Mapping[str, Any]) -> None:
    """`translation-quality.csv`."""
    write_csv(folder / "translation-quality.csv", rows_of(found), fixed)


def write_plot(folder: Path, found: Found) -> None:
    """`translation-quality.png`."""
    draw(folder / "translation-quality.png", "TranslatedCache", panels(rows_of(found)))


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Divergence on prose and recall, by bytes, from rows of the file."""
    made = []
    for measure, title, workload in (
        ("kl", "KL on prose (lines: zero bytes, full rank)", "prose"),
        ("recall", "facts recalled, %", "documents"),
    ):
        for pair in dict.fromkeys(row["pair"] for row in rows):
            own = rows_where(rows, pair=pair, workload=workload)
            sent = [row for row in own if row["bytes"] and row["side"] != FULL_RANK.name]
            limits = [row["kl"] for row in own if row["side"] in (ZERO.name, FULL_RANK.name)] if measure == "kl" else []
            log = "xy" if measure == "kl" else "x"
            made.append(Panel(f"{pair}: {title}", sent, "{side}", "share", measure, log, levels=tuple(limits), along="share of bytes"))
    return made
