"""Sparse passes whose queries are answered run by run, against the model's own pass over the whole prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GptOssConfig, PreTrainedModel

from hf_kvcaches.core.source import PrefillCall
from hf_kvcaches.reuse import sparse
from hf_kvcaches.reuse.layer import PlainCache
from hf_kvcaches.reuse.sparse import Block, SparsePass
from tests.tiny import VOCABULARY, build, gemma2, ids, llama

TOKENS = 150


def gpt_oss() -> PreTrainedModel:
    """Attention sinks, and a sliding window in every other layer."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    return build(GptOssConfig(vocab_size=VOCABULARY, sliding_window=40, **sizes, **heads))


@pytest.fixture(params=[7, 256])
def block(request, monkeypatch) -> int:
    monkeypatch.setattr(sparse, "_BLOCK", request.param)
    return int(request.param)


def opened(model: PreTrainedModel, rows: int, tokens: int) -> PlainCache:
    """A cache with room for a prompt."""
    cache, config = PlainCache(model), model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in cache.layers:
        layer.open(rows, tokens, *torch.empty(2, rows, config.num_key_value_heads, 0, head_dim), padding=0)
    return cache


def ran(model: PreTrainedModel, prompt: torch.Tensor, pads: list[int], passes: list[list[np.ndarray]]) -> PlainCache:
    """A cache that passes over some indices of each row have filled, one behind the other."""
    tokens = prompt.shape[1]
    cache = opened(model, len(prompt), tokens)
    call = PrefillCall(model, prompt, None, None, tokens - 1)
    for indices in passes:
        cache.sparse_pass = pass_over = SparsePass(call, indices, pads, tokens)
        model(input_ids=pass_over.ids, position_ids=pass_over.positions, past_key_values=cache, logits_to_keep=1)
        cache.take(0)
    cache.take(tokens)
    return cache


@pytest.mark.parametrize("make", [llama, gemma2, gpt_oss], ids=["grouped heads", "softcap and windows", "sinks"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("parts", [1, 3, "again"])
@torch.no_grad()
def test_tokens_that_run_apart_have_the_keys_and_values_of_an_ordinary_pass(make, implementation, parts, block) -> None:
    model = make()
    if implementation != "eager" and make is not llama:
        pytest.skip("computes attention eagerly")
    prompt, pads = ids(2, TOKENS), [0, 11]
    padding = torch.tensor(pads)
    mask = (torch.arange(TOKENS) >= padding[:, None]).long()
    expected = DynamicCache()
    model.set_attn_implementation("eager" if implementation != "sdpa" else "sdpa")
    model(input_ids=prompt, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), past_key_values=expected)
    if implementation == "flash_attention_2":  # is not installed, and not asked: the cache answers
        vars(model.config)["_attn_implementation_internal"] = implementation
    # Earlier tokens first, as later ones see them; or all, and some of them again.
    passes = (
        [[np.array_split(np.arange(TOKENS - pad), parts)[part] for pad in pads] for part in range(parts)]
        if parts != "again"
        else [[np.arange(TOKENS - pad) for pad in pads], [np.array([0, *range(1, 50, 3), *range(70, TOKENS - pad, 2)]) for pad in pads]]
    )
    cache = ran(model, prompt, pads, passes)
    for ours, theirs in zip(cache.layers, expected.layers, strict=True):
        for name in ("keys", "values"):
            for row, pad in enumerate(pads):
                got, want = getattr(ours, name)[row, :, pad:], getattr(theirs, name)[row, :, pad:]
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_blocks_are_of_near_slots_and_fillers_come_first() -> None:
    indices = [np.array([1, 4, 5, 200]), np.array([2, 3])]
    model = llama()
    found = SparsePass(PrefillCall(model, ids(2, 300), None, None, 299), indices, [0, 1], 300)
    assert found.slots.tolist() == [[1, 4, 5, 200], [300, 300, 3, 4]]
    assert found.positions.tolist() == [[1, 4, 5, 200], [0, 0, 2, 3]]
    assert found.blocks == [[Block(0, 3, 1, 6), Block(3, 4, 200, 201)], [Block(2, 4, 3, 5)]]
    long = SparsePass(PrefillCall(model, ids(1, 1200), None, None, 1199), [np.arange(0, 1200, 2)], [0], 1200)
    assert [(block.first, block.last) for block in long.blocks[0]] == [(0, 256), (256, 512), (512, 600)]


@pytest.mark.parametrize("make", [llama, gemma2], ids=["grouped heads", "softcap and windows"])
@torch.no_grad()
def test_a_probing_pass_measures_the_largest_weights_of_the_last_tokens_in_the_upper_layers(make) -> None:
    model, pads, last = make(), [0, 11], 5
    prompt = ids(2, TOKENS)
    model.set_attn_implementation("eager")
    mask = (torch.arange(TOKENS) >= torch.tensor(pads)[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    weights = model(input_ids=prompt, attention_mask=mask, position_ids=positions, output_attentions=True).attentions
    expected = torch.stack([layer[:, :, -last:].amax((1, 2)) for layer in weights[len(weights) // 2 :]])
    cache = ran(model, prompt, pads, [[np.arange(TOKENS - pad) for pad in pads]])
    call = PrefillCall(model, prompt, None, None, TOKENS - 1)
    indices, shares = [np.arange(TOKENS - pad - last, TOKENS - pad) for pad in pads], list[torch.Tensor]()
    cache.sparse_pass = probing = SparsePass(call, indices, pads, TOKENS, shares)
    model(input_ids=probing.ids, position_ids=probing.positions, past_key_values=cache, logits_to_keep=1)
    torch.testing.assert_close(torch.stack(shares), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_no_mask_over_all_slots_and_no_expanded_key_is_made() -> None:
    model, tokens, largest = llama(), 600, 0
    model.config.num_attention_heads = 4

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and "flash" not in str(func) and out.ndim == 4:
                largest = max(largest, out.shape[-1] * out.shape[-2])
            return out

    prompt = ids(1, tokens)
    cache = opened(model, 1, tokens)
    call = PrefillCall(model, prompt, None, None, tokens - 1)
    for indices in (np.arange(500), np.arange(500, tokens)):
        cache.sparse_pass = pass_over = SparsePass(call, [indices], [0], tokens)
        with Sizes():
            model(input_ids=pass_over.ids, position_ids=pass_over.positions, past_key_values=cache, logits_to_keep=1)
        cache.take(0)
    # Keys of the cache are the largest: neither (tokens, total) nor one of each query head is made.
    assert largest <= (tokens + 1 + 128) * 8


@torch.no_grad()
def test_where_many_slots_are_seen_the_scores_of_fewer_queries_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, queries = gemma2(), 1200, []
    attend = sparse.attention
    monkeypatch.setattr(
        sparse, "attention", lambda query, *args, **kwargs: (queries.append(query.shape[2]), attend(query, *args, **kwargs))[1]
    )
    monkeypatch.setattr(sparse, "_SCORES", 40 * model.config.num_attention_heads * tokens)
    cache = opened(model, 1, tokens)
    call = PrefillCall(model, ids(1, tokens), None, None, tokens - 1)
    cache.sparse_pass = pass_over = SparsePass(call, [np.arange(tokens)], [0], tokens)
    model(input_ids=pass_over.ids, position_ids=pass_over.positions, past_key_values=cache, logits_to_keep=1)
    assert max(queries) < 256
    assert 40 in queries
