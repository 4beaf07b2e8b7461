"""An artifact is whole, of the right kind and for the right model, or it is refused."""

from __future__ import annotations

import base64
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvcaches.core.artifact import read_safetensors, sha256_of, write_atomically
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch
from tests.core.basis import Basis

MANIFEST = "kvcache_artifact.json"


class OtherKind(Basis):
    artifact_type: ClassVar[str] = "other-kind"


class NextBasis(Basis):
    format_version: ClassVar[int] = 4


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, **shape))


def basis(filled_with: float = 1.0, **notes: Any) -> Basis:
    return Basis({"basis": torch.full((3, 4), filled_with)}, notes)


def same(one: Basis, other: Basis) -> bool:
    same_names = sorted(one.content) == sorted(other.content)
    tensors = all(
        torch.equal(value, other.content[name]) and value.dtype == other.content[name].dtype for name, value in one.content.items()
    )
    return same_names and tensors and one.notes == other.notes and one.fingerprint == other.fingerprint


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def tensor_file(folder: Path) -> Path:
    return folder / json.loads((folder / MANIFEST).read_text())["tensors"]["file"]


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    """Edits the manifest as another program that knows the format would: with a checksum that fits."""
    from hf_kvcaches.core.artifact import _checksum

    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.update(changes)
    manifest["checksum"] = _checksum(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


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
    notes = {"text": 'früh, 海 \U0001f30a " \\ \n', "list": [1, 2.5, None, True], "nested": {"a": {"b": 0.1}}}
    before = Basis(content, notes, ModelFingerprint.of(llama()))
    before.save_pretrained(tmp_path / "deep" / "er")
    after = Basis.from_pretrained(tmp_path / "deep" / "er")
    assert same(before, after)
    assert after.fingerprint is not None
    assert not after.fingerprint.differs_from(before.fingerprint)
    assert files(tmp_path / "deep" / "er") == {MANIFEST, "README.md", tensor_file(tmp_path / "deep" / "er").name}
    assert sha256_of(tensor_file(tmp_path / "deep" / "er"))[:16] in tensor_file(tmp_path / "deep" / "er").name


def test_one_artifact_saved_twice_is_the_same_files(tmp_path):
    for name in ("a", "b"):
        basis(2.0, x=1).save_pretrained(tmp_path / name)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert (tmp_path / "a" / MANIFEST).read_bytes() == (tmp_path / "b" / MANIFEST).read_bytes()


def test_saving_over_an_artifact_replaces_it_and_keeps_other_files(tmp_path):
    basis(1.0).save_pretrained(tmp_path)
    old = tensor_file(tmp_path)
    loaded = Basis.from_pretrained(tmp_path)
    for name in ("notes.txt", "model.safetensors", "tensors-mine.safetensors"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".README.md.abc.hf_kvcaches.tmp").write_text("left by a killed writer")
    basis(2.0).save_pretrained(tmp_path)
    assert not old.exists()
    assert same(Basis.from_pretrained(tmp_path), basis(2.0))
    assert files(tmp_path) == {
        MANIFEST,
        "README.md",
        tensor_file(tmp_path).name,
        "notes.txt",
        "model.safetensors",
        "tensors-mine.safetensors",
    }
    # What was loaded before lives on, whether its file does or not.
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
    assert f"Basis.from_pretrained('café', model=model" in card
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


# Damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    artifact = Basis({"basis": torch.randn(2, 3), "more": torch.arange(3)}, {"größe": 3, "x": [1.5, "y"]}, ModelFingerprint.of(llama()))
    artifact.save_pretrained(folder)
    return folder, artifact, tmp_path_factory.mktemp("copies")


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_is_refused_or_harmless(saved, data):
    folder, artifact, copies = saved
    name = data.draw(st.sampled_from(sorted(files(folder))))
    content = bytearray((folder / name).read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    check_damaged(folder, artifact, copies, name, bytes(content))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_truncation_is_refused_or_harmless(saved, data):
    folder, artifact, copies = saved
    name = data.draw(st.sampled_from(sorted(files(folder))))
    content = (folder / name).read_bytes()
    check_damaged(folder, artifact, copies, name, content[: data.draw(st.integers(0, len(content) - 1))])


def check_damaged(folder: Path, artifact: Basis, copies: Path, name: str, content: bytes) -> None:
    damaged = copies / "damaged"
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(folder, damaged)
    (damaged / name).write_bytes(content)
    try:
        loaded = Basis.from_pretrained(damaged)
    except ArtifactError:
        assert name != "README.md"
    else:
        assert name in ("README.md", MANIFEST)
        assert same(loaded, artifact)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / MANIFEST).unlink(), "there is no kvcache_artifact.json"),
        (lambda f: tensor_file(f).unlink(), "the file is missing"),
        (lambda f: (f / MANIFEST).write_bytes(b"\x80\x04pickle"), "expected JSON"),
        (lambda f: (f / MANIFEST).write_text("[" * 100_000), "expected JSON"),
        (lambda f: (f / MANIFEST).write_text("[1, 2]"), "got other JSON"),
        (lambda f: (f / MANIFEST).write_text('{"model_type": "llama"}'), "got other JSON"),
        (lambda f: rewrite_manifest(f, manifest_version=2), "Upgrade hf-kvcaches"),
        (lambda f: rewrite_manifest(f, format_version=4), "expected format version 3 or older, got 4. Upgrade hf-kvcaches"),
        (lambda f: rewrite_manifest(f, format_version=2), "format version 3, got 2"),
        (lambda f: rewrite_manifest(f, format_version="3"), "wrong kind"),
        (lambda f: rewrite_manifest(f, metadata=None), "wrong kind"),
        (lambda f: rewrite_manifest(f, tensors={"file": "../../secret.safetensors", "sha256": "", "bytes": 0}), "wrong kind"),
        (lambda f: rewrite_manifest(f, tensors={"file": "pytorch_model.bin", "sha256": "", "bytes": 0}), "wrong kind"),
        (lambda f: rewrite_manifest(f, fingerprint={"format_version": 99}), "fingerprint"),
        (lambda f: rewrite_manifest(f, fingerprint=[]), "fingerprint"),
    ],
)
def test_what_is_missing_foreign_or_newer_is_refused_with_advice(tmp_path, damage, message):
    basis().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ArtifactError, match=message) as caught:
        Basis.from_pretrained(tmp_path)
    assert any(advice in str(caught.value) for advice in ("again", "Upgrade", "anew", "Pass the folder"))


def test_another_kind_is_refused_with_its_name(tmp_path):
    OtherKind({"basis": torch.ones(2)}).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="expected a 'test-basis', got a 'other-kind'"):
        Basis.from_pretrained(tmp_path)


def test_a_missing_tensor_is_an_artifact_error(tmp_path):
    Basis({"other name": torch.ones(2)}).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=r"doesn't make a test-basis .KeyError: 'basis'"):
        Basis.from_pretrained(tmp_path)


def test_an_older_version_is_migrated_by_who_knows_how(tmp_path):
    class Migrating(NextBasis):
        @classmethod
        def migrate(cls, tensors, metadata, version):
            return tensors, {**metadata, "was": version}

    basis(x=1).save_pretrained(tmp_path)
    assert Migrating.from_pretrained(tmp_path).notes == {"x": 1, "was": 3}
    with pytest.raises(ArtifactError, match="no longer read"):
        NextBasis.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "a/b/c", "", "..", "C:\\x\\y"])
def test_a_folder_that_is_not_there_is_no_hub_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError):
        Basis.from_pretrained(name)


def test_a_hub_id_that_was_never_downloaded_is_refused_offline(tmp_path):
    with pytest.raises(ArtifactError, match="the Hub gave no artifact of that name"):
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
        Basis({"basis": torch.ones(2)}, {1: 2}),
        Basis({"basis": torch.ones(2)}, {"x": [{2: 3}]}),
        Basis({"basis": torch.ones(2)}, {"x": "\ud800"}),
        Basis({"basis": torch.ones(2)}, ["x"]),
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


def test_a_type_that_is_no_tag_is_refused():
    with pytest.raises(ConfigError, match="artifact_type"):
        type("Bad", (Basis,), {"artifact_type": "Not A Tag"})


# Crashes and company

WRITER = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from tests.core.basis import Basis
print("ready", flush=True)
value = float(sys.argv[3])
while True:
    value += 2
    Basis({"basis": torch.full((300, 1000), value)}, {"value": value}).save_pretrained(sys.argv[2])
"""


def writer(folder: Path, start: int) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(root), str(folder), str(start)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def whole(artifact: Basis) -> bool:
    return bool((artifact.content["basis"] == artifact.notes.get("value", 1.0)).all())


def test_two_writers_and_a_reader_never_meet_a_torn_artifact_and_a_kill_leaves_a_whole_one(tmp_path):
    basis(1.0).save_pretrained(tmp_path)
    one = writer(tmp_path, 0)
    values = set()
    end = time.monotonic() + 1.5
    own = threading.Thread(target=lambda: [basis(1.0).save_pretrained(tmp_path) for _ in range(40)])
    own.start()
    try:
        while time.monotonic() < end:
            artifact = Basis.from_pretrained(tmp_path)
            assert whole(artifact)
            values.add(artifact.notes.get("value"))
    finally:
        one.send_signal(signal.SIGKILL)
        one.wait()
        own.join()
    assert whole(Basis.from_pretrained(tmp_path))
    assert len(values) > 2
    basis(5.0).save_pretrained(tmp_path)
    assert files(tmp_path) == {MANIFEST, "README.md", tensor_file(tmp_path).name}


KILLED = """
import os, signal, sys, torch
sys.path.insert(0, sys.argv[1])
from tests.core.basis import Basis
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
print(sorted(os.listdir(folder)))
"""


def test_a_kill_before_any_step_of_a_save_leaves_the_old_or_the_new_artifact(tmp_path):
    basis(0.0, value=0.0).save_pretrained(tmp_path)
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", KILLED, str(root), str(tmp_path)], capture_output=True, text=True, check=True)
    *steps, last = ran.stdout.splitlines()
    rows = [line.split() for line in steps]
    assert len(rows) > 6
    assert all(row[1] == "True" for row in rows[:-1])
    assert rows[-1][1] == "False"
    # Early kills leave the old one, late kills the new one.
    assert rows[0][2] == "0.0"
    assert float(rows[-2][2]) == len(rows) - 1
    assert last.count("tensors-") == 1
    assert "tmp" not in last


# The small pieces


def test_write_atomically_takes_bytes_or_a_function_and_leaves_nothing_behind_on_failure(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"one")
    write_atomically(path, lambda temporary: temporary.write_bytes(b"two") and None)
    assert path.read_bytes() == b"two"

    def fail(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"two"
    assert files(tmp_path) == {"file"}


def test_sha256_of_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256_of(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{}", b"\xff" * 7 + b"\x7f"])
def test_read_safetensors_refuses_garbage(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"x\.safetensors"):
        read_safetensors(tmp_path / "x.safetensors")


def test_read_safetensors_refuses_what_is_not_there_or_a_folder(tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ArtifactError):
            read_safetensors(path)


# The Hub


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub's HTTP interface as an upload and a download of small files need."""

    repo = "someone/basis"
    stored: ClassVar[dict[str, bytes]] = {}
    created: ClassVar[list[dict[str, Any]]] = []
    commit: ClassVar[str] = "0" * 40

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, body: bytes | dict[str, Any] | list[Any], status: int = 200, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        home = f"http://{self.headers['Host']}/{self.repo}"
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.answer({"url": home})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            wanted = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in wanted]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.stored[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del self.stored[line["value"]["path"]]
            type(self).commit = f"{int(self.commit) + 1:040}"
            self.answer({"success": True, "commitOid": self.commit, "commitUrl": f"{home}/commit/{self.commit}"})
        else:
            self.answer({}, 404)

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = path.rsplit("/", 1)[-1]
        if "/resolve/" in path and name in self.stored:
            self.answer(self.stored[name], ETag=f'"{hash(self.stored[name])}"', X_Repo_Commit=self.commit)
        elif "/resolve/" in path:
            self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=self.commit)
        elif "/tree/" in path:
            self.answer([{"type": "file", "path": p, "size": len(c), "oid": "0"} for p, c in self.stored.items()])
        else:
            self.answer({"id": self.repo, "sha": self.commit, "siblings": [{"rfilename": p} for p in self.stored]})

    do_HEAD = do_GET


PUSH = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from tests.core.basis import Basis
from huggingface_hub import HfApi
for value in (1.0, 2.0):
    if value == 2.0:
        card = open(HfApi().hf_hub_download("someone/basis", "README.md", cache_dir=sys.argv[2])).read()
        HfApi().upload_file(path_or_fileobj=(card + "A person wrote this.").encode(), path_in_repo="README.md", repo_id="someone/basis")
    artifact = Basis({"basis": torch.full((3, 4), value)}, {"value": value})
    print(artifact.push_to_hub("someone/basis", private=True, token="hf_token"))
loaded = Basis.from_pretrained("someone/basis", cache_dir=sys.argv[2])
assert loaded.notes == {"value": 2.0} and bool((loaded.content["basis"] == 2).all())
assert Basis.from_pretrained("someone/basis", cache_dir=sys.argv[2], local_files_only=True).notes == {"value": 2.0}
"""


def test_what_is_pushed_is_exactly_the_artifact_and_comes_back_by_its_id(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.stored["own.txt"] = b"mine"
    environment = {
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-c", PUSH, str(Path(__file__).parents[2]), str(tmp_path / "cache")]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    finally:
        server.shutdown()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [f"{environment['HF_ENDPOINT']}/someone/basis/commit/{n:040}" for n in (1, 3)]
    # Older and newer versions of huggingface_hub word it differently.
    assert Hub.created[0].get("private") is True or Hub.created[0].get("visibility") == "private"
    for name, content in Hub.stored.items():
        (tmp_path / name).write_bytes(content)
    # The tensors of the first push are gone, and a person's files are as they were.
    assert set(Hub.stored) == {MANIFEST, tensor_file(tmp_path).name, "README.md", "own.txt"}
    card = Hub.stored["README.md"].decode()
    assert "Basis.from_pretrained('someone/basis'" in card
    assert card.endswith("A person wrote this.")
    assert same(Basis.from_pretrained(tmp_path), Basis({"basis": torch.full((3, 4), 2.0)}, {"value": 2.0}))
