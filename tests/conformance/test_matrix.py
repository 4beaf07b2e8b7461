"""Every cache in every row, on the family that all rows are written for."""

import pytest
import torch

from tests.conformance import models
from tests.conformance.entries import ENTRIES, Entry
from tests.conformance.selection import FOR_BFLOAT16, ROWS, Row, cases_of, run_row


@pytest.mark.parametrize(("entry", "row", "family", "dtype"), cases_of("llama", torch.float32, ROWS))
def test_a_cache_holds_its_row(entry: Entry, row: Row, family: str, dtype: torch.dtype) -> None:
    run_row(entry, row, family, dtype)


@pytest.mark.parametrize(("entry", "row", "family", "dtype"), cases_of("llama", torch.bfloat16, FOR_BFLOAT16))
def test_a_cache_holds_its_row_in_bfloat16(entry: Entry, row: Row, family: str, dtype: torch.dtype) -> None:
    run_row(entry, row, family, dtype)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_refusals_name_rows_and_families_that_exist(entry: Entry) -> None:
    known = {row.__name__ for row in ROWS}
    for refusal in entry.refuses:
        row, _, family = refusal.partition("@")
        assert row in known
        assert not family or family in models.FAMILIES
