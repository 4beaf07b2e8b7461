"""Every cache in every row."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvcaches.errors import UnsupportedError
from tests.conformance import model_rows, models, rows, state_rows
from tests.conformance.entries import ENTRIES, Entry

Row = Callable[[Entry, PreTrainedModel, torch.dtype], None]

ROWS: tuple[Row, ...] = (*rows.GENERATING, *state_rows.STATE, *model_rows.MODEL)
FOR_ALL_FAMILIES: tuple[Row, ...] = (
    rows.greedy,
    rows.left_padded_batch,
    rows.chunked_prefill,
    rows.beam_search,
    rows.assisted_by_a_model,
    rows.chat,
    state_rows.forced_tokens,
    state_rows.crop,
    state_rows.deepcopy_forks,
    state_rows.saved_and_loaded,
    state_rows.reset,
    state_rows.reorder_cache,
    state_rows.interleaved_caches,
    state_rows.refusals_change_nothing,
)
FOR_ALL_HEADS: tuple[Row, ...] = (
    rows.chat_of_a_padded_batch,
    rows.num_return_sequences,
    rows.prompt_lookup,
    state_rows.batch_select_indices,
    state_rows.inference_mode_mixed,
    model_rows.gradients,
)
# Rows with given tokens: in low precision a free choice between two near ties says nothing.
FOR_BFLOAT16: tuple[Row, ...] = (
    state_rows.forced_tokens,
    state_rows.left_padded_steps,
    state_rows.crop,
    state_rows.deepcopy_forks,
    state_rows.pickled,
    state_rows.saved_and_loaded,
    state_rows.reset,
    state_rows.interleaved_caches,
)
BFLOAT16_FAMILIES = ("llama", "gemma2", "gpt2")


def cases() -> Iterator[tuple[Entry, Row, str, torch.dtype]]:
    for entry, row, family, dtype in _all_cases():
        if family not in entry.without and f"{row.__name__}@{str(dtype).removeprefix('torch.')}" not in entry.without:
            yield entry, row, family, dtype


def _all_cases() -> Iterator[tuple[Entry, Row, str, torch.dtype]]:
    for entry in ENTRIES:
        for row in ROWS:
            yield entry, row, "llama", torch.float32
        for family in models.FAMILIES if entry.every_family else ():
            for row in FOR_ALL_FAMILIES:
                if family != "llama":
                    yield entry, row, family, torch.float32
        # Without groups no copy is made of keys on the way to attention, and with one group only.
        for family in ("llama_mha", "llama_mqa"):
            for row in FOR_ALL_HEADS:
                yield entry, row, family, torch.float32
        for family in BFLOAT16_FAMILIES if entry.every_family else BFLOAT16_FAMILIES[:1]:
            for row in FOR_BFLOAT16:
                yield entry, row, family, torch.bfloat16


def run_row(entry: Entry, row: Row, family: str, dtype: torch.dtype) -> None:
    """Runs a row, or asserts that the cache refuses it.

    Args:
        entry: The cache.
        row: What is asked of it.
        family: Of the model.
        dtype: Of the model.
    """
    model = models.tiny(family, dtype)
    if entry.refuses_row(row.__name__, family):
        with pytest.raises(UnsupportedError):
            row(entry, model, dtype)
    else:
        row(entry, model, dtype)


@pytest.mark.parametrize(
    ("entry", "row", "family", "dtype"),
    [
        pytest.param(entry, row, family, dtype, id=f"{entry.name}-{row.__name__}-{family}-{str(dtype).removeprefix('torch.')}")
        for entry, row, family, dtype in cases()
    ],
)
def test_a_cache_holds_its_row(entry: Entry, row: Row, family: str, dtype: torch.dtype) -> None:
    run_row(entry, row, family, dtype)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_refusals_name_rows_and_families_that_exist(entry: Entry) -> None:
    known = {row.__name__ for row in ROWS}
    for refusal in entry.refuses:
        row, _, family = refusal.partition("@")
        assert row in known
        assert not family or family in models.FAMILIES
