"""Cut prompts into spans that other prompts may share."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_kvcaches.errors import ConfigError

# Tokens of a segment: shorter ones cost more look-ups and reads, and of longer ones more is read than is reused. Equal tokens inside of
# segments are found wherever these are cut.
SHORTEST, LONGEST = 64, 512

_BLOCK, _WALL = 1, 2  # the strength of an edge: between blocks, and one that no segment crosses
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n\s*")


class Discovery:
    """Cuts a row of token ids at edges that other prompts are likely to share.

    **Walls** are where a special token directly follows another one, as the start of a chat message follows the end of the one before,
    at the caller's separators, and around the caller's own spans. Between walls a row is split into **blocks**, which begin
    behind blank lines and at other added tokens. A block of at least `shortest` tokens is a span; adjacent shorter ones are joined until
    they are one, never with a longer block and never across a wall. What is longer than `longest` is cut into windows. An edge inside of
    a token counts as before it.

    Args:
        tokenizer: The model's. None: cut at the caller's spans, and into windows of `longest` tokens.
        separators: Strings between parts of a prompt. Each is at the start of the span behind it.
    """

    def __init__(self, tokenizer: Any = None, *, separators: Sequence[str] = (), shortest: int = SHORTEST, longest: int = LONGEST) -> None:
        if isinstance(separators, str) or not all(isinstance(separator, str) and separator for separator in separators):
            raise ConfigError.of("separators", "a list of strings, none empty", separators)
        if separators and tokenizer is None:
            raise ConfigError.of("separators", "none without a tokenizer", separators, "Pass the tokenizer: they are looked for in text.")
        self.shortest, self.longest, self._tokenizer = shortest, longest, tokenizer
        special = set(getattr(tokenizer, "all_special_ids", ()))
        # Tokenizers without `get_added_vocab`, such as Mistral's own, raise an error for `added_tokens_decoder`.
        added = tokenizer.added_tokens_decoder if hasattr(tokenizer, "get_added_vocab") else {}
        # Not all added tokens are special: some tokenizers add tags of HTML.
        self._special, self._added = special | {token for token, kind in added.items() if kind.special}, special | added.keys()
        self._separators = re.compile("|".join(map(re.escape, sorted(separators, key=len, reverse=True))))
        self._pieces: dict[int, str] = {}
        self._anchor = _anchor(tokenizer)

    def spans(self, row: Sequence[int], caller_spans: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
        """Return starts and stops of the spans of a row of token ids, in order, without gaps and without overlaps.

        Args:
            caller_spans: Starts and stops of spans that are not cut. They may touch, not overlap; empty ones are dropped.
        """
        kept = checked_spans(caller_spans, len(row))
        if not row:
            return []
        strength = np.zeros(len(row) + 1, dtype=np.uint8)
        if self._tokenizer is not None:
            self._mark(row, strength)
        strength[[0, -1]] = _WALL
        for start, stop in kept:
            strength[start + 1 : stop] = 0
            strength[[start, stop]] = _WALL
        edges = np.flatnonzero(strength)
        return list(self._joined(edges.tolist(), strength[edges].tolist(), {start for start, _ in kept}))

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens; without a tokenizer, their ids."""
        return " ".join(map(str, ids)) if self._tokenizer is None else "".join(self.pieces(ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token: "" for an unknown id."""
        texts = self._pieces
        for token in set(ids) - texts.keys():
            # Behind another token, because some tokenizers drop the space at the start of a text.
            text = _decode(self._tokenizer, [self._anchor[0], token] if self._anchor else [token])
            texts[token] = text.removeprefix(self._anchor[1]) if self._anchor else text
        return [texts[token] for token in ids]

    def _mark(self, row: Sequence[int], strength: NDArray[np.uint8]) -> None:
        """Write the strength of the edge before each token, by the structure of the row's text."""
        pieces = self.pieces(row)
        offsets = np.cumsum([0, *map(len, pieces)])  # of the tokens in the text
        text = "\n" + "".join(pieces)  # with a line end at its start, every line begins behind one

        def tokens(places: Iterable[int]) -> NDArray[np.int64]:
            indices = np.searchsorted(offsets, np.fromiter(places, dtype=np.int64) - 1, side="right") - 1
            return np.maximum(indices, 0)

        strength[tokens(match.end() for match in _BLANK_LINE.finditer(text))] = _BLOCK
        # The last of consecutive added tokens begins a block. It begins a message where a special token stands before it, such as the end
        # of the last message; but not at the start of a row, where no text has come yet.
        words = [index for index, piece in enumerate(pieces) if piece.strip()]
        opening = next((index for index in words if row[index] not in self._added), len(row))
        for before, word, after in zip([0, *words], words, words[1:], strict=False):
            if row[word] in self._added and row[after] not in self._added:
                between = word > opening and row[before] in self._special and row[before] != row[word]
                strength[word] = _WALL if between else _BLOCK
        if self._separators.pattern:
            strength[tokens(match.start() for match in self._separators.finditer(text))] = _WALL

    def _joined(self, edges: list[int], strengths: list[int], caller_starts: set[int]) -> Iterator[tuple[int, int]]:
        """Yield the spans of a row from all indices where it may be cut, its two ends among them."""
        waiting = edges[0]  # where short blocks begin that are not yet a span
        for (start, stop), strength in zip(pairwise(edges), strengths[1:], strict=True):
            if start in caller_starts:
                yield start, stop
            elif stop - start >= self.shortest:
                yield from self._windows(waiting, start)
                yield from self._windows(start, stop)
            elif strength == _WALL or stop - waiting >= self.shortest:
                yield from self._windows(waiting, stop)
            else:
                continue
            waiting = stop

    def _windows(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        yield from ((first, min(first + self.longest, stop)) for first in range(start, stop, self.longest))


def checked_spans(caller_spans: Sequence[tuple[int, int]], length: int | None = None) -> list[tuple[int, int]]:
    """The caller's spans in order, without empty ones; an error for spans that overlap or do not lie within a row of `length` tokens."""
    kept = sorted((int(start), int(stop)) for start, stop in caller_spans)
    for start, stop in kept:
        if not 0 <= start <= stop or (length is not None and stop > length):
            what = "the row" if length is None else f"the {length} tokens of the row"
            raise ConfigError.of("spans", f"spans within {what}", (start, stop))
    kept = [(start, stop) for start, stop in kept if start < stop]
    for before, after in pairwise(kept):
        if before[1] > after[0]:
            raise ConfigError.of("spans", "spans that don't overlap", [before, after])
    return kept


def _decode(tokenizer: Any, ids: list[int]) -> str:
    try:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    except Exception:  # tokenizers raise different errors for unknown ids, which padded vocabularies have
        return ""


def _anchor(tokenizer: Any) -> tuple[int, str] | None:
    """Return a token of plain text, behind which others are decoded, and its text."""
    if tokenizer is None:
        return None
    ids = list(tokenizer.encode("a", add_special_tokens=False))
    text = _decode(tokenizer, ids[-1:])
    return (ids[-1], text) if text and text.isascii() else None


_discoveries: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], Discovery]] = weakref.WeakKeyDictionary()


def discovery_for(tokenizer: Any, separators: tuple[str, ...]) -> Discovery:
    """Return the discovery of a tokenizer, which is shared because it caches the text of tokens."""
    discoveries = _discoveries.setdefault(Discovery if tokenizer is None else tokenizer, {})
    if separators not in discoveries:
        discoveries[separators] = Discovery(tokenizer, separators=separators)
    return discoveries[separators]
