"""The quality evaluation of SubspaceCache runs as a user runs it, and its numbers are those of plain computations."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import SubspaceBases
from hf_kvcaches.errors import ConfigError
from tests import testbed, tiny
from tests.scripts.running import ROOT, rows_of, run_script

TASKS = ("perplexity", "recall", "spectra", "bounds")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "new"
    done = run_script("eval_subspace", "--device", "cpu", "--quick", "--csv", folder, "--plot", folder)
    assert done.returncode == 0, done.stderr
    files = {}
    for task in TASKS:
        files[task] = rows_of(folder / f"subspace-{task}.csv")
    return folder, done, files


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


@pytest.mark.full
def test_every_cache_has_a_row_in_both_tables_and_in_the_files(quick):
    _, done, files = quick
    names = [
        "full cache",
        *(f"{name} {window}" for name in ("aware 0.34", "aware 0.33 int8", "post 0.34") for window in ("[0+0]", "[4+64]")),
    ]
    for name in names:
        assert sum(line.startswith(f"{name} ") for line in done.stdout.splitlines()) == 2
    for task in ("perplexity", "recall"):
        caches = {(row["variant"], row["sinks"], row["recent"]) for row in files[task]}
        assert len(caches) == len(names)
    assert all(
        row["torch"] and row["model"] == "base" and "1024 tokens of prose.txt" in row["calibrated_on"] for row in files["perplexity"]
    )


@pytest.mark.full
def test_the_full_caches_perplexity_is_that_of_one_forward_pass_over_text_behind_the_calibrations(quick):
    row = quick[2]["perplexity"][0]
    model, tokenizer = testbed.load()
    ids = torch.tensor(tokenizer(testbed.held_out(), add_special_tokens=False)["input_ids"])[1024:]
    both = torch.stack([ids[:96], ids[len(ids) // 2 :][:96]])
    with torch.no_grad():
        loss = model(input_ids=both, labels=both).loss
    assert float(row["perplexity"]) == pytest.approx(math.exp(float(loss)), rel=1e-3)
    assert (row["variant"], row["from"], row["to"], row["tokens"]) == ("full cache", "2", "96", "190")


@pytest.mark.full
def test_all_falsifiers_and_bars_are_judged_or_said_not_to_be_measured(quick):
    lines = quick[1].stdout.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("The paper's falsifiers"))
    judged = [line for line in lines[start:] if line.startswith("  ")]
    assert len(judged) == 11
    assert all(any(word in line for word in (": held", ": FAILED", ": met", ": NOT met", ": not measured")) for line in judged)
    assert "not measured: adaptive mode" in judged[1]


@pytest.mark.full
def test_no_measured_error_is_above_its_bound(quick):
    assert {row["what"] for row in quick[2]["bounds"]} == {"logits", "output"}
    assert all(row["above_bound"] == "0" and 0 < float(row["share_of_bound"]) <= 1 for row in quick[2]["bounds"])


@pytest.mark.full
def test_the_whole_space_keeps_all_energy(quick):
    whole = [row for row in quick[2]["spectra"] if row["rank"] == "64"]
    assert len(whole) == 12  # four layers of three kinds
    assert all(float(row["energy"]) == pytest.approx(1, abs=1e-6) for row in whole)


@pytest.mark.full
def test_it_draws_pictures(quick):
    for task in TASKS:
        assert (quick[0] / f"subspace-{task}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("first", [1, 4, 29])
def test_the_loss_of_each_token_does_not_depend_on_the_first_block(script, first):
    model, ids = tiny.llama(), tiny.ids(2, 30)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        found = script("_subspace_quality").losses(model, DynamicCache(config=model.config), ids, first)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [10, 64, 65, 512, 600])
def test_spans_cover_each_token_with_a_loss_once(script, tokens):
    covered = [place for start, end in script("_subspace_quality").spans(tokens) for place in range(start, end)]
    assert covered == list(range(1, tokens))


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


def test_rank_correlation_gives_equal_numbers_their_mean_rank(script):
    spearman = script("shared.numbers").spearman
    assert spearman(torch.tensor([1.0, 5.0, 9.0]), torch.tensor([-3.0, 0.0, 100.0])) == pytest.approx(1)
    assert spearman(torch.tensor([1.0, 5.0, 9.0]), torch.tensor([2.0, 1.0, 0.0])) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert spearman(torch.tensor([0.0, 7.0, 7.0, 8.0]), torch.arange(4.0)) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_a_full_rank_has_no_errors_and_a_small_one_those_of_its_decoded_keys(script):
    theory = script("_subspace_theory")
    model, ids = tiny.llama(), tiny.ids(1, 24)
    meter = theory.capture(model, ids)[0]
    tokens, at = meter.sample[0], torch.tensor([5, 23])
    dim = tokens.keys.shape[-1]
    for rank in (dim, 3):
        bases = SubspaceBases.calibrate(model, None, [tiny.ids(1, 96)[0].tolist()], rank=rank, progress=False)
        found = theory.head_errors(meter, tokens, bases.layers[0], 1, at)
        assert all((found[what] <= found[f"{what} bound"] + 1e-9).all() for what in ("logits", "output"))
        layer, heads = bases.layers[0], tokens.queries.shape[0] // tokens.keys.shape[0]
        keys = meter.geometry.unrotate(tokens.keys[1:2, None].double(), tokens.positions)
        near = meter.geometry.rotate(layer.gamma[1] * (keys @ (layer.key_decode[1] @ layer.key_encode[1]).double().mT), tokens.positions)
        off = meter.sizes.scaling * (tokens.keys[1].double() - near[0, 0])
        for query, place in enumerate(at.tolist()):
            largest = [(tokens.queries[heads + own, place].double() @ off[: place + 1].mT).abs().max() for own in range(heads)]
            torch.testing.assert_close(found["logits"][:, query], torch.stack(largest), atol=1e-6, rtol=1e-4)
        if rank == dim:
            assert float(found["output"].max()) < 1e-6
            continue
        assert float(found["output"].min()) > 1e-3


def row(change: float, ratio: float = 0.36, **other: Any) -> dict[str, Any]:
    base = {
        "variant": "v",
        "mode": "static",
        "rotation": "aware",
        "coefficients": "",
        "sinks": 0,
        "recent": 0,
        "rule": "rank=8",
        "gamma": "one",
    }
    return {**base, "from": 2, "to": 512, "change_percent": change, "bytes_ratio": ratio, **other}


def judged(script, **found: list[dict[str, Any]]) -> list[str]:
    return script("_subspace_verdicts").verdicts(found, 512)


def test_costs_are_held_against_the_limits_of_bytes_and_of_perplexity(script):
    ends = {"sinks": 4, "recent": 64}
    lines = judged(script, perplexity=[row(0.9), row(0.1, 0.4), row(0.4, **ends), row(0.4, 0.19, coefficients="int8", **ends)])
    assert ": held (best +0.90%" in lines[1]
    assert ": met (+0.900%" in lines[6]
    assert ": NOT met (+0.400%" in lines[7]
    assert ": met (+0.400% at 0.190" in lines[8]
    assert ": FAILED (best +1.10%" in judged(script, perplexity=[row(1.1), row(0.1, 0.4)])[1]


def test_adaptive_rows_are_compared_with_static_ones_of_the_same_ranks(script):
    late = {"from": 257}
    lines = judged(script, perplexity=[row(1.0, **late), row(1.4, mode="adaptive", **late), row(0.1, mode="adaptive")])
    assert ": FAILED (rank=8 [0+0]: +1.40% against +1.00%)" in lines[2]
    assert ": held (1 pairs)" in judged(script, perplexity=[row(1.0, **late), row(0.9, mode="adaptive", **late)])[2]


@pytest.mark.parametrize(("change", "verdict"), [(1.4, ": met (+1.400%"), (1.6, ": NOT met (+1.600%")])
def test_adaptive_rows_are_compared_with_static_ones_of_the_same_bytes(script, change, verdict):
    late = {"from": 257}
    static = [row(1.0, **late), row(0.5, 0.374, **late), row(3.0, 0.34, **late), row(0.1, 0.36)]
    adaptive = [row(change, 0.35, mode="adaptive", **late), row(0.1, 0.4, mode="adaptive", **late), row(9.0, 0.35, mode="adaptive", **late)]
    line = judged(script, perplexity=[*static, *adaptive])[11]
    assert verdict in line, "neither more bytes nor tokens of the warm-up count"
    assert "static +1.000% at 0.360" in line
    assert "not measured" in judged(script, perplexity=[*static, *adaptive])[12]


@pytest.mark.parametrize(("last", "verdict"), [(1.9, ": held"), (2.1, ": FAILED")])
def test_growth_compares_the_last_span_with_those_before(script, last, verdict):
    spans = [row(1.0, to=64), row(1.0, **{"from": 65, "to": 256}), row(last, **{"from": 257})]
    assert verdict in judged(script, perplexity=[row(1.2), *spans])[3]
    line = judged(script, perplexity=[each | {"gamma": "paper"} for each in (row(1.2), *spans)])[3]
    assert ": held" in line
    assert ("with the paper's gamma it does: v: +1.00% to +2.10%" in line) == (last > 2)


@pytest.mark.parametrize(("right", "verdict"), [(0.98, ": met"), (0.97, ": NOT met")])
def test_recall_is_held_against_that_of_the_full_cache(script, right, verdict):
    full = {"variant": "full cache", "mode": "full", "share": 1.0, "bytes_ratio": 1.0, "sinks": "", "recent": ""}
    assert verdict in judged(script, recall=[full, row(0, sinks=4, recent=64, share=right, questions=100)])[10]


@pytest.mark.parametrize(("correlation", "verdict"), [(0.6, ": held"), (0.4, ": FAILED")])
def test_bounds_predict_if_they_order_errors(script, correlation, verdict):
    rows = [{"what": what, "spearman": correlation, "above_bound": 0} for what in ("logits", "output")]
    assert verdict in judged(script, bounds=rows)[4]


def test_a_number_below_one_is_refused(script, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setattr(sys, "argv", ["eval_subspace.py", "--bytes-tokens", "0"])
    with pytest.raises(ConfigError, match="--bytes-tokens: expected at least 1"):
        script("eval_subspace").parse()
