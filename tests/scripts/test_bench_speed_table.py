"""The speed table: its rows, how files are renewed, and what a reader sees."""

from __future__ import annotations

import pytest

from tests.scripts.running import ROOT, import_script, rows_of, run_script


@pytest.fixture(scope="module")
def report():
    return import_script("bench_speed_table")


def row(report, **columns: object) -> dict[str, str]:
    values = {
        "hardware": "Abacus",
        "device": "cpu",
        "threads": 1,
        "dtype": "float32",
        "cache": "GrowingCache",
        "setting": "",
        "batch": 1,
        "context": 2048,
    }
    return report.as_text(values | {"prefill_s": 2.0, "decode_ms": 50.0, "prefill_ratio": 1.0, "decode_ratio": 1.25, "mib": 64} | columns)


def test_the_packaged_table_is_that_of_the_documents_and_has_the_columns_that_readers_know(report):
    packaged = rows_of(ROOT / report.PACKAGED)
    committed = [row for path in sorted((ROOT / report.BENCHMARKS).glob("speed-*.csv")) for row in rows_of(path)]
    assert packaged == committed
    assert list(packaged[0]) == report.ROW
    assert {row["cache"] for row in packaged} == {"DynamicCache", *(side.cache for side in import_script("_speed_sides").SIDES)}


def test_the_document_shows_the_committed_rows(report):
    tables = report.tables_of(rows_of(ROOT / report.PACKAGED))
    assert tables in (ROOT / report.BENCHMARKS / "speed.md").read_text(encoding="utf-8")


def test_new_rows_replace_old_ones_of_the_same_cell_and_others_stay_in_the_order_of_cells(report):
    old = [row(report, context=8192), row(report, mib=1), row(report, dtype="bfloat16")]
    new = [row(report, mib=2), row(report, cache="DynamicCache")]
    merged = report.merged(old, new)
    assert [(each["dtype"], each["context"], each["cache"], each["mib"]) for each in merged] == [
        ("float32", "2048", "DynamicCache", "64"),
        ("float32", "2048", "GrowingCache", "2"),
        ("float32", "8192", "GrowingCache", "64"),
        ("bfloat16", "2048", "GrowingCache", "64"),
    ]


def test_the_full_cache_has_medians_of_what_it_took_beside_the_others(report):
    sides = [
        {"dtype": "float32", "batch": 1, "context": 512, "layers": 2, "kv_heads": 2, "head_dim": 64}
        | {"base_prefill_s": seconds, "base_decode_ms": 10 * seconds}
        for seconds in (1.0, 9.0, 2.0)
    ]
    (full,) = report.full_rows(sides)
    assert (full["prefill_s"], full["decode_ms"], full["prefill_ratio"]) == (2.0, 20.0, 1.0)
    assert full["mib"] == 1.0, "2 x 2 layers x 2 heads x 64 x 512 tokens x 4 bytes"


def test_cells_that_were_not_measured_are_dashes(report):
    table = report.tables_of([row(report, cache="DynamicCache"), row(report), row(report, cache="EquipCache", setting="budget=8", batch=8)])
    assert "| `DynamicCache` | 2.00 s, 50 ms, 64 MiB | - |" in table
    assert "| `GrowingCache` | 1.00x, 1.25x, 64 MiB | - |" in table
    assert "| `EquipCache(budget=8)` | - | 1.00x, 1.25x, 64 MiB |" in table


def test_a_cell_that_is_none_is_named(report):
    done = run_script("bench_speed_table", "--cells", "8by2048")
    assert done.returncode == 1
    assert "--cells: expected a batch and a number of tokens such as 8x2048, got '8by2048'" in done.stderr


@pytest.mark.full
def test_it_measures_all_caches_goes_on_where_it_was_and_renews_its_files(report, tmp_path):
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    document = tmp_path / "docs" / "benchmarks" / "speed.md"
    document.write_text("before\n" + "\n".join(report.MARKERS) + "\nafter\n", encoding="utf-8")
    options = ("--quick", "--state", tmp_path / "state", "--root", tmp_path)
    done = run_script("bench_speed_table", *options)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / report.PACKAGED)
    sides = import_script("_speed_sides").SIDES
    assert len(rows) == 2 * (len(sides) + 1) - 1, "warm starts have one row"
    assert all(float(row[name]) > 0 for row in rows for name in ("prefill_s", "decode_ms", "prefill_ratio", "decode_ratio"))
    assert document.read_text(encoding="utf-8").startswith("before\n<!--")
    assert "| `GrowingCache` |" in document.read_text(encoding="utf-8")
    state = tmp_path / "state" / "rows-cpu.csv"
    before = state.read_bytes()
    assert run_script("bench_speed_table", *options).returncode == 0
    assert state.read_bytes() == before
