"""Attention over codes: each back-end equals decoding every token."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels import codes as kernels
from hf_kvcaches.kernels.attention import AttentionPart, merged
from hf_kvcaches.kernels.code_format import TILE
from hf_kvcaches.kernels.code_format import WIDTHS as ALL_WIDTHS
from hf_kvcaches.kernels.codes import CodeMap, TileRotation, code_part, decode
from tests.kernels.cases import TOLERANCE, within
from tests.kernels.codes_cases import WIDTHS, Case, assert_part, decoded
from tests.kernels.triton_process import DTYPES, IN_TRITON, moved, of_triton

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")

SHAPES = {
    "batch": st.integers(1, 2 if IN_TRITON else 3),
    "groups": st.integers(1, 2 if IN_TRITON else 3),
    "kv_heads": st.integers(1, 2 if IN_TRITON else 3),
    "group": st.sampled_from([1, 3, 4]),
    "queries": st.sampled_from([1, 1, 2, 5]),
    "tokens": st.sampled_from([1, 15, 16, 17, 48, 80] if IN_TRITON else [1, 15, 16, 17, 48]),
    "dim": st.sampled_from([20, 60, 64, 80]),
    "value_dim": st.sampled_from([1, 20]),
    "widths": st.lists(st.sampled_from((0, *ALL_WIDTHS)), max_size=12),
    "pairs": st.sampled_from([0, 1, 7, 10]),  # all of 20 dimensions, or fewer
    "layout": st.sampled_from(["half", "interleaved"]),
    "common": st.booleans(),
    "mask": st.sampled_from(["", "rows", "queries"]),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 1000),
    "room": st.sampled_from([0, 5]),
}
EXAMPLES = settings(max_examples=30, deadline=None, derandomize=True) if IN_TRITON else settings(deadline=None)


def attend(case: Case, softcap: float | None = None, splits: int | None = None) -> AttentionPart:
    """The function in PyTorch, or Triton's launcher itself, which takes the number of splits as well."""
    if not IN_TRITON:
        return code_part(*case.arguments, **case.options, softcap=softcap)
    from hf_kvcaches.kernels import codes_triton

    return codes_triton.code_part(*moved((*case.arguments, *case.options.values())), softcap, splits=splits)


def assert_equals_the_reference(case: Case, softcap: float | None = None, splits: int | None = None) -> None:
    given = [case.query, case.codes, *case.code_map[1:], *(case.options["rotation"] or ())[:2]]
    before = [tensor.clone() for tensor in given]
    part = attend(case, softcap, splits)
    assert not part.sums.isnan().any()
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(given, before, strict=True)), "inputs were changed"
    assert_part(part, case.expected(softcap), case.dtype, case.dtype if IN_TRITON else torch.promote_types(case.dtype, torch.float32))


@EXAMPLES
@given(shape=st.fixed_dictionaries(SHAPES), softcap=st.sampled_from([None, 2.0]), splits=st.sampled_from([1, 2, 5]))
def test_attention_equals_the_reference(shape: dict[str, Any], softcap: float | None, splits: int) -> None:
    assert_equals_the_reference(Case(**shape), softcap, splits)


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_directions_of_every_width_are_found(widths: tuple[int, ...]) -> None:
    assert_equals_the_reference(Case(widths=widths, pairs=4))


@pytest.mark.parametrize(("dim", "pairs"), [(60, 30), (64, 32), (80, 37)])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_large_keys_rotate_wholly_or_in_part(dim: int, pairs: int, layout: str) -> None:
    assert_equals_the_reference(Case(batch=1, groups=1, dim=dim, pairs=pairs, layout=layout))


@pytest.mark.parametrize("tokens", [64, 128, 208])
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("pairs", [0, 4])
def test_runs_of_several_blocks_equal_the_reference(tokens: int, splits: int, pairs: int) -> None:
    case = Case(groups=1, tokens=tokens, pairs=pairs, mask="queries", queries=2, group=3)
    case.query *= 3  # Scores that differ, so that the maximum rises on the way.
    assert_equals_the_reference(case, splits=splits)


@pytest.mark.parametrize("pairs", [0, 4])
def test_more_queries_and_levels_than_a_program_takes_equal_the_reference(pairs: int) -> None:
    assert_equals_the_reference(Case(groups=1, group=4, queries=11, pairs=pairs, mask="queries"))
    assert_equals_the_reference(Case(batch=1, widths=(1, 2, 4, 3) * 50, pairs=pairs, group=1), splits=2)


@pytest.mark.parametrize("mask", ["rows", "queries"])
def test_angles_of_tiles_that_no_query_sees_need_not_be_numbers(mask: str) -> None:
    case = Case(queries=2, pairs=4, mask=mask)
    case.hide_tiles()
    assert_equals_the_reference(case)


def test_memory_beyond_queries_bases_and_angles_is_not_looked_at() -> None:
    case = Case(dim=20, pairs=7, room=11)
    expected = case.expected()
    case.code_map = CodeMap(case.code_map.counts, *(within(basis) for basis in case.code_map[1:]))
    case.query = within(case.query)
    rotation = case.options["rotation"]
    case.options["rotation"] = rotation._replace(cos=within(rotation.cos), sin=within(rotation.sin))
    assert_part(attend(case), expected, case.dtype, case.dtype)


@of_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_as_it_is_called_equals_the_torch_back_end(dtype: torch.dtype) -> None:
    case = Case(1, 2, 2, 4, 1, 256, 128, 128, (4, 2, 3, 1) * 40, pairs=64, dtype=dtype)
    case.query /= 4
    got = code_part(*moved(case.arguments), **moved(case.options), backend="triton")
    expected = code_part(*case.arguments, **case.options, backend="torch")
    as_reference = (expected.sums / expected.total).transpose(1, 2).double(), (expected.total.log() + expected.highest)[..., 0].double()
    assert_part(got, as_reference, dtype, dtype)


@of_triton
def test_keys_that_are_too_large_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"257 dimensions.*backend='torch'"):
        attend(Case(dim=257))


# The torch back-end alone: in blocks and in parts.

BLOCKS = {"default": kernels._BLOCK} if IN_TRITON else {"one token": 1, "two tiles": 2 * TILE * 31, "default": kernels._BLOCK}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("tokens", [255, 256, 300])
@pytest.mark.parametrize("pairs", [0, 4])
@pytest.mark.parametrize("mask", ["", "rows"])
def test_several_blocks_of_rows_and_tokens_equal_the_reference(block: int, tokens: int, pairs: int, mask: str, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", block)
    monkeypatch.setattr(kernels, "_LEAST", 2 * TILE)
    assert_equals_the_reference(Case(batch=3, groups=1, tokens=tokens, widths=(4, 2, 3, 8, 1, 16), pairs=pairs, mask=mask))


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
    got, expected = decode(case.codes, case.code_map, dtype), decoded(case.codes, case.code_map)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
