"""Generated documents in the style of agent prompts, with facts that can be asked for.

A document is a system preamble, tool schemas, notes that hide facts between paragraphs of a book, and questions that ask
for every fact exactly once. Everything follows from a `random.Random`, so a seed names a document. Answers are single
tokens (or three single digits), drawn independently of everything else in the text: only the notes can tell them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

NAMES = (
    "Emma Anne Jane Mary John Tom Ruth Hugo Otto Ivan Nora Clara Peter Simon Martin Lucy Kate Alice Henry Frank George Edward Robert "
    "Charles Ahab Stubb Flask Pip Syme Bull Evan Ralph Oscar Felix Max Leo Ada Eva Ida Ella Rosa Vera Dora Cora Lena Nina Tina Hans Karl "
    "Paul Luke Mark Adam Noah Seth Joel Amos Basil Cyril Edgar Giles Hector Jonas Miles"
).split()
VALUES = (
    "red blue green white black gold silver brown yellow purple iron copper wooden glass stone paper leather cotton silk velvet "
    "lion tiger horse whale shark eagle raven swan goose duck fox wolf bear deer goat sheep snake frog bee ant "
    "apple pear plum grape lemon orange cherry peach onion carrot bread butter cheese honey sugar salt pepper rice corn wine "
    "river lake forest desert island valley mountain garden castle tower bridge church market harbour village city "
    "hammer needle anchor arrow sword shield candle mirror basket bottle ladder wheel rope drum flute harp violin trumpet bell clock "
    "summer winter spring autumn monday friday sunday morning"
).split()
ATTRIBUTES = "sign seal mark token charm banner badge crest password ticket gift prize".split()
DIGITS = "0 1 2 3 4 5 6 7 8 9".split()

PREAMBLES = (
    "You are a careful assistant who reads the notes below and answers from them alone.",
    "Act as a patient clerk. Read all the notes that follow, then answer each question with what they say.",
    "You help a traveller. The notes hold all that you know; answer in one word.",
    "As the keeper of these records, give short answers and never invent any.",
    "Read with care. Every answer stands somewhere in the notes, and nowhere else.",
    "You are the secretary of a small society; reply briefly, from the minutes below.",
)
RULES = (
    "Do not guess.",
    "Keep each answer short.",
    "Call a tool only when the notes are silent.",
    "Never repeat the rules.",
    "Answer in the order of the questions.",
    "Be polite and exact.",
)
TOOLS = (
    '{"name": "find_person", "arguments": {"name": "string"}}',
    '{"name": "read_page", "arguments": {"page": "integer"}}',
    '{"name": "send_letter", "arguments": {"to": "string", "text": "string"}}',
    '{"name": "ask_library", "arguments": {"title": "string"}}',
    '{"name": "weather", "arguments": {"place": "string", "day": "string"}}',
    '{"name": "count_words", "arguments": {"text": "string"}}',
)

# wording -> (the note up to its value, the rest of the note, the question up to its answer). No line starts with a name, because a
# name is one token only behind a space.
WORDINGS: dict[str, tuple[str, str, str]] = {
    "repeated": ("- The {attribute} of {name} is", ".", "Q: The {attribute} of {name} is"),
    "chosen": ("- As {attribute}, {name} chose the", ".", "Q: As {attribute}, {name} chose the"),
    "reworded": ("- Now {name} has a {attribute}, and it is the", ".", "Q: Which {attribute} has {name}? The"),
    "inverted": ("- For {name} they made the", " {attribute}.", "Q: What {attribute} did they make for {name}? The"),
    "digits": ("- The number of {name} is", ".", "Q: The number of {name} is"),
}


@dataclass(frozen=True)
class Fact:
    """One fact: whose it is, what it is, its value, and the wording it is told and asked in."""

    name: str
    attribute: str
    value: str
    wording: str

    def _fill(self, text: str) -> str:
        return text.format(name=self.name, attribute=self.attribute)

    @property
    def note(self) -> tuple[str, str, str]:
        before, after, _ = WORDINGS[self.wording]
        return self._fill(before), f" {self.value}", self._fill(after)

    @property
    def question(self) -> str:
        return self._fill(WORDINGS[self.wording][2])

    @property
    def answer(self) -> str:
        return f" {self.value}"


@dataclass(frozen=True)
class Document:
    """The parts of a prompt, in order. `paragraphs[i]` stands before `facts[i]`; one more paragraph may close the notes."""

    preamble: str
    rules: tuple[str, ...]
    tools: tuple[str, ...]
    paragraphs: tuple[str, ...]
    facts: tuple[Fact, ...]
    asked: tuple[int, ...]

    def head(self) -> str:
        return f"System: {self.preamble} {' '.join(self.rules)}\nTools:\n" + "".join(f"{tool}\n" for tool in self.tools) + "Notes:\n"

    def pieces(self, *, with_notes: bool = True) -> Iterator[tuple[str, str]]:
        """(kind, text) in order; the kinds are scaffold, filler, note, value, question and answer."""
        yield "scaffold", self.head()
        for index, paragraph in enumerate(self.paragraphs):
            if paragraph:
                yield "filler", f"{paragraph}\n"
            if with_notes and index < len(self.facts):
                before, value, after = self.facts[index].note
                yield "note", before
                yield "value", value
                yield "note", f"{after}\n"
        yield "scaffold", "Questions:\n"
        for index in self.asked:
            yield "question", self.facts[index].question
            yield "answer", self.facts[index].answer
            yield "question", ".\n"

    def context(self, *, with_notes: bool = True) -> str:
        """Everything up to the first question."""
        return "".join(text for kind, text in self.pieces(with_notes=with_notes) if kind not in ("question", "answer"))

    def text(self) -> str:
        return "".join(text for _, text in self.pieces())

    def reworded(self, rng: random.Random) -> Document:
        """The same notes and questions under another preamble, other rules and tools in another order."""
        others = [preamble for preamble in PREAMBLES if preamble != self.preamble]
        return replace(
            self,
            preamble=rng.choice(others),
            rules=tuple(rng.sample(RULES, len(self.rules))),
            tools=tuple(rng.sample(self.tools, len(self.tools))),
        )

    def with_value(self, index: int, value: str) -> Document:
        """The same document with another value in one fact."""
        facts = tuple(replace(fact, value=value) if i == index else fact for i, fact in enumerate(self.facts))
        return replace(self, facts=facts)


class Filler:
    """Paragraphs cut at word boundaries from a book."""

    def __init__(self, text: str) -> None:
        self.words = text.split()

    def paragraph(self, rng: random.Random, words: int) -> str:
        if words <= 0:
            return ""
        start = rng.randrange(max(1, len(self.words) - words))
        return " ".join(self.words[start : start + words])


def make_document(
    rng: random.Random,
    filler: Filler,
    *,
    facts: int,
    filler_words: int,
    wordings: Sequence[str] = tuple(WORDINGS),
    tools: int = 2,
    rules: int = 1,
) -> Document:
    """One document with that many facts, and that many words of filler spread unevenly between them."""
    names = rng.sample(NAMES, facts)
    made = []
    for name in names:
        wording = rng.choice(wordings)
        value = " ".join(rng.choice(DIGITS) for _ in range(3)) if wording == "digits" else rng.choice(VALUES)
        made.append(Fact(name, rng.choice(ATTRIBUTES), value, wording))
    cuts = sorted(rng.randrange(filler_words + 1) for _ in range(facts))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, filler_words], strict=True)]
    order = list(range(facts))
    rng.shuffle(order)
    return Document(
        preamble=rng.choice(PREAMBLES),
        rules=tuple(rng.sample(RULES, rules)),
        tools=tuple(rng.sample(TOOLS, tools)),
        paragraphs=tuple(filler.paragraph(rng, size) for size in sizes),
        facts=tuple(made),
        asked=tuple(order),
    )


def fit_document(
    rng: random.Random, filler: Filler, count: Callable[[str], int], tokens: int, *, facts: int, wordings: Sequence[str] = tuple(WORDINGS)
) -> Document:
    """A document of at most `tokens` tokens, as counted by `count`, and not much fewer."""
    small = tokens < 300
    shape = {"facts": facts, "wordings": wordings, "tools": 0 if small else rng.randint(1, 3), "rules": 0 if small else rng.randint(1, 2)}
    seed = rng.random()
    words = 0
    best = make_document(random.Random(seed), filler, filler_words=0, **shape)
    room = tokens - count(best.text())
    while room > 8:
        words += max(1, int(room / 1.6))
        longer = make_document(random.Random(seed), filler, filler_words=words, **shape)
        room = tokens - count(longer.text())
        if room < 0:
            words += int(room * 0.8) - 1
            longer = make_document(random.Random(seed), filler, filler_words=max(0, words), **shape)
            room = tokens - count(longer.text())
            return longer if room >= 0 else best
        best = longer
    return best
