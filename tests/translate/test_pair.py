"""What a consumer predicts behind its keys and values, and what errors of these cost, against finite differences of the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.translate.pair import ErrorCosts, Pair, split_of
from tests import tiny
from tests.translate.pairs import MODELS


def in_float64(model):
    """All of it: the library's own norms compute in float32."""
    for module in model.double().modules():
        for name, child in module.named_children():
            if hasattr(child, "variance_epsilon"):
                exact = nn.RMSNorm(len(child.weight), child.variance_epsilon, dtype=torch.float64)
                exact.load_state_dict(child.state_dict())
                setattr(module, name, exact)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "neox"])
def test_gradients_are_those_of_one_layers_keys_and_values_before_the_predicted_tokens(family):
    model, ids, seed, step = in_float64(MODELS[family]()), tiny.ids(16, seed=3), 3, 1e-5
    pair = Pair(model, model, None)
    states = pair.states(ids)[1]
    found = pair.gradients(ids, states, seed)

    @torch.no_grad()
    def shares(own):
        """The logarithms of what is predicted at the text's end behind some unrotated keys and values, (tokens, vocabulary)."""
        return pair.predictions(ids, {layer: state._replace(states=state.states[:12]) for layer, state in own.items()}).log_softmax(-1)

    drawn = torch.multinomial(shares(states).exp().float(), 1, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(1)
    assert split_of(len(ids)) == 12
    for layer, rows in found.items():
        assert rows.shape == (12, states[layer].states.shape[1])
        for _ in range(4):
            token, column = (int(torch.randint(0, size, (), generator=generator)) for size in rows.shape)
            ends = []
            for sign in (1, -1):
                changed = states[layer].states.clone()
                changed[token, column] += sign * step
                ends.append(-float(shares({**states, layer: states[layer]._replace(states=changed)}).gather(1, drawn).sum()))
            assert float(rows[token, column]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-3, abs=2e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_do_not_depend_on_whether_parameters_or_the_caller_ask_for_some():
    found, ids = [], tiny.ids(12)
    for freeze in (False, True):
        model = MODELS["llama"]().requires_grad_(not freeze)
        pair = Pair(model, model, None)
        with torch.inference_mode():
            found.append(pair.gradients(ids, pair.states(ids)[1], 0))
    for layer, rows in found[0].items():
        assert torch.equal(rows, found[1][layer])
        assert float(rows.abs().sum()) > 0


def test_tokens_are_drawn_as_often_as_the_model_says():
    """The expected gradient of the loss of what a model says itself is 0: the mean shrinks as the root of the number of draws."""
    model = MODELS["llama"]()
    pair, ids = Pair(model, model, None), tiny.ids(12)
    states, total, squares = pair.states(ids)[1], 0.0, 0.0
    for seed in range(150):
        rows = pair.gradients(ids, states, seed)[1]
        total, squares = total + rows, squares + rows.square()
    assert float((total / 150).square().mean()) < 2.0 / 150 * float((squares / 150).mean())


def test_costs_are_second_moments_head_by_head_without_the_first_tokens():
    model = MODELS["llama"]()
    pair, expected = Pair(model, model, None), 0.0
    costs = ErrorCosts({layer: state.shape for layer, state in pair.states(tiny.ids(16))[1].items()})
    for number in range(2):
        ids = tiny.ids(16, seed=number)
        states = pair.states(ids)[1]
        costs.add(pair, ids, states, 4, number)
        rows = pair.gradients(ids, states, number)[2][4:].double()
        expected = expected + torch.stack([side.T @ side for side in rows.split(8, 1)])
    torch.testing.assert_close(torch.cat(costs.sides[2]), expected)
    for root, total in zip(costs.roots(2), costs.sides[2], strict=True):
        means = total.diagonal(dim1=1, dim2=2).mean(1)
        damping = 0.2 * means + 0.1 * means.mean()
        torch.testing.assert_close(root @ root, total + damping[:, None, None] * torch.eye(8, dtype=torch.float64))
        assert float(torch.linalg.eigvalsh(root).min()) > 0


def test_half_of_a_tokens_weight_is_by_its_gradients_in_layers_that_are_translated():
    model = MODELS["llama"]()
    pair, ids = Pair(model, model, None), tiny.ids(24, seed=3)
    states = pair.states(ids)[1]
    weights = ErrorCosts({layer: state.shape for layer, state in states.items()}).add(pair, ids, states, 4, 0)
    energies = torch.stack([rows[4:].square().sum(1) for layer, rows in pair.gradients(ids, states, 0).items() if layer])
    expected = 0.5 + 0.5 * (energies / energies.mean(1, keepdim=True)).mean(0)
    split = split_of(24)
    torch.testing.assert_close(weights[4:split], expected, atol=1e-5, rtol=1e-5)
    # Tokens without gradients, and those that the consumer runs, count 1.
    assert weights[:4].tolist() + weights[split:].tolist() == [1.0] * (4 + 24 - split)
    assert float(weights.mean()) == pytest.approx(1.0, abs=1e-5)


def test_a_model_without_gradients_is_refused_with_what_to_pass():
    model = MODELS["llama"]()
    forward = type(model).forward

    class Frozen(type(model)):
        @torch.no_grad()
        def forward(self, *args, **kwargs):
            return forward(self, *args, **kwargs)

    model.__class__ = Frozen
    pair, ids = Pair(model, model, None), tiny.ids(12)
    with pytest.raises(UnsupportedError, match=r"gradients at the keys and values of Frozen.*metric='plain'"):
        pair.gradients(ids, pair.states(ids)[1], 0)
