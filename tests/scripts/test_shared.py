"""What the scripts share: ratios within rounds, rows in tables and files, bars, and where the time goes."""

from __future__ import annotations

import importlib
import time

import pytest
import torch

from hf_kvcaches import GrowingCache
from hf_kvcaches.errors import ConfigError
from tests import tiny
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


def test_a_ratio_is_taken_within_rounds_over_the_baseline_with_the_lowest_median(shared):
    seconds = {"a": [2.0, 4.0, 6.0], "b": [9.0, 1.0, 3.0], "ours": [3.0, 1.0, 1.0]}
    rows = {row["side"]: row for row in shared("timing").compared(seconds, ["a", "b"])}
    assert {row["baseline"] for row in rows.values()} == {"b"}
    ours = rows["ours"]
    assert (ours["ratio_q1"], ours["ratio"], ours["ratio_q3"]) == (2.0, 3.0, 3.0), "9/3, 1/1 and 3/1"
    assert ours["total_ratio"] == 2.6, "13 seconds over 5"
    assert (ours["time_q1_ms"], ours["time_ms"], ours["time_q3_ms"]) == (1000.0, 1000.0, 2000.0)
    assert rows["b"]["ratio"] == rows["b"]["total_ratio"] == 1.0
    assert rows["a"]["ratio"] == 0.5, "the median of 4.5, 0.25 and 0.5"


def test_each_call_reads_other_numbers_until_no_cache_has_them(shared, monkeypatch):
    timing = shared("timing")
    clock = timing.Clock(CPU, small=True)
    monkeypatch.setattr(timing, "last_cache", lambda device: 100)
    assert clock.bandwidth > 0
    assert clock.layers(30, 25) == 7, "200 bytes are twice the cache"
    assert clock.layers(30, 5) == 5
    assert clock.layers(1000, 25) == 1


def test_the_share_of_the_package_is_a_part_of_the_time(shared):
    timing, model, ids = shared("timing"), tiny.llama(), tiny.ids(1, 20)
    assert timing.own_share(lambda: time.sleep(0.02)) == 0
    share = timing.own_share(lambda: model(ids, past_key_values=GrowingCache(model), use_cache=True))
    assert 0 < share < 1


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


@pytest.mark.parametrize(
    ("options", "values", "verdict"),
    [
        ({"least": 2.5}, [2.5], ": met (2.5x)"),
        ({"least": 2.5}, [2.49], ": NOT met (2.49x)"),
        ({"least": 2.5}, [float("nan")], ": NOT met (nanx)"),
        ({"most": 1.0}, [0.5, 2.0], ": NOT met (auto 0.5x, auto 2x)"),
        ({"least": 2.5, "mean": True}, [2.0, 3.2], ": met (2.53x in geometric mean, 2.00 to 3.20 in 2 cells)"),
        ({"least": 3.0}, [2.0, 8.0, 8.0, 8.0, 8.0], "6.06x in geometric mean, 2.00 to 8.00, 1 of 5 cells miss it)"),
        ({"least": 2.5}, [], ": not measured"),
    ],
)
def test_a_bar_is_met_from_its_number_on_by_all_rows_or_by_their_mean(shared, options, values, verdict):
    bar = shared("bars").Bar("as fast", {"section": "requests"}, **options)
    assert bar.verdict([a_row(ratio=value) for value in values] + [a_row(section="other", ratio=0.1)]).endswith(verdict)


def test_a_picture_has_a_panel_for_what_was_measured(shared, tmp_path):
    plot = shared("plot")
    rows = [a_row(tokens=tokens, kind=kind, ratio_q1=2.0, ratio_q3=3.0) for tokens in (10, 100) for kind in ("x", "y")]
    panels = [plot.Panel("lines", rows, "{kind}", "tokens", "ratio", log="xy"), plot.Panel("places", rows, "{side}", "{kind}", "ratio")]
    panels += [
        plot.Panel("stacked", rows[:2], "{kind}", "{side}", "ratio", stacked=True, levels=(1.0,)),
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


def test_rank_correlation_gives_equal_numbers_their_mean_rank(shared):
    spearman = shared("numbers").spearman
    assert spearman(torch.tensor([1.0, 5.0, 9.0]), torch.tensor([-3.0, 0.0, 100.0])) == pytest.approx(1)
    assert spearman(torch.tensor([1.0, 5.0, 9.0]), torch.tensor([2.0, 1.0, 0.0])) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert spearman(torch.tensor([0.0, 7.0, 7.0, 8.0]), torch.arange(4.0)) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
