"""push-generate publishes a folder that generate takes as custom_generate."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError

from hf_kvcaches import EquipCache, per_call
from tests import tiny
from tests.cli.running import run

CACHE = ("--cache", "EquipCache('streaming', budget=12, sinks=2, recent=2)")


class Missing(EntryNotFoundError):
    """Made alike with all versions of the hub's client."""

    def __init__(self) -> None:
        Exception.__init__(self)


class Hub:
    """As much of `HfApi` as an upload needs; what is uploaded goes to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, []

    def __call__(self, token: Any = None) -> Hub:
        self.calls.append(("token", token))
        return self

    def create_repo(self, repo_id: str, **options: Any) -> None:
        self.calls.append((repo_id, options))

    def create_branch(self, repo_id: str, **options: Any) -> None:
        self.calls.append((repo_id, options))

    def hf_hub_download(self, repo_id: str, name: str, *, local_dir: str, **options: Any) -> None:
        if not (self.folder / name).exists():
            raise Missing
        (Path(local_dir) / name).write_bytes((self.folder / name).read_bytes())

    def upload_folder(self, *, folder_path: str, allow_patterns: list[str], delete_patterns: list[str], **options: Any) -> Any:
        self.calls.append((options["repo_id"], options))
        assert delete_patterns == []
        for name in allow_patterns:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((Path(folder_path) / name).read_bytes())
        return SimpleNamespace(commit_url=f"https://hub/{options['repo_id']}/commit/1")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    return hub


def test_what_is_uploaded_generates_with_a_new_cache_in_each_call(hub, capsys):
    done = run(capsys, "push-generate", *CACHE, "--repo", "someone/streaming", "--private")
    assert done.code == 0, done.err
    assert done.out == "uploaded: https://hub/someone/streaming/commit/1\n"
    assert hub.calls[1] == ("someone/streaming", {"private": True, "exist_ok": True})
    assert "custom_generate='someone/streaming'" in (hub.folder / "README.md").read_text()
    model, prompt = tiny.llama(), tiny.ids(1, 30)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    got = model.generate(prompt, custom_generate=str(hub.folder), trust_remote_code=True, **options)
    cache = EquipCache(model, "streaming", budget=12, sinks=2, recent=2)
    assert torch.equal(got, model.generate(prompt, past_key_values=cache, **options))


def test_a_card_of_the_repository_keeps_what_a_person_wrote(hub):
    caches = per_call(EquipCache, "streaming", budget=12)
    caches.push_to_hub("someone/streaming")
    path = hub.folder / "README.md"
    path.write_text(path.read_text() + "Mine.\n")
    per_call(EquipCache, "streaming", budget=24).push_to_hub("someone/streaming", revision="new", commit_message="More", token="t")
    assert path.read_text().endswith("Mine.\n")
    assert "| `budget` | `24` |" in path.read_text()
    assert ("token", "t") in hub.calls
    assert hub.calls[-1][1]["revision"] == "new"
    assert hub.calls[-1][1]["commit_message"] == "More"


def test_a_dry_run_prints_the_files_and_uploads_nothing(hub, capsys):
    done = run(capsys, "push-generate", *CACHE, "--repo", "someone/streaming", "--dry-run")
    assert done.code == 0
    assert hub.calls == []
    for name in ("README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"):
        assert f"--- {name}\n" in done.out
    assert "OPTIONS = {'policy': 'streaming', 'budget': 12, 'sinks': 2, 'recent': 2}" in done.out


def test_a_folder_is_written_without_a_repository(hub, capsys, tmp_path):
    done = run(capsys, "push-generate", *CACHE, "--folder", tmp_path / "mine")
    assert done.out == f"written to {tmp_path / 'mine'}\n"
    assert hub.calls == []
    assert (tmp_path / "mine" / "custom_generate" / "generate.py").exists()


def test_arguments_that_can_not_be_written_down_are_refused(hub, capsys):
    done = run(capsys, "push-generate", "--cache", "SubspaceCache(KVCodec('x'))", "--repo", "someone/codes")
    assert done.code == 2
    assert "--cache: expected literals as arguments" in done.err
    assert hub.calls == []
