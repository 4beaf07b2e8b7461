"""Small codes of every sort, and their bytes put together slowly from the description of the format."""

from __future__ import annotations

import hashlib
import itertools
import json

import pytest
import torch
from safetensors.torch import load

from hf_kvcaches.core.quantize import Quantized
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.translate.codes import Part, SemanticCodes, pack
from hf_kvcaches.translate.head import CodesHead, PartHead, Row

DTYPES = ["float32", "float16", "int8", "int4"]
LAYERS = (PartHead("layer.1", "reuse", (1,), {"kv": 3}), PartHead("layer.2", "patch", (2,), {"h": 5}))
TWO_CODES = PartHead("all", "cross_layer", (1, 2, 5), {"k": 2, "v": 4})


def head_of(dtype: str = "int8", lengths=(4, 3), parts=(*LAYERS, TWO_CODES), group: int | None = None, **names) -> CodesHead:
    rows = tuple(Row.of([7 * number + place for place in range(length)]) for number, length in enumerate(lengths))
    names = {"translator": "t", "producer": "p", "consumer": "c", "method": "joint"} | names
    return CodesHead(**names, dtype=dtype, rows=rows, parts=parts, group=group)


def codes_of(head: CodesHead | None = None, seed: int = 0) -> SemanticCodes:
    head = head or head_of()
    made = torch.Generator().manual_seed(seed)
    parts = []
    for part in head.parts:
        floats = {name: torch.randn(head.tokens, rank, generator=made) * 3 for name, rank in part.ranks.items()}
        parts.append(Part(part.name, {name: pack(z, head.dtype, head.group) for name, z in floats.items()}))
    return SemanticCodes(head, parts)


def tensors_of(code: torch.Tensor | Quantized) -> dict[str, torch.Tensor]:
    return code.tensors() if isinstance(code, Quantized) else {"": code}


def same(one, other) -> bool:
    """Whether two codes, or their parts, are equal to the bit."""
    if hasattr(one, "head") and one.head != other.head:
        return False
    for part, twin in itertools.zip_longest(one, other):
        if (part.name, list(part.codes)) != (twin.name, list(twin.codes)):
            return False
        for name, code in part.codes.items():
            if isinstance(code, Quantized) and code.meta() != twin.codes[name].meta():
                return False
            mine, others = tensors_of(code), tensors_of(twin.codes[name])
            if not all(mine[n].dtype == others[n].dtype and torch.equal(mine[n], others[n]) for n in mine | others):
                return False
    return True


def blake(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def message(head: bytes, bodies: list[bytes], version: int = 3, numbers=None, lengths=None) -> bytes:
    """The format in a few lines, with digests that are right whatever is in it."""
    start = b"HFKVCODE" + version.to_bytes(4, "little") + len(head).to_bytes(4, "little") + head
    out, digest = start + blake(start), blake(start)
    for place, body in enumerate(bodies):
        number = (numbers or range(len(bodies)))[place]
        digest = blake(digest + number.to_bytes(4, "little") + body)
        out += number.to_bytes(4, "little") + (lengths or {}).get(place, len(body)).to_bytes(8, "little") + digest + body
    return out


def json_of(head: CodesHead) -> bytes:
    content = {"kind": "semantic codes"} | {name: getattr(head, name) for name in ("translator", "producer", "consumer", "method", "dtype")}
    content["rows"] = [[row.tokens, row.digest] for row in head.rows]
    content["parts"] = [[part.name, part.kind, list(part.layers), part.ranks] for part in head.parts]
    content["group"] = head.group
    return json.dumps(content, separators=(",", ":")).encode()


def safetensors_of(part: Part) -> bytes:
    flat = {}
    for name, code in part.codes.items():
        flat |= {f"{name}.{piece}" if piece else name: tensor for piece, tensor in tensors_of(code).items()}
    # Wide elements first, each kind in the order of the codes.
    order = sorted(flat, key=lambda name: (-flat[name].element_size(), list(flat).index(name)))
    return blob([(name, flat[name]) for name in order])


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
    assert all(torch.equal(tensor, load(made)[name]) for name, tensor in tensors if tensor.isfinite().all())
    return made


def bodies_of(codes: SemanticCodes) -> list[bytes]:
    return [safetensors_of(part) for part in codes]


def refused(data: bytes, match: str | None = None) -> str:
    """The message with which bytes are refused."""
    with pytest.raises(ArtifactError, match=match) as caught:
        SemanticCodes.from_bytes(data)
    return str(caught.value)
