"""Attention over codes in PyTorch equals decoding every token."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels import codes as kernels
from hf_kvcaches.kernels.code_format import TILE
from hf_kvcaches.kernels.code_format import WIDTHS as ALL_WIDTHS
from hf_kvcaches.kernels.codes import TileRotation, code_part, decode
from hf_kvcaches.kernels.parts import merged
from tests.kernels import reference_codes as reference
from tests.kernels.cases import TOLERANCE
from tests.kernels.codes_cases import WIDTHS, Case, assert_part

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")

SHAPES = {
    "batch": st.integers(1, 3),
    "groups": st.integers(1, 3),
    "kv_heads": st.integers(1, 3),
    "group": st.sampled_from([1, 3, 4]),
    "queries": st.sampled_from([1, 1, 2, 5]),
    "tokens": st.sampled_from([1, 15, 16, 17, 48]),
    "dim": st.sampled_from([20, 60, 64, 80]),
    "value_dim": st.sampled_from([1, 20]),
    "widths": st.lists(st.sampled_from((0, *ALL_WIDTHS)), max_size=12),
    "pairs": st.sampled_from([0, 1, 7, 10]),
    "layout": st.sampled_from(["half", "interleaved"]),
    "common": st.booleans(),
    "mask": st.sampled_from(["", "rows", "queries"]),
    "dtype": st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    "seed": st.integers(0, 1000),
    "room": st.sampled_from([0, 5]),
}
BLOCKS = {"one token": 1, "two tiles": 2 * TILE * 31, "default": kernels._BLOCK}


def assert_equals_the_reference(case: Case, softcap: float | None = None) -> None:
    got = code_part(*case.arguments, **case.options, softcap=softcap)
    assert_part(got, case.expected(softcap), case.dtype, torch.promote_types(case.dtype, torch.float32))


@given(shape=st.fixed_dictionaries(SHAPES), softcap=st.sampled_from([None, 2.0]))
def test_attention_equals_the_reference(shape: dict[str, Any], softcap: float | None) -> None:
    assert_equals_the_reference(Case(**shape), softcap)


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("pairs", [0, 4])
def test_directions_of_every_width_are_found(widths: tuple[int, ...], pairs: int) -> None:
    assert_equals_the_reference(Case(widths=widths, pairs=pairs))


@pytest.mark.parametrize("dim", [20, 60, 64, 80])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("whole", [True, False])
def test_keys_of_any_size_rotate_wholly_or_in_part(dim: int, layout: str, whole: bool) -> None:
    assert_equals_the_reference(Case(batch=1, dim=dim, pairs=dim // 2 if whole else dim // 2 - 3, layout=layout))


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("tokens", [255, 256, 300])
@pytest.mark.parametrize("pairs", [0, 4])
@pytest.mark.parametrize("mask", ["", "rows"])
def test_several_blocks_of_rows_and_tokens_equal_the_reference(block: int, tokens: int, pairs: int, mask: str, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", block)
    monkeypatch.setattr(kernels, "_LONG", 2 * TILE)
    assert_equals_the_reference(Case(batch=3, groups=1, tokens=tokens, widths=(4, 2, 3, 8, 1, 16), pairs=pairs, mask=mask))


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("mask", ["rows", "queries"])
def test_angles_of_tiles_that_no_query_sees_need_not_be_numbers(block: int, mask: str, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", block)
    case = Case(queries=2, pairs=4, mask=mask)
    case.hide_tiles()
    assert_equals_the_reference(case)


def test_a_query_that_sees_nothing_gets_zeros_and_the_least_number() -> None:
    case = Case(queries=2, mask="queries")
    part = code_part(*case.arguments, **case.options)
    least = torch.finfo(torch.float32).min
    assert (part.highest[0, :, 0] == least).all()
    assert (part.highest == least).sum() == 8
    assert not merged([part])[0, 0].any()


def test_parts_of_the_tokens_merge_to_the_whole() -> None:
    case = Case(tokens=96, dim=20, pairs=10, mask="queries", queries=3)
    rotation, visible = case.options["rotation"], case.options["visible"]
    parts = []
    for begin, end in ((0, 32), (32, 48), (48, 96)):
        tiles = slice(begin // TILE, end // TILE)
        some = TileRotation(rotation.cos[:, tiles], rotation.sin[:, tiles], rotation.layout)
        parts.append(code_part(case.query, case.codes[..., begin:end], *case.arguments[2:], rotation=some, visible=visible[..., begin:end]))
    torch.testing.assert_close(merged(parts).double(), case.expected()[0], atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_decoding_equals_the_reference(dtype: torch.dtype) -> None:
    case = Case(tokens=17, room=3, dtype=torch.float64)
    got, expected = decode(case.codes, case.code_map, dtype), reference.decoded(case.codes, case.code_map)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_nothing_that_is_given_is_changed() -> None:
    case = Case(pairs=4, mask="rows")
    given = [case.query, case.codes, *case.code_map[1:], *case.options["rotation"][:2], case.options["visible"]]
    before = [tensor.clone() for tensor in given]
    code_part(*case.arguments, **case.options)
    assert all(map(torch.equal, given, before))


def test_backends_that_cannot_run_are_refused() -> None:
    pytest.importorskip("triton")
    case = Case()
    with pytest.raises(ConfigError, match="'torch' for tensors that are not on a CUDA device"):
        code_part(*case.arguments, backend="triton")
    case.query.requires_grad_()
    with pytest.raises(UnsupportedError, match="gradients"):
        code_part(*case.arguments, backend="triton")


@pytest.mark.full
def test_importing_the_kernels_does_not_import_triton() -> None:
    code = "import sys; import hf_kvcaches.kernels.codes; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
