"""Prompts with known answers, made from a seed: needles in prose, requests of agents, and pairs of similar prompts."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from hf_kvcaches.errors import ConfigError

NEEDLE_KINDS = ("digits", "words")
PAIR_KINDS = ("words", "paragraph", "pages")
# Tokens of a continuation.
_FOLLOWING = 33
_PEOPLE = "Alder Bennet Corran Delia Edmund Florian Greta Hollis Imogen Jasper Katrin Lorenz Mirabel Nestor Odette Percival".split()
_PLACES = "cellar library boathouse greenhouse workshop observatory chapel stable archive pantry laundry attic".split()
_TOWNS = "Lisbon Vienna Dublin Oslo Prague Athens Madrid Warsaw Venice Geneva Berlin Cairo".split()
_TRADES = "dentist carpenter pilot lawyer gardener painter baker teacher musician chemist tailor farmer".split()
_ROLES = "a careful assistant;a patient librarian;an assistant of the harbour office;a clerk of the town archive".split(";")
_RULES = (
    "Answer from the pages below only.;Keep answers short and plain.;If the pages do not say it, reply that it is not known.;"
    "Name the page on which you found the answer.;Do not repeat the question."
).split(";")
# Of made-up sentences.
_CLAUSES = tuple(
    clauses.split(";")
    for clauses in (
        "The ferryman;An old teacher;The night watchman;My neighbour;The gardener;A young clerk;The miller's wife;The surveyor",
        "repaired;carried home;forgot about;described;looked for;sold;painted;returned",
        "a broken lantern;two baskets of pears;the old map;a letter from the coast;the wooden bench;a pair of boots;his notebook",
        "before breakfast;on a cold evening;after the market had closed;while it was raining;in the first week of May;at noon",
        "and nobody asked why.;which surprised the whole street.;and then went to bed early.;although the road was closed.;"
        "and spoke of it for years.;because the bridge had been washed away.",
    )
)


class NeedlePrompt(NamedTuple):
    """A context with needles, as token ids, and what is asked behind it with the answers.

    The questions come in a random order. The last "question" is the first token of how the context goes on, its "answer" the next ones.
    """

    context: list[int]
    asked: list[tuple[list[int], list[int]]]


class _Prose:
    """Sentences of a text in turn, from a random one on; made-up ones without a text."""

    def __init__(self, tokenizer: Any, prose: str | None, rng: random.Random) -> None:
        if prose is None:
            made_up = random.Random(f"prose {rng.randrange(1 << 30)}")
            prose = " ".join(made_up.choice(clauses) for _ in range(400) for clauses in _CLAUSES)
        sentences = [" ".join(sentence.split()) for sentence in re.split(r"(?<=[.!?])\s+", prose)]
        kept = [sentence for sentence in sentences if len(sentence) > 8]
        if not kept:
            raise ConfigError.of("prose", "a text of sentences", prose[:80], "Leave it out for made-up sentences.")
        start = rng.randrange(len(kept))
        self._tokenizer, self._sentences = tokenizer, itertools.cycle([*kept[start:], *kept[:start]])

    def paragraph(self, tokens: int) -> str:
        """Sentences that come to about that many tokens, the last one cut short."""
        words, rest = self.split(tokens, 0)
        return f"{words}." if rest else words

    def split(self, tokens: int, following: int) -> tuple[str, str]:
        """The words of about that many tokens, and what follows them: at least so many tokens."""
        text = next(self._sentences)
        while len(ids := encode(self._tokenizer, text)) < tokens + following:
            text = f"{text} {next(self._sentences)}"
        words: str = self._tokenizer.decode(ids[: max(1, tokens)])
        words = words.rpartition(" ")[0] or words  # the last one may be cut within
        return (words, text[len(words) :]) if len(ids) > tokens and text.startswith(words) else (text, "")


def encode(tokenizer: Any, text: str, *, begins: bool = False) -> list[int]:
    """Token ids of a text; where it begins a prompt, with the tokenizer's special tokens before it, which Gemma's needs."""
    ids = list(tokenizer(text, add_special_tokens=begins, verbose=False)["input_ids"])
    # Some tokenizers end every text, too.
    return ids[:-1] if begins and ids and ids[-1] == tokenizer.eos_token_id and ids[-1] != tokenizer.bos_token_id else ids


def needle_prompts(
    tokenizer: Any, count: int, kind: str, needles: int = 1, *, tokens: int = 600, seed: int = 0, prose: str | None = None
) -> list[NeedlePrompt]:
    """Contexts of about so many tokens of prose with needles in it: numbers of five digits, or who has which trade."""
    prompts = []
    for number in range(count):
        rng = random.Random(f"needles {kind} {needles} {seed} {number}")
        facts, text = _needles(rng, kind, needles), _Prose(tokenizer, prose, rng)
        room = max(1, tokens - sum(len(encode(tokenizer, note)) for note, _, _ in facts))
        shares = [rng.uniform(0.5, 1.5) for _ in range(needles + 1)]
        lengths = [int(room * share / sum(shares)) for share in shares]
        body = "".join(f"{text.paragraph(length)} {note} " for (note, _, _), length in zip(facts, lengths, strict=False))
        last, following = text.split(lengths[-1], _FOLLOWING)
        asked = [(encode(tokenizer, question), encode(tokenizer, answer)) for _, question, answer in rng.sample(facts, needles)]
        continuation = encode(tokenizer, following)[:_FOLLOWING]
        prompts.append(NeedlePrompt(encode(tokenizer, body + last, begins=True), [*asked, (continuation[:1], continuation[1:])]))
    return prompts


def agent_prompts(
    tokenizer: Any, count: int, *, pages: int = 5, pool: int = 8, page_tokens: int = 120, seed: int = 0, prose: str | None = None
) -> list[list[int]]:
    """Requests of one agent, one after another: a system text, some pages of a pool in a random order, and a question."""
    rng = random.Random(f"agents {seed}")
    written, head = _pages(tokenizer, rng, pool, page_tokens, prose)
    prompts = []
    for _ in range(count):
        chosen = rng.sample(written, pages)
        prompts.append(encode(tokenizer, _prompt(head, chosen, rng.choice(chosen)), begins=True))
    return prompts


def prompt_pairs(
    tokenizer: Any, count: int, kind: str, *, pages: int = 6, page_tokens: int = 100, seed: int = 0, prose: str | None = None
) -> list[tuple[list[int], list[int]]]:
    """Pairs of prompts of a server, of which the later one differs by `kind`.

    "words": in single words; "paragraph": in one page; "pages": in half of its pages.
    """
    pairs = []
    for number in range(count):
        rng = random.Random(f"pairs {kind} {seed} {number}")
        written, head = _pages(tokenizer, rng, 2 * pages, page_tokens, prose)
        before, after = written[:pages], written[:pages]
        changed = {"words": 0, "paragraph": 1, "pages": pages // 2}[kind]
        for index in rng.sample(range(1, pages), changed) if changed else ():
            after[index] = written[pages + index]
        earlier, later = (_prompt(head, side, before[0]) for side in (before, after))
        if kind == "words":
            words = re.split(r"(\s+)", later)
            long = [index for index, word in enumerate(words) if word.isalpha() and word.islower() and len(word) > 4]
            for index in rng.sample(long, min(4, len(long))):
                words[index] = rng.choice("copper quiet golden narrow distant gentle hollow silver".split())
            later = "".join(words)
        pairs.append((encode(tokenizer, earlier, begins=True), encode(tokenizer, later, begins=True)))
    return pairs


def _needles(rng: random.Random, kind: str, count: int) -> list[tuple[str, str, str]]:
    """Facts about different people and places: what a text states, a question in other words, and the answer with the space before it."""
    people, places = rng.sample(_PEOPLE, count), rng.sample(_PLACES, count)
    facts = []
    if kind == "digits":
        for place in places:
            number = "".join(rng.choice("0123456789") for _ in range(5))
            note = f"Remember this: the secret key number of the {place} is {number}. That is important."
            question = f"\n\nWhoever wants to open the {place} has to enter its number, which is"
            facts.append((note, question, f" {number}"))
        return facts
    for person, town, trade in zip(people, rng.sample(_TOWNS, count), rng.sample(_TRADES, count), strict=True):
        question = f"\n\nQuestion: How does {person} earn a living?\nAnswer: {person} is a"
        facts.append((f"{person} works as a {trade} in {town}.", question, f" {trade}"))
    return facts


def _pages(tokenizer: Any, rng: random.Random, count: int, tokens: int, prose: str | None) -> tuple[list[tuple[str, str]], str]:
    """Pages of a heading, prose and a fact, each with the question that asks for the fact; and a system text."""
    source, pages = _Prose(tokenizer, prose, rng), []
    for number in range(1, count + 1):
        [(note, question, _)] = _needles(rng, rng.choice(NEEDLE_KINDS), 1)
        half = max(1, (tokens - len(encode(tokenizer, note))) // 2)
        pages.append((f"# Page {number}\n{source.paragraph(half)} {note} {source.paragraph(half)}", question.strip()))
    return pages, " ".join([f"You are {rng.choice(_ROLES)}.", *rng.sample(_RULES, 4)])


def _prompt(head: str, pages: Sequence[tuple[str, str]], asked: tuple[str, str]) -> str:
    """The text of a prompt with pages, which ends with the question about one."""
    return "\n\n".join([head, *(text for text, _ in pages), asked[1]])
