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

# The strength of an edge: between blocks, and one that no segment crosses.
_BLOCK, _WALL = 1, 2

_BLANK_LINE = re.compile(r"\n[^\S\n]*\n\s*")


class Discovery:
    """Cuts a row of token ids at edges that other prompts are likely to share.

    **Walls** are at the starts of chat messages, at the caller's separators, and around the caller's own spans. Between walls a row is
    split into **blocks**, which begin behind blank lines. A block of at least `shortest` tokens is a span; adjacent shorter ones are joined
    until they are one, never with a longer block and never across a wall. What is longer than `longest` is cut into windows. So the spans
    of a block of at least `shortest` tokens follow from its tokens alone, as long as it shares no token with a neighbour. An edge inside of
    a token counts as before it.

    Args:
        tokenizer: The model's; its chat template, if any, tells how messages begin. None: cut at the caller's spans, and into windows of
            `longest` tokens.
        separators: Strings between parts of a prompt. Each is at the start of the span behind it.
        shortest: The fewest tokens that a span should have.
        longest: The most tokens that a span has. Neither limit applies to the caller's own spans.
    """

    def __init__(self, tokenizer: Any = None, *, separators: Sequence[str] = (), shortest: int = SHORTEST, longest: int = LONGEST) -> None:
        if isinstance(separators, str) or not all(isinstance(separator, str) and separator for separator in separators):
            raise ConfigError.of("separators", "a list of strings, none empty", separators)
        if separators and tokenizer is None:
            raise ConfigError.of("separators", "none without a tokenizer", separators, "Pass the tokenizer: they are looked for in text.")
        self.shortest, self.longest, self._tokenizer = shortest, longest, tokenizer
        self.messages = _message_starts(tokenizer)
        starts = list(map(_loosely, self.messages)), list(map(re.escape, separators))
        self._walls = [re.compile("|".join(sorted(patterns, key=len, reverse=True))) for patterns in starts if patterns]
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
        for wall in self._walls:
            strength[tokens(match.start() for match in wall.finditer(text))] = _WALL

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


def _loosely(text: str) -> str:
    """Return a pattern for a text that ignores white space, which tokenizers add or remove."""
    parts = [re.escape(part) for part in re.findall(r"\w+|[^\w\s]", text)]
    return (r"\b" if text[0].isalnum() else "") + r"\s*".join(parts)


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


_ROLES = ("user", "assistant", "system", "developer", "tool")
# Conversations with each role alone, at the start, in the middle and at the end. Templates refuse some of them.
_CONVERSATIONS = (
    *((role,) for role in _ROLES),
    ("user", "assistant"),
    *(("user", "assistant", role) for role in _ROLES),
    *((role, "user", "assistant", "user") for role in _ROLES[2:]),
    *(("user", "assistant", role, other) for role in _ROLES[2:] for other in _ROLES[:2]),
)


def _message_starts(tokenizer: Any) -> tuple[str, ...]:
    """Return the strings that a chat template writes before messages, for the roles that it accepts."""
    if not getattr(tokenizer, "chat_template", None):
        return ()
    conversations = {conversation: parts for conversation in _CONVERSATIONS if (parts := _rendered(tokenizer, conversation)) is not None}
    ends = {conversation[-1]: parts[-1] for conversation, parts in conversations.items()}
    special = (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab())
    starts_of: dict[str, set[str]] = {role: set() for role in _ROLES}
    for conversation, parts in conversations.items():
        for before, role, between in zip(conversation, conversation[1:], parts[1:], strict=False):
            starts_of[role].add(_without_end(between, ends.get(before, ""), special))
    generation = _rendered(tokenizer, ("user",), add_generation_prompt=True)
    if generation is not None:
        starts_of["assistant"].add(_without_end(generation[-1], ends.get("user", ""), special))
    for conversation, parts in conversations.items():
        # A template may write more before the first message, so this is used only if no other conversation shows the start.
        if not any(starts_of[conversation[0]]):
            starts_of[conversation[0]].add(parts[0].removeprefix(tokenizer.bos_token or "").strip())
    starts = {start for role_starts in starts_of.values() for start in role_starts if len(start) > 1}
    return tuple(sorted(a for a in starts if not any(a != b and (a.startswith(b) or a.endswith(b)) for b in starts)))


def _rendered(tokenizer: Any, roles: Sequence[str], **options: Any) -> list[str] | None:
    """Return what a chat template writes before, between and behind messages of these roles; None if it refuses."""
    contents = [f"Qx{number}wZ" for number in range(len(roles))]
    for as_list in (False, True):
        bodies = [[{"type": "text", "text": content}] if as_list else content for content in contents]
        messages = [{"role": role, "content": content} for role, content in zip(roles, bodies, strict=True)]
        try:
            parts = re.split("|".join(contents), tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception:  # templates raise any error
            continue
        if len(parts) == len(roles) + 1:
            return parts
    return None


def _without_end(between: str, end: str, special: tuple[str, ...]) -> str:
    """Remove the end of the first message from the text between two messages, as far as it is whole special tokens or white space."""
    size = len(end)
    while not between.startswith(end[:size]) or (0 < size < len(end) and not end[size - 1].isspace() and not end[:size].endswith(special)):
        size -= 1
    return between[size:].strip() or between.strip()


_discoveries: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], Discovery]] = weakref.WeakKeyDictionary()


def discovery_for(tokenizer: Any, separators: tuple[str, ...]) -> Discovery:
    """Return the discovery of a tokenizer, which is shared because it caches the text of tokens."""
    discoveries = _discoveries.setdefault(Discovery if tokenizer is None else tokenizer, {})
    if separators not in discoveries:
        discoveries[separators] = Discovery(tokenizer, separators=separators)
    return discoveries[separators]
