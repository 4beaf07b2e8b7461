"""`Artifact`: what is calibrated once, saved, shared on the Hub, and loaded for the model that it was made for."""

from __future__ import annotations

import contextlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from torch import Tensor, nn

from hf_kvcaches.core.files import Content, artifact_errors, container, read_file
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import fingerprint_of
from hf_kvcaches.core.model_card import CARD_NAME, merge_card, model_card
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs_format import not_finite
from hf_kvcaches.stores.files import write_atomically
from hf_kvcaches.version import __version__

FILE_NAME = "artifact.safetensors"
_AGAIN = "Copy or download it again, or make it anew."


class Artifact(ABC):
    """Something calibrated for a model, as a folder or a Hub repository: `artifact.safetensors`, and a model card beside it.

    Attributes:
        artifact_type: The kind, in lower-case words with hyphens. Files of another kind are refused.
        format_version: The version of what the subclass stores; raise it when that changes, and override `migrate`.
        fingerprint: The model that it was made for, or `None` if it fits any.
        may_be_infinite: Names of tensors that may hold infinities. All others are refused where they are not finite, saved or loaded.
    """

    artifact_type: ClassVar[str]
    format_version: ClassVar[int]
    fingerprint: ModelFingerprint | None = None
    may_be_infinite: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors to store."""

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """All else to store: JSON values under string keys."""

    @classmethod
    @abstractmethod
    def restore(cls, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Self:
        """Build the object from what `tensors` and `metadata` gave; the fingerprint is set afterwards."""

    @abstractmethod
    def describe_calibration(self) -> str:
        """How it was made, as Markdown for the model card: data, settings, measurements."""

    @classmethod
    def migrate(cls, tensors: dict[str, Tensor], metadata: dict[str, Any], version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Convert what an older format version stored to the present one. Refuses unless a subclass knows how."""
        raise ArtifactError(
            f"{cls.artifact_type}: expected format version {cls.format_version}, got {version}, which is no longer read. Make it anew."
        )

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the artifact into a folder, made if need be.

        A crash at any moment leaves the old or the new artifact, complete; of two writers at once the later one wins. Other files in the
        folder stay. In an existing README.md only the part between the generated markers is replaced; without them it is left as it is.

        Args:
            folder: Where to.
        """
        self._write(Path(folder), load_from=Path(folder).resolve().name)  # the whole path would tell others about this machine

    def push_to_hub(
        self,
        repo_id: str,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str | None = None,
        revision: str | None = None,
    ) -> str:
        """Upload the artifact to a Hub repository, made if need be, and return the commit's address.

        Args:
            repo_id: `"owner/name"`.
            private: Whether a new repository is private; `None` takes the owner's default.
            token: A write token; `None` takes the one that is logged in.
            commit_message: Defaults to a sentence naming the kind of artifact.
            revision: The branch, made if need be; `None` is the main one.
        """
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.suppress(EntryNotFoundError):
                api.hf_hub_download(repo_id, CARD_NAME, revision=revision, local_dir=folder)
            self._write(Path(folder), load_from=repo_id)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or f"Upload {self.artifact_type}",
                revision=revision,
                allow_patterns=[FILE_NAME, CARD_NAME],
            )
            return str(commit.commit_url)

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
        """Load an artifact from a folder, or from the Hub where there is no such folder.

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
        where = f"{cls.artifact_type} from {folder_or_hub_id}"
        options = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        header, tensors = read_file(local_file(folder_or_hub_id, FILE_NAME, **options))
        _check(cls, header, tensors, where)
        with artifact_errors(f"{where}: its fingerprint makes no sense", _AGAIN):
            fingerprint = None if header["fingerprint"] is None else ModelFingerprint.from_dict(header["fingerprint"])
        if model is not None and fingerprint is not None:
            fingerprint.require_model(fingerprint_of(model), where, tokenizer)
        metadata, version = header["metadata"], header["format_version"]
        with artifact_errors(f"{where}: its content doesn't make a {cls.artifact_type}", _AGAIN):
            if version < cls.format_version:
                tensors, metadata = cls.migrate(tensors, metadata, version)
            artifact = cls.restore(tensors, metadata)
        object.__setattr__(artifact, "fingerprint", fingerprint)
        return artifact

    def _write(self, folder: Path, load_from: str) -> None:
        tensors, metadata = self.tensors(), self.metadata()
        if not isinstance(metadata, dict):
            raise ConfigError.of("metadata", "a dict", metadata)
        header = {
            "type": self.artifact_type,
            "format_version": self.format_version,
            "package_version": __version__,
            "fingerprint": None if self.fingerprint is None else self.fingerprint.to_dict(),
            "calibration": self.describe_calibration(),
            "metadata": metadata,
        }
        pieces = container(Content(header, tensors))
        if name := not_finite(tensors, self.may_be_infinite):
            raise ConfigError.of(f"tensors[{name!r}]", "finite values", "infinities or NaN", "Look for them where it was calibrated.")
        write_atomically(make_folder(folder) / FILE_NAME, pieces)
        self._write_card(folder / CARD_NAME, load_from)

    def _write_card(self, path: Path, load_from: str) -> None:
        try:
            existing = path.read_text("utf-8") if path.exists() else None
        except (OSError, ValueError):
            return  # a person's, if it is no text
        generated = model_card(type(self), self.artifact_type, self.fingerprint, self.describe_calibration(), load_from)
        if (card := merge_card(existing, generated, [self.artifact_type])) is not None:
            write_atomically(path, [card.encode("utf-8", "replace")])


def _check(kind: type[Artifact], header: dict[str, Any], tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse an artifact of another kind, a newer version, or with values that are not finite."""
    if (got := header.get("type")) != kind.artifact_type:
        raise ArtifactError(f"{where}: expected a {kind.artifact_type!r}, got a {got!r}. Load it with the class for that kind.")
    version = header.get("format_version")
    if type(version) is not int or not isinstance(header.get("metadata"), dict) or "fingerprint" not in header:
        raise ArtifactError(f"{where}: fields are missing or of the wrong kind. {_AGAIN}")
    if version > kind.format_version:
        raise ArtifactError(f"{where}: expected format version {kind.format_version} or older, got {version}. Upgrade hf-kvcaches.")
    if name := not_finite(tensors, kind.may_be_infinite):
        raise ArtifactError(f"{where}: the tensor {name!r} has infinities or NaN. {_AGAIN}")


def make_folder(folder: str | os.PathLike[str]) -> Path:
    """Make a folder to save something in, unless it exists."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ConfigError.of("folder", "a folder or a path where one can be made", str(path), "A file has that name.")
    path.mkdir(parents=True, exist_ok=True)
    return path


def local_file(folder_or_hub_id: str | os.PathLike[str], name: str, **options: Any) -> Path:
    """Return the path of a file in a folder, or, where there is no such folder, of the downloaded file of a Hub repository.

    Args:
        folder_or_hub_id: A folder, or `"owner/name"`.
        name: The file's name, in the folder or the repository.
        **options: `revision`, `token`, `cache_dir`, `local_files_only`.
    """
    folder = Path(folder_or_hub_id)
    if folder.is_dir():
        if not (folder / name).exists():
            old = "an artifact of hf-kvcaches 0.2 or older. Make it anew." if (folder / "kvcache_artifact.json").exists() else ""
            raise ArtifactError(f"{folder}: expected {name}, got {old or 'none. Pass the folder that was given to save_pretrained.'}")
        return folder / name
    try:
        return Path(hf_hub_download(str(folder_or_hub_id), name, **options))
    except (HFValidationError, HfHubHTTPError, EntryNotFoundError, OSError) as error:
        raise ArtifactError(
            f"{folder_or_hub_id}: there is no such folder, and the Hub gave no {name} for this id: {error} "
            "Check the path, or the id, the revision, the token and the network; what hf-kvcaches 0.2 or older made has to be made anew."
        ) from error
