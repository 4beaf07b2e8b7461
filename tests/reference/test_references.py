"""The oracles themselves: what they keep attends as a fresh forward pass over these tokens does."""

from typing import Any

import pytest
import torch

from tests import tiny
from tests.reference.oracles import ReferenceCache
from tests.reference.policies import H2OReference, SnapKVReference, StreamingReference, TOVAReference

pytestmark = pytest.mark.full

EXTRAS: dict[type[ReferenceCache], dict[str, Any]] = {
    StreamingReference: {},
    H2OReference: {},
    TOVAReference: {},
    SnapKVReference: {"window": 4, "kernel_size": 3},
}
BUDGET, SINKS, PROMPT, LENGTH = 16, 2, 22, 56


@pytest.mark.parametrize("kind", EXTRAS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("positions", ["compact", "original"])
@torch.no_grad()
def test_logits_are_a_fresh_forward_over_the_tokens_kept(kind: type[ReferenceCache], positions: str) -> None:
    # Keys of one layer depend on the token alone, so that a pruned text is a text like any other. No token comes twice: equal ones have
    # keys of equal norm, and rounding would choose between them.
    model = tiny.llama(num_hidden_layers=1, num_key_value_heads=1)
    ids = 3 + torch.randperm(tiny.VOCABULARY - 3, generator=torch.Generator().manual_seed(0))[None, :LENGTH]
    cache = kind(model, budget=BUDGET, sinks=SINKS, positions=positions, **EXTRAS[kind])
    model(ids[:, :PROMPT], past_key_values=cache)
    for t in range(PROMPT, LENGTH):
        logits = model(ids[:, t : t + 1], past_key_values=cache).logits
        kept = cache.kept_positions(0)[0, 0]
        assert kept.unique().numel() == BUDGET
        assert kept[:SINKS].tolist() == list(range(SINKS))
        assert kept[-1] == t
        places = torch.arange(BUDGET) if positions == "compact" else kept
        # With a mask, because places with gaps are otherwise taken for several texts in one row.
        fresh = model(ids[:, kept], position_ids=places[None], attention_mask=torch.ones(1, BUDGET), use_cache=False).logits[:, -1:]
        torch.testing.assert_close(logits, fresh, atol=1e-4, rtol=1e-4)
