"""What the options that commands share stand for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from hf_kvcaches.errors import ConfigError

REAL_MODELS = ("smollm2", "gemma3")  # folders that `make models` makes


def check_counts(args: argparse.Namespace, names: Sequence[str], least: int = 1) -> None:
    """Refuses arguments below a number; those left out (None) and lists element by element included."""
    for name in names:
        value = getattr(args, name)
        smallest = min(value) if isinstance(value, list) else value
        if smallest is not None and smallest < least:
            raise ConfigError.of(f"--{name.replace('_', '-')}", f"at least {least}", smallest)


def begin(args: argparse.Namespace) -> torch.device:
    """Applies the common options: threads, no chatter of transformers; returns the device."""
    if getattr(args, "threads", None) is not None:
        check_counts(args, ["threads"])
        torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return pick_device(args.device)


def pick_device(name: str) -> torch.device:
    """The named device; `auto` takes the first accelerator that works, else the CPU."""
    if name != "auto":
        try:
            return torch.device(name)
        except RuntimeError:
            raise ConfigError.of("--device", "auto, cpu, cuda, mps or another device of torch", name) from None
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def model_source(name: str) -> str:
    """The folder or the hub id that a model's name stands for: `smollm2` and `gemma3` are folders that `make models` makes.

    Args:
        name: As on the command line.
    """
    if Path(name).is_dir():
        return name
    if name in REAL_MODELS:
        here = Path.cwd()
        made = next((folder / ".models" / name for folder in (here, *here.parents) if (folder / ".models" / name).is_dir()), None)
        if made is None:
            hint = "`make models`, in a checkout of the repository, makes it; then run this there."
            raise ConfigError.of("model", f"a folder .models/{name} here or in a folder above", name, hint)
        return str(made)
    if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name):
        raise ConfigError.of("model", "a folder that exists, or a hub id such as owner/name", name, "There is no such folder.")
    return name


def load(name: str, device: torch.device, dtype: str = "auto") -> tuple[Any, Any]:
    """A model and its tokenizer from a folder or the Hub; `name` is as in `model_source`."""
    name = model_source(name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    if dtype == "auto" and device.type == "cpu" and model.dtype == torch.float16:
        model = model.float()  # half precision on a CPU is a storage format
    return model.to(device).eval(), tokenizer


def require_files(option: str, paths: Sequence[Path]) -> None:
    """Refuses files that do not exist, before anything that takes long."""
    for path in paths:
        if not path.is_file():
            raise ConfigError.of(option, "files that exist", str(path))
