"""The command line of a script: its options, its device, and how it ends."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_kvcaches import KVCacheError
from hf_kvcaches.cli import arguments as shared_options
from hf_kvcaches.cli import options
from hf_kvcaches.cli.options import check_counts, pick_device
from hf_kvcaches.errors import require
from shared import TESTBED

__all__ = ["OPTIONS", "arguments", "begin", "check_counts", "load", "pick_device", "run_script"]
OPTIONS: dict[str, dict[str, Any]] = {
    **shared_options.OPTIONS,
    "model": {
        "default": str(TESTBED / "base"),
        "help": "a folder or a hub id; smollm2, gemma3: see make models; default: the small model of this repository",
    },
    "length": {"type": int, "default": 800, "help": "of a document, in tokens"},
    "seed": {"type": int, "default": 0},
    "plot": {"type": Path, "help": "write a picture here (needs matplotlib)"},
    "quick": {"action": "store_true", "help": "very little of everything, to see that it runs; its numbers mean nothing"},
}


def arguments(text: str | None, *names: str) -> argparse.ArgumentParser:
    """A parser with the script's docstring as its description, and the named ones of `OPTIONS`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in names:
        parser.add_argument(f"--{name}", **OPTIONS[name])
    return parser


def begin(args: argparse.Namespace) -> torch.device:
    """Apply the common options, with matplotlib at hand for `--plot`; return the device."""
    if getattr(args, "plot", None):
        require("matplotlib", "plots", "The plot")
    return options.begin(args)


def load(name: str, device: torch.device, dtype: str = "auto") -> tuple[Any, Any]:
    """A model and its tokenizer from a folder or the hub; `base`, `tuned`, `deep` and `lora` are the small models of this repository."""
    if name in ("base", "tuned", "deep", "lora") and not Path(name).is_dir():
        from tests import testbed

        model, tokenizer = testbed.load(name)
        return model.to(device), tokenizer
    return options.load(name, device, dtype)


def run_script(main: Callable[[], None]) -> None:
    """Run a script; an error that its user can mend ends it with a sentence instead of a traceback."""
    try:
        main()
    except (KVCacheError, OSError) as error:  # transformers says with an OSError that there is no such model
        raise SystemExit(f"error: {error}") from error
