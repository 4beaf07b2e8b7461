"""Budgets per head, within a layer and over all: which tokens each head keeps, what is attended to, and what it weighs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_kvcaches import EquipCache, HeadBudgets
from hf_kvcaches.equip.budgets import Candidates, compared, protected
from hf_kvcaches.equip.pages import PagePool
from hf_kvcaches.equip.policies import Policy
from hf_kvcaches.equip.policies.tokens import Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny
from tests.conformance import models
from tests.conformance.driving import left_padded
from tests.equip.cases import BUDGET, both_positions, build, build_reference, positions_of, stay, text
from tests.equip.cases import feed_all as feed
from tests.reference.oracles import Head, ReferenceCache, ReferenceLayer, Row

pytestmark = pytest.mark.usefixtures("no_grad")

both_ways = pytest.mark.parametrize("shared", ["layer", "global"])


class SkewedPolicy(Policy):
    """The first head's tokens are all worth more than the others'."""

    comparable = True

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.values.float().norm(dim=-1) + 99.0 * (torch.arange(tokens.keys.shape[1]) == 0)[:, None]


class AlikePolicy(Policy):
    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.values.float().norm(dim=-1).mean(1, keepdim=True)


def cache_of(model: Any, policy: Any = "h2o", budget: Any = BUDGET, shared: Any = "layer", **options: Any) -> EquipCache:
    return EquipCache(model, policy, budget, head_budgets=shared, **options)


def shares_of(model: Any) -> HeadBudgets:
    """The first head of each layer gets twice as much as the second."""
    return HeadBudgets({layer: torch.tensor([4 / 3, 2 / 3]) for layer in range(model.config.num_hidden_layers)})


def rooms(cache: EquipCache, layer: int = 0) -> list[list[int]]:
    """How many slots each head of each row has."""
    return cache.layers[layer].table.rooms[..., 0].tolist()


def slots(cache: EquipCache, row: int = 0) -> int:
    """How many slots all heads of a row have."""
    return sum(sum(rooms(cache, layer)[row]) for layer in range(len(cache.layers)))


def kept(cache: EquipCache) -> list[list[list[int]]]:
    """The positions that each head of each row of each layer keeps."""
    return [
        [[sorted(p for p in head if p >= 0) for head in row] for row in cache.kept_positions(layer).tolist()]
        for layer in range(len(cache.layers))
    ]


# The oracle: lists of tokens, a head at a time.


class SharedLayer(ReferenceLayer):
    """A reference whose heads have slots of their own number, together with those of `partners`."""

    partners: list[SharedLayer]

    def take(self, row: Row, query: torch.Tensor, new: list[Head], step: bool, scaling: float, softcap: float | None) -> torch.Tensor:
        room = vars(row).setdefault("room", [self.budget] * self.kv_heads)
        if step:
            full = [len(head) == slots for head, slots in zip(row.heads, room, strict=True)]
            row.heads = [head.gather(self._all_but_victim(head)) if f else head for head, f in zip(row.heads, full, strict=True)]
        before = [len(head) for head in row.heads] or [0] * self.kv_heads
        row.heads = [head.append(fresh) for head, fresh in zip(row.heads, new, strict=True)] if row.heads else new
        row.real += len(new[0])
        probabilities = [
            self._probabilities(head, queries, count, scaling, softcap)
            for head, queries, count in zip(row.heads, query.split(query.shape[0] // self.kv_heads), before, strict=True)
        ]
        self.rescore(row, [part.mean(0).float() for part in probabilities], block=not step)
        output = torch.cat([part @ head.values.to(part.dtype) for part, head in zip(probabilities, row.heads, strict=True)])
        if not step and self is self.partners[-1]:
            self.share([layer.rows[self.rows.index(row)] for layer in self.partners])
        return output.transpose(0, 1)

    def share(self, rows: list[Row]) -> None:
        """Prune the heads of a row in all layers that share their slots."""
        heads = [head for row in rows for head in row.heads]
        scores, ranks = ([getattr(head, name).tolist() for head in heads] for name in ("scores", "ranks"))
        stays = stay(scores, ranks, self.budget, self.sinks, self.recent)
        share, more = divmod(self.budget * len(heads) - sum(map(len, stays)), len(heads))
        left = [head.gather(torch.tensor(index)) for head, index in zip(heads, stays, strict=True)]
        room = [len(head) + share + (number < more) for number, head in enumerate(left)]
        for index, row in enumerate(rows):
            span = slice(index * self.kv_heads, (index + 1) * self.kv_heads)
            row.heads, row.room = left[span], room[span]


def oracle(model: Any, policy: str, shared: str, **options: Any) -> ReferenceCache:
    reference = build_reference(model, policy, **options)
    kind = type(reference.layers[0])
    for layer in reference.layers:
        layer.__class__ = type("Shared", (SharedLayer, kind), {"take": SharedLayer.take})
        layer.partners = reference.layers if shared == "global" else [layer]
    return reference


@pytest.mark.parametrize("seed", range(12))
def test_the_best_scores_of_all_heads_stay_besides_each_heads_own(seed):
    generator = torch.Generator().manual_seed(seed)
    heads, tokens, sinks, recent = 3, 30, seed % 3 * 2, seed % 4
    scores = [torch.randn(2, heads, tokens, generator=generator) + 3 * torch.randn(2, heads, 1, generator=generator) for _ in range(2)]
    positions = torch.arange(tokens).expand(2, heads, tokens).clone()
    positions[1] -= 5  # five tokens of padding
    positions[0, 2, 8 : 8 + seed] = -1
    positions = positions.clamp(min=-1)
    count = torch.tensor([30, 25])[:, None, None]
    parts = [Candidates(protected(part, positions, count, sinks, recent), 9, 9) for part in scores]
    for layers in ([parts[0]], parts):
        stays = compared(layers)
        for row in range(2):
            worths = [head for part in scores[: len(layers)] for head in part[row].tolist()]
            expected = stay(worths, positions[row].tolist() * len(layers), 9, sinks, recent)
            assert [head.nonzero()[:, 0].tolist() for mask, _ in stays for head in mask[row]] == expected
            assert sum(int(slots[row].sum()) for _, slots in stays) == 9 * heads * len(layers)


def test_one_head_may_get_nearly_all_but_the_others_keep_a_twentieth_of_theirs():
    scores = torch.rand(1, 4, 100) + torch.tensor([9.0, 0.0, 0.0, 0.0])[:, None]
    worth = protected(scores, torch.arange(100).expand(1, 4, 100), 100, 4, 0)
    ((kept, slots),) = compared([Candidates(worth, 24, 30)])
    assert kept.sum(-1).tolist() == [[81, 5, 5, 5]]
    assert slots.flatten().tolist() == [87, 11, 11, 11]  # what a budget for decoding leaves goes to all alike


@both_positions
@pytest.mark.parametrize(
    ("policy", "shared", "recent"),
    [("h2o", "layer", 3), ("snapkv", "layer", None), ("keydiff", "layer", 2), ("h2o", "global", 3), ("snapkv", "global", None)],
)
def test_kept_tokens_and_logits_are_those_of_lists_of_tokens(policy, shared, recent, positions):
    model = models.tiny("llama")
    ids, start = text(80), 0
    cache = build(model, policy, head_budgets=shared, positions=positions, recent=recent)
    reference = oracle(model, policy, shared, positions=positions, recent=recent)
    for span in (40, *[1] * 12, 9, 6, *[1] * 7):
        new, start = ids[:, start : start + span], start + span
        torch.testing.assert_close(feed(model, cache, new), feed(model, reference, new), atol=1e-4, rtol=1e-4)
        expected = [head.positions.tolist() for layer in reference.layers for row in layer.rows for head in row.heads]
        assert [head for layer in kept(cache) for head in layer[0]] == expected
        assert slots(cache) == 4 * BUDGET
        lengths = [len(head) for head in expected]
        assert cache.report().spread == (min(lengths), max(lengths))


@both_ways
@both_positions
def test_rows_with_padding_keep_what_they_keep_alone(model, positions, shared):
    alone = [tiny.ids(1, tokens, seed=tokens) for tokens in (44, 31, 20)]
    ids, mask = left_padded(alone)
    cache = cache_of(model, shared=shared, positions=positions)
    together = [feed(model, cache, ids, mask)[:, -1]]
    more = tiny.ids(3, 8, seed=9)
    for step in range(8):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        together.append(feed(model, cache, more[:, step : step + 1], mask)[:, -1])
    for row, ids in enumerate(alone):
        single = cache_of(model, shared=shared, positions=positions)
        parts = [ids, *more[row : row + 1].split(1, 1)]
        expected = torch.stack([feed(model, single, part)[:, -1] for part in parts])
        torch.testing.assert_close(torch.stack(together)[:, row], expected[:, 0], atol=2e-4, rtol=1e-4)
        assert [[len(head) for head in layer[row]] for layer in kept(cache)] == [[len(head) for head in layer[0]] for layer in kept(single)]


@both_ways
def test_memory_follows_the_slots_of_all_heads_and_not_the_longest_one(shared):
    model = tiny.llama(num_attention_heads=8, num_key_value_heads=8, hidden_size=512)
    uniform, cache = (cache_of(model, SkewedPolicy(), 64, way) for way in (None, shared))
    for each in (uniform, cache):
        feed(model, each, tiny.ids(2, 300))
    assert [row[0] for row in rooms(cache)] == [300, 300]  # all tokens of the first head
    assert slots(cache) == 4 * 8 * 64
    assert cache.report().spread[1] == 300
    states = sum(layer.storage.keys.nbytes + layer.storage.values.nbytes for layer in cache.layers)
    assert states == 2 * slots(cache) * 2 * 64 * 4
    assert cache.report().bytes < 1.2 * uniform.report().bytes < states * 300 / 64 / 2


@both_positions
@pytest.mark.parametrize(("policy", "shared"), [("h2o", "layer"), ("h2o", "global"), ("future", "global")])
def test_drafts_taken_back_were_never_there(model, policy, shared, positions):
    cache = cache_of(model, policy, shared=shared, positions=positions)
    ids = tiny.ids(2, 60, seed=5)
    feed(model, cache, ids[:, :40])
    cache.activate_past_recording()
    plain = copy.deepcopy(cache)
    feed(model, cache, ids[:, 40:47])
    cache.crop(-5)
    feed(model, plain, ids[:, 40:42])
    plain.crop(0)
    assert kept(cache) == kept(plain)
    torch.testing.assert_close(feed(model, cache, ids[:, 50:55]), feed(model, plain, ids[:, 50:55]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("policy", "shared"), [("keydiff", "layer"), ("kvzip", "layer"), ("compactor", "layer"), ("kvzip", "global")])
def test_compress_shares_anew_and_leaves_what_stands_behind(model, policy, shared):
    ids = tiny.ids(1, 50, seed=9)
    cache = cache_of(model, policy, 24, shared, decode_budget=60)
    feed(model, cache, ids[:, :44])
    feed(model, cache, ids[:, 44:])
    cache.compress(model, upto=44, input_ids=ids)
    heads = [head for layer in kept(cache) for head in layer[0]]
    assert sum(map(len, heads)) == 8 * 24
    assert slots(cache) == 8 * 60
    for head in heads:
        assert set(range(44, 50)) | set(range(4)) <= set(head)
    assert feed(model, cache, tiny.ids(1, 3)).isfinite().all()


@both_ways
@both_positions
def test_evicted_tokens_leave_slots_that_are_filled_again_in_each_head(model, positions, shared):
    cache = cache_of(model, SkewedPolicy(), shared=shared, positions=positions)
    ids = tiny.ids(1, 60, seed=10)
    feed(model, cache, ids[:, :40])
    room, gone = rooms(cache)[0], positions_of(cache)[6:12]
    assert room[0] > room[1]
    cache.evict(gone)
    before = [len(head) for head in kept(cache)[0][0]]
    assert before[0] == room[0] - 6
    for step in range(12):
        feed(model, cache, ids[:, 40 + step : 41 + step])
        assert [len(head) for head in kept(cache)[0][0]] == [min(b + step + 1, r) for b, r in zip(before, room, strict=True)]
    assert rooms(cache)[0] == room


@both_ways
@both_positions
def test_an_edit_shares_anew(model, positions, shared):
    cache = cache_of(model, shared=shared, positions=positions)
    feed(model, cache, tiny.ids(1, 40, seed=11))
    cache.edit(model, 36, 38, [5, 6, 7, 8, 9])
    assert cache.seen == 43
    assert slots(cache) == 8 * BUDGET
    assert feed(model, cache, tiny.ids(1, 4)).isfinite().all()


@both_positions
def test_measured_budgets_give_each_head_its_share_of_the_free_slots(model, positions):
    cache = cache_of(model, "keydiff", 22, shares_of(model), recent=3, decode_budget=25, positions=positions)
    ids = tiny.ids(2, 50, seed=16)
    feed(model, cache, ids[:, :40])
    assert [[len(head) for head in row] for layer in kept(cache) for row in layer] == [[27, 17]] * 8  # 7 sinks and recent of 22 each
    feed(model, cache, ids[:, 40:])
    assert rooms(cache) == [[31, 19]] * 2
    for layer in kept(cache):
        for row in layer:
            assert all({0, 1, 2, 3, 47, 48, 49} <= set(head) for head in row)


def test_heads_with_small_shares_keep_sinks_and_recent_tokens_while_decoding(model):
    shares = HeadBudgets({layer: torch.tensor([1.9, 0.1]) for layer in range(4)})
    cache = cache_of(model, "keydiff", 20, shares, decode_budget=60)
    ids = tiny.ids(1, 80, seed=18)
    feed(model, cache, ids[:, :40])
    for seen in range(41, 81):
        feed(model, cache, ids[:, seen - 1 : seen])
        newest = range(max(36, seen - 14), seen)  # a quarter of the slots without sinks
        assert all({0, 1, 2, 3, *newest} <= set(head) for layer in kept(cache) for head in layer[0])
    assert slots(cache) == 8 * 60


@both_ways
def test_short_prompts_fill_up_before_anything_is_shared(model, shared):
    cache, uniform = cache_of(model, shared=shared), cache_of(model, shared=None)
    ids = tiny.ids(2, 40, seed=14)
    for part in (ids[:, :8], *ids[:, 8:24].split(1, 1)):
        torch.testing.assert_close(feed(model, cache, part), feed(model, uniform, part), atol=1e-5, rtol=1e-5)
    feed(model, cache, ids[:, 24:])
    assert [slots(cache, row) for row in range(2)] == [8 * BUDGET] * 2


def test_a_budget_for_decoding_adds_the_same_slots_to_each_head(model):
    cache = cache_of(model, SkewedPolicy(), 16, decode_budget=20, question_start=-6)
    feed(model, cache, tiny.ids(1, 46, seed=15))
    assert sum(rooms(cache)[0]) == 40
    for step in range(8):
        feed(model, cache, tiny.ids(1, 1, seed=step))
    assert sum(map(len, kept(cache)[0][0])) == 40


@both_ways
def test_softcap_and_learned_positions_and_sliding_layers(shared):
    for model in (tiny.gemma2(layer_types=["full_attention"] * 4), tiny.gpt2(), tiny.gemma2()):
        cache = cache_of(model, shared=shared)
        feed(model, cache, tiny.ids(1, 40))
        for step in range(5):
            assert feed(model, cache, tiny.ids(1, 1, seed=step)).isfinite().all()


def test_each_policy_shares_as_suits_it_unless_told(model):
    for policy, options, expected in (
        ("future", {}, "global"),
        ("h2o", {}, None),
        ("future", {"question_start": -3}, "layer"),
        ("future", {"page_size": 8}, None),
        ("future", {"head_budgets": None}, None),
    ):
        assert EquipCache(model, policy, 32, **options).settings()["head_budgets"] == expected


@pytest.mark.parametrize(
    ("policy", "options", "error", "why"),
    [
        ("streaming", {}, ConfigError, "same tokens"),
        ("tova", {}, ConfigError, "same tokens"),
        ("keydiff", {"shared": "global"}, ConfigError, "all layers"),
        ("h2o", {"shared": "global", "question_start": -3}, UnsupportedError, "question"),
        ("h2o", {"shared": "uniform"}, ConfigError, "HeadBudgets"),
        ("h2o", {"page_size": 8}, UnsupportedError, "page"),
        ("h2o", {"storage": "int8"}, UnsupportedError, "dtype"),
    ],
)
def test_what_can_not_share_slots_is_refused_when_the_cache_is_made(model, policy, options, error, why):
    with pytest.raises(error, match=f"(?s)^head_budgets: .*{why}"):
        cache_of(model, policy, **options)


def test_other_refusals(model):
    with pytest.raises(UnsupportedError, match="head_budgets"):
        cache_of(model, pool=PagePool(model, pages=8, page_size=8))
    with pytest.raises(ConfigError, match="same tokens"):
        feed(model, cache_of(model, AlikePolicy()), tiny.ids(1, 40))
    with pytest.raises(ConfigError, match="this model"):
        feed(model, cache_of(model, "keydiff", shared=shares_of(tiny.llama(num_hidden_layers=2))), tiny.ids(1, 40))
    with torch.enable_grad():
        cache = cache_of(model)
        model(input_ids=tiny.ids(1, 40), past_key_values=cache, use_cache=True)
        with pytest.raises(UnsupportedError, match="gradients"):
            model(input_ids=tiny.ids(1, 1), past_key_values=cache, use_cache=True)
