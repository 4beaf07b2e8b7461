"""What the scripts share: sides in turns, rows in tables and files, and pictures."""

from __future__ import annotations

import importlib

import pytest
import torch

from hf_kvcaches.errors import ConfigError
from tests.scripts.running import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def shared(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return lambda name: importlib.import_module(f"shared.{name}")


def test_sides_take_turns_another_one_is_first_each_round_and_warm_up_rounds_are_dropped(shared):
    log = []
    works = {name: lambda number, name=name: log.append((name, number)) or len(log) for name in "ab"}
    results = shared("timing").in_turns(works, 2, warm_up=1)
    assert log == [("b", 0), ("a", 0), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert results == {"a": [3, 6], "b": [4, 5]}


def test_a_table_has_a_column_for_each_heading_that_some_row_fills(shared):
    text = shared("results").show([{"a": "x", "b": 1.0}, {"a": "long"}], {"name": "{a}", "b": "{b:.2f}", "c": "{c}"})
    assert text.splitlines() == ["name     b", "----  ----", "x     1.00", "long"]


def a_row(**columns: object) -> dict[str, object]:
    return {"section": "requests", "side": "auto", "count": 9, "ratio": 2.5, "unit": "x"} | columns


def test_a_benchmark_goes_on_with_rows_of_this_computer_and_leaves_those_of_others_in_its_file(shared, tmp_path):
    path, names, results = tmp_path / "new" / "bench.csv", list(a_row()), shared("results")
    rows = [a_row(), a_row(section="larger", ratio=0.5)]
    results.Results(path, names, CPU).add(rows)
    again = results.Results(path, names, CPU)
    assert again.rows == rows
    assert again.has(section="larger", count=9)
    assert not again.has(section="larger", count=8)
    again.drop(["requests"])
    again.add([a_row(ratio=3.0)])
    assert results.Results(path, names, CPU).rows == [rows[1], a_row(ratio=3.0)]
    path.write_text(path.read_text().replace(f",{torch.__version__},", ",2.0,"))
    other = results.Results(path, names, CPU)
    assert other.rows == []
    other.add([a_row()])
    assert len(path.read_text().splitlines()) == 4
    path.write_text("a,b\n")
    with pytest.raises(ConfigError, match="a file that this script wrote"):
        results.Results(path, names, CPU)
    assert path.read_text() == "a,b\n"


def test_a_picture_has_a_panel_for_what_was_measured(shared, tmp_path):
    plot = shared("plot")
    rows = [a_row(tokens=tokens, kind=kind, ratio_q1=2.0, ratio_q3=3.0) for tokens in (10, 100) for kind in ("x", "y")]
    panels = [plot.Panel("lines", rows, "{kind}", "tokens", "ratio", log="xy"), plot.Panel("places", rows, "{side}", "{kind}", "ratio")]
    panels += [
        plot.Panel("stacked", rows[:2], "{kind}", "{side}", "ratio", stacked=True),
        plot.Panel("none", [], "", "", "z"),
    ]
    plot.draw(tmp_path / "new" / "some.png", plot.title_of(CPU, "some"), panels)
    assert (tmp_path / "new" / "some.png").read_bytes().startswith(b"\x89PNG")


def test_a_panel_with_more_series_than_there_are_styles_is_refused_before_anything_is_written(shared, tmp_path):
    plot = shared("plot")
    rows = [a_row(kind=str(number)) for number in range(len(plot.STYLES) + 1)]
    with pytest.raises(ConfigError, match="panel 'many': expected at most 8 series, got '9: 0, 1"):
        plot.draw(tmp_path / "many.png", "many", [plot.Panel("many", rows, "{kind}", "{side}", "ratio")])
    assert list(tmp_path.iterdir()) == []


def test_colours_and_markers_of_series_differ(shared):
    styles = shared("plot").STYLES
    assert len({colour for colour, _ in styles}) == len({marker for _, marker in styles}) == len(styles) == 8


def test_legends_lie_beside_the_axes_and_no_panel_is_empty(shared, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    plot, figures = shared("plot"), []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: figures.append(figure))
    rows = [a_row(tokens=tokens, kind=f"{kind}") for tokens in (10, 100) for kind in range(6)]
    many = [row | {"kind": f"other {row['kind']}"} for row in rows]
    for second in (rows, many):
        panels = [plot.Panel("one", rows, "{kind}", "tokens", "ratio"), plot.Panel("two", second, "{kind}", "tokens", "ratio")]
        plot.draw(tmp_path / "some.png", "some", [*panels, plot.Panel("empty", [a_row(ratio="")], "{kind}", "tokens", "ratio")])
    for figure in figures:
        figure.draw_without_rendering()
        boxes = [axis.get_window_extent() for axis in figure.axes]
        legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes if axis.get_legend())]
        assert len(boxes) == 2
        assert all(axis.has_data() for axis in figure.axes)
        for legend in legends:
            extent = legend.get_window_extent()
            assert not any(extent.overlaps(box.shrunk(0.99, 0.99)) for box in boxes)
            assert figure.bbox.x0 <= extent.x0
            assert extent.x1 <= figure.bbox.x1
    assert [len(figure.legends) for figure in figures] == [1, 0], "eight names have one legend, twelve one for each panel"
