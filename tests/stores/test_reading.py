"""Files and JSON of strangers give what is in them, or an `ArtifactError`, in bounded time and memory."""

import io
import json
import os
import resource
import socket
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save_file

from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.stores.blobs_format import DTYPES, as_bytes, dense, header_of, not_finite, read_tensors
from hf_kvcaches.stores.files import opened, parse_json
from tests.helpers.stores import same

LEAVES = st.none() | st.booleans() | st.integers(-(10**200), 10**200) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(LEAVES, lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside), max_leaves=20)


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with opened(path) as file:
        return read_tensors(file.read, os.fstat(file.fileno()).st_size)


def file_of(path: Path, header: bytes, body: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)
    return path


# JSON


@given(value=JSON)
def test_json_comes_back_as_it_was(value):
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nul",
        b"\xff",
        "NaN",
        "[Infinity]",
        '{"x": -Infinity}',
        "1e400",
        '{"x": [-1e999]}',
        "9" * 5000,
        "1" * 301,
        "[" * 100_000,
        "[" * 65 + "]" * 65,
        '{"x":' * 65 + "1" + "}" * 65,
        "[" + "[],{}," * 400_000 + "1]",
    ],
    ids=range(15),
)
def test_json_that_is_none_or_too_deep_or_has_other_numbers_is_refused_in_few_words(text):
    with pytest.raises(ArtifactError) as raised:
        parse_json(text)
    assert len(str(raised.value)) < 400


def test_as_much_nesting_and_as_many_digits_as_are_allowed_are_read():
    assert parse_json("[" * 64 + "]" * 64) is not None
    assert parse_json("9" * 300) == int("9" * 300)
    assert parse_json("1e-400") == 0.0


def test_json_of_many_small_values_takes_no_more_memory_than_a_bounded_number_of_them():
    text = "[" + "{}," * 10_000_000 + "{}]"
    tracemalloc.start()
    with pytest.raises(ArtifactError):
        parse_json(text)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


# Files


def test_a_file_that_is_too_long_is_not_read(tmp_path):
    with open(tmp_path / "long", "wb") as file:
        file.truncate(1 << 42)
    tracemalloc.start()
    with pytest.raises(ArtifactError):
        read(tmp_path / "long")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["FIFO", "link to a FIFO", "device", "endless device", "folder", "link to itself", "socket"])
def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path, monkeypatch, kind):
    path = tmp_path / "x"
    if kind.endswith("FIFO"):
        os.mkfifo(tmp_path / "fifo")
        path.symlink_to("fifo")
        path = path if kind.startswith("link") else tmp_path / "fifo"
    elif kind.endswith("device"):
        path.symlink_to("/dev/zero" if kind == "endless device" else "/dev/null")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)
        socket.socket(socket.AF_UNIX).bind("x")
    else:
        path.symlink_to("x")
    with pytest.raises(OSError, match=str(path)):
        read(path)


# safetensors


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 4), max_size=4)), max_size=5),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1, max_size=2),
)
def test_what_is_written_here_is_read_here_and_by_safetensors(shapes, metadata):
    tensors = {f"größe {n}": torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for n, (dtype, shape) in enumerate(shapes)}
    contiguous = dense(tensors)
    content = b"".join([header_of(contiguous, metadata), *map(as_bytes, contiguous.values())])
    found, told = read_tensors(io.BytesIO(content).read)
    assert same(found, tensors)
    assert told == metadata
    assert same(load(content), tensors)


def entry(dtype="F32", shape=(2,), start=0, stop=8, **more) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop], **more}


@pytest.mark.parametrize(
    ("layout", "body"),
    [
        ({"x": entry(stop=12)}, 12),
        ({"x": entry()}, 7),
        ({"x": entry()}, 9),
        ({"x": entry(start=4, stop=12)}, 12),
        ({"x": entry(), "y": entry()}, 8),
        ({"x": entry(), "y": entry(start=4, stop=12)}, 12),
        ({"x": entry(start=-8, stop=0)}, 0),
        ({"x": entry(shape=(-2,), start=8, stop=0)}, 8),
        ({"x": entry(shape=(1 << 62, 4), stop=0)}, 0),
        ({"x": entry(shape=(1 << 62, 0), stop=0)}, 0),
        ({"x": entry(shape=(0, 1 << 21), stop=0)}, 0),
        ({"x": entry(shape=(10**12,), stop=4 * 10**12)}, 0),
        ({"x": entry(shape=(True, 2))}, 8),
        ({"x": entry(shape=(2.0,))}, 8),
        ({"x": entry(shape=[1] * 1000 + [2])}, 8),
        ({"x": entry(shape=[10**200] * 4)}, 8),
        ({"x": entry(dtype="F33")}, 8),
        ({"x": entry(dtype=["F32"])}, 8),
        ({"x": {}}, 8),
        ({"x": None}, 8),
        ({"x": entry(), "__metadata__": {"a": 1}}, 8),
        ({"x": entry(), "__metadata__": ["a"]}, 8),
        ([], 0),
        (3, 0),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path, layout, body):
    path = file_of(tmp_path / "x", json.dumps(layout).encode(), bytes(body))
    with pytest.raises(ArtifactError):
        read(path)


@settings(max_examples=150, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 10**6), st.binary(min_size=1, max_size=8)), min_size=1, max_size=3))
def test_random_edits_give_tensors_of_the_file_or_are_refused(tmp_path_factory, edits):
    path = tmp_path_factory.mktemp("edited") / "x"
    save_file({"x": torch.arange(5), "y": torch.ones(2, 3)}, path, {"a": "b"})
    content = bytearray(path.read_bytes())
    for place, new in edits:
        start = place % len(content)
        content[start : start + len(new)] = new
    path.write_bytes(content)
    try:
        found, _ = read(path)
    except ArtifactError:
        return
    assert sum(tensor.nbytes for tensor in found.values()) < len(content)


def test_reading_takes_no_more_memory_than_the_file(tmp_path):
    save_file({f"{n}": torch.ones(1 << 20) for n in range(16)}, tmp_path / "x")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = read(tmp_path / "x")[0]
    assert len(found) == 16
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (64 + 32) << 10


# Values


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype.is_floating_point or dtype.is_complex])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_infinities_and_nan_are_found_in_any_type_that_has_them(dtype, value):
    tensor = torch.ones(3, 4).to(dtype)
    assert not_finite({"x": tensor, "empty": tensor[:0]}) is None
    tensor[1, 2] = torch.tensor(value).to(dtype)
    expected = "x" if not bool(tensor.to(torch.complex128).isfinite().all()) else None
    assert not_finite({"fine": torch.ones(2), "x": tensor}) == expected
