"""The quality evaluation of SubspaceCache runs as a user runs it, and its numbers are those of plain computations."""

from __future__ import annotations

import importlib
import math
import sys

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches.errors import ConfigError
from tests import testbed, tiny
from tests.scripts.running import ROOT, rows_of, run_script

CACHES = ("full cache", "codec 0.125", "KIVI 2 bit", "codec 0.125, adaptive")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "new"
    options = ("--device", "cpu", "--quick", "--model", "base", "--csv", folder / "quality.csv", "--plot", folder / "quality.png")
    done = run_script("eval_subspace", *options)
    assert done.returncode == 0, done.stderr
    return folder, done, rows_of(folder / "quality.csv")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


@pytest.mark.full
def test_every_cache_has_a_row_in_the_table_and_in_the_file(quick):
    _, done, rows = quick
    assert tuple(row["variant"] for row in rows) == CACHES
    for name in CACHES:
        assert sum(line.startswith(f"{name} ") for line in done.stdout.splitlines()) == 1
    assert all(row["torch"] and row["model"] == "base" and "1024 tokens of prose.txt" in row["calibrated_on"] for row in rows)
    by_name = {row["variant"]: row for row in rows}
    assert float(by_name["codec 0.125"]["share"]) == pytest.approx(0.125, abs=1e-3)
    assert float(by_name["codec 0.125"]["owned"]) > 0.125
    assert float(by_name["KIVI 2 bit"]["share"]) == 0.1875


@pytest.mark.full
def test_what_the_file_has_is_not_measured_again(quick, script, monkeypatch):
    folder, _, rows = quick
    script("eval_subspace")
    monkeypatch.setattr(sys.modules["eval_subspace"], "quality", None)
    monkeypatch.setattr(
        sys, "argv", ["eval_subspace.py", "--device", "cpu", "--quick", "--model", "base", "--csv", f"{folder}/quality.csv"]
    )
    sys.modules["eval_subspace"].main()
    assert rows_of(folder / "quality.csv") == rows


@pytest.mark.full
def test_it_draws_a_picture(quick):
    assert (quick[0] / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_a_cache_that_loses_nothing_has_no_divergence_and_the_perplexity_of_one_forward_pass(script):
    model, ids = tiny.llama(), tiny.ids(2, 90)
    make = lambda: DynamicCache(config=model.config)  # noqa: E731
    row = script("_subspace_quality").quality(model, make, ids, first=4)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, 4:-1].flatten(0, 1), ids[:, 5:].flatten())
    assert row["tokens"] == 2 * 85
    assert row["perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-4)
    assert row["kl"] == pytest.approx(0, abs=1e-6)
    assert row["change_percent"] == pytest.approx(0, abs=1e-3)


def test_the_divergence_is_that_of_the_full_caches_predictions(script):
    model, ids, kivi = tiny.llama(), tiny.ids(2, 50), script("_kivi")
    row = script("_subspace_quality").quality(model, lambda: kivi.KiviCache(model.config, 2), ids, first=4)
    with torch.no_grad():
        full, cache = model(ids[:, :-1]).logits.log_softmax(-1), kivi.KiviCache(model.config, 2)
        model(ids[:, :4], past_key_values=cache)
        steps = [model(token, past_key_values=cache).logits.log_softmax(-1) for token in ids[:, 4:-1].split(1, 1)]
    expected = torch.nn.functional.kl_div(torch.cat(steps, 1), full[:, 4:], log_target=True, reduction="none").sum(-1).mean()
    assert row["kl"] == pytest.approx(float(expected), rel=1e-3)
    assert row["kl"] > 1e-4


@pytest.mark.parametrize("chunks", [[100], [4, *[1] * 96], [1, 30, 69], [40, 3, 57]])
def test_plain_quantization_does_not_depend_on_how_tokens_come(script, chunks):
    kivi, keys, values = script("_kivi"), torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 64)
    layer = kivi.KiviLayer(bits=4, sinks=4)
    for key, value in zip(keys.split(chunks, 2), values.split(chunks, 2), strict=True):
        read = layer.update(key, value)
        assert read[0].shape[2] == layer.get_seq_length()
    torch.testing.assert_close(layer.keys[:, :, :4], keys[:, :, :4], rtol=0, atol=0)
    torch.testing.assert_close(layer.values[:, :, :4], values[:, :, :4], rtol=0, atol=0)
    torch.testing.assert_close(layer.keys[:, :, 4:], kivi.quantized(keys[:, :, 4:], 4, 2), rtol=0, atol=0)
    torch.testing.assert_close(layer.values[:, :, 4:], kivi.quantized(values[:, :, 4:], 4, 3), rtol=0, atol=0)
    assert layer.tail.shape[2] == 0, "96 tokens are three groups"


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_numbers_are_off_by_half_a_step_of_their_group_at_most(script, bits):
    kivi, numbers = script("_kivi"), torch.randn(2, 70, 8)
    read = kivi.quantized(numbers, bits, 1)
    for start in (0, 32, 64):
        group, found = numbers[:, start : start + 32], read[:, start : start + 32]
        step = (group.amax(1, keepdim=True) - group.amin(1, keepdim=True)) / (2**bits - 1)
        assert bool(((found - group).abs() <= 0.5 * step + 5e-3).all())
        assert max(len(column.unique()) for row in found for column in row.T) <= 2**bits
    assert kivi.share(bits) == (bits + 1) / 16


def test_only_facts_outside_of_the_window_are_asked_and_answers_are_those_of_greedy_decoding(script):
    quality = script("_subspace_quality")
    model, tokenizer = testbed.load()
    (document,) = script("shared.texts").make_documents(tokenizer, testbed.held_out(), 1, 500, seed=3)
    everything, outside = quality.make_quiz(tokenizer, document, 0, 99), quality.make_quiz(tokenizer, document, 150, 99)
    assert len(everything.questions) == len(document.facts) > len(outside.questions) > 0
    for question, _ in outside.questions:
        told = next(fact for fact in document.facts if fact.question == tokenizer.decode(question))
        before = document.context().partition("".join(told.note))[0]
        assert len(tokenizer(before, add_special_tokens=False)["input_ids"]) < len(outside.context) - 150
    right = 0
    with torch.no_grad():
        for question, answer in everything.questions:
            prompt = torch.tensor([everything.context + question])
            written = model.generate(prompt, max_new_tokens=len(answer), do_sample=False, pad_token_id=0)
            right += written[0, prompt.shape[1] :].tolist() == answer
        assert quality.right_answers(model, DynamicCache(config=model.config), everything) == right


def row(variant: str, **values: float) -> dict[str, object]:
    return {"model": "m", "text": "t", "variant": variant, "kl": 0.0, "change_percent": 0.0, "share": 0.1, "owned": 0.1} | values


def judged(script, *rows: dict[str, object]) -> str:
    evaluation = script("eval_subspace")
    return evaluation.verdicts(evaluation.bars(rows), rows)


@pytest.mark.parametrize(("kl", "verdict"), [(0.005, "met"), (0.0051, "NOT met")])
def test_divergence_is_held_against_that_of_plain_quantization(script, kl, verdict):
    line = judged(script, row("KIVI 4 bit", kl=0.005), row("codec 0.125", kl=kl)).splitlines()[1]
    assert line == f"  m, KL at 0.125 at most that of KIVI 4 bit: {verdict} ({kl})"
    lines = judged(script, row("KIVI 2 bit", kl=0.1), row("codec 0.1875", kl=kl))
    assert f"KL at 0.1875 at most 1/20 of that of KIVI 2 bit: {verdict} " in lines


@pytest.mark.parametrize(("change", "verdict"), [(0.2, "met"), (0.21, "NOT met")])
def test_perplexity_with_a_window_has_a_bar(script, change, verdict):
    assert f"0.1 with 64 recent at most 0.2% higher: {verdict} " in judged(script, row("codec 0.1, 64 recent", change_percent=change))


@pytest.mark.parametrize(("right", "verdict"), [(0.96, "met"), (0.95, "NOT met")])
def test_recall_is_held_against_that_of_the_full_cache(script, right, verdict):
    lines = judged(script, row("full cache", recall=0.99), row("codec 0.1", recall=right))
    assert f"recall at 0.1 within 3 points of the full cache's 99.0%: {verdict} " in lines
    assert "recall" not in judged(script, row("full cache", recall=0.2), row("codec 0.1", recall=right)), "a model that recalls nothing"


@pytest.mark.parametrize(("right", "verdict"), [(0.97, "met"), (0.96, "NOT met")])
def test_recall_with_bases_that_follow_is_held_against_that_of_the_codec(script, right, verdict):
    rows = row("full cache", recall=0.99), row("codec 0.125", recall=0.98), row("codec 0.125, adaptive", recall=right)
    assert f"follow within 1 point of the codec's own: {verdict} " in judged(script, *rows)


def test_rows_that_end_before_there_are_codes_are_refused(script):
    with pytest.raises(ConfigError, match="--tokens: expected at least 32"):
        script("_subspace_quality").quality(tiny.llama(), None, tiny.ids(1, 31), first=30)


@pytest.mark.parametrize(("owned", "verdict"), [(0.103, "met"), (0.104, "NOT met")])
def test_bytes_of_a_cache_are_held_against_its_share(script, owned, verdict):
    assert f"owns at 0.05 at most 1.03 of its share: {verdict} " in judged(script, row("codec 0.05", owned=owned - 1e-9))


def test_a_number_below_one_is_refused(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval_subspace.py", "--bytes-tokens", "0"])
    with pytest.raises(ConfigError, match="--bytes-tokens: expected at least 1"):
        script("eval_subspace").parse()
