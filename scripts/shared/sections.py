"""A benchmark in sections: how it is asked, and how its sections run beside those that its file has."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from shared.cli import OPTIONS, arguments, begin, check_counts
from shared.results import Results, Row, print_environment, show_sections

Section = Callable[[], Iterable[Row]]


def section_arguments(text: str | None, sections: Sequence[str], *names: str) -> argparse.ArgumentParser:
    """The options of such a benchmark, and the named ones of `OPTIONS`."""
    parser = arguments(text, "device", "threads", "plot", "quick", *names)
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections), help="only these")
    parser.add_argument("--csv", **OPTIONS["csv"] | {"help": "write every number here; sections that are in it and not measured stay"})
    return parser


def begin_sections(args: argparse.Namespace, count: str | None = None) -> torch.device:
    """Check the options, the named count among them, and say on what it is measured."""
    if count is not None:
        check_counts(args, [count], least=2)  # fewer have no quartiles
    device = begin(args)
    print_environment(device)
    return device


def run_sections(results: Results, sections: Mapping[str, Section], chosen: Sequence[str], columns: Mapping[str, str]) -> None:
    """Measure some sections, and print and keep each as soon as it is there."""
    results.drop(chosen)
    for section in chosen:
        rows = [{"section": section, **row} for row in sections[section]()]
        results.add(rows)
        print(show_sections(rows, columns), "\n", flush=True)
