"""verify, eval and bench measure caches beside a DynamicCache."""

import csv
import json

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import EquipCache, GrowingCache, verify
from hf_kvcaches.cli import bench
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.runner import ModelRunner
from hf_kvcaches.evaluate.verify import verify_text
from tests import testbed, tiny
from tests.cli.running import BASE, run

PROSE = testbed.FOLDER / "prose.txt"


def rows_of(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_verify_prints_the_report(capsys):
    lengths = ("--context", 40, "--max-new-tokens", 4)
    done = run(capsys, "verify", "--model", BASE, "--cache", "EquipCache('streaming', budget=16)", "--file", PROSE, *lengths)
    assert done.code == 0, done.err
    model, tokenizer = testbed.load()
    ids = tokenizer(PROSE.read_text(), return_tensors="pt", verbose=False)["input_ids"][:, :40]
    report = verify(model, lambda: EquipCache(model, "streaming", budget=16), ids, max_new_tokens=4)
    assert done.out.startswith("EquipCache('streaming', budget=16): 40 tokens and 4 steps behind them\n")
    assert str(report).splitlines()[-2:] == done.out.splitlines()[5:7]


@pytest.mark.parametrize(("cache", "code"), [("GrowingCache", 0), ("EquipCache('streaming', budget=8, sinks=0)", 1)])
def test_a_text_that_must_be_the_same_ends_with_1_where_it_differs(cache, code, capsys):
    done = run(capsys, "verify", "--model", BASE, "--cache", cache, "--file", PROSE, "--context", 64, "--max-new-tokens", 12, "--exact")
    assert done.code == code
    assert ("The text differs from step" in done.out) == bool(code)


def test_eval_gives_each_cache_its_loss_on_the_following_tokens(capsys, tmp_path):
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps(testbed.held_out()[start : start + 900]) for start in (0, 3000)))
    caches = ("--cache", "GrowingCache", "--cache", "EquipCache('keydiff', budget=16)")
    lengths = ("--context", 48, "--following", 8)
    files = ("--texts", tmp_path / "some.jsonl", "--csv", tmp_path / "found" / "all.csv")
    done = run(capsys, "eval", "--model", BASE, *caches, *lengths, *files)
    assert done.code == 0, done.err
    rows = rows_of(tmp_path / "found" / "all.csv")
    assert [(row["cache"], row["text"], row["tokens"]) for row in rows] == [
        (cache, text, "56") for text in "01" for cache in ("GrowingCache()", "EquipCache('keydiff', budget=16)")
    ]
    growing, pruned = rows[0], rows[1]
    assert float(growing["mean_kl"]) == 0
    assert float(pruned["mean_kl"]) > 0
    assert float(pruned["bytes_per_token"]) < float(growing["bytes_per_token"]) / 2
    model, tokenizer = testbed.load()
    ids = tokenizer(testbed.held_out()[:900], verbose=False)["input_ids"][:56]
    report = verify_text(model, {"": lambda: EquipCache(model, "keydiff", budget=16)}, torch.tensor([ids[:48]]), torch.tensor([ids[48:]]))[
        ""
    ]
    assert float(pruned["mean_kl"]) == report.mean_kl
    assert report.steps == 8
    assert "EquipCache('keydiff', budget=16)" in done.out


def test_texts_that_are_too_short_are_left_out_and_nothing_else_is_refused(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("The day was cold.")
    done = run(capsys, "eval", "--model", BASE, "--cache", "GrowingCache", "--texts", tmp_path / "a.txt")
    assert done.code == 2
    assert "--texts: expected a text of 16 tokens and the 64 that follow, got '1 texts of" in done.err


def test_the_text_is_what_both_caches_are_fed():
    model, ids = tiny.llama(), tiny.ids(2, 12)
    reports = verify_text(model, {name: lambda: GrowingCache(model) for name in "ab"}, ids[:, :8], ids[:, 8:])
    assert list(reports) == ["a", "b"]
    for report in reports.values():
        assert report.tokens == tuple(map(tuple, ids[:, 8:].tolist()))
        assert report.mean_kl == 0
        assert report.agreement == 1
    with torch.no_grad():
        logits = model(ids).logits[:, 7:11]
    steps, _ = ModelRunner(model, ids[:, :8]).steps(DynamicCache(config=model.config), 4, ids[:, 8:])
    assert torch.allclose(torch.stack([step.logits for step in steps], 1), logits, atol=1e-5)


def test_following_tokens_that_do_not_fit_are_refused():
    model, ids = tiny.llama(), tiny.ids(2, 12)
    for following, message in ((ids[:1], "as many rows as inputs"), (ids[0], "token ids"), ([[3]], "token ids"), (ids[:, :0], "token ids")):
        with pytest.raises(ConfigError, match=f"following: expected {message}"):
            verify_text(model, {"": lambda: GrowingCache(model)}, ids, following)


def test_bench_writes_a_speed_table(capsys, tmp_path):
    tiny.llama().config.save_pretrained(tmp_path)
    lengths = ("--context", 12, "--batch", 2, "--steps", 3, "--rounds", 2)
    how = ("--random", "--dtype", "bfloat16", "--device", "cpu", "--threads", 1, "--csv", tmp_path / "a.csv")
    done = run(
        capsys, "bench", "--model", tmp_path, "--cache", "GrowingCache", "--cache", "EquipCache('keydiff', budget=8)", *lengths, *how
    )
    assert done.code == 0, done.err
    rows = rows_of(tmp_path / "a.csv")
    assert tuple(rows[0]) == bench.SPEED_COLUMNS
    assert [row["cache"] for row in rows] == ["DynamicCache", "GrowingCache", "EquipCache"]
    assert [row["setting"] for row in rows] == ["", "", "'keydiff', budget=8"]
    shared = {"device": "cpu", "threads": "1", "dtype": "bfloat16", "hidden": "32", "layers": "4", "heads": "4", "kv_heads": "2"}
    for row in rows:
        assert {name: row[name] for name in shared} == shared
        assert (row["batch"], row["context"]) == ("2", "12")
        assert float(row["prefill_s"]) > 0
        assert float(row["decode_ms"]) > 0
    assert rows[0]["decode_ratio"] == rows[0]["prefill_ratio"] == "1.0"
    assert "EquipCache('keydiff', budget=8)" in done.out


def test_bench_times_nothing_where_logits_are_not_finite(capsys, tmp_path, monkeypatch):
    model = tiny.llama()
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    monkeypatch.setattr(bench, "load", lambda *_: (model, None))
    done = run(capsys, "bench", "--model", tmp_path, "--cache", "GrowingCache", "--context", 5, "--steps", 2, "--rounds", 2)
    assert done.code == 2
    assert "not finite" in done.err


def test_bench_wants_caches_that_differ(capsys, tmp_path):
    tiny.llama().config.save_pretrained(tmp_path)
    done = run(capsys, "bench", "--model", tmp_path, "--random", "--cache", "GrowingCache", "--cache", "GrowingCache()", "--context", 5)
    assert "--cache: expected caches that differ" in done.err


def test_eval_asks_a_suite_and_goes_on_where_it_was_cut_off(capsys, tmp_path):
    caches = ("--cache", "GrowingCache", "--cache", "EquipCache('streaming', budget=32)")
    options = (
        "--suite",
        "needles",
        "pairs",
        "--context",
        120,
        "--limit",
        1,
        "--state",
        tmp_path / "rows.jsonl",
        "--csv",
        tmp_path / "a.csv",
    )
    done = run(capsys, "eval", "--model", BASE, *caches, *options)
    assert done.code == 0, done.err
    rows = rows_of(tmp_path / "a.csv")
    tasks = [f"needles {kind} {count}" for kind in ("digits", "words") for count in (1, 4)]
    assert [row["task"] for row in rows if row["cache"] == "GrowingCache()"] == [*tasks, "pairs words", "pairs paragraph", "pairs pages"]
    by_name = {(row["task"], row["cache"]): row for row in rows}
    assert abs(float(by_name["needles words 4", "GrowingCache()"]["answer_loss"])) < 1e-5
    assert abs(float(by_name["needles words 4", "EquipCache('streaming', budget=32)"]["answer_loss"])) > 1e-3
    assert float(by_name["pairs words", "GrowingCache()"]["kl"]) == 0
    kept = (tmp_path / "rows.jsonl").read_text()
    again = run(capsys, "eval", "--model", BASE, *caches, *options)
    assert again.out == done.out
    assert (tmp_path / "rows.jsonl").read_text() == kept


def test_eval_wants_texts_or_a_suite(capsys):
    done = run(capsys, "eval", "--model", BASE, "--cache", "GrowingCache")
    assert done.code == 2
    assert "--texts: expected files of text, or --suite" in done.err
