"""The benchmarks run as a user runs them, at their smallest; correctness comes first, and a file goes on where it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvcaches import ConfigError
from tests.scripts.running import ROOT, import_script, rows_of, run_script

bench, results, sides, cells = map(import_script, ("bench", "shared.results", "shared.sides", "shared.equip_cells"))
MACHINE = {"hardware": "Abacus", "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bench") / "new"
    return folder, run_script("bench", "--device", "cpu", "--threads", 1, "--quick", "--csv", folder)


@pytest.mark.full
def test_every_cache_has_a_row_of_prompts_and_steps_in_each_cell(quick: Any) -> None:
    folder, done = quick
    assert done.returncode == 0, done.stderr
    rows = rows_of(folder / "speed-cpu.csv")
    assert tuple(rows[0]) == bench.SPEED_COLUMNS
    assert len(rows) == 2 * (len(sides.SIDES) + 1) - 1, "warm starts have one row"
    assert all(float(row[name]) > 0 for row in rows for name in ("prefill_s", "decode_ms", "prefill_ratio", "decode_ratio", "mib"))


@pytest.mark.full
def test_each_way_to_reuse_is_measured_in_each_back_end_bit_equal_and_rounded(quick: Any) -> None:
    rows = rows_of(quick[0] / "reuse-speed-cpu.csv")
    for section in sides.PROMPTS:
        own = [row for row in rows if row["section"] == section]
        peer = {("DynamicCache", "copied")} if section == "prefix" else set()
        assert {(row["side"], row["stored"]) for row in own} == peer | {(s, k) for s in ("memory", "disk") for k in ("bit-equal", "int8")}
        assert all(float(row["efficiency"]) == pytest.approx(float(row["ratio"]) / float(row["possible"]), rel=1e-2) for row in own)
        assert all(float(row["saved"]) > 0.5 for row in own)
    assert {row["side"] for row in rows if row["section"] == "no repeats"} == {"no reuse", "exact", "approximate"}


@pytest.mark.full
def test_published_ways_to_prune_agree_with_equip_cache_before_they_are_timed(quick: Any) -> None:
    rows = rows_of(quick[0] / "equip-cpu.csv")
    assert {row["measure"] for row in rows} == {"decode", "flat"}
    counts = {("streaming", "compact"): 7, ("streaming", "original"): 5, ("h2o", "compact"): 5, ("future", "compact"): 3}
    for (policy, positions), count in counts.items():
        cell = {"measure": "decode", "policy": policy, "positions": positions}
        names = [row["side"] for row in rows if cell.items() <= row.items()]
        assert len(names) == len(set(names)) == count, (policy, positions)
    errors = [float(row["error"]) for row in rows if row["error"]]
    assert len(errors) == len(cells.POLICIES)
    assert max(errors) <= cells.TOLERANCE["float32"]


@pytest.mark.full
def test_what_a_file_has_is_not_measured_again(quick: Any, tmp_path: Any) -> None:
    path = tmp_path / "speed-cpu.csv"
    lines = (quick[0] / "speed-cpu.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if ",GrowingCache," not in line), encoding="utf-8")
    done = run_script("bench", "speed", "--device", "cpu", "--threads", 1, "--quick", "--csv", tmp_path)
    assert done.returncode == 0, done.stderr
    found = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(found) == len(lines)
    kept = {line for line in lines if ",GrowingCache," not in line and ",DynamicCache," not in line}
    assert kept <= set(found)


def test_logits_that_differ_end_a_benchmark() -> None:
    logits = torch.zeros(1, 5)
    sides.check(logits, logits + 1e-5, "float32", "a")
    with pytest.raises(SystemExit, match=r"a: logits differ by 0\.1"):
        sides.check(logits, logits + 0.1, "float32", "a")
    with pytest.raises(SystemExit, match="a: logits are not finite"):
        sides.check(logits / 0, None, "float32", "a")


def test_a_cell_that_is_none_is_named() -> None:
    done = run_script("bench", "--cells", "8by2048")
    assert done.returncode == 1
    assert "--cells: expected a batch and a number of tokens such as 8x2048, got '8by2048'" in done.stderr


def test_prompts_share_with_the_first_what_they_are_said_to() -> None:
    first = torch.randint(1, 500, (1, 1000), generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(ids[:, :900], first[:, :900]) and (ids != first).sum() > 90 for ids in sides.begun_alike(first, 2, 500))
    assert all((ids != first).sum() == sides.CHANGES for ids in sides.changed_words(first, 3, 500))
    edges = sides.pages_of(1000)
    pages = {tuple(first[0, start:stop].tolist()) for start, stop in edges}
    for ids in sides.moved_pages(first, 3, 500):
        assert {tuple(ids[0, start:stop].tolist()) for start, stop in edges} == pages
        assert not torch.equal(ids[:, slice(*edges[0])], first[:, slice(*edges[0])])


def test_rows_of_a_point_replace_those_of_this_machine_and_others_stay(tmp_path: Any) -> None:
    path, columns = tmp_path / "new" / "a.csv", ("hardware", "device", "threads", "torch", "side", "count", "ratio")

    def at(torch_version: str, **machine: Any) -> Any:
        return results.Results(path, columns, {**MACHINE, "torch": torch_version, **machine})

    at("v1").add([{"ratio": 2.5}], side="a", count=1)
    at("v1", hardware="Loom").add([{"ratio": 1.5}], side="a", count=1)
    assert at("v1").has(side="a", count=1)
    assert not at("v2").has(side="a", count=1), "measured with another version"
    at("v2").add([{"ratio": 3.0}], side="a", count=1)
    rows = [(row["hardware"], row["torch"], row["ratio"]) for row in results.read_csv(path)]
    assert rows == [("Loom", "v1", 1.5), ("Abacus", "v2", 3.0)]
    path.write_text("a,b\n")
    with pytest.raises(ConfigError, match="a file that this script wrote"):
        at("v2")


def test_the_packaged_table_is_that_of_the_documents() -> None:
    packaged = rows_of(ROOT / "hf_kvcaches" / "cli" / "speed.csv")
    assert packaged == [row for path in sorted((ROOT / "docs" / "benchmarks").glob("speed-*.csv")) for row in rows_of(path)]
    assert {row["cache"] for row in packaged} == {"DynamicCache", *(side.cache for side in sides.SIDES)}
