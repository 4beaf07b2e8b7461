"""The tables, files and picture of `eval_real.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from _real_sides import row_summary
from shared.plot import Panel, draw
from shared.results import rows_where, show, write_csv

from hf_kvcaches.cli import suite
from hf_kvcaches.cli.suite import Row

COLUMNS = ("model section task cache share recent peer samples tokens kl perplexity change worst agreement saved note").split()
_NAMED = re.compile(r"(?P<cache>.+?) (?P<share>[\d.]+)(?:, (?P<recent>\d+) recent)?$")
SHOWN: dict[str, Mapping[str, str]] = {
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
PEERS = ("KIVI", "rotation", "QuantizedCache")


PICTURE = "Caches and their peers on real language models"


def columns_of(name: str) -> Row:
    """Cache, share and window of a side's name."""
    found = _NAMED.match(name)
    peer = name.startswith(PEERS)
    if found is None:
        return {"cache": name, "peer": peer}
    return {"cache": found["cache"], "share": float(found["share"]), "recent": int(found["recent"] or 0), "peer": peer}


def summaries(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each cache and task, of what a log holds."""
    for task in dict.fromkeys(row["task"] for row in rows):
        section, _, kind = task.partition(" ")
        own = [row for row in rows if row["task"] == task]
        notes, own = [row for row in own if "note" in row], [row for row in own if "note" not in row]
        named = {row["cache"] for row in own}
        for row in notes:
            if row["cache"] not in named:
                yield {"section": section, "task": kind, **columns_of(row["cache"]), "note": row["note"]}
        for name in dict.fromkeys(row["cache"] for row in own):
            mine = [row for row in own if row["cache"] == name]
            named_row = {"section": section, "task": kind or task, **columns_of(name), "samples": len(mine)}
            yield {**named_row, **_numbers(section, own, mine, name)}


def _numbers(section: str, own: Sequence[Row], mine: Sequence[Row], name: str) -> Row:
    if section == "codes":
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
    """For each model: codes by their bytes."""
    made = []
    for model in dict.fromkeys(row["model"] for row in rows):
        codes = rows_where(rows, model=model, section="codes", recent=0)
        text = codes[-1]["task"] if codes else ""
        kinds = [row | {"kind": re.sub(r" \d bit$", "", row["cache"])} for row in codes if row["task"] == text]
        title = f"{model}: KL behind codes, nats, {text}"
        made.append(Panel(title, kinds, "{kind}", "share", "kl", "xy", along="share of the bytes", unit="KL, nats"))
    return made


def draw_all(path: Path, rows: Sequence[Row]) -> None:
    """One picture of all models."""
    draw(path, PICTURE, panels(rows))
