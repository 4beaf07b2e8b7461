"""Sums over prompts against the products of all rows at once, and against loops over queries and keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.translate.moments import Moments, QueryMoments
from hf_kvcaches.translate.states import Tokens, read_states, require_plain_layers
from tests.translate.models import MODELS

PLACES = (0.0, 0.25, 0.5, 0.75)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 99))
def test_moments_are_the_mean_products_of_all_rows_at_once(lengths, widths, seed):
    generator = torch.Generator().manual_seed(seed)
    names = [f"block {number}" for number in range(len(widths))]
    moments = Moments(dict(zip(names, widths, strict=True)))
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
    moments = Moments({"x": 1})
    moments.add(x=torch.tensor([[1e4]]))
    for _ in range(2000):
        moments.add(x=torch.ones(1, 1))
    assert float(moments.of("x", "x")) * 2001 == 1e8 + 2000


def test_states_far_from_zero_keep_their_spread():
    generator = torch.Generator().manual_seed(0)
    moments, rows = Moments({"one": 1, "x": 3}), []
    for _ in range(20):
        rows.append(torch.randn(50, 3, generator=generator) * torch.tensor([1.0, 0.1, 10.0]) + torch.tensor([1e4, -300.0, 5e3]))
        moments.add(one=torch.ones(50, 1), x=rows[-1])
    found = moments.of("x", "x") - moments.of("one", "x").T @ moments.of("one", "x")
    expected = torch.cat(rows).double().T.cov(correction=0)
    scale = expected.diagonal().sqrt()
    torch.testing.assert_close(found / torch.outer(scale, scale), expected / torch.outer(scale, scale), rtol=0, atol=1e-5)


def test_blocks_in_half_precision_are_multiplied_in_float32():
    rows = torch.full((3000, 1), 1.0, dtype=torch.bfloat16)
    moments = Moments({"x": 1})
    moments.add(x=rows)
    assert float(moments.sums[0, 0]) == 3000.0


def met_by_a_loop(geometry: RotaryGeometry, content: Tensor, scaling: float) -> Tensor:
    """Of queries (heads, tokens, size) without rotation: what each is to a key without rotation at the chosen places.

    A query's logit is linear in the key: its coefficients are its logits with the unit vectors.
    """
    heads, tokens, size = content.shape
    total = torch.zeros(heads, size, size, dtype=torch.float64)

    def turned(x: Tensor, position: int) -> Tensor:
        return geometry.rotate(x[None, None, None].double(), position)[0, 0, 0] if geometry.kind == "rope" else x.double()

    units = torch.eye(size)
    for head in range(heads):
        for share in PLACES:
            place = int(share * tokens)
            of_place = torch.zeros(size, size, dtype=torch.float64)
            for position in range(place, tokens):
                query = turned(content[head, position], position)
                coefficients = torch.stack([scaling * (query @ turned(unit, place)) for unit in units])
                of_place += torch.outer(coefficients, coefficients)
            total[head] += of_place / (tokens - place)
    return total / len(PLACES)


@pytest.mark.parametrize("family", ["llama", "yarn", "neox", "gpt2"])
def test_query_moments_are_those_of_logits_with_keys_without_rotation(family):
    geometry = require_plain_layers(MODELS[family]().config).layers[1]
    generator = torch.Generator().manual_seed(2)
    moments, expected = QueryMoments(geometry), 0.0
    for tokens in (7, 12, 1):
        content = torch.randn(4, tokens, geometry.head_dim, generator=generator)
        query = geometry.rotate(content[None], torch.arange(tokens)) if geometry.kind == "rope" else content[None]
        moments.add(None, query, {"scaling": 0.3})
        expected = expected + met_by_a_loop(geometry, content, 0.3) / 3
    torch.testing.assert_close(moments.mean(), expected, rtol=1e-4, atol=1e-6)


def test_a_scaling_that_is_not_named_is_the_usual_one():
    geometry = require_plain_layers(MODELS["llama"]().config).layers[0]
    query = torch.randn(1, 4, 5, 8, generator=torch.Generator().manual_seed(2))
    named, usual = QueryMoments(geometry), QueryMoments(geometry)
    named.add(None, query, {"scaling": 8**-0.5})
    usual.add(None, query, {})
    assert torch.equal(named.mean(), usual.mean())


@pytest.mark.parametrize("family", ["llama", "yarn", "qwen3", "gpt2", "gemma2", "neox"])
def test_moments_of_a_model_give_the_square_of_its_attentions_own_logit(family):
    """A text of one token has one key and one query a head."""
    model, layer = MODELS[family](), 1
    moments, logits, states = QueryMoments(require_plain_layers(model.config).layers[layer]), [], {}

    def look(index, module, query, keys, values, arguments):
        if index == layer:
            moments.add(module, query, arguments)
            logits.append((query @ keys.repeat_interleave(query.shape[1] // keys.shape[1], 1).mT * module.scaling)[0, :, 0, 0])

    read_states(model, Tokens.of([[7]]), states.__setitem__, queries=look)
    content = states[layer].keys.double().unflatten(1, (states[layer].heads, -1))[0]
    mean = moments.mean()
    for head, own in enumerate(mean):
        key = content[head // (len(mean) // len(content))]
        scale = float(key.square().sum() * own.diagonal().sum())
        assert float(key @ own @ key) == pytest.approx(float(logits[0][head]) ** 2, rel=1e-4, abs=1e-5 * scale)
