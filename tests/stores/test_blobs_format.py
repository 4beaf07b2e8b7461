"""A blob as bytes comes back bit by bit, and no damaged one does."""

import hashlib
import io
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores import blobs_format
from hf_kvcaches.stores.blobs_format import DTYPES as STORABLE
from hf_kvcaches.stores.blobs_format import checked_key, encode, read_header
from tests.helpers.stores import DTYPES, HEAD, blob, header_end, same

KEY = "0123abcd"


def whole(key=KEY, head=HEAD, tensors=None) -> bytearray:
    return bytearray(b"".join(encode(key, head, blob() if tensors is None else tensors)))


def decode(key: str, content: bytes) -> dict[str, torch.Tensor]:
    return blobs_format.decode(key, bytes(content))


@given(
    shapes=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4)), max_size=5),
    head=st.dictionaries(st.text(max_size=5), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4)),
    seed=st.integers(0, 99),
)
def test_any_tensors_and_head_come_back_as_they_were(shapes, head, seed):
    made = torch.Generator().manual_seed(seed)
    tensors = {f"größe {n}": torch.randint(0, 2, shape, generator=made).to(dtype) for n, (dtype, shape) in enumerate(shapes)}
    content = whole(head=head, tensors=tensors)
    assert same(decode(KEY, content), tensors)
    assert read_header(KEY, len(content), io.BytesIO(content).read)[0] == head


def test_every_dtype_of_the_table_comes_back_bit_by_bit():
    tensors = {name: torch.arange(16, dtype=torch.uint8).view(dtype) for name, dtype in STORABLE.items() if name != "BOOL"}
    tensors["BOOL"] = torch.tensor([True, False, True])
    assert same(decode(KEY, whole(tensors=tensors)), tensors)


def test_behind_its_checksum_a_blob_is_a_safetensors_file():
    tensors = {"a": torch.tensor(3.0), "b": torch.zeros(0, 5), **blob()}
    read = load(bytes(whole(tensors=tensors)[24:]))
    assert same({name: read[name] for name in tensors}, tensors)


def test_views_and_shared_tensors_come_back_dense():
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"turned": base.T, "slice": base[:, 1:3], "again": base, "wide": base[:1].expand(3, 6)}
    assert same(decode(KEY, whole(tensors=tensors)), tensors)


def test_every_flipped_bit_is_found():
    content = whole(tensors={"x": torch.arange(5, dtype=torch.int16), "y": torch.tensor(1.5)})
    end = header_end(content)
    assert decode(KEY, content)
    for place in range(len(content)):
        for bit in range(8):
            content[place] ^= 1 << bit
            with pytest.raises(ArtifactError):
                decode(KEY, content)
            if place < end:
                with pytest.raises(ArtifactError):
                    read_header(KEY, len(content), io.BytesIO(content[:end]).read)
            content[place] ^= 1 << bit


def test_every_truncation_and_anything_behind_the_end_is_found():
    content = whole()
    for length in range(len(content)):
        with pytest.raises(ArtifactError):
            decode(KEY, content[:length])
    with pytest.raises(ArtifactError, match="bytes of"):
        decode(KEY, content + b"\0")


def test_a_header_that_promises_more_bytes_than_there_are_is_refused_before_they_are_read():
    content = whole()
    content[24:32] = (1 << 40).to_bytes(8, "little")
    there = io.BytesIO(content)
    with pytest.raises(ArtifactError, match="ends in its header"):
        read_header(KEY, len(content), there.read)
    assert there.tell() < 100


def test_a_blob_under_another_key_is_found():
    with pytest.raises(ArtifactError, match="header's checksum"):
        decode("0123abce", whole())


def test_swapped_tensors_of_one_layout_are_found():
    one, two = whole(tensors={"x": torch.zeros(4)}), whole(tensors={"x": torch.ones(4)})
    with pytest.raises(ArtifactError, match="checksum of its tensors"):
        decode(KEY, one[: header_end(one)] + two[header_end(two) :])


@pytest.mark.parametrize(
    "change",
    [
        lambda layout: layout["levels"].update(dtype="I4"),
        lambda layout: layout["levels"].update(data_offsets=[0, 10**9]),
        lambda layout: layout["__metadata__"].update(head="{"),
        lambda layout: layout["__metadata__"].pop("head"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_even_with_the_right_checksum(change):
    content = whole()
    layout = json.loads(content[32 : header_end(content)])
    change(layout)
    text = json.dumps(layout, separators=(",", ":")).encode()
    rest = bytes(content[16:24]) + len(text).to_bytes(8, "little") + text
    forged = hashlib.blake2b(KEY.encode() + b" " + rest, digest_size=16).digest() + rest
    with pytest.raises(ArtifactError):
        decode(KEY, forged + content[header_end(content) :])


@pytest.mark.parametrize("key", ["", "ABC", "xyz", "../a", "a" * 129, "a\n", 5, None])
def test_a_key_that_is_no_small_hexadecimal_is_refused(key):
    with pytest.raises(ConfigError, match="key: expected"):
        checked_key(key)


@pytest.mark.parametrize("head", [{1: 2}, {"a": (1, 2)}, {"a": float("nan")}, {"a": {1}}, [1], {"a": b"x"}])
def test_a_head_that_json_would_change_is_refused(head):
    with pytest.raises(ConfigError, match="head: expected"):
        encode(KEY, head, {})


@pytest.mark.parametrize(
    "tensors",
    [
        {"x": [1.0]},
        {"x": torch.zeros(2, dtype=torch.complex128)},
        {"x": torch.zeros(2, device="meta")},
        {"x": torch.eye(2).to_sparse()},
        {3: torch.zeros(2)},
        {"__metadata__": torch.zeros(2)},
    ],
)
def test_what_is_no_storable_tensor_is_refused(tensors):
    with pytest.raises(ConfigError, match="tensors"):
        encode(KEY, {}, tensors)
