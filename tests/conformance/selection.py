"""Which cache is run in which row, on which family, in which tier."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvcaches.errors import UnsupportedError
from tests.conformance import model_rows, models, rows, state_rows
from tests.conformance.entries import ENTRIES, Entry

Row = Callable[[Entry, PreTrainedModel, torch.dtype], None]

ROWS: tuple[Row, ...] = (*rows.GENERATING, *state_rows.STATE, *model_rows.MODEL)


def named(names: str) -> tuple[Row, ...]:
    """Rows by their names."""
    known = {row.__name__: row for row in ROWS}
    return tuple(known[name] for name in names.split())


FOR_ALL_FAMILIES = named(
    """greedy left_padded_batch padded_loop_without_positions chunked_prefill beam_search assisted_by_a_model chat forced_tokens crop
    deepcopy_forks saved_and_loaded reset reorder_cache interleaved_caches refusals_change_nothing"""
)
# What differs between families is how positions, masks and windows reach attention. A cache's rows are cut, copied and moved alike.
THAT_DIFFER = named("left_padded_batch padded_loop_without_positions forced_tokens")
# With windows on every other layer and a soft cap, so that its rows are those of two kinds of layers.
HYBRID = "gemma2"
FOR_ALL_HEADS = named("chat_of_a_padded_batch num_return_sequences prompt_lookup batch_select_indices inference_mode_mixed gradients")
# A compiler takes up to a minute for a cache: one of each kind of layer and of each way a prompt gets in.
COMPILED = """equip_streaming segments_exact warmstart_identical translated equip_h2o paged_streaming subspace_full subspace_adaptive_full
    growing""".split()
# Rows with given tokens: in low precision a free choice between two near ties says nothing.
FOR_BFLOAT16 = named("forced_tokens left_padded_steps crop deepcopy_forks pickled saved_and_loaded reset interleaved_caches")


def cases_of(family: str, dtype: torch.dtype, of: Sequence[Row], fast: Collection[Row] | None = None) -> list[Any]:
    """Parameters of a test: every cache in some rows, on one family."""
    name = str(dtype).removeprefix("torch.")
    return [
        pytest.param(
            entry,
            row,
            family,
            dtype,
            id=f"{entry.name}-{row.__name__}-{family}-{name}",
            marks=() if _is_fast(entry, row, fast) else pytest.mark.full,
        )
        for entry in ENTRIES
        if family == "llama" or entry.every_family or of is FOR_ALL_HEADS
        for row in of
        if family not in entry.without
        and f"{row.__name__}@{name}" not in entry.without
        and (row is not model_rows.compiled_forward or entry.name in COMPILED)
    ]


def _is_fast(entry: Entry, row: Row, fast: Collection[Row] | None) -> bool:
    return entry.fast and row is not model_rows.compiled_forward and (fast is None or row in fast)


def cases_of_families() -> Iterator[Any]:
    """Parameters of a test: all families but the one that is run in all rows."""
    for family in models.FAMILIES:
        if family != "llama":
            fast = FOR_ALL_FAMILIES if family == HYBRID else THAT_DIFFER
            yield from cases_of(family, torch.float32, FOR_ALL_FAMILIES, fast)
    # Without groups no copy is made of keys on the way to attention, and with one group only.
    for family in ("llama_mha", "llama_mqa"):
        yield from cases_of(family, torch.float32, FOR_ALL_HEADS, (model_rows.gradients, state_rows.inference_mode_mixed))
    for family in (HYBRID, "gpt2"):
        yield from cases_of(family, torch.bfloat16, FOR_BFLOAT16, ())


def run_row(entry: Entry, row: Row, family: str, dtype: torch.dtype) -> None:
    """Runs a row, or asserts that the cache refuses it."""
    model = models.tiny(family, dtype)
    if entry.refuses_row(row.__name__, family):
        with pytest.raises(UnsupportedError):
            row(entry, model, dtype)
    else:
        row(entry, model, dtype)
