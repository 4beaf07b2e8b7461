"""Pages: the same numbers as one buffer a row, no page lost, shared until one writes, and nothing changed where there is no room."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections import Counter
from functools import cache
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from hf_kvcaches.equip.cache import EquipCache
from hf_kvcaches.equip.layer import EquipLayer
from hf_kvcaches.equip.pages import BlockTable, PagePool
from hf_kvcaches.errors import ConfigError, PoolExhausted, UnsupportedError
from tests import tiny
from tests.conformance import driving
from tests.conformance.entries import calibrated, codec_of
from tests.equip import cases
from tests.equip.cases import same as same_state

BUDGET = 18
# "codec": as many bytes a slot in all layers; "small_codec": other ones in each.
SCHEMES: dict[str, dict] = {"compact": {"positions": "compact"}, "original": {"positions": "original"}}
PLAIN = ("streaming", "keydiff")
CODECS = ("codec", "small_codec")
each_scheme = pytest.mark.parametrize("scheme", ["compact", *CODECS])
with_codec = pytest.mark.parametrize("scheme", ["compact", "codec"])


@cache
def model() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=2)


def options_of(scheme: str, of: PreTrainedModel | None = None) -> dict:
    """The arguments of a cache."""
    if scheme not in CODECS:
        return SCHEMES[scheme]
    codec = calibrated(of or model(), codec_of)
    return {"codec": codec if scheme == "codec" else codec.at(0.4)}


def padded(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(lengths)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return tiny.ids(len(lengths), width) * mask, mask


def feed(cache_: EquipCache, ids: torch.Tensor, prompt: int, mask: torch.Tensor | None = None, on: PreTrainedModel | None = None):
    """A prompt, then token by token: all logits."""
    return driving.feed(on or model(), cache_, ids, [prompt] + [1] * (ids.shape[1] - prompt), mask, keep=0)


def paged_layers(cache_: EquipCache) -> list[EquipLayer]:
    return [layer for layer in cache_.layers if isinstance(layer, EquipLayer)]


def pages_of(layer: EquipLayer) -> BlockTable:
    return layer.storage.table


def pool_of(cache_: EquipCache) -> PagePool:
    return pages_of(paged_layers(cache_)[0]).pool


def same(actual: torch.Tensor, expected: torch.Tensor, rounds: bool) -> None:
    """In one buffer the sinks of a stream alone are rotated, or the model attends itself, which rounds otherwise."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(expected.abs().max()) * rounds)


def flat_cache(policy: str, **options) -> EquipCache:
    return EquipCache(model(), policy, BUDGET, head_budgets=None, **options)


def held_pages(cache_: EquipCache) -> list[int]:
    return [page for layer in paged_layers(cache_) for row in pages_of(layer).rows for page in row]


def check_conserved(pool: PagePool, *caches: EquipCache) -> None:
    """Every page is free or has as many holders as rows name it, and rows have those that their tokens take."""
    for layer in (layer for each in caches for layer in paged_layers(each)):
        kept, table = layer.table.kept().amax((1, 2)).tolist(), pages_of(layer)
        assert [len(row) for row in table.rows] == [-(-tokens // table.size) for tokens in kept]
    held = Counter(page for each in caches for page in held_pages(each))
    assert {page for page, count in held.items() if count > 1} == pool.shared(held)
    assert all(1 <= page <= pool.pages for page in held)
    assert len(held) + pool.free_pages == pool.pages


def state(cache_: EquipCache) -> dict:
    return cases.state(cache_) | {"pages": copy.deepcopy([pages_of(layer).rows for layer in paged_layers(cache_)])}


# The same numbers


@pytest.mark.parametrize("scheme", [*SCHEMES, *CODECS])
@pytest.mark.parametrize("policy", ["streaming", "h2o", "tova", "keydiff"])
def test_logits_are_those_of_the_flat_layout(policy: str, scheme: str) -> None:
    options = options_of(scheme)
    for (ids, mask), prompt in (((tiny.ids(1, 60), None), 40), (padded(60, 50, 37), 40), (padded(50, 30), 21)):
        flat = flat_cache(policy, **options)
        expected = feed(flat, ids, prompt, mask)
        for size in (1, 3, 16) if policy == "h2o" else (3,):
            paged = EquipCache(model(), policy, BUDGET, page_size=size, **options)
            same(feed(paged, ids, prompt, mask), expected, policy in PLAIN)
            assert torch.equal(paged.kept_positions(1), flat.kept_positions(1))


@pytest.mark.parametrize("coded", [False, True])
def test_models_without_rotation_and_with_sliding_layers_equal_the_flat_layout(coded: bool) -> None:
    for other in (tiny.gpt2(), tiny.gemma2()):
        ids, mask = padded(40, 31)
        options = options_of("small_codec", other) if coded else {}
        expected = feed(EquipCache(other, "h2o", BUDGET, **options), ids, 25, mask, on=other)
        assert torch.equal(feed(EquipCache(other, "h2o", BUDGET, page_size=5, **options), ids, 25, mask, on=other), expected)


@each_scheme
def test_what_a_page_held_before_is_never_seen(scheme: str) -> None:
    pool, options = PagePool(model(), pages=80, page_size=4), options_of(scheme)
    ids, mask = padded(40, 22)
    expected = feed(EquipCache(model(), "h2o", BUDGET, **options), ids, 25, mask)
    first = EquipCache(model(), "h2o", BUDGET, pool=pool, **options)
    feed(first, tiny.ids(2, 40), 30)
    for store in pool.stores.values():
        store[held_pages(first)] = torch.nan if store.is_floating_point() else 255
    first.reset()
    assert torch.equal(feed(EquipCache(model(), "h2o", BUDGET, pool=pool, **options), ids, 25, mask), expected)


# Several on one pool


@pytest.mark.parametrize("schemes", [["compact", "compact", "original"], ["small_codec"] * 3], ids=str)
def test_caches_that_take_turns_on_one_pool_don_t_see_each_other(schemes: list[str]) -> None:
    pool = PagePool(model(), pages=200, page_size=4)
    kinds = [(policy, options_of(scheme)) for policy, scheme in zip(("streaming", "h2o", "tova"), schemes, strict=True)]
    texts = [tiny.ids(1, 45, seed=seed) for seed in range(3)]
    expected = [feed(flat_cache(policy, **options), ids, 10) for (policy, options), ids in zip(kinds, texts, strict=True)]
    caches = [EquipCache(model(), policy, BUDGET, pool=pool, **options) for policy, options in kinds]
    spans = [slice(0, 10)] + [slice(at, at + 1) for at in range(10, 45)]
    logits = [[feed(each, ids[:, span], span.stop - span.start) for each, ids in zip(caches, texts, strict=True)] for span in spans]
    for index, wanted in enumerate(expected):
        same(torch.cat([step[index] for step in logits], 1), wanted, kinds[index][0] in PLAIN)
    check_conserved(pool, *caches)


def test_threads_take_and_give_back_pages_at_once() -> None:
    pool = PagePool(model(), pages=64, page_size=4)
    pool.open("", {"keys": (2, 4, 8)}, torch.float32, torch.device("cpu"))
    owners: list[int | None] = [None] * 65
    clashes = []

    def work(me: int) -> None:
        for turn in range(200):
            pages = pool.take(1 + (turn + me) % 8)
            clashes.extend(page for page in pages if owners[page] is not None)
            for page in pages:
                owners[page] = me
            for page in pages:
                owners[page] = None
            pool.count(pages)
            pool.count((), pages)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (clashes, pool.free_pages) == ([], 64)


def test_a_page_that_another_stream_gave_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, (one, other, third) = PagePool(model(), pages=2), (Mock() for _ in range(3))
    first, shared = pool.take(2)
    pool.count([first, shared, shared])
    pool.count((), [first], stream=one)
    pool.count((), [shared], stream=other)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: third)
    assert pool.shared([shared]) == set()  # so that its holder may write to it
    assert {call.args for call in third.wait_event.mock_calls} == {(one.record_event(),), (other.record_event(),)}
    assert pool.take(1) == [first]


# What rows take


@with_codec
@pytest.mark.parametrize("size", [1, 3, 16])
def test_rows_take_the_pages_that_their_own_tokens_fill(size: int, scheme: str) -> None:
    options = options_of(scheme)
    made = EquipCache(model(), "h2o", 40, page_size=size, **options)
    ids, mask = padded(30, 17, 1)
    for stop in (20, *range(21, 31)):
        start = made.seen
        feed(made, ids[:, start:stop], stop - start, mask)
        real = mask[:, :stop].sum(-1).tolist()
        for layer in paged_layers(made):
            assert [len(row) for row in pages_of(layer).rows] == [-(-count // size) for count in real]
    report = made.report()
    slot = 2 * 2 * 8 * (3 if "codec" in options else 4)  # keys and values, heads, head size, 24 bits or float32
    assert report.bytes >= len(held_pages(made)) * size * slot
    flat = EquipCache(model(), "h2o", 40, **options)
    feed(flat, ids, 30, mask)
    assert report.bytes < flat.report().bytes


def test_codes_of_fewer_bytes_take_fewer_pages() -> None:
    codec = options_of("small_codec")["codec"]
    narrow, wide = sorted(layer.nbytes for layer in codec.slots.layers.values())
    assert narrow < wide
    made = EquipCache(model(), "streaming", 40, page_size=4, codec=codec)
    feed(made, tiny.ids(2, 50), 45)
    pages = [len(row) for layer in paged_layers(made) for row in pages_of(layer).rows]
    assert max(pages) == 10
    assert min(pages) == -(-40 // (4 * wide // narrow))
    assert pool_of(made).bytes == (pool_of(made).pages + 1) * 4 * wide
    sinks = 2 * 2 * 5 * 2 * 2 * 8 * 4  # layers, rows, slots of sinks, keys and values, heads, head size, float32
    assert (
        sum(tensor.nbytes for layer in paged_layers(made) for tensor in layer.storage.tensors().values()) == sum(pages) * 4 * wide + sinks
    )


@with_codec
def test_pages_go_back_with_reset_and_with_the_cache(scheme: str) -> None:
    pool = PagePool(model(), pages=100, page_size=4)
    made = EquipCache(model(), "h2o", BUDGET, pool=pool, **options_of(scheme))
    feed(made, tiny.ids(2, 30), 25)
    assert pool.free_pages < 100
    made.reset()
    assert pool.free_pages == 100
    feed(made, tiny.ids(2, 30), 25)
    gc.disable()  # the last reference is enough
    try:
        del made
        assert pool.free_pages == 100
    finally:
        gc.enable()


# No room


@with_codec
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_an_exhausted_pool_changes_nothing_and_work_goes_on_when_pages_are_free(policy: str, scheme: str) -> None:
    ids, other, options = tiny.ids(2, 40), tiny.ids(1, 40, seed=2), options_of(scheme)
    expected = feed(flat_cache(policy, **options), ids, 5)
    pool = PagePool(model(), pages=25, page_size=4)  # full caches hold 20 and 10
    waits, blocks = (EquipCache(model(), policy, BUDGET, pool=pool, **options) for _ in range(2))
    feed(blocks, other, 30)
    logits = []
    for done in (5, *range(6, 13)):  # three pages for each row and layer
        logits.append(feed(waits, ids[:, waits.seen : done], done - waits.seen))
    before = state(waits), state(blocks)
    with pytest.raises(PoolExhausted, match=r"4 more pages are needed, and 3 of 25 are free"):
        feed(waits, ids[:, 12:13], 1)
    assert same_state(before[0], state(waits))
    assert same_state(before[1], state(blocks))
    check_conserved(pool, waits, blocks)
    blocks.reset()
    logits.append(feed(waits, ids[:, 12:], 1))
    same(torch.cat(logits, 1), expected, policy in PLAIN)


@with_codec
def test_a_prompt_that_does_not_fit_leaves_an_empty_cache_empty(scheme: str) -> None:
    pool, options = PagePool(model(), pages=9, page_size=4), options_of(scheme)
    made = EquipCache(model(), "h2o", BUDGET, pool=pool, **options)
    empty = state(made)
    for _ in range(2):
        with pytest.raises(PoolExhausted, match=r"10 more .* 9 of 9"):
            feed(made, tiny.ids(1, 30), 30)
        assert same_state(empty, state(made))
    assert torch.equal(feed(made, tiny.ids(1, 16), 16), feed(EquipCache(model(), "h2o", BUDGET, **options), tiny.ids(1, 16), 16))


@each_scheme
def test_repeats_and_copies_take_no_page_until_something_is_written(scheme: str) -> None:
    pool, options = PagePool(model(), pages=60, page_size=4), options_of(scheme)
    made, flat = EquipCache(model(), "h2o", BUDGET, pool=pool, **options), flat_cache("h2o", **options)
    for each in (made, flat):
        feed(each, tiny.ids(1, 10), 10)
    held = 60 - pool.free_pages
    for each in (made, flat):
        each.batch_repeat_interleave(4)
    copied = copy.deepcopy(made)
    assert (60 - pool.free_pages, pool_of(copied)) == (held, pool)
    check_conserved(pool, made, copied)
    new = tiny.ids(4, 12, seed=3)
    assert torch.equal(feed(made, new[:, :1], 1), feed(flat, new[:, :1], 1))
    assert 60 - pool.free_pages <= held + 2 * 4  # a page of each row and layer
    before = state(copied)
    assert torch.equal(feed(made, new[:, 1:], 1), feed(flat, new[:, 1:], 1))
    assert same_state(before, state(copied))
    check_conserved(pool, made, copied)
    del copied
    assert torch.equal(feed(made, new, 12), feed(flat, new, 12))
    check_conserved(pool, made)


CHANGES = {
    "evict": lambda made: made.evict(range(10, 20)),
    "edit": lambda made: made.edit(model(), 10, 20, [3, 4]),
    "compress": lambda made: made.compress(model()),
    "crop": lambda made: made.crop(-2),
    "step": lambda made: feed(made, tiny.ids(2, 1, seed=3), 1),
    "block": lambda made: feed(made, tiny.ids(2, 9, seed=3), 9),
}


@with_codec
@pytest.mark.parametrize("change", CHANGES)
def test_shared_pages_that_can_t_all_be_copied_leave_every_cache_as_it_was(change: str, scheme: str) -> None:
    refused = []
    for spare in (1, 2, 5, 10, 19, 20):  # rows of five pages, two of them, in two layers
        pool = PagePool(model(), pages=20 + spare, page_size=4)
        made = EquipCache(model(), "h2o", BUDGET, pool=pool, **options_of(scheme))
        feed(made, tiny.ids(2, 26), 20)
        made.activate_past_recording()
        feed(made, tiny.ids(2, 2, seed=2), 1)
        copied = copy.deepcopy(made)
        before = state(made), state(copied)
        try:
            CHANGES[change](made)
        except PoolExhausted:
            refused.append(spare)
            assert same_state(before[0], state(made))
        assert same_state(before[1], state(copied))
        check_conserved(pool, made, copied)
        del copied
        feed(made, tiny.ids(2, 3), 1)
    assert {1, 20} & {*refused} == {1}


@with_codec
def test_an_edit_that_does_not_fit_changes_nothing(scheme: str) -> None:
    pool = PagePool(model(), pages=8, page_size=4)
    made = EquipCache(model(), "h2o", BUDGET, pool=pool, **options_of(scheme))
    feed(made, tiny.ids(1, 14), 14)
    before = state(made)
    with pytest.raises(PoolExhausted):
        made.edit(model(), 4, 6, list(range(3, 15)))
    assert same_state(before, state(made))
    feed(made, tiny.ids(1, 2), 1)
    check_conserved(pool, made)


# Rows and states


@with_codec
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_taking_tokens_back_restores_pages_and_gives_back_the_rest(policy: str, scheme: str) -> None:
    pool, options = PagePool(model(), pages=60, page_size=2), options_of(scheme)
    ids = tiny.ids(1, 40)
    flat, paged = EquipCache(model(), policy, BUDGET, **options), EquipCache(model(), policy, BUDGET, pool=pool, **options)
    for each in (flat, paged):
        feed(each, ids[:, :12], 12)
        each.activate_past_recording()
    at = 12
    for drafts, refused in ((4, 3), (5, 5), (6, 0), (7, 4)):
        logits = [feed(each, ids[:, at : at + drafts], drafts) for each in (flat, paged)]
        same(*logits, policy in PLAIN)
        for each in (flat, paged):
            each.crop(-refused)
        at += drafts - refused
        check_conserved(pool, paged)
        assert torch.equal(flat.kept_positions(0), paged.kept_positions(0))


@pytest.mark.parametrize("scheme", ["compact", "codec"])
def test_edits_equal_the_flat_layout_and_give_pages_back(scheme: str) -> None:
    pool, options = PagePool(model(), pages=60, page_size=2), options_of(scheme)
    flat, paged = EquipCache(model(), "h2o", 30, **options), EquipCache(model(), "h2o", 30, pool=pool, **options)
    ids, new = tiny.ids(1, 24), tiny.ids(1, 8, seed=3)
    for each in (flat, paged):
        feed(each, ids, 24)
        each.evict([5, 6, 7, 8, 9])
    check_conserved(pool, paged)
    assert torch.equal(feed(paged, new, 1), feed(flat, new, 1))
    for each in (flat, paged):
        each.edit(model(), 12, 18, new[0, :2])
    check_conserved(pool, paged)
    assert torch.equal(feed(paged, new, 1), feed(flat, new, 1))


@with_codec
def test_a_cache_whose_tokens_were_all_evicted_has_no_pages_and_goes_on(scheme: str) -> None:
    ids, new, options = tiny.ids(1, 12), tiny.ids(1, 8, seed=3), options_of(scheme)
    flat, paged = EquipCache(model(), "h2o", BUDGET, **options), EquipCache(model(), "h2o", BUDGET, page_size=4, **options)
    for each in (flat, paged):
        feed(each, ids, 12)
        each.evict(range(12))
    assert held_pages(paged) == []
    assert torch.equal(feed(paged, new, 1), feed(flat, new, 1))
    check_conserved(pool_of(paged), paged)


@given(
    st.sampled_from(["compact", "codec"]),
    st.lists(
        st.tuples(st.sampled_from(["feed", "block", "reset", "reorder", "repeat", "select", "delete", "copy"]), st.integers(0, 2)),
        max_size=14,
    ),
)
def test_no_page_is_lost_whatever_is_done(scheme: str, deeds: list[tuple[str, int]]) -> None:
    small = tiny_one_layer()
    pool, options = PagePool(small, pages=40, page_size=3), options_of(scheme, small)
    caches = [EquipCache(small, policy, 10, sinks=2, pool=pool, **options) for policy in ("streaming", "h2o", "tova")]
    for deed, which in deeds:
        made = caches[which]
        rows = max(1, len(made.kept_positions(0)))
        try:
            if deed in ("feed", "block"):
                feed(made, tiny.ids(rows, 4), 4 if deed == "block" else 1, on=small)
            elif deed == "reset":
                made.reset()
            elif deed == "reorder":
                made.reorder_cache(torch.zeros(rows, dtype=torch.long))
            elif deed == "repeat":
                made.batch_repeat_interleave(2)
            elif deed == "select":
                made.batch_select_indices(torch.tensor([rows - 1]))
            elif deed == "copy":
                caches[which] = copy.deepcopy(made)
            else:
                caches[which] = EquipCache(small, "keydiff", 10, sinks=2, pool=pool, **options)
        except PoolExhausted:
            made.reset()
        del made
        check_conserved(pool, *caches)


@cache
def tiny_one_layer() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16)


# What is refused


def test_a_pool_that_does_not_fit_is_refused() -> None:
    pool = PagePool(model(), pages=50, page_size=4)
    with pytest.raises(ConfigError, match="page_size: expected that of the pool, 4"):
        EquipCache(model(), page_size=8, pool=pool)
    with pytest.raises(ConfigError, match="1 key heads of size 8"):
        EquipCache(tiny_one_layer(), pool=pool)
    pool.open("keys and values", {"keys": (2, 4, 8), "values": (2, 4, 8)}, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"pool: expected pages of .* in torch\.float32 on cpu"):
        feed(EquipCache(model(), budget=BUDGET, pool=pool), tiny.ids(1, 10), 10)
    for wrong in ({"page_size": 0}, {"pages": 0}, {"page_size": 2.5}, {"pages": True}):
        with pytest.raises(ConfigError):
            PagePool(model(), **wrong)
    with pytest.raises(ConfigError, match="page_size"):
        EquipCache(model(), page_size=0)


@pytest.mark.parametrize(("first", "second"), [("codec", "small_codec"), ("codec", "compact"), ("compact", "codec")])
def test_a_pool_with_pages_of_another_kind_is_refused_and_both_caches_stay_as_they_were(first: str, second: str) -> None:
    pool, ids = PagePool(model(), pages=50, page_size=4), tiny.ids(1, 20)
    one, other = (EquipCache(model(), "h2o", BUDGET, pool=pool, **options_of(scheme)) for scheme in (first, second))
    feed(one, ids[:, :15], 15)
    before = state(one)
    with pytest.raises(ConfigError, match="pool: expected pages of"):
        feed(other, ids, 15)
    assert same_state(before, state(one))
    assert (other.seen, held_pages(other)) == (0, [])
    expected = feed(EquipCache(model(), "h2o", BUDGET, **options_of(first)), ids, 15)[:, 15:]
    assert torch.equal(feed(one, ids[:, 15:], 1), expected)


def test_a_shared_pool_is_not_pickled() -> None:
    with pytest.raises(UnsupportedError, match="save"):
        pickle.dumps(EquipCache(model(), budget=BUDGET, pool=PagePool(model(), pages=50, page_size=4)))


def test_a_pool_says_what_it_has() -> None:
    pool = PagePool(model(), pages=50, page_size=4)
    assert pool.bytes == 0
    made = EquipCache(model(), budget=BUDGET, pool=pool)
    feed(made, tiny.ids(1, 10), 10)
    assert pool.bytes == 51 * 4 * 2 * 8 * 4 * 2
    assert repr(pool) == "PagePool(pages=50, free_pages=44, page_size=4, 0.02 MiB)"
    assert made.settings()["page_size"] == 4
