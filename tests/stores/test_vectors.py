"""The nearest vectors by cosine: what brute force finds, and nothing that was removed comes back."""

import sys
from concurrent.futures import ThreadPoolExecutor

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
    index, oracle, vectors = VectorIndex(8), BruteForce(), clustered(1000, dim=8)
    for kind, numbers, extra in steps:
        if kind == "add":
            chosen = vectors[[(number + extra) % 1000 for number in numbers]]
            index.add(list(map(str, numbers)), chosen)
            oracle.vectors |= zip(map(str, numbers), chosen, strict=True)
        elif kind == "remove":
            index.remove(list(map(str, numbers)))
            for number in numbers:
                oracle.vectors.pop(str(number), None)
        else:
            for query in vectors[numbers]:
                same(index.search(query, extra), oracle.search(query, extra), dict(oracle.search(query, 10**6)))
        assert len(index) == len(oracle.vectors)


def test_an_empty_index_finds_nothing():
    index = VectorIndex(2)
    assert index.search([1, 0], 3) == []
    index.add(["a"], [[1, 0]])
    assert index.remove(["a", "a", "never"]) == 1
    assert index.search([1, 0]) == []
    index.add([], np.zeros((0, 2)))
    assert len(index) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda index: VectorIndex(0), "dim: expected a number of elements"),
        (lambda index: VectorIndex(True), "dim"),
        (lambda index: index.add(["a"], np.eye(3)[:2]), "vectors: expected 1 vectors, one for each name, got 2"),
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
    assert index.search([1, 0, 0], 5) == [("first", pytest.approx(1))]


def test_threads_that_add_remove_and_search_at_the_same_time_lose_nothing():
    index, vectors = VectorIndex(16), clustered(600, 16)

    def work(start: int) -> None:
        for number in range(start, start + 150):
            index.add([f"p{number}"], vectors[number])
            assert index.search(vectors[number])[0][1] == pytest.approx(1, abs=1e-5)
            if number % 3 == 0:
                index.remove([f"p{number}"])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(0, 600, 150)))
    assert {name for name, _ in index.search(vectors[0], 1000)} == {f"p{number}" for number in range(600) if number % 3}


def test_without_faiss_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hf-kvcaches\[retrieval\]'"):
        VectorIndex(3)
