"""`changes`: what differs between two texts, word by word, and which of it may change the answer.

Prompts that are similar by any measure may ask for the opposite: a `not`, another digit, another name. The word lists are English. In
other languages and scripts the checks err on the safe side: digits are digits in any script, and a word that no list has is content.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np

from hf_kvcaches.core.splicing.alignment import Ids, align
from hf_kvcaches.core.splicing.tokens import common_prefix
from hf_kvcaches.warmstart import words as lists

Risk = Literal["numbers", "names", "negations", "opposites", "logic", "quotations", "code", "links", "units"]

# A word keeps what joins it without a space: it's, well-known, 3.14, 12:30, a_name, page.txt, someone@example.org. All patterns begin with
# a set of characters, which is what makes the search fast.
_WORD = re.compile(r"\w+(?:(?:['\u2019._@-]|(?<=\d)[,:/](?=\d))\w+)*|\S")
_NUMBER = re.compile(r"[-+.\u2212\u00b1]?\d+(?:[.,:/'\u2019\u2212-]?\d+)*[%\u2030\u00b0]?")
_QUOTED = re.compile("[\u201c\u201e\u00ab\u300c][^\u201c\u201d\u00bb\u300d]{0,100}[\u201c\u201d\u00bb\u300d]")
_SINGLE = re.compile("['\u2018](?<!\\w['\u2018])[^'\u2019\n]{1,100}['\u2019](?!\\w)")
# Longer ones are prose that somebody speaks. Without direction any two marks may be a pair.
_LONGEST_QUOTATION = 100
_LINK = re.compile(r"\S*(?:://|www\.|\w@\w)\S*")
_CAMEL = re.compile(r"[a-z][A-Z]|^\w+\($")
_OPERATORS = frozenset("=<>+*/\\|&^~@{}[]#_`")
_QUOTES = frozenset('"\u201c\u201d\u201e\u00ab\u00bb\u2039\u203a\u300c\u300d\u300e\u300f')
# This many equal words in a row are an anchor; the words between two anchors are compared up to this many pairs.
_ANCHOR = 3
_PAIRS = 2500

Words = list[re.Match[str]]


class ChangedSpan(NamedTuple):
    """One place where two texts differ: the words on either side."""

    before: tuple[str, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        return _became(" ".join(self.before), " ".join(self.after))


@dataclass(frozen=True)
class TextChanges:
    """Where two texts differ, in order; the kinds of risk among that, each with its first example; the words of content in it."""

    spans: tuple[ChangedSpan, ...] = ()
    risks: tuple[tuple[Risk, str], ...] = ()
    content: tuple[str, ...] = ()


def changes(source: str, target: str, *, stop: bool = False) -> TextChanges:
    """Compare two texts; with `stop` only up to the first risk, from the end, where the question is.

    Texts that have little in common take long without `stop`.
    """
    risks: dict[Risk, str] = {}
    spans: list[ChangedSpan] = []
    content: list[str] = []
    for span, examples in _differences(source, target, backwards=stop) if source != target else ():
        spans += [span] if span else []
        for risk, example in examples:
            risks.setdefault(risk, example)
            if stop:
                return TextChanges(tuple(spans), tuple(risks.items()), tuple(content))
        content += content_words(span.before + span.after) if span else []
    return TextChanges(tuple(spans), tuple(risks.items()), tuple(content))


def content_words(words: Iterable[str]) -> list[str]:
    """Return the words that are neither small words nor punctuation, in order."""
    return [word for word in words if word.lower() not in lists.SMALL and not _is_small(word)]


def _is_small(word: str) -> bool:
    if any(char.isalnum() for char in word):
        return all(stem in lists.SMALL or stem in lists.ENDINGS for stem in re.split("['\u2019]", word.lower()))
    # Marks, signs, emoji and invisible characters are no punctuation.
    return all(unicodedata.category(char)[0] in "PZ" or char in _OPERATORS or char in "$%" for char in word)


def _differences(source: str, target: str, backwards: bool) -> Iterator[tuple[ChangedSpan | None, Iterable[tuple[Risk, str]]]]:
    """Yield places that differ with their risks; None for what is compared over the whole text."""
    middle = _middle(source, target)
    for risk, before, after in _listed(source, target, middle):
        if before != after:
            yield None, [(risk, _first_difference(before, after))]
    gaps = _gaps(source, target, middle)
    for gap in reversed(gaps) if backwards else gaps:
        for a, b in _refined(*gap):
            span = ChangedSpan(tuple(match[0] for match in a), tuple(match[0] for match in b))
            yield span, ((risk, str(span)) for risk in _risks(span, a, b))


class _Middle(NamedTuple):
    """Where two texts differ, from the first difference to the last, cut at spaces."""

    start: int
    source_stop: int
    target_stop: int


def _middle(source: str, target: str) -> _Middle:
    a, b = (_characters(text) for text in (source, target))
    head = common_prefix(a, b)
    tail = common_prefix(a[head:][::-1], b[head:][::-1])
    while head and not source[head - 1].isspace():
        head -= 1
    while tail and not source[len(source) - tail].isspace():
        tail -= 1
    return _Middle(head, len(source) - tail, len(target) - tail)


def _characters(text: str) -> Ids:
    # A lone surrogate can be in a string, though not in UTF-32.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64)


def _listed(source: str, target: str, middle: _Middle) -> Iterator[tuple[Risk, Sequence[str], Sequence[str]]]:
    """Yield what must be the same in both texts, whatever the words around it, spacing included."""
    ends = ((source, middle.source_stop), (target, middle.target_stop))
    before, after = ([match[0] for match in _NUMBER.finditer(text, middle.start, stop)] for text, stop in ends)
    yield "numbers", before, after
    if any(sign in text for text in (source, target) for sign in ("://", "www.", "@")):
        before, after = (_LINK.findall(text, middle.start, stop) for text, stop in ends)
        yield "links", before, after
    # These may have begun before the first difference.
    if "```" in source or "```" in target:
        yield "code", source.split("```")[1::2], target.split("```")[1::2]
    marks: tuple[tuple[Risk, str], ...] = (("code", "`"), ("quotations", '"'))
    for risk, mark in marks:
        if mark in source or mark in target:
            yield risk, _between(source, mark), _between(target, mark)
    for pattern in (_QUOTED, _SINGLE):
        yield "quotations", pattern.findall(source), pattern.findall(target)


def _between(text: str, mark: str) -> list[str]:
    return [quoted for quoted in text.split(mark)[1:-1] if len(quoted) <= _LONGEST_QUOTATION]


def _first_difference(before: Sequence[str], after: Sequence[str]) -> str:
    return _became(*next((a, b) for a, b in zip_longest(before, after, fillvalue="") if a != b))


def _became(before: str, after: str) -> str:
    return " became ".join(repr(text if len(text) <= 60 else f"{text[:57]}...") for text in (before, after))


def _gaps(source: str, target: str, middle: _Middle) -> list[tuple[Words, Words]]:
    """Return the words between anchors, place by place."""
    a = list(_WORD.finditer(source, middle.start, middle.source_stop))
    b = list(_WORD.finditer(target, middle.start, middle.target_stop))
    numbers: dict[str, int] = {}
    rows = [np.array([numbers.setdefault(match[0], len(numbers)) for match in side], np.int64) for side in (a, b)]
    gaps = []
    i = j = 0
    for source_index, target_index, length in [*align(rows[0], rows[1], _ANCHOR), (len(a), len(b), 0)]:
        if source_index > i or target_index > j:
            gaps.append((a[i:source_index], b[j:target_index]))
        i, j = source_index + length, target_index + length
    return gaps


def _refined(a: Words, b: Words) -> Iterator[tuple[Words, Words]]:
    """Yield the words that differ between two anchors; a capital at the start of a sentence is no difference."""
    if not a or not b or len(a) * len(b) > _PAIRS:
        yield a, b
        return
    before, after = (
        [match[0].lower() if match[0].istitle() and _starts_sentence(match) else match[0] for match in side] for side in (a, b)
    )
    for tag, i, j, k, n in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            yield a[i:j], b[k:n]


def _starts_sentence(match: re.Match[str]) -> bool:
    before = match.string[: match.start()].rstrip(" \t\"'\u201c\u2018(*#>-\u2022")
    return not before or before[-1] in ".!?:\n\r\u2026\u3002"


def _risks(span: ChangedSpan, a: Words, b: Words) -> Iterator[Risk]:
    before, after = ({word.lower().replace("\u2019", "'") for word in side} for side in span)
    for word in before | after:
        yield from _risks_of(word)
    for match in (*a, *b):
        yield from _risks_in_place(match)
    names = [{match[0] for match in side if _is_name(match[0])} for side in (a, b)]
    inside = any(not _starts_sentence(match) for match in (*a, *b) if _is_name(match[0]))
    # The first word of a sentence may be a name where another replaces it.
    if inside or (names[0] and names[1] and names[0] != names[1]):
        yield "names"
    if _opposed(before, after) or _opposed(after, before):
        yield "opposites"
    counts = [Counter(word.lower() for word in side) for side in span]
    if any(counts[0][word] != counts[1][word] for word in (before | after) & lists.LOGIC):
        yield "logic"
    if any(before & kind and after & kind and before & kind != after & kind for kind in lists.SWAPPED):
        yield "logic"


def _risks_of(word: str) -> Iterator[Risk]:
    """Yield the risks of a word in lower case."""
    if any(char.isnumeric() for char in word) or any(stem in lists.NUMBERS for stem in re.split("[-']", word)):
        yield "numbers"
    if lists.stem(word) in lists.NEGATIONS or word.endswith("n't") or word.startswith("non-"):
        yield "negations"
    if {word, word.removesuffix("s")} & lists.UNITS or any(unicodedata.category(char) == "Sc" or char in "%\u2030\u00b0" for char in word):
        yield "units"
    if any(char in _QUOTES for char in word):
        yield "quotations"
    if not word.isalnum() and ("://" in word or "@" in word or re.search(r"\w\.\w", word)):
        yield "links"
    if any(char in _OPERATORS or unicodedata.category(char) == "Sm" for char in word):
        yield "code"


def _risks_in_place(match: re.Match[str]) -> Iterator[Risk]:
    """Yield the risks of a word with its neighbours."""
    word, before, after = match[0], match.string[: match.start()], match.string[match.end() : match.end() + 1]
    # sendMail, and send in send(...).
    if _CAMEL.search(word) or (word.isidentifier() and after == "("):
        yield "code"
    if word in "()" and (before[-1:].isalnum() or after.isdigit()):
        yield "code"
    if word in lists.SHORT_UNITS and before.rstrip()[-1:].isdigit():
        yield "units"


def _is_name(word: str) -> bool:
    """Whether a word is capitalised and no small word; US is not us."""
    return any(char.isupper() for char in word) and (bool(content_words([word])) or (word.isupper() and len(word) > 1))


def _opposed(before: set[str], after: set[str]) -> bool:
    """Whether `after` has the opposite of a word of `before`."""
    stems = {lists.stem(word) for word in after}
    return any(
        not stems.isdisjoint(lists.OPPOSITES.get(lists.stem(word), ()))
        or any(prefix + word in after or f"{prefix}-{word}" in after for prefix in lists.PREFIXES)
        or f"{word.removesuffix('ful')}less" in after
        for word in before
    )
