"""Semantic codes come back bit by bit from any pieces of their bytes, and nothing else is ever taken for codes."""

from __future__ import annotations

import copy
import hashlib
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.translate.codes import ArrivingCodes, Part, SemanticCodes, message_of
from tests.translate.code_helpers import codes_of, head_of, message_by_hand, refused, same

# Round trips


@pytest.mark.parametrize("lengths", [(5,), (4, 3), (1, 0, 7), (0,), (1,)])
def test_codes_come_back_bit_by_bit(lengths):
    codes = codes_of(head_of(lengths))
    data = codes.to_bytes()
    back = SemanticCodes.from_bytes(data)
    assert same(back, codes)
    assert back.to_bytes() == data
    assert len(data) == codes.nbytes == back.nbytes


@given(data=st.data())
def test_codes_of_any_head_come_back(data):
    names = data.draw(st.lists(st.text(min_size=1, max_size=9), max_size=3, unique=True))
    sizes = [data.draw(st.integers(0, 9)) for _ in names]
    lengths = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=4))
    head = head_of(lengths, tuple(names), data.draw(st.text(min_size=1, max_size=9)), data.draw(st.integers(0, 2)))
    codes = codes_of(head, sizes=sizes)
    sent = codes.to_bytes()
    assert sent == message_by_hand(codes)
    assert len(sent) == codes.nbytes
    assert same(SemanticCodes.from_bytes(sent), codes)


def test_the_bytes_are_those_of_the_description_and_bodies_are_safetensors_files():
    codes = codes_of()
    chunks = list(codes.chunks())
    assert b"".join(chunks) == codes.to_bytes() == message_by_hand(codes)
    for part, chunk in zip(codes, chunks[1:], strict=True):
        assert torch.equal(load(chunk[28:])["codes"], part.codes)


@pytest.mark.parametrize("size", [0, 1, 9, 10, 99, 100, 9_990, 9_999, 10_000, 99_999, 100_000, 999_999, 1_000_000])
def test_a_part_may_have_any_length(size):
    """The header of a body is longer where its numbers have more digits, and a reader finds both lengths from their sum."""
    for near in range(max(0, size - 9), size + 9):
        codes = codes_of(head_of(names=("layer.1",)), sizes=(near,))
        assert same(SemanticCodes.from_bytes(codes.to_bytes()), codes)


def test_codes_without_parts_are_their_head():
    codes = codes_of(head_of(names=()))
    back = SemanticCodes.from_bytes(codes.to_bytes())
    assert back.head == codes.head
    assert list(back) == []
    refused(codes.to_bytes() + b"\0", "Bytes follow")


def test_codes_of_900_tokens_take_less_than_2_percent_more_than_their_bits():
    head = head_of((900,), ("layers.1-3",), hashlib.sha256(b"").hexdigest())
    assert len(codes_of(head, sizes=(900 * 51,)).to_bytes()) < 1.02 * 900 * 51


def test_a_file_comes_back_and_a_damaged_or_missing_one_is_refused_with_its_name(tmp_path):
    codes = codes_of()
    path = tmp_path / "prompt.codes"
    codes.save(path)
    assert path.read_bytes() == codes.to_bytes()
    assert same(SemanticCodes.load(path), codes)
    path.write_bytes(codes.to_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"prompt\.codes.* too early"):
        SemanticCodes.load(path)
    with pytest.raises(ArtifactError, match=r"none\.codes: expected a file"):
        SemanticCodes.load(tmp_path / "none.codes")
    with pytest.raises(ArtifactError, match="expected a file"):
        SemanticCodes.load(tmp_path)


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    codes, path = codes_of(), tmp_path / "prompt.codes"
    codes.save(path)
    before = path.read_bytes()
    other = codes_of(seed=1)
    monkeypatch.setattr(other, "chunks", lambda: (1 / number for number in range(1)))
    with pytest.raises(ZeroDivisionError):
        other.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["prompt.codes"]


def test_codes_can_be_copied_and_pickled():
    codes = codes_of()
    assert same(copy.deepcopy(codes), codes)
    assert same(pickle.loads(pickle.dumps(codes)), codes)
    assert pickle.loads(pickle.dumps(codes.head)) == codes.head
    assert repr(codes) == f"SemanticCodes(2 prompts of 7 tokens in all, 3 parts, {codes.nbytes:,} bytes)"


# Writing part by part


def test_parts_are_written_while_others_are_still_computed():
    codes, computed = codes_of(), []

    def parts():
        for part in codes:
            computed.append(part)
            yield part

    arriving = ArrivingCodes(message_of(codes.head, parts()))
    assert arriving.head == codes.head
    for number, part in enumerate(arriving, 1):
        assert same([part], [codes.parts[number - 1]])
        assert len(computed) == number


def test_a_part_that_does_not_fit_the_head_is_a_fault_of_ours():
    codes = codes_of()
    first, second, third = codes.parts
    for other in (second, Part("layer.7", first.codes)):
        with pytest.raises(AssertionError):
            SemanticCodes(codes.head, [other, second, third])
        with pytest.raises(AssertionError):
            list(message_of(codes.head, [other, second, third]))
    with pytest.raises(AssertionError):
        list(message_of(codes.head, [Part("layer.1", first.codes.float()), second, third]))
    for parts in ([first, second], [first, second, third, third]):
        with pytest.raises(AssertionError):
            SemanticCodes(codes.head, parts)
        with pytest.raises(ValueError, match="argument"):
            list(message_of(codes.head, parts))


# Arriving


@given(cuts=st.lists(st.integers(0, 2000), max_size=40), kind=st.sampled_from([bytes, bytearray, memoryview]))
def test_pieces_of_any_sizes_give_the_same_codes(cuts, kind):
    codes = codes_of()
    data = codes.to_bytes()
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [kind(data[start:stop]) for start, stop in zip(ends, [*ends[1:], len(data)], strict=True)]
    assert b"".join(pieces) == data
    assert same(ArrivingCodes(pieces).collect(), codes)
    assert same(list(ArrivingCodes(pieces)), codes.parts)


def test_single_bytes_and_one_piece_give_the_same_codes():
    codes = codes_of()
    data = codes.to_bytes()
    assert same(ArrivingCodes(data[place : place + 1] for place in range(len(data))).collect(), codes)
    assert same(ArrivingCodes(data).collect(), codes)
    strided = memoryview(bytes(byte for pair in zip(data, data, strict=True) for byte in pair))[::2]
    assert same(SemanticCodes.from_bytes(strided), codes)


def test_a_part_is_handed_out_before_a_byte_of_the_next_is_asked_for():
    codes, asked = codes_of(), []
    chunks = list(codes.chunks())

    def pieces():
        for number, chunk in enumerate(chunks):
            asked.append(number)
            yield chunk

    arriving = ArrivingCodes(pieces())
    assert asked == [0]
    for number, part in enumerate(arriving, start=1):
        assert asked == list(range(number + 1))
        assert part.name == codes.parts[number - 1].name


def test_a_reading_function_is_never_asked_for_more_than_the_message():
    codes = codes_of()
    data, other = codes.to_bytes(), codes_of(head_of((9,))).to_bytes()
    stream, place = data + other, 0

    def read(count: int) -> bytes:
        nonlocal place
        given_bytes = stream[place : place + min(count, 100)]
        place += len(given_bytes)
        return given_bytes

    arriving = ArrivingCodes(read)
    assert place == len(next(codes.chunks()))
    assert same(arriving.collect(), codes)
    assert place == len(data)
    assert ArrivingCodes(read).collect().to_bytes() == other
    with pytest.raises(ArtifactError, match="Semantic codes end after 0 bytes"):
        ArrivingCodes(read)


def test_parts_that_arrived_are_kept():
    codes = codes_of()
    arriving = ArrivingCodes([codes.to_bytes()])
    assert next(iter(arriving)).name == "layer.1"
    assert same(list(arriving), codes.parts)
    assert same(arriving.collect(), codes)
    empty = codes_of(head_of(names=()))
    assert same(ArrivingCodes([empty.to_bytes()]).collect(), empty)


def test_after_an_error_no_further_part_is_handed_out():
    start, one, two, three = codes_of().chunks()
    for pieces in ([start, one, three, two], [start, one, two[:-1]], [start, two[:5] + one, one, two]):
        arriving, names, messages = ArrivingCodes(pieces), [], []
        for _ in range(5):
            with pytest.raises(ArtifactError) as caught:
                names.extend(part.name for part in arriving)
            messages.append(str(caught.value))
        assert set(names) <= {"layer.1"}
        assert len(set(messages)) == 1


def test_an_interruption_while_reading_ends_the_codes():
    start, one, two, _ = codes_of().chunks()

    def pieces():
        yield from (start, one, two[:9])
        raise KeyboardInterrupt

    arriving = ArrivingCodes(pieces())
    with pytest.raises(KeyboardInterrupt):
        list(arriving)
    with pytest.raises(ArtifactError, match="broken off"):
        list(arriving)
