"""What is calibrated once, saved, shared and loaded again, with proof that it is whole and made for the model at hand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hf_kvcaches.core._model_card import merge_cards, model_card
from hf_kvcaches.core.files import (
    exclusive,
    move_into_place,
    not_finite,
    read_bytes,
    read_safetensors,
    sha256_of,
    write_atomically,
    write_safetensors,
)
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.publishing import CARD_NAME, publish
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError
from hf_kvcaches.stores.files import TEMPORARY_SUFFIX, parse_json, temporary_beside

MANIFEST_NAME = "kvcache_artifact.json"
_TENSORS_NAME = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
_TENSORS_PATTERN = "tensors-*.safetensors"
_MANIFEST_VERSION = 1
# A writer may replace the tensors between a reader's look at the manifest and its opening of the file that this names.
_READ_ATTEMPTS = 5
_AGAIN = "Copy or download it again, or make it anew."
# What content that makes no sense is met with: errors of Python, of torch, and `ConfigError`, as for an argument of a user's.
_NONSENSE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


class Artifact(ABC):
    """Something calibrated for a model, as a folder or a Hub repository.

    The folder holds the tensors (`tensors-<digest>.safetensors`), one JSON file that names them and proves them
    (`kvcache_artifact.json`) and a model card (`README.md`). A subclass says what it stores; this class saves, checks and loads it.

    Attributes:
        artifact_type: What kind it is, in lower-case words with hyphens. Files of another kind are refused.
        format_version: The version of what the subclass stores; raise it when that changes, and override `migrate`.
        fingerprint: The model that it was made for, or `None` if it fits any.
        may_be_infinite: Names of tensors that may hold infinities. All others are refused where they are not finite, saved or loaded.
    """

    artifact_type: ClassVar[str]
    format_version: ClassVar[int]
    fingerprint: ModelFingerprint | None = None
    may_be_infinite: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        kind = cls.__dict__.get("artifact_type", "kind")
        if not isinstance(kind, str) or re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", kind) is None:
            raise ConfigError.of(f"{cls.__name__}.artifact_type", "lower-case words joined by hyphens", kind, "It is a tag on the Hub too.")

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors to store."""

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """All else to store: JSON values under string keys."""

    @classmethod
    @abstractmethod
    def restore(cls, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Self:
        """Builds the object from what `tensors` and `metadata` gave; the fingerprint is set afterwards."""

    @abstractmethod
    def describe_calibration(self) -> str:
        """How it was made, as Markdown for the model card: data, settings, measurements."""

    @classmethod
    def migrate(cls, tensors: dict[str, Tensor], metadata: dict[str, Any], version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Brings what an older format version stored to the present one. Refuses unless a subclass knows how."""
        raise ArtifactError(
            f"{cls.artifact_type}: expected format version {cls.format_version}, got {version}, which is no longer read. Make it anew."
        )

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes the artifact into a folder, made if need be.

        A crash at any moment leaves the old or the new artifact, complete, and so do two writers at once (the later wins). Other files
        in the folder stay. In an existing README.md only the part between the generated markers is replaced; without them it is left
        as it is.

        Args:
            folder: Where to.
        """
        # The whole path would tell others about this machine.
        self._write(Path(folder), load_from=Path(folder).resolve().name)

    def push_to_hub(
        self,
        repo_id: str,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str | None = None,
        revision: str | None = None,
    ) -> str:
        """Uploads the artifact to a Hub repository, made if need be, and returns the commit's address.

        Args:
            repo_id: `"owner/name"`.
            private: Whether a new repository is private; `None` takes the owner's default.
            token: A write token; `None` takes the one that is logged in.
            commit_message: Defaults to a sentence naming the kind of artifact.
            revision: The branch, made if need be; `None` is the main one.
        """
        return publish(
            repo_id,
            lambda folder: self._write(folder, load_from=repo_id),
            [MANIFEST_NAME, _TENSORS_PATTERN, CARD_NAME],
            message=commit_message or f"Upload {self.artifact_type}",
            replaced=[_TENSORS_PATTERN],
            private=private,
            token=token,
            revision=revision,
        )

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_id: str | os.PathLike[str],
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        model: nn.Module | None = None,
        tokenizer: Any = None,
    ) -> Self:
        """Loads an artifact from a folder, or from the Hub where there is no such folder.

        Args:
            folder_or_hub_id: A folder, or `"owner/name"`.
            revision: The Hub's branch, tag or commit.
            token: A read token; `None` takes the one that is logged in.
            cache_dir: Where downloads are kept; `None` takes huggingface_hub's place.
            local_files_only: Uses what was downloaded earlier and stays off the network.
            model: The model to use it with. Another than it was made for is a `FingerprintMismatch`; the precision may be another, unless
                it holds keys and values.
            tokenizer: Its tokenizer, compared as well where the artifact was made with one.
        """
        options = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        folder = local_folder(folder_or_hub_id, [MANIFEST_NAME, _TENSORS_PATTERN], **options)
        manifest, tensors = cls._read(folder)
        stored, metadata, version = manifest["fingerprint"], manifest["metadata"], manifest["format_version"]
        with refusing_nonsense(f"{folder}: its fingerprint makes no sense", _AGAIN):
            fingerprint = None if stored is None else ModelFingerprint.from_dict(stored)
        if model is not None and fingerprint is not None:
            fingerprint.require_model(model, f"{cls.artifact_type} from {folder_or_hub_id}", tokenizer)
        with refusing_nonsense(f"{folder}: its content doesn't make a {cls.artifact_type}", _AGAIN):
            if version < cls.format_version:
                tensors, metadata = cls.migrate(tensors, metadata, version)
            artifact = cls.restore(tensors, metadata)
        object.__setattr__(artifact, "fingerprint", fingerprint)
        return artifact

    def _write(self, folder: Path, load_from: str) -> None:
        make_folder(folder)
        manifest = self._manifest()
        with exclusive(folder) as alone:
            manifest["tensors"] = self._write_tensors(folder)
            manifest["checksum"] = _checksum(manifest)
            write_atomically(folder / MANIFEST_NAME, _json_bytes(manifest))
            if alone:
                _sweep(folder, keep=manifest["tensors"]["file"])
            self._write_card(folder / CARD_NAME, load_from)

    def _manifest(self) -> dict[str, Any]:
        from hf_kvcaches import __version__

        metadata, calibration = self.metadata(), self.describe_calibration()
        manifest = {
            "manifest_version": _MANIFEST_VERSION,
            "type": self.artifact_type,
            "format_version": self.format_version,
            "package_version": __version__,
            "fingerprint": None if self.fingerprint is None else self.fingerprint.to_dict(),
            "calibration": calibration,
            "metadata": metadata,
        }
        for name, value in (("metadata", metadata), ("describe_calibration", {"text": calibration}), ("artifact", manifest)):
            if problem := _not_json(value):
                raise ConfigError(f"{name}: expected JSON values under string keys, got {problem}. Convert it, or store less in one.")
        return manifest

    def _write_tensors(self, folder: Path) -> dict[str, Any]:
        tensors = self.tensors()
        with temporary_beside(folder / "tensors") as temporary:
            write_safetensors(temporary, tensors)
            if name := self._not_finite(tensors):
                raise ConfigError.of(f"tensors[{name!r}]", "finite values", "infinities or NaN", "Look for them where it was calibrated.")
            digest, size = sha256_of(temporary), temporary.stat().st_size
            # The name says what is in it, so that a file which the present manifest names is never overwritten with other bytes.
            final = f"tensors-{digest[:16]}.safetensors"
            move_into_place(temporary, folder / final)
        return {"file": final, "sha256": digest, "bytes": size}

    @classmethod
    def _not_finite(cls, tensors: Mapping[str, Tensor]) -> str | None:
        return not_finite({name: tensor.cpu() for name, tensor in tensors.items() if name not in cls.may_be_infinite})

    def _write_card(self, path: Path, load_from: str) -> None:
        try:
            existing = read_bytes(path).decode("utf-8") if path.exists() else None
        except (OSError, ValueError):
            return
        summary = (type(self).__doc__ or self.artifact_type).strip().split("\n\n")[0].replace("\n", " ")
        name, module = type(self).__name__, type(self).__module__
        fresh = model_card(name, module, self.artifact_type, summary, self.fingerprint, self.describe_calibration(), load_from)
        card = merge_cards(existing, fresh)
        if card is not None and card != existing:
            write_atomically(path, card.encode("utf-8", "replace"))

    @classmethod
    def _read(cls, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        missing = ""
        for _ in range(_READ_ATTEMPTS):
            manifest = _read_manifest(folder / MANIFEST_NAME, cls.artifact_type, cls.format_version)
            tensors = _read_tensors(folder, manifest["tensors"])
            if tensors is not None:
                if name := cls._not_finite(tensors):
                    raise ArtifactError(f"{folder}: the tensor {name!r} has infinities or NaN. {_AGAIN}")
                return manifest, tensors
            if missing == manifest["tensors"]["file"]:
                break
            missing = manifest["tensors"]["file"]
        raise ArtifactError(f"{folder / missing}: expected the tensors that {MANIFEST_NAME} names, the file is missing. {_AGAIN}")


def make_folder(folder: Path) -> None:
    """Makes a folder to save something in, unless it is there."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError.of("folder", "a folder or a path where one can be made", str(folder), "A file has that name.")
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def refusing_nonsense(what: str, hint: str) -> Iterator[None]:
    """Raises an `ArtifactError`, which begins with `what`, in the place of what content raises that makes no sense."""
    try:
        yield
    except (ArtifactError, UnsupportedError, torch.OutOfMemoryError):
        raise
    except _NONSENSE as error:
        raise ArtifactError(f"{what} ({type(error).__name__}: {str(error)[:500]}). {hint}") from error


def _read_tensors(folder: Path, entry: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """The tensors that a manifest names, or `None` if the file is not there, or no more."""
    path = folder / entry["file"]
    try:
        if path.stat().st_size != entry["bytes"]:
            raise ArtifactError(f"{path}: truncated or damaged, its length is not the one in {MANIFEST_NAME}. {_AGAIN}")
        return read_safetensors(path, entry["sha256"])[0]
    except (OSError, ArtifactError) as error:
        if not path.exists():
            return None
        raise error if isinstance(error, ArtifactError) else ArtifactError(f"{path}: can't be read: {error}. {_AGAIN}") from error


def _sweep(folder: Path, keep: str) -> None:
    """Removes the tensors of artifacts that were replaced and what killed writers left. Only while holding off other writers."""
    for path in folder.iterdir():
        stale = _TENSORS_NAME.fullmatch(path.name) is not None and path.name != keep
        if stale or path.name.endswith(TEMPORARY_SUFFIX):
            # On Windows a file that a reader has open stays, until the next save.
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _read_manifest(path: Path, artifact_type: str, format_version: int) -> dict[str, Any]:
    try:
        manifest = parse_json(read_bytes(path))
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{path.parent}: expected a saved artifact, there is no {path.name} in it. Pass the folder given to save_pretrained."
        ) from error
    except (OSError, ArtifactError) as error:
        raise ArtifactError(f"{path}: expected JSON: {error}. {_AGAIN}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("manifest_version"), int) or "type" not in manifest:
        raise ArtifactError(f"{path}: expected the description of an artifact, got other JSON. {_AGAIN}")
    if manifest["manifest_version"] > _MANIFEST_VERSION:
        raise ArtifactError(
            f"{path}: expected layout version {_MANIFEST_VERSION} or older, got {manifest['manifest_version']}. Upgrade hf-kvcaches."
        )
    if manifest.get("checksum") != _checksum(manifest):
        raise ArtifactError(f"{path}: damaged or edited, its checksum doesn't fit its content. {_AGAIN}")
    if manifest["type"] != artifact_type:
        raise ArtifactError(f"{path}: expected a {artifact_type!r}, got a {manifest['type']!r}. Load it with the class for that kind.")
    version = manifest.get("format_version")
    if isinstance(version, int) and version > format_version:
        raise ArtifactError(f"{path}: expected format version {format_version} or older, got {version}. Upgrade hf-kvcaches.")
    entry = manifest.get("tensors")
    sound = (
        isinstance(version, int)
        and isinstance(manifest.get("metadata"), dict)
        and "fingerprint" in manifest
        and isinstance(entry, dict)
        and _TENSORS_NAME.fullmatch(str(entry.get("file"))) is not None
        and {"bytes", "sha256"} <= set(entry)
    )
    if not sound:
        raise ArtifactError(f"{path}: fields are missing or of the wrong kind. {_AGAIN}")
    return manifest


def _json_bytes(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def _checksum(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    # Escaped, so that no string, however broken, fails to be checked.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _not_json(metadata: Any) -> str | None:
    """What would not survive the way through JSON, or `None`."""
    if not isinstance(metadata, dict):
        return type(metadata).__name__
    try:
        back = parse_json(_json_bytes(metadata))
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return None if list(_keys(back)) == list(_keys(metadata)) else "keys that are not strings"


def _keys(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *(key for item in value.values() for key in _keys(item))]
    return [key for item in value for key in _keys(item)] if isinstance(value, list | tuple) else []


def local_folder(folder_or_hub_id: str | os.PathLike[str], files: list[str], **options: Any) -> Path:
    """A folder, or what was downloaded of a Hub repository where there is no such folder.

    Args:
        folder_or_hub_id: A folder, or `"owner/name"`.
        **options: `revision`, `token`, `cache_dir`, `local_files_only`.
    """
    repo_id = str(folder_or_hub_id)
    if Path(folder_or_hub_id).is_dir():
        return Path(folder_or_hub_id)
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo_id) is None or repo_id.startswith("."):
        raise ArtifactError(f"{repo_id}: expected a folder that exists or a Hub id like 'owner/name', it is neither. Check the path.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=files, **options))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ArtifactError(
            f"{repo_id}: there is no such folder, and the Hub gave no artifact of that name: {error}. "
            "Check the name, the revision, the token and the network."
        ) from error
