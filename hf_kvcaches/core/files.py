"""One container for artifacts, saved caches and caches on the wire: a safetensors file with a JSON header and a checksum.

Its metadata are `hf_kvcaches`, the version of the container; `header`, JSON; and `sha256`, in hex, of the header and then, for each
tensor in the order of names, of the JSON list `[name, dtype, shape]` and its bytes. The checksum finds accidents: whoever can write a file
can write its checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError
from hf_kvcaches.stores.blobs_format import as_bytes, dense, header_of, read_tensors
from hf_kvcaches.stores.files import Bytes, Source, opened, parse_json, reader_of

MOST_LAYERS = 1 << 10  # of a model: each is worked out, however short a file is that says how many there are
_VERSION = "2"
_AGAIN = "Copy it again, or make it anew."


class Content(NamedTuple):
    """What a container holds: JSON values, and tensors on the CPU."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]


def container(content: Content) -> list[Bytes]:
    """Return the bytes of a container, in pieces without a copy; raise a `ConfigError` for what would not come back as it is."""
    tensors = dense(content.tensors)
    try:
        text = json.dumps(content.header, allow_nan=False)
        header = header_of(tensors, {"hf_kvcaches": _VERSION, "header": text, "sha256": _checksum(text, tensors)})
        if not _has_string_keys(content.header):  # `json` makes strings of numbers, booleans and None
            raise ValueError("keys that are not strings")
        for part in (text, header[8:]):
            parse_json(part)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"header: expected JSON values under string keys, got {error}. Convert it, or store less in one.") from error
    return [header, *map(as_bytes, tensors.values())]


def read_file(path: str | os.PathLike[str]) -> Content:
    """Read a container; raise an `ArtifactError` for any other file."""
    try:
        with artifact_errors(f"{path}: expected a complete file of hf_kvcaches", _AGAIN), opened(path) as file:
            return _content(*read_tensors(file.read, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise ArtifactError(f"{path} can't be read: {error}. Check the path.") from error


def read_message(source: Source) -> Content:
    """Read a container from bytes, pieces, or a function that gives between 1 and the given number of bytes and is asked for no more."""
    read = reader_of(source)
    with artifact_errors("Expected all bytes of a message of hf_kvcaches", "Have it sent again."):
        content = _content(*read_tensors(read))
        if not callable(source) and read(1):
            raise ArtifactError("bytes behind its end")
    return content


def _content(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> Content:
    version, text = metadata.get("hf_kvcaches", "none"), metadata.get("header", "")
    if version != _VERSION:
        raise ArtifactError(f"a safetensors file of version {version[:20]} and not {_VERSION}. Upgrade hf-kvcaches, or make it anew")
    if metadata.get("sha256") != _checksum(text, tensors):
        raise ArtifactError("damage or edits: its checksum does not fit its content")
    if not isinstance(header := parse_json(text), dict):
        raise ArtifactError("a header that is no dict")
    return Content(header, tensors)


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    hasher = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name, tensor in sorted(tensors.items()):
        hasher.update(json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]).encode())
        hasher.update(as_bytes(tensor))
    return hasher.hexdigest()


def _has_string_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_string_keys(item) for key, item in value.items())
    return not isinstance(value, list | tuple) or all(map(_has_string_keys, value))


def require_header(header: Mapping[str, Any], kind: str, version: int, fields: Mapping[str, Any], where: str) -> None:
    if (got := header.get("type")) != kind:
        raise ArtifactError(f"{where}: expected a {kind!r}, got a {got!r}. Load it with the class for that kind.")
    got = header.get("format_version")
    if type(got) is int and got != version:
        hint = "Upgrade hf-kvcaches." if got > version else "That is no longer read. Make it anew."
        raise ArtifactError(f"{where}: expected format version {version}, got {got}. {hint}")
    wrong = [name for name, types in {"format_version": int, **fields}.items() if not isinstance(header.get(name, ...), types)]
    if wrong:
        raise ArtifactError(f"{where}: fields are missing or of the wrong kind ({', '.join(wrong)}). {_AGAIN}")


@contextlib.contextmanager
def artifact_errors(what: str, hint: str) -> Iterator[None]:
    """Raise an `ArtifactError` that begins with `what` in place of the errors that senseless content leads to."""
    try:
        yield
    except (UnsupportedError, torch.OutOfMemoryError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        why = str(error) if isinstance(error, ArtifactError) else f"{type(error).__name__}: {error}"
        raise ArtifactError(f"{what} ({why[:500]}). {hint}") from error


def checked_layers(count: Any) -> int:
    if type(count) is not int or not 0 <= count <= MOST_LAYERS:
        raise ArtifactError(f"layers: expected a number from 0 to {MOST_LAYERS}, got {str(count)[:50]}. {_AGAIN}")
    return count


def part_of(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The tensors whose names begin with that of a part and a dot, by the rest of their names."""
    return {name.removeprefix(f"{part}."): tensor for name, tensor in tensors.items() if name.startswith(f"{part}.")}
