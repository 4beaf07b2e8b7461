"""What arguments stand for: models and caches, and texts, prompts and pairs of prompts from files."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

import hf_kvcaches
from hf_kvcaches.cli.arguments import CACHES, as_call, model_source
from hf_kvcaches.errors import ConfigError, require_choice

Text = str | list[int]
# What arguments of a cache may be made of.
ARGUMENTS = [
    *"AdaptiveSubspace HeadBudgets KVCodec KeepProbe PagePool QueryStatistics SegmentPolicy SegmentStore SlotProjector".split(),
    *("WarmStartGate", "WarmStartLibrary"),
    *(name for name in hf_kvcaches.__all__ if name.endswith("Policy") and name not in ("Policy", "SegmentPolicy")),
]


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
    """A model, by a name as in `model_source`, and its tokenizer."""
    tokenizer = from_pretrained(transformers.AutoTokenizer, name)
    model = from_pretrained(transformers.AutoModelForCausalLM, name, dtype=dtype)
    if dtype == "auto" and device.type == "cpu" and model.dtype == torch.float16:
        model = model.float()  # half precision on a CPU is a storage format
    return model.to(device).eval(), tokenizer


def from_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """A model, a config or a tokenizer, by one of transformers' Auto classes."""
    source = model_source(name)
    try:
        return kind.from_pretrained(source, **options)
    except OSError as error:
        if Path(source).is_dir():
            raise
        hint = f"There is no such folder, and from the Hub came: {' '.join(str(error).split())}"
        raise ConfigError.of("model", "a folder that exists, or a model of the Hub", name, hint) from error


def makers(calls: Sequence[ast.Call], model: Any, tokenizer: Any = None) -> dict[str, Callable[[], Any]]:
    """By the text of a call, what makes a new cache for each text; stores, codecs and what else it calls are made or loaded once.

    Classes that are saved in folders (`KVCodec`, `SegmentPolicy`, `WarmStartLibrary` and others) are loaded from the folder or Hub
    repository that they are given, and other classes are called. The model and its tokenizer are passed where a class takes them.
    """
    return {ast.unparse(call): partial(_made(call, model, tokenizer).new_cache, model) for call in calls}


def _made(node: ast.expr, model: Any, tokenizer: Any) -> Any:
    """What an argument stands for: a literal, the `per_call` of a cache, or an object of another class."""
    call = as_call(node)
    if call is None:
        return ast.literal_eval(node)
    class_name = ast.unparse(call.func)
    is_cache = class_name in CACHES
    if not is_cache:
        require_choice("--cache", class_name, ARGUMENTS)
    kind = getattr(hf_kvcaches, class_name)
    make = kind if is_cache else getattr(kind, "from_pretrained", kind)
    args = [_made(part, model, tokenizer) for part in call.args]
    names, taken = list(inspect.signature(make).parameters), {"model": model, "tokenizer": tokenizer}
    if names[:1] == ["model"]:
        args.insert(0, model)
    options = {name: taken[name] for name in names[len(args) :] if name in taken}
    options |= {str(keyword.arg): _made(keyword.value, model, tokenizer) for keyword in call.keywords}
    if is_cache:
        return hf_kvcaches.per_call(kind, *args[1:], **options)
    try:
        inspect.signature(make).bind(*args, **options)
    except TypeError as error:
        raise ConfigError(f"--cache: {ast.unparse(call)}: {error}. Look up the arguments of {class_name}.") from None
    return make(*args, **options)


def read_text(path: Path) -> str:
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
