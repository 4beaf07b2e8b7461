"""Each kind of pair differs in what it says and in nothing else, and the testbed's model answers the targets by themselves."""

from __future__ import annotations

import difflib
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import testbed
from tests.testbed import agents, pairs
from tests.testbed.documents import PREAMBLES, VALUES
from tests.testbed.pairs import KINDS, Pair

pytestmark = pytest.mark.full

every_kind = pytest.mark.parametrize("kind", KINDS)
SHORT, LONG = 128, 500


@pytest.fixture(scope="module")
def base():
    return testbed.load("base")


@pytest.fixture(scope="module")
def tokenizer(base):
    return base[1]


@pytest.fixture(scope="module")
def made(tokenizer):
    return {
        (kind, length, asks): pairs.make_pairs(tokenizer, kind, 6, seed=1, length=length, asks=asks)
        for kind in KINDS
        for length in (SHORT, LONG)
        for asks in ("same", "other")
    }


def of_kind(made, kind: str, *, length: int | None = None, asks: str | None = None) -> list[Pair]:
    return [p for (k, n, a), each in made.items() for p in each if k == kind and length in (None, n) and asks in (None, a)]


def told(text: str) -> str:
    """The prompt up to its questions."""
    return text.split("Questions:\n")[0]


def lines(text: str) -> list[str]:
    return told(text).splitlines()


def changed_words(pair: Pair) -> list[tuple[list[str], list[str]]]:
    """What differs before the questions, by words and spaces."""
    before, after = (re.findall(r"\w+|\s|[^\w\s]", told(text)) for text in (pair.source_text, pair.target_text))
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [(before[a:b], after[c:d]) for tag, a, b, c, d in codes if tag != "equal"]


def answer(pair: Pair, tokenizer, index: int = 0) -> str:
    start, stop = pair.target.answers[index]
    return tokenizer.decode(pair.target.continuation[start:stop])


@every_kind
def test_the_same_seed_makes_the_same_pairs_and_another_seed_makes_others(tokenizer, made, kind):
    assert pairs.make_pairs(tokenizer, kind, 6, seed=1, length=SHORT) == made[kind, SHORT, "same"]
    others = pairs.make_pairs(tokenizer, kind, 6, seed=2, length=SHORT)
    assert not {p.target_text for p in others} & {p.target_text for p in made[kind, SHORT, "same"]}
    assert len({p.target_text for p in others}) == 6
    assert pairs.make_pairs(tokenizer, kind, 3, seed=1, length=SHORT) == made[kind, SHORT, "same"][:3]


@given(kind=st.sampled_from(KINDS), length=st.integers(128, 900), seed=st.integers(0, 10**6))
def test_prompts_have_the_length(tokenizer, kind, length, seed):
    for pair in pairs.make_pairs(tokenizer, kind, 2, seed=seed, length=length):
        assert 0.7 * length <= len(pair.source.prompt) <= length + 4
        assert 0.7 * length <= len(pair.target.prompt) <= length + 24
        assert max(len(each.prompt + each.continuation) for each in (pair.source, pair.target)) <= 1000


@every_kind
def test_ids_are_those_of_the_text_and_the_parts_cover_them(tokenizer, made, kind):
    for pair in of_kind(made, kind):
        for request, text in ((pair.source, pair.source_text), (pair.target, pair.target_text)):
            whole = text + tokenizer.decode(request.continuation)
            assert tokenizer.encode(whole, add_special_tokens=False) == request.prompt + request.continuation
            assert len(tokenizer.encode(text, add_special_tokens=False)) == len(request.prompt)
            assert [0, *(part.stop for part in request.parts)] == [*(part.start for part in request.parts), len(request.prompt)]


@every_kind
def test_answers_stand_behind_their_questions_and_follow_from_the_notes(tokenizer, made, kind):
    for pair in of_kind(made, kind):
        for request, text in ((pair.source, pair.source_text), (pair.target, pair.target_text)):
            place = 0
            for (start, stop), fact in zip(request.answers, request.asked, strict=True):
                text += tokenizer.decode(request.continuation[place:start])
                assert text.endswith(f"\n{fact.question}")
                assert tokenizer.decode(request.continuation[start:stop]) == fact.answer
                assert told(text).count("\n" + "".join(fact.note) + "\n") == 1
                text, place = text + fact.answer, stop
            assert len(set(request.asked)) == len(request.asked) == (2 if len(request.prompt) < 160 else 4)


@every_kind
def test_no_answer_stands_anywhere_but_in_its_note(tokenizer, made, kind):
    for pair in of_kind(made, kind):
        for request, text in ((pair.source, pair.source_text), (pair.target, pair.target_text)):
            for fact in request.asked:
                pattern = rf"\b{fact.value}\b"
                assert len(re.findall(pattern, text.replace("".join(fact.note), ""), re.IGNORECASE)) == 0
                assert len(re.findall(pattern, text)) == 1
            assert len({fact.name for fact in request.asked}) == len(request.asked)


@every_kind
def test_stale_answers_are_what_the_source_tells(tokenizer, made, kind):
    for pair in of_kind(made, kind):
        for index, (fact, stale) in enumerate(zip(pair.target.asked, pair.stale, strict=True)):
            if stale is None:
                assert kind == "unrelated"
                assert fact.question not in pair.source_text
                continue
            value = tokenizer.decode(stale)
            before, after = "".join(fact.note).split(fact.answer)
            assert f"{before}{value}{after}\n" in told(pair.source_text)
            if index:
                assert value == fact.answer


@every_kind
def test_the_sources_question_is_the_same_or_another(made, kind):
    for pair in of_kind(made, kind, asks="same"):
        assert (pair.source.asked[0].question == pair.target.asked[0].question) == (kind != "unrelated")
    for pair in of_kind(made, kind, asks="other"):
        assert pair.source.asked[0].question != pair.target.asked[0].question


@every_kind
def test_the_answer_changes_where_a_fact_does(tokenizer, made, kind):
    for index, pair in enumerate(made[kind, LONG, "same"]):
        assert pair.changes_answer == (kind in ("changed_fact", "changed_digit") or (kind == "negated" and index % 2 == 0))
        if pair.changes_answer and kind != "negated":
            stale = tokenizer.decode(pair.stale[0])
            assert not re.search(rf"\b{stale.strip()}\b", pair.target_text)
            assert len(pair.stale[0]) == len(tokenizer.encode(answer(pair, tokenizer), add_special_tokens=False))


def test_identical_prompts_are_the_same_up_to_the_question(made):
    assert all(pair.source.prompt == pair.target.prompt for pair in of_kind(made, "identical", asks="same"))
    for pair in of_kind(made, "identical", asks="other"):
        assert told(pair.source_text) == told(pair.target_text)
        assert pair.source.prompt != pair.target.prompt


def test_changes_without_content_are_articles_commas_and_spaces(made):
    for pair in of_kind(made, "no_content"):
        changed = [word for sides in changed_words(pair) for side in sides for word in side]
        assert 1 <= len(changed) <= 6
        assert set(changed) <= {"the", "a", ",", " "}


def test_the_few_words_that_change_are_words_of_the_prose(made):
    for pair in of_kind(made, "few_words"):
        changed = changed_words(pair)
        assert 1 <= len(changed) <= 4
        for before, after in changed:
            assert len(before) == len(after)
            words = [word for word in before + after if word != " "]
            assert all(word.isalpha() and word.islower() and len(word) > 4 for word in words)
            assert not set(words) & set(VALUES)
    sizes = {len(pair.source.prompt) - len(pair.target.prompt) for pair in of_kind(made, "few_words")}
    assert len(sizes) > 2


def test_reworded_prompts_have_another_first_line_and_nothing_else(made):
    for pair in of_kind(made, "reworded"):
        before, after = lines(pair.source_text), lines(pair.target_text)
        assert before[0] != after[0]
        assert before[1:] == after[1:]
        heads = [next(p for p in PREAMBLES if line.startswith(f"System: {p}")) for line in (before[0], after[0])]
        assert heads[0] != heads[1]


@pytest.mark.parametrize(("kind", "start", "stop"), [("reordered_notes", "Notes:", None), ("reordered_tools", "Tools:", "Notes:")])
def test_reordered_prompts_have_the_same_lines_in_another_order(made, kind, start, stop):
    for pair in of_kind(made, kind):
        before, after = lines(pair.source_text), lines(pair.target_text)
        assert before != after
        assert sorted(before) == sorted(after)
        assert len(pair.source.prompt) == len(pair.target.prompt) or pair.asks == "other"
        low, high = before.index(start), before.index(stop) if stop else len(before)
        assert (before[: low + 1], before[high:]) == (after[: low + 1], after[high:])


def test_a_changed_fact_is_one_word_and_a_changed_digit_one_digit(made):
    for kind, kind_of_value in (("changed_fact", str.isalpha), ("changed_digit", str.isdigit)):
        for pair in of_kind(made, kind):
            ((before, after),) = changed_words(pair)
            assert len(before) == len(after) == 1
            assert kind_of_value(before[0])
            assert kind_of_value(after[0])
            assert pair.source.prompt[: pair.source.parts[0].stop] == pair.target.prompt[: pair.target.parts[0].stop]
            if pair.asks == "same":
                assert sum(a != b for a, b in zip(pair.source.prompt, pair.target.prompt, strict=True)) == 1


def test_a_negation_changes_the_answer_or_is_a_not_in_the_prose(tokenizer, made):
    for pair in of_kind(made, "negated"):
        if not pair.changes_answer:
            added = [word for before, after in changed_words(pair) for word in after if word != " "]
            assert added == ["not"]
            assert sum(len(before) for before, _ in changed_words(pair)) == 0
            continue
        now, then = (value.strip() for value in (answer(pair, tokenizer), tokenizer.decode(pair.stale[0])))
        before, after = (
            [line for line in lines(text) if re.search(rf"\b({now}|{then})\b", line)] for text in (pair.source_text, pair.target_text)
        )
        assert len(before) == len(after) == 2
        assert [bool(re.search("[Nn]ot", line)) for line in before] == [False, True]
        assert [bool(re.search("[Nn]ot", line)) for line in after] == [True, False]
        # The values stay where they are.
        assert then in before[0]
        assert then in after[0]


def test_unrelated_prompts_share_the_scaffold_only(made):
    for pair in of_kind(made, "unrelated"):
        shared = set(lines(pair.source_text)[1:]) & set(lines(pair.target_text)[1:])
        assert all(line.startswith("{") or line in ("Tools:", "Notes:") for line in shared)


def test_what_cannot_be_made_is_refused_with_a_reason(tokenizer):
    with pytest.raises(ValueError, match=r"kind: expected one of identical, .*, got 'other'"):
        pairs.make_pairs(tokenizer, "other", 1)
    with pytest.raises(ValueError, match="length: expected 128 to 900, got 100"):
        pairs.make_pairs(tokenizer, "identical", 1, length=100)
    with pytest.raises(ValueError, match="asks: expected 'same' or 'other', got 'none'"):
        pairs.make_pairs(tokenizer, "identical", 1, asks="none")


@every_kind
def test_the_base_model_answers_the_targets_by_themselves(base, made, kind):
    for length in (SHORT, LONG):
        made_here = of_kind(made, kind, length=length, asks="same")
        assert agents.recall(base[0], [pair.target for pair in made_here]) >= 0.95


def test_the_model_reads_which_of_two_lines_is_denied(base, tokenizer):
    model, _ = base
    made = [pair for pair in pairs.make_pairs(tokenizer, "negated", 24, seed=4, length=300) if pair.changes_answer]
    right = []
    for pair in made:
        for request in (pair.source, pair.target):
            ids = torch.tensor([request.prompt + request.continuation])
            with torch.no_grad():
                guesses = model(input_ids=ids).logits[0].argmax(-1)[len(request.prompt) - 1 : -1].tolist()
            right.append(request.right(guesses)[0])
    assert sum(right) / len(right) >= 0.95
