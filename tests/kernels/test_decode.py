"""Decode attention equals its plain reference, on awkward sizes and on buffers with something unreadable behind the tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvcaches.kernels.decode import decode_attention, decode_attention_reference

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def make(batch, kv_heads, shared, tokens, dim, value_dim, reserve, dtype, seed):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    buffers = []
    for size in (dim, value_dim):
        buffer = torch.full((batch, kv_heads, tokens + reserve, size), float("nan"), dtype=dtype)
        buffer[:, :, :tokens] = randn(batch, kv_heads, tokens, size) * 2
        buffers.append(buffer[:, :, :tokens])
    mask = torch.rand(batch, 1, 1, tokens, generator=generator) < 0.6
    mask[..., -1] = True
    return randn(batch, kv_heads * shared, 1, dim), *buffers, mask


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    shared=st.sampled_from([1, 2, 3, 8]),
    tokens=st.sampled_from([1, 2, 63, 64, 130]),
    dim=st.sampled_from([1, 8, 60, 64]),
    value_dim=st.sampled_from([1, 20, 64]),
    reserve=st.sampled_from([0, 1, 37]),
    dtype=st.sampled_from(list(TOLERANCE)),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_equals_the_reference(batch, kv_heads, shared, tokens, dim, value_dim, reserve, dtype, masked, seed):
    query, keys, values, mask = make(batch, kv_heads, shared, tokens, dim, value_dim, reserve, dtype, seed)
    arguments = (query, keys, values, dim**-0.5, mask if masked else None)
    got = decode_attention(*arguments)
    assert got.shape == (batch, 1, kv_heads * shared, value_dim)
    torch.testing.assert_close(got, decode_attention_reference(*arguments), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_reference_equals_pytorch():
    query, keys, values, mask = make(2, 2, 3, 17, 8, 8, 0, torch.float64, 0)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys.repeat_interleave(3, 1), values.repeat_interleave(3, 1), attn_mask=mask, scale=0.3
    )
    torch.testing.assert_close(decode_attention_reference(query, keys, values, 0.3, mask), expected.transpose(1, 2))


@pytest.mark.parametrize("reserve", [0, 9])
def test_keys_are_not_copied(reserve):
    _, keys, _, _ = make(2, 3, 1, 5, 8, 8, reserve, torch.float32, 0)
    assert keys.flatten(0, 1).data_ptr() == keys.data_ptr()
