"""What goes to the Hub, and what comes back from it."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError

from hf_kvcaches.core import hub
from hf_kvcaches.core.hub import FILE_NAME
from tests.core.artifact_helpers import Basis, files, same


class Repository:
    """As much of `HfApi` as an upload and a download need, with a folder in the place of the Hub."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[tuple[Any, ...]]()

    def __call__(self, token: str | None) -> "Repository":
        self.asked.append(("token", token))
        return self

    def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> None:
        self.asked.append(("repo", repo_id, private, exist_ok))

    def create_branch(self, repo_id: str, branch: str, exist_ok: bool) -> None:
        self.asked.append(("branch", repo_id, branch, exist_ok))

    def hf_hub_download(self, repo_id: str, filename: str, revision: str | None, local_dir: str | None = None, **_: Any) -> str:
        if not (self.folder / filename).exists():
            raise EntryNotFoundError(filename)
        return str(shutil.copy(self.folder / filename, local_dir) if local_dir else self.folder / filename)

    def upload_folder(self, repo_id: str, folder_path: str, commit_message: str, revision: str | None) -> Any:
        shutil.copytree(folder_path, self.folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".cache"))
        return SimpleNamespace(commit_url=f"{repo_id}: {commit_message}, {revision}")


@pytest.mark.parametrize("revision", [None, "try"])
def test_what_is_pushed_is_exactly_the_artifact_and_comes_back_by_its_id(tmp_path, monkeypatch, revision):
    repository = Repository(tmp_path / "hub")
    monkeypatch.setattr(hub, "HfApi", repository)
    monkeypatch.setattr(hub, "hf_hub_download", repository.hf_hub_download)
    repository.folder.mkdir()
    (repository.folder / "own.txt").write_text("mine")
    card = repository.folder / "README.md"
    for value in (1.0, 2.0):
        artifact = Basis({"basis": torch.full((3, 4), value)}, {"value": value})
        url = artifact.push_to_hub("someone/basis", private=True, token="hf_token", revision=revision)
        assert url == f"someone/basis: Upload test-basis, {revision}"
        if value == 1.0:
            card.write_text(card.read_text() + "A person wrote this.")
        assert same(Basis.from_pretrained("someone/basis", revision=revision), artifact)
    assert repository.asked[:2] == [("token", "hf_token"), ("repo", "someone/basis", True, True)]
    assert (("branch", "someone/basis", "try", True) in repository.asked) == (revision == "try")
    assert files(repository.folder) == {FILE_NAME, "README.md", "own.txt"}
    assert "Basis.from_pretrained('someone/basis'" in card.read_text()
    assert card.read_text().endswith("A person wrote this.")
