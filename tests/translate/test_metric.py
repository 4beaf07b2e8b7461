"""Metrics against loops over heads, and gradients against autograd and finite differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import DynamicCache

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.translate.reading import attention_metric, logit_moment, loss_gradients
from hf_kvcaches.translate.states import PromptTokens, read_states, require_plain_layers
from tests import tiny
from tests.translate.models import MODELS, layers_of


@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    key_dim=st.integers(1, 4),
    value_dim=st.integers(1, 4),
    hidden=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_the_attention_metric_is_the_mean_error_of_the_output(kv_heads, group, key_dim, value_dim, hidden, seed):
    """Errors of one key and one value, followed through each head that looks at them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads = kv_heads * group
    projection, queries, spread = random(heads * value_dim, hidden), random(7, heads, key_dim), random(9, kv_heads, value_dim)
    spread -= spread.mean(0)
    key_errors, value_errors = random(kv_heads, key_dim), random(kv_heads, value_dim)
    expected = 0.0
    for head in range(heads):
        own = projection[head * value_dim : (head + 1) * value_dim]
        shared = head // group
        expected += float((value_errors[shared] @ own).square().sum())
        of_logit = sum(float(query @ key_errors[shared]) ** 2 for query in queries[:, head]) / 7
        reach = sum(float((value @ own).square().sum()) for value in spread[:, shared]) / 9
        expected += of_logit * reach
    moments = torch.einsum("qhd,qhe->hde", queries, queries) / 7
    flat = spread.flatten(1)
    rows = projection.unflatten(0, (heads, value_dim))
    metric = attention_metric(moments, rows @ rows.mT, flat.T @ flat / 9)
    errors = torch.cat([key_errors.flatten(), value_errors.flatten()])
    assert float(errors @ metric @ errors) == pytest.approx(expected, rel=1e-9)


PLACES = (0.0, 0.25, 0.5, 0.75)


def met_by_a_loop(geometry: RotaryGeometry, content: torch.Tensor, scaling: float) -> torch.Tensor:
    """Of queries (heads, tokens, size) without rotation: what each is to a key without rotation at the chosen places.

    A query's logit is linear in the key: its coefficients are its logits with the unit vectors.
    """
    heads, tokens, size = content.shape
    total = torch.zeros(heads, size, size, dtype=torch.float64)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
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
    found, expected = 0.0, 0.0
    for tokens in (7, 12, 1):
        content = torch.randn(4, tokens, geometry.head_dim, generator=generator)
        query = geometry.rotate(content[None], torch.arange(tokens)) if geometry.kind == "rope" else content[None]
        found = found + logit_moment(geometry, query, 0.3) / 3
        expected = expected + met_by_a_loop(geometry, content, 0.3) / 3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "yarn", "qwen3", "gpt2", "gemma2", "neox"])
def test_the_logit_moment_gives_the_square_of_a_models_own_logit(family):
    """A text of one token has one key and one query a head."""
    model, layer = MODELS[family](), 1
    geometry = require_plain_layers(model.config).layers[layer]
    moments, logits, states = [], [], {}

    def look(attended):
        index, module, query, keys, _, _ = attended
        if index == layer:
            moments.append(logit_moment(geometry, query, attended.scaling))
            logits.append((query @ keys.repeat_interleave(query.shape[1] // keys.shape[1], 1).mT * module.scaling)[0, :, 0, 0])

    read_states(model, PromptTokens.of([[7]]), states.__setitem__, queries=look)
    content = states[layer].keys.double().unflatten(1, (states[layer].heads, -1))[0]
    [moment] = moments
    for head, own in enumerate(moment):
        key = content[head // (len(moment) // len(content))]
        scale = float(key.square().sum() * own.diagonal().sum())
        assert float(key @ own @ key) == pytest.approx(float(logits[0][head]) ** 2, rel=1e-4, abs=1e-5 * scale)


class Nudged(DynamicCache):
    """Adds something to one layer's keys or values as they come; other layers keep what they had without the change."""

    def __init__(self, layer=None, what="", change=0, states=None):
        super().__init__()
        self.layer, self.what, self.change, self.states = layer, what, change, states
        self.kept = []

    def update(self, keys, values, layer_idx, *args, **kwargs):
        if self.states is not None:
            keys, values = (part.clone() for part in self.states[layer_idx])
        self.kept.append((keys.clone(), values.clone()))
        if layer_idx == self.layer:
            (keys if self.what == "keys" else values).add_(self.change)
        super().update(keys, values, layer_idx, *args, **kwargs)
        return keys, values


def in_float64(model):
    """All of it: the library's own norms compute in float32."""
    for module in model.double().modules():
        for name, child in module.named_children():
            if hasattr(child, "variance_epsilon"):
                exact = nn.RMSNorm(len(child.weight), child.variance_epsilon, dtype=torch.float64)
                exact.load_state_dict(child.state_dict())
                setattr(module, name, exact)
    return model


def drawn_tokens(model, ids, seed):
    """What the loss is about: one token a place, drawn from what the model says."""
    with torch.no_grad():
        shares = model(ids, use_cache=False).logits[0].float().softmax(-1)
    uniform = torch.rand(ids.shape[1], 1, generator=torch.Generator().manual_seed(seed))
    tokens = []
    for own, at in zip(shares, uniform, strict=True):
        sums = own.cumsum(0)
        tokens.append(next(index for index, so_far in enumerate(sums) if float(so_far) >= float(at * sums[-1])))
    return torch.tensor(tokens)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "neox"])
def test_gradients_of_the_loss_are_those_of_one_layers_cache_with_the_others_held_fast(family):
    """At keys without rotation: a change of one is rotated before it is added."""
    model, ids, seed, step = in_float64(MODELS[family]()), tiny.ids(1, 10), 3, 1e-5
    rotation, positions = require_plain_layers(model.config), torch.arange(10)
    gradients = loss_gradients(model, rotation, PromptTokens.of(ids), seed)
    tokens = drawn_tokens(model, ids, seed)
    plain = Nudged()

    def loss(cache):
        with torch.no_grad():
            shares = model(ids, past_key_values=cache).logits[0].log_softmax(-1)
        return -float(shares[positions, tokens].sum())

    loss(plain)
    assert len(gradients) == len(layers_of(model))
    generator = torch.Generator().manual_seed(1)
    for layer, rows in enumerate(gradients):
        keys, values = plain.kept[layer]
        parts = rows.split([part.shape[1] * part.shape[3] for part in (keys, values)], dim=1)
        for what, states, found in zip(("keys", "values"), (keys, values), parts, strict=True):
            for _ in range(3):
                change = torch.zeros_like(states)
                place = tuple(int(torch.randint(0, size, (), generator=generator)) for size in states.shape)
                change[place] = step
                if what == "keys" and rotation.layers[layer].kind == "rope":
                    change = rotation.layers[layer].rotate(change, positions)
                ends = [loss(Nudged(layer, what, sign * change, plain.kept)) for sign in (1, -1)]
                _, head, token, dim = place
                number = float(found[token, head * states.shape[3] + dim])
                assert number == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-3, abs=2e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_do_not_depend_on_whether_parameters_or_the_caller_ask_for_some():
    tokens, found = PromptTokens.of(tiny.ids(1, 6)), []
    for freeze in (False, True):
        model = MODELS["llama"]().requires_grad_(not freeze)
        with torch.inference_mode():
            found.append(loss_gradients(model, require_plain_layers(model.config), tokens, 0))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert float(one.abs().sum()) > 0


def test_tokens_are_drawn_as_often_as_the_model_says():
    """With a model that says the same everywhere, the mean gradient of the loss vanishes and its square does not."""
    model, tokens = MODELS["llama"](), PromptTokens.of(tiny.ids(1, 8))
    total, squares = 0.0, 0.0
    for seed in range(150):
        values = loss_gradients(model, require_plain_layers(model.config), tokens, seed)[1][:, 16:]
        total, squares = total + values, squares + values.square()
    # The expected gradient of the loss of what a model says itself is 0: the mean shrinks as the root of the number of draws.
    assert float((total / 150).square().mean()) < 2.0 / 150 * float((squares / 150).mean())
