"""A cache that holds nothing and measures the keys and values of a model, and the gradients of its loss there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_kvcaches.codec.moments import LayerSums, Metric, Shape
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.call import Call
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.rope import RotaryGeometry, undoable_rotation
from hf_kvcaches.core.view import LayerView, previous_attention
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_choice, whole_number
from hf_kvcaches.evaluate.observer import PassingLayer

# Moments and transforms take the square of their size, so heads that have more numbers together are joined in groups.
_LARGEST = 1024


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


class MeterCache(KVCache):
    """Measures the full-attention layers of a model, which attends as ever."""

    needs_attention = True

    def __init__(self, model: PreTrainedModel, reading: Reading) -> None:
        self.reading = reading
        self.geometries: dict[int, RotaryGeometry | None] = {}
        self.sums: dict[int, LayerSums] = {}  # by the index of the layer, once it has been asked
        # In a pass with gradients, by the index of the layer, the keys and the values that all queries see; or keys that far ones see and
        # near ones, and values likewise.
        self.copies: dict[int, list[torch.Tensor]] = {}
        self.draws = torch.empty(0)  # for the tokens of the pass at hand, (batch, tokens)
        self.blocks = self.tokens = 0  # read by all processes
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
        gradients = iter(torch.autograd.grad(outputs, [copy for copies in self.copies.values() for copy in copies], gradient))
        with torch.no_grad():
            for layer_idx, copies in self.copies.items():
                half = len(copies) // 2  # those of keys come first
                at_keys, at_values = ([next(gradients) for _ in range(half)] for _ in range(2))
                at_keys = [before_rotation(self.geometries[layer_idx], each) for each in at_keys]
                self.sums[layer_idx].observe_gradients(at_keys, at_values)
        self.copies = {}


def before_rotation(geometry: RotaryGeometry | None, gradients: torch.Tensor) -> torch.Tensor:
    """Gradients at keys before their rotation, of those at rotated keys, (batch, heads, tokens, dim), from position 0 on.

    The adjoint of a rotation is the rotation back, and what scales a key scales its gradient once more instead of less.
    """
    wide, positions = _wide(gradients), torch.arange(gradients.shape[2], device=gradients.device)
    return wide if geometry is None else geometry.rotate(wide, -positions)


def _wide(states: torch.Tensor) -> torch.Tensor:
    return states if states.dtype == torch.float64 else states.float()


class _MeterLayer(PassingLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen += key_states.shape[-2]
        view = _MeterView(self.cache, self.layer_idx, key_states, value_states)
        return view, view


class _MeterView(LayerView):
    """Keys and values of one forward pass; the first attention call is measured, and not those of layers that share them."""

    cache_name = "KVCodec.calibrate"

    def __init__(self, cache: MeterCache, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.cache, self.layer_idx, self.keys, self.values, self.measured = cache, layer_idx, keys, values, False
        self.copies = [keys, values]

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache, recent = self.cache, self.cache.reading.recent
        if not self.measured:
            self.measured = True
            cache.observe(self.layer_idx, self.keys.detach(), self.values.detach())
            if torch.is_grad_enabled():
                self.copies = [_copy(side) for side in (self.keys, self.values) for _ in range(2 if recent else 1)]
                cache.copies[self.layer_idx] = self.copies
        if not recent or not torch.is_grad_enabled():
            keys, values = self.copies
            return previous_attention(module, query, keys, values, mask, **kwargs)
        call = Call(module, mask, kwargs)
        call.check("KVCodec.calibrate(recent=...)", sinks=True)
        # Of a short sequence the second half has queries that are far from something. Weights are computed again on the way back.
        arguments = query, *self.copies, call, min(recent, self.keys.shape[2] // 2)
        return checkpoint(_attend_apart, *arguments, use_reentrant=False), None


def _copy(states: torch.Tensor) -> torch.Tensor:
    """The same states, with a gradient of their own."""
    return states.view_as(states) if states.requires_grad else states.detach().requires_grad_()


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
