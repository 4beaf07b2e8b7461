"""A codec as an engine loads it: a folder with the artifact and, in `engine.json`, the engine and the checkpoint that it is for."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from packaging.version import Version

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch, UnsupportedError
from hf_kvcaches.stores.blobs_format import header_in, layout_of
from hf_kvcaches.stores.files import opened, parse_json, write_atomically

Engine = Literal["vllm", "lmcache"]
# vLLM says at which positions tokens stand, so that keys can be coded before their rotation. LMCache does not.
ROTATIONS: dict[Engine, Literal["aware", "post"]] = {"vllm": "aware", "lmcache": "post"}
# The first version whose interface fits. Both change often.
OLDEST: dict[Engine, str] = {"vllm": "0.32.0", "lmcache": "0.5.6"}
_FILE, _VERSION = "engine.json", 1
_SAMPLE = 2048  # bytes of a tensor's start, middle and end


@dataclass(frozen=True)
class EngineCodec:
    """What `save` wrote: the codec, and the digest of the weights that it is for."""

    codec: KVCodec
    checkpoint: str

    @classmethod
    def load(cls, folder: str | os.PathLike[str], engine: Engine) -> EngineCodec:
        """Load what was calibrated for an engine; refuse anything else by name."""
        file, hint = Path(folder, _FILE), f"Make it with: hf-kvcaches calibrate codec --for {engine} ..."
        facts = parse_json(file.read_bytes()) if file.is_file() else {"engine": "no engine", "version": _VERSION}
        version = facts.get("version") if isinstance(facts, dict) else None
        if version != _VERSION:
            raise ArtifactError(f"{file}: expected version {_VERSION}, got {version!r}. {hint}")
        if facts["engine"] != engine:
            raise ConfigError.of("codec", f"the folder of a codec for {engine}", f"{folder} for {facts['engine']}", hint)
        return cls(KVCodec.from_pretrained(folder), str(facts["checkpoint"]))

    def require_checkpoint(self, model: str, revision: str | None = None) -> None:
        """Raise `FingerprintMismatch` unless a checkpoint, a folder or a hub id, has the weights that the codec was calibrated for."""
        if checkpoint_digest(model, revision) != self.checkpoint:
            raise FingerprintMismatch(
                f"codec: expected the checkpoint that it was calibrated for, got {Path(model).name} with other weights. Calibrate anew."
            )


def save(codec: KVCodec, folder: str | os.PathLike[str], engine: Engine, model: str) -> None:
    """Write a codec of a model, which is a folder or a hub id, for an engine into a folder."""
    if codec.settings.rotation != ROTATIONS[engine]:
        raise ConfigError.of("rotation", f"{ROTATIONS[engine]!r} for {engine}", codec.settings.rotation, "Calibrate with --for.")
    if not all(codec.has_codes(index) for index in range(codec.layer_count)):
        raise UnsupportedError(f"{engine}: the codec leaves layers out, which attend to a window or keep a state. Use fp8.")
    facts = {"version": _VERSION, "engine": engine, "checkpoint": checkpoint_digest(model)}
    codec.save_pretrained(folder)
    write_atomically(Path(folder, _FILE), [json.dumps(facts).encode()])


def checkpoint_digest(model: str, revision: str | None = None) -> str:
    """Return a digest of the names, dtypes, shapes and samples of all tensors of a checkpoint, in milliseconds.

    Args:
        model: A folder, or the hub id of a checkpoint that was downloaded.
    """
    try:
        folder = Path(model) if Path(model).is_dir() else Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ConfigError.of("model", "a checkpoint on this machine", model, "Download it first.") from error
    samples = sorted(sample for path in folder.glob("*.safetensors") for sample in _samples(path))
    if not samples:
        raise ConfigError.of("model", "a checkpoint in safetensors files", model, "Convert it.")
    return hashlib.blake2b(b"".join(samples), digest_size=16).hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    """For each tensor of a file a digest of its name, dtype, shape and some of its bytes."""
    with opened(path) as file:
        header = header_in(file.read, os.fstat(file.fileno()).st_size)
        for name, (dtype, shape, start) in layout_of(header, None).tensors.items():
            size, digest = dtype.itemsize * math.prod(shape), hashlib.blake2b(f"{name} {dtype} {shape}".encode())
            for offset in (0, max(0, size // 2 - _SAMPLE), max(0, size - _SAMPLE)):
                file.seek(len(header) + start + offset)
                digest.update(file.read(min(_SAMPLE, size)))
            yield digest.digest()


def require_version(engine: Engine, version: str) -> None:
    """Refuse versions of an engine whose interface is another."""
    if Version(version).release < Version(OLDEST[engine]).release:
        raise UnsupportedError(f"{engine} {version}: expected {OLDEST[engine]} or newer, whose interface is another. Upgrade it.")
