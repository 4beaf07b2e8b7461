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


def test_a_folder_with_a_single_file_gets_its_picture(tmp_path):
    (tmp_path / "equip-cpu.csv").write_bytes((BENCHMARKS / "equip-cpu.csv").read_bytes())
    done = run_script("redraw", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "equip-cpu.png")]
    assert (tmp_path / "equip-cpu.png").read_bytes().startswith(b"\x89PNG")
