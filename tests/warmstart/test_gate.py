"""What must never pass for the same is told apart, slight changes are let through, and every refusal says why."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.warmstart.changes import TextChanges, changes, content_words
from hf_kvcaches.warmstart.gate import WarmStartGate
from hf_kvcaches.warmstart.words import SMALL
from tests import testbed
from tests.testbed import pairs
from tests.warmstart.differing import CONTENT, RISKY, SLIGHT

WORDS = "the old house stood beside a quiet river while people walked along and looked at boats".split()
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=60)


@pytest.mark.parametrize(("source", "target", "risk"), RISKY)
@pytest.mark.parametrize("stop", [False, True])
def test_what_changes_the_answer_is_found_in_either_direction_and_in_context(source, target, risk, stop):
    around = " ".join(WORDS)
    for a, b in ((source, target), (target, source), (f"{around}. {source} {around}", f"{around}. {target} {around}")):
        found = [each for each, _ in changes(a, b, stop=stop).risks]
        assert found if stop else risk in found
        verdict = WarmStartGate().decide(changes=changes(a, b, stop=stop))
        assert (verdict.admitted, verdict.check) == (False, found[0])
        assert verdict.reason.startswith(f"What differs touches {found[0]}: ")


@pytest.mark.parametrize(("source", "target"), SLIGHT)
def test_slight_changes_are_let_through(source, target):
    for a, b in ((source, target), (target, source)):
        found = changes(a, b)
        assert not found.risks + found.content, found
        assert WarmStartGate().decide(changes=found).admitted


@pytest.mark.parametrize(("source", "target", "words"), CONTENT)
def test_words_of_content_are_told_apart_from_small_ones(source, target, words):
    found = changes(source, target)
    assert found.content
    assert found.risks == ()
    assert words is None or sorted(found.content) == sorted(words)
    assert WarmStartGate().decide(changes=found).check == "content"
    assert WarmStartGate(content=None).decide(changes=found).admitted
    assert WarmStartGate(content=len(found.content)).decide(changes=found).admitted
    assert not WarmStartGate(content=len(found.content) - 1).decide(changes=found).admitted


def test_the_words_are_those_of_neither_list():
    assert content_words(["The", "dog", ",", "isn't", "it's", "we", "Ruth's", "of", "-", "🙂", "ё"]) == [
        "dog",
        "isn't",
        "it's",
        "Ruth's",
        "🙂",
        "ё",
    ]


@given(text=st.text(max_size=200))
def test_identical_texts_never_differ(text):
    assert changes(text, text) == TextChanges()


@given(a=st.text(max_size=60), b=st.text(max_size=60))
def test_texts_in_which_nothing_differs_have_the_same_words_but_for_small_ones_and_capitals(a, b):
    found = changes(a, b)
    if found == TextChanges():
        words = [[word.casefold() for word in re.findall(r"\w+", text) if word.lower() not in SMALL] for text in (a, b)]
        assert words[0] == words[1]
    assert bool(changes(a, b, stop=True).risks) == bool(found.risks)


@given(
    words=texts,
    data=st.data(),
    extra=st.sampled_from("7 42 -1 3.5 seven 12th ١٢ not never no without don't isn't neither Ruth % = `x` unless https://a.b".split()),
)
def test_a_number_negation_name_or_sign_put_in_anywhere_is_found(words, data, extra):
    place = data.draw(st.integers(0, len(words)))
    other = [*words[:place], extra, *words[place:]]
    # At the very start a capital may be that of the sentence.
    if not (extra == "Ruth" and place == 0):
        assert changes(" ".join(words), " ".join(other)).risks
        assert changes(" ".join(other), " ".join(words)).risks
    assert not WarmStartGate().decide(changes=changes(" ".join(words), " ".join(other))).admitted


@given(words=texts, data=st.data(), kind=st.sampled_from(["content", "digit", "swap"]))
def test_one_word_for_another_is_never_slight(words, data, kind):
    place = data.draw(st.integers(0, len(words) - 1))
    before, after = {"content": ("tree", "hill"), "digit": ("48", "49"), "swap": ("he", "she")}[kind]
    a, b = ([*words[:place], word, *words[place:]] for word in (before, after))
    assert not WarmStartGate().decide(changes=changes(" ".join(a), " ".join(b))).admitted


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_the_testbeds_pairs_are_refused_where_the_answer_changes_and_let_through_where_nothing_does(kind):
    tokenizer = AutoTokenizer.from_pretrained(testbed.FOLDER / "base")
    for length in (128, 500):
        made = pairs.make_pairs(tokenizer, kind, 8, seed=3, length=length)
        verdicts = [WarmStartGate().decide(changes=changes(pair.source_text, pair.target_text, stop=True)) for pair in made]
        admitted = [verdict.admitted for verdict in verdicts]
        if kind == "identical":
            assert all(admitted)
        elif kind == "no_content":
            # A comma inside a quotation is not let through.
            assert sum(admitted) >= 6
        else:
            assert not any(admitted), verdicts
        other = pairs.make_pairs(tokenizer, kind, 4, seed=3, length=length, asks="other")
        assert not any(WarmStartGate().decide(changes=changes(pair.source_text, pair.target_text)).admitted for pair in other)


def test_checks_come_in_order_and_each_says_what_it_missed():
    gate = WarmStartGate()
    changed = changes("Send 4 letters.", "Send 5 letters.")
    verdict = gate.decide(similarity=0.8, lengths=(900, 100), reusable=0.1, changes=changed)
    assert verdict == (False, "similarity", "The similarity is 0.800, below 0.9.")
    verdict = gate.decide(similarity=0.95, lengths=(900, 100), reusable=0.1, changes=changed)
    assert verdict == (False, "lengths", "The earlier prompt is 9.00 times as long, outside 0.5 to 2.")
    verdict = gate.decide(similarity=0.95, lengths=(110, 100), reusable=0.1, changes=changed)
    assert verdict == (False, "reusable", "10% of the tokens stand in the earlier prompt, below 50%.")
    verdict = gate.decide(similarity=0.95, lengths=(110, 100), reusable=0.6, changes=changed)
    assert verdict == (False, "numbers", "What differs touches numbers: '4' became '5'.")
    verdict = gate.decide(similarity=0.95, lengths=(110, 100), reusable=0.6, changes=changes("a tree", "a hill"))
    assert verdict == (False, "content", "Words of content differ: tree, hill.")
    verdict = gate.decide(similarity=0.9, lengths=(200, 100), reusable=0.5, changes=TextChanges())
    assert verdict == (True, "", "Nothing speaks against it.")
    assert gate.decide().admitted
    assert WarmStartGate(lexical=False, content=None).decide(changes=changed).admitted


@pytest.mark.parametrize("known", [{"similarity": float("nan")}, {"reusable": float("nan")}, {"lengths": (5, 0)}, {"lengths": (0, 5)}])
def test_what_is_no_number_or_no_length_is_refused(known):
    assert not WarmStartGate().decide(**known).admitted


@pytest.mark.parametrize(
    "wrong", [{"tau": 2.0}, {"tau": float("nan")}, {"reusable": -2.0}, {"lengths": (2.0, 0.5)}, {"lengths": (-1.0, 2.0)}, {"content": -1}]
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        WarmStartGate(**wrong)


def test_the_last_place_is_read_first_where_one_risk_is_enough():
    between = " ".join(WORDS)
    source, target = f"It is so. {between} Who asked?", f"It is not so. {between} Why asked?"
    assert [risk for risk, _ in changes(source, target, stop=True).risks] == ["logic"]
    assert [risk for risk, _ in changes(source, target).risks] == ["negations", "logic"]


def test_long_examples_are_cut_in_reports():
    ((_, example), *_) = changes("it was so", f"it was not {' '.join(WORDS * 5)} so").risks
    assert len(example) < 140
    assert example.endswith("...'")
