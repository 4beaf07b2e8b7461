"""Semantic codes that are still on their way: each part is checked and handed on as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

from torch import Tensor

from hf_kvcaches.core.quantize import Quantized
from hf_kvcaches.core.wire.messages import Bytes, MessageReader
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.translate.codes import Part, SemanticCodes
from hf_kvcaches.translate.head import PLAIN, CodesHead


class ArrivingCodes:
    """Semantic codes as a `MessageReader` takes them in: iterate over it, once, for the parts in their order.

    Args:
        source: The bytes of one message and no more, in pieces of any sizes, or a function that returns between 1 and the given number
            of bytes, and none at the end. Such a function is asked for no byte beyond the message.
        ending: How it is said that no more bytes come.
    """

    def __init__(self, source: Iterable[Bytes] | Callable[[int], Bytes], ending: str = "") -> None:
        self._message = MessageReader(source, CodesHead, ending)
        self.head = self._message.head

    @property
    def nbytes(self) -> int:
        """Of the whole message."""
        return self.head.nbytes

    def collect(self) -> SemanticCodes:
        """Waits for all parts. They can't be collected once one was taken."""
        if self._message.taken or self._message.finished:
            raise UnsupportedError("Parts of these codes were taken already, and are not kept. Collect them first, then iterate.")
        return SemanticCodes(self.head, self)

    def __iter__(self) -> Self:
        if self._message.finished:
            raise UnsupportedError("All parts of these codes were taken already, and are not kept. Use collect() to have them twice.")
        return self

    def __next__(self) -> Part:
        tensors = next(self._message)
        part = self.head.parts[self._message.taken - 1]
        return Part(part.name, {code: self._code(tensors, code, rank) for code, rank in part.ranks.items()})

    def _code(self, tensors: dict[str, Tensor], name: str, rank: int) -> Tensor | Quantized:
        if self.head.dtype in PLAIN:
            return tensors[name]
        return Quantized.from_tensors({piece: tensors[f"{name}.{piece}"] for piece in ("data", "scale", "zero")}, self.head.meta_of(rank))

    def __repr__(self) -> str:
        return f"ArrivingCodes({self.head.method}, {self.head.dtype}, {self._message.taken} of {len(self.head.parts)} parts taken)"
