"""Perplexity over long rows of text, and facts recalled from documents, for any cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _subspace_variants import Run, Workshop
from shared.results import Row
from shared.texts import encode
from transformers import Cache

from hf_kvcaches.errors import ConfigError
from tests.testbed.documents import Document


def read_rows(ids: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """Rows that begin at equal distances, so that they are different text, (rows, tokens)."""
    if len(ids) < rows * 16:
        hint = "Name a longer file, or lower --rows or --calibrate."
        raise ConfigError.of("--text", f"at least {rows * 16} tokens behind those for calibration", len(ids), hint)
    length = min(tokens, len(ids) // rows)
    return torch.stack([ids[row * (len(ids) // rows) :][:length] for row in range(rows)])


def losses(model: Any, cache: Cache, ids: torch.Tensor, first: int) -> torch.Tensor:
    """The loss of each token but the first, (rows, tokens - 1), as the text is fed in one by one behind a block of `first`."""
    parts, place = [], 0
    for block in [ids[:, :first], *ids[:, first:-1].split(1, 1)] if ids.shape[1] > first + 1 else [ids[:, :-1]]:
        logits = model(input_ids=block, past_key_values=cache, use_cache=True).logits.float()
        targets = ids[:, place + 1 : place + 1 + block.shape[1]]
        parts.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
        place += block.shape[1]
    return torch.cat(parts, 1)


def spans(tokens: int) -> list[tuple[int, int]]:
    """Where the positions of a row are cut: the first 64 tokens, and from there on each time twice as far."""
    ends = [end for end in (64 * 2**power for power in range(12)) if end < tokens]
    return list(zip([1, *ends], [*ends, tokens], strict=True))


def perplexity_rows(workshop: Workshop, run: Run, ids: torch.Tensor, full: torch.Tensor | None) -> tuple[torch.Tensor, list[Row]]:
    """The losses of all tokens, and a row of the file for the whole and for each span."""
    # Sinks are exact to each other anyway, so that reading them at once changes nothing.
    is_full = run.variant.mode == "full"
    first = ids.shape[1] - 1 if is_full else max(1, run.window[0])
    loss = losses(workshop.model, workshop.make(run), ids.to(workshop.model.device), first).cpu()
    found = []
    for start, end in [(1, ids.shape[1]), *spans(ids.shape[1])]:
        part = loss[:, start - 1 : end - 1]
        base = part if full is None else full[:, start - 1 : end - 1]
        change = math.expm1(float((part - base).double().mean()))
        row = {"from": start + 1, "to": end, "tokens": part.numel(), "perplexity": round(math.exp(float(part.mean())), 4)}
        found.append({**workshop.columns(run), **row, "change_percent": round(100 * change, 4)})
    return loss, found


@dataclass(frozen=True)
class Quiz:
    """A document's tokens up to the questions, and the questions with their answers."""

    context: list[int]
    questions: tuple[tuple[list[int], list[int]], ...]


def make_quiz(tokenizer: Any, document: Document, recent: int, limit: int) -> Quiz:
    """The questions about facts that stand before the last `recent` tokens of the context."""
    context, asked = encode(tokenizer, document.context()), []
    for fact in (document.facts[index] for index in document.asked):
        note = "".join(fact.note)
        before = document.context().partition(note)[0]
        if len(encode(tokenizer, before + note)) <= len(context) - recent:
            asked.append((encode(tokenizer, fact.question), encode(tokenizer, fact.answer)))
    return Quiz(context, tuple(asked[:limit]))


def right_answers(model: Any, cache: Cache, quiz: Quiz) -> int:
    """How many questions are answered exactly, each asked behind the context and token by token.

    An answer is written greedily exactly if each of its tokens is the most likely one behind the true ones before it.
    """
    device, asked = model.device, [question + answer[:-1] for question, answer in quiz.questions]
    if not asked:
        return 0
    model(input_ids=torch.tensor([quiz.context], device=device), past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(asked))
    longest = max(map(len, asked))
    # What stands behind a shorter question is read after it was answered.
    ids = torch.tensor([each + each[-1:] * (longest - len(each)) for each in asked], device=device)
    steps = [model(input_ids=step, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1) for step in ids.split(1, 1)]
    guesses = torch.stack(steps, 1).tolist()
    return sum(
        guess[len(question) - 1 : len(question) - 1 + len(answer)] == answer
        for guess, (question, answer) in zip(guesses, quiz.questions, strict=True)
    )


def recall_row(workshop: Workshop, run: Run, quizzes: Sequence[Quiz]) -> Row:
    """A row of the file."""
    asked = sum(len(quiz.questions) for quiz in quizzes)
    if not asked:
        raise ConfigError.of("--length", "documents with facts outside of the window", "none", "Ask for longer documents.")
    right = sum(right_answers(workshop.model, workshop.make(run), quiz) for quiz in quizzes)
    return {**workshop.columns(run), "questions": asked, "right": right, "share": round(right / asked, 4)}
