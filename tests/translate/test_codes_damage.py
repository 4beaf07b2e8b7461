"""No byte of semantic codes can change, go or come without being noticed, whoever wrote the digests."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.codec.wire.messages import message_chunks
from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.translate.codes import ArrivingCodes, Prompt, SemanticCodes
from tests.costs import seconds
from tests.translate.code_helpers import NAMES, blob, codes_of, head_of, json_of, message, message_by_hand, refused, same


def test_every_truncation_is_refused_and_says_where_it_is():
    codes = codes_of()
    data, starts = codes.to_bytes(), [len(chunk) for chunk in codes.chunks()]
    ends = [sum(starts[:number]) for number in range(1, 5)]
    for length in range(len(data)):
        message_text = refused(data[:length])
        assert "end" in message_text or length < 8
        if number := sum(end <= length for end in ends):
            assert f"in part {NAMES[number - 1]!r} ({number} of 3) after {length} bytes" in message_text


def test_every_flipped_bit_is_refused():
    data = bytearray(codes_of(head_of((3,), NAMES[:2])).to_bytes())
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            refused(bytes(data))
            data[place] ^= 1 << bit
    SemanticCodes.from_bytes(data)


def test_parts_that_are_swapped_dropped_doubled_or_of_another_message_are_refused():
    start, *parts = codes_of().chunks()
    other_start, *others = codes_of(seed=1).chunks()
    # The same head: only the codes differ.
    assert start == other_start
    for order in ((1, 0, 2), (0, 2, 1), (2, 1, 0), (0, 2), (1, 2), (0, 0, 1, 2), (0, 1, 1, 2), (0, 1, 2, 2), (0, 1), ()):
        refused(b"".join([start, *(parts[place] for place in order)]))
    for mixed in ([others[0], *parts[1:]], [parts[0], others[1], parts[2]], [*parts[:2], others[2]]):
        refused(b"".join([start, *mixed]), "is damaged, or of other codes")
    foreign, *_ = codes_of(head_of(translator="u")).chunks()
    refused(b"".join([foreign, *parts]), "is damaged, or of other codes")


def test_bytes_behind_the_end_are_refused():
    data = codes_of().to_bytes()
    for extra in (b"\0", b"HFKVCODE", data):
        refused(data + extra, "Bytes follow semantic codes")
        with pytest.raises(ArtifactError, match="Bytes follow"):
            list(ArrivingCodes([data, b"", extra]))


def test_what_is_refused_says_why():
    codes = codes_of()
    data, head = codes.to_bytes(), json_of(codes.head)
    refused(b"", "end after 0 bytes")
    refused(b"PK\3\4" + data, r"Expected semantic codes, got bytes that begin with b'PK")
    refused(b"no", "Expected semantic codes")
    refused(message_by_hand(codes, version=4), "format version 4, this reads version 3. Upgrade hf-kvcaches")
    refused(message_by_hand(codes, version=2), "version 2, this reads version 3. Encode")
    for old, version in ((b'"version":2,', b""), (b'"version":2', b'"version":3')):
        refused(message_by_hand(codes, head.replace(old, version)), r"Semantic codes have format version [13], this reads version 2")
    refused(data[:12] + (17 << 20).to_bytes(4, "little") + data[16:], "more than the 16777216 allowed")
    refused(data[:30] + b"X" + data[31:], "damaged head")
    refused(data[:-1] + bytes([data[-1] ^ 1]), r"Part 'layers.3-5' \(3 of 3\) of semantic codes is damaged")
    refused(message_by_hand(codes, numbers=[1, 0, 2]), "Part 1 of semantic codes came where part 0 was next")
    refused(message_by_hand(codes, lengths={0: 1 << 60}), "too early")
    with pytest.raises(ConfigError, match="data: expected bytes"):
        SemanticCodes.from_bytes("HFKVCODE")


def test_a_length_that_promises_much_takes_no_memory_before_it_came():
    """A part may announce a terabyte that never comes."""
    start = (0).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little") + bytes(16)
    stream, asked = io.BytesIO(message(json_of(head_of(names=NAMES[:1])), []) + start + bytes(100)), list[int]()
    with pytest.raises(ArtifactError, match="too early"):
        list(ArrivingCodes(lambda count: asked.append(count) or stream.read(count)))
    assert max(asked) <= 1 << 20


# Heads and bodies with digests that are right, and which are wrong all the same

HEAD = json.loads(json_of(head_of()))


def json_with(**changes) -> bytes:
    return json.dumps(HEAD | changes, separators=(",", ":")).encode()


def with_head(**changes) -> bytes:
    return message_by_hand(codes_of(), json_with(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": [[4, "x" * 32], HEAD["prompts"][1]]},
        {"prompts": [[*HEAD["prompts"][0], 5], HEAD["prompts"][1]]},
        {"prompts": [[*HEAD["prompts"][0], 0], HEAD["prompts"][1]]},
        {"names": HEAD["names"][:2]},
        {"names": [*HEAD["names"], "more"]},
        {"names": ["layer.1", "layer.1", "layers.3-5"]},
    ],
)
def test_a_head_that_fits_no_part_is_refused_though_its_digest_is_right(changes):
    refused(with_head(**changes))


def test_a_forged_head_that_fits_its_parts_is_what_it_says():
    """The control of the tests around it: the forger's digests are right."""
    assert SemanticCodes.from_bytes(with_head()).head == head_of()
    assert SemanticCodes.from_bytes(with_head(translator="other")).head == head_of(translator="other")


@pytest.mark.parametrize(
    "head",
    [
        *(b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"1" * 5000),
        *(b"1e400", b'{"translator":1e400}', b"[" * 65 + b"]" * 65, b'{"prompts":' + b"9" * 400 + b"}"),
        *(json.dumps(HEAD).encode(), json_with(more=1), json.dumps(dict(reversed(HEAD.items())), separators=(",", ":")).encode()),
        json_with().replace(b'"translator"', b'"prompts":[],"translator"'),
        *(json_with().replace(b"[4,", wrong) for wrong in (b"[NaN,", b"[4.0,", b"[" + b"9" * 5000 + b",")),
        json_with().replace(b'"prompts"', b'"others"'),
    ],
    ids=range(19),
)
def test_a_head_that_is_no_head_is_refused_though_its_digest_is_right(head):
    assert len(refused(message_by_hand(codes_of(), head))) < 1000


@pytest.mark.parametrize("name", ["kind", "translator", "prompts", "names"])
@pytest.mark.parametrize(
    "value", [None, True, 3, -1.5, "", "x" * 5000, [], [[]], [None], [[1]], [["a", "b", "c", "d"]], {}, {"a": 1}, "\ud800"], ids=range(14)
)
def test_a_head_with_a_value_of_another_kind_is_refused(name, value):
    data = with_head(**{name: value})
    if (name, value) == ("translator", "\ud800"):
        # This is fine, and is kept.
        assert SemanticCodes.from_bytes(data).to_bytes() == data
    else:
        assert len(refused(data)) < 1000


def test_a_body_that_is_not_of_one_record_is_refused_though_its_digest_is_right():
    codes = codes_of(head_of((7,), NAMES[:1]))
    head, code = json_of(codes.head), codes.parts[0].codes
    body = blob([("codes", code)])
    assert same(SemanticCodes.from_bytes(message(head, [body])), codes)
    tensors = [[("code", code)], [("codes", code[None])], [("codes", code.view(torch.int8))], []]
    forged = [blob(each) for each in tensors] + [b"\0" * len(body), b"\xff" * len(body)]
    for other in (b"", body + b"\0", body[:-1], *forged):
        refused(message(head, [other]), "fit their head|holds other tensors")
        if other in forged:  # a body of the expected length gets further
            refused(message(head, [(other + b"\0" * len(body))[: len(body)]]), "holds other tensors")


@pytest.mark.parametrize("kind", ["FIFO", "endless device", "folder", "link to itself"])
def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path, kind):
    path = tmp_path / "codes"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "endless device" else "codes")
    with pytest.raises(ArtifactError, match="expected a file of semantic codes"):
        SemanticCodes.load(path)


def test_a_head_longer_than_readers_take_is_not_sent_and_60_000_rows_are():
    with pytest.raises(ConfigError, match="Encode fewer rows"):
        next(message_chunks(replace(head_of(names=()), prompts=(Prompt.of([1]),) * 70_000), []))
    head = replace(head_of(names=()), prompts=(Prompt.of([1]),) * 60_000)
    assert SemanticCodes.from_bytes(next(message_chunks(head, []))).head == head


# The last two are as large as they may be, and only the bytes of the parts are missing.
COSTLY = {
    "prompts": lambda: {"prompts": [[1, "0" * 32]] * 300_000},
    "empty prompts": lambda: {"prompts": [[]] * 4_000_000},
    "a translator of lists": lambda: {"translator": [[]] * 4_000_000},
    "parts": lambda: {"names": [str(name) for name in range(200_000)]},
    "parts with few commas": lambda: {"names": [str(name) for name in range(26_000)]},
    "most parts": lambda: {"names": [str(name) for name in range(1024)]},
    "most prompts": lambda: {"prompts": [[1, "0" * 32]] * 60_000, "names": ["all"]},
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_head_made_to_cost_time_is_refused_within_a_second(name):
    data = message(json_with(**{"names": [], **COSTLY[name]()}), [])
    problem = "end in part" if name.startswith("most") else "commas allowed|makes no sense"
    assert seconds(lambda: refused(data, problem)) < 1
    assert len(refused(data, problem)) < 1000


# Fuzzing


@given(data=st.binary(max_size=300), start=st.sampled_from([b"HFKVCODE\1\0\0\0\2\0\0\0{}"[:length] for length in (0, 8, 12, 18)]))
def test_random_bytes_are_refused(data, start):
    refused(start + data)


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 64), st.binary(max_size=64)), min_size=1, max_size=3))
def test_random_edits_are_refused(edits):
    original = codes_of().to_bytes()
    edited = bytearray(original)
    for place, length, new in edits:
        start = place % len(original)
        edited[start : start + length] = new
    if edited == original:
        SemanticCodes.from_bytes(edited)
    else:
        refused(bytes(edited))


@given(edits=st.lists(st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=8)), max_size=3))
def test_random_edits_of_the_head_under_right_digests_give_codes_of_the_right_form_or_are_refused(edits):
    codes = codes_of()
    head = bytearray(json_of(codes.head))
    for place, new in edits:
        start = place % len(head)
        head[start : start + len(new)] = new
    data = message_by_hand(codes, bytes(head))
    try:
        back = SemanticCodes.from_bytes(data)
    except ArtifactError:
        return
    assert back.to_bytes() == data
    assert [part.codes.shape for part in back] == [part.codes.shape for part in codes]
