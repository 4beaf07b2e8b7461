"""Where a prompt is cut into spans that other prompts may hold too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_kvcaches.errors import ConfigError, whole_number

Ids = Sequence[int] | NDArray[np.int64]

# How much a place divides: lines of a block; blocks; and what nothing is put together across.
_LINE, _BLOCK, _WALL = 1, 2, 3

_LINE_START = re.compile(r"\n\s*")
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n\s*")

# Stand-ins for bytes of unfinished characters, so that different tokens don't look alike: the private planes of Unicode.
_PRIVATE, _PRIVATE_SIZE = 0xF0000, 0x20000


class Discovery:
    """Cuts a row of token ids at places that come again in other prompts.

    **Walls** stand where a chat message begins, at the caller's separators, and around the caller's own spans. Between walls a row falls
    into **blocks**, which begin behind blank lines. A line of at least twice `shortest` tokens is a block of its own. (Other structure, of
    JSON, tags, code and headings, was measured and makes no difference: what is equal inside of segments is found anyway.)

    - A block of at least `shortest` tokens is cut by itself: its lines are put together from the left until they have `shortest` tokens;
      lines left over at its end join what is before them, if that gives at most `longest`. What is longer than `longest` is cut into
      windows, counted from its own start.
    - Shorter blocks are not cut. Those that stand side by side are put together in the same way, never with a longer one and never
      across a wall. One that stands alone stays shorter than `shortest`: to compute it anew costs less than to tie a neighbour to it.

    So the spans of a block of at least `shortest` tokens follow from its tokens alone, wherever it stands, as long as it shares no token
    with a neighbour. A place inside of a token counts as before it.

    Args:
        tokenizer: Of the model; its chat template, if it has one, tells how messages begin. None: there are only the caller's spans, and
            windows of `longest` tokens.
        separators: Strings that the caller puts between parts of a prompt. Each is kept at the start of what follows.
        shortest: Tokens that a span should have at least.
        longest: Tokens that a span has at most. The caller's own spans are not held to either.
    """

    def __init__(self, tokenizer: Any = None, *, separators: Sequence[str] = (), shortest: int = 16, longest: int = 128) -> None:
        for argument, value, least in (("shortest", shortest, 1), ("longest", longest, shortest)):
            whole_number(argument, value, least, f"a number of tokens, at least {least}")
        if isinstance(separators, str) or not all(isinstance(separator, str) and separator for separator in separators):
            raise ConfigError.of("separators", "a list of strings, none empty", separators)
        if separators and tokenizer is None:
            raise ConfigError.of("separators", "none without a tokenizer", separators, "Pass the tokenizer: they are looked for in text.")
        self.shortest = shortest
        self.longest = longest
        self.messages = _message_starts(tokenizer)
        self._tokenizer = tokenizer
        self._message = _any_of([_loosely(text) for text in self.messages])
        self._separator = _any_of([re.escape(text) for text in separators])
        self._pieces: dict[int, str] = {}
        self._anchor = _anchor(tokenizer)

    def spans(self, ids: Ids, given: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
        """Starts and stops of the row's spans, in order, without gaps and without overlaps.

        Args:
            ids: Token ids: a list, or an array of one dimension.
            given: Starts and stops of spans to be kept as they are. They may touch, not overlap; empty ones are dropped.
        """
        row = _as_list(ids)
        kept = _checked(given, len(row))
        if not row:
            return []
        power = np.zeros(len(row) + 1, dtype=np.uint8)
        if self._tokenizer is not None:
            self._mark(row, power)
        power[[0, -1]] = _WALL
        for start, stop in kept:
            power[start + 1 : stop] = 0
            power[[start, stop]] = _WALL
        places = np.flatnonzero(power)
        long = np.flatnonzero(np.diff(places) >= 2 * self.shortest)
        for edge in (places[long], places[long + 1]):
            power[edge] = np.maximum(power[edge], _BLOCK)
        return list(self._put_together(places.tolist(), power[places].tolist(), {start for start, _ in kept}))

    def text(self, ids: Ids) -> str:
        """The text of some tokens; without a tokenizer, their numbers."""
        return " ".join(map(str, _as_list(ids))) if self._tokenizer is None else "".join(self.pieces(ids))

    def pieces(self, ids: Ids) -> list[str]:
        """The text of each token. One that is part of a character has a character of its own; one that is unknown, none."""
        row = _as_list(ids)
        known = self._pieces
        try:
            return [known[token] for token in row]
        except KeyError:
            for token in set(row) - known.keys():
                known[token] = self._decoded(token)
            return [known[token] for token in row]

    def _decoded(self, token: int) -> str:
        # Behind another token: some tokenizers drop the space at the start of a text.
        text = _decode(self._tokenizer, [self._anchor[0], token] if self._anchor else [token])
        if self._anchor and text.startswith(self._anchor[1]):
            text = text[len(self._anchor[1]) :]
        return text.replace("\ufffd", chr(_PRIVATE + token % _PRIVATE_SIZE))

    def _mark(self, row: list[int], power: NDArray[np.uint8]) -> None:
        """Writes how much the structure of the row's text divides at each token."""
        pieces = self.pieces(row)
        # Where in the text each token begins.
        offsets = np.cumsum([0, *map(len, pieces)])
        # With a line end in front, every line starts behind one.
        text = "\n" + "".join(pieces)

        def tokens(places: Iterable[int]) -> NDArray[np.int64]:
            found = np.searchsorted(offsets, np.fromiter(places, dtype=np.int64) - 1, side="right") - 1
            return np.maximum(found, 0)

        power[tokens(match.end() for match in _LINE_START.finditer(text))] = _LINE
        power[tokens(match.end() for match in _BLANK_LINE.finditer(text))] = _BLOCK
        if self._separator is not None:
            power[tokens(match.start() for match in self._separator.finditer(text))] = _WALL
        if self._message is not None:
            power[tokens(match.start() for match in self._message.finditer(text))] = _WALL

    def _put_together(self, places: list[int], powers: list[int], given: set[int]) -> Iterator[tuple[int, int]]:
        """The spans of a row.

        Args:
            places: All indices where it may be cut, its two ends among them.
            given: Where the caller's spans start.
        """
        block = [places[0]]
        short: list[int] = []  # the edges of short blocks side by side
        for place, power in zip(places[1:], powers[1:], strict=True):
            block.append(place)
            if power == _LINE:
                continue
            if block[0] in given:
                yield block[0], place
            elif place - block[0] >= self.shortest:
                yield from self._cut(short)
                yield from self._cut(block)
                short = []
            else:
                short += [place] if short else [block[0], place]
            if power == _WALL:
                yield from self._cut(short)
                short = []
            block = [place]

    def _cut(self, edges: list[int]) -> Iterator[tuple[int, int]]:
        """Joins lines until they are long enough, and cuts what is too long into windows."""
        cuts = edges[:1]
        for edge in edges[1:]:
            if edge - cuts[-1] >= self.shortest:
                cuts.append(edge)
        if edges and cuts[-1] != edges[-1]:
            if len(cuts) > 1 and edges[-1] - cuts[-2] <= self.longest:
                cuts.pop()
            cuts.append(edges[-1])
        for start, stop in pairwise(cuts):
            yield from ((at, min(at + self.longest, stop)) for at in range(start, stop, self.longest))


def _as_list(ids: Ids) -> list[int]:
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ConfigError.of("ids", "token ids, in one dimension", (ids.shape, ids.dtype), "Pass one row at a time.")
        return ids.tolist()
    return ids if isinstance(ids, list) else list(ids)


def _checked(given: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    kept = sorted((int(start), int(stop)) for start, stop in given)
    for start, stop in kept:
        if not 0 <= start <= stop <= length:
            raise ConfigError.of("given", f"spans within the {length} tokens of the row", (start, stop))
    kept = [(start, stop) for start, stop in kept if start < stop]
    for before, after in pairwise(kept):
        if before[1] > after[0]:
            raise ConfigError.of("given", "spans that don't overlap", [before, after])
    return kept


def _any_of(patterns: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(sorted(patterns, key=len, reverse=True))) if patterns else None


def _loosely(text: str) -> str:
    """A pattern for a text, whatever white space a tokenizer puts between or takes away."""
    parts = [re.escape(part) for part in re.findall(r"\w+|[^\w\s]", text)]
    return (r"\b" if text[0].isalnum() else "") + r"\s*".join(parts)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    try:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    except Exception:  # Tokenizers differ in what they raise at ids that they don't know, which is what padded vocabularies have.
        return ""


def _anchor(tokenizer: Any) -> tuple[int, str] | None:
    """A token of plain text to decode others behind, and its text."""
    if tokenizer is None:
        return None
    ids = list(tokenizer.encode("a", add_special_tokens=False))
    text = _decode(tokenizer, ids[-1:])
    return (ids[-1], text) if text and text.isascii() else None


_ROLES = ("user", "assistant", "system", "developer", "tool")
# Each role alone, at the start, in the middle and at the end. Templates refuse some of these.
_TALKS = (
    *((role,) for role in _ROLES),
    ("user", "assistant"),
    *(("user", "assistant", role) for role in _ROLES),
    *((role, "user", "assistant", "user") for role in _ROLES[2:]),
    *(("user", "assistant", role, other) for role in _ROLES[2:] for other in _ROLES[:2]),
)


def _message_starts(tokenizer: Any) -> tuple[str, ...]:
    """What a chat template puts before a message of each role, as far as the template tells."""
    if not getattr(tokenizer, "chat_template", None):
        return ()
    talks = {talk: parts for talk in _TALKS if (parts := _rendered(tokenizer, talk)) is not None}
    ends = {talk[-1]: parts[-1] for talk, parts in talks.items()}
    special = (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab())
    found: dict[str, set[str]] = {role: set() for role in _ROLES}
    for talk, parts in talks.items():
        for before, role, between in zip(talk, talk[1:], parts[1:], strict=False):
            found[role].add(_without_end(between, ends.get(before, ""), special))
    asked = _rendered(tokenizer, ("user",), add_generation_prompt=True)
    if asked is not None:
        found["assistant"].add(_without_end(asked[-1], ends.get("user", ""), special))
    for talk, parts in talks.items():
        # Before the first message there may be more than its start. So it counts only where nothing else tells.
        if not any(found[talk[0]]):
            found[talk[0]].add(parts[0].removeprefix(tokenizer.bos_token or "").strip())
    starts = {start for some in found.values() for start in some if len(start) > 1}
    return tuple(sorted(a for a in starts if not any(a != b and (a.startswith(b) or a.endswith(b)) for b in starts)))


def _rendered(tokenizer: Any, roles: Sequence[str], **options: Any) -> list[str] | None:
    """What a chat template writes before, between and behind messages of these roles. None if it refuses."""
    contents = [f"Qx{place}wZ" for place in range(len(roles))]
    for as_list in (False, True):
        told = [[{"type": "text", "text": content}] if as_list else content for content in contents]
        messages = [{"role": role, "content": content} for role, content in zip(roles, told, strict=True)]
        try:
            parts = re.split("|".join(contents), tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception:  # Templates raise what they like.
            continue
        if len(parts) == len(roles) + 1:
            return parts
    return None


def _without_end(between: str, end: str, special: tuple[str, ...]) -> str:
    """What stands between two messages, without what ends the first: as far as that is whole special tokens or white space."""
    size = len(end)
    while not between.startswith(end[:size]) or (0 < size < len(end) and not end[size - 1].isspace() and not end[:size].endswith(special)):
        size -= 1
    return between[size:].strip() or between.strip()
