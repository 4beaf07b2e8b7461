"""Edits of a text that is in the cache: as if the edited text had been read, where nothing else tells the two apart."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.equip.policies import Policy
from hf_kvcaches.equip.policies.tokens import Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests.conformance import models
from tests.conformance.driving import feed, left_padded
from tests.equip.cases import POLICIES, both_positions, build, held, same, state, text

# Deletes, replaces by as many, by more and by fewer, inserts, appends, begins anew.
EDITS = [(5, 9, [7, 8]), (5, 9, [3, 4, 5, 6]), (10, 14, []), (3, 6, [9, 1, 2, 11, 12]), (6, 6, [9, 1, 2]), (30, 30, [5, 6]), (0, 2, [5])]


@cache
def one_layer(family: str = "llama") -> Any:
    """Its keys and values depend on the token alone, so that those behind an edit are as if they had been read after it."""
    return models.build(family, **({"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}))


def edited(ids: torch.Tensor, start: int, stop: int, new: list[int]) -> torch.Tensor:
    return torch.cat([ids[:, :start], torch.tensor([new], dtype=torch.long).expand(ids.shape[0], -1), ids[:, stop:]], 1)


def filled(model: Any, policy: str, ids: torch.Tensor, budget: int = 60, **options: Any) -> EquipCache:
    made = build(model, policy, budget, **options) if policy in POLICIES else EquipCache(model, policy, budget, head_budgets=None)
    feed(model, made, ids, [ids.shape[1]])
    return made


def assert_goes_on_alike(model: Any, one: EquipCache, other: EquipCache, rows: int = 1) -> None:
    assert one.seen == other.seen
    more = text(12, 40).expand(rows, -1)
    found, expected = (feed(model, made, more, [*[1] * 6, 4, 1, 1]) for made in (one, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "snapkv", "keydiff"])
@both_positions
def test_an_edited_cache_goes_on_as_one_that_read_the_edited_text(policy: str, positions: str) -> None:
    model, ids = one_layer(), torch.cat([text(30), text(30, 9)])
    for start, stop, new in EDITS:
        made = filled(model, policy, ids, positions=positions)
        made.edit(model, start, stop, new)
        whole = edited(ids, start, stop, new)
        assert torch.equal(held(made)[0][..., 60 - whole.shape[1] :], torch.arange(whole.shape[1]).expand(2, 2, -1))
        assert_goes_on_alike(model, made, filled(model, policy, whole, positions=positions), rows=2)


@pytest.mark.parametrize("policy", ["streaming", "keydiff"])
@both_positions
def test_what_is_pruned_after_an_edit_is_what_the_edited_text_would_lose(policy: str, positions: str) -> None:
    model = one_layer()
    for start, stop, new in ((5, 9, [92, 93]), (6, 6, [92, 93]), (10, 14, [])):
        made = filled(model, policy, text(30), 34, positions=positions)
        made.edit(model, start, stop, new)
        fresh = filled(model, policy, edited(text(30), start, stop, new), 34, positions=positions)
        assert_goes_on_alike(model, made, fresh)
        assert torch.equal(held(made)[0], held(fresh)[0])


@pytest.mark.parametrize("policy", [*POLICIES, "future", "compactor", "expected_attention"])
def test_after_an_edit_every_kept_token_is_where_the_edited_text_has_it(policy: str) -> None:
    model = models.tiny("llama")
    for start, stop, new in EDITS:
        made = filled(model, policy, text(30), 16)
        before = held(made)
        made.edit(model, start, stop, new)
        assert made.seen == 30 + len(new) - (stop - start)
        for old, now in zip(before, held(made), strict=True):
            for was, then in zip(old.flatten(0, 1).tolist(), now.flatten(0, 1).tolist(), strict=True):
                moved = {p if p < start else p + len(new) - (stop - start) for p in was if not start <= p < stop and p >= 0}
                inserted = set(range(start, start + len(new)))
                there = {p for p in then if p >= 0}
                assert len(there) == len([p for p in then if p >= 0])
                assert there <= moved | inserted
                assert len(there) == min(16, len(moved | inserted))
        assert feed(model, made, text(30, 40), [5, *[1] * 25]).isfinite().all()


@pytest.mark.parametrize("policy", ["streaming", "keydiff"])
def test_new_tokens_are_sinks_where_an_edit_left_a_row_with_fewer(policy: str) -> None:
    ids, mask = left_padded([text(20), text(12, 9)])
    made, steps = EquipCache(models.tiny("llama"), policy, 12, head_budgets=None), text(30, 40).expand(2, -1)
    feed(made.model, made, ids, [20], mask)
    made.edit(made.model, 9, 20, [])  # one token of the second row is left
    for step in range(30):
        mask = torch.nn.functional.pad(mask[:, : 9 + step], (0, 1), value=1)
        feed(made.model, made, steps[:, step : step + 1], [1], mask)
    assert all({8, 9, 10, 11} <= set(head) for layer in range(2) for head in made.kept_positions(layer)[1].tolist())


@pytest.mark.parametrize("policy", ["streaming", "h2o", "keydiff"])
def test_compact_positions_close_the_gap_of_what_was_evicted(policy: str) -> None:
    model, gone = one_layer(), [4, 5, 11, 29]
    made = filled(model, policy, text(30), positions="compact")
    made.evict(gone)
    rest = [position for position in range(30) if position not in gone]
    assert made.seen == 30
    kept = made.kept_positions(0)[0, 0]
    assert kept[kept >= 0].tolist() == rest
    fresh = filled(model, policy, text(30)[:, rest], positions="compact")
    more = text(20, 40)
    torch.testing.assert_close(feed(model, made, more), feed(model, fresh, more), rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "keydiff"])
def test_evicting_what_a_pruned_cache_keeps_frees_slots_for_what_comes(policy: str) -> None:
    model = models.tiny("llama")
    made = filled(model, policy, torch.cat([text(30), text(30, 9)]), 16)
    gone = made.kept_positions(0)[0, 0, 4:7]
    made.evict(torch.cat([gone, gone]))
    for layer in range(2):
        assert not torch.isin(made.kept_positions(layer), gone).any()
    assert made.evict([]) is None
    feed(model, made, text(25, 40).expand(2, -1))
    assert made.seen == 55
    assert made.report().kept == (16, 16)
    assert (made.kept_positions(0) >= 0).all()


def test_what_was_read_in_inference_mode_is_edited_outside_of_it() -> None:
    model = models.tiny("llama")
    with torch.inference_mode():
        made, other = (filled(model, "h2o", text(30), 16) for _ in range(2))
        other.edit(model, 5, 9, [7, 8])
    made.edit(model, 5, 9, [7, 8])
    assert_goes_on_alike(model, made, other)


def test_original_positions_keep_the_gap() -> None:
    model = one_layer()
    made = filled(model, "streaming", text(30), positions="original")
    made.evict([7, 8, 9])
    rest = [position for position in range(30) if position not in (7, 8, 9)]
    more = text(1, 40)
    ids, places = torch.cat([text(30)[:, rest], more], 1), torch.tensor([[*rest, 30]])
    with torch.no_grad():
        # With a mask, because places with gaps are otherwise taken for several texts in one row.
        expected = model(ids, position_ids=places, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(feed(model, made, more), expected, rtol=0, atol=1e-4)


def test_learned_positions_take_edits_of_the_same_length_and_no_others() -> None:
    model, ids = one_layer("gpt2"), text(30)
    made = filled(model, "h2o", ids)
    before = state(made)
    for start, stop, new in ((5, 9, [7, 8]), (5, 5, [1]), (5, 9, [])):
        with pytest.raises(UnsupportedError, match="as many tokens"):
            made.edit(model, start, stop, new)
        assert same(state(made), before)
    made.edit(model, 5, 9, [3, 4, 5, 6])
    expected = filled(model, "streaming", edited(ids, 5, 9, [3, 4, 5, 6]))
    more = text(10, 40)
    torch.testing.assert_close(feed(model, made, more), feed(model, expected, more), rtol=0, atol=1e-4)
    # At the end nothing has to move.
    made = filled(model, "streaming", ids)
    made.edit(model, 26, 30, [1, 2])
    assert_goes_on_alike(model, made, filled(model, "streaming", edited(ids, 26, 30, [1, 2])))


class Interrupted(Exception):
    pass


def test_a_model_that_fails_in_an_edit_leaves_the_cache_as_it_was() -> None:
    model = models.tiny("llama")
    made = filled(model, "h2o", text(30), 16)
    before = state(made)

    def fail(*_: Any) -> None:
        raise Interrupted

    hook = model.model.layers[1].mlp.register_forward_hook(fail)
    try:
        with pytest.raises(Interrupted):
            made.edit(model, 5, 9, [7, 8])
    finally:
        hook.remove()
    assert same(state(made), before)
    other = filled(model, "h2o", text(30), 16)
    assert_goes_on_alike(model, made, other)


def test_positions_that_were_not_seen_can_not_be_evicted() -> None:
    made = filled(models.tiny("llama"), "h2o", text(30), 16)
    before = state(made)
    for positions in ([30], [-1], [3, 99]):
        with pytest.raises(ConfigError, match="indices from 0 to 29"):
            made.evict(positions)
        assert same(state(made), before)


def test_edits_of_what_is_not_there_are_refused() -> None:
    model = models.tiny("llama")
    made = filled(model, "h2o", text(30), 16)
    before = state(made)
    for start, stop, new in ((-1, 3, [1]), (5, 31, [1]), (6, 5, [1]), (5, 6, [[[1]]]), (5, 6, [[1], [2], [3]])):
        with pytest.raises(ConfigError, match="^new_ids" if (start, stop) == (5, 6) else "^start, stop"):
            made.edit(model, start, stop, new)
        assert same(state(made), before)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "keydiff"])
@both_positions
def test_rows_padded_at_the_start_are_edited_like_single_rows(policy: str, positions: str) -> None:
    model, texts = models.tiny("llama"), [text(30), text(21, 9)]
    ids, mask = left_padded(texts)
    made = build(model, policy, 24, positions=positions)
    feed(model, made, ids, [30], mask)
    made.edit(model, 20, 23, [7, 8])
    more = text(6, 40).expand(2, -1)
    found = feed(model, made, more, mask=torch.cat([mask[:, :29], torch.ones_like(more)], 1))
    for row, (own, start) in enumerate(zip(texts, (20, 11), strict=True)):
        alone = filled(model, policy, own, 24, positions=positions)
        alone.edit(model, start, start + 3, [7, 8])
        torch.testing.assert_close(found[row], feed(model, alone, more[:1])[0], rtol=0, atol=1e-4)


def test_padding_can_not_be_edited() -> None:
    model = models.tiny("llama")
    ids, mask = left_padded([text(30), text(20, 9)])
    made = build(model, "streaming")
    feed(model, made, ids, [30], mask)
    with pytest.raises(UnsupportedError, match="padded"):
        made.edit(model, 9, 12, [1])


def test_layers_with_their_own_window_can_not_be_edited() -> None:
    model = models.tiny("gemma3")
    made = filled(model, "streaming", text(30))
    with pytest.raises(UnsupportedError, match="their own window"):
        made.edit(model, 5, 6, [1])


def test_tokens_that_every_window_has_passed_can_be_evicted() -> None:
    model = models.tiny("gemma3")
    window = max(layer.sliding_window for layer in filled(model, "streaming", text(5)).layers if hasattr(layer, "sliding_window"))
    length = window + 20
    made = filled(model, "streaming", text(length), positions="original")
    before = state(made)
    with pytest.raises(UnsupportedError, match="up to 20"):
        made.evict([21])
    assert same(state(made), before)
    made.evict([5, 20])
    own = [index for index, layer in enumerate(made.layers) if isinstance(layer, KVLayer)]
    assert not torch.isin(made.kept_positions(own[0]), torch.tensor([5, 20])).any()
    assert feed(model, made, text(3, 40)).isfinite().all()


def test_rows_can_get_different_replacements() -> None:
    model, ids = one_layer(), torch.cat([text(30), text(30, 9)])
    made = filled(model, "streaming", ids)
    made.edit(model, 5, 7, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    whole = torch.cat([edited(ids[:1], 5, 7, [1, 2, 3]), edited(ids[1:], 5, 7, [4, 5, 6])])
    assert_goes_on_alike(model, made, filled(model, "streaming", whole), rows=2)


LOST_SINKS = {
    "evict a sink": lambda model, made: made.evict([1]),
    "evict all sinks": lambda model, made: made.evict([0, 1, 2, 3]),
    "evict a sink and others": lambda model, made: made.evict([2, 26, 29]),
    "delete the beginning": lambda model, made: made.edit(model, 0, 2, []),
    "delete a sink": lambda model, made: made.edit(model, 2, 3, []),
    "shorten the beginning": lambda model, made: made.edit(model, 0, 3, [5]),
    "replace a sink": lambda model, made: made.edit(model, 1, 2, [5]),
    "lengthen the beginning": lambda model, made: made.edit(model, 1, 2, [5, 6, 7]),
}


class Aged(Policy):
    """Keeps what "streaming" keeps; that the oldest token is always evicted next is not known."""

    interval = None

    def recent(self, budget: int, sinks: int) -> int:
        return budget - sinks

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.positions.float()


def both_kinds(model: Any, ids: torch.Tensor, budget: int, mask: torch.Tensor | None = None) -> list[EquipCache]:
    """A stream, which rotates its sinks alone, and a cache that rotates all keys on the way."""
    caches = [EquipCache(model, policy, budget, sinks=4, positions="compact") for policy in ("streaming", Aged())]
    for made in caches:
        feed(model, made, ids, [ids.shape[1]], mask)
    return caches


@pytest.mark.parametrize("budget", [60, 16])
@pytest.mark.parametrize("change", LOST_SINKS.values(), ids=LOST_SINKS)
def test_without_some_of_its_sinks_a_stream_goes_on_as_a_cache_that_rotates_all_keys(budget: int, change: Any) -> None:
    model, ids = models.tiny("llama"), torch.cat([text(30), text(30, 9)])
    caches = both_kinds(model, ids, budget)
    for made in caches:
        change(model, made)
    assert_goes_on_alike(model, *caches, rows=2)
    caches[0] = EquipCache.from_bytes(caches[0].to_bytes(), model)
    for made in caches:
        made.activate_past_recording()
    for drafted in (4, 3):
        assert_goes_on_alike(model, *caches, rows=2)
        for made in caches:
            feed(model, made, text(drafted, 50).expand(2, -1), [drafted])
            made.crop(1 - drafted)
        assert torch.equal(held(caches[0])[0], held(caches[1])[0])
    for made in caches:
        made.reset()
        feed(model, made, ids, [30])
    assert_goes_on_alike(model, *caches, rows=2)


def test_padded_rows_of_a_stream_lose_a_sink() -> None:
    model = models.tiny("llama")
    ids, mask = left_padded([text(30), text(23, 9)])
    caches = both_kinds(model, ids, 16, mask)
    for made in caches:
        made.evict([1, 8])
    more, longer = text(24, 40).expand(2, -1), torch.nn.functional.pad(mask, (0, 24), value=1)
    found, expected = (feed(model, made, more, [1] * 20 + [4], longer) for made in caches)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
