"""The command line of a script: its options, its device, and how it ends."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_kvcaches import KVCacheError
from hf_kvcaches.cli import arguments as package_options
from hf_kvcaches.cli import inputs
from hf_kvcaches.cli.inputs import begin
from hf_kvcaches.errors import ConfigError
from shared import ROOT, TESTBED, testbed

__all__ = ["OPTIONS", "STATE", "add_options", "arguments", "begin", "check_counts", "load", "run_script"]
STATE = ROOT / ".eval"
OPTIONS: dict[str, dict[str, Any]] = {
    **package_options.OPTIONS,
    "model": {
        "default": str(TESTBED / "base"),
        "help": "a folder or a hub id; smollm2, gemma3: see make models; default: the small model of this repository",
    },
    "seed": {"type": int, "default": 0},
    "quick": {"action": "store_true", "help": "very little of everything, to see that it runs; its numbers mean nothing"},
    "state": {"type": Path, "default": STATE, "help": "where rows and artifacts are kept between runs"},
}


def arguments(text: str | None, *names: str) -> argparse.ArgumentParser:
    """A parser with the script's docstring as its description, and the named ones of `OPTIONS`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    return add_options(parser, *names)


def add_options(parser: argparse.ArgumentParser, *names: str) -> argparse.ArgumentParser:
    for name in names:
        parser.add_argument(f"--{name}", **OPTIONS[name])
    return parser


def check_counts(args: argparse.Namespace, names: Sequence[str], least: int = 1) -> None:
    """Refuse options below a number, lists element by element; those left out (None) are right."""
    for name in names:
        value = getattr(args, name)
        smallest = min(value) if isinstance(value, list) else value
        if smallest is not None and smallest < least:
            raise ConfigError.of(f"--{name.replace('_', '-')}", f"at least {least}", smallest)


def load(name: str, device: torch.device, dtype: str = "auto") -> tuple[Any, Any]:
    """A model and its tokenizer from a folder or the hub; `base`, `tuned`, `deep` and `lora` are the small models of this repository."""
    if name in testbed.NAMES and not Path(name).is_dir():
        model, tokenizer = testbed.load(name)
        return model.to(device), tokenizer
    return inputs.load(name, device, dtype)


def run_script(main: Callable[[], None]) -> None:
    """Run a script; an error that its user can mend ends it with a sentence instead of a traceback."""
    try:
        main()
    except (KVCacheError, OSError) as error:  # transformers raises OSError where there is no such model
        raise SystemExit(f"error: {error}") from error
