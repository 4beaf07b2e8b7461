"""A damaged, foreign or newer artifact is refused, and no crash or second writer leaves one."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_kvcaches.core.hub import FILE_NAME
from hf_kvcaches.errors import ArtifactError, ConfigError
from tests.core.artifact_helpers import Basis, OtherKind, basis, files, forge, rewrite

# Damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / FILE_NAME).unlink(), "expected artifact.safetensors, got none"),
        (lambda f: (f / FILE_NAME).rename(f / "kvcache_artifact.json"), "hf-kvcaches 0.2 or older made has to be made anew"),
        (lambda f: (f / FILE_NAME).write_bytes(b"\x80\x04pickle"), "expected a complete file of hf_kvcaches"),
        (lambda f: (f / FILE_NAME).write_bytes(b""), "expected a complete file"),
        (lambda f: save_file({"basis": torch.ones(2)}, f / FILE_NAME), "of version none"),
        (lambda f: save_file({"basis": torch.ones(2)}, f / FILE_NAME, {"hf_kvcaches": "2", "header": "{}"}), "damage or edits"),
        (lambda f: forge(f / FILE_NAME, "{}", {}, version="3"), "version 3 and not 2. Upgrade hf-kvcaches"),
        (lambda f: forge(f / FILE_NAME, "[1, 2]", {}), "a header that is no dict"),
        (lambda f: forge(f / FILE_NAME, '{"model_type": "llama"}', {}), "got a None"),
        (lambda f: forge(f / FILE_NAME, '{"x": 1e400}', {}), "finite numbers"),
        (lambda f: forge(f / FILE_NAME, '{"x": NaN}', {}), "finite numbers"),
        (lambda f: forge(f / FILE_NAME, '{"x": ' + "[" * 70 + "]" * 70 + "}", {}), "64 levels"),
        (lambda f: forge(f / FILE_NAME, "[" * 100_000, {}), "JSON"),
        (lambda f: forge(f / FILE_NAME, "no JSON", {}), "JSON"),
        (lambda f: rewrite(f, format_version=4), "expected format version 3, got 4. Upgrade hf-kvcaches"),
        (lambda f: rewrite(f, format_version=2), "format version 3, got 2"),
        (lambda f: rewrite(f, format_version="3"), "wrong kind"),
        (lambda f: rewrite(f, metadata=None), "wrong kind"),
        (lambda f: rewrite(f, fingerprint={"format_version": 99}), "fingerprint"),
        (lambda f: rewrite(f, fingerprint=[]), "fingerprint"),
    ],
)
def test_what_is_missing_foreign_or_newer_is_refused_with_advice(tmp_path, damage, message):
    basis().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ArtifactError, match=message) as caught:
        Basis.from_pretrained(tmp_path)
    assert any(advice in str(caught.value) for advice in ("again", "Upgrade", "anew", "Pass the folder", "Load it with"))


def test_another_kind_is_refused_with_its_name(tmp_path):
    OtherKind({"basis": torch.ones(2)}).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="expected a 'test-basis', got a 'other-kind'"):
        Basis.from_pretrained(tmp_path)


def test_a_missing_tensor_is_an_artifact_error(tmp_path):
    Basis({"other name": torch.ones(2)}).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=r"doesn't make a test-basis .KeyError: 'basis'"):
        Basis.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "a/b/c", "", "..", "C:\\x\\y"])
def test_a_folder_that_is_not_there_is_no_hub_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError):
        Basis.from_pretrained(name)


def test_a_hub_id_that_was_never_downloaded_is_refused_offline(tmp_path):
    with pytest.raises(ArtifactError, match=r"there is no such folder, and the Hub gave no artifact\.safetensors"):
        Basis.from_pretrained("someone/something", cache_dir=tmp_path, local_files_only=True)


def test_a_file_where_the_folder_should_be_is_refused(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match="folder"):
        basis().save_pretrained(tmp_path / "taken")


@pytest.mark.parametrize(
    "artifact",
    [
        Basis({"basis": torch.ones(2)}, {"x": object()}),
        Basis({"basis": torch.ones(2)}, {"x": float("nan")}),
        Basis({"basis": [1, 2]}),
        Basis({"basis": torch.eye(2).to_sparse()}),
        Basis({"basis": torch.ones(2, device="meta")}),
        Basis({3: torch.ones(2)}),
    ],
)
def test_what_cannot_be_stored_is_refused_and_the_old_artifact_stays(tmp_path, artifact):
    basis(7.0).save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError):
        artifact.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# Crashes and company


@pytest.mark.full
def test_two_writers_and_a_reader_never_meet_a_torn_artifact(tmp_path):
    basis(1.0, value=1.0).save_pretrained(tmp_path)

    def write(first: float) -> None:
        for value in range(40):
            Basis({"basis": torch.full((300, 1000), first + value)}, {"value": first + value}).save_pretrained(tmp_path)

    values = set()
    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(write, first) for first in (100.0, 200.0)]
        while not all(writer.done() for writer in writers):
            artifact = Basis.from_pretrained(tmp_path)
            assert bool((artifact.content["basis"] == artifact.notes["value"]).all())
            values.add(artifact.notes["value"])
    assert all(writer.exception() is None for writer in writers)
    assert len(values) > 2
    assert files(tmp_path) == {FILE_NAME, "README.md"}


KILLED = """
import os, signal, sys, torch
sys.path.insert(0, sys.argv[1])
from tests.core.artifact_helpers import Basis
folder = sys.argv[2]
# Counts the system calls that change the folder, and dies by SIGKILL just before the n-th in a child for every n.
calls = ("replace", "fsync", "unlink", "open")
for n in range(1, 60):
    child = os.fork()
    if child == 0:
        left = n
        def deadly(call):
            def wrapped(*args, **kwargs):
                global left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)
            return wrapped
        for name in calls:
            setattr(os, name, deadly(getattr(os, name)))
        Basis({"basis": torch.full((3, 4), float(n))}, {"value": float(n)}).save_pretrained(folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    loaded = Basis.from_pretrained(folder)
    assert bool((loaded.content["basis"] == loaded.notes["value"]).all())
    print(n, os.WIFSIGNALED(status), loaded.notes["value"], flush=True)
    if not os.WIFSIGNALED(status):
        break
"""


@pytest.mark.full
def test_a_kill_before_any_step_of_a_save_leaves_the_old_or_the_new_artifact(tmp_path):
    basis(0.0, value=0.0).save_pretrained(tmp_path)
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", KILLED, str(root), str(tmp_path)], capture_output=True, text=True, check=True)
    rows = [line.split() for line in ran.stdout.splitlines()]
    assert len(rows) > 4
    assert all(row[1] == "True" for row in rows[:-1])
    assert rows[-1][1] == "False"
    # Early kills leave the old one, late kills the new one.
    assert rows[0][2] == "0.0"
    assert float(rows[-2][2]) == len(rows) - 1
