"""The evaluation of translated caches runs as a user runs it, and its numbers are those of plain computations."""

from __future__ import annotations

import importlib
import random
import sys

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.translate.cache import TranslatedCache
from tests import testbed
from tests.scripts.running import ROOT, rows_of, run_script
from tests.testbed.recall import answered

WORKLOADS = ("prose", "verse", "documents")
PAIR = "base -> tuned"
SIDES = ("raw K/V", "int4 K/V", "full rank, float32")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        quality = importlib.import_module("eval_translation")
    (producer, tokenizer), (consumer, _) = testbed.load(), testbed.load("tuned")
    return quality.Bench(producer, consumer, tokenizer, quality.calibration_texts(tokenizer, 8, 220))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "new"
    options = ["--quick", "--device", "cpu", "--pairs", "base:tuned", "--csv", folder]
    done = run_script("eval_translation", *options)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, rows_of(folder / "translation-quality.csv")


@pytest.mark.full
def test_each_side_has_a_row_for_each_workload_in_the_file_and_one_in_a_table(evaluated, script):
    _, printed, rows = evaluated
    names = [side.name for side in script("eval_translation").SIDES]
    assert len(names) == len(set(names)) == 11
    assert [(row["side"], row["workload"]) for row in rows] == [(name, workload) for name in names for workload in WORKLOADS]
    assert all(sum(line.startswith(f"{name}  ") for line in printed.splitlines()) >= 1 for name in names)
    assert all(row["torch"] and row["hardware"] and row["pair"] == PAIR and row["texts"] == "1" for row in rows)


@pytest.mark.full
def test_rows_agree_with_each_other(evaluated):
    _, _, rows = evaluated
    for row in rows:
        assert bool(row["recall"]) == (row["workload"] == "documents")
        own = next(each for each in rows if each["side"] == "own prefill" and each["workload"] == row["workload"])
        assert row["recall_alone"] == own["recall"]
        expected = {"own prefill": 0, "raw K/V": 1, "zero bytes": 0}.get(row["side"])
        assert expected is None or float(row["share"]) == pytest.approx(expected)
    by_name = {(row["side"], row["workload"]): row for row in rows}
    assert all(float(by_name["own prefill", workload]["kl"]) == 0 for workload in WORKLOADS)
    for workload in WORKLOADS:
        wider = [float(by_name[f"joint {payload}", workload]["share"]) for payload in (0.0125, 0.05)]
        assert wider == sorted(wider)
        # A 32nd for scales and zeros, and a little more for the last group.
        assert 0.281 < float(by_name["int4 K/V", workload]["share"]) < 0.3


def test_translators_are_fitted_to_other_halves_than_they_are_measured_on(script):
    quality = script("eval_translation")
    _, tokenizer = testbed.load()
    made = [tokenizer.decode(ids) for ids in quality.calibration_texts(tokenizer, 8, 220)]
    asked = quality.evaluation_texts(tokenizer, 2, 0, 220)
    assert ["Notes:" in text for text in made] == [True, True, False, False] * 2
    assert [text.workload for text in asked] == [workload for workload in WORKLOADS for _ in range(2)]
    for domain, number in (("prose", 2), ("verse", 3)):
        whole = testbed.held_out(domain)
        assert whole.find(made[number].strip()) in range(len(whole) // 2)
        for text in asked:
            if text.workload == domain:
                assert len(text.continuation) == 32
                assert tokenizer.decode(text.prompt + text.continuation).strip() in whole[len(whole) // 2 :]


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("domain", ["prose", "verse"])
def test_paragraphs_of_documents_are_of_their_half(script, domain, second):
    _, tokenizer = testbed.load()
    whole = testbed.held_out(domain)
    middle = len(whole) // 2
    document = script("eval_translation").Half(tokenizer, domain, second=second).document(random.Random(1))
    words = " ".join((whole[middle:] if second else whole[:middle]).split())
    assert any(document.paragraphs)
    assert all(paragraph in words for paragraph in document.paragraphs)


def test_prefixes_have_the_lengths_that_were_asked_for(script):
    quality = script("eval_translation")
    _, tokenizer = testbed.load()
    lengths = [len(text.prompt) for text in quality.evaluation_texts(tokenizer, 4, 3, 250) if text.workload != "documents"]
    assert all(200 <= length <= 250 for length in lengths)
    assert len(set(lengths)) > 4
    assert quality.evaluation_texts(tokenizer, 1, 4) != quality.evaluation_texts(tokenizer, 1, 5)


def test_right_answers_are_those_that_the_testbed_counts(script, monkeypatch):
    quality = script("eval_translation")
    model, tokenizer = testbed.load("tuned")
    documents = []
    encode = quality.encode
    monkeypatch.setattr(quality, "encode", lambda tokenizer, document: (documents.append(document), encode(tokenizer, document))[1])
    texts = [text for text in quality.evaluation_texts(tokenizer, 3, 7, 400) if text.workload == "documents"]
    right = 0
    for text, document in zip(texts, documents, strict=True):
        assert tokenizer.decode(text.prompt) == document.context()
        told = [document.facts[index].answer for index in document.asked]
        assert [tokenizer.decode(text.continuation[start:stop]) for start, stop in text.answers] == told
        with torch.no_grad():
            logits = quality.next_tokens(model, text)
        found = quality.judged(text, logits, logits)
        assert found["asked"] == len(document.facts)
        right += found["right"]
    assert right == sum(hit for _, hit in answered(model, tokenizer, documents)) > 0


def test_what_is_judged_are_the_first_places_and_all_answers(script):
    quality = script("eval_translation")
    generator = torch.Generator().manual_seed(0)
    alone, found = torch.randn(2, 40, 11, generator=generator)
    true = torch.randint(11, (40,), generator=generator).tolist()
    true[36:38] = found[36:38].argmax(-1).tolist()
    text = quality.Text("documents", [1, 2], true, ((36, 38), (38, 40)))
    made = quality.judged(text, alone, found)
    p, q = alone.double().softmax(-1), found.double().softmax(-1)
    for place in range(32):
        assert made["kls"][place] == pytest.approx(float((p[place] * (p[place] / q[place]).log()).sum()), rel=1e-4)
    assert len(made["kls"]) == 32
    assert made["right"] == sum(found[start:stop].argmax(-1).tolist() == true[start:stop] for start, stop in text.answers) >= 1
    assert (made["asked"], made["right_alone"]) == (2, 0)


@torch.no_grad()
def test_answers_are_those_of_the_same_caches_made_by_hand(script, bench):
    quality = script("eval_translation")
    producer, consumer = bench.producer, bench.consumer
    text = quality.evaluation_texts(bench.tokenizer, 1, 0, 220)[2]
    raw, int4, full_rank = (next(side for side in quality.SIDES if side.name == name) for name in SIDES)
    chosen = [raw, int4, full_rank]
    bench.prepare(quality.Side(full_rank.name, "fitted", {**full_rank.options, "config": quality.TranslatorConfig(metric="plain")}))
    found = dict(bench.ask(text, chosen))
    prompt, rest = torch.tensor([text.prompt]), torch.tensor([text.prompt[-1:] + text.continuation[:-1]])
    caches = {name: DynamicCache(config=consumer.config) for name in ("theirs", "raw")}
    producer(input_ids=prompt[:, :-1], past_key_values=caches["theirs"])
    codes = bench.fitted[full_rank.name].encode(producer, prompt)
    full = TranslatedCache(consumer, bench.fitted[full_rank.name], codes)
    full.prefill(prompt)
    for layer in range(4):
        theirs = caches["theirs"].layers[layer]
        caches["raw"].update(theirs.keys.bfloat16().float(), theirs.values.bfloat16().float(), layer)
    by_hand = {raw: caches["raw"], full_rank: full}
    alone = consumer(input_ids=torch.cat([prompt[:, :-1], rest], 1)).logits[0, -rest.shape[1] :]
    for side, cache in by_hand.items():
        logits = consumer(input_ids=rest, past_key_values=cache).logits[0]
        expected = quality.judged(text, alone, logits)
        assert found[side].kls == pytest.approx(expected["kls"], rel=1e-2, abs=1e-5)
        assert (found[side].right, found[side].asked) == (expected["right"], len(text.answers))
    tokens = len(text.prompt) - 1
    assert {answer.tokens for answer in found.values()} == {tokens}
    assert {answer.plain for answer in found.values()} == {2 * 4 * 2 * 128 * tokens}
    assert found[full_rank].bytes == len(codes.to_bytes())
    assert found[raw].bytes == found[raw].plain
    # A channel of 64 tokens: 32 bytes, a scale and a zero of two each.
    groups = -(-tokens // 64)
    assert found[int4].bytes == 4 * 2 * 128 * (-(-tokens // 2) + 4 * groups)
    assert max(found[int4].kls) > 0


def test_a_number_that_makes_no_sense_is_refused(script, monkeypatch, capsys):
    parse = script("eval_translation").parse
    monkeypatch.setattr(sys, "argv", ["eval_translation.py", "--texts", "0"])
    with pytest.raises(ConfigError, match="--texts: expected at least 1"):
        parse()
    monkeypatch.setattr(sys, "argv", ["eval_translation.py", "--longest", "901"])
    with pytest.raises(SystemExit):
        parse()
    assert "--longest: expected 200 to 900, got 901" in capsys.readouterr().err
