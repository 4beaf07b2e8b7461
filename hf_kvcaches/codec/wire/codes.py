"""Codes of a `KVCodec` as a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import torch

from hf_kvcaches.codec.wire.messages import BodyTensor, MessageReader, MessageWriter
from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.stores.streams import Source

_MOST = 1 << 40


class LayerPart(NamedTuple):
    """A layer of the model.

    Args:
        rows: Bytes of a token's codes.
    """

    name: str
    rows: int


@dataclass(frozen=True)
class CodecHead:
    """What is known of codes before they come.

    Args:
        codec: The codec's digest.
        batch: How many texts.
        tokens: Of each.
        layers: For each layer the bytes of a token's codes, or None where the layer is not coded.
    """

    kind: ClassVar[str] = "codes of a KVCodec"
    finite: ClassVar[bool] = True

    codec: str
    batch: int
    tokens: int
    layers: tuple[int | None, ...]

    @cached_property
    def parts(self) -> tuple[LayerPart, ...]:
        """The layers that are coded."""
        return tuple(LayerPart(f"layer.{index}", rows) for index, rows in enumerate(self.layers) if rows is not None)

    def tensors_of(self, part: LayerPart) -> list[BodyTensor]:
        """The codes of a layer."""
        return [BodyTensor("codes", "U8", (self.batch, part.rows, self.tokens))]

    def content(self) -> dict[str, Any]:
        """What is sent of it, for JSON."""
        return {"codec": self.codec, "batch": self.batch, "tokens": self.tokens, "layers": self.layers}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        """The inverse of `content`."""
        layers = tuple(content["layers"])
        counts = [content["batch"], content["tokens"], *(rows for rows in layers if rows is not None)]
        if not all(type(count) is int and 0 <= count <= _MOST for count in counts) or len(layers) > MOST_LAYERS:
            raise ValueError(f"{len(layers)} layers, and the counts {counts[:8]}")
        return cls(**content | {"layers": layers})


def written(head: CodecHead, codes: Sequence[torch.Tensor | None]) -> Iterator[bytes]:
    """A message, layer by layer."""
    writer = MessageWriter(head)
    yield writer.begin()
    for layer in codes:
        if layer is not None:
            yield writer.add({"codes": layer})


def read(source: Source, codec: str, layers: tuple[int | None, ...]) -> list[torch.Tensor | None]:
    """The codes of a message.

    Args:
        codec: As in `CodecHead`, and `layers`: those of the codec that reads.
    """
    message = MessageReader(source, CodecHead)
    head = message.head
    if head.codec != codec:
        raise ArtifactError(f"These are codes of the codec {head.codec}, not of {codec}. Read them with that one.")
    if head.layers != layers:
        raise ArtifactError(f"Codes have {head.layers} bytes of a token in each layer, and the codec {layers}. Encode them anew.")
    parts = iter([tensors["codes"] for tensors in message])
    return [None if rows is None else next(parts) for rows in head.layers]
