"""Semantic codes come back bit by bit from any pieces of their bytes, and nothing else is ever taken for codes."""

from __future__ import annotations

import copy
import hashlib
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load

from hf_kvcaches.core.quantize import Quantized, quantize
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError
from hf_kvcaches.translate.arriving import ArrivingCodes
from hf_kvcaches.translate.codes import CodesWriter, Part, SemanticCodes, pack
from hf_kvcaches.translate.head import PartHead
from tests.translate.code_helpers import DTYPES, bodies_of, codes_of, head_of, json_of, message, refused, same

# Round trips


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 1, 3, 100])
@pytest.mark.parametrize("lengths", [(5,), (4, 3), (1, 0, 7), (0,), (1,)])
def test_codes_come_back_bit_by_bit(dtype, group, lengths):
    codes = codes_of(head_of(dtype, lengths, group=group))
    data = codes.to_bytes()
    back = SemanticCodes.from_bytes(data)
    assert same(back, codes)
    assert back.to_bytes() == data
    assert len(data) == codes.nbytes == back.head.nbytes
    for part, twin in zip(codes, back, strict=True):
        for name in part.codes:
            assert twin.decoded(name, torch.float32).shape == (sum(lengths), codes.head.parts[codes.parts.index(part)].ranks[name])
            assert torch.equal(part.decoded(name, torch.bfloat16), twin.decoded(name, torch.bfloat16))


@given(data=st.data())
def test_codes_of_any_head_come_back(data):
    text = st.text(min_size=1, max_size=9)
    ranks = st.dictionaries(st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,5}", fullmatch=True), st.integers(1, 9), min_size=1, max_size=3)
    names = data.draw(st.lists(text, max_size=3, unique=True))
    layers = st.sets(st.integers(0, 99), min_size=1, max_size=4).map(lambda found: tuple(sorted(found)))
    kinds = st.sampled_from(["reuse", "patch", "cross_layer"])
    parts = tuple(PartHead(name, data.draw(kinds), data.draw(layers), data.draw(ranks)) for name in names)
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    group = data.draw(st.none() | st.integers(1, 12))
    head = head_of(data.draw(st.sampled_from(DTYPES)), lengths, parts, group, translator=data.draw(text), method=data.draw(text))
    codes = codes_of(head)
    sent = codes.to_bytes()
    assert sent == message(json_of(head), bodies_of(codes))
    assert len(sent) == codes.nbytes
    assert same(SemanticCodes.from_bytes(sent), codes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_those_of_the_description_and_bodies_are_safetensors_files(dtype):
    codes = codes_of(head_of(dtype, group=2))
    bodies = bodies_of(codes)
    assert codes.to_bytes() == message(json_of(codes.head), bodies)
    chunks = list(codes.chunks())
    assert b"".join(chunks) == codes.to_bytes()
    assert len(chunks) == 1 + len(codes.parts)
    assert [chunk[28:] for chunk in chunks[1:]] == bodies
    for part, chunk in zip(codes, chunks[1:], strict=True):
        read = load(chunk[28:])
        for name, code in part.codes.items():
            if isinstance(code, Quantized):
                twin = Quantized.from_tensors({piece: read[f"{name}.{piece}"] for piece in ("data", "scale", "zero")}, code.meta())
                assert torch.equal(twin.dequantize(), code.dequantize())
            else:
                assert torch.equal(read[name], code)


END, LEAST = 3.4028234663852886e38, 1.401298464324817e-45


@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=7, max_size=7), strided=st.booleans())
@example(values=[END, -END, LEAST, -LEAST, -0.0, 2.0**-126, 65520.0], strided=True)
def test_float32_codes_are_the_same_numbers_to_the_bit(values, strided):
    head = head_of("float32", parts=(PartHead("all", "reuse", (0,), {"kv": 2}),))
    wide = torch.tensor(values)[:, None].expand(7, 2)
    z = wide if strided else wide.contiguous()
    data = SemanticCodes(head, [Part("all", {"kv": pack(z, "float32", None)})]).to_bytes()
    back = SemanticCodes.from_bytes(data).parts[0]
    assert torch.equal(back.codes["kv"].view(torch.int32), z.contiguous().view(torch.int32))
    assert torch.equal(back.decoded("kv", torch.float64), z.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_without_parts_are_their_head(dtype):
    codes = codes_of(head_of(dtype, parts=()))
    back = SemanticCodes.from_bytes(codes.to_bytes())
    assert back.head == codes.head
    assert list(back) == []
    refused(codes.to_bytes() + b"\0", "Bytes follow")


def test_codes_of_900_tokens_in_3_layers_take_less_than_4_percent_more_than_their_levels():
    digest = hashlib.sha256(b"").hexdigest()
    parts = tuple(PartHead(f"layer.{layer}", "reuse", (layer,), {"kv": 32}) for layer in (1, 2, 3))
    for group, most in ((None, 0.025), (256, 0.04)):
        head = head_of("int8", (900,), parts, group, translator=digest, producer=digest, consumer=digest)
        assert len(codes_of(head).to_bytes()) < (1 + most) * 900 * 3 * 32


def test_a_file_comes_back_and_a_damaged_or_missing_one_is_refused_with_its_name(tmp_path):
    codes = codes_of()
    path = tmp_path / "prompt.codes"
    codes.save(path)
    assert path.read_bytes() == codes.to_bytes()
    assert same(SemanticCodes.load(path), codes)
    path.write_bytes(codes.to_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"prompt\.codes.* 1 too early"):
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
    monkeypatch.setattr(CodesWriter, "add", lambda self, part: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        other.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["prompt.codes"]


def test_codes_can_be_copied_and_pickled():
    codes = codes_of()
    assert same(copy.deepcopy(codes), codes)
    assert same(pickle.loads(pickle.dumps(codes)), codes)
    assert pickle.loads(pickle.dumps(codes.head)).to_json() == codes.head.to_json()
    assert repr(codes) == f"SemanticCodes(joint, int8, 2 rows of 7 tokens in all, 3 parts, {codes.nbytes:,} bytes)"


# Packing


@pytest.mark.parametrize("given_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_is_a_cast_to_the_type_or_to_half_and_then_the_quantiser(given_dtype, dtype):
    z = (torch.randn(7, 4) * 5).to(given_dtype)
    code = pack(z, dtype, 3)
    if dtype.startswith("float"):
        assert code.dtype == getattr(torch, dtype)
        assert torch.equal(code, z.to(code.dtype))
    else:
        assert isinstance(code, Quantized)
        expected = quantize(z.half(), 8 if dtype == "int8" else 4, 3, axis=0)
        assert torch.equal(code.dequantize(), expected.dequantize())
        assert code.meta() == expected.meta()
        assert ((code.dequantize(torch.float32) - z.half().float()).abs() <= code.error_bound(torch.float32)).all()


@pytest.mark.parametrize("given_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float32"])
def test_what_is_beyond_the_range_of_half_becomes_its_end(given_dtype, dtype):
    z = torch.tensor([[1e30, -65536.0], [1e30, -65536.0]]).to(given_dtype)
    assert Part("x", {"kv": pack(z, dtype, None)}).decoded("kv", torch.float32).tolist() == [[65504.0, -65504.0]] * 2


def test_what_is_beyond_the_range_of_float32_becomes_its_end():
    """It would arrive as infinity, and be refused only there."""
    code = pack(torch.tensor([[1e300, -1e300, 2.0]], dtype=torch.float64), "float32", None)
    assert code.tolist() == [[END, -END, 2.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float32_code_beyond_the_range_of_the_consumers_type_becomes_its_end(dtype):
    """An infinity in a consumer's hidden states is NaN soon after."""
    part = Part("x", {"kv": pack(torch.tensor([[END, -END, 70_000.0, LEAST, 3.0]]), "float32", None)})
    end = torch.finfo(dtype).max
    found = part.decoded("kv", dtype)
    assert found.dtype == dtype
    assert found.tolist() == [[end, -end, min(end, torch.tensor(70_000.0).to(dtype).item()), torch.tensor(LEAST).to(dtype).item(), 3.0]]
    assert part.codes["kv"][0, 2] == 70_000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_refuses_what_is_not_finite(value, dtype):
    with pytest.raises(ConfigError, match="z: expected finite"):
        pack(torch.tensor([[1.0, value]]), dtype, None)


@pytest.mark.parametrize(
    ("z", "dtype", "group"),
    [
        (torch.zeros(3), "int8", None),
        (torch.zeros(3, 2, dtype=torch.int8), "int8", None),
        ([[1.0]], "int8", None),
        (torch.zeros(3, 2), "int2", None),
        (torch.zeros(3, 2), torch.float16, None),
        (torch.zeros(3, 2), "int8", 0),
    ],
)
def test_packing_refuses_what_it_can_not_pack(z, dtype, group):
    with pytest.raises(ConfigError):
        pack(z, dtype, group)


# Writing part by part


def test_parts_are_written_while_others_are_still_computed():
    codes = codes_of()
    writer = CodesWriter(codes.head)
    pieces = [writer.begin()]
    # An iterator over a list sees what is appended later.
    arriving = ArrivingCodes(iter(pieces))
    assert arriving.head == codes.head
    for part in codes.parts:
        pieces.append(writer.add(part))
        assert same([next(arriving)], [part])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_that_does_not_fit_the_head_is_a_fault_of_ours(dtype):
    codes = codes_of(head_of(dtype, group=3))
    first, second, third = codes.parts
    ready = CodesWriter(codes.head)
    with pytest.raises(AssertionError, match="begin"):
        ready.add(first)
    ready.begin()
    with pytest.raises(AssertionError, match="begun"):
        ready.begin()
    others = [second, codes_of(head_of(dtype, (5, 3), group=3)).parts[0], Part("layer.1", {}), Part("layer.1", {"k": first.codes["kv"]})]
    others.append(codes_of(head_of(dict(zip(DTYPES, [*DTYPES[1:], DTYPES[0]], strict=True))[dtype], group=3)).parts[0])
    for other in others:
        with pytest.raises(AssertionError):
            ready.add(other)
        with pytest.raises(AssertionError):
            SemanticCodes(codes.head, [other, second, third])
    for part in codes:
        ready.add(part)
    with pytest.raises(AssertionError, match="after the last"):
        ready.add(third)
    with pytest.raises(AssertionError):
        SemanticCodes(codes.head, [first, second])


def test_a_part_quantised_in_other_groups_is_a_fault_of_ours_even_where_shapes_agree():
    # 7 tokens are two groups of 4 or of 5.
    head = head_of("int8", group=4)
    with pytest.raises(AssertionError, match="group"):
        SemanticCodes(head, codes_of(head_of("int8", group=5)))


# Arriving


@given(
    cuts=st.lists(st.integers(0, 2000), max_size=40), dtype=st.sampled_from(DTYPES), kind=st.sampled_from([bytes, bytearray, memoryview])
)
def test_pieces_of_any_sizes_give_the_same_codes(cuts, dtype, kind):
    codes = codes_of(head_of(dtype))
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
    data, other = codes.to_bytes(), codes_of(head_of("int4")).to_bytes()
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


def test_parts_that_were_taken_are_not_silently_missing_later():
    data = codes_of().to_bytes()
    arriving = ArrivingCodes([data])
    first = next(arriving)
    with pytest.raises(UnsupportedError, match="Collect them first"):
        arriving.collect()
    # Going on is fine.
    assert [first.name, *(part.name for part in arriving)] == ["layer.1", "layer.2", "all"]
    with pytest.raises(UnsupportedError, match="taken already"):
        list(arriving)
    with pytest.raises(StopIteration):
        next(arriving)
    empty = ArrivingCodes([codes_of(head_of(parts=())).to_bytes()])
    assert list(empty) == []
    with pytest.raises(UnsupportedError):
        empty.collect()


def test_after_an_error_no_part_is_handed_out():
    codes = codes_of()
    start, one, two, three = codes.chunks()
    for pieces in ([start, one, three, two], [start, one, two[:-1]], [start, two[:5] + one, one, two]):
        arriving = ArrivingCodes(pieces)
        messages = []
        for _ in range(5):
            try:
                part = next(arriving)
                assert not messages
                assert part.name == "layer.1"
            except ArtifactError as error:
                messages.append(str(error))
        assert len(messages) >= 4
        assert len(set(messages)) == 1


def test_an_interruption_while_reading_ends_the_codes():
    start, one, two, _ = codes_of().chunks()

    def pieces():
        yield from (start, one, two[:9])
        raise KeyboardInterrupt

    arriving = ArrivingCodes(pieces())
    next(arriving)
    with pytest.raises(KeyboardInterrupt):
        next(arriving)
    with pytest.raises(ArtifactError, match="broken off"):
        next(arriving)
