"""The evaluation runs as a user runs it, goes on where it was cut off, and counts what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests import testbed
from tests.scripts.running import import_script, rows_of, run_script

peers, pruning, quality, translation = (import_script(f"shared.{name}") for name in ("peers", "pruning", "quality", "translation"))
data = import_script("shared.testbed")
CACHES = ("streaming", "kvzip, refit", "probe, refit", "compactor, HeadBudgets")


def evaluate(what: str, folder: Path, *options: Any) -> Any:
    state = () if what == "translation" else ("--state", folder / "state", "--model", "base")
    return run_script("eval", what, "--device", "cpu", "--threads", 1, "--quick", "--csv", folder, *state, *options)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("real")
    done = evaluate("real", folder)
    assert done.returncode == 0, done.stderr
    return folder, rows_of(folder / "real-base.csv")


@pytest.mark.full
def test_each_task_has_its_rows_with_the_conditions_they_were_measured_under(real: Any) -> None:
    _, rows = real
    assert {row["section"] for row in rows} == {"codes", "quantized", "reuse"}
    assert {(row["model"], row["dtype"], row["threads"]) for row in rows} == {("base", "float32", "1")}
    codes = {(row["cache"], row["share"], row["recent"]): row for row in rows if row["section"] == "codes"}
    assert float(codes["codec", "0.25", "0"]["kl"]) < float(codes["KIVI 2 bit", "0.1875", "0"]["kl"])
    assert {row["peer"] for (cache, *_), row in codes.items() if cache not in ("codec", "packed codec")} == {"True"}
    reuse = {(row["cache"], row["task"]): row for row in rows if row["section"] == "reuse"}
    assert float(reuse["segments exact", "requests"]["kl"]) < 1e-6
    assert all(0 < float(row["saved"]) < 1 for row in reuse.values())


@pytest.mark.full
def test_a_finished_run_measures_nothing_again_and_a_cut_one_only_what_is_missing(real: Any) -> None:
    folder, rows = real
    [path] = folder.glob("state/*.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert evaluate("real", folder).returncode == 0
    assert path.read_text(encoding="utf-8").splitlines() == lines
    path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    assert evaluate("real", folder).returncode == 0
    assert path.read_text(encoding="utf-8").splitlines()[:-1] == lines[:-1]
    assert rows_of(folder / "real-base.csv") == rows


def test_one_task_alone_is_measured_where_it_is_named(tmp_path: Path) -> None:
    done = evaluate("real", tmp_path, "--tasks", "requests")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "real-base.csv")
    assert [row["cache"] for row in rows] == ["segments exact", "segments auto", "segments approximate"]


@pytest.mark.full
def test_each_pruned_cache_and_each_form_of_codes_has_a_row(tmp_path: Path) -> None:
    done = evaluate("pruning", tmp_path, "--caches", *CACHES, "--ratios", 0.5, "--codes", 0.25, "--chats", 1)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "pruning-base.csv")
    prompt, codes, chat = ([row for row in rows if row["task"] == task] for task in ("prompt", "codes", "chat"))
    assert [row["cache"] for row in prompt] == list(CACHES)
    assert all(row["samples"] == "4" and float(row["bytes"]) > 0 for row in [*prompt, *codes])
    assert all(0 <= int(row["needles"]) <= int(row["of_needles"]) <= 3 for row in prompt)
    assert [row["cache"] for row in codes] == ["codes in place", "codes packed"]
    assert float(codes[0]["bytes"]) > float(codes[1]["bytes"]), "in memory some tokens are exact"
    assert [row["cache"] for row in chat] == [name for name in CACHES if "kvzip" not in name]
    assert {row["budget"] for row in chat} == {"512"}


def test_kvpress_is_asked_on_the_same_samples(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\ncp "$2" "$(dirname "$0")/asked.json"\nexit 3\n', encoding="utf-8")
    interpreter.chmod(0o755)
    done = evaluate("pruning", tmp_path, "--caches", "--codes", "--ratios", 0.5, "--kvpress", interpreter)
    assert done.returncode == 1
    assert done.stderr.endswith("ended with 3\n")
    asked = json.loads((tmp_path / "asked.json").read_text(encoding="utf-8"))
    assert (asked["presses"], asked["budgets"]) == (["kvzip", "compactor"], [0.5])
    assert [(prompt["task"], len(prompt["asked"])) for prompt in asked["prompts"]] == [*[("needle", 2)] * 3, ("facts", 4)]


def test_a_chat_begins_with_the_fact_that_is_asked_for() -> None:
    _, tokenizer = testbed.load()
    [chat] = pruning.chats(tokenizer, testbed.held_out(), 1, 600, 0)
    question, answer = chat.question
    assert tokenizer.decode(answer).strip() in tokenizer.decode(chat.turns[0][0])
    assert tokenizer.decode(question).startswith("User: Where is")
    assert sum(len(message) + len(reply) for message, reply in chat.turns) >= 600


def test_counted_are_the_answers_that_the_full_cache_gives() -> None:
    pair = ({"right": [True, False, True]}, {"right": [True, True, False]})
    assert pruning.right("facts", [pair]) == {"facts": 1, "of_facts": 2}


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_of_rotated_codes_lose_as_little_as_the_best_scalar_quantizer_of_normal_numbers(bits: int) -> None:
    numbers, levels = torch.randn(200_000, generator=torch.Generator().manual_seed(0)), peers.normal_levels(bits)
    nearest = levels[(numbers[:, None] - levels).abs().argmin(1)]
    expected = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}[bits]
    assert float((numbers - nearest).square().mean()) == pytest.approx(expected, rel=0.03)


def test_rotated_codes_keep_norms_and_lose_less_with_more_bits() -> None:
    states = torch.randn(1, 2, 50, 64) * torch.rand(1, 2, 50, 1)
    errors = [float((peers.RotatedCoding(bits).read(0, states, states)[0] - states).square().mean()) for bits in (2, 3, 4)]
    assert errors == sorted(errors, reverse=True)
    assert math.isclose(errors[2], 0.0095 * float(states.square().mean()), rel_tol=0.2)


@pytest.mark.full
def test_each_side_of_a_translation_has_a_row_for_each_workload(tmp_path: Path) -> None:
    done = evaluate("translation", tmp_path, "--pairs", "base:tuned")
    assert done.returncode == 0, done.stderr
    rows = {(row["side"], row["workload"]): row for row in rows_of(tmp_path / "translation-base-tuned.csv")}
    assert list(rows) == [(side.name, workload) for side in translation.SIDES for workload in translation.WORKLOADS]
    for workload in translation.WORKLOADS:
        assert float(rows["own prefill", workload]["kl"]) == 0
        shares = [float(rows[name, workload]["share"]) for name in ("zero bytes", "joint 0.0125", "joint 0.05", "raw K/V")]
        assert shares == sorted(shares)
        assert (shares[0], shares[-1]) == (0, 1)
    assert all(bool(row["recall"]) == (workload == "documents") for (_, workload), row in rows.items())


def test_a_longest_prefix_that_documents_do_not_have_is_refused(tmp_path: Path) -> None:
    done = run_script("eval", "translation", "--longest", 901)
    assert done.returncode == 1
    assert "--longest: expected 200 to 900, got 901" in done.stderr


def test_translators_are_fitted_to_other_texts_than_they_are_measured_on() -> None:
    _, tokenizer = testbed.load()
    fitted = [tokenizer.decode(ids) for ids in translation.calibration_texts(tokenizer, 8, 300, of_testbed=True)]
    asked = translation.evaluation_texts(tokenizer, 2, 0, 300, of_testbed=True)
    assert ["Notes:" in text for text in fitted] == [True, True, False, False] * 2
    for domain, number in (("prose", 2), ("verse", 3)):
        whole = testbed.held_out(domain)
        assert whole.find(fitted[number].strip()) in range(len(whole) // 2)
        for text in asked:
            assert text.workload != domain or tokenizer.decode(text.prompt + text.continuation).strip() in whole[len(whole) // 2 :]
    fitted_pages, asked_pages = (
        {page.paragraph for document in data.documents(split) for page in document.pages} for split in ("calibration", "evaluation")
    )
    assert not {paragraph for paragraph in fitted_pages & asked_pages if len(paragraph) > 40}


def test_questions_have_the_answers_that_the_documents_state() -> None:
    _, tokenizer = testbed.load()
    for document in data.documents("evaluation"):
        text = translation.quiz(tokenizer, document)
        assert tokenizer.decode([*text.prompt, *text.continuation]) == document.text
        assert len(text.prompt) + len(text.continuation) == document.tokens <= 900
        answers = [tokenizer.decode(text.continuation[start:stop]) for start, stop in text.answers]
        assert answers == [page.answer for page in document.questions]
        assert all(page.answer in page.note for page in document.pages)


def test_what_is_judged_are_the_first_tokens_and_all_answers() -> None:
    alone, found = torch.randn(2, 40, 11, generator=torch.Generator().manual_seed(0))
    true = torch.randint(11, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    true[36:38] = found[36:38].argmax(-1).tolist()
    judged = translation.judged(translation.Text("documents", [1, 2], true, ((36, 38), (38, 40))), alone, found)
    p, q = alone.double().softmax(-1), found.double().softmax(-1)
    assert judged["kls"] == pytest.approx((p * (p / q).log()).sum(-1)[:32].tolist(), rel=1e-4)
    assert (judged["asked"], judged["right_alone"]) == (2, 0)
    assert judged["right"] >= 1


@torch.no_grad()
def test_a_producers_own_keys_and_values_are_sent_as_they_are() -> None:
    (producer, tokenizer), (consumer, _) = testbed.load(), testbed.load("tuned")
    text = translation.evaluation_texts(tokenizer, 1, 0, 220, of_testbed=True)[0]
    answers = dict(translation.Pair(producer, consumer, tokenizer, []).ask(text, [translation.OWN, translation.RAW]))
    prompt, rest = torch.tensor([text.prompt]), torch.tensor([text.prompt[-1:] + text.continuation[:-1]])
    theirs, by_hand = DynamicCache(config=producer.config), DynamicCache(config=consumer.config)
    producer(input_ids=prompt[:, :-1], past_key_values=theirs)
    for index, layer in enumerate(theirs.layers):
        by_hand.update(layer.keys.bfloat16().float(), layer.values.bfloat16().float(), index)
    alone = consumer(input_ids=torch.cat([prompt[:, :-1], rest], 1)).logits[0, -rest.shape[1] :]
    expected = translation.judged(text, alone, consumer(input_ids=rest, past_key_values=by_hand).logits[0])
    raw = answers[translation.RAW]
    assert raw["kls"] == pytest.approx(expected["kls"], rel=1e-2, abs=1e-5)
    assert raw["bytes"] == raw["plain"] == 2 * 4 * 2 * 128 * (len(text.prompt) - 1)
    assert answers[translation.OWN]["kls"] == pytest.approx([0.0] * 32, abs=1e-6)
