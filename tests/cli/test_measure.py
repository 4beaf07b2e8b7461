"""verify, eval and bench measure caches beside a DynamicCache; `--json` prints one document on stdout, and nothing else."""

import json

import pytest
import torch

from hf_kvcaches import EquipCache, verify
from hf_kvcaches.cli import measure
from hf_kvcaches.evaluate.verify import verify_text
from tests import testbed, tiny
from tests.cli.running import BASE, run, succeed
from tests.scripts.running import rows_of

PROSE = testbed.FOLDER / "prose.txt"
PRUNED = "EquipCache('streaming', budget=16)"


def texts(folder):
    path = folder / "some.jsonl"
    path.write_text("\n".join(json.dumps(testbed.held_out()[start : start + 900]) for start in (0, 3000)))
    return path


def test_verify_prints_the_report_and_has_it_as_json(capsys):
    options = ("verify", "--model", BASE, "--cache", PRUNED, "--file", PROSE, "--context", 40, "--max-new-tokens", 4)
    done = succeed(capsys, *options)
    model, tokenizer = testbed.load()
    ids = tokenizer(PROSE.read_text(), return_tensors="pt", verbose=False)["input_ids"][:, :40]
    report = verify(model, lambda: EquipCache(model, "streaming", budget=16), ids, max_new_tokens=4)
    assert done.out.startswith(f"{PRUNED}: 40 tokens and 4 steps behind them\n")
    assert str(report).splitlines()[-2:] == done.out.splitlines()[5:7]
    found = run(capsys, *options, "--json").document
    assert (found["cache"], found["prompt_tokens"], found["steps"]) == (PRUNED, 40, 4)
    assert found["kl"] == list(report.kl)
    assert found["seconds"]["prefill"] > 0
    assert found["environment"]["device"] == "cpu"


@pytest.mark.parametrize(("cache", "code"), [("GrowingCache", 0), ("EquipCache('streaming', budget=8, sinks=0)", 1)])
def test_a_text_that_must_be_the_same_ends_with_1_where_it_differs(cache, code, capsys):
    options = ("verify", "--model", BASE, "--cache", cache, "--file", PROSE, "--context", 64, "--max-new-tokens", 12, "--exact")
    done, as_json = run(capsys, *options), run(capsys, *options, "--json")
    assert done.code == as_json.code == code
    assert ("The text differs from step" in done.out) == ("The text differs from step" in as_json.err) == bool(code)
    assert (as_json.document["first_divergence"] is not None) == bool(code)


def test_eval_gives_each_cache_its_loss_on_the_following_tokens(capsys, tmp_path):
    caches = ("--cache", "GrowingCache", "--cache", "EquipCache('keydiff', budget=16)", "--cache", "GrowingCache()")
    options = (*caches, "--context", 48, "--following", 8, "--texts", texts(tmp_path), "--csv", tmp_path / "found" / "all.csv")
    done = succeed(capsys, "eval", "--model", BASE, *options, "--json")
    rows = rows_of(tmp_path / "found" / "all.csv")
    assert [(row["cache"], row["text"], row["tokens"]) for row in rows] == [
        (cache, text, "56") for text in "01" for cache in ("GrowingCache()", "EquipCache('keydiff', budget=16)")
    ]
    growing, pruned = rows[0], rows[1]
    assert float(growing["mean_kl"]) == 0
    assert float(pruned["mean_kl"]) > 0
    assert float(pruned["bytes_per_token"]) < float(growing["bytes_per_token"]) / 2
    model, tokenizer = testbed.load()
    ids = torch.tensor([tokenizer(testbed.held_out()[:900], verbose=False)["input_ids"][:56]])
    report = verify_text(model, {"": lambda: EquipCache(model, "keydiff", budget=16)}, ids[:, :48], ids[:, 48:])[""]
    assert float(pruned["mean_kl"]) == report.mean_kl
    assert [row["mean_kl"] for row in done.document["rows"]] == [float(row["mean_kl"]) for row in rows]
    assert done.document["caches"][1]["mean_kl"] == pytest.approx((float(rows[1]["mean_kl"]) + float(rows[3]["mean_kl"])) / 2)


def test_texts_that_are_too_short_are_left_out_and_nothing_else_is_refused(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("The day was cold.")
    done = run(capsys, "eval", "--model", BASE, "--cache", "GrowingCache", "--texts", tmp_path / "a.txt")
    assert done.code == 2
    assert "--texts: expected a text of 16 tokens and the 64 that follow, got '1 texts of" in done.err


def test_eval_asks_a_suite_and_goes_on_where_it_was_cut_off(capsys, tmp_path):
    pruned = "EquipCache('streaming', budget=32)"
    files = ("--state", tmp_path / "rows.jsonl", "--csv", tmp_path / "a.csv")
    options = ("--cache", "GrowingCache", "--cache", pruned, "--suite", "needles", "pairs", "--context", 120, "--limit", 1, *files)
    done = succeed(capsys, "eval", "--model", BASE, *options)
    rows = rows_of(tmp_path / "a.csv")
    tasks = [f"needles {kind} {count}" for kind in ("digits", "words") for count in (1, 4)]
    assert [row["task"] for row in rows if row["cache"] == "GrowingCache()"] == [*tasks, "pairs words", "pairs paragraph", "pairs pages"]
    by_name = {(row["task"], row["cache"]): row for row in rows}
    assert abs(float(by_name["needles words 4", "GrowingCache()"]["answer_loss"])) < 1e-5
    assert abs(float(by_name["needles words 4", pruned]["answer_loss"])) > 1e-3
    assert float(by_name["pairs words", "GrowingCache()"]["kl"]) == 0
    assert ("needles words 4", "full cache") in by_name
    kept = (tmp_path / "rows.jsonl").read_text()
    assert run(capsys, "eval", "--model", BASE, *options).out == done.out
    assert (tmp_path / "rows.jsonl").read_text() == kept
    found = run(capsys, "eval", "--model", BASE, *options, "--json").document
    assert [(row["task"], row["cache"]) for row in found["caches"]] == list(by_name)


def test_bench_writes_a_speed_table(capsys, tmp_path):
    tiny.llama().config.save_pretrained(tmp_path)
    lengths = ("--context", 12, "--batch", 2, "--steps", 3, "--rounds", 2)
    how = ("--random", "--dtype", "bfloat16", "--device", "cpu", "--threads", 1, "--csv", tmp_path / "a.csv", *lengths)
    pruned = "EquipCache('keydiff', budget=8)"
    done = succeed(capsys, "bench", "--model", tmp_path, "--cache", "GrowingCache", "--cache", pruned, *how)
    assert pruned in done.out
    rows = rows_of(tmp_path / "a.csv")
    assert [row["cache"] for row in rows] == ["DynamicCache", "GrowingCache", "EquipCache"]
    assert [row["setting"] for row in rows] == ["", "", "'keydiff', budget=8"]
    shared = {"device": "cpu", "threads": "1", "dtype": "bfloat16", "hidden": "32", "layers": "4", "heads": "4", "kv_heads": "2"}
    for row in rows:
        assert (shared | {"batch": "2", "context": "12"}).items() <= row.items()
        assert float(row["prefill_s"]) > 0
        assert float(row["decode_ms"]) > 0
    assert rows[0]["decode_ratio"] == rows[0]["prefill_ratio"] == "1.0"
    assert run(capsys, "recommend", "--model", tmp_path, "--speed", tmp_path / "a.csv").code == 0
    found = run(capsys, "bench", "--model", tmp_path, "--cache", "GrowingCache", *how, "--json").document
    assert [row["cache"] for row in found["caches"]] == ["DynamicCache", "GrowingCache"]
    assert found["environment"]["threads"] == 1


def test_bench_times_nothing_where_logits_are_not_finite(capsys, tmp_path, monkeypatch):
    model = tiny.llama()
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    monkeypatch.setattr(measure, "load", lambda *_: (model, None))
    done = run(capsys, "bench", "--model", tmp_path, "--cache", "GrowingCache", "--context", 5, "--steps", 2, "--rounds", 2)
    assert done.code == 2
    assert "not finite" in done.err
