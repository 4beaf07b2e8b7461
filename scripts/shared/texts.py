"""Texts: from files of JSON lines, and generated documents with questions about facts."""

from __future__ import annotations

import random
from typing import Any

from hf_kvcaches.cli.texts import as_text, read_lines, read_prompts
from hf_kvcaches.errors import ConfigError
from tests.testbed.documents import Document, Filler, fit_document

__all__ = ["as_text", "codec_texts", "encode", "make_documents", "read_lines", "read_prompts"]


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
