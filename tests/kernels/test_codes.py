"""Packed codes: packing round-trips, and decoding and attention in PyTorch equal the plain reference."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels import codes_reference as reference
from hf_kvcaches.kernels import codes_torch
from hf_kvcaches.kernels.attention_parts import KeyRotation, exact_attention, merge_attention
from hf_kvcaches.kernels.codes import TILE, CodeMap, code_attention, decode_codes, pack, packed_rows, unpack
from tests.kernels.cases import TOLERANCE, assert_same
from tests.kernels.codes_cases import COUNTS, Case

SHAPES = {
    "batch": st.integers(1, 3),
    "kv_heads": st.integers(1, 3),
    "tokens": st.sampled_from([1, 15, 16, 17, 63]),
    "dim": st.sampled_from([4, 20, 60]),
    "counts": st.sampled_from(COUNTS),
    "rank": st.sampled_from([None, 0, 1, 3, 20]),
    "bases": st.sampled_from([0, 1, 3]),
    "aligned": st.sampled_from([0, 2]),
    "dtype": st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    "seed": st.integers(0, 1000),
    "room": st.sampled_from([0, 5]),
}
CASES = SHAPES | {
    "group": st.sampled_from([1, 3, 4]),
    "value_dim": st.sampled_from([1, 20]),
    "value_counts": st.sampled_from(COUNTS),
    "value_rank": st.sampled_from([None, 0, 1, 3]),
}
OPTIONS = {
    "valid": st.booleans(),
    "layout": st.sampled_from(["", "half", "interleaved"]),
    "rest": st.sampled_from([0, 2]),
    "where": st.sampled_from(["start", "padded", "any"]),
    "softcap": st.sampled_from([None, 2.0]),
}


@given(
    eights=st.integers(0, 3),
    fours=st.integers(0, 3),
    twos=st.integers(0, 3),
    ones=st.integers(0, 3),
    batch=st.integers(1, 2),
    tokens=st.sampled_from([0, 1, 7, 64]),
    seed=st.integers(0, 1000),
)
def test_levels_survive_packing_for_all_counts(eights: int, fours: int, twos: int, ones: int, batch: int, tokens: int, seed: int) -> None:
    counts = eights, 2 * fours, 4 * twos, 8 * ones
    levels = Case(batch=batch, tokens=tokens or 1, seed=seed).levels(counts)[..., :tokens]
    packed = pack(levels, counts)
    assert packed.shape == (batch, eights + fours + twos + ones, tokens) == (batch, packed_rows(counts), tokens)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, counts), levels)
    assert torch.equal(reference.unpack(packed, counts), levels)


def test_each_byte_holds_the_codes_that_the_layout_says() -> None:
    fours = torch.tensor([-8, -7, 0, 7])  # codes 0, 1, 8, 15
    ones = torch.tensor([0, -1, -1, 0, -1, -1, -1, 0])  # codes 1, 0, 0, 1, 0, 0, 0, 1
    levels = torch.cat([torch.tensor([-128]), fours, torch.tensor([-2, 1, 0, -1]), ones]).to(torch.int8).view(1, -1, 1)
    packed = pack(levels, (1, 4, 4, 8))
    assert packed.flatten().tolist() == [0, 0 + 8 * 16, 1 + 15 * 16, 0 + 3 * 4 + 2 * 16 + 1 * 64, 1 + 8 + 128]


@pytest.mark.parametrize("layout", ["", "half"])
def test_sides_without_any_codes_are_their_offsets(layout: str) -> None:
    case = Case(dim=20, counts=(0, 0, 0, 0), rank=None, value_counts=(0, 0, 0, 0), value_rank=None)
    options = case.options(False, layout)
    got = code_attention(*case.arguments, **options)
    assert_same(got, code_attention(*case.arguments, **options, backend="reference"), torch.float32)
    torch.testing.assert_close(got[0], case.value_map.offset.repeat_interleave(2, 0).expand(2, 1, 4, 8))


def test_slices_of_a_larger_buffer_are_unpacked() -> None:
    counts = (1, 2, 4, 8)
    levels = Case(tokens=20).levels(counts)
    buffer = torch.zeros(2, 9, 50, dtype=torch.uint8)
    buffer[:, 3:7, 10:30] = pack(levels, counts)
    assert torch.equal(unpack(buffer[:, 3:7, 10:30], counts), levels)


@given(shape=st.fixed_dictionaries(SHAPES), dtype=st.sampled_from([None, torch.float32, torch.bfloat16]))
def test_decoding_equals_the_reference(shape: dict[str, Any], dtype: torch.dtype | None) -> None:
    case = Case(**shape)
    basis_of = case.options().get("key_basis_of")
    got = decode_codes(case.keys, case.key_map, basis_of, dtype)
    expected = decode_codes(case.keys, case.key_map, basis_of, dtype, backend="reference")
    assert got.dtype == expected.dtype == (dtype or case.dtype)
    assert got.is_contiguous()
    tolerance = max(TOLERANCE[case.dtype], TOLERANCE[got.dtype])
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@given(shape=st.fixed_dictionaries(CASES), chosen=st.fixed_dictionaries(OPTIONS))
def test_attention_equals_the_reference(shape: dict[str, Any], chosen: dict[str, Any]) -> None:
    case = Case(**shape)
    options = case.options(**chosen)
    expected = code_attention(*case.arguments, **options, backend="reference")
    assert_same(code_attention(*case.arguments, **options), expected, case.dtype, case.dtype)


@pytest.mark.parametrize("tokens", [255, 256, 257, 600])
@pytest.mark.parametrize("layout", ["", "half"])
@pytest.mark.parametrize("bases", [0, 2])
@pytest.mark.parametrize("block", [1, 2**14])
def test_rows_of_several_blocks_equal_decoding_all(tokens: int, layout: str, bases: int, block: int, monkeypatch) -> None:
    monkeypatch.setattr(codes_torch, "BLOCK", block)
    case = Case(3, 2, 3, tokens, 60, rank=20, value_dim=64, value_rank=8, bases=bases, aligned=4)
    options = case.options(True, layout)
    keys = decode_codes(case.keys, case.key_map, options.get("key_basis_of"), torch.float64, backend="reference")
    values = decode_codes(case.values, case.value_map, options.get("value_basis_of"), torch.float64, backend="reference")
    torch.testing.assert_close(decode_codes(case.keys, case.key_map, options.get("key_basis_of"), torch.float64), keys)
    if layout:
        angles = (torch.arange(tokens) + 123).double().unsqueeze(1) * options["rotation"].inv_freq
        number = torch.complex(*keys.chunk(2, -1)) * torch.polar(torch.full_like(angles, 1.3), angles)
        keys = torch.cat([number.real, number.imag], -1)
    expected = exact_attention(case.query.double(), keys, values, 0.3, case.valid)
    assert_same(code_attention(*case.arguments, **options), expected, torch.float32)


def test_a_bank_is_the_basis_of_each_tile() -> None:
    case = Case(bases=3, tokens=40)
    options = case.options(False)
    for backend in ("torch", "reference"):
        whole = code_attention(*case.arguments, **options, backend=backend)
        parts = []
        for tile in range(3):
            here = slice(tile * TILE, min(40, (tile + 1) * TILE))
            rows, heads = torch.arange(2)[:, None], torch.arange(2)
            maps = []
            for name, code_map in (("key_basis_of", case.key_map), ("value_basis_of", case.value_map)):
                basis = options[name][:, :, tile].long()
                decode, offset = (bank[rows, heads, basis].unsqueeze(2) for bank in (code_map.decode, code_map.offset))
                maps.append(code_map._replace(decode=decode, offset=offset))
            parts.append(code_attention(case.query, case.keys[..., here], case.values[..., here], *maps, 0.3, backend=backend))
        assert_same(whole, merge_attention(parts), torch.float32)


@pytest.mark.parametrize("where", ["start", "positions"])
def test_angles_at_a_million_are_as_exact_as_at_zero(where: str) -> None:
    """Scores of a single pair each are cosines of the angle, to 1e-5."""
    dim, first, tokens = 128, 999_936, 150
    frequencies = 5e5 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    unit = torch.zeros(64, dim)
    unit[torch.arange(64), torch.arange(64)] = 1
    key_map = CodeMap((0, 0, 0, 8), torch.zeros(64, 0, dtype=torch.int64), torch.zeros(64, dim, 0), unit)
    levels = torch.eye(tokens).to(torch.int8).unsqueeze(0)
    value_map = CodeMap(
        (tokens, 0, 0, 0), torch.arange(tokens).expand(64, -1), torch.eye(tokens).expand(64, -1, -1), torch.zeros(64, tokens)
    )
    positions = torch.arange(first, first + tokens)
    rotation = KeyRotation(frequencies, start=first) if where == "start" else KeyRotation(frequencies, positions=positions.flip(0)[None])
    keys, values = torch.zeros(1, 1, tokens, dtype=torch.uint8), pack(levels, value_map.counts)
    output, lse = code_attention(unit.view(1, 64, 1, dim), keys, values, key_map, value_map, 1.0, rotation=rotation)
    scores = output[0, 0].double().log() + lse[0].unsqueeze(1)
    expected = (positions.double() * frequencies.unsqueeze(1)).cos()
    assert (scores - (expected if where == "start" else expected.flip(1))).abs().max() < 1e-5


def test_all_rows_may_share_their_positions_and_their_mask() -> None:
    case = Case()
    options = case.options(True, "half", where="any")
    options["rotation"] = options["rotation"]._replace(positions=options["rotation"].positions[:1])
    for valid in (case.valid, case.valid[1:], case.valid[:, 1:], case.valid[1:, 1:]):
        expected = code_attention(*case.arguments, **options | {"valid": valid}, backend="reference")
        assert_same(code_attention(*case.arguments, **options | {"valid": valid}), expected, torch.float32)


def test_a_row_without_valid_tokens_gives_zeros_and_minus_infinity_and_so_does_a_row_without_tokens() -> None:
    case = Case()
    output, lse = code_attention(*case.arguments, **case.options())
    assert not output[0, 0, :2].any()
    assert (lse[0, :2] == -torch.inf).all()
    assert lse.isfinite().sum() == lse.numel() - 2
    empty = code_attention(case.query, case.keys[..., :0], case.values[..., :0], *case.arguments[3:])
    assert empty[0].shape == output.shape
    assert not empty[0].any()
    assert (empty[1] == -torch.inf).all()


def test_parts_of_the_tokens_merge_to_the_whole() -> None:
    case = Case(dim=20, tokens=50)
    options = case.options(True, "half")
    parts = []
    for begin, end in ((0, 16), (16, 17), (17, 50)):
        rotation = options["rotation"]._replace(start=123 + begin)
        sides = case.keys[..., begin:end], case.values[..., begin:end]
        parts.append(code_attention(case.query, *sides, *case.arguments[3:], valid=case.valid[..., begin:end], rotation=rotation))
    assert_same(merge_attention(parts), code_attention(*case.arguments, **options), torch.float32)


def test_scores_are_in_float32_for_a_model_in_bfloat16() -> None:
    """Log sum exp of scores of about a hundred, of keys that bfloat16 holds exactly, is exact to a thousandth."""
    case = Case(dim=64, rank=5, dtype=torch.bfloat16)
    decode = torch.randint(-2, 3, case.key_map.decode.shape, generator=case.generator).bfloat16()
    case.key_map = case.key_map._replace(decode=decode, offset=torch.zeros_like(case.key_map.offset))
    case.key_levels.clamp_(-4, 3)
    case.keys = pack(case.key_levels, case.key_map.counts)
    expected = code_attention(*case.arguments, backend="reference")[1]
    assert expected.max() > 10
    for rotation in (None, KeyRotation(torch.zeros(1, dtype=torch.float64))):
        torch.testing.assert_close(code_attention(*case.arguments, rotation=rotation)[1], expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("where", ["", "start", "any"])
@pytest.mark.parametrize("bases", [0, 2])
@pytest.mark.parametrize("block", [1, 2**19])
def test_gradients_are_those_of_the_formula(where: str, bases: int, block: int, monkeypatch) -> None:
    monkeypatch.setattr(codes_torch, "BLOCK", block)
    case = Case(batch=2, kv_heads=1, tokens=20, dim=4, rank=3, value_dim=2, bases=bases, dtype=torch.float64)
    options = case.options(True, "half" if where else "", where=where, softcap=3.0)
    options["valid"][...] = True
    options["valid"][..., 3] = False
    maps = case.key_map, case.value_map
    sources = [case.query, *(tensor for code_map in maps for tensor in (code_map.decode, code_map.offset))]
    for tensor in sources:
        tensor.requires_grad_()

    def attend(query, *bases):
        key_map, value_map = (m._replace(decode=d, offset=o) for m, d, o in zip(maps, bases[::2], bases[1::2], strict=True))
        return code_attention(query, case.keys, case.values, key_map, value_map, 0.3, **options)

    assert torch.autograd.gradcheck(attend, sources, atol=1e-5)


def test_tables_made_in_inference_mode_serve_training_later() -> None:
    case = Case(dim=20, tokens=20)
    rotation = KeyRotation(torch.tensor([0.77, 0.077, 0.0077], dtype=torch.float64), start=5)
    with torch.inference_mode():
        code_attention(*case.arguments, rotation=rotation)
    case.query.requires_grad_()
    code_attention(*case.arguments, rotation=rotation)[0].sum().backward()
    assert case.query.grad is not None


MAP = CodeMap((1, 2, 0, 0), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 8, 3), torch.zeros(2, 8))
BANK = MAP._replace(decode=torch.zeros(2, 2, 2, 8, 3), offset=torch.zeros(2, 2, 2, 8))
BAD: list[tuple[str, dict[str, Any]]] = [
    ("query", {"query": torch.zeros(2, 3, 1, 8)}),
    ("query", {"query": torch.zeros(2, 4, 2, 8)}),
    ("query", {"query": torch.zeros(2, 4, 1, 8, dtype=torch.int64)}),
    ("keys", {"keys": torch.zeros(2, 3, 37, dtype=torch.uint8)}),
    ("keys", {"keys": torch.zeros(2, 2, 37, dtype=torch.int8)}),
    ("keys", {"keys": torch.zeros(2, 2, 74, dtype=torch.uint8)[..., ::2]}),
    ("values", {"values": torch.zeros(2, 2, 36, dtype=torch.uint8)}),
    ("key_map.counts", {"key_map": MAP._replace(counts=(1, 1, 0, 0))}),
    ("key_map.counts", {"key_map": MAP._replace(counts=(1, 2, 0, 7))}),
    ("key_map.counts", {"key_map": MAP._replace(counts=(1, 2, 0))}),  # type: ignore[arg-type]
    ("key_map.index", {"key_map": MAP._replace(index=torch.full((2, 3), 3))}),
    ("key_map.index", {"key_map": MAP._replace(index=torch.zeros(2, 3, dtype=torch.int32))}),
    ("key_map.decode", {"key_map": MAP._replace(decode=torch.zeros(2, 8, 4))}),
    ("value_map.offset", {"value_map": MAP._replace(offset=torch.zeros(2, 9))}),
    ("value_map.index", {"value_map": MAP._replace(index=MAP.index[:1], decode=MAP.decode[:1], offset=MAP.offset[:1])}),
    ("key_basis_of", {"key_map": BANK}),
    ("key_basis_of", {"key_map": BANK, "key_basis_of": torch.zeros(2, 2, 2, dtype=torch.int16)}),
    ("value_basis_of", {"value_basis_of": torch.zeros(2, 2, 3, dtype=torch.int16)}),
    ("valid", {"valid": torch.ones(2, 2, 36, dtype=torch.bool)}),
    ("valid", {"valid": torch.ones(2, 2, 37)}),
    ("rotation.inv_freq", {"rotation": KeyRotation(torch.ones(4))}),
    ("rotation.layout", {"rotation": KeyRotation(torch.ones(4).double(), "whole")}),  # type: ignore[arg-type]
    ("rotation.positions", {"rotation": KeyRotation(torch.ones(4).double(), positions=torch.zeros(2, 36, dtype=torch.int64))}),
    ("backend", {"backend": "cuda"}),
]


@pytest.mark.parametrize(("name", "wrong"), BAD)
def test_arguments_that_do_not_fit_are_named(name: str, wrong: dict[str, Any]) -> None:
    codes = torch.zeros(2, 2, 37, dtype=torch.uint8)
    arguments = {"query": torch.zeros(2, 4, 1, 8), "keys": codes, "values": codes, "key_map": MAP, "value_map": MAP, "scaling": 0.3}
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        code_attention(**arguments | wrong)


def test_packing_and_decoding_name_arguments_that_do_not_fit() -> None:
    packed = torch.zeros(2, 2, 37, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"^levels: expected"):
        pack(torch.zeros(2, 4, 37, dtype=torch.int8), MAP.counts)
    with pytest.raises(ConfigError, match=r"^counts: expected"):
        pack(torch.zeros(2, 4, 37, dtype=torch.int8), (0, 0, 0, 4))
    with pytest.raises(ConfigError, match=r"^packed: expected"):
        unpack(packed[:, :1], MAP.counts)
    with pytest.raises(ConfigError, match=r"^basis_of: expected"):
        decode_codes(packed, BANK)


def test_triton_refuses_what_it_can_not_do() -> None:
    pytest.importorskip("triton")
    case = Case()
    with pytest.raises(ConfigError, match="backend"):
        code_attention(*case.arguments, backend="triton")
    case.query.requires_grad_()
    with pytest.raises(UnsupportedError, match="gradients"):
        code_attention(*case.arguments, backend="triton")


@pytest.mark.full
def test_importing_the_kernels_does_not_import_triton() -> None:
    code = "import sys; import hf_kvcaches.kernels.codes; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tables_of_all_layers_of_a_deep_model_are_made_once() -> None:
    sides = [(number % 16, 2 * (number // 16), 4, 8) for number in range(160)]
    packed = {counts: torch.zeros(1, packed_rows(counts), 4, dtype=torch.uint8) for counts in sides}
    for counts in sides:
        codes_torch.unpacked(packed[counts], counts)
    misses = codes_torch._bit_tables.cache_info().misses
    for counts in sides:
        codes_torch.unpacked(packed[counts], counts)
    assert codes_torch._bit_tables.cache_info().misses == misses
