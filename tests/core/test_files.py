"""A container comes back as it was or not at all; what is damaged, foreign or newer is refused, and no crash or second writer leaves it."""

import json
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_kvcaches.core.files import FILE_NAME, Content, container, read_file, read_message
from hf_kvcaches.errors import ArtifactError, ConfigError
from tests.core.artifact_helpers import Basis, OtherKind, basis, files, forge, rewrite
from tests.helpers.stores import same

HEADER = {"größe": [1, 2.5, None, True], "text": '\ud800 海 " \\', "more": {"": {}}}
TENSORS = {"x": torch.randn(3, 5), "bits": torch.tensor([True, False, True]), "empty": torch.empty(0, 7), "half": torch.ones(3).half()}
DATA = b"".join(container(Content(HEADER, TENSORS)))


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


class Socket:
    """Gives at most so many bytes at once, and counts what it gave."""

    def __init__(self, data: bytes, most: int) -> None:
        self.data, self.most, self.given = data, most, 0

    def recv(self, count: int) -> bytes:
        piece = self.data[self.given : self.given + min(count, self.most)]
        self.given += len(piece)
        return piece


def check(content: Content) -> None:
    assert content.header == HEADER
    assert same(content.tensors, TENSORS)


def test_a_container_comes_back_from_a_file_and_from_messages_of_any_form(tmp_path):
    (tmp_path / "file").write_bytes(DATA)
    check(read_file(tmp_path / "file"))
    strided = memoryview(bytes(byte for pair in zip(DATA, DATA, strict=True) for byte in pair))[::2]
    for source in (DATA, bytearray(DATA), memoryview(DATA), strided, cut(DATA, 1), iter(cut(DATA, 7)), [b"", *cut(DATA, 100), b""]):
        check(read_message(source))


@pytest.mark.parametrize("most", [1, 13, 1 << 30])
def test_a_function_is_asked_for_no_byte_behind_the_message(most):
    socket = Socket(DATA + b"next", most)
    check(read_message(socket.recv))
    assert socket.given == len(DATA)


def test_two_messages_can_follow_each_other_on_a_socket():
    socket = Socket(DATA + DATA, 1000)
    check(read_message(socket.recv))
    check(read_message(socket.recv))


@pytest.mark.parametrize("length", range(0, len(DATA), 11))
def test_a_message_that_ends_early_or_late_is_refused(length):
    for source in (DATA[:length], cut(DATA[:length], 9), Socket(DATA[:length], 9).recv, DATA + b"\0", [DATA, b"\0"]):
        with pytest.raises(ArtifactError, match="Have it sent again"):
            read_message(source)


@settings(deadline=None)
@given(place=st.integers(0, len(DATA) - 1), flip=st.integers(1, 255))
def test_a_flipped_bit_is_refused_or_harmless(place, flip):
    try:
        content = read_message(DATA[:place] + bytes([DATA[place] ^ flip]) + DATA[place + 1 :])
    except ArtifactError:
        return
    check(content)


def test_lengths_are_not_believed_before_their_bytes_arrive():
    text = json.dumps({"x": {"dtype": "U8", "shape": [1 << 50], "data_offsets": [0, 1 << 50]}}).encode()
    tracemalloc.start()
    for data in ((1 << 25).to_bytes(8, "little") + b"{", len(text).to_bytes(8, "little") + text + b"abc", b"\xff" * 100):
        with pytest.raises(ArtifactError):
            read_message(Socket(data, 1 << 20).recv)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


def test_swapped_names_shapes_and_types_are_noticed(tmp_path):
    tensors = {"x": torch.ones(2, 3), "y": torch.zeros(2, 3)}
    (content,) = (b"".join(container(Content({}, tensors))),)
    for old, new in ((b"[2,3]", b"[3,2]"), (b'"x":', b'"z":'), (b"F32", b"I32")):
        assert old in content
        with pytest.raises(ArtifactError, match="checksum"):
            read_message(content.replace(old, new))


def test_the_format_is_what_its_description_says(tmp_path):
    forge(tmp_path / "file", json.dumps(HEADER), TENSORS)
    check(read_file(tmp_path / "file"))


@pytest.mark.parametrize("header", [{1: 2}, {"x": [{2: 3}]}, {"x": float("nan")}, {"x": object()}, {"x": [0] * (1 << 21)}, {"x": 10**400}])
def test_a_header_that_would_not_come_back_is_refused(header):
    with pytest.raises(ConfigError, match="header"):
        container(Content(header, {}))


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ArtifactError, match=str(path)):
            read_file(path)


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
