"""Signatures against datasketch's and a slow loop; the index against a comparison of all bands."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.stores import signatures
from hf_kvcaches.stores.signatures import MinHasher, SignatureIndex

datasketch = pytest.importorskip("datasketch")

HASHES = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def as_sets(lists: list[list[int]]) -> list[np.ndarray]:
    return [np.array(hashes, dtype=np.uint32) for hashes in lists]


def slow_signature(hashes: list[int], permutations: int, seed: int) -> list[int]:
    """One number after the other, in Python's integers."""
    random = np.random.RandomState(seed)
    factors = [int(a) * 2 + 1 for a in random.randint(0, 2**31, permutations, dtype=np.uint32)]
    offsets = random.randint(0, 2**32, permutations, dtype=np.uint32).tolist()
    mixed = []
    for value in hashes:
        value = (value ^ value >> 16) * 0x85EBCA6B % 2**32
        value = (value ^ value >> 13) * 0xC2B2AE35 % 2**32
        mixed.append(value ^ value >> 16)
    return [min([(a * value + b) % 2**32 for value in mixed], default=2**32 - 1) for a, b in zip(factors, offsets, strict=True)]


@given(
    lists=st.lists(HASHES, max_size=6),
    permutations=st.sampled_from([1, 3, 64]),
    seed=st.integers(0, 5),
    room=st.sampled_from([1, 7, 1 << 12]),
)
def test_signatures_are_those_of_the_slow_loop_however_many_fit_at_once(
    lists: list[list[int]], permutations: int, seed: int, room: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signatures, "_AT_ONCE", room)
        made = MinHasher(permutations, seed).signatures(as_sets(lists))
    assert made.dtype == np.uint32
    assert made.shape == (len(lists), permutations)
    assert made.tolist() == [slow_signature(hashes, permutations, seed) for hashes in lists]


@given(hashes=HASHES, permutations=st.sampled_from([2, 64, 100]), seed=st.integers(0, 5))
def test_signatures_are_datasketchs(hashes: list[int], permutations: int, seed: int) -> None:
    try:
        theirs = datasketch.MinHash(permutations, seed, hashfunc=int, scheme="affine32")
    except TypeError:
        pytest.skip("datasketch before 2.0 makes others")
    theirs.update_batch(hashes)
    [ours] = MinHasher(permutations, seed).signatures(as_sets([hashes]))
    assert datasketch.MinHash(hashvalues=ours, seed=seed, scheme="affine32").jaccard(theirs) == 1.0
    assert (ours == theirs.hashvalues).all()


@given(hashes=HASHES, data=st.data())
def test_neither_order_nor_repetition_matters(hashes: list[int], data: st.DataObject) -> None:
    again = data.draw(st.permutations(hashes + hashes[:5]))
    one, two = MinHasher().signatures(as_sets([hashes, list(again)]))
    assert (one == two).all()


@pytest.mark.parametrize("shared", [0, 100, 250, 400, 500])
def test_places_agree_as_often_as_the_sets_do(shared: int) -> None:
    random = np.random.RandomState(3)
    pool = random.randint(0, 2**32, 1000, dtype=np.uint32)
    a, b = MinHasher(1024).signatures([pool[:500], pool[500 - shared : 1000 - shared]])
    true = shared / (1000 - shared)
    assert abs(float(MinHasher.jaccard(a, b)) - true) <= 4 * np.sqrt(true * (1 - true) / 1024)


def test_one_signature_is_compared_with_many() -> None:
    made = MinHasher(8).signatures(as_sets([[1, 2, 3], [4, 5], [1, 2, 3]]))
    assert MinHasher.jaccard(made[0], made).tolist() == [1.0, float((made[0] == made[1]).mean()), 1.0]
    with pytest.raises(ConfigError, match=r"b: expected signatures of \(8,\)"):
        MinHasher.jaccard(made, made[:, :4])


@pytest.mark.parametrize("wrong", [[1, 2], np.zeros(3, np.uint64), np.zeros((2, 2), np.uint32)])
def test_other_hashes_than_arrays_of_32_bits_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="sets: expected"):
        MinHasher().signatures([wrong])


@pytest.mark.parametrize("changes", [{"permutations": 0}, {"permutations": True}, {"permutations": 2.0}, {"seed": -1}, {"seed": 2**32}])
def test_a_hasher_refuses_what_makes_no_sense(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        MinHasher(**changes)


# --- the index -----------------------------------------------------------------------------------------------------------------------


def bands_of(threshold: float, permutations: int) -> list[slice]:
    return [slice(*band) for band in datasketch.MinHashLSH(threshold, permutations).hashranges]


# Few values at each place, so that bands collide often.
SIGNATURES = st.lists(st.integers(0, 2), min_size=16, max_size=16).map(lambda values: np.array(values, dtype=np.uint32))
KEYS = st.sampled_from(["a", "b", "é", "an id with spaces", ""])


@given(steps=st.lists(st.tuples(st.sampled_from(["add", "remove", "near"]), KEYS, SIGNATURES), max_size=12))
def test_the_index_finds_exactly_what_shares_a_band(steps: list) -> None:
    index = SignatureIndex(5, 3)
    bands = bands_of(0.5, 16)
    held: dict[str, np.ndarray] = {}
    for step, key, signature in steps:
        if step == "add":
            index.add(key, signature)
            held[key] = signature
        elif step == "remove":
            index.remove(key)
            held.pop(key, None)
        found = index.near(signature)
        assert len(found) == len(set(found))
        assert set(found) == {other for other, theirs in held.items() if any((theirs[b] == signature[b]).all() for b in bands)}
        assert len(index) == len(held)


def test_near_duplicates_are_found_among_many_and_strangers_are_not() -> None:
    random = np.random.RandomState(0)
    pools = random.randint(0, 2**32, (200, 120), dtype=np.uint32)
    hasher = MinHasher(64)
    index = SignatureIndex(14, 4)
    for number, made in enumerate(hasher.signatures(list(pools))):
        index.add(str(number), made)
    nearly = hasher.signatures([np.concatenate([pool[:108], random.randint(0, 2**32, 12, dtype=np.uint32)]) for pool in pools[:50]])
    strangers = hasher.signatures(list(random.randint(0, 2**32, (50, 120), dtype=np.uint32)))
    assert sum(str(number) in index.near(made) for number, made in enumerate(nearly)) >= 49
    assert sum(len(index.near(made)) for made in strangers) <= 2


def test_removing_what_is_not_there_does_nothing() -> None:
    index = SignatureIndex(14, 4)
    index.remove("nobody")
    assert len(index) == 0
