"""The packed form of rows of tokens as a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import torch

from hf_kvcaches.codec.wire.messages import BodyTensor, Bytes, MessageReader, MessageWriter
from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.stores.files import Source

_MOST = 1 << 40


class LayerPart(NamedTuple):
    """A layer of the model, with the bytes of each row's record."""

    name: str
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class CodecHead:
    """What is known of records before they come.

    Args:
        codec: The codec's digest.
        layers: For each layer the bytes of each row's record, or None where the layer is not coded.
    """

    kind: ClassVar[str] = "codes of a KVCodec"
    finite: ClassVar[bool] = True

    codec: str
    layers: tuple[tuple[int, ...] | None, ...]

    @cached_property
    def parts(self) -> tuple[LayerPart, ...]:
        """The layers that are coded."""
        return tuple(LayerPart(f"layer.{index}", lengths) for index, lengths in enumerate(self.layers) if lengths is not None)

    def tensors_of(self, part: LayerPart) -> list[BodyTensor]:
        """The records of a layer, one behind the other."""
        return [BodyTensor("codes", "U8", (sum(part.lengths),))]

    def content(self) -> dict[str, Any]:
        """What is sent of it, for JSON."""
        return {"codec": self.codec, "layers": [None if lengths is None else list(lengths) for lengths in self.layers]}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        """The inverse of `content`."""
        layers = tuple(None if lengths is None else tuple(lengths) for lengths in content["layers"])
        counts = [count for lengths in layers if lengths is not None for count in lengths]
        if not all(type(count) is int and 0 <= count <= _MOST for count in counts) or len(layers) > MOST_LAYERS:
            raise ValueError(f"{len(layers)} layers, and the counts {counts[:8]}")
        return cls(**content | {"layers": layers})


def written(codec: str, codes: Sequence[Sequence[torch.Tensor] | None]) -> Iterator[Bytes]:
    """A message, in pieces.

    Args:
        codec: The codec's digest.
        codes: For each layer the record of each row, or None.
    """
    writer = MessageWriter(CodecHead(codec, tuple(None if records is None else tuple(map(len, records)) for records in codes)))
    yield writer.begin()
    for records in codes:
        if records is not None:
            yield from writer.add({"codes": records[0] if len(records) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *records])})


def read(source: Source, codec: str, coded: Sequence[bool]) -> list[list[torch.Tensor] | None]:
    """The records of a message.

    Args:
        codec: The digest of the codec that reads.
        coded: Which layers it codes.
    """
    message = MessageReader(source, CodecHead)
    head = message.head
    if head.codec != codec:
        raise ArtifactError(f"These are codes of the codec {head.codec}, not of {codec}. Read them with that one.")
    if [lengths is not None for lengths in head.layers] != list(coded):
        raise ArtifactError("Codes are of other layers than those of the codec. Encode them anew.")
    parts = iter([tensors["codes"] for tensors in message])
    return [None if lengths is None else list(next(parts).split(list(lengths))) for lengths in head.layers]
