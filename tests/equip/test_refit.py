"""Refitted values answer queries as all values did."""

from __future__ import annotations

import pytest
import torch

from hf_kvcaches.equip.refit import refit


def case(seed: int, rows: int = 2, heads: int = 2, group: int = 3, tokens: int = 90, queries: int = 160, kept: int = 30):
    """Keys in clusters, so that kept ones can answer for others, and the tokens that stay."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    keys = draw(rows, heads, 10, 16).repeat_interleave(tokens // 10, 2) + 0.3 * draw(rows, heads, tokens, 16)
    asked = draw(rows, heads * group, queries, 16) + 0.8
    index = torch.rand(rows, heads, tokens, generator=generator).argsort(-1)[..., :kept].sort(-1).values
    return asked, keys, draw(rows, heads, tokens, 8), index


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    group = queries.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, 1) for part in (keys, values))
    return (queries.double() @ keys.mT * scaling).softmax(-1) @ values


def errors(queries, keys, values, index, refitted, scaling):
    """Mean squares of what kept and refitted values lose, on queries."""
    full, chosen = attend(queries, keys, values, scaling), keys.take_along_dim(index[..., None], 2)
    plain = attend(queries, chosen, values.take_along_dim(index[..., None], 2), scaling)
    return float((plain - full).square().mean()), float((attend(queries, chosen, refitted, scaling) - full).square().mean())


def everywhere(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


@pytest.mark.parametrize("seed", range(3))
def test_the_error_of_queries_that_were_not_seen_falls(seed):
    queries, keys, values, index = case(seed)
    seen, unseen = queries.split(80, 2)
    refitted = refit(seen, keys, values, everywhere(2, 1, 90), index, everywhere(2, 1, 30), 0.25)
    assert refitted.shape == (2, 2, 30, 8)
    plain, better = errors(unseen, keys, values, index, refitted, 0.25)
    assert better < 0.6 * plain


def test_values_are_those_of_ridge_regression_in_its_primal_form():
    queries, keys, values, index = case(5, rows=1, heads=1, queries=20)
    refitted = refit(queries, keys, values, everywhere(1, 1, 90), index, everywhere(1, 1, 30), 0.25, ridge=0.1)
    chosen, old = keys[0, 0, index[0, 0]].double(), values[0, 0, index[0, 0]].double()
    weights = (queries[0].flatten(0, 1).double() @ chosen.T * 0.25).softmax(-1)
    expected = attend(queries, keys, values, 0.25)[0].flatten(0, 1)
    damping = 0.1 * (weights @ weights.T).diagonal().mean()
    moved = torch.linalg.solve(weights.T @ weights + damping * torch.eye(30), weights.T @ (expected - weights @ old))
    torch.testing.assert_close(refitted[0, 0].double(), old + moved, atol=1e-4, rtol=1e-3)


def test_where_all_tokens_stay_values_stay():
    queries, keys, values, _ = case(1)
    index = torch.arange(90).expand(2, 2, 90)
    refitted = refit(queries, keys, values, everywhere(2, 1, 90), index, everywhere(2, 1, 90), 0.25)
    torch.testing.assert_close(refitted, values, atol=1e-4, rtol=1e-4)


def test_padding_among_tokens_and_kept_ones_changes_nothing(monkeypatch):
    queries, keys, values, index = case(2)
    alone = refit(queries[1:], keys[1:], values[1:], everywhere(1, 1, 90), index[1:], everywhere(1, 1, 30), 0.25)
    pad = lambda part, count: torch.cat([torch.full_like(part[:, :, :count], 7.0), part], 2)  # noqa: E731
    real, stays = everywhere(2, 1, 94), everywhere(2, 2, 33)
    real[1, :, :4], stays[1, :, 30:] = False, False
    index = torch.cat([index + 4, torch.zeros(2, 2, 3, dtype=torch.long)], 2)
    for most in (1 << 20, 1):
        monkeypatch.setattr("hf_kvcaches.equip.refit.piece", lambda keys, most=most: most)
        both = refit(queries, pad(keys, 4), pad(values, 4), real, index, stays, 0.25)
        torch.testing.assert_close(both[1:, :, :30], alone, atol=1e-4, rtol=1e-4)


def test_refitted_values_have_the_dtype_of_the_values():
    queries, keys, values, index = (part.bfloat16() if part.is_floating_point() else part for part in case(3))
    refitted = refit(queries, keys, values, everywhere(2, 1, 90), index, everywhere(2, 1, 30), 0.25)
    assert refitted.dtype == torch.bfloat16
    plain, better = errors(queries, keys, values, index, refitted, 0.25)
    assert better < 0.6 * plain


def test_values_are_fitted_to_the_rotation_that_keys_have_afterwards():
    queries, keys, values, index = case(4)
    kept = keys.take_along_dim(index[..., None], 2)
    turned = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1))).Q
    every = (keys, values, everywhere(2, 1, 90), index, everywhere(2, 1, 30), 0.25)
    plain = refit(queries, *every)
    torch.testing.assert_close(refit(queries, *every, afterwards=(queries @ turned, kept @ turned)), plain, atol=1e-4, rtol=1e-4)
    halved, full = 0.5 * kept, attend(queries, keys, values, 0.25)
    other = refit(queries, *every, afterwards=(queries, halved))
    near, far = (float((attend(queries, halved, fitted, 0.25) - full).square().mean()) for fitted in (other, plain))
    assert near < far
