"""The oracles themselves: what they keep attends as a fresh forward pass over these tokens does."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

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

every_reference = pytest.mark.parametrize("kind", EXTRAS, ids=lambda kind: kind.__name__)
both_positions = pytest.mark.parametrize("positions", ["compact", "original"])


@pytest.fixture(autouse=True)
def _no_grad() -> Iterable[None]:
    with torch.no_grad():
        yield


def feed(model: PreTrainedModel, cache: Any, ids: torch.Tensor, spans: Iterable[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of all tokens of `ids`, fed in pieces of these lengths and with positions counted as `generate` does."""
    mask = torch.ones_like(ids) if mask is None else mask
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, start = [], 0
    for span in spans:
        stop = start + span
        call = {"attention_mask": mask[:, :stop], "position_ids": places[:, start:stop], "past_key_values": cache}
        logits.append(model(ids[:, start:stop], **call).logits)
        start = stop
    return torch.cat(logits, dim=1)


def texts(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids, none twice in a text: equal tokens have keys of equal norm, and rounding would choose between them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([3 + torch.randperm(tiny.VOCABULARY - 3, generator=generator)[:length] for _ in range(rows)])


def build(kind: type[ReferenceCache], model: PreTrainedModel, budget: int = BUDGET, **settings: Any) -> ReferenceCache:
    return kind(model, **{"budget": budget, "sinks": SINKS, **EXTRAS[kind], **settings})


def one_layer(**changes: Any) -> PreTrainedModel:
    """A model whose keys depend on the token alone, so that a pruned text is a text like any other."""
    return tiny.llama(num_hidden_layers=1, **changes)


@every_reference
@both_positions
def test_logits_are_a_fresh_forward_over_the_tokens_kept(kind: type[ReferenceCache], positions: str) -> None:
    model, ids = one_layer(num_key_value_heads=1), texts(1, LENGTH)
    cache = build(kind, model, positions=positions)
    feed(model, cache, ids[:, :PROMPT], [PROMPT])
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
