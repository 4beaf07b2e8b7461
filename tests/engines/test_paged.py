"""Keys and values in blocks, in whatever order a backend of attention keeps them."""

import pytest
import torch

from hf_kvcaches import UnsupportedError
from hf_kvcaches.engines.chunks import BlockLayout

HEADS, TOKENS, DIMS = 3, 8, (4, 6)


def together(keys, values, cache, slots):
    """(blocks, heads, tokens, key and value)."""
    cache[slots // TOKENS, :, slots % TOKENS] = torch.cat([keys, values], -1).to(cache.dtype)


def transposed(keys, values, cache, slots):
    """Keys of a block and head as (dim, tokens), and behind them the values, in a cache of the same shape."""
    for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
        flat = cache[slot // TOKENS].view(HEADS, -1)
        flat[:, : TOKENS * DIMS[0]].view(HEADS, DIMS[0], TOKENS)[:, :, slot % TOKENS] = key.to(cache.dtype)
        flat[:, TOKENS * DIMS[0] :].view(HEADS, TOKENS, DIMS[1])[:, slot % TOKENS] = value.to(cache.dtype)


def states(blocks, dtype=torch.float32):
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
    keys, values = states(len(rows), dtype)
    slots = (torch.tensor(rows)[:, None] * TOKENS + torch.arange(TOKENS)).flatten()
    write(keys.transpose(0, 1), values.transpose(0, 1), cache, slots)
    for found, expected in zip(layout.read(cache, blocks), (keys, values), strict=True):
        assert torch.equal(found, expected)
    other = torch.full_like(cache, 7.0)
    layout.write(other, blocks, (keys, values))
    assert torch.equal(other, cache)


def test_a_copy_is_read(monkeypatch):
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
