"""The tables, files and picture of `eval_real.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from _coded_rows import row_summary
from shared.plot import Panel, draw
from shared.results import rows_where, show, write_csv

from hf_kvcaches.cli import suite
from hf_kvcaches.cli.suite import FULL_CACHE, Row

COLUMNS = (
    "model section task cache share recent peer context samples tokens right questions answer_loss continuation_loss kl perplexity "
    "change worst agreement saved note"
).split()
_NAMED = re.compile(r"(?P<cache>.+?) (?P<share>[\d.]+)(?:, (?P<recent>\d+) recent)?$")
SHOWN: dict[str, Mapping[str, str]] = {
    "needles": {
        "pruned": "{cache}",
        "tokens kept": "{share:.4g}",
        "needles": "{task}",
        "right": "{right} of {questions}",
        "answer, nats": "{answer_loss:+.2f}",
        "continuation, nats": "{continuation_loss:+.3f}",
        "": "{note}",
    },
    "codes": {
        "codes": "{cache}",
        "bytes": "{share:.4g}",
        "recent": "{recent}",
        "text": "{task}",
        "KL": "{kl:.4f}",
        "perplexity": "{perplexity:.2f}",
        "more": "{change:+.1%}",
    },
    "quantized": {
        "token by token": "{cache}",
        "bytes": "{share:.4g}",
        "recent": "{recent}",
        "text": "{task}",
        "KL": "{kl:.4f}",
        "agreement": "{agreement:.1%}",
        "": "{note}",
    },
    "reuse": {
        "reuse": "{cache}",
        "prompts": "{task}",
        "saved": "{saved:.1%}",
        "KL": "{kl:.2g}",
        "worst prompt": "{worst:.2g}",
        "agreement": "{agreement:.1%}",
    },
}
# The item number of rows that say why there are no others.
NOT_MEASURED = -2
PEERS = ("kvpress", "KIVI", "rotation", "QuantizedCache")


PICTURE = "Caches and their peers on real language models"


def columns_of(name: str) -> Row:
    """Cache, share and window of a side's name."""
    found = _NAMED.match(name)
    peer = name.startswith(PEERS)
    if found is None:
        return {"cache": name, "peer": peer}
    return {"cache": found["cache"], "share": float(found["share"]), "recent": int(found["recent"] or 0), "peer": peer}


def summaries(rows: Sequence[Row], context: int) -> Iterator[Row]:
    """A row for each cache and task, of what a log holds.

    Args:
        context: Tokens of the contexts with needles.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for task in [*tasks, *(["needles all"] if any(task.startswith("needles ") for task in tasks) else [])]:
        section = task.split()[0]
        own = [row for row in rows if row["task"] == task or (task == "needles all" and row["task"].startswith("needles "))]
        notes, own = [row for row in own if "note" in row], [row for row in own if "note" not in row]
        named = {row["cache"] for row in own}
        for row in notes:
            if row["cache"] not in named:
                yield {"section": section, "task": task.partition(" ")[2], **columns_of(row["cache"]), "note": row["note"]}
        for name in dict.fromkeys(row["cache"] for row in own):
            mine = [row for row in own if row["cache"] == name]
            named = {"section": section, "task": task.partition(" ")[2] or task, **columns_of(name), "samples": len(mine)}
            if section == "needles":
                named["context"] = context
            yield {**named, **_numbers(section, own, mine, name)}


def _numbers(section: str, own: Sequence[Row], mine: Sequence[Row], name: str) -> Row:
    if section == "needles":
        found = suite.needle_summary(own, name)
    elif section == "codes":
        found = row_summary(own, name)
    elif section == "quantized":
        found = {"tokens": sum(row["tokens"] for row in mine)} | {each: fmean(row[each] for row in mine) for each in ("kl", "agreement")}
    else:
        found = {**suite.reuse_summary(own, name), "section": "reuse"}
        found.pop("prompts")
    return {column: round(value, 6) if isinstance(value, float) else value for column, value in found.items() if column != "cache"}


def tables(rows: Sequence[Row]) -> str:
    """A table of each section."""
    parts = [f"{section}\n{show(rows_where(rows, section=section), columns)}" for section, columns in SHOWN.items()]
    models = ", ".join(dict.fromkeys(row["model"] for row in rows))
    return "\n\n".join([models, *parts])


def write(path: Path, rows: Sequence[Row], fixed: Mapping[str, Any]) -> None:
    """The rows as a file."""
    write_csv(path, [{name: value for name, value in row.items() if value is not None} for row in rows], fixed, COLUMNS)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """For each model: needles and continuation by the tokens kept, codes by their bytes, reuse by prompts."""
    made = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = rows_where(rows, model=model)
        pruned = [row for row in rows_where(own, section="needles", task="all") if row["cache"] != FULL_CACHE and row.get("questions")]
        pruned = [row | {"share_right": row["right"] / row["questions"]} for row in pruned]
        codes = rows_where(own, section="codes", recent=0)
        text = codes[-1]["task"] if codes else ""
        kinds = [row | {"kind": re.sub(r" \d bit$", "", row["cache"])} for row in codes if row["task"] == text]
        along = "share of the tokens"
        made += [
            Panel(f"{model}: needles found of those the full cache finds", pruned, "{cache}", "share", "share_right", "x", along=along),
            Panel(
                f"{model}: loss of the continuation, nats",
                pruned,
                "{cache}",
                "share",
                "continuation_loss",
                "x",
                along=along,
                unit="nats more than the full cache",
            ),
            Panel(
                f"{model}: KL behind codes, nats, {text}", kinds, "{kind}", "share", "kl", "xy", along="share of the bytes", unit="KL, nats"
            ),
        ]
    return made


def draw_all(path: Path, rows: Sequence[Row]) -> None:
    """One picture of all models."""
    draw(path, PICTURE, panels(rows))
