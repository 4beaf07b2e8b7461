"""Attention over codes in PyTorch: in blocks, in parts, and where Triton is refused."""

import pytest
import torch

from hf_kvcaches.kernels import codes as kernels
from hf_kvcaches.kernels.code_format import TILE
from hf_kvcaches.kernels.codes import TileRotation, code_part, decode
from hf_kvcaches.kernels.parts import merged
from tests.kernels import reference_codes as reference
from tests.kernels.cases import TOLERANCE
from tests.kernels.codes_cases import Case, assert_part

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")

BLOCKS = {"one token": 1, "two tiles": 2 * TILE * 31, "default": kernels._BLOCK}


def assert_equals_the_reference(case: Case) -> None:
    assert_part(code_part(*case.arguments, **case.options), case.expected(), case.dtype, case.dtype)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("tokens", [255, 256, 300])
@pytest.mark.parametrize("pairs", [0, 4])
@pytest.mark.parametrize("mask", ["", "rows"])
def test_several_blocks_of_rows_and_tokens_equal_the_reference(block: int, tokens: int, pairs: int, mask: str, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", block)
    monkeypatch.setattr(kernels, "_LONG", 2 * TILE)
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
