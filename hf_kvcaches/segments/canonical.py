"""What near-duplicates are compared by: runs of words of a text from which all that changes from day to day is taken out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_kvcaches.errors import ConfigError, require

Ids = Sequence[int] | NDArray[np.int64]

PLACEHOLDER = "¤"

# For lower-case text. None starts or ends in mid-word, so that masking one thing makes no other. All hold a digit of ASCII, with at most
# two words before the first and after the last, and one between any two: `_changing` counts on it.
_ZONE = r"(?:\s*(?:z|utc|gmt|[+-][0-9]{2}:?[0-9]{2}))?"
_CLOCK = rf"[0-9]{{1,2}}:[0-9]{{2}}(?::[0-9]{{2}}(?:[.,][0-9]+)?)?(?:\s*[ap]\.?m\b\.?)?{_ZONE}"
_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?"
    r"|dec(?:ember)?)\.?"
)
_DAY = r"[0-9]{1,2}(?:st|nd|rd|th)?"
_WEEKDAY = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs?)?|fri|sat(?:ur)?|sun)(?:day)?"
_DATE = "|".join(
    [
        rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}(?:(?:t|\s+){_CLOCK})?",
        r"[0-9]{4}[/.][0-9]{1,2}[/.][0-9]{1,2}",
        r"[0-9]{1,2}[/.-][0-9]{1,2}[/.-][0-9]{4}",
        r"[0-9]{1,2}/[0-9]{1,2}/[0-9]{2}",
        rf"{_DAY}(?:-|\s+){_MONTH}(?:(?:-|,?\s+)[0-9]{{4}})?",
        rf"{_MONTH}\s+{_DAY}(?:,?\s+[0-9]{{4}})?",
        rf"{_MONTH}\s+[0-9]{{4}}",
    ]
)
_HEX = r"(?=[a-f-]{0,35}[0-9])[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|0x[0-9a-f]+|(?=[a-f]*[0-9])(?=[0-9]*[a-f])[0-9a-f]{8,}"
_MASKED = re.compile(rf"\b(?:{_HEX}|(?:{_WEEKDAY}\.?,?\s+)?(?:{_DATE})|{_CLOCK}|[0-9]{{5,}})(?!\w)")

# Stands between the texts of several spans. No mask and no word goes across it.
_BETWEEN = "\0"

_UNKNOWN, _SPACE, _LETTER, _DIGIT, _OTHER = range(5)
# The class of each character, filled in as they come.
_CLASSES = np.zeros(0x110000, dtype=np.uint8)


def canonical(text: str) -> str:
    """The text as it is compared, and never as it is cached.

    Lower case, white space as single spaces, and a placeholder for each of: dates and timestamps (ISO 8601 and the common ones), clock
    times, UUIDs, hexadecimal ids (behind 0x, or of 8 and more digits, letters among them), and numbers of 5 and more digits. Twice is as
    once.
    """
    return _MASKED.sub(PLACEHOLDER, " ".join(text.lower().split()))


class Signer:
    """Signatures of the spans of a prompt, and of what stands before them.

    A span's set is that of its shingles: `shingle` consecutive words of its canonical text, where a word is a run of letters, a run of
    digits, or any other character by itself. A span of fewer words is one shingle, one without words has none. The same ids give the
    same signature in any prompt, process and machine.

    Args:
        pieces: Gives the text of each token, as `Discovery.pieces` does. None: token ids are taken for words.
        left: Tokens before a span that make its left context.
    """

    def __init__(
        self,
        pieces: Callable[[Ids], list[str]] | None = None,
        *,
        shingle: int = 8,
        left: int = 128,
        permutations: int = 64,
        seed: int = 1,
    ) -> None:
        for argument, value in (("shingle", shingle), ("left", left), ("permutations", permutations)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError.of(argument, "a whole number above 0", value)
        self.left = left
        datasketch: Any = require("datasketch", "retrieval", "Looking for near-identical segments")
        self._empty = datasketch.MinHash(permutations, seed, hashfunc=lambda value: value, scheme="affine32")
        self._pieces = pieces
        self._powers = _powers(shingle)

    def of(self, ids: Ids, spans: Sequence[tuple[int, ...]]) -> NDArray[np.uint32]:
        """Signatures `(spans, permutations)`.

        Args:
            spans: Start and stop of each, as places of tokens; what else a tuple holds is left alone.
        """
        signatures = np.zeros((len(spans), len(self._empty)), np.uint32)
        for signature, hashes in zip(signatures, self.shingles(ids, spans), strict=True):
            minhash = self._empty.copy()
            minhash.update_batch(hashes)
            signature[:] = minhash.hashvalues
        return signatures

    def left_of(self, ids: Ids, starts: Sequence[int]) -> NDArray[np.uint32]:
        """Signatures of the `left` tokens, or as many as there are, that stand before each place: `(starts, permutations)`."""
        return self.of(ids, [(max(start - self.left, 0), start) for start in starts])

    def shingles(self, ids: Ids, spans: Sequence[tuple[int, ...]]) -> list[NDArray[np.uint32]]:
        """Hashes of the shingles of each span, in the order of the text."""
        if not len(spans):
            return []
        if self._pieces is None:
            # Token 0 would be hashed to 0, and add nothing to the runs that it ends.
            words = _spread(np.asarray(ids, dtype=np.int64).astype(np.uint64) ^ np.uint64(_FACTOR))
            edges = [(span[0], span[1]) for span in spans]
        else:
            pieces = self._pieces(ids)
            texts = ["".join(pieces[span[0] : span[1]]).replace(_BETWEEN, " ") for span in spans]
            words, between = _word_hashes(_BETWEEN.join(texts).lower())
            edges = list(zip([0, *(place + 1 for place in between)], [*between, len(words)], strict=True))
        return self._runs(words, edges)

    def _runs(self, words: NDArray[np.uint64], edges: Sequence[tuple[int, int]]) -> list[NDArray[np.uint32]]:
        """The shingles of each run of words, from the words' hashes."""
        length = len(self._powers)
        count = max(len(words) - length + 1, 0)
        sums = np.zeros(count, dtype=np.uint64)
        for place, power in enumerate(self._powers):
            sums += words[place : place + count] * power
        out = []
        for start, stop in edges:
            if stop - start >= length:
                run = sums[start : stop - length + 1]
            elif stop > start:
                run = (words[start:stop] * self._powers[: stop - start]).sum(keepdims=True)
            else:
                run = sums[:0]
            out.append((_spread(run) >> np.uint64(32)).astype(np.uint32))
        return out


def _word_hashes(text: str) -> tuple[NDArray[np.uint64], list[int]]:
    """Hashes of the words of the canonical form of a text, and which of them are `_BETWEEN`.

    On arrays of characters: prompts are long, and Python's way through them word by word takes ten times as long.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)
    classes = _classes(codes)
    for start, stop in _changing(text, codes, classes):
        codes[start], classes[start] = ord(PLACEHOLDER), _OTHER
        classes[start + 1 : stop] = _SPACE
    starts = classes != _SPACE
    starts[1:] &= (classes[1:] != classes[:-1]) | (classes[1:] == _OTHER)
    places = np.flatnonzero(starts)
    if not len(places):
        return np.zeros(0, dtype=np.uint64), []
    # Each word is a sum of its characters times powers of an odd number, counted from its own start. White space adds nothing.
    values = np.where(classes == _SPACE, 0, codes + 1).astype(np.uint64) * _powers(len(codes))
    sums = np.add.reduceat(values, places) * _powers(len(codes), _INVERSE)[places]
    return _spread(sums), np.flatnonzero(codes[places] == 0).tolist()


def _classes(codes: NDArray[np.int64]) -> NDArray[np.uint8]:
    classes = _CLASSES[codes]
    if not classes.all():
        for code in set(codes[classes == _UNKNOWN].tolist()):
            char = chr(code)
            kind = _SPACE if char.isspace() else _DIGIT if char.isdecimal() else _LETTER if char.isalnum() else _OTHER
            _CLASSES[code] = kind
        classes = _CLASSES[codes]
    return classes


def _changing(text: str, codes: NDArray[np.int64], classes: NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
    """Where `canonical` puts its placeholder, looked for near digits only."""
    digits = np.flatnonzero((codes >= ord("0")) & (codes <= ord("9")))
    if not len(digits):
        return
    solid = np.concatenate(([False], classes != _SPACE, [False]))
    edges = np.flatnonzero(solid[1:] != solid[:-1])
    starts, stops = edges[::2], edges[1::2]
    chunks = np.unique(np.searchsorted(starts, digits, side="right") - 1)
    # Two words to either side; what overlaps is looked through at once, because a date may go across.
    first = np.flatnonzero(np.concatenate(([True], np.diff(chunks) > 4)))
    last = np.append(first[1:], len(chunks)) - 1
    froms = starts[np.maximum(chunks[first] - 2, 0)]
    tos = stops[np.minimum(chunks[last] + 2, len(stops) - 1)]
    for start, stop in zip(froms.tolist(), tos.tolist(), strict=True):
        for match in _MASKED.finditer(text, start, stop):
            yield match.span()


_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 1 << 64)


def _powers(count: int, factor: int = _FACTOR) -> NDArray[np.uint64]:
    """The powers of a factor from 0 on, modulo 2 ** 64."""
    powers = np.full(count, factor, dtype=np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers)


def _spread(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The last step of the 64-bit MurmurHash3: every bit of the input sways every bit of the output."""
    hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return hashes ^ (hashes >> np.uint64(33))
