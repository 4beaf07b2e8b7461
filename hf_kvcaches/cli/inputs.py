"""What commands read: models from folders or the Hub, texts, prompts and pairs of prompts from files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from hf_kvcaches.cli.arguments import model_source
from hf_kvcaches.errors import ConfigError

Text = str | list[int]


def begin(args: argparse.Namespace) -> torch.device:
    """Apply the common options: threads, no chatter of transformers; return the device."""
    if getattr(args, "threads", None) is not None:
        torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return pick_device(args.device)


def pick_device(name: str) -> torch.device:
    """The named device; `auto` takes the first accelerator that works, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError.of("--device", "auto, cpu, cuda, mps or another device of torch", name) from None


def load(name: str, device: torch.device, dtype: str = "auto") -> tuple[Any, Any]:
    """A model and its tokenizer; `name` is as in `model_source`."""
    tokenizer = _from_pretrained(transformers.AutoTokenizer, name)
    model = _from_pretrained(transformers.AutoModelForCausalLM, name, dtype=dtype)
    if dtype == "auto" and device.type == "cpu" and model.dtype == torch.float16:
        model = model.float()  # half precision on a CPU is a storage format
    return model.to(device).eval(), tokenizer


def load_config(name: str) -> Any:
    """The config of a model; `name` is as in `model_source`."""
    return _from_pretrained(transformers.AutoConfig, name)


def _from_pretrained(kind: Any, name: str, **options: Any) -> Any:
    source = model_source(name)
    try:
        return kind.from_pretrained(source, **options)
    except OSError as error:
        if Path(source).is_dir():
            raise
        hint = f"There is no such folder, and from the Hub came: {' '.join(str(error).split())}"
        raise ConfigError.of("model", "a folder that exists, or a model of the Hub", name, hint) from error


def read_text(path: Path) -> str:
    """The content of a text file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError.of(str(path), "a text in UTF-8", "other bytes", "Convert it, or name another file.") from None


def read_lines(path: Path, *names: str) -> list[list[Text]]:
    """The texts of each line of a JSON lines file: those of an object by their names; a single one may also stand alone."""
    alone = ", or one of these alone" if len(names) == 1 else ""
    expected = f"an object with a string or token ids as {' and as '.join(names)}{alone}"
    lines = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        texts: list[Any] = [value.get(name) for name in names] if isinstance(value, dict) else [value]
        if len(texts) != len(names) or not all(map(_is_text, texts)):
            raise ConfigError.of(f"{path}, line {number}", expected, line[:80])
        lines.append(texts)
    return lines


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value))


def token_ids(text: Text, tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"] if isinstance(text, str) else text
    return ids


def read_texts(paths: Sequence[Path], tokenizer: Any, length: int) -> list[Text]:
    """The texts of files; a text file is cut into pieces of so many tokens, of which a short last one is left out if it is not alone."""
    texts: list[Text] = []
    for path in paths:
        if path.suffix == ".jsonl":
            texts += [text for [text] in read_lines(path, "text")]
            continue
        ids = token_ids(read_text(path), tokenizer)
        pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
        texts += pieces[:-1] if len(pieces) > 1 and 2 * len(pieces[-1]) < length else pieces
    return texts


def spaced(texts: Sequence[Any], most: int) -> list[Any]:
    """No more than so many, from all over."""
    return [texts[number * len(texts) // most] for number in range(most)] if len(texts) > most else list(texts)
