"""Every bound holds on every case, is reached or nearly reached on some, and the paper's that were left aside do not hold."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.scripts.running import import_script

bounds = import_script("papers._bounds")


def covers(bound: torch.Tensor | float, found: torch.Tensor | float, scale: torch.Tensor | float = 0.0) -> bool:
    """Whether a bound is not below what was found, but for the rounding of numbers of that scale."""
    bound, found, scale = (torch.as_tensor(x, dtype=torch.float64) for x in (bound, found, scale))
    return bool((found <= bound * (1 + 1e-9) + 1e-12 * scale).all())


class Case(NamedTuple):
    """One query over tokens whose keys and values go through the two maps of their chunk."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    chunks: list[slice]
    encodes: list[tuple[torch.Tensor, torch.Tensor]]
    decodes: list[tuple[torch.Tensor, torch.Tensor]]
    gamma: float
    scaling: float

    def attention(self) -> tuple[torch.Tensor, ...]:
        """Logits, weights and output, exact and approximate, token by token."""
        key_back, value_back = torch.zeros_like(self.keys), torch.zeros_like(self.values)
        for chunk, encode, decode in zip(self.chunks, self.encodes, self.decodes, strict=True):
            for token in range(chunk.start, chunk.stop):
                key_back[token] = decode[0] @ (encode[0] @ self.keys[token])
                value_back[token] = decode[1] @ (encode[1] @ self.values[token])
        found = []
        for keys, values in ((self.keys, self.values), (self.gamma * key_back, value_back)):
            logits = torch.stack([self.scaling * key @ self.query for key in keys])
            weights = logits.softmax(0)
            found += [logits, weights, weights @ values]
        return tuple(found)


def orthonormal(generator: torch.Generator, rank: int, size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64)).Q.T


@st.composite
def tokens(draw: st.DrawFn, generator: torch.Generator, count: int, size: int) -> torch.Tensor:
    x = torch.randn(count, size, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["plain", "decaying", "rank-deficient", "equal", "one far", "zero"]))
    if kind == "decaying":
        x = x * 0.5 ** torch.arange(size)
    elif kind == "rank-deficient":
        x = x[:, :1] @ torch.randn(1, size, generator=generator, dtype=torch.float64)
    elif kind == "equal":
        x = x[:1].expand(count, size).clone()
    elif kind == "one far":
        x[-1] *= 1e4
    elif kind == "zero":
        x = torch.zeros_like(x)
    return x * 10.0 ** draw(st.integers(-3, 3))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size, lengths = draw(st.integers(1, 9)), draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    count, ends = sum(lengths), torch.tensor(lengths).cumsum(0).tolist()
    chunks = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    keys, values = draw(tokens(generator, count, size)), draw(tokens(generator, count, size))
    oblique, fitted = draw(st.booleans()), draw(st.booleans())
    encodes, decodes = [], []
    for chunk in chunks:
        pair = []
        for x in (keys, values):
            rank = draw(st.integers(1, size))
            basis = torch.linalg.svd(x[chunk]).Vh[:rank] if fitted else orthonormal(generator, rank, size)
            other = torch.linalg.pinv(basis + 0.3 * torch.randn(rank, size, generator=generator, dtype=torch.float64))
            pair.append((basis, other if oblique else basis.T))
        encodes.append((pair[0][0], pair[1][0]))
        decodes.append((pair[0][1], pair[1][1]))
    query = torch.randn(size, generator=generator, dtype=torch.float64) * 10.0 ** draw(st.integers(-3, 3))
    gamma, scaling = draw(st.sampled_from([1.0, 1.1, 0.5, 0.0, -1.0])), draw(st.sampled_from([size**-0.5, 1.0, -0.2]))
    return Case(query, keys, values, chunks, encodes, decodes, gamma, scaling)


def residuals_of(case: Case, measure) -> tuple[torch.Tensor, torch.Tensor]:
    """One number a chunk for the keys and one for the values."""
    found = [
        (measure(case.keys[chunk], encode[0], decode[0], case.gamma), measure(case.values[chunk], encode[1], decode[1], 1.0))
        for chunk, encode, decode in zip(case.chunks, case.encodes, case.decodes, strict=True)
    ]
    return torch.stack([each[0] for each in found]), torch.stack([each[1] for each in found])


MEASURES = {
    "rows": lambda *maps: bounds.residual_rows(*maps).amax(-1),
    "norm": bounds.residual_norm,
}


@pytest.mark.parametrize("measure", MEASURES)
@given(case=cases())
def test_attention_over_chunks_is_never_further_off_than_the_bounds_say(measure: str, case: Case) -> None:
    logits, weights, output, logits_, weights_, output_ = case.attention()
    keys, values = residuals_of(case, MEASURES[measure])
    found = bounds.attention_error_bound(keys, values, case.query.norm(), bounds.value_radius(case.values), case.scaling)
    maps = [each for pairs in zip(case.encodes, case.decodes, strict=True) for each in zip(*pairs, strict=True)]
    stretch = max(float(encode.norm() * decode.norm()) for encode, decode in maps)
    size = abs(case.scaling) * case.query.norm() * case.keys.norm(dim=1).max() * (1 + stretch)
    assert covers(found.logits, (logits - logits_).abs().max(), size)
    # Weights and outputs inherit the rounding of the logits, which may be huge.
    assert covers(bounds.weight_error_bound(found.logits), (weights - weights_).abs().sum(), 1 + size)
    assert covers(found.output, (output - output_).norm(), (1 + size) * case.values.norm(dim=1).max() * (1 + stretch))


def test_no_tokens_and_no_chunks_are_exact() -> None:
    encode = torch.eye(2, 5)
    assert bounds.residual_norm(torch.zeros(3, 0, 5), encode).tolist() == [0, 0, 0]
    found = bounds.attention_error_bound(torch.zeros(4, 0), torch.zeros(4, 0), 3.0, 2.0, 0.5)
    assert found.logits.tolist() == found.output.tolist() == [0] * 4


def test_the_papers_bound_on_logits_says_0_where_gamma_changes_them() -> None:
    keys, query = torch.tensor([[3.0, 0.0]], dtype=torch.float64), torch.tensor([2.0, 0.0], dtype=torch.float64)
    encode, gamma, scaling = torch.tensor([[1.0, 0.0]], dtype=torch.float64), 0.5, 2**-0.5
    error = float(scaling * query @ (keys - gamma * keys @ encode.T @ encode)[0])
    papers = gamma * scaling * float(bounds.residual_norm(keys, encode)) * float(query.norm())
    assert papers == 0 < error
    ours = bounds.logit_error_bound(bounds.residual_rows(keys, encode, gamma=gamma).amax(), query.norm(), scaling)
    assert float(ours) == pytest.approx(error, rel=1e-12)


def test_the_bound_on_logits_is_reached_by_a_query_along_the_largest_residual() -> None:
    generator = torch.Generator().manual_seed(2)
    keys, encode = torch.randn(30, 8, generator=generator, dtype=torch.float64), orthonormal(generator, 3, 8)
    lost = keys - 0.9 * keys @ encode.T @ encode
    query = lost[lost.norm(dim=1).argmax()]
    rows = bounds.residual_rows(keys, encode, gamma=0.9)
    bound = bounds.logit_error_bound(rows.amax(), query.norm(), -0.25)
    torch.testing.assert_close((0.25 * lost @ query).abs().max(), bound)
    # All residuals together are more than the worst of them, by up to the root of their number.
    norm = bounds.residual_norm(keys, encode, gamma=0.9)
    assert rows.amax() < norm < 30**0.5 * rows.amax()
    torch.testing.assert_close(norm, torch.linalg.matrix_norm(lost, ord=2))


def weights_error(logits: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    return (logits.softmax(-1) - (logits + errors).softmax(-1)).abs().sum(-1)


@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 12),
    error=st.floats(1e-6, 60),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
    levels=st.booleans(),
)
def test_softmax_never_moves_further_than_the_bound(seed: int, count: int, error: float, spread: float, levels: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(500, count, generator=generator, dtype=torch.float64) * spread
    errors = (2 * torch.rand(500, count, generator=generator, dtype=torch.float64) - 1) * error
    if levels:
        # The worst cases: all logits of a group alike, and each error at one end.
        group = torch.rand(500, count, generator=generator) < 0.5
        gap = torch.randn(500, 1, generator=generator, dtype=torch.float64) + torch.tensor([error]).double()
        logits, errors = torch.where(group, -gap, torch.zeros_like(gap)), torch.where(group, error, -error)
    found = weights_error(logits, errors)
    assert covers(bounds.weight_error_bound(errors.abs().amax(-1)), found, 1 + spread + error)
    # What is added to all logits is nothing to softmax.
    half = (errors.amax(-1) - errors.amin(-1)) / 2
    assert covers(bounds.weight_error_bound(half), found, 1 + spread + error)


@pytest.mark.parametrize("error", [1e-3, 0.1, 1.0, 3.0, 10.0])
def test_no_smaller_bound_on_softmax_holds(error: float) -> None:
    # The group that gains has the weight 1 / (1 + exp(error)); any number of tokens may be in it.
    for inside, outside in ((1, 1), (3, 50)):
        logits = torch.tensor([-error - math.log(inside)] * inside + [-math.log(outside)] * outside, dtype=torch.float64)
        errors = torch.tensor([error] * inside + [-error] * outside, dtype=torch.float64)
        assert float(weights_error(logits, errors)) == pytest.approx(2 * math.tanh(error / 2), rel=1e-9)
        assert float(bounds.weight_error_bound(error)) == pytest.approx(2 * math.tanh(error / 2), rel=1e-12)


def test_the_output_reaches_its_bound_with_two_opposite_values() -> None:
    error = 0.7
    logits, errors = torch.tensor([-error, 0.0], dtype=torch.float64), torch.tensor([error, -error], dtype=torch.float64)
    values = torch.tensor([[5.0, 1.0], [5.0, -1.0]]).double()
    found = (logits.softmax(0) @ values - (logits + errors).softmax(0) @ values).norm()
    # Only how far the values are apart counts, not how far from 0.
    assert bounds.value_radius(values) == 1
    torch.testing.assert_close(bounds.output_error_bound(error, bounds.value_radius(values), 0.0), found)
    residual = torch.tensor(0.25).double()
    torch.testing.assert_close(bounds.output_error_bound(0.0, 1.0, residual), residual)
