"""The paper's method: against an SVD of all rows, plain searches, and the consumer's own cache."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_kvcaches.translate.paper.scd import (
    SemanticCacheDistillation,
    fit_reuse,
    fit_ridge,
    select,
    stability_constants,
    train_aligner,
)
from tests import tiny
from tests.translate.pairs import MODELS

SEEDS = st.integers(0, 10**6)


@given(seed=SEEDS, producer=st.integers(1, 6), consumer=st.integers(1, 6), rank=st.integers(1, 6))
def test_reuse_is_an_svd_of_both_models_states_side_by_side(seed, producer, consumer, rank):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(80, width, generator=generator, dtype=torch.float64) for width in (producer, consumer))
    rank = min(rank, producer, consumer)
    found = fit_reuse(x, y, rank, 1e-12)
    both = torch.cat([x, y], dim=1)
    directions = torch.linalg.svd(both, full_matrices=False)[2][:rank].T
    expected = x @ (torch.linalg.pinv(x) @ (both @ directions)) @ directions[producer:].T
    torch.testing.assert_close((x @ found.encode.double() @ found.decode.double()), expected, rtol=0, atol=1e-3)


def test_an_aligner_learns_what_no_linear_map_can_and_is_never_worse_than_the_ridge():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(1200, 6, generator=generator)
    targets = codes @ torch.randn(6, 5, generator=generator) + 3 * (codes @ torch.randn(6, 5, generator=generator)).abs()
    ones = torch.cat([codes, torch.ones(1200, 1)], dim=1)
    linear = float((ones @ fit_ridge(ones, targets, 1e-6) - targets).square().mean())
    found = [float((train_aligner(codes, targets, steps, 1e-2)(codes) - targets).detach().square().mean()) for steps in (0, 600)]
    assert found[0] == pytest.approx(linear, rel=0.1)
    assert found[1] < linear / 4


@given(st.data())
def test_layers_are_chosen_as_a_plain_search_would(data):
    layers = data.draw(st.integers(1, 5))
    sets = [frozenset(chosen) for size in range(layers + 1) for chosen in combinations(range(layers), size)]
    table = {chosen: float(data.draw(st.integers(-3, 3))) for chosen in sets}
    pool, most = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    patched = select(table.__getitem__, range(layers), pool=pool, most=most)
    alone = {layer: table[frozenset({layer})] - table[frozenset()] for layer in range(layers)}
    candidates = sorted(sorted(alone, key=lambda layer: (-alone[layer], layer))[:pool])
    order: list[int] = []
    while len(order) < most:
        best, value = None, -math.inf
        for layer in candidates:
            if layer not in order and table[frozenset([*order, layer])] > value:
                best, value = layer, table[frozenset([*order, layer])]
        if best is None or value <= table[frozenset(order)]:
            break
        order.append(best)
    gains = [(table[frozenset(order[:count])] - table[frozenset()]) / count for count in range(1, len(order) + 1)]
    assert list(patched) == sorted(order[: gains.index(max(gains)) + 1] if gains else [])


@pytest.mark.parametrize("patched", [(), (1,), (1, 2)])
def test_at_full_rank_a_model_gets_its_own_cache_back(patched):
    model = MODELS["llama"]()
    texts = [tiny.ids(60, seed=seed).tolist() for seed in range(8)]
    scd = SemanticCacheDistillation.fit(model, model, texts, (16, 16, 32), patched, steps=0)
    ids = tiny.ids(1, 40, seed=50)
    made, own = scd.decode(model, scd.encode(model, ids[0].tolist())), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=own)
    for layer, other in zip(made.layers, own.layers, strict=True):
        for found, expected in ((layer.keys, other.keys), (layer.values, other.values)):
            assert float((found - expected).norm() / expected.norm()) < 5e-3  # codes are in float16


def test_patches_are_chosen_on_texts_that_are_held_out():
    producer, consumer = MODELS["llama"](seed=1), MODELS["llama"](seed=2)
    texts = [tiny.ids(48, seed=seed).tolist() for seed in range(8)]
    scd = SemanticCacheDistillation.fit(producer, consumer, texts, (4, 4, 16), pool=2, most=2, steps=20)
    assert set(scd.patches) < {0, 1, 2, 3}
    assert [len(parts) for parts in scd.encode(producer, texts[0]).values()] == [1 if layer in scd.patches else 2 for layer in range(4)]


def test_stability_constants_bound_what_a_small_error_becomes():
    model, ids = MODELS["llama"](), tiny.ids(1, 24)
    constants = stability_constants(model, ids, 16)
    assert len(constants) == 4
    assert all(alpha > 0 and beta > 0 for alpha, beta in constants)
    # With its output set to 0, a layer hands errors of its input on, and none of its cache.
    model.model.layers[2].self_attn.o_proj.weight.data.zero_()
    model.model.layers[2].mlp.down_proj.weight.data.zero_()
    alpha, beta = stability_constants(model, ids, 16)[2]
    assert alpha == pytest.approx(1.0, rel=1e-2)
    assert beta < 1e-3
