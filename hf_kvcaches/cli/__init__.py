"""The command `hf-kvcaches`. A command's module, and torch with it, is imported when the command runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hf_kvcaches.cli import arguments as options
from hf_kvcaches.errors import KVCacheError
from hf_kvcaches.version import __version__

# Name -> what it does, what adds its options, and its module, which has `run_NAME(args)`.
COMMANDS = {
    "recommend": ("show what caches cost for a model's config, and which one fits into memory", options.recommend, "recommend"),
    "verify": ("compare a cache with the full cache on what the model itself writes", options.verify, "measure"),
    "eval": ("measure what caches lose on texts", options.evaluate, "measure"),
    "bench": ("time prefill and decode steps of caches", options.bench, "measure"),
    "calibrate": ("make a codec, a segment policy, a warm-start gate or a translator", options.calibrate, "calibrate"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 2 where the user can mend what is wrong, 130 behind Ctrl-C.

    Args:
        arguments: Of the command line; None for those of the process. Wrong ones end the process, as argparse does, with 2.
    """
    parser = argparse.ArgumentParser(prog="hf-kvcaches", description="KV-cache methods for Hugging Face transformers.")
    parser.add_argument("--version", action="version", version=f"hf-kvcaches {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (summary, add_options, _) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        command.set_defaults(command=name, parser=command)
        add_options(command)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command == "eval" and not args.texts and not args.suite:
        args.parser.error("--texts: expected files of text, or --suite. Try --suite needles.")
    try:
        module = importlib.import_module(f"hf_kvcaches.cli.{COMMANDS[args.command][-1]}")
        return int(getattr(module, f"run_{args.command}")(args))
    except (KVCacheError, OSError) as error:  # transformers reports a missing model with an OSError
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
