"""Names of texts, ids of segments, and records on their way through JSON."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.reuse.index import Ids, Record, as_ids, chain_of, common_prefix, common_suffix

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=12)
FEW = st.lists(st.integers(0, 1), max_size=6)


def name(*parts: list[int]) -> str:
    chain = None
    for part in parts:
        chain = chain_of(as_ids(part), chain)
    assert chain is not None
    return chain.hexdigest()


def record(**changes: Any) -> Record:
    plain: dict[str, Any] = {
        "scope": "scope",
        "ids": as_ids([1, 2, 2**32 - 1]),
        "left": "aa",
        "right": "bb",
        "start": 5,
        "context": as_ids([7, 8]),
        "origin": "exact",
        "fresh": True,
        "form": {"piles": [[0, 1]], "quantization": None},
    }
    return Record(**{**plain, **changes})


def same(a: Ids | None, b: Ids | None) -> bool:
    return a is b if a is None or b is None else bool(np.array_equal(a, b)) and a.dtype == b.dtype == np.uint32


@given(a=TOKENS, b=TOKENS, c=TOKENS)
def test_equal_tokens_have_equal_names_however_they_are_cut(a: list[int], b: list[int], c: list[int]) -> None:
    assert name(a, b, c) == name(a + b, c) == name(a, b + c) == name(a + b + c) == name([], a, [], b + c)
    assert (name(a) == name(b)) == (a == b)


def test_names_stay_the_same_from_version_to_version_for_the_sake_of_what_is_stored() -> None:
    assert name([1, 2**32 - 1]) == hashlib.blake2b(bytes([1, 0, 0, 0, 255, 255, 255, 255]), digest_size=16).hexdigest()


def test_a_chain_stays_as_it_is_when_it_is_extended() -> None:
    chain = chain_of(as_ids([1]))
    before = chain.hexdigest()
    assert chain_of(as_ids([2]), chain).hexdigest() == name([1, 2])
    assert chain_of(as_ids([3]), chain).hexdigest() == name([1, 3])
    assert chain.hexdigest() == before == name([1])


def test_names_do_not_hang_on_how_ids_lie_in_memory() -> None:
    ids = np.arange(10, dtype=np.int64)
    expected = name(list(range(0, 10, 2)))
    assert chain_of(ids[::2]).hexdigest() == expected  # type: ignore[arg-type]
    assert chain_of(as_ids(ids)[::2]).hexdigest() == expected
    assert chain_of(as_ids(ids)[::2].astype(">u4")).hexdigest() == expected  # type: ignore[arg-type]


@given(a=FEW, b=FEW)
def test_common_starts_and_ends_are_counted(a: list[int], b: list[int]) -> None:
    count = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(as_ids(a), as_ids(b)) == count
    assert common_suffix(as_ids(a[::-1]), as_ids(b[::-1])) == count


def test_ids_come_from_lists_tensors_and_arrays() -> None:
    for values in ([1, 2], (1, 2), torch.tensor([1, 2]), torch.tensor([[9, 1], [9, 2]])[:, 1], np.array([1, 2], np.int16)):
        ids = as_ids(values)
        assert (ids.tolist(), ids.dtype, ids.flags.c_contiguous) == ([1, 2], np.uint32, True)


def test_ids_of_segments_tell_apart_what_must_not_be_mixed_and_nothing_else() -> None:
    base = record()
    others = [record(scope="other"), record(left="cc"), record(right="cc"), record(origin="repaired"), record(left="aab", right="b")]
    assert len({base.key, *(other.key for other in others)}) == 6
    alike = [record(form={}), record(context=as_ids([])), record(fresh=False)]
    assert {other.key for other in alike} == {base.key}


@given(ids=TOKENS.filter(len), context=TOKENS, start=st.integers(0, 2**40))
def test_records_come_back_from_json(ids, context, start: int) -> None:
    arrays = {"ids": as_ids(ids), "context": as_ids(context)}
    first = record(start=start, **arrays)
    back = Record.from_dict(json.loads(json.dumps(first.to_dict())))
    assert back.key == first.key
    assert len(back) == len(ids)
    for field in ("scope", "left", "right", "start", "origin", "fresh", "form"):
        assert getattr(back, field) == getattr(first, field)
    for field in arrays:
        assert same(getattr(back, field), getattr(first, field)), field


WRONG: dict[str, list[Any]] = {
    "scope": [None, 5],
    "left": [None, 5, ["aa"]],
    "right": [None, 5],
    "start": [None, "5", -1, 1.5, True],
    "origin": [None, "computed", 5],
    "fresh": [None, 1, "yes"],
    "form": [None, [], "x"],
    "ids": [None, 5, [1, 2], "", "AAA=", "!!!!"],
    "context": [None, 5, "AAA="],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_what_is_of_the_wrong_kind_or_missing_is_refused(field: str, value: Any) -> None:
    fields = record().to_dict()
    with pytest.raises((LookupError, TypeError, ValueError)):
        Record.from_dict({**fields, field: value})
    del fields[field]
    with pytest.raises(LookupError):
        Record.from_dict(fields)
