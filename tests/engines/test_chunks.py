"""Chunks of prompts (keys that depend on all tokens before, codes that come back, the thread that stores them), and blocks of an engine."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import ArtifactError, UnsupportedError
from hf_kvcaches.engines.chunks import BlockLayout, ChunkCoder, ChunkWriter, chain
from hf_kvcaches.stores.blobs import MemoryBlobs, StoreUnavailable
from tests import tiny
from tests.codec.measured import calibrate

ROOT = b"model and codec"
CPU = torch.device("cpu")
HEADS, TOKENS, DIMS = 3, 8, (4, 6)


@pytest.fixture(scope="module")
def model():
    return tiny.llama()


@pytest.fixture(scope="module")
def coder(model):
    return ChunkCoder(calibrate(model, tiny.ids(6, 200, seed=1).tolist(), bytes_ratio=0.75), model.config, 64)


@pytest.fixture(scope="module")
def chunk(states):
    """The first of three chunks."""
    return tuple(side[:, :, :64] for side in states)


@pytest.fixture(scope="module")
def states(model):
    """Keys and values of a prompt of 160 tokens, (layers, heads, tokens, dim) each."""
    with torch.no_grad():
        cache = model(input_ids=tiny.ids(1, 160, seed=2), use_cache=True).past_key_values
    return tuple(torch.stack([getattr(layer, side)[0] for layer in cache.layers]) for side in ("keys", "values"))


def decoded(coder, blobs, first, skip):
    """Keys and values of all layers."""
    return [torch.stack(side) for side in zip(*coder.decode(blobs, first, skip, CPU), strict=True)]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 8), st.data())
def test_a_key_says_all_tokens_up_to_the_end_of_its_chunk(ids, size, data):
    keys = chain(ROOT, ids, size)
    assert len(keys) == len(set(keys)) == len(ids) // size
    assert chain(ROOT, ids[: len(keys) * size], size) == keys
    if keys:
        changed = data.draw(st.integers(0, len(keys) * size - 1))
        other = chain(ROOT, [*ids[:changed], ids[changed] + 1, *ids[changed + 1 :]], size)
        assert other[: changed // size] == keys[: changed // size]
        assert not set(other[changed // size :]) & set(keys)
        assert not set(chain(b"another model", ids, size)) & set(keys)


def test_chunks_come_back_at_their_positions_whatever_their_number(coder, states):
    blobs = coder.encode(states, 0)
    assert len(blobs) == 3
    for found, expected in zip(decoded(coder, blobs, 0, 0), states, strict=True):
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0)
    later = decoded(coder, blobs[1:], 64, 5)
    for found, expected in zip(later, states, strict=True):
        torch.testing.assert_close(found, expected[:, :, 69:], atol=0.05, rtol=0)


def test_chunks_have_the_codes_that_they_have_alone(coder, states):
    together = coder.encode(states, 0)
    for blob, start in zip(together, (0, 64, 128), strict=True):
        (alone,) = coder.encode(tuple(side[:, :, start : start + 64] for side in states), start)
        assert blob.keys() == alone.keys()
        assert all(torch.equal(tensor, alone[name]) for name, tensor in blob.items())


def test_the_first_tokens_of_a_prompt_come_back_as_they_were(coder, states):
    blobs = coder.encode(states, 0)
    for found, expected in zip(decoded(coder, blobs, 0, 0), states, strict=True):
        assert torch.equal(found[:, :, :4], expected[:, :, :4])
    for found, expected in zip(decoded(coder, blobs[:1], 0, 3), states, strict=True):
        assert torch.equal(found[:, :, 0], expected[:, :, 3])


def test_encoding_leaves_what_it_is_given_as_it_was(coder, states):
    before = [side.clone() for side in states]
    coder.encode(states, 0)
    assert all(torch.equal(side, copy) for side, copy in zip(states, before, strict=True))


def test_records_that_do_not_fit_each_other_are_refused(coder, states):
    blob, *_ = coder.encode(states, 0)
    with pytest.raises(ArtifactError, match="don't fit"):
        decoded(coder, [blob | {"codes": blob["codes"][:-1]}], 0, 0)
    with pytest.raises(ArtifactError, match="don't fit"):
        decoded(coder, [blob | {"sizes": blob["sizes"][:-1]}], 0, 0)


class SlowBlobs(MemoryBlobs):
    """A store that waits, and notes what is put."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on, self.put_keys = threading.Event(), []

    def put(self, key, head, tensors):
        self.goes_on.wait(10)
        self.put_keys.append(key)
        return super().put(key, head, tensors)


def test_chunks_are_stored_once_and_in_the_background(coder, chunk):
    store, complaints = SlowBlobs(), []
    writer = ChunkWriter(store, coder, None, complaints.append)
    for key in ("aa", "bb", "aa"):
        writer.submit([key], chunk, 0)
    assert store.put_keys == []
    store.goes_on.set()
    writer.close()
    assert (store.put_keys, complaints) == (["aa", "bb"], [])
    assert set(store.tensors("aa")) == {"codes", "sizes", "first_keys", "first_values"}


def test_chunks_that_a_store_has_are_not_stored_again(coder, states):
    store = SlowBlobs()
    store.goes_on.set()
    writer = ChunkWriter(store, coder, None, pytest.fail)
    writer.submit(["bb"], tuple(side[:, :, 64:128] for side in states), 64)
    writer.submit(["aa", "bb", "cc"], states, 0)
    writer.close()
    assert store.put_keys == ["bb", "aa", "cc"]


def test_a_store_beyond_its_cap_loses_its_oldest_chunks(coder, chunk):
    sizes = {name: tensor.nbytes for name, tensor in coder.encode(chunk, 0)[0].items()}
    store = MemoryBlobs()
    store.put("00", {}, coder.encode(chunk, 0)[0])  # another instance's
    writer = ChunkWriter(store, coder, int(2.5 * sum(sizes.values())), pytest.fail)
    for number in range(1, 5):
        writer.submit([f"{number:02x}"], chunk, 0)
    writer.close()
    assert sorted(store.versions()) == ["03", "04"]


def test_a_chunk_that_cannot_be_stored_is_complained_about_and_the_next_one_stored(coder, chunk):
    class Failing(MemoryBlobs):
        def put(self, key, head, tensors):
            if key == "aa":
                raise StoreUnavailable("the server is gone")
            return super().put(key, head, tensors)

    store, complaints = Failing(), []
    writer = ChunkWriter(store, coder, None, complaints.append)
    writer.submit(["aa"], chunk, 0)
    writer.submit(["bb"], (chunk[0] * torch.inf, chunk[1]), 0)
    writer.submit(["cc"], chunk, 0)
    writer.close()
    assert list(store.versions()) == ["cc"]
    assert len(complaints) == 2
    assert "the server is gone" in complaints[0]


def test_chunks_that_come_faster_than_they_are_encoded_are_left_out(coder, chunk, monkeypatch):
    monkeypatch.setattr("hf_kvcaches.engines.chunks._PENDING", 2 * sum(side.nbytes for side in chunk))
    store, complaints = SlowBlobs(), []
    writer = ChunkWriter(store, coder, None, complaints.append)
    for key in ("aa", "bb", "cc"):
        writer.submit([key], chunk, 0)
    store.goes_on.set()
    writer.close()
    assert store.put_keys == ["aa", "bb"]
    assert len(complaints) == 1


# Keys and values in blocks, in whatever order a backend of attention keeps them.


def together(keys, values, cache, slots):
    """(blocks, heads, tokens, key and value)."""
    cache[slots // TOKENS, :, slots % TOKENS] = torch.cat([keys, values], -1).to(cache.dtype)


def transposed(keys, values, cache, slots):
    """Keys of a block and head as (dim, tokens), and behind them the values, in a cache of the same shape."""
    for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
        flat = cache[slot // TOKENS].view(HEADS, -1)
        flat[:, : TOKENS * DIMS[0]].view(HEADS, DIMS[0], TOKENS)[:, :, slot % TOKENS] = key.to(cache.dtype)
        flat[:, TOKENS * DIMS[0] :].view(HEADS, TOKENS, DIMS[1])[:, slot % TOKENS] = value.to(cache.dtype)


def drawn(blocks, dtype=torch.float32):
    generator = torch.Generator().manual_seed(blocks)
    return tuple(torch.randn(HEADS, blocks * TOKENS, dim, generator=generator).to(dtype) for dim in DIMS)


@pytest.mark.parametrize("write", [together, transposed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2])
def test_what_attention_wrote_is_read_and_what_is_written_is_where_attention_looks(write, dtype, parts):
    cache = torch.full((9, HEADS, TOKENS, sum(DIMS)), 7.0, dtype=dtype)
    layout = BlockLayout(cache, write, HEADS, DIMS, parts * TOKENS)
    assert bool((cache == 7).all()), "the first block is restored"
    blocks, rows = [3, 1], [block * parts + part for block in (3, 1) for part in range(parts)]
    keys, values = drawn(len(rows), dtype)
    slots = (torch.tensor(rows)[:, None] * TOKENS + torch.arange(TOKENS)).flatten()
    write(keys.transpose(0, 1), values.transpose(0, 1), cache, slots)
    for found, expected in zip(layout.read(cache, blocks), (keys, values), strict=True):
        assert torch.equal(found, expected)
    other = torch.full_like(cache, 7.0)
    layout.write(other, blocks, (keys, values))
    assert torch.equal(other, cache)


def test_a_copy_is_read():
    cache = torch.zeros(3, HEADS, TOKENS, sum(DIMS))
    keys, _ = BlockLayout(cache, together, HEADS, DIMS, TOKENS).read(cache, [1])
    cache.fill_(1)
    assert not keys.any()


@pytest.mark.parametrize(
    "write",
    [
        lambda keys, values, cache, slots: None,
        lambda keys, values, cache, slots: together(keys, values * 0.5, cache, slots),
        lambda keys, values, cache, slots: together(keys[..., :1].expand_as(keys), values, cache, slots),
    ],
)
def test_blocks_that_hold_anything_but_keys_and_values_are_refused(write):
    with pytest.raises(UnsupportedError, match="kv_cache_dtype"):
        BlockLayout(torch.zeros(3, HEADS, TOKENS, sum(DIMS)), write, HEADS, DIMS, TOKENS)
