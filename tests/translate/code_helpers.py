"""Small codes, and their bytes put together slowly from the description of the format."""

from __future__ import annotations

import hashlib
import itertools
import json

import pytest
import torch
from safetensors.torch import load

from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.translate.codes import CodesHead, Part, Prompt, SemanticCodes

NAMES = ("layer.1", "layer.2", "layers.3-5")
SIZES = (21, 35, 14)


def head_of(lengths=(4, 3), names=NAMES, translator: str = "t", first: int = 0) -> CodesHead:
    prompts = tuple(Prompt.of([7 * number + place for place in range(length)], first) for number, length in enumerate(lengths))
    return CodesHead(translator, prompts, names)


def codes_of(head: CodesHead | None = None, seed: int = 0, sizes=SIZES) -> SemanticCodes:
    head = head or head_of()
    made = torch.Generator().manual_seed(seed)
    parts = zip(head.names, sizes, strict=False)
    return SemanticCodes(head, [Part(name, torch.randint(0, 256, (size,), dtype=torch.uint8, generator=made)) for name, size in parts])


def same(one, other) -> bool:
    """Whether two codes, or their parts, are equal to the bit."""
    if hasattr(one, "head") and one.head != other.head:
        return False
    return all(
        part is not None and twin is not None and part.name == twin.name and torch.equal(part.codes, twin.codes)
        for part, twin in itertools.zip_longest(one, other)
    )


def blake(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def message(head: bytes, bodies: list[bytes], version: int = 3, numbers=None, lengths=None) -> bytes:
    """One message of the format in a few lines, with digests that are right whatever is in it."""
    start = b"HFKVCODE" + version.to_bytes(4, "little") + len(head).to_bytes(4, "little") + head
    out, digest = start + blake(start), blake(start)
    for place, body in enumerate(bodies):
        number = (numbers or range(len(bodies)))[place]
        digest = blake(digest + number.to_bytes(4, "little") + body)
        out += number.to_bytes(4, "little") + (lengths or {}).get(place, len(body)).to_bytes(8, "little") + digest + body
    return out


def json_of(head: CodesHead) -> bytes:
    prompts = [[each.tokens, each.digest, *([each.first] if each.first else [])] for each in head.prompts]
    content = {"kind": "semantic codes", "version": 2, "translator": head.translator, "prompts": prompts, "names": list(head.names)}
    return json.dumps(content, separators=(",", ":")).encode()


def message_by_hand(codes: SemanticCodes, head: bytes | None = None, **forged) -> bytes:
    """The bytes of codes, put together by hand."""
    return message(json_of(codes.head) if head is None else head, [blob([("codes", part.codes)]) for part in codes], **forged)


def blob(tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """A safetensors file, by its specification."""
    names = {torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8", torch.float32: "F32"}
    layout, body = {}, b""
    for name, tensor in tensors:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        layout[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(layout, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    made = len(text).to_bytes(8, "little") + text + body
    assert all(torch.equal(tensor, load(made)[name]) for name, tensor in tensors)
    return made


def refused(data: bytes, match: str | None = None) -> str:
    """The message with which bytes are refused."""
    with pytest.raises(ArtifactError, match=match) as caught:
        SemanticCodes.from_bytes(data)
    return str(caught.value)
