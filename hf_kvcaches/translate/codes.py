"""Semantic codes: what a producer sends in place of its keys and values, and consumers rebuild theirs from.

A batch's tokens are concatenated without padding, so each code is `(tokens of all rows, rank)`. Codes come in parts, one for each layer
that is sent or one for all, and the head that comes before them says what they will be. `core/wire/messages.py` has the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_kvcaches.core.files import write_atomically
from hf_kvcaches.core.quantize import Quantized, quantize
from hf_kvcaches.core.wire.messages import Bytes, MessageWriter
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs_format import DTYPES, dense
from hf_kvcaches.stores.files import opened
from hf_kvcaches.translate.head import CodesHead, check_dtype


@dataclass(frozen=True, eq=False)
class Part:
    """The codes of a layer, or of all.

    Args:
        name: That of its `PartHead`.
        codes: `(tokens, rank)` each, by name: floating point, or quantised over the tokens. `pack` makes them.
    """

    name: str
    codes: dict[str, Tensor | Quantized]

    def decoded(self, name: str, dtype: torch.dtype) -> Tensor:
        """A code as `(tokens, rank)`. What lies beyond the range of the type becomes the range's end."""
        code = self.codes[name]
        if isinstance(code, Quantized):
            return code.dequantize(dtype)
        limit = torch.finfo(dtype).max
        return (code.clamp(-limit, limit) if limit < torch.finfo(code.dtype).max else code).to(dtype)

    def joined(self) -> Tensor:
        """All its codes side by side, (tokens, rank of all), float32."""
        return torch.cat([self.decoded(name, torch.float32) for name in self.codes], dim=1)


def pack(z: Tensor, dtype: str, group: int | None) -> Tensor | Quantized:
    """A code as it is sent. What lies beyond the range of float16, or of float32 where it is sent as such, becomes the range's end.

    Args:
        z: `(tokens, rank)`, of any floating-point type.
        dtype: `float32`, `float16`, `int8` or `int4`.
        group: How many tokens of a channel share a scale; None: all.
    """
    check_dtype(dtype)
    if not isinstance(z, Tensor) or z.ndim != 2 or not z.is_floating_point():
        raise ConfigError.of("z", "floats (tokens, rank)", f"{z.dtype} {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__)
    if not bool(z.isfinite().all()):
        raise ConfigError.of("z", "finite values", "infinities or NaN", "Look for them in what the producer computed.")
    # In float32: bfloat16 would round the end of float16's range to a number beyond it.
    limit = torch.finfo(torch.float32 if dtype == "float32" else torch.float16).max
    floats = z.detach().float().clamp(-limit, limit)
    if dtype == "float32":
        return floats.contiguous()
    half = floats.half()
    if dtype == "float16":
        return half.contiguous()
    return quantize(half, bits=8 if dtype == "int8" else 4, group=group, axis=0, check_finite=False)


class CodesWriter:
    """Codes as bytes, part by part: a producer sends a layer while it computes the next."""

    def __init__(self, head: CodesHead) -> None:
        self.head = head
        self._message = MessageWriter(head)

    def begin(self) -> bytes:
        """What is sent first. Called once."""
        return self._message.begin()

    def add(self, part: Part) -> bytes:
        """The bytes of the next part."""
        assert not (fault := _misfit(self.head, self._message.number, part)), fault
        return self._message.add(dense(_tensors(part)))


class SemanticCodes:
    """All codes of one or more prompts, in memory.

    Args:
        head: What they are.
        parts: As the head says, in its order.
    """

    def __init__(self, head: CodesHead, parts: Iterable[Part]) -> None:
        self.head = head
        self.parts = tuple(parts)
        assert len(self.parts) == len(head.parts), f"{len(self.parts)} parts for a head of {len(head.parts)}"
        for number, part in enumerate(self.parts):
            assert not (fault := _misfit(head, number, part)), fault

    @property
    def nbytes(self) -> int:
        """The length of `to_bytes()`."""
        return self.head.nbytes

    def chunks(self) -> Iterator[bytes]:
        """The bytes to send: the head, then part by part."""
        writer = CodesWriter(self.head)
        yield writer.begin()
        for part in self.parts:
            yield writer.add(part)

    def to_bytes(self) -> bytes:
        """All bytes at once."""
        return b"".join(self.chunks())

    @staticmethod
    def from_bytes(data: Bytes) -> SemanticCodes:
        """The inverse of `to_bytes`. Anything else is an `ArtifactError`.

        Args:
            data: All of the bytes, and no more.
        """
        if not isinstance(data, Bytes):
            raise ConfigError.of("data", "bytes", type(data).__name__)
        return _collected([data])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file, whole or not at all.

        Args:
            path: In a folder that exists.
        """

        def write(temporary: Path) -> None:
            with open(temporary, "wb") as file:
                file.writelines(self.chunks())

        write_atomically(path, write)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> SemanticCodes:
        """Reads what `save` wrote.

        Args:
            path: The file.
        """
        try:
            with opened(path) as file:
                return _collected(iter(lambda: file.read(1 << 20), b""))
        except OSError as error:
            raise ArtifactError(f"{path}: expected a file of semantic codes, got {error}. Write one with SemanticCodes.save.") from error
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error}") from error

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __repr__(self) -> str:
        head = self.head
        return (
            f"SemanticCodes({head.method}, {head.dtype}, {len(head.rows)} rows of {head.tokens} tokens in all, "
            f"{len(self.parts)} parts, {self.nbytes:,} bytes)"
        )


def _collected(pieces: Iterable[Bytes]) -> SemanticCodes:
    # Late: codes make their reader and the reader makes codes.
    from hf_kvcaches.translate.arriving import ArrivingCodes

    return ArrivingCodes(pieces).collect()


def _tensors(part: Part) -> dict[str, Tensor]:
    """The tensors of a part by their names in its body."""
    found: dict[str, Tensor] = {}
    for name, code in part.codes.items():
        if isinstance(code, Quantized):
            found |= {f"{name}.{piece}": tensor for piece, tensor in code.tensors().items()}
        else:
            found[name] = code
    return found


def _misfit(head: CodesHead, number: int, part: Part) -> str:
    """Why this is not the part of that number, or nothing."""
    if number >= len(head.parts):
        return f"a part {part.name!r} after the last of {len(head.parts)}"
    expected = head.parts[number]
    if part.name != expected.name:
        return f"part {part.name!r} where {expected.name!r} is next"
    given = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in _tensors(part).items()}
    wanted = {tensor.name: (DTYPES[tensor.dtype], tensor.shape) for tensor in head.tensors_of(expected)}
    if given != wanted:
        return f"part {part.name!r} has {given}, its head says {wanted}"
    for name, rank in expected.ranks.items():
        code = part.codes[name]
        # Other groups can have scales of the same shape.
        if isinstance(code, Quantized) and code.meta() != head.meta_of(rank):
            return f"code {name!r} of part {part.name!r} has {code.meta()}, its head says {head.meta_of(rank)}"
    return ""
