"""New buffers are not filled before they are written: what is in them by chance is never seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_kvcaches import SegmentReuseCache, SegmentStore
from tests import tiny
from tests.interrupts.cases import CASES, answer
from tests.warmstart.warm import logits_of


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill all new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CASES)
def test_no_answer_depends_on_new_memory(name: str, poison: None) -> None:
    prompt, make = CASES[name]()
    cache = make()
    logits = answer(prompt, cache)
    torch.use_deterministic_algorithms(False)
    assert torch.equal(logits, answer(prompt, make()))


@pytest.mark.parametrize("mode", ["exact", "approximate"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_no_row_of_a_padded_batch_depends_on_new_memory(mode: str, implementation: str, poison: None) -> None:
    model, text = tiny.llama(), tiny.ids(1, 120, seed=1)
    model.set_attn_implementation(implementation)
    moved = torch.cat([tiny.ids(1, 9, seed=4), text[:, 20:100], tiny.ids(1, 7, seed=3)], 1)
    begun = torch.cat([torch.zeros_like(text[:, :16]), text[:, :70], tiny.ids(1, 10, seed=5)], 1)
    batch, mask = torch.cat([moved, begun]), torch.ones(2, 96, dtype=torch.long)
    mask[1, :16] = 0
    logits = []
    for _ in range(2):
        store = SegmentStore("memory")
        logits_of(model, text, SegmentReuseCache(model, store, mode="exact"))
        cache = SegmentReuseCache(model, store, mode=mode)
        logits.append(logits_of(model, batch, cache, 3, attention_mask=mask))
        assert cache.report().reused_tokens > 60
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*logits)
