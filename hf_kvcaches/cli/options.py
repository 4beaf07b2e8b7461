"""What the options that commands share stand for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from hf_kvcaches.cli.checks import REAL_MODELS as REAL_MODELS
from hf_kvcaches.cli.checks import check_counts as check_counts
from hf_kvcaches.cli.checks import model_source as model_source
from hf_kvcaches.errors import ConfigError


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


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Say, where a name that is no folder can't be read, that neither a folder nor a model of the Hub was found."""
    try:
        yield
    except OSError as error:
        if Path(name).is_dir():
            raise
        hint = f"There is no such folder, and from the Hub came: {' '.join(str(error).split())}"
        raise ConfigError.of("model", "a folder that exists, or a model of the Hub", name, hint) from error


def load(name: str, device: torch.device, dtype: str = "auto") -> tuple[Any, Any]:
    """A model and its tokenizer from a folder or the Hub; `name` is as in `model_source`."""
    name = model_source(name)
    with reading(name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    if dtype == "auto" and device.type == "cpu" and model.dtype == torch.float16:
        model = model.float()  # half precision on a CPU is a storage format
    return model.to(device).eval(), tokenizer


def load_config(name: str) -> Any:
    """The config of a model from a folder or the Hub; `name` is as in `model_source`."""
    name = model_source(name)
    with reading(name):
        return transformers.AutoConfig.from_pretrained(name)
