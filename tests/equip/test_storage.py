"""Slots in 8 or 4 bits, or as codes: near to full precision, in a part of its bytes, and never quantized twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GPT2Config, PreTrainedModel

from hf_kvcaches import EquipCache, FingerprintMismatch, KVCodec
from hf_kvcaches.equip.coded import Coded, PagedCodes, QuantizedSlots
from hf_kvcaches.equip.pages import PagePool
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny
from tests.conformance.driving import feed
from tests.conformance.entries import calibrated
from tests.equip.cases import feed_all, held, padded, positions_of, text

pytestmark = pytest.mark.usefixtures("no_grad")

# On logits of standard deviation 1, for slots that are all dequantized in each step.
CLOSE = {"int8": 0.06, "int4": 0.7, "codec": 0.06, "paged_codec": 0.06}
CODED = ("codec", "paged_codec")
each_storage = pytest.mark.parametrize("storage", list(CLOSE))


def gentle(**changes: Any) -> PreTrainedModel:
    """A model whose attention is not all on one token, with heads of 64."""
    return tiny.llama(**{"hidden_size": 256, "head_dim": 64, "initializer_range": 0.06, **changes})


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return gentle()


def in_few_bits(model: PreTrainedModel, policy: Any, budget: Any, *, storage: str, **options: Any) -> EquipCache:
    """A cache that keeps slots in few bits; "codec": as codes of 24 bits a direction."""
    if storage not in CODED:
        return EquipCache(model, policy, budget, storage=storage, **options)
    return EquipCache(model, policy, budget, codec=codec_of(model), page_size=4 if storage == "paged_codec" else None, **options)


def codec_of(model: PreTrainedModel) -> KVCodec:
    return calibrated(model, lambda model: KVCodec.calibrate(model, None, tiny.ids(8, 64).tolist(), bytes_ratio=1.5, progress=False))


def codes_of(cache: EquipCache, position: int) -> list[torch.Tensor]:
    """What the first layer's slots hold of a token of the first head."""
    layer: Any = cache.layers[0]
    slot = cache.kept_positions(0)[:1, :1].eq(position).nonzero()[0, 2].expand(1, 2, 1)
    return list(layer.storage.gather(slot))


@each_storage
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"positions": "original"}], ids=["compact", "original"])
def test_logits_are_near_to_those_of_full_precision(storage, dtype, options):
    if storage in CODED and options:
        pytest.skip("codes are of keys without rotation")
    model = gentle().to(dtype)
    ids = torch.cat([text(60), text(60, 30)])
    whole, few = EquipCache(model, "streaming", 24, **options), in_few_bits(model, "streaming", 24, storage=storage, **options)
    schedule = [30, *[1] * 10, 10, *[1] * 10]
    expected, logits = feed(model, whole, ids, schedule), feed(model, few, ids, schedule)
    for one, other in zip(held(whole), held(few), strict=True):
        assert torch.equal(one, other)
    assert logits.dtype == expected.dtype
    assert float((logits - expected).abs().max()) < CLOSE[storage]


@each_storage
@pytest.mark.parametrize("make", [tiny.gpt2, tiny.gemma2], ids=["learned_positions", "sliding_layers"])
def test_other_positions_and_layers(storage, make):
    model, ids = make(), text(40)
    whole, few = EquipCache(model, "streaming", 16), in_few_bits(model, "streaming", 16, storage=storage)
    expected, logits = feed(model, whole, ids, [20, *[1] * 20]), feed(model, few, ids, [20, *[1] * 20])
    assert float((logits - expected).abs().mean() / expected.std()) < {"int8": 0.05, "int4": 0.5}.get(storage, 0.05)


@pytest.mark.parametrize(("storage", "share"), [("int8", 0.54), ("int4", 0.305)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bytes_are_a_share_of_half_precision_with_all_scales(storage, share, dtype):
    model, ids = gentle().to(dtype), tiny.ids(1, 500)
    bytes_of = {}
    for name in (None, storage):
        cache = EquipCache(model, "h2o", 400, storage=name)
        feed_all(model, cache, ids)
        bytes_of[name] = sum(t.nbytes for layer in cache.layers for t in layer.storage.tensors().values())
    assert share - 0.02 < bytes_of[storage] / bytes_of[None] <= share


@each_storage
@pytest.mark.parametrize("policy", ["streaming", "h2o", "keydiff"])
def test_tokens_that_stay_keep_their_codes_over_many_blocks(model, storage, policy):
    cache = in_few_bits(model, policy, 20, storage=storage)
    feed_all(model, cache, text(30))
    sink, codes = positions_of(cache)[0], codes_of(cache, positions_of(cache)[0])
    for block in range(20):
        feed_all(model, cache, text(4, 3 * block))
        feed_all(model, cache, text(1, block))
    for one, other in zip(codes_of(cache, sink), codes, strict=True):
        assert torch.equal(one, other)


@each_storage
def test_rows_without_a_new_token_keep_their_codes(model, storage):
    cache = in_few_bits(model, "streaming", 20, storage=storage)
    ids, mask = padded(2, 30, 0, 0)
    feed_all(model, cache, ids, mask)
    layer: Any = cache.layers[0]
    slots = torch.arange(20)[None, None]
    before = layer.storage.gather(slots)
    mask = torch.cat([mask, torch.tensor([[1], [0]])], 1)
    feed_all(model, cache, tiny.ids(2, 1), mask)
    same = [
        [torch.equal(*rows) for rows in zip(new, old, strict=True)] for new, old in zip(layer.storage.gather(slots), before, strict=True)
    ]
    assert not all(first for first, _ in same)
    assert all(second for _, second in same)


@each_storage
def test_evict_and_edit(model, storage):
    cache = in_few_bits(model, "keydiff", 40, storage=storage, positions="compact")
    feed_all(model, cache, text(30))
    sink = codes_of(cache, 0)
    cache.evict([7, 8])
    assert 7 not in positions_of(cache)
    cache.edit(model, 10, 12, [5, 6, 7])
    assert cache.seen == 31
    assert all(torch.equal(one, other) for one, other in zip(codes_of(cache, 0), sink, strict=True))


@pytest.mark.parametrize("storage", [storage for storage in CLOSE if storage != "paged_codec"])  # pages are for one budget
def test_a_context_is_pruned_by_compress(model, storage):
    waiting = in_few_bits(model, "kvzip", 0.5, storage=storage, head_budgets=None)
    feed_all(model, waiting, text(30))
    waiting.compress(model, input_ids=text(30))
    assert len(positions_of(waiting)) == 15


def test_a_cache_that_begins_with_one_token_stays_finite_and_near(model):
    cache, whole = EquipCache(model, "streaming", 24, storage="int8"), EquipCache(model, "streaming", 24)
    expected, logits = feed(model, whole, text(40), [1] * 40), feed(model, cache, text(40), [1] * 40)
    assert float((logits - expected).abs().max()) < 2 * CLOSE["int8"]


@each_storage
def test_a_row_whose_first_block_is_padding(model, storage):
    ids, mask = padded(2, 50, 25, 0)
    whole, few = EquipCache(model, "streaming", 16), in_few_bits(model, "streaming", 16, storage=storage)
    expected, logits = (feed(model, cache, ids, [20, 20, *[1] * 10], mask) for cache in (whole, few))
    assert float((logits - expected)[:, 1:].abs().max()) < CLOSE[storage]


def test_channels_are_fitted_to_the_real_tokens_of_a_row():
    keys, real = 5 + torch.randn(2, 2, 9, 8), torch.arange(9) >= torch.tensor([[[4]], [[0]]])
    both, alone = (QuantizedSlots("auto", "int8") for _ in range(2))
    both.prepare(keys, real, None)
    alone.prepare(keys[:1, :, 4:], real[:1, :, 4:], None)
    before = both.center
    torch.testing.assert_close((before[:1], both.spread[:1]), (alone.center, alone.spread))
    both.prepare(9 * keys, real, torch.tensor([3, 0])[:, None, None])  # a row that keeps tokens keeps its channels
    assert torch.equal(both.center[0], before[0])
    assert not torch.equal(both.center[1], before[1])


@each_storage
def test_refitted_values_are_kept_in_few_bits(model, storage):
    ids = text(90)
    alike = {"head_budgets": None, "positions": "compact"}
    plain, kept = (EquipCache(model, "future", 24, refit=refit, **alike) for refit in (True, False))
    coded = in_few_bits(model, "future", 24, storage=storage, refit=True, **alike)
    for cache in (plain, kept, coded):
        model(ids[:, :60], past_key_values=cache)
    assert positions_of(coded) == positions_of(plain)
    expected, other, found = (model(ids[:, 60:61], past_key_values=cache).logits for cache in (plain, kept, coded))
    torch.testing.assert_close(found, expected, atol=CLOSE[storage], rtol=0)
    assert (found - expected).norm() < (other - expected).norm()  # they are not those of no refit


@pytest.mark.parametrize("head_budgets", ["global", "layer"])
def test_heads_that_share_slots_are_kept_as_codes(model, head_budgets, tmp_path):
    ids = text(90).expand(2, -1).clone()
    ids[1] = ids[1].flip(0)
    options = {"head_budgets": head_budgets, "refit": True, "positions": "compact"}
    plain, coded = EquipCache(model, "future", 24, **options), in_few_bits(model, "future", 24, storage="codec", **options)
    for cache in (plain, coded):
        model(ids[:, :60], past_key_values=cache)
    assert len({len(set(positions)) for positions in coded.layers[0].kept_positions()[0].tolist()}) > 1  # they do differ
    assert torch.equal(coded.layers[0].kept_positions(), plain.layers[0].kept_positions())
    expected, found = (feed(model, copy.deepcopy(cache), ids[:, 60:], [20, *[1] * 10]) for cache in (plain, coded))
    assert float((found - expected).abs().max()) < CLOSE["codec"]
    coded.save(tmp_path / "cache.safetensors")
    loaded = EquipCache.load(tmp_path / "cache.safetensors", model)
    assert torch.equal(feed(model, loaded, ids[:, 60:], [20, *[1] * 10]), found)
    for cache in (plain, coded):
        cache.reorder_cache(torch.tensor([1, 0]))
    other = ids.flip(0)[:, 60:]
    expected, found = (feed(model, cache, other) for cache in (plain, coded))
    assert float((found - expected).abs().max()) < CLOSE["codec"]


def test_a_codec_takes_its_share_of_the_bytes_and_the_sinks():
    model = gentle().to(torch.bfloat16)
    codec = codec_of(model).at(0.125)
    cache = EquipCache(model, "streaming", 400, codec=codec)
    feed_all(model, cache, tiny.ids(1, 500))
    slots = [tensor for layer in cache.layers for tensor in layer.storage.tensors().values()]
    full = 2 * 2 * 64 * 2 * model.config.num_hidden_layers
    assert sum(tensor.nbytes for tensor in slots) <= 400 * full * 0.125 * 1.1 + (4 + 1) * full


@pytest.mark.parametrize("paged", [False, True])
def test_sinks_stay_exact_beside_codes_and_a_token_that_takes_their_slot_is_what_its_codes_say(model, paged):
    codec, (keys, values) = codec_of(model).at(0.125), torch.randn(2, 2, 2, 12, 64)
    of_layer = (codec, 0, 3, "auto")
    storage = PagedCodes(*of_layer, PagePool(model, 40, 4), [], lambda _: 16) if paged else Coded(*of_layer)
    coder = codec.slots.coder(0, torch.float32, keys.device)
    near = coder.decode(coder.encode(keys, values), torch.float32)
    storage.check(keys, values)
    storage.rebuild(None, storage.encode(keys[:, :, :10], values[:, :, :10]), 0, 16)
    torch.testing.assert_close(storage.read(10)[0], torch.cat([keys[:, :, :3], near[0][:, :, 3:10]], 2))
    index = torch.tensor([0, 7, 11, 1, 5])[None, None].expand(2, 2, 5)
    storage.rebuild(index, storage.encode(keys[:, :, 10:], values[:, :, 10:]), 10, 16)
    exact = [True, False, True, False, False]
    expected = tuple(
        torch.where(torch.tensor(exact)[:, None], one[:, :, index[0, 0]], two[:, :, index[0, 0]])
        for one, two in zip((keys, values), near, strict=True)
    )
    torch.testing.assert_close(storage.read(5), expected)
    slots = torch.tensor([[2], [4]])[None].expand(2, 2, 1)
    before = storage.gather(slots)
    storage.write(slots, storage.encode(keys[:, :, :1], values[:, :, :1]))
    assert torch.equal(storage.read(5)[0][:, 0, 2], keys[:, 0, 0])
    storage.write(slots, before)
    torch.testing.assert_close(storage.read(5), expected)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"storage": "int2"}, ConfigError),
        ({"storage": "int8", "page_size": 16}, UnsupportedError),
        ({"storage": "int8", "codec": True}, UnsupportedError),
        ({"positions": "original", "codec": True}, UnsupportedError),
    ],
    ids=str,
)
def test_refuses_what_does_not_go_together(model, options, error):
    codec = codec_of(model) if "codec" in options else None
    with pytest.raises(error, match="codec" if codec else "storage"):
        EquipCache(model, "streaming", 24, **options | {"codec": codec})


def test_a_codec_is_refused_if_it_is_none_or_of_another_model(model):
    with pytest.raises(ConfigError, match=r"KVCodec\.calibrate"):
        EquipCache(model, "streaming", 24, codec=0.125)
    with pytest.raises(FingerprintMismatch, match="KVCodec"):
        EquipCache(gentle(seed=1), "streaming", 24, codec=codec_of(model))


def test_refuses_odd_heads_in_four_bits():
    odd = tiny.build(GPT2Config(vocab_size=tiny.VOCABULARY, n_embd=36, n_layer=1, n_head=4))
    with pytest.raises(UnsupportedError, match="int8"):
        feed_all(odd, EquipCache(odd, "streaming", 24, storage="int4"), text(30))
