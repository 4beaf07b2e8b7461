"""Pairs of prompts that resemble each other, with questions: what a cache that answers from a similar prompt's state is measured on.

The target of a pair is the source with one kind of change. The kinds differ in whether the source's state may stand in for the target's:
`changed_fact`, `changed_digit` and every other pair of `negated` have another true answer, so that a cache which takes the two for the same
tells the stale one. The prompts keep to the form of `documents.py`, so the testbed's models answer the questions from the target alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from tests import testbed
from tests.testbed.agents import Part, Request
from tests.testbed.documents import DIGITS, NAMES, PREAMBLES, RULES, VALUES, WORDINGS, Document, Fact, Filler, make_document

Kind = Literal[
    "identical",
    "no_content",
    "few_words",
    "reworded",
    "reordered_notes",
    "reordered_tools",
    "changed_fact",
    "changed_digit",
    "negated",
    "unrelated",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
Asks = Literal["same", "other"]

_QUESTIONS = 4
# wording -> a note that says what the value is not. Each puts it so that the words before the value are not those of the question: a model
# this small overlooks the `not` in `The seal of Ruth is not lion`.
_DENIALS = {
    "repeated": "- The {value} is not the {attribute} of {name}.",
    "chosen": "- As {attribute}, {name} did not want the {value}.",
    "reworded": "- Now the {value} is not the {attribute} that {name} has.",
    "inverted": "- For {name} they did not make the {value} {attribute}.",
    "digits": "- Not {value} is the number of {name}.",
}
# Without content: what may stand for what, or be left out or put in.
_ARTICLES = {"the": "a", "a": "the"}


# Words of five letters and more that only hold others together, deny or count.
_SMALL_WORDS = frozenset(
    (
        "about above across after again against almost along already although always among another around because become before behind "
        "being below beneath beside besides between beyond cannot could doing during either every except exactly fifteen fifty first forty "
        "half having hardly herself himself however hundred indeed inside instead itself least might million moment moments month months "
        "morrow myself nearly neither never night nights nothing nobody nowhere often other others ought ourselves outside perhaps quite "
        "rather really scarcely second seven several shall should simply since sixty sometimes still their theirs themselves there "
        "therefore these third thirty those though thousand three through throughout together towards toward twelve twenty twice under "
        "until unless usually when whenever where whether which while whole whose within without would years yourself minute minutes hours "
        "eight eleven quarter dozen degree degrees evening afternoon yesterday tomorrow today couple pounds miles yards inches refused "
        "refuse denied failed false falsely stopped wrong absent previous single double pound until weeks april march"
    ).split()
)


@dataclass(frozen=True)
class Pair:
    """Two prompts and what is asked of the second.

    Attributes:
        kind: How they differ.
        asks: `same`: both end with the same question. `other`: the source ends with a question about another fact.
        source: The prompt that came earlier, with its own questions.
        target: The prompt that resembles it. If the kind changes an answer, the first question is about that.
        source_text: The text of `source.prompt`.
        target_text: The text of `target.prompt`.
        stale: For each of the target's questions the tokens of the answer by the source's text; None where the source does not tell.
    """

    kind: Kind
    asks: Asks
    source: Request
    target: Request
    source_text: str
    target_text: str
    stale: tuple[list[int] | None, ...]

    @property
    def changes_answer(self) -> bool:
        """Whether the source's answer to the first question is wrong for the target."""
        start, stop = self.target.answers[0]
        return self.stale[0] is not None and self.stale[0] != self.target.continuation[start:stop]


class _Writer:
    """Documents of a length, and prompts from them."""

    def __init__(self, tokenizer: Any, rng: random.Random) -> None:
        self.tokenizer = tokenizer
        self.rng = rng
        # No fact's name stands in the prose.
        names = set(NAMES)
        words = [word for word in testbed.held_out().split() if word.strip(".,;:!?\"'()_-") not in names and "Gutenberg" not in word]
        self.filler = Filler(" ".join(words))
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self._known[text]

    def count(self, document: Document) -> int:
        """Tokens up to the end of the longest question."""
        longest = max(len(self.encode(fact.question)) for fact in document.facts)
        return sum(len(self.encode(text)) for text in (document.head(), _notes(document), "Questions:\n")) + longest

    def document(self, length: int, shape: dict[str, Any]) -> Document:
        """A document whose prompt has at most that many tokens and not many fewer."""
        seed = self.rng.random()

        def made(words: int) -> Document:
            return make_document(random.Random(seed), self.filler, filler_words=words, **shape)

        low, high = 0, length
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.count(made(middle)) <= length else (low, middle)
        return self._private(made(low))

    def _private(self, document: Document) -> Document:
        """The same document with values that differ from one another and stand nowhere else in the text."""
        told = f"{document.head()} {' '.join(document.paragraphs)}".lower()
        used: set[str] = set()
        for index, fact in enumerate(document.facts):
            value = self.value(fact, lambda value: value in used or value in told)
            used.add(value)
            document = document.with_value(index, value)
        return document

    def value(self, fact: Fact, taken: Callable[[str], bool]) -> str:
        """A value of the fact's kind that is not taken."""
        while True:
            value = " ".join(self.rng.choice(DIGITS) for _ in range(3)) if fact.wording == "digits" else self.rng.choice(VALUES)
            if not taken(value):
                return value

    def request(self, document: Document, asked: Sequence[int], kind: str, index: int, step: int) -> tuple[Request, str]:
        """The prompt with these questions, and its text."""
        ids: list[int] = []
        parts: list[Part] = []
        text = ""
        facts = [document.facts[each] for each in asked]
        for name, key, piece in [*_pieces(document), ("scaffold", "questions", "Questions:\n"), ("question", "first", facts[0].question)]:
            start = len(ids)
            ids += self.encode(piece)
            text += piece
            parts.append(Part(name, key, step, start, len(ids)))
        continuation: list[int] = []
        answers = []
        for fact in facts:
            if continuation:
                continuation += self.encode(f".\n{fact.question}")
            answer = self.encode(fact.answer)
            answers.append((len(continuation), len(continuation) + len(answer)))
            continuation += answer
        where = ("page",) * len(facts)
        return Request(ids, continuation, answers, tuple(facts), where, kind, index, step, tuple(parts)), text


def _pieces(document: Document) -> list[tuple[str, str, str]]:
    """(kind, key, text) up to the questions, each piece whole lines."""
    pieces = [("scaffold", "head", document.head())]
    for index, paragraph in enumerate(document.paragraphs):
        if paragraph:
            pieces.append(("text", f"text {index}", f"{paragraph}\n"))
        if index < len(document.facts):
            pieces.append(("fact", document.facts[index].question, "".join(document.facts[index].note) + "\n"))
    return pieces


def _notes(document: Document) -> str:
    return "".join(text for _, _, text in _pieces(document)[1:])


def _shape(kind: Kind, length: int) -> dict[str, Any]:
    """What a document of the kind is made of."""
    facts = 2 if length < 160 else 4 if length < 500 else 6 if length < 800 else 8
    tools = 3 if length >= 300 else 2 if kind == "reordered_tools" else 0
    wordings = tuple(WORDINGS)
    if kind == "changed_fact":
        wordings = ("repeated", "chosen", "reworded", "inverted")
    if kind == "changed_digit":
        wordings = ("digits",)
    return {"facts": facts, "tools": tools, "rules": 2 if length >= 300 else 1, "wordings": wordings}


# What makes the target's document from the source's. `first` is the fact of the target's first question.


def _same(writer: _Writer, source: Document, first: int) -> Document:
    return source


def _reworded(writer: _Writer, source: Document, first: int) -> Document:
    rng = writer.rng
    others = [preamble for preamble in PREAMBLES if preamble != source.preamble]
    rules = [rule for rule in RULES if rule not in source.rules]
    return replace(source, preamble=rng.choice(others), rules=tuple(rng.sample(rules, len(source.rules))))


def _shuffled(rng: random.Random, items: int) -> list[int]:
    """Another order."""
    order = list(range(items))
    while order == sorted(order):
        rng.shuffle(order)
    return order


def _reordered_notes(writer: _Writer, source: Document, first: int) -> Document:
    """Each fact moves together with the paragraph before it."""
    order = _shuffled(writer.rng, len(source.facts))
    paragraphs = [*(source.paragraphs[i] for i in order), *source.paragraphs[len(order) :]]
    return replace(source, paragraphs=tuple(paragraphs), facts=tuple(source.facts[i] for i in order))


def _reordered_tools(writer: _Writer, source: Document, first: int) -> Document:
    return replace(source, tools=tuple(source.tools[i] for i in _shuffled(writer.rng, len(source.tools))))


def _with_words(source: Document, change: Callable[[list[str], int], None], places: Sequence[tuple[int, int]]) -> Document:
    """The document with `change` done to the words of its paragraphs at these places, (paragraph, word); the last place first."""
    paragraphs = [paragraph.split(" ") for paragraph in source.paragraphs]
    for paragraph, word in sorted(places, reverse=True):
        change(paragraphs[paragraph], word)
    return replace(source, paragraphs=tuple(" ".join(words) for words in paragraphs))


def _places(source: Document, fits: Callable[[str], bool]) -> list[tuple[int, int]]:
    """Places of words of the prose: neither the first nor the last of a paragraph."""
    found = []
    for index, paragraph in enumerate(source.paragraphs):
        words = paragraph.split(" ")
        found += [(index, place) for place in range(1, len(words) - 1) if fits(words[place])]
    return found


def _is_content(word: str) -> bool:
    """Whether it is a word of the prose that carries content, and neither a value nor a number."""
    return word.isascii() and word.isalpha() and word.islower() and len(word) > 4 and word not in VALUES and word not in _SMALL_WORDS


def _few_words(writer: _Writer, source: Document, first: int) -> Document:
    """One to four words of the prose become others, of any number of tokens."""
    rng = writer.rng
    places = _places(source, _is_content)

    def other(words: list[str], place: int) -> None:
        before = words[place]
        while words[place] == before or not _is_content(words[place]):
            words[place] = rng.choice(writer.filler.words)

    return _with_words(source, other, rng.sample(places, min(rng.randint(1, 4), len(places))))


def _no_content(writer: _Writer, source: Document, first: int) -> Document:
    """One to three times another article, a comma more or less, or a second space, in the prose."""
    rng = writer.rng
    places = _places(source, lambda word: word in _ARTICLES or word.isalpha() or word.rstrip(",").isalpha())

    def slight(words: list[str], place: int) -> None:
        word = words[place]
        if word in _ARTICLES:
            words[place] = _ARTICLES[word]
        elif word.endswith(","):
            words[place] = word[:-1]
        else:
            words[place] += rng.choice((",", " "))

    return _with_words(source, slight, rng.sample(places, min(rng.randint(1, 3), len(places))))


def _changed_fact(writer: _Writer, source: Document, first: int) -> Document:
    told = _notes(source).lower() + source.head().lower()
    return source.with_value(first, writer.value(source.facts[first], lambda value: value in told))


def _changed_digit(writer: _Writer, source: Document, first: int) -> Document:
    told = _notes(source)
    digits = source.facts[first].value.split(" ")
    place = writer.rng.randrange(3)
    while " ".join(digits) in told:
        digits[place] = writer.rng.choice(DIGITS)
    return source.with_value(first, " ".join(digits))


def _denied(fact: Fact, value: str) -> str:
    return _DENIALS[fact.wording].format(attribute=fact.attribute, name=fact.name, value=value)


def _paragraph(*lines: str) -> str:
    return "\n".join(line for line in lines if line)


def _negated_source(writer: _Writer, source: Document, first: int) -> tuple[Document, str]:
    """The document with another line behind the fact that says what its value is not, and that other value."""
    told = _notes(source).lower() + source.head().lower()
    other = writer.value(source.facts[first], lambda value: value in told)
    paragraphs = [*source.paragraphs, *[""] * (first + 2 - len(source.paragraphs))]
    paragraphs[first + 1] = _paragraph(_denied(source.facts[first], other), paragraphs[first + 1])
    return replace(source, paragraphs=tuple(paragraphs)), other


def _other_way_round(source: Document, first: int, other: str) -> Document:
    """The first of the two lines denied, the second affirmed."""
    fact = source.facts[first]
    paragraphs = list(source.paragraphs)
    paragraphs[first + 1] = "\n".join(paragraphs[first + 1].split("\n")[1:])
    paragraphs[first] = _paragraph(paragraphs[first], _denied(fact, fact.value))
    return replace(source, paragraphs=tuple(paragraphs)).with_value(first, other)


def _one_not(writer: _Writer, source: Document, first: int) -> Document:
    """A `not` more in the prose; no answer hangs on it."""
    places = _places(source, str.isalpha)
    return _with_words(source, lambda words, place: words.insert(place, "not"), [writer.rng.choice(places)])


_CHANGES: dict[Kind, Callable[[_Writer, Document, int], Document]] = {
    "identical": _same,
    "no_content": _no_content,
    "few_words": _few_words,
    "reworded": _reworded,
    "reordered_notes": _reordered_notes,
    "reordered_tools": _reordered_tools,
    "changed_fact": _changed_fact,
    "changed_digit": _changed_digit,
}


def _documents(writer: _Writer, kind: Kind, index: int, length: int) -> tuple[Document, Document, int]:
    """The two documents of a pair, and the fact of the target's first question."""
    shape = _shape(kind, length)
    # The line that says what is not takes room, too.
    negated = kind == "negated" and index % 2 == 0
    source = writer.document(length - (16 if negated else 0), shape)
    while not _places(source, _is_content):
        # All prose is at the edges of paragraphs, where there is little of it.
        source = writer.document(length - (16 if negated else 0), shape)
    first = writer.rng.randrange(shape["facts"])
    if negated:
        source, other = _negated_source(writer, source, first)
        return source, _other_way_round(source, first, other), first
    if kind == "negated":
        return source, _one_not(writer, source, first), first
    if kind == "unrelated":
        return source, writer.document(length, shape), first
    target = _CHANGES[kind](writer, source, first)
    return source, target, next(i for i, fact in enumerate(target.facts) if fact.question == source.facts[first].question)


def make_pairs(tokenizer: Any, kind: Kind, count: int, seed: int = 0, length: int = 600, *, asks: Asks = "same") -> list[Pair]:
    """Pairs of prompts of one kind.

    Args:
        tokenizer: The testbed's.
        kind: How the target differs from the source. `identical`: not at all. `no_content`: an article, a comma or a space of the
            prose. `few_words`: some words of the prose. `reworded`: another preamble, other rules. `reordered_notes`,
            `reordered_tools`: the same in another order. `changed_fact`: the value asked for is another word; `changed_digit`: one of
            its digits is another. `negated`: every other pair has one line that tells the value and one that says what it is not, and in
            the target the first is denied and the second told, so that the answer changes; the rest have a `not` more in the prose,
            where nothing hangs on it.
            `unrelated`: another document altogether.
        count: How many.
        seed: What everything follows from.
        length: The most tokens of a prompt, 128 to 900; some kinds are a few tokens longer in the target.
        asks: Whether the source ends with the `same` question, or one about an `other` fact.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if not 128 <= length <= 900:
        raise ValueError(f"length: expected 128 to 900, got {length}; the models know no more than 1,024 tokens, questions included")
    if asks not in get_args(Asks):
        raise ValueError(f"asks: expected 'same' or 'other', got {asks!r}")
    rng = random.Random(f"pairs {kind} {seed} {length} {asks}")
    writer = _Writer(tokenizer, rng)
    pairs: list[Pair] = []
    for index in range(count):
        before, after, first = _documents(writer, kind, index, length)
        others = [i for i in range(len(after.facts)) if i != first]
        asked = [first, *rng.sample(others, min(_QUESTIONS - 1, len(others)))]
        target, target_text = writer.request(after, asked, kind, index, 1)
        told = {fact.question: fact for fact in before.facts}
        # By question, since notes may have moved.
        questions = [after.facts[i].question for i in asked] if kind != "unrelated" else [fact.question for fact in before.facts]
        if asks == "other":
            questions = [*questions[1:], questions[0]]
        places = [next(i for i, fact in enumerate(before.facts) if fact.question == question) for question in questions]
        source, source_text = writer.request(before, places[:_QUESTIONS], kind, index, 0)
        stale = [told.get(after.facts[i].question) for i in asked]
        answers = tuple(writer.encode(fact.answer) if fact else None for fact in stale)
        pairs.append(Pair(kind, asks, source, target, source_text, target_text, answers))
    return pairs
