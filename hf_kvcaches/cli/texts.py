"""Texts, prompts and pairs of prompts from files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hf_kvcaches.errors import ConfigError

T = TypeVar("T")
Text = str | list[int]


def read_lines(path: Path, parse: Callable[[Any], T | None], expected: str) -> list[T]:
    """One value a line of a JSON lines file; `parse` returns None where a line is not what is expected."""
    values = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = parse(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if value is None:
            raise ConfigError.of(f"{path}, line {number}", expected, line[:80])
        values.append(value)
    return values


def read_text(path: Path) -> str:
    """The content of a text file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError.of(str(path), "a text in UTF-8", "other bytes", "Convert it, or name another file.") from None


def as_text(value: Any, name: str) -> Text | None:
    """A string or a list of token ids, in an object under a name or by itself; else None."""
    value = value.get(name) if isinstance(value, dict) else value
    is_ids = isinstance(value, list) and all(type(token) is int for token in value)
    return value if is_ids or isinstance(value, str) else None


def read_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """Token ids of prompts: each line a string, token ids, or an object with one of these as "prompt"."""
    expected = "a string, token ids, or an object with one of these as prompt"
    prompts: list[Text] = read_lines(path, lambda line: as_text(line, "prompt"), expected)
    return [tokenizer(text, verbose=False)["input_ids"] if isinstance(text, str) else text for text in prompts]


def read_texts(path: Path, tokenizer: Any, length: int) -> list[Text]:
    """The texts of a file; a text file is cut into pieces of so many tokens."""
    if path.suffix != ".jsonl":
        return pieces(read_text(path), tokenizer, length)
    return read_lines(path, lambda line: as_text(line, "text"), "a string, token ids, or an object with one of these as text")


def pieces(text: str, tokenizer: Any, length: int) -> list[Text]:
    """Token ids of a text, cut; a last piece of less than half the length is left out, unless it is the only one."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    cut: list[Text] = [ids[start : start + length] for start in range(0, len(ids), length)]
    return cut[:-1] if len(cut) > 1 and 2 * len(cut[-1]) < length else cut


def spaced(texts: Sequence[Text], most: int) -> list[Text]:
    """No more than so many, from all over."""
    return [texts[number * len(texts) // most] for number in range(most)] if len(texts) > most else list(texts)


def read_pairs(path: Path) -> list[tuple[Text, Text]]:
    """The pairs of a file."""

    def parse(line: Any) -> tuple[Text, Text] | None:
        source, target = (as_text(line, name) if isinstance(line, dict) and name in line else None for name in ("source", "target"))
        return None if source is None or target is None else (source, target)

    return read_lines(path, parse, "an object with a string or token ids as source and as target")
