"""A prompt of which spans between others are reused takes one pass, which is the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvcaches import EquipCache, SegmentReuseCache, SegmentStore, WarmStartCache, WarmStartGate
from hf_kvcaches.reuse.plan import PROBING
from tests import tiny
from tests.warmstart.warm import OPEN, library_of, logits_of

EARLIER = tiny.ids(1, 260, seed=1)
MOVED = torch.cat([tiny.ids(1, 9, seed=4), EARLIER[:, 20:220], tiny.ids(1, 7, seed=3)], 1)
# Fewer tokens of it are computed than of the other.
PADDED = torch.cat([torch.zeros_like(EARLIER[:, :6]), EARLIER[:, 10:220]], 1)


def segments(model: PreTrainedModel, **options: Any) -> SegmentReuseCache:
    store = SegmentStore("memory")
    answer(model, EARLIER, SegmentReuseCache(model, store))
    return SegmentReuseCache(model, store, mode="approximate", **options)


def warm(model: PreTrainedModel, **options: Any) -> WarmStartCache:
    return WarmStartCache(model, library_of(model, EARLIER), strategy="align", **{"gate": OPEN, **options})


def answer(model: PreTrainedModel, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Two tokens' logits, (batch, 2, vocabulary)."""
    return logits_of(model, ids, cache, 2, attention_mask=torch.ones_like(ids) if mask is None else mask)


@contextmanager
def watched(model: PreTrainedModel, stop: int | None = None) -> Iterator[list[int]]:
    """How many tokens each call of layer 2 has; the call of that number is interrupted."""
    tokens: list[int] = []

    def called(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        tokens.append(hidden.shape[1])
        if len(tokens) == stop:
            raise KeyboardInterrupt

    called.only_observes = True  # type: ignore[attr-defined] # or caches would leave the model alone
    handle = model.model.layers[2].register_forward_pre_hook(called, with_kwargs=True)
    try:
        yield tokens
    finally:
        handle.remove()


@pytest.mark.parametrize("make", [segments, warm])
@pytest.mark.parametrize("repair", [0.0, 0.2])
def test_what_is_not_reused_runs_once_behind_a_short_pass_that_picks_what_is_repaired(make: Any, repair: float) -> None:
    model = tiny.llama()
    cache = make(model, repair=repair) if make is segments else make(model, gate=WarmStartGate(reusable=0.0, repair=repair))
    with watched(model) as tokens:
        answer(model, MOVED, cache)
    report = cache.report()
    assert report.reused_tokens > 120
    row = cache.plans[0]
    assert sum(tokens[:-1]) == MOVED.shape[1] - report.reused_tokens + row.probed
    assert len(tokens) == (3 if repair else 2)
    assert (row.probed >= PROBING) == (repair > 0)


def test_rows_of_which_different_numbers_of_tokens_are_computed_share_the_pass() -> None:
    model = tiny.llama()
    ids = torch.cat([MOVED, PADDED])
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    alone = torch.cat([answer(model, MOVED, segments(model)), answer(model, PADDED[:, 6:], segments(model))])
    cache = segments(model)
    with watched(model) as tokens:
        together = answer(model, ids, cache, mask)
    assert len(tokens) == 3
    assert cache.report().reused_tokens > 240
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_a_holder_takes_the_prompt_over_from_that_pass() -> None:
    model = tiny.llama()
    plain = {"gate": WarmStartGate(reusable=0.0, repair=0.0)}
    cache = warm(model, decode_with=EquipCache(model, "snapkv", 80, head_budgets=None), **plain)
    with watched(model) as tokens:
        logits = answer(model, MOVED, cache)
    assert len(tokens) == 2
    assert cache.report().decode_with.kept == (80,) * 4
    # The policy scores by the last 64 queries, so these tokens are computed.
    torch.testing.assert_close(logits[:, 0], answer(model, MOVED, warm(model, tail=64, **plain))[:, 0], rtol=1e-4, atol=1e-4)


def test_a_holder_keeps_what_it_keeps_of_a_prompt_of_its_own() -> None:
    """Of the two rows other numbers of tokens are reused, all of them exactly."""
    model, store = tiny.llama(), SegmentStore("memory")
    answer(model, EARLIER, SegmentReuseCache(model, store))
    ids = torch.cat([torch.cat([EARLIER[:, :length], tiny.ids(1, 240 - length, seed=length)], 1) for length in (230, 140)])
    alone = EquipCache(model, "snapkv", 80)
    expected = answer(model, ids, alone)
    cache = SegmentReuseCache(model, store, decode_with=(holder := EquipCache(model, "snapkv", 80)))
    logits = answer(model, ids, cache)
    assert cache.report().reused_tokens >= 256
    assert [positions.tolist() for positions in holder.kept_positions(0)] == [positions.tolist() for positions in alone.kept_positions(0)]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [segments, warm])
@pytest.mark.parametrize("then", ["another batch", "a text of the model's own"])
def test_an_interrupted_pass_leaves_no_token_in_the_cache(make: Any, then: str) -> None:
    model = tiny.llama()
    cache = make(model)
    with watched(model, stop=1), pytest.raises(KeyboardInterrupt):
        answer(model, MOVED, cache)
    assert cache.get_seq_length() == 0
    ids = MOVED.expand(2, -1) if then == "another batch" else tiny.ids(2, 30, seed=9)
    fresh = answer(model, ids, make(model))
    if then == "a text of the model's own":
        embeddings = model.get_input_embeddings()(ids)
        with torch.no_grad():
            logits = model(inputs_embeds=embeddings, past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits, fresh[:, 0], rtol=1e-4, atol=1e-4)
        return
    torch.testing.assert_close(answer(model, ids, cache), fresh, rtol=1e-4, atol=1e-4)
