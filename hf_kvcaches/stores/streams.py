"""Bytes that arrive whole, in pieces, or from a function such as a socket's `recv`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Bytes = bytes | bytearray | memoryview
Source = Bytes | Iterable[Bytes] | Callable[[int], Bytes]

_STEP = 1 << 20  # bytes asked for at once


def reader_of(source: Source) -> Callable[[int], Bytes]:
    """Return a function that gives between 1 and the given number of bytes, and none at the end of the source."""
    return source if callable(source) else _Pieces(source).read


def take(read: Callable[[int], Bytes], count: int) -> bytearray:
    """Return the next `count` bytes, or fewer at the end. Memory grows with what arrives, not with what a length promises."""
    content = bytearray()
    while len(content) < count and (piece := read(min(count - len(content), _STEP))):
        content += piece
    assert len(content) <= count, "a source gave more than was asked for"
    return content


class _Pieces:
    """Pieces of any sizes as something to read from."""

    def __init__(self, pieces: Bytes | Iterable[Bytes]) -> None:
        # Bytes are iterable too, as numbers.
        self._pieces = iter([pieces] if isinstance(pieces, bytes | bytearray | memoryview) else pieces)
        self._rest = memoryview(b"")

    def read(self, count: int) -> memoryview:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                break
            view = memoryview(piece)
            self._rest = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken
