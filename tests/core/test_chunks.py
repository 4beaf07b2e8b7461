"""Attention of a chunk behind other tokens against eager attention in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_kvcaches import GrowingCache, SegmentReuseCache, SegmentStore
from hf_kvcaches.core.chunks import chunk_attention
from tests import tiny

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}


def attention(query, keys, values, allowed, scaling):
    """Written down plainly, (batch, queries, heads, head_dim)."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (states.double().repeat_interleave(group, dim=1) for states in (keys, values))
    scores = (query.double() @ keys.mT * scaling).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2)


def causal(tokens: int, total: int) -> torch.Tensor:
    return torch.ones(tokens, total, dtype=torch.bool).tril(total - tokens)[None, None]


def states(dtype, batch, heads, kv_heads, tokens, total, dim, value_dim=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, tokens, dim), (batch, kv_heads, total, dim), (batch, kv_heads, total, value_dim or dim))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def module() -> torch.nn.Module:
    return tiny.llama().model.layers[0].self_attn


@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    shape=st.tuples(st.integers(1, 2), st.sampled_from([(4, 4), (6, 2), (3, 1)]), st.integers(1, 63), st.integers(1, 90)),
    dim=st.sampled_from([4, 60, 64]),
    kind=st.sampled_from(["causal", "padded", "window"]),
    scaling=st.sampled_from([None, 0.3]),
)
def test_a_chunk_attends_as_the_mask_says(dtype, shape, dim, kind, scaling):
    batch, (heads, kv_heads), tokens, seen = shape
    query, keys, values = states(dtype, batch, heads, kv_heads, tokens, seen + tokens, dim)
    mask = causal(tokens, seen + tokens).expand(batch, -1, -1, -1).clone()
    if kind == "padded":
        mask[0, ..., : min(3, seen)] = False
    if kind == "window":
        mask &= (
            ~causal(tokens, seen + tokens).roll(-max(1, (seen + tokens) // 2), dims=-1)
            | torch.eye(seen + tokens, dtype=torch.bool)[-tokens:]
        )
    made, _ = chunk_attention(module(), query, keys, values, mask, **({} if scaling is None else {"scaling": scaling}))
    expected = attention(query, keys, values, mask, scaling or dim**-0.5)
    assert made.dtype == dtype
    assert (made.double() - expected).abs().max() <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))


def test_values_of_another_size_than_keys_are_attended_to():
    query, keys, values = states(torch.float32, 1, 4, 2, 7, 30, 16, value_dim=24)
    mask = causal(7, 30)
    made, _ = chunk_attention(module(), query, keys, values, mask)
    assert torch.allclose(made.double(), attention(query, keys, values, mask, 0.25), atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2], ids=["llama", "gpt2"])
def test_a_chat_that_goes_on_in_chunks_has_the_logits_of_a_whole_prompt(make, implementation):
    model = make()
    model.set_attn_implementation(implementation)
    ids = tiny.ids(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for attention_mask in (None, mask):
        given_mask = {} if attention_mask is None else {"attention_mask": attention_mask}
        cache = SegmentReuseCache(model, SegmentStore("memory"), mode="exact")
        with torch.no_grad():
            for stop in (20, 33, 60):
                part = {name: value[:, :stop] for name, value in given_mask.items()}
                start = cache.get_seq_length()
                positions = {} if attention_mask is None else {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)[:, start:stop]}
                logits = model(ids[:, start:stop], past_key_values=cache, **part, **positions).logits
            positions = {} if attention_mask is None else {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
            whole = model(ids, past_key_values=DynamicCache(config=model.config), **given_mask, **positions).logits
        assert (logits - whole[:, 33:]).abs().max() < 2e-4


def test_the_pass_that_hands_over_to_a_holder_has_the_logits_of_a_whole_prompt():
    model, store = tiny.llama(), SegmentStore("memory")
    first, ids = tiny.ids(1, 60), torch.cat([tiny.ids(1, 60)[:, :51], tiny.ids(1, 9, seed=1)], dim=1)
    with torch.no_grad():
        whole = model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1).logits
        for prompt in (first, ids):
            cache = SegmentReuseCache(model, store, mode="exact", decode_with=GrowingCache(model))
            logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits
            reused = cache.report().reused_tokens
            del cache
            store.flush()
    assert reused == 51
    assert (logits - whole).abs().max() < 1e-4


@pytest.mark.parametrize("holds", [False, True])
def test_weights_that_the_caller_asks_for_are_those_of_the_model(holds):
    model, ids = tiny.llama(), tiny.ids(1, 60)
    model.set_attn_implementation("eager")
    cache = SegmentReuseCache(model, SegmentStore("memory"), mode="exact", decode_with=GrowingCache(model) if holds else None)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in (ids[:, :40], ids[:, 40:]):
            ours = model(input_ids=part, past_key_values=cache, output_attentions=True).attentions
            theirs = model(input_ids=part, past_key_values=plain, output_attentions=True).attentions
            assert len(ours) == len(theirs) == 4
            assert all(torch.allclose(first, second, atol=1e-5) for first, second in zip(ours, theirs, strict=True))
