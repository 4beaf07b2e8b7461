"""Which earlier prompt may stand in for a new one: `WarmStartGate` decides, `changes` reads what differs between their texts.

Prompts that are close by any measure of likeness may ask for the opposite: a `not`, another digit, another name. Hence what differs is
read word by word, and numbers, names, negations, opposites, quotations, code, links and units refuse a pair however much it is alike. The
lists are English. In other languages and scripts the checks err on the safe side: digits are digits in any script, a word that no list
has is content, and so is a sign that is no punctuation.
"""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from hf_kvcaches.core._model_card import markdown_table
from hf_kvcaches.core.artifact import Artifact
from hf_kvcaches.core.splicing.alignment import Ids, align
from hf_kvcaches.core.splicing.tokens import common_prefix
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.warmstart import _words as lists

Risk = Literal["numbers", "names", "negations", "opposites", "logic", "quotations", "code", "links", "units"]
Check = Literal["", "similarity", "lengths", "reusable", "content"] | Risk

# A word keeps what joins it without a space: it's, well-known, 3.14, 12:30, a_name, page.txt, someone@example.org. All patterns begin with
# a set of characters, which is what makes the search fast.
_WORD = re.compile(r"\w+(?:(?:['\u2019._@-]|(?<=\d)[,:/](?=\d))\w+)*|\S")
_NUMBER = re.compile(r"\d+(?:[.,:/'\u2019\u2212-]?\d+)*[%\u2030\u00b0]?")
_SIGNS = "-+.\u2212\u00b1"
_QUOTED = re.compile("[\u201c\u201e\u00ab\u300c][^\u201c\u201d\u00bb\u300d]{0,100}[\u201c\u201d\u00bb\u300d]")
_SINGLE = re.compile("['\u2018](?<!\\w['\u2018])[^'\u2019\n]{1,100}['\u2019](?!\\w)")
# Longer ones are prose that somebody speaks. Without direction any two marks may be a pair.
_LONGEST_QUOTATION = 100
_LINK = re.compile(r"\S*(?:://|www\.|\w@\w)\S*")
_CAMEL = re.compile(r"[a-z][A-Z]|^\w+\($")
_OPERATORS = frozenset("=<>+*/\\|&^~@{}[]#_`")
_QUOTES = frozenset('"\u201c\u201d\u201e\u00ab\u00bb\u2039\u203a\u300c\u300d\u300e\u300f')
# So many words in a row that are the same are taken for the same place; what lies between is compared word by word up to so many pairs.
_SURE = 3
_PAIRS = 2500


class ChangedSpan(NamedTuple):
    """One place where two texts differ: the words on either side."""

    before: tuple[str, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        return _became(" ".join(self.before), " ".join(self.after))


@dataclass(frozen=True)
class TextChanges:
    """What differs between two texts.

    Args:
        spans: The places, in order. Spacing is none.
        risks: Which kinds of risk are among them, each with the first place as it is told in a report.
        content: The words in them that carry content, of both sides.
    """

    spans: tuple[ChangedSpan, ...] = ()
    risks: tuple[tuple[Risk, str], ...] = ()
    content: tuple[str, ...] = ()

    @property
    def slight(self) -> bool:
        """Whether nothing differs but small words, punctuation and spacing."""
        return not self.risks and not self.content


class Verdict(NamedTuple):
    """Whether a pair is let through.

    Args:
        check: The check that refused it; empty if none did.
    """

    admitted: bool
    check: Check
    reason: str


@dataclass(frozen=True)
class WarmStartGate(Artifact):
    """When the state of an earlier prompt may answer for a new one. What is not known (None) is not checked.

    Args:
        tau: The least similarity of the two, as a cosine, for a summary.
        lengths: The least and the greatest length of the earlier prompt, as a multiple of the new one's, for a summary.
        reusable: The least share of the new prompt's tokens that stand in blocks of the earlier one, for stretches.
        content: The most words of content that may differ; None lets any number pass.
        lexical: Whether numbers, names, negations and the like that differ refuse a pair.
        encoder: The name of the encoder that `tau` was measured with, or None.
        measured: One dict of limits and measurements for each setting that was tried.
    """

    artifact_type: ClassVar[str] = "warm-start-gate"
    format_version: ClassVar[int] = 1
    may_be_infinite: ClassVar[frozenset[str]] = frozenset({"lengths"})

    tau: float = 0.9
    lengths: tuple[float, float] = (0.5, 2.0)
    reusable: float = 0.5
    content: int | None = 0
    lexical: bool = True
    encoder: str | None = None
    measured: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("tau", "reusable"):
            # A little over 1 refuses everything.
            if not -1.0 <= getattr(self, name) <= 1.01:
                raise ConfigError.of(name, "a number from -1 to 1.01", getattr(self, name))
        if len(self.lengths) != 2 or not 0 <= self.lengths[0] <= self.lengths[1]:
            raise ConfigError.of("lengths", "(least, greatest), neither negative", self.lengths, "(0.5, 2.0) allows half to twice as long.")
        if self.content is not None and self.content < 0:
            raise ConfigError.of("content", "a number of words, or None", self.content, "0 lets only small words differ.")
        object.__setattr__(self, "lengths", tuple(self.lengths))
        object.__setattr__(self, "measured", tuple(self.measured))

    def tensors(self) -> dict[str, Tensor]:
        # A file without any tensor can't be read again.
        return {"lengths": torch.tensor(self.lengths, dtype=torch.float64)}

    def metadata(self) -> dict[str, Any]:
        names = ("tau", "reusable", "content", "lexical", "encoder")
        return {name: getattr(self, name) for name in names} | {"measured": list(self.measured)}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Self:
        return cls(**metadata, lengths=tuple(tensors["lengths"].tolist()))

    def describe_calibration(self) -> str:
        return markdown_table(self.measured) or "Not calibrated."

    def decide(
        self,
        *,
        similarity: float | None = None,
        lengths: tuple[int, int] | None = None,
        reusable: float | None = None,
        changes: TextChanges | None = None,
    ) -> Verdict:
        """The verdict of the first check that refuses, cheap ones first.

        Args:
            similarity: Of the two prompts.
            lengths: Tokens of the earlier prompt and of the new one.
            reusable: Share of the new prompt's tokens that stand in blocks.
            changes: What differs between the texts.
        """
        # Written so that what is not a number is refused.
        if similarity is not None and not similarity >= self.tau:
            return Verdict(False, "similarity", f"The similarity is {similarity:.3f}, below {self.tau:g}.")
        if lengths is not None:
            ratio = lengths[0] / lengths[1] if lengths[1] else math.inf
            if not self.lengths[0] <= ratio <= self.lengths[1]:
                least, most = self.lengths
                return Verdict(False, "lengths", f"The earlier prompt is {ratio:.2f} times as long, outside {least:g} to {most:g}.")
        if reusable is not None and not reusable >= self.reusable:
            return Verdict(False, "reusable", f"{reusable:.0%} of the tokens stand in the earlier prompt, below {self.reusable:.0%}.")
        if changes is not None:
            if self.lexical and changes.risks:
                risk, example = changes.risks[0]
                return Verdict(False, risk, f"What differs touches {risk}: {example}.")
            if self.content is not None and len(changes.content) > self.content:
                words = ", ".join(changes.content[:4]) + (", ..." if len(changes.content) > 4 else "")
                return Verdict(False, "content", f"Words of content differ: {words}.")
        return Verdict(True, "", "Nothing speaks against it.")


def changes(source: str, target: str, *, stop: bool = False) -> TextChanges:
    """What differs between two texts, word by word.

    Args:
        stop: Whether the first risk is enough; texts that have little in common take long otherwise. Places are then read from the end,
            where the question is.
    """
    if source == target:
        return TextChanges()
    risks: dict[Risk, str] = {}
    middle = _middle(source, target)
    for risk, before, after in _listed(source, target, middle):
        if before != after:
            risks.setdefault(risk, _first_difference(before, after))
            if stop:
                return TextChanges((), tuple(risks.items()))
    spans = []
    content: list[str] = []
    gaps = _gaps(source, target, middle)
    for a, b in (place for gap in (reversed(gaps) if stop else gaps) for place in _refined(*gap)):
        span = ChangedSpan(tuple(m.group() for m in a), tuple(m.group() for m in b))
        spans.append(span)
        for risk in _risks(span, a, b):
            risks.setdefault(risk, str(span))
            if stop:
                return TextChanges(tuple(spans), tuple(risks.items()), tuple(content))
        content += content_words(span.before) + content_words(span.after)
    return TextChanges(tuple(spans), tuple(risks.items()), tuple(content))


def content_words(words: Iterable[str]) -> list[str]:
    """Those words that are neither small words nor punctuation, in order."""
    return [word for word in words if word.lower() not in lists.SMALL and not _is_small(word)]


def _is_small(word: str) -> bool:
    if any(char.isalnum() for char in word):
        stem = re.split("['\u2019]", word.lower())
        return all(part in lists.SMALL or part in lists.ENDINGS for part in stem)
    # Marks, signs, emoji and what can't be seen are no punctuation.
    return all(unicodedata.category(char)[0] in "PZ" or char in _OPERATORS or char in "$%" for char in word)


class _Middle(NamedTuple):
    """What stands between what two texts begin and what they end with, cut at spaces."""

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


def _listed(source: str, target: str, middle: _Middle) -> Iterator[tuple[Risk, Sequence[str], Sequence[str]]]:
    """What must be the same in both from beginning to end, whatever the words around it, spacing included."""
    ends = ((source, middle.source_stop), (target, middle.target_stop))
    before, after = (
        [(text[m.start() - 1 : m.start()] if text[m.start() - 1 : m.start()] in _SIGNS else "") + m[0] for m in found]
        for text, found in ((text, _NUMBER.finditer(text, middle.start, stop)) for text, stop in ends)
    )
    yield "numbers", before, after
    if any(sign in text for text in (source, target) for sign in ("://", "www.", "@")):
        before, after = (_LINK.findall(text, middle.start, stop) for text, stop in ends)
        yield "links", before, after
    # These may have begun before what differs.
    if "```" in source or "```" in target:
        yield "code", source.split("```")[1::2], target.split("```")[1::2]
    for risk, mark in (("code", "`"), ("quotations", '"')):
        if mark in source or mark in target:
            yield risk, _between(source, mark), _between(target, mark)  # type: ignore[misc]
    for pattern in (_QUOTED, _SINGLE):
        yield "quotations", pattern.findall(source), pattern.findall(target)


def _between(text: str, mark: str) -> list[str]:
    """What stands between two marks, whichever of them are a pair."""
    return [part for part in text.split(mark)[1:-1] if len(part) <= _LONGEST_QUOTATION]


def _first_difference(before: Sequence[str], after: Sequence[str]) -> str:
    a, b = next((a, b) for a, b in zip_longest(before, after, fillvalue="") if a != b)
    return _became(a, b)


def _became(before: str, after: str) -> str:
    return " became ".join(repr(text if len(text) <= 60 else f"{text[:57]}...") for text in (before, after))


Words = list[re.Match[str]]


def _gaps(source: str, target: str, middle: _Middle) -> list[tuple[Words, Words]]:
    """The words between what is surely the same, place by place."""
    a = list(_WORD.finditer(source, middle.start, middle.source_stop))
    b = list(_WORD.finditer(target, middle.start, middle.target_stop))
    known: dict[str, int] = {}
    rows = [np.array([known.setdefault(m[0], len(known)) for m in side], np.int64) for side in (a, b)]
    gaps = []
    place = at = 0
    for block in [*align(rows[0], rows[1], _SURE), (len(a), len(b), 0)]:
        if block[0] > place or block[1] > at:
            gaps.append((a[place : block[0]], b[at : block[1]]))
        place, at = block[0] + block[2], block[1] + block[2]
    return gaps


def _characters(text: str) -> Ids:
    # Halves of a pair can stand alone in a string, though not in UTF-32.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64)


def _refined(a: Words, b: Words) -> Iterator[tuple[Words, Words]]:
    """The words that differ between two places that are surely the same; a large capital at the start of a sentence is none."""
    if not a or not b or len(a) * len(b) > _PAIRS:
        yield a, b
        return
    before, after = ([_folded(m) for m in side] for side in (a, b))
    for tag, i, j, k, n in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            yield a[i:j], b[k:n]


def _folded(match: re.Match[str]) -> str:
    word = match.group()
    return word.lower() if word.istitle() and _starts_sentence(match) else word


def _starts_sentence(match: re.Match[str]) -> bool:
    at, text = match.start(), match.string
    while at and text[at - 1] in " \t\"'\u201c\u2018(*#>-\u2022":
        at -= 1
    return at == 0 or text[at - 1] in ".!?:\n\r\u2026\u3002"


def _risks(span: ChangedSpan, a: Words, b: Words) -> Iterator[Risk]:
    """The kinds of risk in one place."""
    before, after = ({word.lower().replace("\u2019", "'") for word in side} for side in span)
    for word in before | after:
        yield from _risks_of(word)
    for match in (*a, *b):
        yield from _risks_in_place(match)
    names = [{m.group() for m in side if _is_name(m)} for side in (a, b)]
    inside = any(not _starts_sentence(m) for side in (a, b) for m in side if _is_name(m))
    # The first word of a sentence may be a name where another stands for it.
    if inside or (names[0] and names[1] and names[0] != names[1]):
        yield "names"
    if _opposed(before, after):
        yield "opposites"
    counts = [Counter(word.lower() for word in side) for side in span]
    if any(counts[0][word] != counts[1][word] for word in (before | after) & lists.LOGIC):
        yield "logic"
    # A small word for another of its kind; to leave one out or put one in changes little.
    if any(before & kind and after & kind and before & kind != after & kind for kind in lists.SWAPPED):
        yield "logic"


def _risks_of(word: str) -> Iterator[Risk]:
    """By the word itself, in small letters."""
    if any(char.isnumeric() for char in word) or any(part in lists.NUMBERS for part in re.split("[-']", word)):
        yield "numbers"
    if word in lists.NEGATIONS or word.endswith("n't") or word.startswith("non-"):
        yield "negations"
    if word in lists.UNITS or any(unicodedata.category(char) == "Sc" or char in "%\u2030\u00b0" for char in word):
        yield "units"
    if any(char in _QUOTES for char in word):
        yield "quotations"
    if not word.isalnum() and ("://" in word or "@" in word or re.search(r"\w\.\w", word)):
        yield "links"
    if any(char in _OPERATORS or unicodedata.category(char) == "Sm" for char in word):
        yield "code"


def _risks_in_place(match: re.Match[str]) -> Iterator[Risk]:
    """By the word and what it stands next to."""
    word, text = match.group(), match.string
    # sendMail, and send in send(...).
    if _CAMEL.search(word) or (word.isidentifier() and text[match.end() : match.end() + 1] == "("):
        yield "code"
    if word in "()" and (text[: match.start()][-1:].isalnum() or text[match.end() : match.end() + 1].isdigit()):
        yield "code"
    if word in lists.SHORT_UNITS and text[: match.start()].rstrip()[-1:].isdigit():
        yield "units"


def _is_name(match: re.Match[str]) -> bool:
    """Whether it is capitalised and no small word; US is not us."""
    word = match.group()
    return any(char.isupper() for char in word) and (bool(content_words([word])) or (word.isupper() and len(word) > 1))


def _opposed(before: set[str], after: set[str]) -> bool:
    """Whether a word stands on one side and its opposite on the other."""
    for one, other in ((before, after), (after, before)):
        for word in one:
            if any(lists.BASES.get(there, there) in lists.OPPOSITES.get(lists.BASES.get(word, word), ()) for there in other):
                return True
            if any(prefix + word in other or f"{prefix}-{word}" in other for prefix in lists.PREFIXES):
                return True
            if f"{word.removesuffix('ful')}less" in other:
                return True
    return False
