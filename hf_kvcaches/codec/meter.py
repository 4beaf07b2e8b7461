"""A cache that holds nothing and measures the keys and values of a model, and the gradients of its loss there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_kvcaches.codec.basis import Shape
from hf_kvcaches.codec.moments import Moments, second_moment
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.call import Call
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.rope import RotaryGeometry, undoable_rotation
from hf_kvcaches.core.view import LayerView, previous_attention
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_choice, whole_number
from hf_kvcaches.evaluate.observer import PassingLayer

Metric = Literal["loss", "plain"]
EXACT = 4
"""First tokens of a text that caches keep exactly: they are unlike all others."""
SAMPLE = 4096
"""Tokens of a layer that are kept as they are."""
# Moments and transforms take the square of their size, so heads that have more numbers together are joined in groups.
_LARGEST = 1024
# By how much what all queries see counts beside what far ones see, where newest tokens are exact: codes must not be useless without.
_NEAR = 0.04


@dataclass(frozen=True)
class Reading:
    """How texts are read and measured; described in `KVCodec.calibrate`. Checked when made."""

    rotation: Literal["aware", "post"] = "aware"
    metric: Metric = "loss"
    recent: int = 64
    block: int = 512
    batch_size: int = 1
    max_tokens: int | None = None
    shards: int = 1
    progress: bool = True

    def __post_init__(self) -> None:
        require_choice("rotation", self.rotation, ("aware", "post"))
        require_choice("metric", self.metric, ("loss", "plain"))
        for name, least in (("recent", 0), ("block", 2), ("batch_size", 1), ("max_tokens", 2), ("shards", 1)):
            if (value := getattr(self, name)) is not None or name != "max_tokens":
                object.__setattr__(self, name, whole_number(name, value, least))


class LayerSums:
    """Sums over the tokens of one layer, but for the first of each sequence; and some of the tokens as they are.

    Attributes:
        states: Of a group's keys and values, (groups, size, size); `total` is their sum, (groups, size), float64.
        keys: Of the loss's gradients at keys, (heads, key_dim, key_dim); and `values`.
        sample: (tokens, groups, size), those with the smallest of the random numbers in `draws`, (tokens,), in their order.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.states = Moments((shape.groups,), shape.size, device)
        self.total = torch.zeros(shape.groups, shape.size, dtype=torch.float64, device=device)
        self.keys, self.values = (Moments((shape.heads,), dim, device) for dim in (shape.key_dim, shape.value_dim))
        self.sample, self.draws = torch.empty(0, shape.groups, shape.size, device=device), torch.empty(0)

    def observe(self, keys: torch.Tensor, values: torch.Tensor, draws: torch.Tensor) -> None:
        """Add whole sequences of keys, as the codec sees them, and values, (batch, heads, tokens, dim); each token has a random number."""
        first = min(EXACT, keys.shape[2] - 1)
        joined = self.shape.join(keys[:, :, first:], values[:, :, first:], torch.float32)
        self.states.add(joined)
        self.total += joined.sum((0, 2), dtype=torch.float64)
        self.keep(joined.transpose(1, 2).flatten(0, 1), draws[:, first:].flatten())

    def observe_gradients(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Add the loss's gradients at keys and values of whole sequences: what comes from far queries, and from near ones if any."""
        first = min(EXACT, keys[0].shape[2] - 1)
        for moments, gradients in ((self.keys, keys), (self.values, values)):
            far, *near = (gradient[:, :, first:] for gradient in gradients)
            moments.add(far)
            for gradient in near:
                moments.total += _NEAR * second_moment(far + gradient).sum(0)

    def keep(self, tokens: torch.Tensor, draws: torch.Tensor) -> None:
        """Add to the sample; which tokens it holds in the end depends on no order."""
        draws = torch.cat([self.draws, draws])
        smallest = draws.argsort()[:SAMPLE]
        self.draws, self.sample = draws[smallest], torch.cat([self.sample, tokens])[smallest.to(tokens.device)]

    def sums(self) -> list[torch.Tensor]:
        """Everything that adds up over processes, to be changed in place."""
        return [self.total, *(part for each in (self.states, self.keys, self.values) for part in (each.total, each.count))]

    @property
    def mean(self) -> torch.Tensor:
        """(groups, size), float64."""
        return self.total / self.states.count.clamp_min(1)


class MeterCache(KVCache):
    """Measures the full-attention layers of a model, which attends as ever.

    Attributes:
        sums: By the index of the layer, once it has been asked.
        draws: For the tokens of the pass at hand, (batch, tokens).
        views: Of a pass with gradients, by the index of the layer.
    """

    needs_attention = True

    def __init__(self, model: PreTrainedModel, reading: Reading) -> None:
        self.reading = reading
        self.geometries: dict[int, RotaryGeometry | None] = {}
        self.sums: dict[int, LayerSums] = {}
        self.views: dict[int, _MeterView] = {}
        self.draws = torch.empty(0)
        super().__init__(model)
        if not self.geometries:
            raise UnsupportedError(f"calibrate: {type(model).__name__} has no layers with full attention, and only those are coded.")

    def make_layer(self, layer_idx: int) -> KVLayer:
        self.geometries[layer_idx] = None
        if self.reading.rotation == "aware":
            self.geometries[layer_idx] = undoable_rotation(self.config, layer_idx, "rotation='aware'", "rotation='post' works.")
        return _MeterLayer(self, layer_idx)

    @torch.no_grad()
    def observe(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Measure a batch of whole sequences; keys as the model rotated them, from position 0 on."""
        heads, shards = keys.shape[1], self.reading.shards
        if layer_idx not in self.sums:
            if heads % shards:
                raise ConfigError.of("shards", f"a number of processes that {heads} heads can be shared among", shards)
            shape = Shape(heads, keys.shape[3], values.shape[3], heads // shards).in_groups(_LARGEST)
            self.sums[layer_idx] = LayerSums(shape, keys.device)
        if (geometry := self.geometries[layer_idx]) is not None:
            keys = geometry.unrotate(_wide(keys), torch.arange(keys.shape[2], device=keys.device))
        self.sums[layer_idx].observe(keys, values, self.draws)

    def follow(self, outputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Measure the gradients of a loss at keys and values, given that at what the pass at hand ended in."""
        sides = [side for view in self.views.values() for side in (view.key_copies, view.value_copies)]
        gradients = iter(torch.autograd.grad(outputs, [copy for side in sides for copy in side], gradient))
        with torch.no_grad():
            for layer_idx, view in self.views.items():
                at_keys, at_values = ([next(gradients) for _ in side] for side in (view.key_copies, view.value_copies))
                at_keys = [before_rotation(self.geometries[layer_idx], each) for each in at_keys]
                self.sums[layer_idx].observe_gradients(at_keys, at_values)
        self.views = {}


def before_rotation(geometry: RotaryGeometry | None, gradients: torch.Tensor) -> torch.Tensor:
    """Gradients at keys before their rotation, of those at rotated keys, (batch, heads, tokens, dim), from position 0 on.

    The adjoint of a rotation is the rotation back, and what scales a key scales its gradient once more instead of less.
    """
    wide, positions = _wide(gradients), torch.arange(gradients.shape[2], device=gradients.device)
    return geometry.rotate(wide, -positions) if geometry is not None and geometry.kind == "rope" else wide


def _wide(states: torch.Tensor) -> torch.Tensor:
    return states if states.dtype == torch.float64 else states.float()


class _MeterLayer(PassingLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen += key_states.shape[-2]
        view = _MeterView(self.cache, self.layer_idx, key_states, value_states)
        return view, view


class _MeterView(LayerView):
    """Keys and values of one forward pass; the first attention call is measured, and not those of layers that share them.

    Attributes:
        key_copies: In a pass with gradients, the keys that all queries see, or those that far ones see and those that near ones see, whose
            gradients come apart; and `value_copies`.
    """

    cache_name = "KVCodec.calibrate"

    def __init__(self, cache: MeterCache, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.cache, self.layer_idx, self.keys, self.values = cache, layer_idx, keys, values
        self.key_copies, self.value_copies = list[torch.Tensor](), list[torch.Tensor]()
        self.measured = False

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache, recent = self.cache, self.cache.reading.recent
        if not self.measured:
            self.measured = True
            cache.observe(self.layer_idx, self.keys.detach(), self.values.detach())
            if torch.is_grad_enabled():
                self.key_copies, self.value_copies = (_copies(side, 2 if recent else 1) for side in (self.keys, self.values))
                cache.views[self.layer_idx] = self
        if not torch.is_grad_enabled():
            return previous_attention(module, query, self.keys, self.values, mask, **kwargs)
        if not recent:
            return previous_attention(module, query, self.key_copies[0], self.value_copies[0], mask, **kwargs)
        call = Call(module, mask, kwargs)
        call.check("KVCodec.calibrate(recent=...)", sinks=True)
        # Of a short sequence the second half has queries that are far from something. Weights are computed again on the way back.
        arguments = query, *self.key_copies, *self.value_copies, call, min(recent, self.keys.shape[2] // 2)
        return checkpoint(_attend_apart, *arguments, use_reentrant=False), None


def _copies(states: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The same states several times, each with a gradient of its own."""
    return [states.view_as(states) if states.requires_grad else states.detach().requires_grad_() for _ in range(count)]


def _attend_apart(
    query: torch.Tensor,
    far_keys: torch.Tensor,
    near_keys: torch.Tensor,
    far_values: torch.Tensor,
    near_values: torch.Tensor,
    call: Call,
    recent: int,
) -> torch.Tensor:
    """Causal attention of a whole sequence, (batch, tokens, heads, dim), in which a token at least `recent` tokens back is far."""
    (_, heads, tokens, _), kv_heads = query.shape, far_keys.shape[1]
    grouped = query.unflatten(1, (kv_heads, -1))  # [B, KV, G, T, D]
    index = torch.arange(tokens, device=query.device)
    distance = index[:, None] - index
    far = distance >= recent
    scores = torch.where(far, grouped @ far_keys[:, :, None].mT, grouped @ near_keys[:, :, None].mT) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if call.bias is not None:
        own = call.bias[..., -tokens:]
        scores = scores + (own.unflatten(1, (kv_heads, -1)) if own.shape[1] == heads else own[:, :, None])
    scores = scores.masked_fill(distance < 0, -torch.inf)
    if call.sink_logits is not None:
        sinks = call.sink_logits.to(scores.dtype).view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., :tokens]
    output = torch.where(far, weights, 0) @ far_values[:, :, None] + torch.where(far, 0, weights) @ near_values[:, :, None]
    return output.flatten(1, 2).transpose(1, 2)
