"""Attention of new tokens over slots and themselves gives what a plain loop over queries gives."""

import math

import pytest
import torch

from hf_kvcaches.kernels import blocks
from hf_kvcaches.kernels.blocks import Visibility, block_attention
from tests.kernels import reference

BATCH, HEADS, KV_HEADS, KEPT, TOKENS, DIM = 2, 6, 2, 5, 7, 4


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("piece", [1, 1 << 20], ids=["one query at a time", "all at once"])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("padded", [False, True])
def test_a_query_sees_the_slots_that_are_held_and_new_tokens_up_to_its_own(
    monkeypatch: pytest.MonkeyPatch, piece: int, softcap: float | None, padded: bool
) -> None:
    monkeypatch.setattr(blocks, "PIECE", piece)
    query, keys, values = drawn(BATCH, HEADS, TOKENS, DIM), drawn(BATCH, KV_HEADS, KEPT + TOKENS, DIM), drawn(BATCH, KV_HEADS, 12, DIM)
    real = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    held = torch.ones(BATCH, 1, KEPT, dtype=torch.bool)
    if padded:
        real[1, :2], held[1, 0, 3] = False, False
    new = real[:, None] & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    seen = torch.cat([held.expand(-1, TOKENS, -1), new], 2)
    visible = Visibility(held, KEPT, real) if padded else Visibility(None, KEPT, None)
    output, observed = block_attention(query, keys, values, DIM**-0.5, visible, softcap=softcap)
    assert observed is None
    torch.testing.assert_close(output, reference.attention(query, keys, values, DIM**-0.5, seen[:, None], softcap)[0])


def test_observers_count_what_keys_receive_as_a_mean_over_the_heads_of_a_group() -> None:
    query, keys = drawn(1, HEADS, TOKENS, DIM), drawn(1, KV_HEADS, TOKENS, DIM)
    watched = torch.tensor([[0.0] * 5 + [1.0] * 2])
    output, observed = block_attention(query, keys, None, 1.0, Visibility(None, 0, None), observers=watched)
    assert output is None
    scores = query.unflatten(1, (KV_HEADS, -1)) @ keys[:, :, None].mT
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(hidden, -math.inf).softmax(-1)[..., 5:, :].sum(3).mean(2)
    torch.testing.assert_close(observed.double(), expected, atol=1e-5, rtol=1e-5)
