"""Budgets per head: which tokens each head keeps, what is attended to, and what it weighs."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_kvcaches import EquipCache
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.heads import chosen, shares
from hf_kvcaches.equip.pages import PagePool
from hf_kvcaches.equip.policies import KeyNormPolicy, Policy
from hf_kvcaches.equip.ragged import RaggedStore
from hf_kvcaches.equip.rotation import SlotRotation
from hf_kvcaches.equip.store import FlatStore
from hf_kvcaches.equip.tokens import Tokens
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny
from tests.conformance import models
from tests.conformance.driving import left_padded
from tests.equip.cases import BUDGET, build, build_reference, each_way, positions_of, text
from tests.equip.cases import feed_all as feed
from tests.reference.oracles import Head, ReferenceCache, ReferenceLayer, Row

SCORED = ("h2o", "snapkv", "knorm", "keydiff", "leverage", "cur", "lagkv")


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model():
    return tiny.llama()


def cache_of(model: Any, policy: Any = "expected_attention", budget: Any = BUDGET, **options: Any) -> EquipCache:
    return EquipCache(model, policy, budget, head_budgets="adakv", **options)


def rooms(cache: EquipCache, layer: int = 0) -> list[list[int]]:
    """How many slots each head of each row has."""
    return cache.layers[layer].store.rooms[..., 0].tolist()


def kept(cache: EquipCache) -> list[list[list[int]]]:
    """The positions that each head of each row of each layer keeps."""
    return [
        [[sorted(p for p in head if p >= 0) for head in row] for row in cache.kept_positions(layer).tolist()]
        for layer in range(len(cache.layers))
    ]


# The oracle: lists of tokens, a head at a time.


def stay(scores: list[list[float]], positions: list[list[int]], budget: int, first: int, sinks: int, recent: int) -> list[list[int]]:
    """For each head the indices of the tokens that stay, in plain loops; an empty slot has the position -1.

    Args:
        first: The position of the row's first token.
    """
    ranked = []
    guarded: list[tuple[int, int]] = []
    for head, (worths, places) in enumerate(zip(scores, positions, strict=True)):
        newest = sorted(place for place in places if place >= 0)[-recent:] if recent else []
        tokens = []
        for index, (worth, place) in enumerate(zip(worths, places, strict=True)):
            if place < 0:
                continue
            protected = place < first + sinks or place in newest
            tokens.append((protected, 0.0 if protected else worth, place, -head, index))
        tokens.sort(reverse=True)
        protected = sum(token[0] for token in tokens)
        own = protected + math.ceil((budget - protected) / 5)
        guarded += [(head, token[-1]) for token in tokens[:own]]
        ranked += tokens
    ranked.sort(reverse=True)
    rest = [(-head, index) for *_, head, index in ranked if (-head, index) not in guarded]
    chosen = guarded + rest[: max(0, budget * len(scores) - len(guarded))]
    return [sorted(index for of, index in chosen if of == head) for head in range(len(scores))]


class SharedLayer(ReferenceLayer):
    """A reference whose heads have slots of their own number."""

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
        if not step:
            scores, ranks = ([getattr(head, name).tolist() for head in row.heads] for name in ("scores", "ranks"))
            stays = stay(scores, ranks, self.budget, 0, self.sinks, self.recent)
            row.heads = [head.gather(torch.tensor(index)) for head, index in zip(row.heads, stays, strict=True)]
            left = self.budget * self.kv_heads - sum(map(len, row.heads))
            share, more = divmod(left, self.kv_heads)
            row.room = [len(head) + share + (number < more) for number, head in enumerate(row.heads)]
        return output.transpose(0, 1)


def oracle(model: Any, policy: str, **options: Any) -> ReferenceCache:
    reference = build_reference(model, policy, **options)
    kind = type(reference.layers[0])
    for layer in reference.layers:
        layer.__class__ = type("Shared", (SharedLayer, kind), {"take": SharedLayer.take})
    return reference


def kept_by(reference: ReferenceCache) -> list[list[list[int]]]:
    return [[[*map(int, head.positions)] for row in layer.rows for head in row.heads] for layer in reference.layers]


@pytest.mark.parametrize("seed", range(12))
def test_the_layers_best_scores_stay_besides_each_heads_own(seed):
    generator = torch.Generator().manual_seed(seed)
    heads, slots, sinks, recent = 3, 30, seed % 3 * 2, seed % 4
    scores = torch.randn(2, heads, slots, generator=generator) + 3 * torch.randn(2, heads, 1, generator=generator)
    if seed % 2:  # ties, and what is not scored yet
        scores = scores.round()
    if seed % 3 == 2:
        scores[:, 1, : 9 + seed] = torch.inf
    positions = torch.arange(slots).expand(2, heads, slots).clone()
    positions[1, :, :5] = -1
    positions[0, 2, 8 : 8 + seed] = -1
    first = torch.tensor([0, 5])
    kept = chosen(KeyNormPolicy(), scores, positions, 9, sinks_end=first[:, None, None] + sinks, recent=recent)
    for row in range(2):
        expected = stay(scores[row].tolist(), positions[row].tolist(), 9, int(first[row]), sinks, recent)
        assert [kept[row, head].nonzero()[:, 0].tolist() for head in range(heads)] == expected
    assert kept.sum((1, 2)).tolist() == [27, 27]


def test_one_head_may_get_nearly_all_but_the_others_keep_a_fifth_of_theirs():
    scores = torch.rand(1, 4, 100) + torch.tensor([9.0, 0.0, 0.0, 0.0])[:, None]
    kept = chosen(KeyNormPolicy(), scores, torch.arange(100).expand(1, 4, 100), 24, sinks_end=4, recent=0)
    assert kept.sum(-1).tolist() == [[72, 8, 8, 8]]


def test_slots_left_over_go_to_all_heads_alike():
    assert shares(torch.tensor([[[5], [1]], [[3], [3]]]), 5).flatten().tolist() == [7, 3, 5, 5]
    assert shares(torch.tensor([[[5], [2]]]), 5).flatten().tolist() == [7, 3]
    assert shares(torch.tensor([[[3], [3]]]), 5) is None


@each_way
@pytest.mark.parametrize("policy", SCORED)
def test_kept_tokens_and_logits_are_those_of_lists_of_tokens(policy, way):
    model = models.tiny("llama")
    ids = text(80)
    cache = build(model, policy, head_budgets="adakv", **way)
    reference = oracle(model, policy, positions=way.get("positions", "compact"))
    start, spans = 0, (40, *[1] * 12, 9, 6, *[1] * 7)
    for span in spans:
        new, start = ids[:, start : start + span], start + span
        torch.testing.assert_close(feed(model, cache, new), feed(model, reference, new), atol=1e-4, rtol=1e-4)
        assert [row for layer in kept(cache) for row in layer[0]] == [head for layer in kept_by(reference) for head in layer]
        for layer in range(len(cache.layers)):
            assert sum(rooms(cache, layer)[0]) == 2 * BUDGET


@each_way
def test_rows_with_padding_keep_what_they_keep_alone(model, way):
    alone = [tiny.ids(1, tokens, seed=tokens) for tokens in (44, 31, 10)]
    ids, mask = left_padded(alone)
    cache = cache_of(model, "keydiff", **way)
    together = [feed(model, cache, ids, mask)[:, -1]]
    more = tiny.ids(3, 8, seed=9)
    for step in range(8):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        together.append(feed(model, cache, more[:, step : step + 1], mask)[:, -1])
    for row, ids in enumerate(alone):
        single = cache_of(model, "keydiff", **way)
        expected = [
            feed(model, single, ids)[:, -1],
            *(feed(model, single, more[row : row + 1, step : step + 1])[:, -1] for step in range(8)),
        ]
        torch.testing.assert_close(torch.stack(together)[:, row], torch.stack(expected)[:, 0], atol=2e-4, rtol=1e-4)
        assert [[len(head) for head in layer[row]] for layer in kept(cache)] == [[len(head) for head in layer[0]] for layer in kept(single)]


def test_a_layer_takes_no_more_than_the_slots_of_its_heads():
    model = tiny.llama(num_attention_heads=8, num_key_value_heads=8, hidden_size=512)
    uniform, cache = (EquipCache(model, SkewedPolicy(), 64, head_budgets=way) for way in (None, "adakv"))
    for each in (uniform, cache):
        feed(model, each, tiny.ids(2, 300))
    assert [row[0] for row in rooms(cache)] == [300, 300]  # all tokens of the first head
    slots = sum(sum(row) for layer in range(4) for row in rooms(cache, layer))
    assert slots == 4 * 2 * 8 * 64
    weight = 2 * 64 * 4  # keys and values of a slot
    longest = 4 * 2 * 8 * max(rooms(cache)[0])
    states = sum(sum(t.nbytes for t in (layer.store.keys, layer.store.values)) for layer in cache.layers)
    assert states == slots * weight
    assert cache.report().bytes < 1.2 * uniform.report().bytes < 0.5 * longest * weight


class SkewedPolicy(Policy):
    """The first head's tokens are all worth more than the others'."""

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.values.float().norm(dim=-1) + 99.0 * (torch.arange(tokens.keys.shape[1]) == 0)[:, None]


class AlikePolicy(Policy):
    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.values.float().norm(dim=-1).mean(1, keepdim=True)


@each_way
@pytest.mark.parametrize("policy", ["h2o", "expected_attention"])
def test_drafts_taken_back_were_never_there(model, policy, way):
    cache = cache_of(model, policy, **way)
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


@each_way
def test_rows_are_picked_repeated_and_reordered(model, way):
    cache = cache_of(model, "h2o", **way)
    ids = tiny.ids(2, 50, seed=6)
    feed(model, cache, ids[:, :40])
    more, picked = tiny.ids(3, 9, seed=8), torch.tensor([1, 0, 1])
    other = copy.deepcopy(cache)
    other.batch_select_indices(picked)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 1, 3, 0]))
    cache.batch_select_indices(torch.tensor([0, 1, 2]))
    torch.testing.assert_close(feed(model, cache, more), feed(model, other, more), atol=1e-5, rtol=1e-5)
    for row, source in enumerate(picked.tolist()):
        single = cache_of(model, "h2o", **way)
        feed(model, single, ids[source : source + 1, :40])
        feed(model, single, more[row : row + 1])
        assert [layer[row] for layer in kept(cache)] == [layer[0] for layer in kept(single)]


def test_generate_with_beams_drafts_and_another_turn(model):
    ids = tiny.ids(1, 40, seed=7)
    plain = cache_of(model, "h2o")
    options = {"max_new_tokens": 12, "do_sample": False}
    first = model.generate(ids, past_key_values=plain, **options)
    drafted = model.generate(ids, past_key_values=cache_of(model, "h2o"), prompt_lookup_num_tokens=3, **options)
    assert torch.equal(first, drafted)
    turn = torch.cat([first, tiny.ids(1, 20, seed=8)], 1)
    model.generate(turn, past_key_values=plain, **options)
    assert plain.seen > turn.shape[1]
    assert sum(rooms(plain)[0]) == 2 * BUDGET
    beams = model.generate(ids, past_key_values=cache_of(model, "h2o"), num_beams=3, **options)
    assert torch.equal(beams[:, :40], ids)


@pytest.mark.parametrize("policy", ["keydiff", "kvzip", "compactor"])
def test_compress_shares_anew_and_leaves_what_stands_behind(model, policy):
    ids = tiny.ids(1, 50, seed=9)
    cache = cache_of(model, policy, 24, decode_budget=60)
    feed(model, cache, ids[:, :44])
    feed(model, cache, ids[:, 44:])
    cache.compress(model, upto=44, input_ids=ids)
    for layer in range(4):
        assert sum(map(len, kept(cache)[layer][0])) == 48
        assert sum(rooms(cache, layer)[0]) == 120
        for head in kept(cache)[layer][0]:
            assert set(range(44, 50)) | set(range(4)) <= set(head)
    assert feed(model, cache, tiny.ids(1, 3)).isfinite().all()


@each_way
def test_evicted_tokens_leave_slots_that_are_filled_again_in_each_head(model, way):
    cache = cache_of(model, SkewedPolicy(), **way)
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


@each_way
def test_an_edit_shares_anew(model, way):
    cache = cache_of(model, "keydiff", **way)
    feed(model, cache, tiny.ids(1, 40, seed=11))
    cache.edit(model, 36, 38, [5, 6, 7, 8, 9])
    assert cache.seen == 43
    assert sum(rooms(cache)[0]) == 2 * BUDGET
    assert feed(model, cache, tiny.ids(1, 4)).isfinite().all()


def test_the_same_tokens_go_on_after_a_file_and_in_a_copy(model, tmp_path):
    cache = cache_of(model, "h2o")
    ids, more = tiny.ids(2, 40, seed=12), tiny.ids(2, 9, seed=13)
    feed(model, cache, ids)
    cache.save(tmp_path / "cache.safetensors")
    loaded = EquipCache.load(tmp_path / "cache.safetensors", model)
    assert loaded.settings() == cache.settings()
    assert loaded.settings()["head_budgets"] == "adakv"
    others = [loaded, copy.deepcopy(cache)]
    feed(model, copy.deepcopy(cache), tiny.ids(2, 30))  # a copy shares nothing
    for each in others:
        twin = copy.deepcopy(cache)
        for step in range(9):
            new = more[:, step : step + 1]
            torch.testing.assert_close(feed(model, each, new), feed(model, twin, new), rtol=0, atol=0)
        assert kept(each) == kept(twin)


def test_short_prompts_fill_up_before_anything_is_shared(model):
    cache, uniform = cache_of(model, "h2o"), EquipCache(model, "h2o", BUDGET)
    ids = tiny.ids(2, 40, seed=14)
    for part in (ids[:, :8], *ids[:, 8:24].split(1, 1)):
        torch.testing.assert_close(feed(model, cache, part), feed(model, uniform, part), atol=1e-5, rtol=1e-5)
    feed(model, cache, ids[:, 24:])
    assert [sum(row) for row in rooms(cache)] == [2 * BUDGET] * 2


def test_a_budget_for_decoding_adds_the_same_slots_to_each_head(model):
    cache = cache_of(model, SkewedPolicy(), 16, decode_budget=20, question_start=-6)
    feed(model, cache, tiny.ids(1, 46, seed=15))
    assert sum(rooms(cache)[0]) == 40
    for step in range(8):
        feed(model, cache, tiny.ids(1, 1, seed=step))
    assert sum(map(len, kept(cache)[0][0])) == 40


def test_bfloat16_stays_near_float32():
    model = tiny.llama()
    ids = tiny.ids(1, 44, seed=16)
    exact = cache_of(model, SkewedPolicy(), positions="original")
    feed(model, exact, ids[:, :40])
    expected = [feed(model, exact, ids[:, at : at + 1]) for at in range(40, 44)]
    model = model.to(torch.bfloat16)
    cache = cache_of(model, SkewedPolicy(), positions="original")
    feed(model, cache, ids[:, :40])
    for at, logits in zip(range(40, 44), expected, strict=True):
        actual = feed(model, cache, ids[:, at : at + 1]).float()
        assert torch.nn.functional.cosine_similarity(actual, logits, dim=-1).min() > 0.95


def test_softcap_and_learned_positions():
    for model in (tiny.gemma2(layer_types=["full_attention"] * 4), tiny.gpt2()):
        cache = cache_of(model, "keydiff")
        feed(model, cache, tiny.ids(1, 40))
        for step in range(5):
            assert feed(model, cache, tiny.ids(1, 1, seed=step)).isfinite().all()


def test_everything_kept_is_the_full_cache(model):
    ids = tiny.ids(2, 40, seed=17)
    cache, past = cache_of(model, "keydiff", 64), DynamicCache(config=model.config)
    for part in (ids[:, :30], *ids[:, 30:36].split(1, 1), ids[:, 36:]):
        torch.testing.assert_close(feed(model, cache, part), feed(model, past, part), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("policy", "options", "error", "why"),
    [
        ("streaming", {}, ConfigError, "same tokens"),
        ("tova", {}, ConfigError, "same tokens"),
        ("h2o", {"page_size": 8}, UnsupportedError, "page"),
        ("h2o", {"rope": "rotated_keys"}, UnsupportedError, "on_read"),
    ],
)
def test_what_can_not_share_slots_is_refused_when_the_cache_is_made(model, policy, options, error, why):
    with pytest.raises(error, match=f"^head_budgets: .*{why}"):
        cache_of(model, policy, **options)


def test_other_refusals(model):
    with pytest.raises(ConfigError, match="head_budgets"):
        EquipCache(model, head_budgets="uniform")
    with pytest.raises(UnsupportedError, match="head_budgets"):
        cache_of(model, "h2o", pool=PagePool(model, pages=8, page_size=8))
    with pytest.raises(ConfigError, match="same tokens"):
        feed(model, cache_of(model, AlikePolicy()), tiny.ids(1, 40))
    with torch.enable_grad(), pytest.raises(UnsupportedError, match="gradients"):
        model(input_ids=tiny.ids(1, 40), past_key_values=cache_of(model, "h2o"), use_cache=True)


@pytest.mark.parametrize("rotated", [False, True])
def test_one_head_after_the_other_gives_what_a_padded_tensor_gives(rotated):
    """On an accelerator heads are padded."""
    geometry = RotaryGeometry.from_config(tiny.llama().config)
    store = RaggedStore(SlotRotation("on_read" if rotated else "given", geometry), "torch")
    sizes = torch.tensor([[5, 1, 9], [2, 7, 3]])[..., None]
    keys, values, query = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 6), torch.randn(2, 6, 1, 8)
    store.install(keys, values, sizes, sizes)
    valid = torch.arange(9) < sizes
    options = {
        "valid": valid & torch.arange(9).remainder(4).ne(2),
        "leading": 4 if rotated else 1,
        "leading_query": torch.randn(2, 6, 1, 8),
        "softcap": 3.0,
        "sink_logits": torch.randn(6),
        "want_weights": True,
        "ranks": torch.randint(9, (2, 1, 9)) if rotated else None,
    }
    actual, expected = store.attend(query, 9, 0.5, **options), FlatStore.attend(store, query, 9, 0.5, **options)
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1])
