"""Texts: from files of JSON lines, and generated documents with questions about facts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hf_kvcaches.errors import ConfigError
from tests.testbed.documents import Document, Filler, fit_document

T = TypeVar("T")


def read_lines(path: Path, parse: Callable[[Any], T | None], expected: str) -> list[T]:
    """One value a line of a JSON lines file; `parse` returns None where a line is not what is expected."""
    values = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
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


def as_text(value: Any, name: str) -> str | list[int] | None:
    """A string or a list of token ids, in an object under a name or by itself; else None."""
    value = value.get(name) if isinstance(value, dict) else value
    ids = isinstance(value, list) and all(type(token) is int for token in value)
    return value if ids or isinstance(value, str) else None


def read_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """Token ids of prompts: each line a string, token ids, or an object with one of these as "prompt"."""
    prompts = read_lines(path, lambda line: as_text(line, "prompt"), "a string, token ids, or an object with one of these as prompt")
    return [tokenizer(text, verbose=False)["input_ids"] if isinstance(text, str) else text for text in prompts]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def codec_texts(tokenizer: Any, ids: list[int], documents: int, tokens: int, seed: int) -> list[list[int]]:
    """Token ids to calibrate a codec on: of a text, and of documents of about so many tokens with facts between its paragraphs."""
    made = make_documents(tokenizer, tokenizer.decode(ids), documents, tokens, seed) if documents else []
    return [ids, *(encode(tokenizer, document.text()) for document in made)]


def make_documents(tokenizer: Any, text: str, count: int, tokens: int, seed: int, facts: int = 2) -> list[Document]:
    """Documents of about so many tokens, with paragraphs of a text between their facts."""
    filler, documents = Filler(text), []
    for number in range(seed, seed + 40 * count):
        size = lambda text: len(encode(tokenizer, text))  # noqa: E731
        document = fit_document(random.Random(number), filler, size, tokens, facts=max(facts, tokens // 80))
        # Now and then the generator ends far below the length asked for, and shares of unlike lengths can't be averaged.
        if size(document.text()) >= 0.85 * tokens:
            documents.append(document)
        if len(documents) == count:
            return documents
    raise ConfigError.of("--length", "a length that documents can have", tokens, "Ask for longer documents or fewer questions.")
