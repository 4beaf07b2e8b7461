"""Containers come back from files and messages as they were, or not at all; no length in them is believed before its bytes are there."""

import json
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.core.files import Content, container, read_file, read_message
from hf_kvcaches.errors import ArtifactError, ConfigError
from tests.core.artifact_helpers import forge
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
