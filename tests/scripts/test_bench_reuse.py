"""The benchmark of reuse at real sizes runs as a user runs it, at its smallest; its prompts and numbers are what they are said to be."""

from __future__ import annotations

import pytest
import torch

from tests.scripts.running import import_script, rows_of, run_script

TIMED = ("prefix", "moved", "aligned")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "reuse.csv"
    return path, run_script("bench_reuse", "--device", "cpu", "--threads", "1", "--quick", "--csv", path)


@pytest.fixture(scope="module")
def rows(quick) -> list[dict[str, str]]:
    return rows_of(quick[0])


@pytest.mark.full
def test_it_proves_equality_first_then_prints_a_table_for_each_part(quick):
    _, done = quick
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert out.index("gives the logits of no reuse") < out.index("\nprefix ")
    assert "\nno repeats " in out
    assert "\nnetwork " in out


@pytest.mark.full
def test_each_way_to_reuse_is_measured_in_each_back_end_bit_equal_and_rounded(rows):
    for section in TIMED:
        cells = {(row["side"], row["stored"]) for row in rows if row["section"] == section}
        peer = {("DynamicCache", "copied")} if section == "prefix" else set()
        assert cells == peer | {(side, stored) for side in ("memory", "disk") for stored in ("bit-equal", "int8")}


@pytest.mark.full
def test_efficiency_is_the_share_of_the_possible_speed_up(rows):
    for row in rows:
        if row["section"] in TIMED:
            saved, possible = float(row["saved"]), float(row["possible"])
            assert possible == pytest.approx(1 / (1 - saved), rel=1e-2)
            assert float(row["efficiency"]) == pytest.approx(float(row["ratio"]) / possible, rel=1e-2)
            assert saved > 0.5


@pytest.mark.full
def test_fetching_is_worth_it_where_a_token_comes_faster_than_it_is_computed(rows):
    network = [row for row in rows if row["section"] == "network"]
    assert {row["gbps"] for row in network} == {"1", "10", "100"}
    for row in network:
        per_second = float(row["gbps"]) * 1e9 / 8 / float(row["bytes"])
        assert float(row["faster_above"]) == pytest.approx(per_second, rel=1e-4)


def test_prompts_share_with_the_first_what_they_are_said_to():
    cells = import_script("_reuse_cells")
    first = torch.randint(1, 500, (1, 1000), generator=torch.Generator().manual_seed(0))
    for ids in cells.begun_alike(first, 2, 500):
        assert torch.equal(ids[:, :900], first[:, :900])
        assert (ids != first).sum() > 90
    for ids in cells.changed_words(first, 3, 500):
        assert (ids != first).sum() == cells.CHANGES
    edges = cells.pages_of(1000)
    pages = {tuple(first[0, start:stop].tolist()) for start, stop in edges}
    for ids in cells.moved_pages(first, 3, 500):
        assert {tuple(ids[0, start:stop].tolist()) for start, stop in edges} == pages
        assert not any(torch.equal(ids[:, start:stop], first[:, start:stop]) for start, stop in edges[:1])
    assert edges[0][0] > 0
    assert edges[-1][1] < 1000
