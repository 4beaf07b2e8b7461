"""What a cache loses: divergence and perplexity over rows of text, token by token, and facts recalled from documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shared.results import Row
from shared.texts import encode
from transformers import Cache, DynamicCache

from hf_kvcaches.errors import ConfigError
from tests.testbed.documents import Document

# The full cache reads so many tokens at once, so that no more of its logits are kept.
BLOCK = 64


def read_rows(ids: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """Rows that begin at equal distances, so that they are different text, (rows, tokens)."""
    if len(ids) < rows * 16:
        hint = "Name a longer file, or lower --rows or --calibrate."
        raise ConfigError.of("--texts", f"at least {rows * 16} tokens behind those for calibration", len(ids), hint)
    length = min(tokens, len(ids) // rows)
    return torch.stack([ids[row * (len(ids) // rows) :][:length] for row in range(rows)])


@torch.no_grad()
def quality(model: Any, make: Callable[[], Cache] | None, ids: torch.Tensor, first: int) -> Row:
    """Divergence and perplexity of all tokens behind a prompt of `first`, which a cache reads one by one.

    Args:
        make: The cache; None for the full one.
    """
    if ids.shape[1] <= first + 1:
        raise ConfigError.of("--tokens", f"at least {first + 2}, as {first} are exact", ids.shape[1])
    full, cache = DynamicCache(config=model.config), make() if make else None
    read = lambda block, past: model(input_ids=block, past_key_values=past, use_cache=True).logits.float().log_softmax(-1)  # noqa: E731
    ids = ids.to(model.device)
    read(ids[:, :first], full)
    if cache is not None:
        read(ids[:, :first], cache)
    tokens, sums = ids.shape[1] - 1, torch.zeros(3, dtype=torch.float64)  # losses of the full cache and of the other, divergences
    for start in range(first, tokens, BLOCK):
        block, targets = ids[:, start : min(start + BLOCK, tokens)], ids[:, start + 1 : start + 1 + BLOCK, None]
        expected = read(block, full)
        found = expected if cache is None else torch.cat([read(token, cache) for token in block.split(1, 1)], 1)
        losses = (-each.gather(2, targets).double().sum() for each in (expected, found))
        sums += torch.stack([*losses, (expected.exp() * (expected - found)).double().sum()]).cpu()
    count = ids.shape[0] * (tokens - first)
    before, loss, divergence = (sums / count).tolist()
    change = 100 * math.expm1(loss - before)
    return {"tokens": count, "kl": float(f"{divergence:.4g}"), "perplexity": round(math.exp(loss), 4), "change_percent": round(change, 4)}


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


@torch.no_grad()
def right_answers(model: Any, cache: Cache, quiz: Quiz) -> int:
    """How many questions are answered exactly, each asked behind the context and token by token.

    An answer is written greedily exactly if each of its tokens is the most likely one behind the true ones before it.
    """
    device, asked = model.device, [question + answer[:-1] for question, answer in quiz.questions]
    if not asked:
        return 0
    model(input_ids=torch.tensor([quiz.context], device=device), past_key_values=cache, use_cache=True, logits_to_keep=1)
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


def recall(model: Any, make: Callable[[], Cache], quizzes: Sequence[Quiz]) -> Row:
    """Facts recalled from all documents."""
    asked = sum(len(quiz.questions) for quiz in quizzes)
    if not asked:
        raise ConfigError.of("--length", "documents with facts outside of the window", "none", "Ask for longer documents.")
    right = sum(right_answers(model, make(), quiz) for quiz in quizzes)
    return {"questions": asked, "right": right, "recall": round(right / asked, 4)}
