"""Attention over slots and writing into them: each back-end equals the plain reference, and looks at no number that it may not."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.slots import slot_attention, write_slots
from tests.kernels import reference
from tests.kernels.cases import NAN, Draws, rotation_tables
from tests.kernels.triton_process import BACKEND, DTYPES, IN_TRITON, moved

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_not_a_number")

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2, torch.float16: 6e-3}
CASES = {
    "batch": st.integers(1, 2 if IN_TRITON else 3),
    "kv_heads": st.integers(1, 2 if IN_TRITON else 3),
    "group": st.sampled_from([1, 2, 3, 4, 8]),
    "slots": st.sampled_from([1, 15, 16, 17, 63, 65] if IN_TRITON else [1, 2, 7, 19]),
    "dim": st.sampled_from([2, 10, 16, 60] if IN_TRITON else [2, 6, 8, 20]),
    "value_dim": st.sampled_from([1, 16, 20]),
    "dtype": st.sampled_from([dtype for dtype in DTYPES if dtype != torch.float16]),
    "seed": st.integers(0, 1000),
    "poison": st.just(NAN if IN_TRITON else 0.0),
}
OPTIONS = {
    "valid": st.just(True) if IN_TRITON else st.booleans(),
    "turn": st.sampled_from(["", "half", "interleaved"]),
    "softcap": st.sampled_from([None, 2.0]),
    "want_weights": st.booleans(),
    "sinks": st.booleans(),
}
EXAMPLES = settings(max_examples=10, deadline=None, derandomize=True) if IN_TRITON else settings(deadline=None)


class Case(Draws):
    """Random tensors of one shape, with `poison` in keys and values of invalid slots: NaN, where the back-end promises not to look."""

    def __init__(self, batch=2, kv_heads=2, group=2, slots=9, dim=8, value_dim=8, dtype=torch.float32, seed=0, poison=0.0) -> None:
        super().__init__(batch, kv_heads, slots, dtype, seed)
        self.query = self.randn(batch, kv_heads * group, 1, dim)
        self.keys, self.values = self.randn(*self.shape, dim) * 2, self.randn(*self.shape, value_dim)
        self.valid = self.some()
        self.keys[~self.valid], self.values[~self.valid] = poison, poison

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.keys, self.values

    def options(
        self, valid: bool, turn: str, softcap: float | None = None, want_weights: bool = True, sinks: bool = False
    ) -> dict[str, Any]:
        """Keyword arguments: `turn` is "", "half" or "interleaved"."""
        slots, dim = self.shape[2], self.keys.shape[3]
        given: dict[str, Any] = {"softcap": softcap, "want_weights": want_weights, "valid": self.valid if valid else None}
        given |= {"sink_logits": self.randn(self.query.shape[1]) * 2 if sinks else None, "rotation": None}
        if turn and dim > 1:
            angles = torch.rand((40, max(1, dim // 3) if dim % 4 else dim // 2), generator=self.generator, dtype=torch.float64) * 6
            precision = torch.promote_types(self.dtype, torch.float32)
            positions = torch.randint(0, 40, (self.shape[0], 1, slots), generator=self.generator)
            positions = torch.where(self.valid, positions, -1) if valid else positions
            given["rotation"] = rotation_tables(positions, angles.to(precision), turn)  # type: ignore[arg-type]
        return given

    def paged(self, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Key and value pages full of NaN but for valid slots, tables, and validity: the first row has no page for its last block."""
        (batch, kv_heads), blocks = self.shape[:2], -(-self.shape[2] // page)
        tables = torch.randperm(batch * blocks + 3, generator=self.generator)[: batch * blocks].view(batch, blocks).to(torch.int32)
        tables[0, -1] = -1
        valid = self.valid.clone()
        valid[0, :, (blocks - 1) * page :] = False
        pages = []
        for flat in (self.keys, self.values):
            pool = torch.full((batch * blocks + 3, kv_heads, page, flat.shape[-1]), NAN, dtype=self.dtype)
            for b, h, s in valid.nonzero().tolist():
                pool[tables[b, s // page], h, s % page] = flat[b, h, s]
            pages.append(pool)
        return pages[0], pages[1], tables, valid

    def new_tokens(self, tokens: int, shared: bool = False) -> list[torch.Tensor]:
        """Slots, new keys and new values, for writing into the buffers."""
        batch, kv_heads, slots = (1, 1, self.shape[2]) if shared else self.shape
        where = torch.stack([torch.randperm(slots, generator=self.generator)[:tokens] for _ in range(batch * kv_heads)])
        new = [self.randn(*self.shape[:2], tokens, buffer.shape[-1]) for buffer in (self.keys, self.values)]
        return [where.view(batch, kv_heads, tokens), *new]


def assert_same(got: Any, expected: Any, dtype: torch.dtype) -> None:
    """Outputs agree to the dtype's tolerance; weights, where there are any, likewise."""
    assert got[0].shape == expected[0].shape
    assert got[0].dtype == dtype
    assert (got[1] is None) == (expected[1] is None)
    assert not got[0].isnan().any()
    for one, other in zip(got, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one.cpu().double(), other.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if got[1] is not None:
        assert got[1].dtype == torch.float32


def attend(case: Case, options: Any, pages: Any = (), splits: int | None = None) -> Any:
    """The function in PyTorch, or Triton's launcher itself, which takes the number of splits and the size of a block as well."""
    query, keys, values, tables = (case.query, *pages) if pages else (*case.tensors, None)
    if not IN_TRITON:
        return slot_attention(query, keys, values, 0.3, tables=tables, **options)
    from hf_kvcaches.kernels import slots_triton

    tuning = {} if splits is None else {"splits": splits, "block": 16}
    return slots_triton.attend(*moved((query, keys, values, tables)), case.shape[2], 0.3, **moved(options), **tuning)


@EXAMPLES
@given(shape=st.fixed_dictionaries(CASES), chosen=st.fixed_dictionaries(OPTIONS), splits=st.sampled_from([1, 2, 5]))
def test_attention_equals_the_reference(shape: dict[str, Any], chosen: dict[str, Any], splits: int) -> None:
    case = Case(**shape)
    options = case.options(**chosen)
    got = attend(case, options, splits=splits)
    assert got[0].shape == (shape["batch"], 1, case.query.shape[1], shape["value_dim"])
    assert_same(got, reference.slot_attention(*case.tensors, 0.3, **options), case.dtype)


@EXAMPLES
@given(
    shape=st.fixed_dictionaries(CASES),
    chosen=st.fixed_dictionaries(OPTIONS | {"valid": st.just(True)}),
    page=st.sampled_from([1, 3, 7, 16]),
    splits=st.sampled_from([1, 3]),
)
def test_paged_attention_equals_the_reference_with_unreadable_invalid_slots(
    shape: dict[str, Any], chosen: dict[str, Any], page: int, splits: int
) -> None:
    case = Case(**shape)
    options = case.options(**chosen)
    *pages, valid = case.paged(page)
    options |= {"valid": valid}
    assert_same(attend(case, options, pages, splits), reference.slot_attention(*case.tensors, 0.3, **options), case.dtype)


@pytest.mark.parametrize("slots", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_as_it_is_called_equals_the_reference(slots: int, group: int, dtype: torch.dtype) -> None:
    case = Case(batch=1, kv_heads=2, group=group, slots=slots, dim=60, value_dim=64, dtype=dtype)
    got = slot_attention(*moved(case.tensors), 60**-0.5, want_weights=True, backend=BACKEND)
    assert_same(got, reference.slot_attention(*case.tensors, 60**-0.5, want_weights=True), dtype)


def test_buffers_and_masks_may_be_repeated_or_lie_in_any_order() -> None:
    case = Case(slots=20)
    options = case.options(True, "half")
    options["valid"] = options["valid"][:1]
    expected = reference.slot_attention(*case.tensors, 0.3, **options)
    case.keys, case.values = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (case.keys, case.values))
    assert_same(attend(case, options), expected, case.dtype)


@EXAMPLES
@given(
    shape=st.fixed_dictionaries(CASES | {"slots": st.sampled_from([20])}),
    tokens=st.sampled_from([1, 3, 17]),
    kind=st.sampled_from(["flat", "shared", "pages", "pages in another order"]),
    skipped=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_writing_equals_the_reference_and_touches_nothing_else(shape: dict[str, Any], tokens: int, kind: str, skipped: float) -> None:
    case = Case(**shape)
    paged = kind.startswith("pages")
    where, *new = case.new_tokens(tokens, kind == "shared")
    if paged:
        where[torch.rand(where.shape, generator=case.generator) < skipped] = -1
    *buffers, tables, _ = case.paged(7) if paged else (*(torch.full_like(each, NAN) for each in (case.keys, case.values)), None, None)
    if "another order" in kind:
        buffers = [pool.transpose(0, 1).contiguous().transpose(0, 1) for pool in buffers]
    expected, given = [tensor.clone() for tensor in buffers], moved(tuple(tensor.clone() for tensor in buffers))
    write_slots(*given, *moved((where, *new)), tables=moved(tables), backend=BACKEND)
    if paged:
        reference.write_pages(*expected, tables, where, *new)
    else:
        reference.write_slots(*expected, where, *new)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, equal_nan=True, atol=0, rtol=0)


# The torch back-end alone.


@pytest.mark.parametrize("valid", [False, True])
def test_the_reference_equals_pytorch(valid: bool) -> None:
    case = Case(group=3, slots=17, dtype=torch.float64)
    case.valid[..., -1] = True
    mask = case.valid.repeat_interleave(3, 1).unsqueeze(2) if valid else None
    keys, values = (tensor.repeat_interleave(3, 1) for tensor in (case.keys, case.values))
    expected = torch.nn.functional.scaled_dot_product_attention(case.query, keys, values, attn_mask=mask, scale=0.3)
    got = reference.slot_attention(*case.tensors, 0.3, **case.options(valid, "", want_weights=False))
    torch.testing.assert_close(got[0], expected.transpose(1, 2))


@pytest.mark.parametrize("page", [4, 8])
@pytest.mark.parametrize("slots", [16, 19])
def test_paged_and_flat_attention_are_equal_to_the_last_bit(page: int, slots: int) -> None:
    case = Case(slots=slots, dim=64, group=4)
    *pages, tables, valid = case.paged(page)
    flat = slot_attention(*case.tensors, 0.125, valid=valid, want_weights=True)
    paged = slot_attention(case.query, *pages, 0.125, tables=tables, valid=valid, want_weights=True)
    assert all(map(torch.equal, flat, paged))


def test_keys_of_invalid_slots_may_hold_anything() -> None:
    case = Case()
    before = slot_attention(*case.tensors, 0.3, valid=case.valid)[0]
    case.keys[~case.valid] = NAN
    assert torch.equal(slot_attention(*case.tensors, 0.3, valid=case.valid)[0], before)


@pytest.mark.parametrize("turn", ["", "half", "interleaved"])
def test_attention_has_gradients_also_of_a_row_without_valid_slots(turn: str) -> None:
    case = Case(batch=1, slots=5, dim=6, dtype=torch.float64)
    options = case.options(True, turn, softcap=3.0, want_weights=False)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return slot_attention(*tensors, 0.3, **options)[0]

    assert torch.autograd.gradcheck(attend, [tensor.requires_grad_() for tensor in case.tensors])


def test_everything_runs_as_one_compiled_graph() -> None:
    case = Case(slots=8, dim=6)
    options = case.options(True, "half", softcap=3.0)
    *pages, tables, valid = case.paged(4)
    where, *new = case.new_tokens(2)
    where_pages = where.clone()
    where_pages[0] = -1

    def step(keys: torch.Tensor, values: torch.Tensor, *pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        write_slots(keys, values, where, *new)
        write_slots(*pages, where_pages, *new, tables=tables)
        flat = slot_attention(case.query, keys, values, 0.3, **options)
        return *flat, slot_attention(case.query, *pages, 0.3, tables=tables, valid=valid)[0]

    eager, compiled = ([tensor.clone() for tensor in (case.keys, case.values, *pages)] for _ in range(2))
    expected = step(*eager)
    got = torch.compile(step, fullgraph=True, backend="eager")(*compiled)
    for one, other in zip((*got, *compiled), (*expected, *eager), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_a_backend_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^backend: expected"):
        slot_attention(*Case().tensors, 0.3, backend="cuda")
