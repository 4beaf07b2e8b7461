"""The prompts of `eval_pruning.py`: book text with needles or facts in it, chats, and texts for calibration.

Questions end where the answer begins, so that an answer is right if greedy decoding writes exactly its tokens.
"""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hf_kvcaches.cli.prompts import encode
from hf_kvcaches.errors import ConfigError

FOLLOWING = 33  # tokens of a continuation, the first of which is given
CALIBRATION_SHARE = 5  # the last fifth of a text is for calibration
SECTION, REPLY = 130, 20  # tokens that a user shows and that an assistant answers in a turn of a chat
PEOPLE = "Marta Alder Corran Delia Edmund Florian Greta Hollis Imogen Jasper Katrin Lorenz Mirabel Nestor Odette Percival".split()
THINGS = "violin telescope typewriter bicycle accordion compass camera kettle microscope saddle".split()
PLACES = "lighthouse greenhouse library observatory chapel stable attic cellar bakery windmill".split()
TRADES = "dentist carpenter pilot lawyer painter baker teacher musician chemist tailor".split()
ANIMALS = "parrot donkey tortoise rabbit goat peacock monkey spider falcon hedgehog".split()
FactKind = tuple[str, str, str, list[str]]
# What is stated, what is asked in other words, how the answer begins, and the answers.
FACTS: tuple[FactKind, ...] = (
    ("{person} keeps a {thing} in the {answer}.", "Where is {person}'s {thing}?", "{person}'s {thing} is in the", PLACES),
    ("{person} works as a {answer}.", "What is the job of {person}?", "{person} is employed as a", TRADES),
    ("{person} has bought a {answer}.", "Which pet does {person} own?", "{person} owns a", ANIMALS),
)


@dataclass(frozen=True)
class Fact:
    """A sentence, a question about it, how the answer begins, and how it ends, with the space before it."""

    note: str
    question: str
    begins: str
    answer: str


@dataclass(frozen=True)
class Sample:
    """A context as token ids, questions about it with their answers, and how its text goes on."""

    context: list[int]
    questions: list[tuple[list[int], list[int]]]
    continuation: list[int]

    @property
    def asked(self) -> list[tuple[list[int], list[int]]]:
        """The questions, and the rest of the continuation as the answer to its first token."""
        return [*self.questions, (self.continuation[:1], self.continuation[1:])]


@dataclass(frozen=True)
class Chat:
    """Turns as the user's and the assistant's token ids, and a question about the first one with its answer."""

    turns: list[tuple[list[int], list[int]]]
    question: tuple[list[int], list[int]]


class Book:
    """Sentences of a text: the first four fifths for samples, the others for calibration."""

    def __init__(self, text: str, tokenizer: Any) -> None:
        sentences = [" ".join(sentence.split()) for sentence in re.split(r"(?<=[.!?])\s+", text)]
        sentences = [sentence for sentence in sentences if len(sentence) > 8]
        cut = len(sentences) - len(sentences) // CALIBRATION_SHARE
        self.tokenizer = tokenizer
        self.sentences, self.others = sentences[:cut], sentences[cut:]
        self.ends, self.other_ends = self._ends(self.sentences), self._ends(self.others)

    def read(self, rng: random.Random, tokens: int) -> tuple[list[str], str]:
        """Sentences of at least so many tokens from anywhere in the text, and what follows."""
        last = bisect.bisect(self.ends, self.ends[-1] - tokens - 4 * FOLLOWING)
        if not last:
            raise ConfigError.of("--text", f"a text for contexts of {tokens} tokens", f"{self.ends[-1]} tokens", "Name a longer one.")
        start = rng.randrange(last)
        stop = bisect.bisect_left(self.ends, self.ends[start] + tokens) + 1
        return self.sentences[start + 1 : stop], " ".join(self.sentences[stop : stop + FOLLOWING])

    def calibration_texts(self, count: int, tokens: int) -> list[str]:
        """Texts of about so many tokens from the part of the book that has no samples."""
        starts = [bisect.bisect(self.other_ends, self.other_ends[-1] * number // count) for number in range(count)]
        stops = [bisect.bisect(self.other_ends, self.other_ends[start] + tokens) for start in starts]
        return [" ".join(self.others[start:stop]) for start, stop in zip(starts, stops, strict=True)]

    def _ends(self, sentences: Sequence[str]) -> list[int]:
        """How many tokens there are up to the end of each sentence."""
        return list(accumulate(len(encode(self.tokenizer, f" {sentence}")) for sentence in sentences))


def needle(rng: random.Random) -> Fact:
    """A number of seven digits."""
    place, number = rng.choice(PLACES), "".join(rng.choice("0123456789") for _ in range(7))
    begins = f"The secret number of the {place} is"
    return Fact(f"{begins} {number}.", f"What is the secret number of the {place}?", begins, f" {number}")


def facts(rng: random.Random, kinds: Sequence[FactKind]) -> list[Fact]:
    """Facts about different people, one of each kind."""
    people, drawn = rng.sample(PEOPLE, len(kinds)), []
    for person, (note, question, begins, answers) in zip(people, kinds, strict=True):
        words = {"person": person, "thing": rng.choice(THINGS), "answer": rng.choice(answers)}
        drawn.append(Fact(*(part.format(**words) for part in (note, question, begins)), f" {words['answer']}"))
    return drawn


def samples(book: Book, kind: str, count: int, tokens: int, seed: int) -> Iterator[Sample]:
    """Contexts of about so many tokens.

    Args:
        kind: "needle" or "facts".
    """
    tokenizer = book.tokenizer
    for number in range(count):
        rng = random.Random(f"pruning {kind} {seed} {number}")
        stated = [needle(rng)] if kind == "needle" else facts(rng, FACTS)
        room = tokens - sum(len(encode(tokenizer, f" {fact.note}")) for fact in stated)
        sentences, following = book.read(rng, room)
        for fact in stated:
            sentences.insert(rng.randrange(1, len(sentences)), fact.note)
        questions = [question_of(tokenizer, fact) for fact in stated]
        context = encode(tokenizer, " ".join(sentences), begins=True)
        yield Sample(context, questions, encode(tokenizer, f" {following}")[:FOLLOWING])


def question_of(tokenizer: Any, fact: Fact) -> tuple[list[int], list[int]]:
    """The tokens of a question behind a text, and those of its answer."""
    return encode(tokenizer, f"\n\nQuestion: {fact.question}\nAnswer: {fact.begins}"), encode(tokenizer, fact.answer)


def chats(book: Book, count: int, tokens: int, seed: int) -> Iterator[Chat]:
    """Chats of about so many tokens whose first message states a fact, which is asked for in the end."""
    for number in range(count):
        rng = random.Random(f"pruning chat {seed} {number}")
        [fact] = facts(rng, FACTS[:1])
        turns = [turn(book.tokenizer, f"Please remember this: {fact.note}", "Yes, I will remember it.", begins=True)]
        while sum(len(message) + len(reply) for message, reply in turns) < tokens:
            section, reply = (" ".join(book.read(rng, length)[0]) for length in (SECTION, REPLY))
            turns.append(turn(book.tokenizer, f"What comes to your mind when you read this? {section}", reply))
        yield Chat(turns, turn(book.tokenizer, fact.question, f"{fact.begins}{fact.answer}", fact.answer))


def turn(tokenizer: Any, message: str, reply: str, answer: str = "", *, begins: bool = False) -> tuple[list[int], list[int]]:
    """The tokens of a turn of a chat, in two parts: before and from the assistant's answer.

    Args:
        answer: The end of the reply that counts as the answer; "": all of it.
        begins: Whether it is the first one.
    """
    given = reply.removesuffix(answer) if answer else ""
    asked = encode(tokenizer, f"User: {message}\n\nAssistant:{f' {given}' if given else ''}", begins=begins)
    return asked, encode(tokenizer, answer or f" {reply}\n\n")
