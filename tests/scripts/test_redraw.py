"""Pictures are drawn again from the files that are in the repository."""

from __future__ import annotations

import pytest

from tests.scripts.running import ROOT, import_script, run_script

BENCHMARKS = ROOT / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def redraw():
    return import_script("redraw")


def test_every_picture_of_the_repository_can_be_drawn_again(redraw):
    drawn = {f"{name}.png" for name in redraw.PICTURES}
    assert {path.name for path in BENCHMARKS.glob("*.png")} <= drawn


def test_every_file_has_panels_of_at_most_eight_series(redraw):
    plot = import_script("shared.plot")
    for name in redraw.PICTURES:
        rows = redraw.rows_of(name, BENCHMARKS)
        panels = redraw.PICTURES[name][0](rows)
        drawn = [plot.series_of(panel, values) for panel in panels if (values := panel.with_values())]
        assert drawn, name
        assert all(1 <= len(series) <= len(plot.STYLES) for series in drawn), name


def test_rows_of_another_computer_are_drawn_only_where_a_section_has_no_later_ones(redraw):
    where = {"threads": 1, "torch": "2", "transformers": "5"}
    rows = [
        {"hardware": hardware, **where, "section": section, "value": value}
        for value, (hardware, section) in enumerate([("old", "a"), ("old", "b"), ("new", "a")])
    ]
    assert [row["value"] for row in redraw.of_last_computers(rows)] == [1, 2]


def test_a_folder_with_a_single_file_gets_its_picture(tmp_path):
    (tmp_path / "growing-cpu.csv").write_bytes((BENCHMARKS / "growing-cpu.csv").read_bytes())
    done = run_script("redraw", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "growing-cpu.png")]
    assert (tmp_path / "growing-cpu.png").read_bytes().startswith(b"\x89PNG")
