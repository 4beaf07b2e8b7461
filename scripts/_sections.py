"""A benchmark in sections: how it is asked and begun, and its file, in which the sections stay that are not measured anew."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from _common import check_counts, environment, pick_device, prepare, write_table

from hf_kvcaches.errors import ConfigError

Row = dict[str, Any]


class Run(Protocol):
    """What measures."""

    rows: list[Row]

    def go(self, sections: Sequence[str]) -> None:
        """Measures some sections."""


@dataclass(frozen=True)
class Columns:
    """Of a benchmark's file, behind those of the computer."""

    names: tuple[str, ...]
    texts: tuple[str, ...]  # those that hold words
    whole: tuple[str, ...]  # those that hold whole numbers; all others hold any

    def read(self, path: Path, device: torch.device, sections: Sequence[str]) -> list[Row]:
        """The rows of an earlier run on this computer, but for those sections that are measured anew."""
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            where = {name: str(value) for name, value in environment(device).items()}
            if reader.fieldnames != [*where, *self.names]:
                raise ConfigError.of("--csv", "a file that this script wrote", str(path), "Name another file, or delete it.")
            same = [row for row in reader if row["section"] not in sections and all(row[name] == where[name] for name in where)]
        return [{name: self._value(name, row[name]) for name in self.names if row[name]} for row in same]

    def _value(self, name: str, text: str) -> str | int | float:
        if name in self.texts:
            return text
        return int(text) if name in self.whole else float(text)

    def write(self, path: Path, rows: Sequence[Row], device: torch.device) -> None:
        """All rows, each with what it depends on."""
        write_table(path, self.names, rows, environment(device))


def arguments(text: str | None, sections: Sequence[str], count: str, of_what: str) -> argparse.ArgumentParser:
    """What such a benchmark is asked."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="of the CPU; default: as torch has it")
    parser.add_argument(f"--{count}", type=int, help=of_what)
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections, help="only these")
    parser.add_argument("--csv", type=Path, help="write every number here; other sections that are in it stay")
    parser.add_argument("--plot", type=Path, help="write a picture here (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="very little of all, to see that everything runs; its numbers mean nothing")
    return parser


def begin(args: argparse.Namespace, count: str) -> torch.device:
    """Checks what was asked, and says on what it is measured."""
    asked = getattr(args, count)
    if asked is not None and asked < 2:
        raise ConfigError.of(f"--{count}", "at least 2, so that there are quartiles", asked)
    if args.threads is not None:
        check_counts(args, ["threads"])
    prepare(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    print(", ".join(f"{name} {value}" for name, value in environment(device).items()))
    return device


def measure_each(run: Run, works: Mapping[str, Callable[[], None]], sections: Sequence[str], show: Callable[[list[Row]], str]) -> None:
    """Measures some sections, and prints each as soon as it is there."""
    for section in sections:
        before = len(run.rows)
        works[section]()
        print(show(run.rows[before:]), "\n", flush=True)


def run_sections(run: Run, columns: Columns, args: argparse.Namespace, device: torch.device) -> None:
    """Measures the sections that are asked for, beside those in the file."""
    if args.csv and args.csv.exists():
        run.rows = columns.read(args.csv, device, args.sections)
    try:
        run.go(args.sections)
    finally:  # what is measured is kept, also when it is interrupted
        if args.csv and run.rows:
            columns.write(args.csv, run.rows, device)
