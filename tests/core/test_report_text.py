"""A report prints shares as percentages, ids shortened, and no row without content."""

from __future__ import annotations

from dataclasses import dataclass

from hf_kvcaches import CacheReport

ID = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Report(CacheReport):
    """Fields of all kinds."""

    flops_saved: float = 0.0
    loss: float = 0.0
    tiers: dict | None = None
    neighbour: str | None = None
    spans: tuple = ()
    reason: str = ""


def rows(**fields):
    text = str(Report("A", 1234, (1234,), 2**20, **fields))
    return {line[:15].strip(): line[15:].strip() for line in text.splitlines()[1:]}


def test_what_is_empty_has_no_row():
    assert set(rows()) == {"tokens seen", "slots kept", "memory", "flops saved", "loss"}


def test_values_are_printed_as_people_read_them():
    shown = rows(flops_saved=0.9908349105059777, loss=0.0123456, tiers={"exact": 1640, "computed": 2}, neighbour=ID, reason="A hook.")
    assert shown["flops saved"] == "99.1%"
    assert shown["loss"] == "0.01235"
    assert shown["tiers"] == "exact 1,640, computed 2"
    assert shown["neighbour"] == "01234567…"
    assert shown["reason"] == "A hook."


def test_of_a_long_list_the_beginning_is_printed():
    assert rows(spans=tuple(range(1, 12)))["spans"] == "1, 2, 3, 4, 5, 6, 7, 8, 3 more"
    assert rows(spans=("", None)).get("spans") is None
