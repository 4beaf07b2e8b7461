"""How far an error in a cache can carry: stability constants of layers, and the bounds that follow from them.

"Semantic Cache Distillation", section 5 and its appendices B and C. The state h of the token that is decoded enters a layer and leaves it
as `h'`; `|dh'| <= alpha |dh| + beta e`, where e is the spectral norm of the error of what the layer has cached, keys and values beside
each other, `(tokens, 2 * kv_heads * head_dim)`, keys as attention sees them, rotated. (Undoing the rotation keeps the Frobenius norm,
which is no smaller, and so may be put in for e.)

**Departs from the paper**, whose alpha, `1 + L_attn + L_mlp`, and beta, `L_K + L_V`, hold for layers that run attention and MLP side by
side. Where the MLP reads what attention wrote, what attention changes goes through the MLP, too: `alpha = (1 + L_attn) (1 + L_mlp)` and
`beta = (L_K + L_V) (1 + L_mlp)`. And the token's own key and value depend on its state: `L_attn` counts them.

**What it is good for.** The constants are products of largest gains, which no one direction has all at once: they are true and far above
what is measured. And lemma 5.1 takes a patched layer to reset the error of the state; with a cache that is filled before decoding, Patch
mends the layer's keys and values, while the state of a decoded token goes on with the error that it has. A bound without that assumption
is `segmented_bound` without patch errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shared import ROOT  # noqa: F401  (puts the checkout on the path)
from torch import Tensor, nn

from hf_kvcaches.compat import base_model, decoder_layers
from hf_kvcaches.errors import ConfigError, UnsupportedError

SOFTMAX = 0.5  # the largest gain of a softmax, from logits to probabilities
LOG_SOFTMAX = 2.0  # the same from logits in the infinity norm to a log-probability (lemma B.1)
_GRID, _GRID_SLACK = 20001, 1e-4
# The parts of a layer, of its attention and of its MLP; any other with parameters is refused.
_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """What one layer had while it read one prompt, without padding."""

    hidden: Tensor  # the layer's input, (tokens, width)
    middle: Tensor  # the same after attention, before the second norm, (tokens, width)
    queries: Tensor  # (tokens, heads, head_dim), rotated or not
    keys: Tensor  # (tokens, kv_heads, head_dim), rotated, of all tokens
    values: Tensor  # (tokens, kv_heads, value_dim)


@dataclass(frozen=True)
class LayerConstants:
    """A layer's gains, each the largest on the domain that it was estimated for."""

    attention: float  # from the layer's input to what attention adds to it
    keys: float  # from the cached keys to what attention adds
    values: float  # from the cached values to what attention adds
    mlp: float  # from the second norm's input to what the MLP adds

    @property
    def alpha(self) -> float:
        """From the layer's input to its output."""
        return (1 + self.attention) * (1 + self.mlp)

    @property
    def beta(self) -> float:
        """From the layer's cache to its output."""
        return (self.keys + self.values) * (1 + self.mlp)

    @property
    def paper_alpha(self) -> float:
        """Equation 30, which is no bound for layers whose MLP reads what attention wrote."""
        return 1 + self.attention + self.mlp

    @property
    def paper_beta(self) -> float:
        """Equation 31, of which the same is true."""
        return self.keys + self.values


def segmented_bound(
    alphas: Sequence[float], betas: Sequence[float], reuse_errors: Sequence[float], patch_errors: Mapping[int, float] | None = None
) -> list[float]:
    """A bound on the error of the state before each layer and after the last: L + 1 numbers (lemma 5.1, equation 17).

    For a patched layer it is the state that the layer starts from, hence that layer's patch error.
    """
    resets = dict(patch_errors or {})
    bounds = [resets.get(0, 0.0)]
    for layer, (alpha, beta, error) in enumerate(zip(alphas, betas, reuse_errors, strict=True)):
        carried = alpha * bounds[layer] + beta * error
        bounds.append(resets.get(layer + 1, carried))
    return bounds


def nll_gap_bound(output_head: float, final_error: float) -> float:
    """How much the log-probability of any token can change (equation 18)."""
    return LOG_SOFTMAX * output_head * final_error


def spectral_norm(matrix: Tensor) -> float:
    """The largest singular value, in float64."""
    return float(torch.linalg.matrix_norm(matrix.detach().double(), ord=2)) if matrix.numel() else 0.0


def norm_constant(states: Sequence[Tensor], gain: Tensor, *, centred: bool, eps: float = 0.0, margin: float = 0.0) -> float:
    """The largest gain of an RMSNorm or LayerNorm over states, which the state with the least variance has."""
    return float(gain.detach().double().abs().max()) / _least_deviation(states, centred, eps, margin)


def attention_constants(
    traces: Sequence[LayerTrace], query: float, key: float, value: float, out: float, scaling: float, margin: float = 0.0
) -> tuple[float, float, float]:
    """Attention's gains for one query behind a cache: from its normalised input, from the cached keys, from the cached values.

    With `Q_i` the largest norm of a query of head i, `K_g` and `V_g` the largest spectral norms of one prompt's keys and values of key head
    g, heads add up in the 2-norm before the output projection. A value's gain is the norm of a row of probabilities, at most 1.
    """
    heads, wide = traces[0].queries.shape[1], 1 + margin
    repeats = heads // traces[0].keys.shape[1]
    queries = [wide * max(float(trace.queries[:, i].double().norm(dim=-1).max()) for trace in traces) for i in range(heads)]
    keys = [wide * max(spectral_norm(trace.keys[:, i // repeats]) for trace in traces) for i in range(heads)]
    values = [wide * max(spectral_norm(trace.values[:, i // repeats]) for trace in traces) for i in range(heads)]
    soft = SOFTMAX * abs(scaling)
    by_keys = soft * math.sqrt(sum((q * v) ** 2 for q, v in zip(queries, values, strict=True)))
    by_values = math.sqrt(heads)
    by_query = soft * max(k * v for k, v in zip(keys, values, strict=True)) * query
    # One new key and value serve `repeats` heads.
    own = math.sqrt(repeats) * (soft * max(q * v for q, v in zip(queries, values, strict=True)) * key + value)
    return out * (by_query + own), out * by_keys, out * by_values


def gated_mlp_constant(
    gate: float, up: float, down: float, activation: Callable[[Tensor], Tensor], gate_reach: float, up_reach: float
) -> float:
    """The gain of `down(activation(gate(u)) * up(u))`, a product, which has a bound only where both factors have one."""
    slope, height = _slope_and_height(activation, gate_reach)
    return down * (slope * up_reach * gate + height * up)


@torch.no_grad()
def layer_constants(model: nn.Module, layer: int, traces: Sequence[LayerTrace], *, margin: float = 0.0) -> LayerConstants:
    """A decoder layer's constants: spectral norms of its weights, and how far the traces' activations reach.

    They bound changes between two points where all on the way has queries, keys, values and inputs of the MLP's activation at most
    `1 + margin` times the traces' largest, and states of standard deviations at least `1 - margin` times the traces' least.
    """
    decoder, _, layers = decoder_layers(base_model(model))
    norms, attention, mlp = _parts(decoder, layers[layer])
    query, key, value, out = (spectral_norm(_matrix(getattr(attention, name))) for name in _ATTENTION)
    gains = attention_constants(traces, query, key, value, out, float(attention.scaling), margin)
    first, second = (
        norm_constant(states, **_norm(norm), margin=margin)
        for norm, states in zip(norms, ([trace.hidden for trace in traces], [trace.middle for trace in traces]), strict=True)
    )
    inputs = [norms[1](trace.middle) for trace in traces]
    reaches = [(1 + margin) * max(float(part(rows).abs().max()) for rows in inputs) for part in (mlp.gate_proj, mlp.up_proj)]
    gated = gated_mlp_constant(*(spectral_norm(_matrix(getattr(mlp, name))) for name in _MLP), mlp.act_fn, *reaches)
    return LayerConstants(gains[0] * first, gains[1], gains[2], gated * second)


@torch.no_grad()
def head_constant(model: nn.Module, states: Sequence[Tensor], *, margin: float = 0.0) -> float:
    """The largest gain from the last layer's output to a logit: the last norm and the longest row of the output embedding."""
    inner = base_model(model)
    head: Any = inner.get_output_embeddings()
    norm = _norm(decoder_layers(inner)[0].norm)
    rows = (_matrix(head).T * norm["gain"]).norm(dim=-1)
    return float(rows.max()) / _least_deviation(states, norm["centred"], norm["eps"], margin)


def _parts(decoder: Any, layer: Any) -> tuple[tuple[nn.Module, nn.Module], Any, Any]:
    """The norms, the attention and the MLP of a layer as Llama's, which runs norm, attention, norm and MLP one after the other."""
    known = {layer: _LAYER, getattr(layer, "self_attn", None): _ATTENTION, getattr(layer, "mlp", None): (*_MLP, "act_fn")}
    for module, names in known.items():
        children = dict(module.named_children()) if module is not None else {}
        others = [
            name for name, child in children.items() if name not in names and ("norm" in name or any(True for _ in child.parameters()))
        ]
        if others or not all(name in children for name in names):
            raise UnsupportedError(f"{type(module).__name__}: expected the parts {', '.join(names)}, and it has {', '.join(children)}.")
    scales = [getattr(layer, "residual_multiplier", 1.0), getattr(getattr(decoder, "rotary_emb", None), "attention_scaling", 1.0)]
    if scales != [1.0, 1.0]:
        raise UnsupportedError(f"{type(layer).__name__}: it scales what it adds or rotates ({scales}), which has no bound here.")
    return (layer.input_layernorm, layer.post_attention_layernorm), layer.self_attn, layer.mlp


def _matrix(module: nn.Module) -> Tensor:
    """The matrix of a linear map, for rows: (inputs, outputs); of a wrapped one (an adapter) by what it does to unit vectors."""
    if type(module) is nn.Linear:
        return module.weight.double().T
    inner: Any = getattr(module, "base_layer", None)
    if not isinstance(inner, nn.Linear):
        raise UnsupportedError(f"{type(module).__name__}: expected a linear map.")
    unit = torch.eye(inner.in_features, dtype=inner.weight.dtype, device=inner.weight.device)
    return module(unit).double() - module(unit * 0).double()


def _norm(norm: Any) -> dict[str, Any]:
    """What `norm_constant` asks of an RMSNorm."""
    eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))
    gain: Tensor = norm.weight.double()
    probe = torch.linspace(-3e3, 1e3, len(gain), dtype=norm.weight.dtype, device=gain.device)
    expected = probe.double() * gain / probe.double().square().mean().sqrt()
    if not torch.allclose(norm(probe).double(), expected, rtol=2e-2, atol=1e-6):
        raise UnsupportedError(f"{type(norm).__name__}: expected an RMSNorm with factors.")
    return {"gain": gain, "centred": False, "eps": eps}


def _least_deviation(states: Sequence[Tensor], centred: bool, eps: float, margin: float) -> float:
    least = math.inf
    for state in states:
        rows = state.detach().double()
        rows = rows - rows.mean(-1, keepdim=True) if centred else rows
        least = min(least, float(rows.square().mean(-1).min()))
    deviation = math.sqrt(least * (1 - margin) ** 2 + eps)
    if not (math.isfinite(deviation) and deviation > 0):
        raise ConfigError.of("states", "finite rows that vary", f"a least variance of {least}")
    return deviation


def _slope_and_height(activation: Callable[[Tensor], Tensor], reach: float) -> tuple[float, float]:
    """The steepest slope and the largest size of an activation for inputs up to a size."""
    with torch.enable_grad():
        grid = torch.linspace(-reach, reach, _GRID, dtype=torch.float64).requires_grad_()
        heights = activation(grid)
        slopes = torch.autograd.grad(heights.sum(), grid)[0]
    return tuple(float(values.detach().abs().max()) * (1 + _GRID_SLACK) for values in (slopes, heights))  # type: ignore[return-value]
