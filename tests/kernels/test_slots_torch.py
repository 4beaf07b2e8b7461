"""Attention over slots in PyTorch: gradients, compilation, tables and pages; and the reference equals PyTorch's own attention."""

from typing import Any

import pytest
import torch

from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.arguments import RotationTables
from hf_kvcaches.kernels.slots import slot_attention, write_slots
from tests.kernels import reference_slots as reference
from tests.kernels.cases import NAN
from tests.kernels.slots_cases import Case, assert_same, write_arguments


@pytest.mark.parametrize("page", [4, 8])
@pytest.mark.parametrize("slots", [16, 19])
def test_paged_and_flat_attention_are_equal_to_the_last_bit(page: int, slots: int) -> None:
    case = Case(slots=slots, dim=64, group=4)
    *pages, tables, valid = case.paged(page)
    options = {"valid": valid, "want_weights": True}
    flat = slot_attention(case.query, case.keys, case.values, 0.125, **options)
    paged = slot_attention(case.query, *pages, 0.125, tables=tables, **options)
    assert torch.equal(flat[0], paged[0])
    assert torch.equal(flat[1], paged[1])


@pytest.mark.parametrize("valid", [False, True])
def test_the_reference_equals_pytorch(valid: bool) -> None:
    case = Case(group=3, slots=17, dtype=torch.float64)
    case.valid[..., -1] = True
    options = case.options(valid, "", want_weights=False)
    mask = case.valid.repeat_interleave(3, 1).unsqueeze(2) if valid else None
    keys, values = (tensor.repeat_interleave(3, 1) for tensor in (case.keys, case.values))
    expected = torch.nn.functional.scaled_dot_product_attention(case.query, keys, values, attn_mask=mask, scale=0.3)
    got = reference.slot_attention(case.query, case.keys, case.values, 0.3, **options)
    torch.testing.assert_close(got[0], expected.transpose(1, 2))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [12, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_for_each_dimension_give_the_attention_of_those_for_each_pair(layout: Any, rotary_dim: int, dtype: torch.dtype) -> None:
    case = Case(slots=19, dim=20, dtype=dtype)
    angles = torch.rand((40, rotary_dim // 2), generator=case.generator) * 6
    positions = torch.where(case.valid, torch.randint(0, 40, case.shape, generator=case.generator), -1)
    rotation = RotationTables(positions, angles.cos(), angles.sin(), layout)
    # Tables of both dimensions of each pair: all first ones before all second ones, or in turns.
    axis = 1 if layout == "half" else 2
    cos, sin = (torch.stack(tables, axis).flatten(1) for tables in ([rotation.cos, rotation.cos], [-rotation.sin, rotation.sin]))
    arguments, options = (case.query, case.keys, case.values, 0.3), {"valid": case.valid, "want_weights": True}
    got = slot_attention(*arguments, **options, rotation=rotation._replace(full=torch.cat([cos, sin], 1)), backend="torch")
    assert_same(got, slot_attention(*arguments, **options, rotation=rotation, backend="torch"), dtype)


def test_keys_of_invalid_slots_may_hold_anything() -> None:
    case = Case()
    before = slot_attention(case.query, case.keys, case.values, 0.3, valid=case.valid)[0]
    case.keys[~case.valid] = NAN
    assert torch.equal(slot_attention(case.query, case.keys, case.values, 0.3, valid=case.valid)[0], before)


@pytest.mark.parametrize("turn", ["", "half", "interleaved"])
def test_attention_has_gradients_also_of_a_row_without_valid_slots(turn: str) -> None:
    case = Case(batch=1, slots=5, dim=6, dtype=torch.float64)
    options = case.options(True, turn, softcap=3.0, want_weights=False)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return slot_attention(*tensors, 0.3, **options)[0]

    assert torch.autograd.gradcheck(attend, [tensor.requires_grad_() for tensor in (case.query, case.keys, case.values)])


def test_everything_runs_as_one_compiled_graph() -> None:
    case = Case(slots=8, dim=6)
    options = case.options(True, "half", softcap=3.0)
    *pages, tables, valid = case.paged(4)
    where, *new = write_arguments(case, 2)
    where_pages = where.clone()
    where_pages[0] = -1

    def step(keys: torch.Tensor, values: torch.Tensor, *pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        write_slots(keys, values, where, *new)
        write_slots(*pages, where_pages, *new, tables=tables)
        flat = slot_attention(case.query, keys, values, 0.3, **options)
        return *flat, slot_attention(case.query, *pages, 0.3, tables=tables, valid=valid)[0]

    def buffers() -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (case.keys, case.values, *pages)]

    eager, compiled = buffers(), buffers()
    expected = step(*eager)
    got = torch.compile(step, fullgraph=True, backend="eager")(*compiled)
    for one, other in zip((*got, *compiled), (*expected, *eager), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("layout", ["transposed", "reserve"])
def test_buffers_may_lie_in_memory_in_any_order(layout: str) -> None:
    case = Case()
    given = []
    for tensor in (case.keys, case.values):
        if layout == "transposed":
            given.append(tensor.transpose(1, 2).contiguous().transpose(1, 2))
        else:
            larger = torch.full((*tensor.shape[:2], tensor.shape[2] + 5, tensor.shape[3]), NAN)
            larger[:, :, : tensor.shape[2]] = tensor
            given.append(larger[:, :, : tensor.shape[2]])
    expected = slot_attention(case.query, case.keys, case.values, 0.3)
    assert_same(slot_attention(case.query, *given, 0.3), expected, case.dtype)


def test_backends_that_cannot_run_are_refused() -> None:
    pytest.importorskip("triton")
    case = Case()
    with pytest.raises(ConfigError, match=r"^backend: expected"):
        slot_attention(case.query, case.keys, case.values, 0.3, backend="cuda")
    with pytest.raises(ConfigError, match="'torch' for tensors that are not on a CUDA device"):
        slot_attention(case.query, case.keys, case.values, 0.3, backend="triton")
    with pytest.raises(UnsupportedError, match="no gradients and no float64"):
        slot_attention(case.query.requires_grad_(), case.keys, case.values, 0.3, backend="triton")
