"""The small models can do what the tests of caches rest on, and the documents are what they seem."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import ModelFingerprint
from tests import testbed
from tests.testbed import documents as docs
from tests.testbed import recall

FILLER = docs.Filler(testbed.held_out())


@pytest.fixture(scope="module")
def base():
    return testbed.load("base")


def unseen(tokenizer, seed: str, count: int, low: int, high: int) -> list[docs.Document]:
    rng = random.Random(seed)
    size = lambda text: len(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    lengths = [rng.randint(low, high) for _ in range(count)]
    return [docs.fit_document(rng, FILLER, size, length, facts=min(16, 3 + length // 80)) for length in lengths]


def test_the_base_model_is_of_the_promised_size_and_shape(base):
    model, _ = base
    assert 2e6 <= model.num_parameters() <= 4e6
    config = model.config
    assert (config.model_type, config.head_dim) == ("llama", 64)
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings >= 1024
    for name in ("base", "tuned", "lora"):
        weights = list((testbed.FOLDER / name).glob("*.safetensors"))
        assert weights
        assert sum(path.stat().st_size for path in weights) <= 8 * 2**20


def test_the_base_model_recalls_nine_of_ten_facts_in_long_unseen_documents(base):
    results = recall.answered(*base, unseen(base[1], "recall", 16, 600, 1000))
    assert len(results) > 150
    assert recall.share(results) >= 0.9


@pytest.mark.full
@pytest.mark.parametrize("name", ["tuned", "lora"])
def test_the_other_models_recall_too(name):
    model, tokenizer = testbed.load(name)
    assert recall.share(recall.answered(model, tokenizer, unseen(tokenizer, name, 8, 600, 1000))) >= 0.8


@pytest.mark.full
def test_without_the_notes_it_only_guesses(base):
    results = recall.answered(*base, unseen(base[1], "control", 16, 600, 1000), with_notes=False)
    # A tenth is far above one in a hundred values, and far below what a leak would give.
    assert recall.share(results) < 0.1


def test_the_three_models_are_three_models(base):
    prints = [ModelFingerprint.of(model) for model, _ in (base, testbed.load("tuned"), testbed.load("lora"))]
    assert prints[0].differs_from(prints[1])[0].startswith("weights differ")
    assert [reason for reason in prints[0].differs_from(prints[2]) if "adapters" in reason]


@pytest.mark.full
def test_tuning_on_verse_moves_perplexity_towards_verse(base):
    tuned, tokenizer = testbed.load("tuned")
    verse = testbed.held_out("verse")
    assert recall.perplexity(tuned, tokenizer, verse, limit=8192) < recall.perplexity(*base, verse, limit=8192)


def test_names_and_values_are_single_tokens(base):
    for word in (*docs.NAMES, *docs.VALUES, *docs.ATTRIBUTES, *docs.DIGITS):
        assert len(base[1].encode(f" {word}", add_special_tokens=False)) == 1


@given(seed=st.integers(0, 10**6), tokens=st.integers(130, 1000), facts=st.integers(1, 12))
def test_documents_fit_and_hold_every_fact_once(base, seed, tokens, facts):
    tokenizer = base[1]
    size = lambda text: len(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    document = docs.fit_document(random.Random(seed), FILLER, size, tokens, facts=min(facts, tokens // 45 or 1))
    text = document.text()
    encoded = recall.encode(tokenizer, document)
    assert encoded.ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(encoded.ids) == text
    assert len(encoded.ids) <= tokens or not any(document.paragraphs)
    assert sorted(document.asked) == list(range(len(document.facts)))
    for (start, stop, wording), index in zip(encoded.answers, document.asked, strict=True):
        fact = document.facts[index]
        assert (tokenizer.decode(encoded.ids[start:stop]), wording) == (fact.answer, fact.wording)
        assert "".join(fact.note) in text


def test_a_reworded_document_keeps_its_facts_and_a_changed_one_differs_in_one(base):
    (document,) = unseen(base[1], "reworded", 1, 600, 700)
    again = document.reworded(random.Random(1))
    assert again.preamble != document.preamble
    assert (again.facts, again.paragraphs, again.asked) == (document.facts, document.paragraphs, document.asked)
    changed = document.with_value(2, "zebra")
    assert [a == b for a, b in zip(changed.facts, document.facts, strict=True)].count(False) == 1
    assert " zebra" in changed.context()
