"""One container for artifacts, saved caches and caches on the wire: a safetensors file with a JSON header and a checksum.

Its metadata are `hf_kvcaches`, the version of the container; `header`, JSON; and `sha256`, in hex, of the header and then, for each
tensor in the order of names, of the JSON list `[name, dtype, shape]` and its bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from huggingface_hub import HfApi, ModelCardData, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from torch import Tensor, nn

from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import fingerprint_of
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError
from hf_kvcaches.stores.blobs_format import as_bytes, dense, header_of, not_finite, read_tensors
from hf_kvcaches.stores.files import Bytes, Source, opened, parse_json, reader_of, write_atomically
from hf_kvcaches.version import __version__

FILE_NAME, _CARD_NAME = "artifact.safetensors", "README.md"
_OLD = "What hf-kvcaches 0.2 or older made has to be made anew."
_BEGIN = "<!-- hf_kvcaches: begin of the generated part, which saving replaces -->"
_END = "<!-- hf_kvcaches: end of the generated part -->"
MOST_LAYERS = 1 << 10  # of a model: each is worked out, however short a file is that says how many there are
_VERSION = "2"
_AGAIN = "Copy or download it again, or make it anew."


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


class Artifact(ABC):
    """Something calibrated for a model, as a folder or a Hub repository: `artifact.safetensors`, and a model card beside it."""

    artifact_type: ClassVar[str]  # the kind, in lower-case words with hyphens; files of another one, or another version, are refused
    format_version: ClassVar[int]
    fingerprint: ModelFingerprint | None = None  # of the model that it was made for, or None if it fits any

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # never changed, and shared by copies of a cache

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the artifact into a folder, made if need be.

        A crash at any moment leaves the old or the new artifact, complete; of two writers at once the later one wins. Other files in the
        folder stay. In an existing README.md only the part between the generated markers is replaced; without them it is left as it is.
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
            repo_id: `"owner/name"`; `private`, `token` and `commit_message` as for `huggingface_hub`.
            revision: The branch, made if need be; `None` is the main one.
        """
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.suppress(EntryNotFoundError):
                api.hf_hub_download(repo_id, _CARD_NAME, revision=revision, local_dir=folder)
            self._write(Path(folder), load_from=repo_id)
            message = commit_message or f"Upload {self.artifact_type}"
            commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, revision=revision)
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
            revision: The Hub's branch, tag or commit; `token`, `cache_dir` and `local_files_only` as for `huggingface_hub`.
            model: The model to use it with. Another than it was made for is a `FingerprintMismatch`; the precision may be another, unless
                it holds keys and values.
            tokenizer: Its tokenizer, compared as well where the artifact was made with one.
        """
        where = f"{cls.artifact_type} from {folder_or_hub_id}"
        options = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        header, tensors = read_file(local_file(folder_or_hub_id, FILE_NAME, **options))
        require_header(header, cls.artifact_type, cls.format_version, {"metadata": dict, "fingerprint": dict | None}, where)
        if name := not_finite(tensors):
            raise ArtifactError(f"{where}: the tensor {name!r} has infinities or NaN. {_AGAIN}")
        with artifact_errors(f"{where}: its content doesn't make a {cls.artifact_type}", _AGAIN):
            fingerprint = None if header["fingerprint"] is None else ModelFingerprint.from_dict(header["fingerprint"])
            artifact = cls.restore(tensors, header["metadata"])
        if model is not None and fingerprint is not None:
            fingerprint.require_model(fingerprint_of(model), where, tokenizer)
        object.__setattr__(artifact, "fingerprint", fingerprint)
        return artifact

    def _write(self, folder: Path, load_from: str) -> None:
        tensors, metadata = self.tensors(), self.metadata()
        fingerprint = None if self.fingerprint is None else self.fingerprint.to_dict()
        header = {"type": self.artifact_type, "format_version": self.format_version, "package_version": __version__}
        pieces = container(Content(header | {"fingerprint": fingerprint, "metadata": metadata}, tensors))
        if name := not_finite(tensors):
            raise ConfigError.of(f"tensors[{name!r}]", "finite values", "infinities or NaN", "Look for them where it was calibrated.")
        write_atomically(make_folder(folder) / FILE_NAME, pieces)
        path = folder / _CARD_NAME
        try:
            existing = path.read_text("utf-8") if path.exists() else None
        except (OSError, ValueError):
            return  # a person's, if it is no text
        if (card := _card(self, existing, load_from)) is not None:
            write_atomically(path, [card.encode("utf-8", "replace")])


def _card(artifact: Artifact, existing: str | None, load_from: str) -> str | None:
    """Return the model card with a new generated part; None where a person's card has no such part."""
    if existing is None:
        data = ModelCardData(library_name="hf-kvcaches", tags=["kv-cache", "hf-kvcaches", artifact.artifact_type])
        existing = f"---\n{data.to_yaml()}\n---\n\n{_BEGIN}{_END}\n"
    before, begin, rest = existing.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    kind, model, fingerprint = type(artifact), "Not bound to one model.", artifact.fingerprint
    if fingerprint is not None:
        model = f"{_cell(fingerprint.describe())}\n\nOther weights, adapters or tokenizers are refused. In full: `{fingerprint.digest}`"
    code = f"from {kind.__module__} import {kind.__name__}\n\n"
    code += f"artifact = {kind.__name__}.from_pretrained({load_from!r}, model=model, tokenizer=tokenizer)"
    parts = [f"# {artifact.artifact_type}", (kind.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")]
    parts += ["## For which model", model, "## How it was calibrated", artifact.describe_calibration()]
    parts += ["## How to load it", f"```python\n{code}\n```"]
    return "\n".join([before + begin, "\n\n".join(parts), end + after]) if begin and end else None


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same names as a Markdown table; "" for none."""
    if not rows:
        return ""
    cells = [[_cell(row.get(name)) for name in rows[0]] for row in rows]
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}", *(f"| {' | '.join(line)} |" for line in cells)]
    return "\n".join(lines)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def make_folder(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ConfigError.of("folder", "a folder or a path where one can be made", str(path), "A file has that name.")
    path.mkdir(parents=True, exist_ok=True)
    return path


def local_file(folder_or_hub_id: str | os.PathLike[str], name: str, **options: Any) -> Path:
    """Return the path of a file in a folder, or of what `hf_hub_download` gives where there is no such folder."""
    folder = Path(folder_or_hub_id)
    if folder.is_dir():
        if not (folder / name).exists():
            raise ArtifactError(f"{folder}: expected {name}, got none. Pass the folder that was given to save_pretrained. {_OLD}")
        return folder / name
    try:
        return Path(hf_hub_download(str(folder_or_hub_id), name, **options))
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        got = f"{folder_or_hub_id}: there is no such folder, and the Hub gave no {name} for this id: {error}"
        raise ArtifactError(f"{got} Check the path, or the id, the revision, the token and the network. {_OLD}") from error
