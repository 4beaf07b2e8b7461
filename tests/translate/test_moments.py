"""Sums over prompts against the products of all rows at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.translate.moments import BlockMoments


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 99))
def test_moments_are_the_mean_products_of_all_rows_at_once(lengths, widths, seed):
    generator = torch.Generator().manual_seed(seed)
    names = [f"block {number}" for number in range(len(widths))]
    moments = BlockMoments(dict(zip(names, widths, strict=True)))
    prompts = [[torch.randn(length, width, generator=generator) for width in widths] for length in lengths]
    for prompt in prompts:
        moments.add(**dict(zip(names, prompt, strict=True)))
    rows = [torch.cat(parts).double() for parts in zip(*prompts, strict=True)]
    for first, one in zip(names, rows, strict=True):
        for second, other in zip(names, rows, strict=True):
            torch.testing.assert_close(moments.of(first, second), one.T @ other / sum(lengths), rtol=1e-5, atol=1e-6)
    assert int(moments.count) == sum(lengths)


def test_many_prompts_add_up_without_losing_digits():
    """One large number, then many small ones that float32 would drop."""
    moments = BlockMoments({"x": 1})
    moments.add(x=torch.tensor([[1e4]]))
    for _ in range(2000):
        moments.add(x=torch.ones(1, 1))
    assert float(moments.of("x", "x")) * 2001 == 1e8 + 2000


def test_states_far_from_zero_keep_their_spread():
    generator = torch.Generator().manual_seed(0)
    moments, rows = BlockMoments({"one": 1, "x": 3}), []
    for _ in range(20):
        rows.append(torch.randn(50, 3, generator=generator) * torch.tensor([1.0, 0.1, 10.0]) + torch.tensor([1e4, -300.0, 5e3]))
        moments.add(one=torch.ones(50, 1), x=rows[-1])
    found = moments.of("x", "x") - moments.of("one", "x").T @ moments.of("one", "x")
    expected = torch.cat(rows).double().T.cov(correction=0)
    scale = expected.diagonal().sqrt()
    torch.testing.assert_close(found / torch.outer(scale, scale), expected / torch.outer(scale, scale), rtol=0, atol=1e-5)


def test_blocks_in_half_precision_are_multiplied_in_more():
    rows = torch.full((3000, 1), 1.0, dtype=torch.bfloat16)
    moments = BlockMoments({"x": 1})
    moments.add(x=rows)
    assert float(moments.sums.total[0, 0]) == 3000.0


def test_weights_count_tokens_more_or_less():
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(50, 3, generator=generator), torch.rand(50, generator=generator)
    moments = BlockMoments({"x": 3})
    moments.add(weights, x=rows)
    torch.testing.assert_close(moments.of("x", "x"), (rows.double().T * weights) @ rows.double() / 50)


def test_what_follows_from_a_block_is_taken_out_of_another():
    generator = torch.Generator().manual_seed(0)
    blocks = {name: torch.randn(50, width, generator=generator).double() for name, width in (("a", 2), ("x", 3), ("y", 4))}
    slopes = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    moments, expected = (BlockMoments({name: block.shape[1] for name, block in blocks.items()}) for _ in range(2))
    moments.add(**blocks)
    before = moments.sums.total.clone()
    expected.add(**blocks | {"x": blocks["x"] - blocks["a"] @ slopes})
    torch.testing.assert_close(moments.without("x", "a", slopes).sums.total, expected.sums.total)
    assert torch.equal(moments.sums.total, before)
