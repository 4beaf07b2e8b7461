"""Whole caches as messages: a prompt is read in one process and goes on in another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch

from hf_kvcaches.codec.wire.messages import BodyTensor, MessageReader, MessageWriter, Source
from hf_kvcaches.core.save import Content
from hf_kvcaches.stores.blobs_format import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST = 1 << 40


class _CachePart(NamedTuple):
    """The tensors of a layer, or those that layers share."""

    name: str
    tensors: tuple[BodyTensor, ...]

    @classmethod
    def of(cls, name: str, tensors: dict[str, torch.Tensor]) -> _CachePart:
        found = [BodyTensor(name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
        # The widest first: so each begins at a multiple of its elements' size.
        return cls(name, tuple(sorted(found, key=lambda tensor: -DTYPES[tensor.dtype].itemsize)))


@dataclass(frozen=True)
class CacheHead:
    """What is known of a cache before its tensors come.

    Args:
        header: See `Content`.
        parts: By the first part of the tensors' names.
    """

    kind: ClassVar[str] = "states of a cache"
    finite: ClassVar[bool] = False

    header: dict[str, Any]
    parts: tuple[_CachePart, ...]

    def tensors_of(self, part: _CachePart) -> list[BodyTensor]:
        """What the body of a part holds, in its order."""
        return list(part.tensors)

    def content(self) -> dict[str, Any]:
        """What is sent of it, for JSON."""
        return {"header": self.header, "parts": self.parts}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Self:
        """The inverse of `content`."""
        parts = []
        for name, tensors in content["parts"]:
            found = tuple(BodyTensor(str(name), dtype, tuple(shape)) for name, dtype, shape in tensors)
            sizes = [size for tensor in found for size in tensor.shape]
            if not all(tensor.dtype in DTYPES for tensor in found) or not all(type(size) is int and 0 <= size <= _MOST for size in sizes):
                raise ValueError(f"a part {str(name)[:100]!r} of such tensors")
            parts.append(_CachePart(name, found))
        return cls(dict(content["header"]), tuple(parts))


def written(content: Content) -> Iterator[bytes]:
    """A cache's content as a message, layer by layer."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in content.tensors.items():
        group, _, rest = name.partition(".")
        groups.setdefault(group, {})[rest] = tensor
    writer = MessageWriter(CacheHead(content.header, tuple(_CachePart.of(name, tensors) for name, tensors in groups.items())))
    yield writer.begin()
    for tensors in groups.values():
        yield writer.add(tensors)


def read(source: Source) -> Content:
    """The content of a message."""
    message = MessageReader(source, CacheHead)
    tensors: dict[str, torch.Tensor] = {}
    for part, found in zip(message.head.parts, message, strict=True):
        tensors |= {f"{part.name}.{name}": tensor for name, tensor in found.items()}
    return Content(message.head.header, tensors)
