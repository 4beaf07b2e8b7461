"""The oracles themselves, against first principles: full attention, fresh forward passes, and arithmetic by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches.errors import ConfigError
from tests import tiny
from tests.reference.oracles import ReferenceCache
from tests.reference.policies import (
    EQUIP,
    H2OReference,
    KeyDiffReference,
    SnapKVReference,
    StreamingReference,
    TOVAReference,
)

pytestmark = pytest.mark.full

# What EquipCache does otherwise than the papers; the papers' own ways are tested at the end.
EXTRAS: dict[type[ReferenceCache], dict[str, Any]] = {
    StreamingReference: {},
    H2OReference: EQUIP,
    TOVAReference: {**EQUIP, "keep_last": True},
    SnapKVReference: {**EQUIP, "window": 4, "kernel_size": 3, "pooling": "mean"},
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


def steps(prompt: int = PROMPT, length: int = LENGTH) -> list[int]:
    return [prompt] + [1] * (length - prompt)


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
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_budget_for_the_whole_text_equals_the_full_cache(kind: type[ReferenceCache], kv_heads: int) -> None:
    model, ids = tiny.llama(num_hidden_layers=2, num_key_value_heads=kv_heads).double(), texts(2, 32)
    expected = feed(model, DynamicCache(config=model.config), ids, [32])
    for positions in ("original", "compact"):
        cache = build(kind, model, budget=32, positions=positions)
        logits = feed(model, cache, ids, [16, 7, *[1] * 9])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        assert cache.seen == 32
        assert torch.equal(cache.kept_positions(1), torch.arange(32).expand(2, kv_heads, 32))


@pytest.mark.parametrize("family", [tiny.gemma2, tiny.gpt2], ids=["softcap", "learned positions"])
def test_models_of_other_families_equal_the_full_cache(family: Callable[..., PreTrainedModel]) -> None:
    model, ids = family(**({"layer_types": ["full_attention"] * 4} if family is tiny.gemma2 else {})), texts(1, 24)
    if family is tiny.gemma2:
        model.set_attn_implementation("eager")
    logits = feed(model, H2OReference(model, budget=24), ids, steps(12, 24))
    torch.testing.assert_close(logits, feed(model, DynamicCache(config=model.config), ids, [24]), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("spans", [steps(), [PROMPT, 5, 1, 9, 1, 1, 3]], ids=["steps", "blocks"])
def test_compact_streaming_is_a_fresh_forward_over_sinks_and_window(spans: list[int]) -> None:
    model = one_layer()
    ids = texts(1, sum(spans))
    logits = feed(model, build(StreamingReference, model), ids, spans)
    start = 0
    for span in spans:
        # A step makes room before it attends, a block afterwards.
        before = min(start, BUDGET - (span == 1))
        newest = before - SINKS if before < start else start
        window = torch.cat([ids[:, : start - newest][:, :SINKS], ids[:, start - newest : start + span]], dim=1)
        torch.testing.assert_close(logits[:, start : start + span], model(window, use_cache=False).logits[:, -span:], atol=1e-4, rtol=1e-4)
        start += span


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


@every_reference
@both_positions
def test_rows_of_a_left_padded_batch_equal_single_rows(kind: type[ReferenceCache], positions: str) -> None:
    spans = [PROMPT, *[1] * 6, 6, *[1] * 10]
    model, ids = tiny.llama(num_hidden_layers=2), texts(3, sum(spans))
    mask = torch.ones_like(ids)
    mask[1, :9], mask[2, :19] = 0, 0  # the last row begins with fewer tokens than the budget
    cache = build(kind, model, positions=positions)
    logits = feed(model, cache, ids, spans, mask)
    for row, padding in enumerate([0, 9, 19]):
        alone = build(kind, model, positions=positions)
        expected = feed(model, alone, ids[row : row + 1, padding:], [PROMPT - padding, *spans[1:]])
        torch.testing.assert_close(logits[row, padding:], expected[0], atol=1e-4, rtol=1e-4)
        for layer in range(2):
            kept = alone.kept_positions(layer)[0]
            assert torch.equal(cache.kept_positions(layer)[row], torch.where(kept < 0, kept, kept + padding))


def test_rows_that_are_not_full_end_in_free_slots() -> None:
    model, ids = tiny.llama(), texts(2, 10)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    cache = H2OReference(model, budget=8, sinks=1)
    feed(model, cache, ids, [10], mask)
    assert (cache.kept_positions(0)[0] >= 0).all()
    assert cache.kept_positions(0)[1].tolist() == [[7, 8, 9, -1, -1, -1, -1, -1]] * 4  # one for each query head


def test_a_left_padded_prompt_may_come_token_by_token() -> None:
    model, ids = tiny.llama(), texts(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    logits = feed(model, build(TOVAReference, model), ids, [1] * 30, mask)
    expected = feed(model, build(TOVAReference, model), ids[1:, 5:], [1] * 25)
    torch.testing.assert_close(logits[1, 5:], expected[0], atol=1e-4, rtol=1e-4)


def test_generate_writes_the_same_text_for_a_padded_row_as_for_the_row_alone() -> None:
    model, ids = tiny.llama(), texts(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    both = model.generate(ids, attention_mask=mask, past_key_values=build(H2OReference, model), **options)
    alone = model.generate(ids[1:, 6:], past_key_values=build(H2OReference, model), **options)
    assert both[1, 20:].tolist() == alone[0, 14:].tolist()


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


@every_reference
def test_a_prompt_is_pruned_alike_in_every_layer_by_formulas_over_the_full_cache(kind: type[ReferenceCache]) -> None:
    model, ids = tiny.llama(), texts(1, 30)
    attentions = full_attention(ids)
    cache = kind(model, budget=17, sinks=SINKS, recent=0, **EXTRAS[kind])
    feed(model, cache, ids, [30])
    for layer, weights in enumerate(attentions):
        grouped = weights.view(1, 2, 2, 30, 30).mean(2)
        pooled = functional.pad(functional.avg_pool1d(grouped[..., -4:, :-4].mean(-2), 3, 1, 1), (0, 4), value=9.0)
        scores = {
            StreamingReference: torch.arange(30.0).expand(1, 2, 30),
            H2OReference: grouped.sum(2),
            TOVAReference: functional.pad(weights[:, :, -1, :-1].mean(1, keepdim=True), (0, 1), value=9.0).expand(-1, 2, -1),
            SnapKVReference: pooled,
        }[kind].clone()
        scores[..., :SINKS] = torch.inf
        assert torch.equal(cache.kept_positions(layer), scores.topk(17).indices.sort().values)


@pytest.mark.parametrize("kind", [H2OReference, TOVAReference], ids=lambda kind: kind.__name__)
def test_scores_of_a_text_fed_in_steps_are_those_of_the_text_fed_at_once(kind: type[ReferenceCache]) -> None:
    model, ids = tiny.llama(), texts(1, 40)
    apart, whole = (build(kind, model, budget=40) for _ in range(2))
    feed(model, apart, ids, [6, *[1] * 13, 8, *[1] * 13])
    feed(model, whole, ids, [40])
    for one, other in zip(apart.layers, whole.layers, strict=True):
        for head, expected in zip(one.rows[0].heads, other.rows[0].heads, strict=True):
            torch.testing.assert_close(head.scores, expected.scores, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"budget": 6, "sinks": 4, "recent": 3}, "budget"),
        ({"budget": 4, "sinks": 4, "recent": 0}, "budget"),
        ({"budget": 8, "positions": "relative"}, "positions"),
        ({"budget": 8, "rerotate": True, "positions": "original"}, "rerotate"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings: dict[str, Any], argument: str) -> None:
    with pytest.raises(ConfigError, match=f"^{argument}:"):
        StreamingReference(tiny.llama(), **settings)


# As published.

PUBLISHED: dict[type[ReferenceCache], dict[str, Any]] = {
    StreamingReference: {"budget": BUDGET},
    H2OReference: {"budget": BUDGET},
    TOVAReference: {"budget": BUDGET},
    SnapKVReference: {"budget": BUDGET, "window": 4, "kernel_size": 3},
    KeyDiffReference: {"budget": BUDGET, "block": 6},
}


def kept_as_published(weights: torch.Tensor, rule: str, recent: int) -> list[list[int]]:
    """The tokens kept after the prompt and each step where a step evicts after its query, for one head as in `kept_by_hand`.

    Args:
        weights: (heads, tokens, tokens), full attention, of the heads that decide.
        rule: "h2o" or "tova".
        recent: Newest tokens that stay.
    """
    kept, score, history = list[int](), dict[int, float](), []
    for start, stop in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, LENGTH))]:
        kept = [*kept, *range(start, stop)]
        given = weights[:, start:stop, kept]
        got = (given / given.sum(-1, keepdim=True)).mean(0)
        for token, received in zip(kept, got.T, strict=True):
            score[token] = float(received[-1]) if rule == "tova" else score.get(token, 0.0) + float(received.sum())
        old = kept[: len(kept) - recent]
        kept = sorted(sorted(old, key=lambda t: -score[t])[: BUDGET - recent]) + kept[len(old) :]
        history.append(kept)
    return history


@pytest.mark.parametrize(("kind", "rule", "recent"), [(H2OReference, "h2o", 8), (TOVAReference, "tova", 0)])
def test_published_h2o_and_tova_protect_no_sinks_and_evict_after_the_query(kind: type[ReferenceCache], rule: str, recent: int) -> None:
    ids = texts(1, LENGTH, seed=3)
    weights = full_attention(ids, num_hidden_layers=1)[0][0]
    groups = [weights] * 2 if rule == "tova" else list(weights.split(1))  # TOVA: one choice for both key heads; H2O: each query head
    histories = [kept_as_published(group, rule, recent) for group in groups]
    model = one_layer()
    cache = kind(model, budget=BUDGET, positions="original")
    for index, span in enumerate(steps()):
        start = sum(steps()[:index])
        model(ids[:, start : start + span], past_key_values=cache)
        assert cache.kept_positions(0)[0].tolist() == [history[index] for history in histories]


@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_published_snapkv_pools_for_each_query_head_and_grows_while_decoding(pooling: str) -> None:
    model, ids = tiny.llama(num_hidden_layers=2), texts(1, PROMPT + 3)
    cache = SnapKVReference(model, budget=BUDGET, window=4, kernel_size=3, pooling=pooling, positions="original")
    feed(model, cache, ids, [PROMPT, 1, 1, 1])
    for layer, weights in enumerate(full_attention(ids[:, :PROMPT], num_hidden_layers=2)):
        for head in range(4):
            old = weights[0, head, PROMPT - 4 :, : PROMPT - 4].sum(0).tolist()
            around = [old[max(i - 1, 0) : i + 2] for i in range(len(old))]
            worth = [max(some) if pooling == "max" else sum(some) for some in around]
            # A maximum is shared by neighbours: only what is worth more or less than the last one kept is certain.
            threshold = sorted(worth, reverse=True)[BUDGET - 5]
            kept = cache.kept_positions(layer)[0, head].tolist()
            assert len(kept) == BUDGET + 3
            assert kept[-7:] == list(range(PROMPT - 4, PROMPT + 3))
            assert {i for i, w in enumerate(worth) if w > threshold + 1e-6} <= set(kept[:-7])
            assert all(worth[i] >= threshold - 1e-6 for i in kept[:-7])


@both_positions
def test_published_keydiff_prunes_a_prompt_block_by_block(positions: str) -> None:
    model, ids = tiny.llama(), texts(1, 32)
    apart = KeyDiffReference(model, budget=12, block=None, positions=positions)
    whole = KeyDiffReference(model, budget=12, block=8, positions=positions)
    torch.testing.assert_close(feed(model, whole, ids, [30, 1, 1]), feed(model, apart, ids, [8, 8, 8, 6, 1, 1]), atol=1e-5, rtol=1e-4)
    assert all(torch.equal(whole.kept_positions(layer), apart.kept_positions(layer)) for layer in range(4))


@pytest.mark.parametrize("kind", PUBLISHED, ids=lambda kind: kind.__name__)
@both_positions
def test_published_rows_of_a_left_padded_batch_equal_single_rows(kind: type[ReferenceCache], positions: str) -> None:
    spans = [PROMPT, *[1] * 6, 6, *[1] * 10]
    model, ids = tiny.llama(num_hidden_layers=2), texts(2, sum(spans))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    logits = feed(model, kind(model, positions=positions, **PUBLISHED[kind]), ids, spans, mask)
    for row, padding in enumerate([0, 9]):
        alone = kind(model, positions=positions, **PUBLISHED[kind])
        expected = feed(model, alone, ids[row : row + 1, padding:], [PROMPT - padding, *spans[1:]])
        torch.testing.assert_close(logits[row, padding:], expected[0], atol=1e-4, rtol=1e-4)
