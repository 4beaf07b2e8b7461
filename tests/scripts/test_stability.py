"""Bounds against loops, against cases that reach them, and against what real layers do when their caches and inputs are disturbed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from transformers import DynamicCache, Qwen3Config

from hf_kvcaches.compat import decoder_layers
from hf_kvcaches.errors import ConfigError, UnsupportedError
from tests import tiny
from tests.scripts.running import import_script

stability = import_script("_stability")

MARGIN = 0.1
TOKENS = 14


MODELS: dict[str, Callable[[], Any]] = {"llama": tiny.llama}


class Prefilled:
    """A model in float64, what its layers had while it read a prompt, and each layer as a function of one token and a cache."""

    def __init__(self, model: Any) -> None:
        self.model = model.double()
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                nn.init.uniform_(parameter, 0.3, 2.0)
        self.decoder, _, self.layers = decoder_layers(self.model)
        self.seen: dict[tuple[int, str], Tensor] = {}
        self.arguments: dict[int, dict[str, Any]] = {}
        handles = [handle for index in range(len(self.layers)) for handle in self.watch(index)]
        self.cache = DynamicCache()
        with torch.no_grad():
            self.output = self.model(tiny.ids(1, TOKENS), past_key_values=self.cache, output_hidden_states=True)
        for handle in handles:
            handle.remove()

    def watch(self, index: int) -> list[Any]:
        layer = self.layers[index]
        attention = getattr(layer, "self_attn", getattr(layer, "attn", None))
        norm = getattr(layer, "post_attention_layernorm", getattr(layer, "ln_2", None))
        inward = next(getattr(attention, name) for name in ("q_proj", "qkv_proj", "c_attn") if hasattr(attention, name))

        def at_layer(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.seen[index, "hidden"] = arguments[0][0]
            if "position_embeddings" in named:
                self.arguments[index] = {"position_embeddings": tuple(part[:, -1:] for part in named["position_embeddings"])}

        def at_norm(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            self.seen[index, "middle"] = arguments[0][0]

        def at_projection(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            self.seen[index, "projected"] = output[0]

        return [
            layer.register_forward_pre_hook(at_layer, with_kwargs=True),
            norm.register_forward_pre_hook(at_norm),
            inward.register_forward_hook(at_projection),
        ]

    def trace(self, index: int) -> Any:
        keys, values = (part[0].transpose(0, 1) for part in (self.cache.layers[index].keys, self.cache.layers[index].values))
        heads = self.model.config.num_attention_heads
        queries = self.seen[index, "projected"].unflatten(-1, (-1, keys.shape[-1]))[:, :heads]
        return stability.LayerTrace(self.seen[index, "hidden"], self.seen[index, "middle"], queries, keys, values)

    def run(self, index: int, hidden: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The layer's output for its last token, (width,), behind a cache (kv_heads, tokens, head_dim)."""
        cache = DynamicCache()
        for earlier in range(index + 1):
            cache.update(keys[None], values[None], earlier)
        out = self.layers[index](hidden[None, None], past_key_values=cache, attention_mask=None, **self.arguments.get(index, {}))
        return (out[0] if isinstance(out, tuple) else out).reshape(-1)

    def point(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """The last token's input, and the cache before it."""
        layer = self.cache.layers[index]
        return self.seen[index, "hidden"][-1], layer.keys[0, :, :-1], layer.values[0, :, :-1]


@pytest.fixture(scope="module", params=MODELS)
def prefilled(request: pytest.FixtureRequest) -> Prefilled:
    return Prefilled(MODELS[request.param]())


def cache_error(keys: Tensor, values: Tensor) -> float:
    """The spectral norm of what all heads' keys and values are off by, beside each other."""
    return float(torch.linalg.matrix_norm(torch.cat([keys, values]).transpose(0, 1).flatten(1), ord=2))


def test_a_layer_alone_gives_what_the_model_gave(prefilled: Prefilled) -> None:
    for index in range(len(prefilled.layers) - 1):
        out = prefilled.run(index, *prefilled.point(index))
        torch.testing.assert_close(out, prefilled.seen[index + 1, "hidden"][-1])


def test_no_disturbance_of_a_layers_cache_and_input_exceeds_the_bound(prefilled: Prefilled) -> None:
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor, size: float) -> Tensor:
        made = torch.randn(like.shape, generator=generator, dtype=like.dtype)
        return made * size * like.norm() / made.norm()

    for index in range(len(prefilled.layers)):
        constants = stability.layer_constants(prefilled.model, index, [prefilled.trace(index)], margin=MARGIN)
        assert all(math.isfinite(value) and value > 0 for value in (constants.attention, constants.keys, constants.values, constants.mlp))
        hidden, keys, values = prefilled.point(index)
        with torch.no_grad():
            expected = prefilled.run(index, hidden, keys, values)
            for trial in range(60):
                size = 10.0 ** -(1.5 + trial % 4)
                moved = [noise(part, size if trial % (3 + place) else 0.0) for place, part in enumerate((hidden, keys, values))]
                out = prefilled.run(index, hidden + moved[0], keys + moved[1], values + moved[2])
                bound = constants.alpha * float(moved[0].norm()) + constants.beta * cache_error(moved[1], moved[2])
                assert float((out - expected).norm()) <= bound * (1 + 1e-9) + 1e-12


def test_the_steepest_direction_of_every_input_is_within_its_constant(prefilled: Prefilled) -> None:
    for index in range(len(prefilled.layers)):
        constants = stability.layer_constants(prefilled.model, index, [prefilled.trace(index)])
        hidden, keys, values = prefilled.point(index)
        slopes = jacobian(lambda *inputs, index=index: prefilled.run(index, *inputs), (hidden, keys, values))
        # The Frobenius norm of a disturbance is no smaller than its spectral norm, so that the second is the harder case.
        assert float(torch.linalg.matrix_norm(slopes[0], ord=2)) <= constants.alpha
        joint = torch.cat([slopes[1].flatten(1), slopes[2].flatten(1)], 1)
        steepest = torch.linalg.svd(joint).Vh[0]
        moved = [part.view_as(keys) for part in steepest.chunk(2)]
        assert float((joint @ steepest).norm()) <= constants.beta * cache_error(*moved)


def test_more_traces_and_a_margin_widen_the_domain(prefilled: Prefilled) -> None:
    trace = prefilled.trace(1)
    short = stability.LayerTrace(*(part[:5] for part in (trace.hidden, trace.middle, trace.queries, trace.keys, trace.values)))
    small, both, wide = (
        stability.layer_constants(prefilled.model, 1, traces, margin=margin)
        for traces, margin in (([short], 0.0), ([short, trace], 0.0), ([trace], 0.2))
    )
    whole = stability.layer_constants(prefilled.model, 1, [trace])
    for name in ("alpha", "beta", "keys", "attention", "mlp"):
        assert getattr(small, name) <= getattr(whole, name) < getattr(wide, name)
        assert getattr(both, name) == pytest.approx(getattr(whole, name))


def test_a_layers_constants_are_those_of_its_parts() -> None:
    plain = Prefilled(tiny.llama())
    trace, layer = plain.trace(1), plain.layers[1]
    got = stability.layer_constants(plain.model, 1, [trace])
    query, key, value, out = (
        float(torch.linalg.matrix_norm(getattr(layer.self_attn, f"{name}_proj").weight.detach(), ord=2)) for name in "qkvo"
    )
    first = stability.norm_constant([trace.hidden], layer.input_layernorm.weight, centred=False, eps=layer.input_layernorm.variance_epsilon)
    parts = stability.attention_constants([trace], query, key, value, out, 8**-0.5)
    assert (got.attention, got.keys, got.values) == pytest.approx((parts[0] * first, parts[1], parts[2]))


def test_what_attention_changes_goes_through_the_mlp() -> None:
    constants = stability.LayerConstants(attention=2.0, keys=3.0, values=4.0, mlp=5.0)
    assert (constants.alpha, constants.beta) == (18.0, 42.0)
    assert (constants.paper_alpha, constants.paper_beta) == (8.0, 7.0)


@pytest.mark.parametrize("centred", [True, False])
def test_the_state_of_least_variance_reaches_the_norms_constant(centred: bool) -> None:
    torch.manual_seed(0)
    states = torch.randn(9, 12, dtype=torch.float64) * torch.logspace(0, -3, 9, dtype=torch.float64)[:, None] + 0.5 * centred
    norm = nn.LayerNorm(12, eps=1e-6) if centred else nn.RMSNorm(12, eps=1e-6)
    nn.init.constant_(norm.weight, -1.5)
    slopes = [float(torch.linalg.matrix_norm(jacobian(norm.double(), row), ord=2)) for row in states]
    assert stability.norm_constant([states[:3], states[3:]], norm.weight, centred=centred, eps=1e-6) == pytest.approx(max(slopes), rel=1e-9)
    assert stability.norm_constant([states], norm.weight, centred=centred, eps=0.0, margin=0.5) == pytest.approx(
        2 * stability.norm_constant([states], norm.weight, centred=centred, eps=0.0)
    )


def attend(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    return (scaling * keys @ query).softmax(-1) @ values


def one_head(query: Tensor, keys: Tensor, values: Tensor) -> Any:
    unused = torch.ones(len(keys), 2)
    return stability.LayerTrace(unused, unused, query.expand(len(keys), 1, -1), keys[:, None], values[:, None])


def test_attention_reaches_its_constants_where_two_tokens_are_opposites() -> None:
    vector, zero, other = torch.tensor([0.6, 0.8]).double(), torch.zeros(2).double(), torch.tensor([3.0, -1.0]).double()
    opposites, same = torch.stack([vector, -vector]), torch.stack([zero, zero])
    # By the keys: equal logits, opposite values.
    slopes = jacobian(lambda keys: attend(other, keys, opposites, 0.7), same).flatten(1)
    _, by_keys, _ = stability.attention_constants([one_head(other, same, opposites)], 1.0, 0.0, 0.0, 1.0, 0.7)
    assert float(torch.linalg.matrix_norm(slopes, ord=2)) == pytest.approx(by_keys)
    # By the query: opposite keys, opposite values, the query between them.
    slopes = jacobian(lambda query: attend(query, opposites, opposites, 0.7), zero)
    by_input, _, _ = stability.attention_constants([one_head(zero, opposites, opposites)], 1.0, 0.0, 0.0, 1.0, 0.7)
    assert float(torch.linalg.matrix_norm(slopes, ord=2)) == pytest.approx(by_input)
    # By the values: all attention on one token; the same for the token's own value.
    by_input, _, by_values = stability.attention_constants([one_head(zero, same, same)], 0.0, 0.0, 1.0, 2.5, 0.7)
    slopes = jacobian(lambda values: 2.5 * attend(other * 100, opposites, values, 1.0), same)[:, 0]
    assert float(torch.linalg.matrix_norm(slopes, ord=2)) == pytest.approx(by_values) == pytest.approx(by_input) == 2.5


def test_heads_that_share_keys_add_up() -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(1, 4, 3).double(), torch.randn(5, 2, 3).double(), torch.randn(5, 2, 3).double()
    trace = stability.LayerTrace(torch.ones(5, 2), torch.ones(5, 2), queries.expand(5, 4, 3), keys, values)

    def heads(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.cat([attend(queries[i], keys[:, i // 2], values[:, i // 2], 0.4) for i in range(4)])

    for _ in range(20):
        slopes = jacobian(heads, (queries[0], keys, values))
        largest = [float(torch.linalg.matrix_norm(slope.flatten(1), ord=2)) for slope in slopes]
        by_query, by_keys, by_values = stability.attention_constants([trace], 1.0, 0.0, 0.0, 1.0, 0.4)
        assert largest[0] <= by_query
        assert largest[1] <= by_keys
        assert largest[2] <= by_values

    def norm(matrix: Tensor) -> float:
        return float(torch.linalg.matrix_norm(matrix, ord=2))

    keys[:, 0], values[:, 1] = keys[:, 0] * 3, values[:, 1] * 5
    by_query, by_keys, _ = stability.attention_constants([trace], 1.0, 0.0, 0.0, 1.0, 0.4)
    assert by_query == pytest.approx(0.2 * max(norm(keys[:, head]) * norm(values[:, head]) for head in range(2)))
    reached = [float(queries[0, head].norm()) * norm(values[:, head // 2]) for head in range(4)]
    assert by_keys == pytest.approx(0.2 * math.hypot(*reached))
    # A value that all heads look at, in the same way, has an effect in each of them.
    assert stability.attention_constants([trace], 0.0, 0.0, 0.0, 3.0, 0.4)[2] == 6.0
    assert stability.attention_constants([trace], 0.0, 0.0, 1.0, 1.0, 0.4)[0] == pytest.approx(2**0.5)


def test_a_gated_mlp_reaches_its_constant_where_both_factors_are_largest() -> None:
    def mlp(u: Tensor) -> Tensor:
        return 0.5 * (torch.relu(3 * u) * (2 * u))

    slope = float(jacobian(mlp, torch.tensor(4.0).double()))
    constant = stability.gated_mlp_constant(3.0, 2.0, 0.5, torch.relu, gate_reach=12.0, up_reach=8.0)
    assert constant == pytest.approx(slope, rel=1e-3)
    assert constant >= slope
    steep = stability.gated_mlp_constant(1.0, 0.0, 1.0, nn.functional.silu, 10.0, 1.0)
    assert steep == pytest.approx(1.0998, rel=1e-3)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[float], list[float], list[float], dict[int, float]]:
    count = draw(st.integers(0, 7))
    numbers = [draw(st.lists(st.floats(0, 3), min_size=count, max_size=count)) for _ in range(3)]
    patched = draw(st.sets(st.integers(0, count - 1))) if count else set()
    return *numbers, {layer: draw(st.floats(0, 2)) for layer in sorted(patched)}


@given(chain=chains())
def test_the_segmented_bound_is_equation_17(chain: tuple[list[float], list[float], list[float], dict[int, float]]) -> None:
    alphas, betas, errors, patches = chain
    bounds = stability.segmented_bound(alphas, betas, errors, patches)
    assert len(bounds) == len(alphas) + 1
    carried = 0.0
    for layer in range(len(alphas) + 1):
        # The last patched layer before this one, or the start with no error.
        start = max((patched for patched in patches if patched < layer), default=0)
        total = patches.get(start, 0.0) * math.prod(alphas[start:layer])
        for k in range(start, layer):
            total += math.prod(alphas[k + 1 : layer]) * betas[k] * errors[k]
        assert bounds[layer] == pytest.approx(patches.get(layer, total), rel=1e-9, abs=1e-300)
        # The recurrence, equations 15 and 16.
        assert bounds[layer] == patches.get(layer, carried)
        if layer < len(alphas):
            carried = alphas[layer] * bounds[layer] + betas[layer] * errors[layer]


def test_without_patches_errors_grow_and_a_patch_cuts_them() -> None:
    alphas, betas, errors = [2.0] * 4, [1.0] * 4, [1.0] * 4
    assert stability.segmented_bound(alphas, betas, errors) == [0.0, 1.0, 3.0, 7.0, 15.0]
    assert stability.segmented_bound(alphas, betas, errors, {2: 0.5}) == [0.0, 1.0, 0.5, 2.0, 5.0]


def test_no_tokens_probability_moves_more_than_the_bound(prefilled: Prefilled) -> None:
    model, last = prefilled.model, len(prefilled.layers) - 1
    states = torch.stack([prefilled.run(last, *prefilled.point(last))]).detach()
    norm = getattr(prefilled.decoder, "norm", getattr(prefilled.decoder, "ln_f", None))
    head = model.get_output_embeddings()
    torch.testing.assert_close(head(norm(states[0])), prefilled.output.logits[0, -1])
    constant = stability.head_constant(model, [states], margin=MARGIN)
    slopes = jacobian(lambda state: head(norm(state)), states[0])
    largest = float(slopes.norm(dim=-1).max())
    assert largest <= stability.head_constant(model, [states]) <= 1.5 * largest
    torch.manual_seed(0)
    with torch.no_grad():
        for size in (1e-3, 1e-2, 5e-2):
            moved = torch.randn(40, states.shape[-1], dtype=torch.float64)
            # The direction that favours one token over the one that is least like it is the worst there is.
            moved[0] = slopes[slopes.norm(dim=-1).argmax()]
            moved = moved / moved.norm(dim=-1, keepdim=True) * size * states.norm()
            gap = (head(norm(states + moved)).log_softmax(-1) - head(norm(states)).log_softmax(-1)).abs().amax(-1)
            assert (gap <= stability.nll_gap_bound(constant, size * float(states.norm())) * (1 + 1e-9)).all()


def test_the_gap_of_two_logits_that_part_reaches_the_bound() -> None:
    # A token of hardly any probability: its logit falls by 1, and all others' rise by 1.
    before, after = torch.tensor([-50.0, 0.0, 0.0]).double(), torch.tensor([-51.0, 1.0, 1.0]).double()
    gap = before.log_softmax(-1)[0] - after.log_softmax(-1)[0]
    assert float(gap) == pytest.approx(stability.nll_gap_bound(1.0, 1.0))


def qwen3() -> Any:
    return tiny.build(Qwen3Config(**tiny._SHAPE))


def scaled_residuals() -> Any:
    model = tiny.llama()
    model.model.layers[0].residual_multiplier = 0.5
    return model


def one_more_part() -> Any:
    model = tiny.llama()
    model.model.layers[0].memory = nn.Linear(32, 32)
    return model


def scaled_rotation() -> Any:
    return tiny.llama(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64})


@pytest.mark.parametrize("make", [tiny.gemma2, tiny.gpt2, qwen3, one_more_part, scaled_residuals, scaled_rotation])
def test_layers_that_compute_something_else_are_refused(make: Callable[[], Any]) -> None:
    unused = torch.ones(2, 32)
    with pytest.raises(UnsupportedError):
        stability.layer_constants(
            make(), 0, [stability.LayerTrace(unused, unused, torch.ones(2, 4, 8), torch.ones(2, 2, 8), torch.ones(2, 2, 8))]
        )


def test_adapters_count() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer, self.added = base, nn.Linear(base.in_features, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + self.added(x)

    plain, adapted, merged = Prefilled(tiny.llama()), tiny.llama().double(), tiny.llama().double()
    trace = plain.trace(0)
    added = Adapted(adapted.model.layers[0].self_attn.v_proj).double()
    nn.init.normal_(added.added.weight, std=2.0)
    adapted.model.layers[0].self_attn.v_proj = added
    with torch.no_grad():
        merged.model.layers[0].self_attn.v_proj.weight += added.added.weight
    got = stability.layer_constants(adapted, 0, [trace])
    assert got.alpha == pytest.approx(stability.layer_constants(merged, 0, [trace]).alpha)
    assert got.alpha > stability.layer_constants(tiny.llama().double(), 0, [trace]).alpha


def test_states_that_do_not_vary_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^states: "):
        stability.norm_constant([torch.ones(2, 3)], torch.ones(3), centred=True)
