"""Signatures of sets: similar sets have similar ones, and the index finds what is similar."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError, MissingDependencyError
from hf_kvcaches.stores.signatures import MinHasher, as_minhash, jaccard, signature_index

pytest.importorskip("datasketch")

HASHES = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def as_sets(lists: list[list[int]]) -> list[np.ndarray]:
    return [np.array(hashes, dtype=np.uint32) for hashes in lists]


@given(hashes=HASHES, data=st.data())
def test_neither_order_nor_repetition_nor_what_else_is_signed_matters(hashes: list[int], data: st.DataObject) -> None:
    again = data.draw(st.permutations(hashes + hashes[:5]))
    one, _, two = MinHasher().signatures(as_sets([hashes, [1, 2], list(again)]))
    assert one.dtype == np.uint32
    assert (one == two).all()


def test_signatures_are_the_same_in_every_version() -> None:
    # They are stored, and compared with those of other processes.
    assert MinHasher(4).signatures(as_sets([[1, 2, 3], []])).tolist() == [
        [63217260, 131247162, 308645290, 1412089388],
        [4294967295, 4294967295, 4294967295, 4294967295],
    ]


@pytest.mark.parametrize("shared", [0, 100, 250, 400, 500])
def test_signatures_agree_as_often_as_the_sets_do(shared: int) -> None:
    random = np.random.RandomState(3)
    pool = random.randint(0, 2**32, 1000, dtype=np.uint32)
    a, b = MinHasher(1024).signatures([pool[:500], pool[500 - shared : 1000 - shared]])
    true = shared / (1000 - shared)
    assert abs(jaccard(a, b) - true) <= 4 * np.sqrt(true * (1 - true) / 1024)


def test_no_sets_have_no_signatures() -> None:
    assert MinHasher(8).signatures([]).shape == (0, 8)


@pytest.mark.parametrize("given", [0, True, 2.0])
def test_a_hasher_refuses_what_makes_no_sense(given: object) -> None:
    with pytest.raises(ConfigError, match="permutations"):
        MinHasher(given)


def test_near_duplicates_are_found_among_many_until_they_are_removed_and_strangers_are_not() -> None:
    random = np.random.RandomState(0)
    pools = random.randint(0, 2**32, (200, 120), dtype=np.uint32)
    hasher = MinHasher(64)
    index = signature_index(64, 14, 4)
    for number, made in enumerate(hasher.signatures(list(pools))):
        index.insert(str(number), as_minhash(made))
    nearly = hasher.signatures([np.concatenate([pool[:108], random.randint(0, 2**32, 12, dtype=np.uint32)]) for pool in pools[:50]])
    strangers = hasher.signatures(list(random.randint(0, 2**32, (50, 120), dtype=np.uint32)))
    assert sum(str(number) in index.query(as_minhash(made)) for number, made in enumerate(nearly)) >= 49
    assert sum(len(index.query(as_minhash(made))) for made in strangers) <= 2
    for number in range(50):
        index.remove(str(number))
    assert sum(len(index.query(as_minhash(made))) for made in nearly) <= 2


def test_without_datasketch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(MissingDependencyError, match=r"hf-kvcaches\[retrieval\]"):
        MinHasher()
