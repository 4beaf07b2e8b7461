"""What a decode step and a prompt cost beside the arithmetic stays within bars, and is counted as it should be."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from tests.scripts.running import import_script, rows_of, run_script

script = import_script("step_cost")


class Bar(NamedTuple):
    """The most that a step may cost, in a batch of one and of three; launches and syncs are those over DynamicCache."""

    calls: float
    files: int
    launches: float
    syncs: int


# The targets are in comments; a number that is above its target is today's.
STEPS = {
    "GrowingCache": Bar(9, 4, 0, 0),
    "SegmentReuseCache, no hit": Bar(20.5, 12, 1, 0),  # 10, 6, 1, 0
    "SegmentReuseCache, hit": Bar(20.5, 12, 1, 0),  # 10, 6, 1, 0
    "WarmStartCache, no hit": Bar(23, 14, 1, 0),  # 10, 6, 1, 0
    "TranslatedCache": Bar(22, 12, 1, 0),  # 10, 6, 1, 0
    "EquipCache streaming": Bar(177, 22, 47, 3),  # 40 calls in 8 files, and no sync
    "EquipCache compactor, original": Bar(148, 23, 26, 7),
    "SubspaceCache": Bar(166, 21, 190, 17),
}
# Of a prompt of which nothing is stored: launches a layer and syncs over DynamicCache.
PROMPTS = {
    "GrowingCache": (3, 1),
    "SegmentReuseCache, no hit": (7, 9),  # no sync
    "WarmStartCache, no hit": (18, 12),  # no sync
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return script.measure(list(STEPS))


@pytest.mark.parametrize("cache", STEPS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_step_costs_no_more_than_its_bar(rows: list[dict[str, Any]], cache: str, batch: int) -> None:
    [row] = [row for row in rows if (row["cache"], row["batch"], row["phase"]) == (cache, batch, "step")]
    assert all(row[name] <= most for name, most in STEPS[cache]._asdict().items()), row


@pytest.mark.parametrize("cache", PROMPTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_prompt_of_which_nothing_is_stored_costs_no_more_than_its_bar(rows: list[dict[str, Any]], cache: str, batch: int) -> None:
    [row] = [row for row in rows if (row["cache"], row["batch"], row["phase"]) == (cache, batch, "prompt")]
    launches, syncs = PROMPTS[cache]
    assert row["launches"] <= launches, row
    assert row["syncs"] <= syncs, row


def counted(work: Any) -> tuple[int, int]:
    count = script.Count()
    with script.Operations(count):
        work()
    return count.launches, count.syncs


X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("work", "launches", "syncs"),
    [
        (lambda: X.T[0].view(-1).unsqueeze(0).expand(4, -1), 0, 0),
        (lambda: torch.empty(3), 0, 0),
        (lambda: X + 1, 1, 0),
        (lambda: X.clone().add_(1), 2, 0),
        (lambda: X.sum().item(), 1, 1),
        (lambda: bool(X[0, 0]), 0, 1),
        (lambda: torch.equal(X, X), 1, 1),
        (lambda: X[X > 1], 2, 1),
        (lambda: X[torch.tensor([0, 1])], 1, 0),
        (lambda: X.nonzero(), 1, 1),
    ],
)
def test_operations_are_launches_unless_they_are_views_and_syncs_where_python_waits(work: Any, launches: int, syncs: int) -> None:
    assert counted(work) == (launches, syncs)


def test_functions_of_the_package_are_counted_and_copies_to_the_host_are_syncs() -> None:
    from hf_kvcaches.errors import is_number

    count = script.Count()
    with script.entered_functions(count):
        is_number(1)
        X.cpu()
    assert (count.calls, len(count.files), count.syncs) == (1, 1, 1)


def test_it_writes_a_table(tmp_path: Any) -> None:
    done = run_script("step_cost", "--cache", "GrowingCache", "--csv", tmp_path / "a.csv")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "a.csv")
    assert [(row["cache"], row["batch"], row["phase"]) for row in rows] == [
        ("GrowingCache", batch, phase) for batch in "13" for phase in ("prompt", "step")
    ]
    assert "calls a layer" in done.stdout


def test_an_unknown_cache_is_refused() -> None:
    done = run_script("step_cost", "--cache", "StaticCache")
    assert done.returncode == 1
    assert "--cache: expected some of" in done.stderr
