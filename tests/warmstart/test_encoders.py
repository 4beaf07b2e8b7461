"""Encoders: unit vectors, the same everywhere, near for prompts of the same tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.warmstart.encoders import Encoder
from tests import testbed
from tests.testbed.documents import Document, Filler, make_document


@pytest.fixture(scope="module")
def bed():
    return testbed.load("base")


def pairs(count: int, filler_words: int = 0) -> tuple[list[str], list[str]]:
    """Prompts, and the same ones in other words, in another order, under another preamble."""
    rng, filler = random.Random(0), Filler(testbed.held_out())
    documents = [make_document(rng, filler, facts=6, filler_words=filler_words) for _ in range(count)]

    def reworded(document: Document) -> Document:
        other = {"repeated": "chosen", "chosen": "inverted", "inverted": "reworded", "reworded": "repeated", "digits": "digits"}
        facts = tuple(replace(fact, wording=other[fact.wording]) for fact in document.facts)
        return replace(document.reworded(rng), facts=facts)

    return [document.context() for document in documents], [reworded(document).context() for document in documents]


def separation(mine: np.ndarray, theirs: np.ndarray) -> float:
    """How often the two of a pair are nearer to each other than two of different pairs: 0.5 for chance."""
    cosines = mine @ theirs.T
    others = cosines[~np.eye(len(cosines), dtype=bool)]
    return float((np.diag(cosines)[:, None] > others[None]).mean())


def vectors_of(encoder, texts, rows) -> np.ndarray:
    return np.stack([encoder.encode(text, row) for text, row in zip(texts, rows, strict=True)])


def encoded(encoder, tokenizer, texts) -> np.ndarray:
    return vectors_of(encoder, texts, [tokenizer(text)["input_ids"] for text in texts])


def is_unit(vectors: np.ndarray, count: int, dim: int) -> bool:
    return (
        vectors.shape == (count, dim) and vectors.dtype == np.float32 and bool(np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5))
    )


# Token ids


def test_token_ids_tell_other_wordings_from_other_prompts(bed):
    encoder = Encoder("tokens")
    mine, theirs = (encoded(encoder, bed[1], texts) for texts in pairs(30))
    assert is_unit(mine, 30, encoder.dim)
    assert separation(mine, theirs) > 0.96
    mine, theirs = (encoded(encoder, bed[1], texts) for texts in pairs(10, 100))
    assert separation(mine, theirs) == 1


def test_prompts_of_the_same_tokens_have_the_same_vector_and_those_without_a_common_token_are_apart():
    generator = np.random.default_rng(0)
    rows = [generator.choice(150_000, 400) for _ in range(20)]
    vectors = vectors_of(Encoder(), [""] * 20, [row.tolist() for row in rows])
    np.testing.assert_array_equal(vectors_of(Encoder("model"), [""] * 20, [row[::-1].tolist() for row in rows]), vectors)
    cosines = (vectors @ vectors.T)[np.triu_indices(20, 1)]
    assert abs(cosines.mean()) < 0.05
    assert np.abs(cosines).max() < 0.35
    # The more tokens differ, the less alike they are.
    changed = [rows[0].copy() for _ in range(5)]
    for number, row in enumerate(changed):
        row[: 80 * number] = generator.choice(150_000, 80 * number)
    found = vectors_of(Encoder(), [""] * 5, [row.tolist() for row in changed]) @ vectors[0]
    assert list(found) == sorted(found, reverse=True)


def test_a_vector_of_token_ids_is_that_of_a_slow_loop_in_every_process():
    row = [3, 70_000, 3, 151_000]
    expected = np.zeros(256)
    for token in set(row):
        mixed = token * 2654435761 % 2**32
        weight = row.count(token) ** 0.5 * (token + 1) / (token + 80)
        expected[(mixed >> 16) % 256] += weight if mixed >> 8 & 1 else -weight
    np.testing.assert_allclose(Encoder().encode("", row), expected / np.linalg.norm(expected), rtol=1e-6)


# Functions


def lengths_and_vowels(texts):
    return [[len(text), sum(text.count(vowel) for vowel in "aeiou"), 1] for text in texts]


def test_what_a_function_makes_is_brought_to_length_1():
    for function in (lengths_and_vowels, lambda texts: torch.tensor(lengths_and_vowels(texts), dtype=torch.bfloat16)):
        encoder = Encoder(function)
        assert encoder.dim == 3
        np.testing.assert_allclose(vectors_of(encoder, ["abcd"], [[1]]), [[4 / 18**0.5, 1 / 18**0.5, 1 / 18**0.5]], rtol=1e-2)
    for scale in (1e-30, 1e30):
        made = vectors_of(Encoder(lambda texts, scale=scale: np.full((len(texts), 4), scale)), ["a", "b"], [[1], [1]])
        np.testing.assert_allclose(made, 0.5, rtol=1e-5)


def test_a_function_is_named_by_where_it_is_or_by_its_own_word():
    assert Encoder(lengths_and_vowels).name == f"function {__name__}.lengths_and_vowels, 3"

    class Named:
        name = "mine, version 2"

        def __call__(self, texts):
            return lengths_and_vowels(texts)

    assert Encoder(Named()).name == "function mine, version 2, 3"


class Sentences(torch.nn.Module):
    """A model as those of sentence-transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(3.0))

    def encode(self, texts: list[str]) -> np.ndarray:
        return np.outer([len(text) for text in texts], self.weight.detach())


def test_a_model_of_sentence_transformers_is_identified_by_its_weights() -> None:
    model = Sentences()
    encoder, same, changed = Encoder(model), Encoder(Sentences()), Sentences()
    np.testing.assert_allclose(encoder.encode("ab", [1]), np.arange(3) / 5**0.5, rtol=1e-6)
    with torch.no_grad():
        changed.weight[1] += 1
    assert encoder.name == same.name != Encoder(changed).name


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.zeros((1, 3)), "finite vectors that are not all zeros"),
        (np.array([[1, np.nan, 3]]), "finite vectors"),
        (np.array([[1, 2, np.inf]]), "finite vectors"),
        (np.ones((2, 3)), r"a function that makes \(1, dim\) numbers of a list of one text, got \(2, 3\)"),
        (np.ones((1, 4)), r"a vector of 3 elements for each text, got \(4,\)"),
        (np.ones(3), r"a function that makes \(1, dim\) numbers"),
        ([[1, 2, "x"]], "a function that makes an array of numbers"),
    ],
)
def test_what_a_function_must_not_make_is_refused(vectors, message):
    encoder = Encoder(lambda texts: np.ones((1, 3)) if "string" in texts[0] else vectors)
    with pytest.raises(ConfigError, match=f"encoder: expected {message}"):
        encoder.encode("a", [1])


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (7, "encoder: expected 'tokens'"),
        ("", "encoder: expected 'tokens'"),
        ("all-MiniLM-L6-v2", r"Pass SentenceTransformer\(name\)"),
        (lambda texts: np.ones(3), r"encoder: expected a function that makes \(1, dim\) numbers"),
        (lambda texts: "x", "encoder: expected a function that makes an array of numbers"),
    ],
)
def test_what_is_no_encoder_is_refused(encoder, message):
    with pytest.raises(ConfigError, match=message):
        Encoder(encoder)
