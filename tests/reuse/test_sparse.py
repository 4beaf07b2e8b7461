"""Sparse passes whose queries are answered block by block, against the model's own pass over the whole prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GptOssConfig, PreTrainedModel

from hf_kvcaches.reuse import sparse
from hf_kvcaches.reuse.cache import SplicingCache
from hf_kvcaches.reuse.sparse import SparsePass
from tests.tiny import VOCABULARY, build, gemma2, ids, llama

TOKENS = 150


def gpt_oss() -> PreTrainedModel:
    """Attention sinks, and a sliding window in every other layer."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    return build(GptOssConfig(vocab_size=VOCABULARY, sliding_window=40, **sizes, **heads))


class _AnyCache(SplicingCache):
    hooks_forward = False


@pytest.fixture(params=[1, 7, 64, 200])
def block(request, monkeypatch) -> int:
    monkeypatch.setattr(sparse, "_BLOCK_ON_CPU", request.param)
    return int(request.param)


@pytest.mark.parametrize("make", [llama, gemma2, gpt_oss], ids=["grouped heads", "softcap and windows", "sinks"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_all_tokens_in_blocks_have_the_keys_and_values_of_an_ordinary_pass(make, implementation, block) -> None:
    model = make()
    if implementation == "sdpa" and make is not llama:
        pytest.skip("computes attention eagerly")
    model.set_attn_implementation(implementation)
    prompt, padding = ids(2, TOKENS), torch.tensor([0, 11])
    mask = (torch.arange(TOKENS) >= padding[:, None]).long()
    expected = DynamicCache()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    model(input_ids=prompt, attention_mask=mask, position_ids=positions, past_key_values=expected)
    cache = _AnyCache(model)
    assert not cache.parts_refused
    slots = torch.full((2, TOKENS), TOKENS)
    for row, pad in enumerate(padding.tolist()):
        slots[row, : TOKENS - pad] = torch.arange(pad, TOKENS)
    fed = torch.cat([prompt, prompt[:, -1:]], 1).gather(1, slots)
    cache.run_sparse(SparsePass(slots, padding, TOKENS), fed)
    cache.take(TOKENS)
    for ours, theirs in zip(cache.layers, expected.layers, strict=True):
        for name in ("keys", "values"):
            for row, pad in enumerate(padding.tolist()):
                got, want = getattr(ours, name)[row, :, pad:], getattr(theirs, name)[row, :, pad:]
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_block_is_shown_keys_up_to_its_last_slot(monkeypatch) -> None:
    monkeypatch.setattr(sparse, "_BLOCK_ON_CPU", 2)
    padding = torch.tensor([0, 1])
    # Slot 20 is that of fillers, which may stand at either end.
    assert SparsePass(torch.tensor([[1, 4, 5, 9], [2, 3, 20, 20]]), padding, 20).blocks == [(0, 2, 5), (2, 4, 10)]
    assert SparsePass(torch.tensor([[1, 4, 5, 19], [20, 20, 6, 19]]), padding, 20).blocks == [(0, 2, 5), (2, 4, 20)]
