"""What is checked of a command's arguments before torch and transformers, which take seconds, are imported."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from hf_kvcaches.cli.calls import parse
from hf_kvcaches.errors import ConfigError

REAL_MODELS = ("smollm2", "gemma3")  # folders that `make models` makes


def check_counts(args: argparse.Namespace, names: Sequence[str], least: int = 1) -> None:
    """Refuses arguments below a number; those left out (None) and lists element by element included."""
    for name in names:
        value = getattr(args, name)
        smallest = min(value) if isinstance(value, list) else value
        if smallest is not None and smallest < least:
            raise ConfigError.of(f"--{name.replace('_', '-')}", f"at least {least}", smallest)


def require_files(option: str, paths: Sequence[Path]) -> None:
    """Refuses files that do not exist."""
    for path in paths:
        if not path.is_file():
            raise ConfigError.of(option, "files that exist", str(path))


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


def tokens_of(text: str) -> int:
    """A number of tokens, also one such as 32k."""
    match = re.fullmatch(r"([1-9]\d*)(k?)", text.strip().lower())
    if match is None:
        raise ConfigError.of("--context", "a number of tokens, such as 4096 or 32k", text)
    return int(match[1]) * (1024 if match[2] else 1)


def recommend(args: argparse.Namespace) -> None:
    check_counts(args, ["batch"])
    tokens_of(args.context)
    require_files("--speed", [] if args.speed is None else [args.speed])
    model_source(args.model)


def verify(args: argparse.Namespace) -> None:
    check_counts(args, ["context", "max_new_tokens", "prefill_chunk_size"])
    parse(args.cache)
    require_files("--file", [] if args.file is None else [args.file])
    model_source(args.model)


def evaluate(args: argparse.Namespace) -> None:
    check_counts(args, ["context", "following", "limit"])
    _check_caches(args.cache)
    if not args.texts and not args.suite:
        raise ConfigError.of("--texts", "files of text, or --suite", None, "Try --suite needles.")
    require_files("--texts", args.texts or [])
    model_source(args.model)


def bench(args: argparse.Namespace) -> None:
    check_counts(args, ["context", "batch", "steps"])
    check_counts(args, ["rounds"], least=2)
    _check_caches(args.cache)
    model_source(args.model)


def calibrate(args: argparse.Namespace) -> None:
    """Check the arguments of a kind of artifact."""
    if args.kind == "codec":
        check_counts(args, ["length", "max_tokens"], least=2)
        check_counts(args, ["shards"])
    elif args.kind == "segments":
        check_counts(args, ["requests", "asked"])
        require_files("--prompts", [args.prompts])
    elif args.kind == "warmstart":
        require_files("--pairs", [args.pairs])
    else:
        check_counts(args, ["prefixes", "length"])
    require_files("--texts", getattr(args, "texts", []))
    for name in ("model", "producer", "consumer"):
        if hasattr(args, name):
            model_source(getattr(args, name))


def _check_caches(texts: Sequence[str]) -> None:
    names = [repr(parse(text)) for text in texts]
    if len(set(names)) < len(names):
        raise ConfigError.of("--cache", "caches that differ", ", ".join(texts), "Name each once.")
