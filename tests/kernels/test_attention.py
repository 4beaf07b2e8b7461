"""Attention in PyTorch gives what a plain loop over queries gives: over slots and new tokens, and over parts of the tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.kernels import attention as kernels
from hf_kvcaches.kernels.attention import Visibility, block_attention, exact_part, merged
from tests.kernels import reference
from tests.kernels.cases import NAN, Draws
from tests.kernels.codes_cases import assert_part

BATCH, HEADS, KV_HEADS, KEPT, TOKENS, DIM = 2, 6, 2, 5, 7, 4


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("piece", [1, 1 << 20], ids=["one query at a time", "all at once"])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("padded", [False, True])
def test_a_query_sees_the_slots_that_are_held_and_new_tokens_up_to_its_own(
    monkeypatch: pytest.MonkeyPatch, piece: int, softcap: float | None, padded: bool
) -> None:
    monkeypatch.setattr(kernels, "PIECE", piece)
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


@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 5, 40]), min_size=1, max_size=6),
    size=st.sampled_from([1.0, 1e4]),
    queries=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
    hidden=st.booleans(),
)
def test_parts_merge_to_plain_softmax_to_a_millionth(lengths: list[int], size: float, queries: int, seed: int, hidden: bool) -> None:
    """Also with scores of ten thousand, parts of one token, and parts without any visible token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    # Whole numbers and half of them: no score is rounded, so that only the merging is looked at.
    query = torch.randint(-4, 5, (2, 4, queries, 4), generator=generator).float() / 2
    keys = torch.randint(-4, 5, (2, 2, tokens, 4), generator=generator).float() / 2
    keys[..., 0] += size / 4
    query[..., 0] = 4
    values = torch.randn(2, 2, tokens, 3, generator=generator)
    visible = torch.rand(2, queries, tokens, generator=generator) < 0.7
    visible[0, 0] = False
    masks = visible.split(lengths, 2) if hidden else [None] * len(lengths)
    sides = zip(keys.split(lengths, 2), values.split(lengths, 2), masks, strict=True)
    parts = [exact_part(query, *side[:2], 1.0, side[2]) for side in sides]
    expected = reference.attention(query, keys, values, 1.0, visible[:, None] if hidden else None)[0]
    torch.testing.assert_close(merged(parts).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("mask", ["", "rows", "queries"])
def test_exact_attention_equals_the_reference(dtype: torch.dtype, softcap: float | None, mask: str) -> None:
    case, visible = Draws(2, 2, 37, dtype, seed=0), None
    query, keys, values = case.randn(2, 6, 3, 8), case.randn(2, 2, 37, 8), case.randn(2, 2, 37, 5)
    if mask:
        visible = torch.rand(2, 1 if mask == "rows" else 3, 37, generator=case.generator) < 0.6
        visible[0, 0], visible[..., 5] = False, False
        keys[:, :, 5] = NAN
    expected = reference.attention(query, keys, values, 0.4, None if visible is None else visible[:, None], softcap)[:2]
    part = exact_part(query, keys, values, 0.4, visible, softcap)
    assert_part(part, expected, dtype, torch.promote_types(dtype, torch.float32))


def test_a_query_that_no_part_shows_anything_gets_zeros() -> None:
    case = Draws(1, 2, 7, torch.float32, seed=0)
    query, keys, values = case.randn(1, 2, 1, 8), case.randn(1, 2, 7, 8), case.randn(1, 2, 7, 8)
    part = exact_part(query, keys, values, 0.4, torch.zeros(1, 1, 7, dtype=torch.bool))
    for count in (1, 2, 3):
        assert not merged([part] * count).any()
