"""Every cache on every family of models: at once the rows that hang on how a family attends, all others in the full tier."""

import pytest
import torch

from tests.conformance.entries import Entry
from tests.conformance.selection import Row, cases_of_families, run_row


@pytest.mark.parametrize(("entry", "row", "family", "dtype"), cases_of_families())
def test_a_cache_holds_its_row(entry: Entry, row: Row, family: str, dtype: torch.dtype) -> None:
    run_row(entry, row, family, dtype)
