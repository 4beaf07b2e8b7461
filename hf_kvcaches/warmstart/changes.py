"""Compare two texts word by word, and find the differences that may change the answer.

Similar prompts may ask for opposite things: a `not`, another digit, another name. The word lists are English. In other languages and
scripts the checks err on the safe side: digits are recognised in any script, and a word in no list is content. What each list and each kind
of risk contributes is measured in docs/benchmarks/warmstart-words.md.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import numpy as np

from hf_kvcaches.reuse.alignment import align
from hf_kvcaches.reuse.tokens import common_prefix
from hf_kvcaches.warmstart import words as lists

Risk = Literal["numbers", "names", "negations", "logic", "quotations", "code", "links", "units"]

# A word includes characters that join its parts without a space: it's, well-known, 3.14, 12:30, a_name, page.txt, someone@example.org, https://example.org/a.
# All patterns begin with a set of characters, which makes the search fast.
_WORD = re.compile(r"\w+(?:://\S+|(?:(?:['\u2019._@-]|(?<=\d)[,:/](?=\d))\w+)*)|\S")
_NUMBER = re.compile(r"[-+.\u2212\u00b1]?\d+(?:[.,:/'\u2019\u2212-]?\d+)*[%\u2030\u00b0]?")
# Longer quotations are direct speech.
_QUOTED = re.compile("[\u201c\u201e\u00ab\u300c][^\u201c\u201d\u00bb\u300d]{0,100}[\u201c\u201d\u00bb\u300d]")
_SINGLE = re.compile("['\u2018](?<!\\w['\u2018])[^'\u2019\n]{1,100}['\u2019](?!\\w)")
_OPERATORS = frozenset("=<>+*/\\|&^~@{}[]#_`")
_SIGNS = _OPERATORS | set("()%\u2030")  # not punctuation, despite their category
_QUOTES = frozenset('"\u201c\u201d\u201e\u00ab\u00bb\u2039\u203a\u300c\u300d\u300e\u300f')
# An anchor is this many consecutive equal words. Words between two anchors are compared if they form at most `_PAIRS` pairs.
_ANCHOR = 3
_PAIRS = 2500

Words = list[re.Match[str]]


@dataclass(frozen=True)
class TextChanges:
    """The kinds of risk in what differs between two texts, each with its first example, and the words of content in it."""

    risks: tuple[tuple[Risk, str], ...] = ()
    content: tuple[str, ...] = ()


def changes(source: str, target: str, *, stop: bool = False) -> TextChanges:
    """Compare two texts; with `stop` only until the first risk, from the end, where the question is.

    Without `stop`, texts with little in common take long.
    """
    if source == target:
        return TextChanges()
    content: list[str] = []
    middle = _middle(source, target)
    risks: dict[Risk, str] = {}
    for risk, before, after in _listed(source, target, middle):
        if before != after:
            risks.setdefault(risk, _became(*next((a, b) for a, b in zip_longest(before, after, fillvalue="") if a != b)))
            if stop:
                return TextChanges(tuple(risks.items()))
    gaps = _gaps(source, target, middle)
    for a, b in (pair for gap in (reversed(gaps) if stop else gaps) for pair in _refined(*gap)):
        before, after = ([match[0] for match in side] for side in (a, b))
        for risk in _risks(a, b):
            risks.setdefault(risk, _became(" ".join(before), " ".join(after)))
            if stop:
                return TextChanges(tuple(risks.items()), tuple(content))
        content += content_words(before + after)
    return TextChanges(tuple(risks.items()), tuple(content))


def content_words(words: Iterable[str]) -> list[str]:
    """Return the words that are neither small words nor punctuation, in order."""
    return [word for word in words if word.lower() not in lists.SMALL and not all(map(_is_punctuation, word))]


def _is_punctuation(char: str) -> bool:
    return unicodedata.category(char)[0] in "PZ" and char not in _SIGNS


def _middle(source: str, target: str) -> tuple[int, int, int]:
    """Return where two texts begin to differ, and where the common end begins in each; all at spaces."""
    # A lone surrogate can be in a string, though not in UTF-32.
    a, b = (np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32) for text in (source, target))
    head = common_prefix(a, b)
    tail = common_prefix(a[head:][::-1], b[head:][::-1])
    while head and not source[head - 1].isspace():
        head -= 1
    while tail and not source[len(source) - tail].isspace():
        tail -= 1
    return head, len(source) - tail, len(target) - tail


def _listed(source: str, target: str, middle: tuple[int, int, int]) -> Iterator[tuple[Risk, list[str], list[str]]]:
    """Yield the strings of each text that must be equal, spacing included, whatever the words around them."""
    start, source_stop, target_stop = middle
    yield "numbers", _NUMBER.findall(source, start, source_stop), _NUMBER.findall(target, start, target_stop)
    # Code and quotations may begin before the first difference.
    yield "code", source.split("```")[1::2], target.split("```")[1::2]
    yield "code", _between(source, "`"), _between(target, "`")
    yield "quotations", _between(source, '"'), _between(target, '"')
    for pattern in (_QUOTED, _SINGLE):
        yield "quotations", pattern.findall(source), pattern.findall(target)


def _between(text: str, mark: str) -> list[str]:
    # These marks have no direction, so any two may be a pair.
    return [quoted for quoted in text.split(mark)[1:-1] if len(quoted) <= 100]


def _became(before: str, after: str) -> str:
    return " became ".join(repr(text if len(text) <= 60 else f"{text[:57]}...") for text in (before, after))


def _gaps(source: str, target: str, middle: tuple[int, int, int]) -> list[tuple[Words, Words]]:
    """Return the words of both texts between successive anchors."""
    start, source_stop, target_stop = middle
    a, b = list(_WORD.finditer(source, start, source_stop)), list(_WORD.finditer(target, start, target_stop))
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
    """Yield the words that differ between two anchors, ignoring capitals at the start of a sentence."""
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


def _risks(a: Words, b: Words) -> Iterator[Risk]:
    """Yield the risks of words in one text that replace words in the other."""
    counts = [Counter(match[0].lower().replace("\u2019", "'") for match in side) for side in (a, b)]
    before, after = map(set, counts)
    for word in before | after:
        yield from _risks_of(word)
    names = [{match[0] for match in side if _is_name(match[0])} for side in (a, b)]
    inside = any(not _starts_sentence(match) for match in (*a, *b) if _is_name(match[0]))
    # Two capitalised words that replace each other at the start of a sentence may be names.
    if inside or (names[0] and names[1] and names[0] != names[1]):
        yield "names"
    more_or_fewer = any(counts[0][word] != counts[1][word] for word in lists.LOGIC & (before | after))
    if more_or_fewer or any(before & kind and after & kind and before & kind != after & kind for kind in lists.SWAPPED):
        yield "logic"


def _risks_of(word: str) -> Iterator[Risk]:
    """Yield the risks of a word in lower case."""
    categories = set(map(unicodedata.category, word))
    if any(char.isnumeric() for char in word) or not lists.NUMBERS.isdisjoint(re.split("[-']", word)):
        yield "numbers"
    if word in lists.NEGATIONS or word.endswith("n't") or word.startswith("non-"):
        yield "negations"
    if "Sc" in categories or not set("%\u2030\u00b0").isdisjoint(word):
        yield "units"
    if not _QUOTES.isdisjoint(word):
        yield "quotations"
    if "://" in word or "@" in word or re.search(r"\w\.\w", word):
        yield "links"
    if "Sm" in categories or not _OPERATORS.isdisjoint(word):
        yield "code"


def _is_name(word: str) -> bool:
    """Whether a word is capitalised and no small word; US is not us."""
    return any(char.isupper() for char in word) and (bool(content_words([word])) or (word.isupper() and len(word) > 1))
