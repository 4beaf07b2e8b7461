"""The cache in docs/writing-a-cache.md works as the guide says."""

import re
from pathlib import Path

import pytest
import torch

from tests.conformance import rows, state_rows
from tests.conformance.entries import Entry
from tests.conformance.selection import Row, run_row

GUIDE = Path(__file__).parents[2] / "docs" / "writing-a-cache.md"


@pytest.fixture(scope="module")
def rounding_cache() -> type:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, type] = {"__name__": __name__}  # type: ignore[dict-item]
    exec(code, names)
    return names["RoundingCache"]


@pytest.mark.parametrize("row", [rows.beam_search, rows.left_padded_batch, state_rows.crop, state_rows.saved_and_loaded])
def test_the_cache_of_the_guide_holds_its_rows(rounding_cache: type, row: Row) -> None:
    run_row(Entry("rounding", rounding_cache, lossless=False), row, "llama", torch.float32)
    run_row(Entry("rounding off", lambda model: rounding_cache(model, step=2**-24), lossless=True), row, "llama", torch.float32)
