"""The nearest vectors by cosine: what brute force finds, and nothing that was removed comes back."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError, MissingDependencyError
from hf_kvcaches.stores.vectors import VectorIndex

pytest.importorskip("faiss", reason="faiss-cpu is not installed")


def unit(vectors) -> np.ndarray:
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def clustered(count: int, dim: int = 32, seed: int = 0, topics: int = 20) -> np.ndarray:
    """Vectors around topics that are the same for all seeds."""
    centres = np.random.default_rng(99).standard_normal((topics, dim))
    made = np.random.default_rng(seed)
    return unit(centres[made.integers(0, topics, count)] + 0.7 * made.standard_normal((count, dim)))


def names(count: int, start: int = 0) -> list[str]:
    return [f"p{number}" for number in range(start, start + count)]


class BruteForce:
    """A dict of vectors that are all compared."""

    def __init__(self) -> None:
        self.vectors: dict[str, np.ndarray] = {}

    def search(self, query: np.ndarray, k: int) -> list[tuple[str, float]]:
        cosines = {name: float(vector.astype(np.float64) @ query) for name, vector in self.vectors.items()}
        return sorted(cosines.items(), key=lambda item: -item[1])[:k]


def same(found: list[tuple[str, float]], expected: list[tuple[str, float]], all_cosines: dict[str, float]) -> None:
    """Equal cosines in the same order, each that of its id. Which of two equally near ones comes first is open."""
    assert [cosine for _, cosine in found] == pytest.approx([cosine for _, cosine in expected], abs=1e-5)
    assert len({name for name, _ in found}) == len(found)
    for name, cosine in found:
        assert cosine == pytest.approx(all_cosines[name], abs=1e-5)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 30), unique=True, max_size=8), st.integers(0, 999)),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 30), max_size=8), st.just(0)),
        st.tuples(st.just("search"), st.lists(st.integers(0, 999), max_size=3), st.integers(1, 12)),
    ),
    max_size=30,
)


@given(operations)
def test_any_sequence_of_changes_and_searches_gives_what_brute_force_gives(steps):
    index, oracle = VectorIndex(6), BruteForce()
    for what, numbers, extra in steps:
        if what == "add":
            rows = unit(np.random.default_rng(extra).standard_normal((len(numbers), 6))) if numbers else np.zeros((0, 6))
            index.add([str(number) for number in numbers], rows)
            oracle.vectors.update({str(number): row for number, row in zip(numbers, rows, strict=True)})
        elif what == "remove":
            removed = {str(number) for number in numbers} & oracle.vectors.keys()
            assert index.remove([str(number) for number in numbers]) == len(removed)
            for name in removed:
                del oracle.vectors[name]
        else:
            queries = unit([np.random.default_rng(seed).standard_normal(6) for seed in numbers]) if numbers else np.zeros((0, 6))
            answers = index.search(queries, extra)
            assert len(answers) == len(queries)
            for query, found in zip(queries, answers, strict=True):
                same(found, oracle.search(query, extra), dict(oracle.search(query, 10**6)))
        assert len(index) == len(oracle.vectors)
        for name in map(str, range(31)):
            assert (name in index) == (name in oracle.vectors)
            assert index.get(name) == (None if name not in index else pytest.approx(oracle.vectors[name]))


def test_adding_an_id_again_moves_it():
    index = VectorIndex(2)
    index.add(["a", "b"], [[1, 0], [0, 1]])
    index.add(["a"], [[0.6, 0.8]])
    assert len(index) == 2
    assert index.search([1, 0], 5) == [[("a", pytest.approx(0.6)), ("b", pytest.approx(0, abs=1e-6))]]


def test_an_empty_index_finds_nothing():
    index = VectorIndex(2)
    assert index.search([[1, 0], [0, 1]], 3) == [[], []]
    index.add(["a"], [[1, 0]])
    assert index.remove(["a", "a", "never"]) == 1
    assert index.search([1, 0]) == [[]]
    index.add([], np.zeros((0, 2)))
    assert len(index) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda index: VectorIndex(0), "dim: expected a number of elements"),
        (lambda index: VectorIndex(True), "dim"),
        (lambda index: index.add(["a"], np.eye(3)[:2]), "vectors: expected 1 vectors, one for each id, got 2"),
        (lambda index: index.add(["a"], [[1, 0]]), "vectors: expected vectors of 3 elements"),
        (lambda index: index.add(["a"], [[1, 1, 0]]), "vectors: expected vectors of length 1, got 1.41.*Divide"),
        (lambda index: index.add(["a"], [[np.nan, 1, 0]]), "vectors: expected vectors of length 1, got nan"),
        (lambda index: index.add(["a"], [["x", 1, 0]]), "vectors: expected vectors of 3 elements"),
        (lambda index: index.search([0, 0, 0]), "vectors: expected vectors of length 1, got 0"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(call, message):
    index = VectorIndex(3)
    index.add(["first"], [[1, 0, 0]])
    with pytest.raises(ConfigError, match=message):
        call(index)
    assert index.search([1, 0, 0], 5) == [[("first", pytest.approx(1))]]


FACTORIES = ["Flat", "HNSW32", "IVF16,Flat", "PCA16,Flat", "IVF16,PQ8", "SQ8"]


@pytest.mark.parametrize("factory", FACTORIES)
def test_any_kind_of_index_finds_vectors_with_exact_cosines_and_forgets_removed_ones(factory):
    index, vectors = VectorIndex(32, factory), clustered(600)
    index.add(names(600), vectors)
    index.remove(names(300))
    index.add(names(100, 300), -vectors[300:400])
    oracle = BruteForce()
    oracle.vectors = dict(zip(names(300, 300), [*-vectors[300:400], *vectors[400:]], strict=True))
    found = [index.search(query, 5)[0] for query in vectors[:100]]
    expected = [oracle.search(query, 5) for query in vectors[:100]]
    for query, ours in zip(vectors, found, strict=False):
        cosines = dict(oracle.search(query, 10**6))
        assert all(cosine == pytest.approx(cosines[name], abs=1e-5) for name, cosine in ours)
        assert ours == sorted(ours, key=lambda item: -item[1])
    # Graphs may miss some.
    assert sum(ours[0][0] == theirs[0][0] for ours, theirs in zip(found, expected, strict=True)) >= 95


def test_an_index_that_is_trained_is_flat_until_there_are_enough_vectors_and_after_most_are_gone():
    index, vectors = VectorIndex(8, "IVF4,Flat"), clustered(12_000, dim=8)
    index.add(names(500), vectors[:500])
    assert index.search(vectors[7])[0][0] == ("p7", pytest.approx(1))
    index.add(names(11_500, 500), vectors[500:])
    assert sum(index.search(vectors[number])[0][0][1] > 0.999 for number in range(0, 12_000, 100)) >= 118
    index.add(["late"], unit(np.ones(8)))
    assert index.search(unit(np.ones(8)))[0][0][0] == "late"
    index.remove(names(11_990))
    assert len(index.search(vectors[7], 50)[0]) == len(index) == 11


@pytest.mark.parametrize("factory", ["", "Nonsense", "PQ7", "Flat,Flat", "IDMap,Flat", "NSG32", 5, None])
def test_a_string_of_no_index_or_of_one_that_can_not_grow_is_refused_at_once(factory):
    with pytest.raises(ConfigError, match=r"index: expected a string of faiss\.index_factory for 32 elements.*IVF256,Flat"):
        VectorIndex(32, factory)


def test_threads_that_add_remove_and_search_at_the_same_time_lose_nothing():
    index, vectors, failures = VectorIndex(16), clustered(600, 16), []

    def work(start: int) -> None:
        try:
            for number in range(start, start + 150):
                index.add([f"p{number}"], vectors[number])
                assert index.search(vectors[number])[0][0][1] == pytest.approx(1, abs=1e-5)
                if number % 3 == 0:
                    index.remove([f"p{number}"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 600, 150)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert {name for name in names(600) if name in index} == {f"p{number}" for number in range(600) if number % 3}
    assert len(index.search(vectors[0], 1000)[0]) == len(index) == 400


def test_without_faiss_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hf-kvcaches\[retrieval\]'"):
        VectorIndex(3)
