"""The command `hf-kvcaches`. A command's module, and torch with it, is imported when the command runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hf_kvcaches.cli import arguments
from hf_kvcaches.errors import KVCacheError
from hf_kvcaches.version import __version__

# Name -> what it does, its options, and its module, which has `run(args)`.
COMMANDS = {
    "recommend": ("show what caches cost for a model's config, and which one fits into memory", arguments.recommend, "recommend"),
    "verify": ("compare a cache with the full cache on what the model itself writes", arguments.verify, "verify"),
    "eval": ("measure what caches lose on texts", arguments.evaluate, "evaluate"),
    "bench": ("time prefill and decode steps of caches", arguments.bench, "bench"),
    "calibrate": ("make a codec, a segment policy, a warm-start gate or a translator", arguments.calibrate, "calibrate"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 2 where the user can mend what is wrong.

    Args:
        arguments: Of the command line; None for those of the process.
    """
    args = _parser().parse_args(arguments)
    try:
        return int(importlib.import_module(f"hf_kvcaches.cli.{args.module}").run(args))
    except (KVCacheError, OSError) as error:  # transformers reports a missing model with an OSError
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="hf-kvcaches", description="KV-cache methods for Hugging Face transformers.")
    parser.add_argument("--version", action="version", version=f"hf-kvcaches {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (summary, add_arguments, module) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        add_arguments(command)
        command.set_defaults(module=module)
    return parser
