"""How many of a document's questions a model answers exactly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tests.testbed.documents import Document


@dataclass(frozen=True)
class Encoded:
    """A document as token ids, with each question's answer as a span of them."""

    ids: list[int]
    kinds: list[str]
    answers: list[tuple[int, int, str]]  # start, stop, wording


def encode(tokenizer, document: Document, *, with_notes: bool = True) -> Encoded:
    """Token ids piece by piece (every piece ends where the tokenizer would cut anyway)."""
    ids: list[int] = []
    kinds: list[str] = []
    answers = []
    asked = iter(document.asked)
    for kind, text in document.pieces(with_notes=with_notes):
        piece = tokenizer.encode(text, add_special_tokens=False)
        if kind == "answer":
            answers.append((len(ids), len(ids) + len(piece), document.facts[next(asked)].wording))
        ids += piece
        kinds += [kind] * len(piece)
    return Encoded(ids, kinds, answers)


@torch.no_grad()
def answered(model, tokenizer, documents: Iterable[Document], *, with_notes: bool = True) -> list[tuple[str, bool]]:
    """For every question: its wording, and whether greedy decoding gives exactly the answer.

    One forward pass a document: the greedy answer is right exactly when each of its tokens is the argmax behind the true ones.
    """
    results = []
    for document in documents:
        encoded = encode(tokenizer, document, with_notes=with_notes)
        ids = torch.tensor([encoded.ids], device=model.device)
        guesses = model(input_ids=ids).logits[0].argmax(-1)
        for start, stop, wording in encoded.answers:
            results.append((wording, bool((guesses[start - 1 : stop - 1] == ids[0, start:stop]).all())))
    return results


def share(results: Iterable[tuple[str, bool]], wording: str | None = None) -> float:
    """The share of right answers, over all wordings or one."""
    hits = [hit for word, hit in results if wording in (None, word)]
    return sum(hits) / len(hits) if hits else float("nan")


@torch.no_grad()
def perplexity(model, tokenizer, text: str, *, window: int = 512, limit: int = 40_000) -> float:
    """Perplexity per token over consecutive windows, each without any context before it."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False)[:limit], device=model.device)
    rows = ids[: len(ids) // window * window].view(-1, window)
    total, count = 0.0, 0
    for chunk in rows.split(8):
        logits = model(input_ids=chunk).logits[:, :-1]
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), chunk[:, 1:].flatten(), reduction="sum").item()
        count += chunk[:, 1:].numel()
    return float(torch.tensor(total / count).exp())
