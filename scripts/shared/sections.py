"""A benchmark in sections: how it is asked, and how its sections run beside those that its file has."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shared.bars import Bar, verdicts
from shared.cli import OPTIONS, arguments, begin, check_counts
from shared.plot import Panel, draw, title_of
from shared.results import Results, Row, print_environment, show_sections

Section = Callable[[], Iterable[Row]]
# Columns of tables with times and ratios.
TIMES = {
    "n": "{count}",
    "ms": "{time_ms:.3f}",
    "quartiles": "{time_q1_ms:.3f}-{time_q3_ms:.3f}",
    "ratio": "{ratio:.2f}x",
    "quartiles of it": "{ratio_q1:.2f}-{ratio_q3:.2f}",
}


@dataclass(frozen=True)
class Output:
    """What becomes of a benchmark's rows: tables, bars, columns of a file and panels of a picture."""

    title: str
    columns: Sequence[str]
    shown: Mapping[str, str]
    bars: Sequence[Bar]
    panels: Callable[[list[Row]], list[Panel]]


def section_arguments(text: str | None, sections: Sequence[str], *names: str) -> argparse.ArgumentParser:
    """The options of such a benchmark, and the named ones of `OPTIONS`."""
    parser = arguments(text, "device", "threads", "plot", "quick", *names)
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections), help="only these")
    parser.add_argument("--csv", **OPTIONS["csv"] | {"help": "write every number here; sections that are in it and not measured stay"})
    return parser


def begin_sections(args: argparse.Namespace, count: str | None = None) -> torch.device:
    """Check the options, the named count among them, and print the environment."""
    if count is not None:
        check_counts(args, [count], least=2)  # fewer have no quartiles
    device = begin(args)
    print_environment(device)
    return device


def run_sections(args: argparse.Namespace, device: torch.device, sections: Mapping[str, Section], output: Output) -> None:
    """Measure the chosen sections, print and keep each as soon as it is there; then judge all rows and draw them."""
    results = Results(args.csv, output.columns, device)
    results.drop(args.sections)
    for section in args.sections:
        rows = [{"section": section, **row} for row in sections[section]()]
        results.add(rows)
        print(show_sections(rows, output.shown), "\n", flush=True)
    print(verdicts(output.bars, results.rows))
    if args.plot:
        draw(args.plot, title_of(device, output.title), output.panels(results.rows))
