"""The evaluation of pruning runs as a user runs it, goes on where it was, and counts what it says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hf_kvcaches import ConfigError
from tests import testbed
from tests.scripts.running import import_script, rows_of, run_script

script = import_script("eval_pruning")
prompts = import_script("_pruning_samples")
CACHES = ("streaming", "kvzip, refit", "probe, refit", "compactor, HeadBudgets")


def evaluate(folder: Path, *options: Any) -> Any:
    common = ("--model", "base", "--threads", 1, "--samples", 3, "--tokens", 150, "--ratios", 0.5, "--codes")
    return run_script("eval_pruning", *common, "--state", folder / "state", "--csv", folder / "pruning.csv", *options)


@pytest.fixture(scope="module")
def book() -> Any:
    _, tokenizer = testbed.load()
    return prompts.Book((script.TESTBED / "prose.txt").read_text(encoding="utf-8"), tokenizer)


@pytest.mark.full
def test_each_cache_has_a_row_and_a_second_run_measures_nothing_again(tmp_path):
    first = evaluate(tmp_path, "--caches", *CACHES)
    assert first.returncode == 0, first.stderr
    rows = rows_of(tmp_path / "pruning.csv")
    assert [row["cache"] for row in rows] == list(CACHES)
    assert all(row["model"] == "base" and row["samples"] == "4" and float(row["bytes"]) > 0 for row in rows)
    assert all(0 <= int(row["needles"]) <= int(row["of_needles"]) <= 3 for row in rows)
    assert {path.name for path in (tmp_path / "state").iterdir()} == {"base.keep-probe", "base.head-budgets", "pruning-base-150-1.jsonl"}
    log = tmp_path / "state" / "pruning-base-150-1.jsonl"
    before = log.read_text(encoding="utf-8")
    second = evaluate(tmp_path, "--caches", *CACHES, "--ratios", 0.5, 0.25)
    assert second.returncode == 0, second.stderr
    after = log.read_text(encoding="utf-8")
    assert after.startswith(before)
    assert all(" 0.25" in line for line in after[len(before) :].splitlines())


@pytest.mark.full
def test_a_chat_is_fed_turn_by_turn(tmp_path):
    done = evaluate(tmp_path, "--caches", "streaming", "--chats", 1)
    assert done.returncode == 0, done.stderr
    prompt, chat = rows_of(tmp_path / "pruning.csv")
    assert (prompt["task"], chat["task"], chat["budget"], chat["samples"]) == ("prompt", "chat", "512", "1")


@pytest.mark.full
def test_contexts_that_are_read_from_codes_have_a_row_for_each_form(tmp_path):
    done = evaluate(tmp_path, "--caches", "--codes", 0.25)
    assert done.returncode == 0, done.stderr
    in_place, packed = rows_of(tmp_path / "pruning.csv")
    assert (in_place["task"], in_place["cache"], in_place["ratio"], in_place["samples"]) == ("codes", "codes in place", "0.25", "4")
    assert (packed["task"], packed["cache"]) == ("codes", "codes packed")
    assert float(in_place["bytes"]) > float(packed["bytes"]) > 0, "in memory some tokens are exact"


def test_kvpress_is_asked_on_the_same_samples(tmp_path, book):
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\ncp "$2" "$(dirname "$0")/asked.json"\nexit 3\n', encoding="utf-8")
    interpreter.chmod(0o755)
    done = evaluate(tmp_path, "--caches", "--kvpress", interpreter)
    assert done.returncode == 1
    assert done.stderr.endswith("ended with 3\n")
    asked = json.loads((tmp_path / "asked.json").read_text(encoding="utf-8"))
    assert (asked["presses"], asked["budgets"]) == (["kvzip", "compactor"], [0.5])
    assert [(prompt["task"], len(prompt["questions"])) for prompt in asked["prompts"]] == [*[("needle", 2)] * 3, ("facts", 4)]
    assert asked["prompts"][0]["context"] == next(prompts.samples(book, "needle", 1, 150, 1)).context


@pytest.mark.parametrize("kind", ["needle", "facts"])
def test_contexts_state_what_is_asked_and_end_where_the_continuation_begins(book, kind):
    [sample] = prompts.samples(book, kind, 1, 200, 5)
    text = book.tokenizer.decode(sample.context)
    assert 200 <= len(sample.context) <= 300
    assert len(sample.questions) == (1 if kind == "needle" else 3)
    assert all(book.tokenizer.decode(answer).strip() in text for _, answer in sample.questions)
    assert len(sample.continuation) == prompts.FOLLOWING
    assert sample.asked[-1] == (sample.continuation[:1], sample.continuation[1:])


def test_seeds_differ_and_calibration_has_a_part_of_the_book_for_itself(book):
    [first], [second], [again] = (list(prompts.samples(book, "needle", 1, 200, seed)) for seed in (0, 1, 0))
    assert first == again != second
    texts = book.calibration_texts(3, 200)
    assert len(texts) == 3
    assert all(len(prompts.encode(book.tokenizer, text)) >= 150 for text in texts)
    assert not {sentence for sentence in book.sentences if len(sentence) > 40 and any(sentence in text for text in texts)}
    with pytest.raises(ConfigError, match="--text"):
        book.read(random.Random(0), 10**6)


def test_a_chat_begins_with_the_fact_that_is_asked_for(book):
    [chat] = prompts.chats(book, 1, 600, 0)
    decode = book.tokenizer.decode
    question, answer = chat.question
    assert decode(answer).strip() in decode(chat.turns[0][0])
    assert decode(question).startswith("User: Where is")
    assert sum(len(message) + len(reply) for message, reply in chat.turns) >= 600


def test_counted_are_the_answers_that_the_full_cache_gives():
    report = import_script("eval_pruning")
    answers = report.answers_of(({"right": [True, False, True]}, {"right": [True, True, False]}))
    assert answers == [True, False, None]
    assert report.counted("fact", answers) == {"facts": 1, "of_facts": 2, "fact_share": 0.5}
