"""Semantic codes come back bit by bit from any pieces of their bytes, part by part, and find their prompts in a batch."""

from __future__ import annotations

import copy
import hashlib
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from hf_kvcaches.codec.wire.messages import message_chunks
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.translate.codes import ArrivingCodes, CodedPrompt, CodesHead, Prompt, SemanticCodes, match_prompts
from tests.translate.code_helpers import codes_of, head_of, message_by_hand, refused, same

# Round trips


@given(data=st.data())
def test_codes_of_any_head_come_back_from_the_bytes_of_the_description(data):
    names = data.draw(st.lists(st.text(min_size=1, max_size=9), max_size=3, unique=True))
    sizes = [data.draw(st.integers(0, 9)) for _ in names]
    lengths = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=4))
    head = head_of(lengths, tuple(names), data.draw(st.text(min_size=1, max_size=9)), data.draw(st.integers(0, 2)))
    codes = codes_of(head, sizes=sizes)
    sent = codes.to_bytes()
    assert sent == message_by_hand(codes)
    assert len(sent) == codes.nbytes
    for part, chunk in zip(codes, list(codes.chunks())[1:], strict=True):
        assert torch.equal(load(chunk[28:])["codes"], part.codes)
    back = SemanticCodes.from_bytes(sent)
    assert same(back, codes)
    assert back.to_bytes() == sent


@pytest.mark.parametrize("size", [0, 1, 9, 10, 99, 100, 9_990, 9_999, 10_000, 99_999, 100_000, 999_999, 1_000_000])
def test_a_part_may_have_any_length(size):
    """The header of a body is longer where its numbers have more digits, and a reader finds both lengths from their sum."""
    for near in range(max(0, size - 9), size + 9):
        codes = codes_of(head_of(names=("layer.1",)), sizes=(near,))
        assert same(SemanticCodes.from_bytes(codes.to_bytes()), codes)


def test_codes_without_parts_are_their_head_and_a_head_takes_less_than_2_percent_of_900_tokens():
    codes = codes_of(head_of(names=()))
    assert same(SemanticCodes.from_bytes(codes.to_bytes()), codes)
    refused(codes.to_bytes() + b"\0", "Bytes follow")
    head = head_of((900,), ("layers.1-3",), hashlib.sha256(b"").hexdigest())
    assert len(codes_of(head, sizes=(900 * 51,)).to_bytes()) < 1.02 * 900 * 51


def test_a_file_comes_back_and_a_damaged_or_missing_one_is_refused_with_its_name(tmp_path):
    codes = codes_of()
    path = tmp_path / "prompt.codes"
    codes.save(path)
    assert path.read_bytes() == codes.to_bytes()
    assert same(SemanticCodes.load(path), codes)
    for content, why in ((codes.to_bytes()[:-1], "too early"), (codes.to_bytes() + b"\n", "Bytes follow")):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=rf"prompt\.codes.* {why}"):
            SemanticCodes.load(path)
    with pytest.raises(ArtifactError, match=r"none\.codes: expected a file"):
        SemanticCodes.load(tmp_path / "none.codes")


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    codes, other, path = codes_of(), codes_of(seed=1), tmp_path / "prompt.codes"
    codes.save(path)
    monkeypatch.setattr(other, "chunks", lambda: (1 / number for number in range(1)))
    with pytest.raises(ZeroDivisionError):
        other.save(path)
    assert path.read_bytes() == codes.to_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["prompt.codes"]


def test_codes_can_be_copied_and_pickled():
    codes = codes_of()
    assert same(copy.deepcopy(codes), codes)
    assert same(pickle.loads(pickle.dumps(codes)), codes)
    assert repr(codes) == f"SemanticCodes(2 prompts of 7 tokens in all, 3 parts, {codes.nbytes:,} bytes)"


# Part by part


def test_a_part_is_written_and_handed_out_before_the_next_is_computed():
    codes, computed = codes_of(), []

    def parts():
        for part in codes:
            computed.append(part)
            yield part.codes

    arriving = ArrivingCodes(message_chunks(codes.head, parts()))
    assert (arriving.head, computed) == (codes.head, [])
    for number, part in enumerate(arriving, 1):
        assert same([part], [codes.parts[number - 1]])
        assert len(computed) == number
    assert same(arriving.collect(), codes)  # parts that arrived are kept


@given(cuts=st.lists(st.integers(0, 2000), max_size=40), kind=st.sampled_from([bytes, bytearray, memoryview]))
def test_pieces_of_any_sizes_give_the_same_codes(cuts, kind):
    codes = codes_of()
    data = codes.to_bytes()
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [kind(data[start:stop]) for start, stop in zip(ends, [*ends[1:], len(data)], strict=True)]
    assert same(ArrivingCodes(pieces).collect(), codes)
    strided = memoryview(bytes(byte for pair in zip(data, data, strict=True) for byte in pair))[::2]
    assert same(SemanticCodes.from_bytes(strided), codes)


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


def test_after_an_error_or_an_interruption_no_further_part_is_handed_out():
    start, one, two, three = codes_of().chunks()
    for pieces in ([start, one, three, two], [start, one, two[:-1]], [start, two[:5] + one, one, two]):
        arriving, names, messages = ArrivingCodes(pieces), [], []
        for _ in range(5):
            with pytest.raises(ArtifactError) as caught:
                names.extend(part.name for part in arriving)
            messages.append(str(caught.value))
        assert set(names) <= {"layer.1"}
        assert len(set(messages)) == 1

    def interrupted():
        yield from (start, one, two[:9])
        raise KeyboardInterrupt

    arriving = ArrivingCodes(interrupted())
    with pytest.raises(KeyboardInterrupt):
        list(arriving)
    with pytest.raises(ArtifactError, match="broken off"):
        list(arriving)


# Prompts


def test_a_prompt_is_known_by_its_tokens_whatever_holds_them():
    ids = [5, 0, 4_000_000_000, 17]
    digest = hashlib.blake2b(struct.pack("<4I", *ids), digest_size=16).hexdigest()
    containers = [ids, tuple(ids), np.array(ids), np.array(ids, np.uint32), torch.tensor(ids), np.array(ids, ">i8")]
    assert {Prompt.of(row) for row in containers} == {Prompt(4, digest)}
    assert Prompt.of([]) == Prompt.of(torch.zeros(0, dtype=torch.int64)) == Prompt(0, hashlib.blake2b(digest_size=16).hexdigest())


@given(data=st.data())
def test_a_text_begins_with_a_prompt_where_a_comparison_of_both_says_so(data):
    token = st.integers(0, 2) | st.integers(0, (1 << 32) - 1)
    row = data.draw(st.lists(token, max_size=30))
    text = row[: data.draw(st.integers(0, 30))] + data.draw(st.lists(token, max_size=20))
    if text and data.draw(st.booleans()):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(token)
    for kind in (np.int64, np.uint32):
        assert Prompt.of(row).begins(np.array(text, kind)) == (text[: len(row)] == row)


# Where the codes of some prompts go in a batch of others


def coded_head(rows: list[list[int]]) -> CodesHead:
    return CodesHead("t", tuple(Prompt.of(row) for row in rows), ())


def match(head: CodesHead, wanted: list[list[int]], most: int, run: int = 0) -> CodedPrompt:
    padding = [max(map(len, wanted)) - len(text) for text in wanted]
    return match_prompts(head, [torch.tensor(text) for text in wanted], padding, most, run=run)


# Few beginnings, so that texts begin alike, and are each other's beginnings.
BEGINNINGS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9], [4] * 9, [4] * 17]
ends = st.lists(st.integers(1, 3), max_size=4)
texts = st.lists(st.builds(lambda beginning, end: beginning + end, st.sampled_from(BEGINNINGS), ends), min_size=1, max_size=4)


@given(coded=texts, wanted=texts)
def test_each_slot_that_is_filled_gets_the_codes_of_its_own_token(coded: list[list[int]], wanted: list[list[int]]):
    head, longest = coded_head(coded), max(map(len, wanted))
    padding = [longest - len(text) for text in wanted]
    counts = [max((len(row) for row in coded if text[: len(row)] == row), default=-99) for text in wanted]
    slots = min(longest - 1, *(pad + count for pad, count in zip(padding, counts, strict=True)))
    if slots <= max(padding):
        with pytest.raises(ConfigError, match="another prompt" if min(counts) < 0 else "one row start at or after"):
            match(head, wanted, longest - 1)
        return
    prompt = match(head, wanted, longest - 1)
    assert prompt.slots == slots
    assert sorted([*(span.row for span in prompt.spans), *prompt.copies]) == list(range(len(wanted)))
    ids = [token for row in coded for token in row]
    for indices, (row, first, count) in zip(prompt.indices.split([span.tokens for span in prompt.spans]), prompt.spans, strict=True):
        assert (first, count) == (padding[row], slots - padding[row])
        assert [ids[index] for index in indices] == wanted[row][:count]
    for row, twin in prompt.copies.items():
        assert (wanted[row][: slots - padding[row]], padding[row]) == (wanted[twin][: slots - padding[twin]], padding[twin])


def test_rows_that_say_the_same_are_rebuilt_once():
    prompt = match(coded_head([[5, 6, 7, 8]]), [[5, 6, 7, 8, 9]] * 4, 4)
    assert ([span.row for span in prompt.spans], prompt.copies) == ([0], dict.fromkeys((1, 2, 3), 0))
