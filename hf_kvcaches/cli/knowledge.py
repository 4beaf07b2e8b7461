"""What was measured of the package: which caches work with a model family, and how fast caches are."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from transformers import PreTrainedConfig

from hf_kvcaches.errors import ArtifactError

Measured = dict[str, str]
# Columns in which a row of the speed table is to be near, with the number of doublings that a difference of names counts for.
_NUMBERS = ("hidden", "layers", "batch", "context")
_NAMES = {"dtype": 1.0, "device": 4.0}


def family_of(config: PreTrainedConfig) -> tuple[str, Measured | None]:
    """The name of a config's family in `docs/families.md`, and for each cache "yes", or "no" with the reason; None if it is not there."""
    rows = {name: row for row in _rows(None, "families.csv") for name in row["families"].split()}
    kind = config.model_type
    names = [f"{kind}+alibi"] if getattr(config, "alibi", False) else []
    if getattr(config, "sliding_window", None) is None:
        names.append(f"{kind}+full")
    for name in (*names, kind, f"{kind}@image"):
        if name in rows:
            return name, rows[name]
    return kind, None


def speed_table(path: Path | None = None) -> list[Measured]:
    """The rows of a speed table, or of the one that comes with the package; none if there is none.

    Args:
        path: What `hf-kvcaches bench --csv` wrote.
    """
    rows = _rows(path, "speed.csv")
    needed = {"hardware", "cache", "setting", "prefill_ratio", "decode_ratio", *_NUMBERS, *_NAMES}
    if rows and not needed <= set(rows[0]):
        raise ArtifactError(f"{path}: expected a file of hf-kvcaches bench --csv, the columns {sorted(needed - set(rows[0]))} are missing.")
    return rows


def nearest(rows: list[Measured], cache: str, setting: str, wanted: Mapping[str, object]) -> Measured | None:
    """The row of a cache that was measured most like the wanted case; None if the cache was not measured.

    Args:
        setting: A part of the cache's arguments, by which rows are preferred.
        wanted: Values of the columns by which rows are compared.
    """
    own = [row for row in rows if row["cache"].partition("(")[0] == cache and _kind(row["setting"]) == _kind(setting)]
    own = [row for row in own if setting in row["setting"]] or own
    return min(own, key=lambda row: _distance(row, wanted), default=None)


def _kind(setting: str) -> str:
    """What makes a cache's steps another matter."""
    return next((name for name in ("storage", "page_size", "adaptive", "codec=") if name in setting), "")


def _distance(row: Measured, wanted: Mapping[str, object]) -> float:
    """Doublings between two cases, over all columns."""
    distance = sum(cost for name, cost in _NAMES.items() if row[name] != wanted[name])
    for name in _NUMBERS:
        value = wanted[name]
        if row[name] and isinstance(value, int):
            distance += abs(math.log2(float(row[name]) / value))
    return distance


def _rows(path: Path | None, name: str) -> list[Measured]:
    source = files("hf_kvcaches.cli") / name if path is None else path
    if path is None and not source.is_file():
        return []
    return list(csv.DictReader(source.read_text(encoding="utf-8").splitlines()))
