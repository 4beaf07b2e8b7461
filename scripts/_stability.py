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
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_kvcaches.compat import base_model, decoder_layers
from hf_kvcaches.errors import ConfigError, UnsupportedError

SOFTMAX = 0.5  # The largest gain of a softmax, from logits to probabilities.
LOG_SOFTMAX = 2.0  # The same from logits in the infinity norm to a log-probability (lemma B.1).

_BLOCK, _MOST_ITERATIONS, _PATIENCE = 8, 2000, 5
_FIRST_NORMS, _SECOND_NORMS = ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2")
_LAST_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")
_SEPARATE, _FUSED, _OUT = ("q_proj", "k_proj", "v_proj"), ("qkv_proj", "c_attn"), ("o_proj", "c_proj", "out_proj", "dense")
_GRID, _GRID_SLACK = 20001, 1e-4


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
    for name, given in (("alphas", alphas), ("betas", betas), ("reuse_errors", reuse_errors), ("patch_errors", list(resets.values()))):
        if any(math.isnan(value) or value < 0 for value in given):
            raise ConfigError.of(name, "numbers of at least 0", list(given))
        if name != "patch_errors" and len(given) != len(alphas):
            raise ConfigError.of(name, f"{len(alphas)} numbers, as there are alphas", len(given))
    if not all(isinstance(layer, int) and 0 <= layer < len(alphas) for layer in resets):
        raise ConfigError.of("patch_errors", f"layers from 0 to {len(alphas) - 1}", sorted(resets))
    bounds = [resets.get(0, 0.0)]
    for layer, (alpha, beta, error) in enumerate(zip(alphas, betas, reuse_errors, strict=True)):
        carried = alpha * bounds[layer] + beta * error
        bounds.append(resets.get(layer + 1, carried))
    return bounds


def nll_gap_bound(output_head: float, final_error: float) -> float:
    """How much the log-probability of any token can change (equation 18)."""
    return LOG_SOFTMAX * output_head * final_error


def spectral_norm(matrix: Tensor, tolerance: float = 1e-10) -> float:
    """The largest singular value, by power iteration with a few vectors at once, in float64."""
    if matrix.ndim != 2:
        raise ConfigError.of("matrix", "two dimensions", tuple(matrix.shape))
    wide = matrix.detach().double()
    wide = wide if wide.shape[0] <= wide.shape[1] else wide.T
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(len(wide), min(_BLOCK, len(wide)), generator=generator, dtype=torch.float64).to(wide.device)
    value, quiet = 0.0, 0
    for _ in range(_MOST_ITERATIONS if wide.numel() else 0):
        block = wide @ (wide.T @ torch.linalg.qr(block).Q)
        grown = float(torch.linalg.matrix_norm(block, ord=2)) ** 0.5  # The block's are those of the squared matrix.
        quiet = quiet + 1 if grown - value <= tolerance * grown else 0
        value = max(value, grown)
        if quiet >= _PATIENCE:
            break
    return value


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
    if not traces:
        raise ConfigError.of("traces", "at least one prompt's", 0)
    if not 0 <= margin < 1:
        raise ConfigError.of("margin", "a share from 0 to below 1", margin)
    parts = _Parts.of(model, layer)
    query, key, value = (spectral_norm(matrix) for matrix in parts.projections(traces[0]))
    attention = attention_constants(traces, query, key, value, spectral_norm(_matrix(parts.out)), parts.scaling(traces[0]), margin)
    first = norm_constant([trace.hidden for trace in traces], **_norm(parts.first), margin=margin)
    second = norm_constant([trace.middle for trace in traces], **_norm(parts.second), margin=margin)
    inputs = [parts.second(trace.middle) for trace in traces]
    return LayerConstants(attention[0] * first, attention[1], attention[2], _mlp(parts.mlp, inputs, 1 + margin) * second)


@torch.no_grad()
def head_constant(model: nn.Module, states: Sequence[Tensor], *, margin: float = 0.0) -> float:
    """The largest gain from the last layer's output to a logit: the last norm and the longest row of the output embedding."""
    inner = base_model(model)
    decoder = decoder_layers(inner)[0]
    norm = next((getattr(decoder, name) for name in _LAST_NORMS if hasattr(decoder, name)), None)
    head: Any = inner.get_output_embeddings()
    scaled = [name for name in ("logit_scale", "logits_scaling") if getattr(inner.config, name, None) not in (None, 1, 1.0)]
    if norm is None or head is None or scaled:
        raise UnsupportedError(f"{type(inner).__name__}: expected a norm and an output embedding, and no scale of logits.")
    known = _norm(norm)
    rows = (_matrix(head).T * known["gain"]).norm(dim=-1)
    return float(rows.max()) / _least_deviation(states, known["centred"], known["eps"], margin)


@dataclass(frozen=True, eq=False)
class _Parts:
    """The modules of a layer that runs norm, attention, norm and MLP one after the other."""

    first: nn.Module
    second: nn.Module
    attention: nn.Module
    mlp: nn.Module
    fused: bool
    inward: tuple[nn.Module, ...]
    out: nn.Module

    @classmethod
    def of(cls, model: nn.Module, index: int) -> _Parts:
        decoder, _, layers = decoder_layers(base_model(model))
        if not 0 <= index < len(layers):
            raise ConfigError.of("layer", f"0 to {len(layers) - 1}", index)
        layer = layers[index]
        first, second, mlp = _child(layer, _FIRST_NORMS), _child(layer, _SECOND_NORMS), _child(layer, ("mlp",))
        attention = _child(layer, ("self_attn", "attn", "attention"))
        _refuse_others(layer, (first, second, mlp, attention))
        scales = [getattr(layer, "residual_multiplier", 1.0), getattr(getattr(decoder, "rotary_emb", None), "attention_scaling", 1.0)]
        if scales != [1.0, 1.0]:
            raise UnsupportedError(f"{type(layer).__name__}: it scales what it adds or rotates ({scales}), which has no bound here.")
        fused = any(hasattr(attention, name) for name in _FUSED)
        inward = (_child(attention, _FUSED),) if fused else tuple(_child(attention, (name,)) for name in _SEPARATE)
        out = _child(attention, _OUT)
        _refuse_others(attention, (*inward, out))
        return cls(first, second, attention, mlp, fused, inward, out)

    def projections(self, trace: LayerTrace) -> tuple[Tensor, Tensor, Tensor]:
        """The matrices to queries, keys and values."""
        matrices = [_matrix(module) for module in self.inward]
        if not self.fused:
            return matrices[0], matrices[1], matrices[2]
        sizes = [part[0].numel() for part in (trace.queries, trace.keys, trace.values)]
        if sum(sizes) != matrices[0].shape[1]:
            raise UnsupportedError(f"A fused projection has {matrices[0].shape[1]} columns, queries, keys and values have {sizes}.")
        query, key, value = matrices[0].split(sizes, dim=1)
        return query, key, value

    def scaling(self, trace: LayerTrace) -> float:
        return float(getattr(self.attention, "scaling", trace.keys.shape[-1] ** -0.5))


def _child(module: nn.Module, names: Sequence[str]) -> nn.Module:
    found = [name for name, _ in module.named_children() if name in names]
    if len(found) != 1:
        has = ", ".join(name for name, _ in module.named_children())
        raise UnsupportedError(f"{type(module).__name__}: expected one of {', '.join(names)} in it, and it has {has}.")
    child: nn.Module = getattr(module, found[0])
    return child


def _refuse_others(module: nn.Module, known: Sequence[nn.Module]) -> None:
    for name, child in module.named_children():
        if all(child is not one for one in known) and ("norm" in name or any(True for _ in child.parameters())):
            raise UnsupportedError(f"{type(module).__name__}: its part {name!r} has no bound here.")


def _matrix(module: nn.Module) -> Tensor:
    """The matrix of a linear map, for rows: (inputs, outputs)."""
    held: Any = getattr(module, "weight", None)
    if type(module) is nn.Linear:
        return held.double().T
    if type(module) is Conv1D:
        return held.double()
    # Wrapped ones (adapters) by what they do to unit vectors.
    inner: Any = getattr(module, "base_layer", None)
    if not isinstance(inner, nn.Linear | Conv1D):
        raise UnsupportedError(f"{type(module).__name__}: expected a linear map.")
    size = inner.weight.shape[1 if isinstance(inner, nn.Linear) else 0]
    unit = torch.eye(size, dtype=inner.weight.dtype, device=inner.weight.device)
    return module(unit).double() - module(unit * 0).double()


def _norm(norm: nn.Module) -> dict[str, Any]:
    """What `norm_constant` asks of a norm."""
    weight: Any = getattr(norm, "weight", None)
    eps = float(getattr(norm, "eps", getattr(norm, "variance_epsilon", 0.0)))
    if isinstance(norm, nn.LayerNorm) and weight is not None:
        return {"gain": weight.double(), "centred": True, "eps": eps}
    if isinstance(weight, Tensor) and weight.ndim == 1 and getattr(norm, "bias", None) is None:
        # Some multiply with 1 + weight. Large inputs, so that eps has no part in it.
        probe = torch.full_like(weight, 1e3)
        gain: Tensor = norm(probe).double()
        probe[::2] *= -3
        if torch.allclose(norm(probe).double(), probe.double() * gain / probe.double().square().mean().sqrt(), rtol=2e-2, atol=1e-6):
            return {"gain": gain, "centred": False, "eps": eps}
    raise UnsupportedError(f"{type(norm).__name__}: expected a LayerNorm or an RMSNorm with factors.")


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


def _mlp(mlp: nn.Module, inputs: Sequence[Tensor], wide: float) -> float:
    activation: Any = _child(mlp, ("act_fn", "act", "activation_fn"))
    gated = any(hasattr(mlp, name) for name in ("gate_proj", "gate_up_proj"))
    inward = [getattr(mlp, name) for name in (("gate_proj", "up_proj", "gate_up_proj") if gated else ("c_fc", "fc1")) if hasattr(mlp, name)]
    out = _child(mlp, ("down_proj", "c_proj", "fc2"))
    _refuse_others(mlp, (*inward, out, activation))
    norms = [_matrix(module) for module in inward]
    reached = [wide * torch.stack([module(rows).double().abs().amax(0) for rows in inputs]).amax(0) for module in inward]
    outer = spectral_norm(_matrix(out))
    if not gated and len(inward) == 1:
        return outer * _slope_and_height(activation, float(reached[0].max()))[0] * spectral_norm(norms[0])
    if hasattr(mlp, "gate_up_proj"):
        norms, reached = list(norms[0].chunk(2, dim=1)), list(reached[0].chunk(2))
    if len(norms) != 2:
        raise UnsupportedError(f"{type(mlp).__name__}: expected two projections, or three of which one is a gate.")
    gate, up = (spectral_norm(matrix) for matrix in norms)
    return gated_mlp_constant(gate, up, outer, activation, float(reached[0].max()), float(reached[1].max()))
