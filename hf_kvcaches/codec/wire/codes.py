"""The packed form of rows of tokens as a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch

from hf_kvcaches.codec.wire.messages import MessageReader, message_chunks
from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.stores.files import Source

Codes = Sequence[Sequence[torch.Tensor] | None]
"""For each layer a record of each row, (bytes,), uint8, or None where the layer is not coded."""

_MOST = 1 << 40


@dataclass(frozen=True)
class CodecHead:
    """What is known of records before they come.

    Args:
        codec: The codec's digest.
        layers: For each layer the bytes of each row's record, or None where the layer is not coded.
    """

    kind: ClassVar[str] = "codes of a KVCodec"

    codec: str
    layers: tuple[tuple[int, ...] | None, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the layers that are coded."""
        return tuple(f"layer.{index}" for index, lengths in enumerate(self.layers) if lengths is not None)

    def content(self) -> dict[str, Any]:
        return {"codec": self.codec, "layers": [None if lengths is None else list(lengths) for lengths in self.layers]}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        layers = tuple(None if lengths is None else tuple(lengths) for lengths in content["layers"])
        counts = [count for lengths in layers if lengths is not None for count in lengths]
        if not all(type(count) is int and 0 <= count <= _MOST for count in counts) or len(layers) > MOST_LAYERS:
            raise ValueError(f"{len(layers)} layers, and the counts {counts[:8]}")
        return cls(**content | {"layers": layers})


def to_bytes(codec: str, codes: Codes) -> bytes:
    """Codes as a message, of the codec with a digest."""
    head = CodecHead(codec, tuple(None if records is None else tuple(map(len, records)) for records in codes))
    empty = torch.empty(0, dtype=torch.uint8)
    joined = (torch.cat([empty, *(record.cpu() for record in records)]) for records in codes if records is not None)
    return b"".join(message_chunks(head, joined))


def from_bytes(source: Source, codec: str, coded: Sequence[bool]) -> list[list[torch.Tensor] | None]:
    """The codes of a message.

    Args:
        codec: The digest of the codec that reads.
        coded: Which layers it codes.
    """
    message = MessageReader(source, CodecHead)
    if message.head.codec != codec:
        raise ArtifactError(f"These are codes of the codec {message.head.codec}, not of {codec}. Read them with that one.")
    if [lengths is not None for lengths in message.head.layers] != list(coded):
        raise ArtifactError("Codes are of other layers than those of the codec. Encode them anew.")
    layers = iter(list(message))
    try:
        return [None if lengths is None else list(next(layers).split(list(lengths))) for lengths in message.head.layers]
    except RuntimeError as error:
        raise ArtifactError(f"The records of codes have other lengths than their head says: {error}. Encode them anew.") from error
