"""How semantic codes lie in bytes.

```
8 bytes   HFKVCODE
4         version
4         length of the head
head      JSON: between which models, of which prompts, and what parts follow
16        BLAKE2b of all before it
          then for each part:
4         its number, from 0
8         length of its body
16        BLAKE2b of the digest before it, the number and the body
body      a safetensors file: codes as they are, or `data`, `scale` and `zero` of quantised ones
```

Numbers are little-endian. Every digest takes the one before it in, so a part is accepted in its own place of its own message only.
Names, shapes and dtypes of all tensors follow from the head, and with them each body's length and all of it but the numbers: a reader never
takes more memory than it was sent bytes, and decoders never meet a tensor that they don't expect.

The digests find accidents. Whoever can write codes can write their digests too: any bytes at all end in an `ArtifactError` or in codes of
the right form, but whether a producer is to be believed is for others to say.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hf_kvcaches.stores.reading import DTYPES

VERSION = 2
MAGIC = b"HFKVCODE"
# Codes that are sent as they are: the name of their type in a body.
PLAIN = {"float32": "F32", "float16": "F16"}
# Magic, version, length of the head.
START = struct.Struct("<8sII")
# Number, length of the body, digest.
PART = struct.Struct("<IQ16s")
DIGEST = 16
# Beyond these lies damage, or a trap: small values in JSON take many times their length, and long to read. Commas bound how many there are
# before one is read. 60,000 rows fit.
LONGEST_HEAD = 16 << 20
MOST_COMMAS = 1 << 17


class BodyTensor(NamedTuple):
    """A tensor in the body of a part; `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Of its numbers."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def body_tensors(ranks: Mapping[str, int], tokens: int, dtype: str, group: int | None) -> list[BodyTensor]:
    """The tensors of a part in the order of its body.

    Args:
        dtype: `float32`, `float16`, `int8` or `int4`.
        group: How many tokens share a scale; None: all.
    """
    if dtype in PLAIN:
        return [BodyTensor(name, PLAIN[dtype], (tokens, rank)) for name, rank in ranks.items()]
    groups = -(-tokens // (group or max(tokens, 1)))
    data, length = ("I8", tokens) if dtype == "int8" else ("U8", -(-tokens // 2))
    found = []
    for name, rank in ranks.items():
        found += [BodyTensor(f"{name}.scale", "BF16", (rank, groups)), BodyTensor(f"{name}.zero", "F16", (rank, groups))]
    # The widest first: so each begins at a multiple of its elements' size.
    return found + [BodyTensor(f"{name}.data", data, (rank, length)) for name, rank in ranks.items()]


def code_meta(rank: int, tokens: int, dtype: str, group: int | None) -> dict[str, Any]:
    """What a quantised code has beside its tensors, as `Quantized` takes and gives it.

    Args:
        dtype: `int8` or `int4`.
        group: How many tokens share a scale; None: all.
    """
    return {"shape": [tokens, rank], "dtype": "float16", "bits": 8 if dtype == "int8" else 4, "group": group, "axis": 0}


def body_header(tensors: Sequence[BodyTensor]) -> bytes:
    """What stands in a safetensors file before the numbers."""
    layout, end = {}, 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        layout[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(layout, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def body_size(tensors: Sequence[BodyTensor]) -> int:
    """Bytes of a body."""
    return len(body_header(tensors)) + sum(tensor.nbytes for tensor in tensors)


def digest_of(*pieces: bytes | bytearray) -> bytes:
    """The digest of the pieces one after the other."""
    hasher = hashlib.blake2b(digest_size=DIGEST)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def digest_of_part(before: bytes, number: int, body: bytes | bytearray) -> bytes:
    """The digest of a part, which has those of all parts before it in it.

    Args:
        before: The digest of the part before, or of the head.
    """
    return digest_of(before, number.to_bytes(4, "little"), body)
