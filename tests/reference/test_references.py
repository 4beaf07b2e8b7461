"""The oracles themselves, against first principles: full attention, fresh forward passes, and arithmetic by hand."""

import math
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


def full_attention(ids: torch.Tensor, **changes: Any) -> tuple[torch.Tensor, ...]:
    """Of each layer (batch, heads, tokens, tokens), by transformers' eager attention."""
    model = tiny.llama(**changes)
    model.set_attn_implementation("eager")
    return model(ids, output_attentions=True).attentions


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


def kept_by_hand(weights: torch.Tensor, rule: str, *, recent: int, window: int = 4, kernel: int = 3) -> list[list[int]]:
    """The tokens kept after the prompt and after each step, for one key head of a one-layer model at original positions.

    There, what a query gives to the tokens kept is what it gives them among all tokens, divided by its sum.

    Args:
        weights: (heads, tokens, tokens), full attention, of the heads that decide.
        rule: "h2o", "tova" or "snapkv".
        recent: Newest tokens that stay.
        window: Of SnapKV.
        kernel: Of SnapKV.
    """
    mean = weights.mean(0)
    kept, score, collected = list(range(PROMPT)), dict[int, float](), dict[int, float]()

    def pool(collected: dict[int, float]) -> dict[int, float]:
        old = [collected[t] for t in kept[:-window]]
        around = [old[max(i - kernel // 2, 0) : i + kernel // 2 + 1] for i in range(len(old))]
        return {t: sum(some) / kernel for t, some in zip(kept, around, strict=False)} | dict.fromkeys(kept[-window:], math.inf)

    for t in kept:
        score[t] = float(mean[:PROMPT, t].sum()) if rule == "h2o" else float(mean[PROMPT - 1, t])
        collected[t] = float(mean[PROMPT - window : PROMPT, t].sum())
    if rule == "snapkv":
        score = pool(collected)
    recent = max(recent, 1) if rule == "tova" else recent
    middle = sorted(kept[SINKS : PROMPT - recent], key=lambda t: -score[t])[: BUDGET - SINKS - recent]
    kept = sorted([*kept[:SINKS], *middle, *kept[PROMPT - recent :]])
    history, collected = [list(kept)], dict.fromkeys(kept, 0.0)
    for t in range(PROMPT, LENGTH):
        kept.remove(min(kept[SINKS : BUDGET - max(recent - 1, 0)], key=lambda s: (score[s], s)))
        kept.append(t)
        given = weights[:, t, kept] / weights[:, t, kept].sum(-1, keepdim=True)
        got = dict(zip(kept, given.mean(0).tolist(), strict=True))
        collected = {s: collected.get(s, 0.0) + got[s] for s in kept}
        if rule == "snapkv":
            score = {s: score.get(s, math.inf) for s in kept}
            if (t - PROMPT + 1) % window == 0:
                score, collected = pool(collected), {}
        else:
            score = got if rule == "tova" else {s: score.get(s, 0.0) + got[s] for s in kept}
        history.append(list(kept))
    return history


@pytest.mark.parametrize(
    ("kind", "rule", "recent"),
    [
        (H2OReference, "h2o", 8),
        (H2OReference, "h2o", 0),
        (TOVAReference, "tova", 1),
        (TOVAReference, "tova", 0),
        (TOVAReference, "tova", 3),
        (SnapKVReference, "snapkv", 4),
        (SnapKVReference, "snapkv", 6),
    ],
)
def test_tokens_kept_by_attention_are_those_counted_by_hand(kind: type[ReferenceCache], rule: str, recent: int) -> None:
    ids = texts(1, LENGTH, seed=3)
    weights = full_attention(ids, num_hidden_layers=1)[0][0]
    groups = [weights] * 2 if rule == "tova" else list(weights.split(2))
    histories = [kept_by_hand(group, rule, recent=recent) for group in groups]
    model = one_layer()
    cache = build(kind, model, positions="original", recent=recent)
    feed(model, cache, ids[:, :PROMPT], [PROMPT])
    for t in range(PROMPT, LENGTH + 1):
        assert cache.kept_positions(0)[0].tolist() == [history[t - PROMPT] for history in histories]
        if t < LENGTH:
            model(ids[:, t : t + 1], past_key_values=cache)


# As published.
