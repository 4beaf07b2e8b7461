"""The command `hf-kvcaches`. A command's module, and torch with it, is imported when the command is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hf_kvcaches import __version__
from hf_kvcaches.errors import KVCacheError

# Name -> what it does, and its module, which has `add_arguments(parser)` and `run(args)`.
COMMANDS = {
    "recommend": ("show what caches cost for a model's config, and which one fits into memory", "recommending"),
    "verify": ("compare a cache with the full cache on what the model itself writes", "verifying"),
    "eval": ("measure what caches lose on texts", "evaluating"),
    "bench": ("time prefill and decode steps of caches", "benching"),
    "calibrate": ("make a codec, a segment policy, a warm-start gate or a translator", "calibrating"),
    "push-generate": ("publish a cache as a custom_generate repository", "pushing"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 2 where the user can mend what is wrong.

    Args:
        arguments: Of the command line; None for those of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    args = _parser(arguments).parse_args(arguments)
    try:
        return int(args.run(args))
    except (KVCacheError, OSError) as error:  # transformers reports a missing model with an OSError
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands, with the options of the one that is called."""
    parser = argparse.ArgumentParser(prog="hf-kvcaches", description="KV-cache methods for Hugging Face transformers.")
    parser.add_argument("--version", action="version", version=f"hf-kvcaches {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, (summary, module) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == called:
            implementation = importlib.import_module(f"hf_kvcaches.cli.{module}")
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    return parser
