"""Prompts with known answers, made from a seed: needles in prose, requests of agents, and pairs of similar prompts."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hf_kvcaches.errors import ConfigError, require_choice, whole_number

NeedleKind = Literal["digits", "words"]
PairKind = Literal["words", "paragraph", "pages"]
NEEDLE_KINDS: tuple[NeedleKind, ...] = get_args(NeedleKind)
PAIR_KINDS: tuple[PairKind, ...] = get_args(PairKind)

# Tokens of a continuation.
_FOLLOWING = 33
_PEOPLE = "Alder Bennet Corran Delia Edmund Florian Greta Hollis Imogen Jasper Katrin Lorenz Mirabel Nestor Odette Percival".split()
_PLACES = "cellar library boathouse greenhouse workshop observatory chapel stable archive pantry laundry attic".split()
_TOWNS = "Lisbon Vienna Dublin Oslo Prague Athens Madrid Warsaw Venice Geneva Berlin Cairo".split()
_TRADES = "dentist carpenter pilot lawyer gardener painter baker teacher musician chemist tailor farmer".split()
_ROLES = "a careful assistant;a patient librarian;an assistant of the harbour office;a clerk of the town archive".split(";")
_RULES = (
    "Answer from the pages below only.",
    "Keep answers short and plain.",
    "If the pages do not say it, reply that it is not known.",
    "Name the page on which you found the answer.",
    "Do not repeat the question.",
)
_SUBJECTS = "The ferryman;An old teacher;The night watchman;My neighbour;The gardener;A young clerk;The miller's wife;The surveyor".split(
    ";"
)
_VERBS = "repaired;carried home;forgot about;described;looked for;sold;painted;returned".split(";")
_OBJECTS = "a broken lantern;two baskets of pears;the old map;a letter from the coast;the wooden bench;a pair of boots;his notebook".split(
    ";"
)
_TIMES = "before breakfast;on a cold evening;after the market had closed;while it was raining;in the first week of May;at noon".split(";")
_ENDINGS = (
    "and nobody asked why.",
    "which surprised the whole street.",
    "and then went to bed early.",
    "although the road was closed.",
    "and spoke of it for years.",
    "because the bridge had been washed away.",
)


@dataclass(frozen=True)
class Needle:
    """A fact that a text states and a question that asks for it in other words.

    Args:
        note: The sentence that states it.
        question: What is fed behind the context, up to the answer.
        answer: The answer, with the space before it.
    """

    note: str
    question: str
    answer: str


@dataclass(frozen=True)
class NeedlePrompt:
    """A context with needles, as token ids, and the question about one of them.

    Args:
        context: Token ids of the context, with the tokens that the tokenizer puts before a text.
        question: Token ids of the question.
        answer: Token ids of the answer.
        kind: What the needles are made of.
        others: Questions and answers about the context's other needles.
        continuation: How the prose goes on behind the context.
    """

    context: list[int]
    question: list[int]
    answer: list[int]
    kind: NeedleKind
    others: tuple[tuple[list[int], list[int]], ...]
    continuation: list[int]

    @property
    def needles(self) -> int:
        """How many the context has."""
        return 1 + len(self.others)


@dataclass(frozen=True)
class PromptPair:
    """Two prompts, of which the second resembles the first.

    Args:
        kind: What differs.
    """

    kind: PairKind
    earlier: list[int]
    later: list[int]


@dataclass(frozen=True)
class _Prose:
    """Sentences of a text in turn, from a place that a seed chooses."""

    sentences: Sequence[str]
    rng: random.Random
    place: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", self.rng.randrange(len(self.sentences)))

    def take(self) -> str:
        """The next sentence."""
        sentence = self.sentences[self.place % len(self.sentences)]
        object.__setattr__(self, "place", self.place + 1)
        return sentence

    def paragraph(self, tokenizer: Any, tokens: int) -> str:
        """Sentences that come to about that many tokens, the last one cut short."""
        words, rest = self.split(tokenizer, tokens, 0)
        return f"{words}." if rest else words

    def split(self, tokenizer: Any, tokens: int, following: int) -> tuple[str, str]:
        """The words of about that many tokens, and what follows them: at least so many tokens."""
        text = self.take()
        while len(ids := encode(tokenizer, text)) < tokens + following:
            text = f"{text} {self.take()}"
        words: str = tokenizer.decode(ids[: max(1, tokens)])
        # The last word may be cut within.
        words = words.rpartition(" ")[0] or words
        return (words, text[len(words) :]) if len(ids) > tokens and text.startswith(words) else (text, "")


def encode(tokenizer: Any, text: str, *, begins: bool = False) -> list[int]:
    """Token ids of a text.

    Args:
        begins: Whether it begins a prompt, so that the tokenizer puts its special tokens before it, as Gemma's needs it.
    """
    ids = list(tokenizer(text, add_special_tokens=begins, verbose=False)["input_ids"])
    # Some tokenizers end every text, too.
    return ids[:-1] if begins and ids and ids[-1] == tokenizer.eos_token_id and ids[-1] != tokenizer.bos_token_id else ids


def plain_prose(seed: int, sentences: int = 400) -> str:
    """Made-up sentences, for where no text is at hand."""
    rng = random.Random(f"prose {seed}")
    parts = (_SUBJECTS, _VERBS, _OBJECTS, _TIMES, _ENDINGS)
    return " ".join(" ".join(rng.choice(part) for part in parts) for _ in range(sentences))


def needle_prompts(
    tokenizer: Any, count: int, kind: NeedleKind, needles: int = 1, *, tokens: int = 600, seed: int = 0, prose: str | None = None
) -> list[NeedlePrompt]:
    """Contexts of prose with needles in it, each with a question about one.

    Args:
        kind: "digits": numbers of five digits. "words": who has which trade.
        needles: How many each context states; one is asked for.
        tokens: Of a context, about.
        prose: What lies around the needles; None for made-up sentences.
    """
    require_choice("kind", kind, NEEDLE_KINDS)
    whole_number("count", count, 1)
    whole_number("needles", needles, 1)
    prompts = []
    for number in range(count):
        rng = random.Random(f"needles {kind} {needles} {seed} {number}")
        facts, text = _needles(rng, kind, needles), _prose(prose, rng)
        room = max(1, tokens - sum(len(encode(tokenizer, fact.note)) for fact in facts))
        shares = [rng.uniform(0.5, 1.5) for _ in range(needles + 1)]
        lengths = [int(room * share / sum(shares)) for share in shares]
        body = "".join(f"{text.paragraph(tokenizer, length)} {fact.note} " for fact, length in zip(facts, lengths, strict=False))
        last, following = text.split(tokenizer, lengths[-1], _FOLLOWING)
        asked = rng.sample(facts, needles)
        (question, answer), *others = ((encode(tokenizer, fact.question), encode(tokenizer, fact.answer)) for fact in asked)
        context, continuation = encode(tokenizer, body + last, begins=True), encode(tokenizer, following)[:_FOLLOWING]
        prompts.append(NeedlePrompt(context, question, answer, kind, tuple(others), continuation))
    return prompts


def agent_prompts(
    tokenizer: Any, count: int, *, pages: int = 5, pool: int = 8, page_tokens: int = 120, seed: int = 0, prose: str | None = None
) -> list[list[int]]:
    """Requests of one agent, one after another: a system text, pages of a pool in a random order, and a question.

    Args:
        pages: In each prompt.
        pool: Of pages from which each prompt draws.
    """
    rng = random.Random(f"agents {seed}")
    if pages > pool:
        raise ConfigError.of("pages", f"at most pool, {pool}", pages)
    written, head = _pages(tokenizer, rng, pool, page_tokens, prose), _system(rng)
    prompts = []
    for _ in range(count):
        chosen = rng.sample(written, pages)
        asked = rng.choice(chosen)[1]
        body = "\n\n".join([head, *(page for page, _ in chosen)])
        prompts.append(encode(tokenizer, f"{body}\n\n{asked.question.strip()}", begins=True))
    return prompts


def prompt_pairs(
    tokenizer: Any, count: int, kind: PairKind, *, pages: int = 6, page_tokens: int = 100, seed: int = 0, prose: str | None = None
) -> list[PromptPair]:
    """Pairs of prompts of a server.

    Args:
        kind: What the later prompt has in place of the earlier one's: "words": single words. "paragraph": one page and no more.
            "pages": half of the pages.
        pages: In each prompt.
    """
    require_choice("kind", kind, PAIR_KINDS)
    pairs = []
    for number in range(count):
        rng = random.Random(f"pairs {kind} {seed} {number}")
        written, head = _pages(tokenizer, rng, 2 * pages, page_tokens, prose), _system(rng)
        before, spare = written[:pages], written[pages:]
        after, asked = list(before), before[0][1]
        if kind != "words":
            changed = rng.sample(range(1, pages), 1 if kind == "paragraph" else pages // 2)
            for index in changed:
                after[index] = spare[index]
        earlier, later = ("\n\n".join([head, *(page for page, _ in side), asked.question.strip()]) for side in (before, after))
        if kind == "words":
            later = _with_other_words(rng, later)
        pairs.append(PromptPair(kind, encode(tokenizer, earlier, begins=True), encode(tokenizer, later, begins=True)))
    return pairs


def _needles(rng: random.Random, kind: NeedleKind, count: int) -> list[Needle]:
    """Facts about different people and places."""
    people, places = rng.sample(_PEOPLE, count), rng.sample(_PLACES, count)
    if kind == "digits":
        numbers = ["".join(rng.choice("0123456789") for _ in range(5)) for _ in range(count)]
        return [
            Needle(
                f"Remember this: the secret key number of the {place} is {number}. That is important.",
                f"\n\nWhoever wants to open the {place} has to enter its number, which is",
                f" {number}",
            )
            for place, number in zip(places, numbers, strict=True)
        ]
    towns, trades = rng.sample(_TOWNS, count), rng.sample(_TRADES, count)
    return [
        Needle(
            f"{person} works as a {trade} in {town}.",
            f"\n\nQuestion: How does {person} earn a living?\nAnswer: {person} is a",
            f" {trade}",
        )
        for person, town, trade in zip(people, towns, trades, strict=True)
    ]


def _pages(tokenizer: Any, rng: random.Random, count: int, tokens: int, prose: str | None) -> list[tuple[str, Needle]]:
    """Pages with a heading, prose and a fact each, and the facts."""
    text, pages = _prose(prose, rng), []
    for number, fact in enumerate((_needles(rng, rng.choice(NEEDLE_KINDS), 1)[0] for _ in range(count)), 1):
        half = max(1, (tokens - len(encode(tokenizer, fact.note))) // 2)
        before, after = text.paragraph(tokenizer, half), text.paragraph(tokenizer, half)
        pages.append((f"# Page {number}\n{before} {fact.note} {after}", fact))
    return pages


def _system(rng: random.Random) -> str:
    return " ".join([f"You are {rng.choice(_ROLES)}.", *rng.sample(_RULES, 4)])


def _with_other_words(rng: random.Random, text: str, words: int = 4) -> str:
    """The text with a few long words replaced by others."""
    pieces = re.split(r"(\s+)", text)
    long = [index for index, piece in enumerate(pieces) if piece.isalpha() and piece.islower() and len(piece) > 4]
    for index in rng.sample(long, min(words, len(long))):
        pieces[index] = rng.choice("copper quiet golden narrow distant gentle hollow silver".split())
    return "".join(pieces)


def _prose(prose: str | None, rng: random.Random) -> _Prose:
    text = plain_prose(rng.randrange(1 << 30)) if prose is None else prose
    sentences = [" ".join(sentence.split()) for sentence in re.split(r"(?<=[.!?])\s+", text)]
    kept = [sentence for sentence in sentences if len(sentence) > 8]
    if not kept:
        raise ConfigError.of("prose", "a text of sentences", text[:80], "Leave it out for made-up sentences.")
    return _Prose(kept, rng)
