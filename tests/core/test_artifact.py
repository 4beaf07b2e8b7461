"""An artifact comes back as it was saved, for the right model, with a card that explains it."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file

from hf_kvcaches.core.files import FILE_NAME
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.errors import ConfigError, FingerprintMismatch
from hf_kvcaches.stores.files import write_atomically
from tests.core.artifact_helpers import Basis, basis, files, same
from tests.core.fingerprint_helpers import llama

# Round trips


def test_every_dtype_and_shape_comes_back(tmp_path):
    shared = torch.arange(20.0)
    content = {
        "basis": torch.randn(3, 5),
        "bf16": torch.randn(3, 5).to(torch.bfloat16),
        "fp8": torch.randn(3, 5).to(torch.float8_e4m3fn).view(torch.uint8),
        "int8": torch.arange(-5, 5, dtype=torch.int8),
        "int64": torch.tensor([2**62]),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(2.5),
        "transposed": torch.randn(4, 3).t(),
        "view": shared[3:7],
        "all of it": shared,
        "again": shared,
        "with gradient": torch.randn(2, requires_grad=True),
        "名前": torch.ones(2),
    }
    notes = {"text": 'früh, 海 \U0001f30a \ud800 " \\ \n', "list": [1, 2.5, None, True], "nested": {"a": {"b": 0.1}}}
    before = Basis(content, notes, ModelFingerprint.of(llama()))
    before.save_pretrained(tmp_path / "deep" / "er")
    after = Basis.from_pretrained(tmp_path / "deep" / "er")
    assert same(before, after)
    assert after.fingerprint is not None
    assert not after.fingerprint.differs_from(before.fingerprint)
    assert files(tmp_path / "deep" / "er") == {FILE_NAME, "README.md"}


def test_metadata_that_would_not_come_back_is_refused_and_nothing_written(tmp_path):
    with pytest.raises(ConfigError, match="under string keys"):
        Basis({"basis": torch.ones(2)}, {"layers": {0: 1}}).save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_its_tensors_are_read_by_safetensors(tmp_path):
    content = {"basis": torch.randn(3, 5), "odd": torch.arange(3, dtype=torch.uint8), "half": torch.ones(2).half()}
    Basis(content).save_pretrained(tmp_path)
    loaded = load_file(tmp_path / FILE_NAME)
    assert sorted(loaded) == sorted(content)
    assert all(torch.equal(tensor, content[name]) for name, tensor in loaded.items())


def test_one_artifact_saved_twice_is_the_same_file(tmp_path):
    for name in ("a", "b"):
        basis(2.0, x=1).save_pretrained(tmp_path / name)
    assert (tmp_path / "a" / FILE_NAME).read_bytes() == (tmp_path / "b" / FILE_NAME).read_bytes()


def test_saving_over_an_artifact_replaces_it_and_keeps_other_files(tmp_path):
    basis(1.0).save_pretrained(tmp_path)
    loaded = Basis.from_pretrained(tmp_path)
    for name in ("notes.txt", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    basis(2.0).save_pretrained(tmp_path)
    assert same(Basis.from_pretrained(tmp_path), basis(2.0))
    assert files(tmp_path) == {FILE_NAME, "README.md", "notes.txt", "model.safetensors"}
    # What was loaded before does not depend on its file.
    assert same(loaded, basis(1.0))


def test_files_get_the_permissions_of_any_new_file(tmp_path):
    basis().save_pretrained(tmp_path)
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "plain").stat().st_mode}


# The model that it is for


def test_the_model_is_checked_when_it_is_given(tmp_path):
    Basis({"basis": torch.ones(2)}, fingerprint=ModelFingerprint.of(llama(0))).save_pretrained(tmp_path)
    assert Basis.from_pretrained(tmp_path, model=llama(0)).fingerprint == ModelFingerprint.of(llama(0))
    with pytest.raises(FingerprintMismatch, match=r"test-basis from .* was made for another model: weights differ"):
        Basis.from_pretrained(tmp_path, model=llama(1))


def test_one_without_a_fingerprint_fits_any_model(tmp_path):
    basis().save_pretrained(tmp_path)
    assert Basis.from_pretrained(tmp_path, model=llama(1)).fingerprint is None


# The model card


def test_the_card_says_what_it_is_for_which_model_how_made_and_how_to_load(tmp_path):
    fingerprint = ModelFingerprint.of(llama())
    Basis({"basis": torch.ones(2)}, fingerprint=fingerprint).save_pretrained(tmp_path / "café")
    card = (tmp_path / "café" / "README.md").read_text(encoding="utf-8")
    front = card.split("---\n")[1]
    assert "library_name: hf-kvcaches" in front
    assert "- test-basis" in front
    for text in ("A basis for tests | with a bar.", fingerprint.digest, "LlamaForCausalLM", "On 3 texts of the sea, très bien."):
        assert text in card
    assert "Basis.from_pretrained('café', model=model" in card
    assert str(tmp_path) not in card
    assert "Not in the card" not in card


def test_a_persons_text_around_the_generated_part_stays(tmp_path):
    basis(1.0).save_pretrained(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("library_name", "license: mit\nlibrary_name") + "\n## My own section\n")
    Basis({"basis": torch.ones(2)}, fingerprint=ModelFingerprint.of(llama())).save_pretrained(tmp_path)
    card = readme.read_text()
    assert "license: mit" in card
    assert card.endswith("\n## My own section\n")
    assert ModelFingerprint.of(llama()).digest in card
    assert card.count("begin of the generated part") == 1


@pytest.mark.parametrize("text", [b"# All mine\n", b"\xff\xfe not text"])
def test_a_card_without_a_generated_part_is_left_alone(tmp_path, text):
    (tmp_path / "README.md").write_bytes(text)
    basis().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == text


# Files


def test_a_file_that_can_not_be_written_to_its_end_leaves_the_old_one_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, [b"one"])
    write_atomically(path, [b"tw", memoryview(b"o")])
    assert path.read_bytes() == b"two"

    def pieces():
        yield b"half"
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_atomically(path, pieces())
    assert path.read_bytes() == b"two"
    assert files(tmp_path) == {"file"}


# The Hub


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
    monkeypatch.setattr("hf_kvcaches.core.files.HfApi", repository)
    monkeypatch.setattr("hf_kvcaches.core.files.hf_hub_download", repository.hf_hub_download)
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
