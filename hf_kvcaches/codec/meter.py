"""A cache that holds nothing and measures the keys and values of a model, and the gradients of its loss there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvcaches.codec.basis import Shape
from hf_kvcaches.codec.far import attend_apart
from hf_kvcaches.codec.metric import Metric, before_rotation
from hf_kvcaches.codec.moments import Moments, second_moment
from hf_kvcaches.core.cache import KVCache
from hf_kvcaches.core.call import Call
from hf_kvcaches.core.layers import KVLayer
from hf_kvcaches.core.rope import RotaryGeometry, undoable_rotation
from hf_kvcaches.core.view import LayerView, previous_attention
from hf_kvcaches.errors import ConfigError, UnsupportedError, require_choice, whole_number
from hf_kvcaches.evaluate.observer import PassingLayer

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
        states: Of a group's keys and values, (groups, size, size).
        total: Theirs, (groups, size), float64.
        keys: Of the loss's gradients at keys, (heads, key_dim, key_dim); and `values`.
        sample: (tokens, groups, size), those with the smallest of the random numbers in `draws`, (tokens,).
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.states = Moments((shape.groups,), shape.size, device)
        self.total = torch.zeros(shape.groups, shape.size, dtype=torch.float64, device=device)
        self.keys, self.values = (Moments((shape.heads,), dim, device) for dim in (shape.key_dim, shape.value_dim))
        self.sample, self.draws = torch.empty(0, shape.groups, shape.size, device=device), torch.empty(0)

    def observe(self, keys: torch.Tensor, values: torch.Tensor, draws: torch.Tensor) -> None:
        """Add whole sequences.

        Args:
            keys: (batch, heads, tokens, dim), as the codec sees them; and `values`.
            draws: A random number for each token, (batch, tokens).
        """
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
        room = SAMPLE - len(self.draws)
        if room > 0:
            self.sample, self.draws = torch.cat([self.sample, tokens[:room]]), torch.cat([self.draws, draws[:room]])
            tokens, draws = tokens[room:], draws[room:]
        smallest = torch.cat([self.draws, draws]).argsort()[:SAMPLE]
        kept = torch.zeros(len(self.draws) + len(draws), dtype=torch.bool).index_fill_(0, smallest, True)
        old, new = ~kept[: len(self.draws)], kept[len(self.draws) :]
        self.draws[old] = draws[new]
        self.sample[old.to(tokens.device)] = tokens[new.to(tokens.device)]

    def sums(self) -> list[torch.Tensor]:
        """Everything that adds up over processes, to be changed in place."""
        return [self.total, *(part for each in (self.states, self.keys, self.values) for part in (each.total, each.count))]

    @property
    def mean(self) -> torch.Tensor:
        """(groups, size), float64."""
        return self.total / self.states.count.clamp_min(1)


class Leaves(NamedTuple):
    """Zeros that are added to keys and values, whose gradients are measured: of all queries, or of far ones and of near ones."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, count: int) -> Leaves:
        """Leaves for keys and values."""
        return cls(*([torch.zeros_like(states, requires_grad=True) for _ in range(count)] for states in (keys, values)))

    def tensors(self) -> list[torch.Tensor]:
        """Those of keys first."""
        return [*self.keys, *self.values]


class MeterCache(KVCache):
    """Measures the full-attention layers of a model, which attends as ever.

    Attributes:
        sums: By the index of the layer, once it has been asked.
        draws: For the tokens of the pass at hand, (batch, tokens).
        leaves: In a pass with gradients, by the index of the layer.
    """

    needs_attention = True

    def __init__(self, model: PreTrainedModel, reading: Reading) -> None:
        self.reading = reading
        self.geometries: dict[int, RotaryGeometry | None] = {}
        self.sums: dict[int, LayerSums] = {}
        self.leaves: dict[int, Leaves] = {}
        self.draws = torch.empty(0)
        super().__init__(model)
        if not self.geometries:
            raise UnsupportedError(f"calibrate: {type(model).__name__} has no layers with full attention, and only those are coded.")

    def make_layer(self, layer_idx: int) -> KVLayer:
        aware = self.reading.rotation == "aware"
        self.geometries[layer_idx] = (
            undoable_rotation(self.config, layer_idx, "rotation='aware'", "rotation='post' works.") if aware else None
        )
        return _MeterLayer(self, layer_idx)

    @torch.no_grad()
    def observe(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Measure a batch of whole sequences; keys as the model rotated them, from position 0 on."""
        if layer_idx not in self.sums:
            heads, shards = keys.shape[1], self.reading.shards
            if heads % shards:
                raise ConfigError.of("shards", f"a number of processes that {heads} heads can be shared among", shards)
            shape = Shape(heads, keys.shape[3], values.shape[3], heads // shards).in_groups(_LARGEST)
            self.sums[layer_idx] = LayerSums(shape, keys.device)
        geometry, positions = self.geometries[layer_idx], torch.arange(keys.shape[2], device=keys.device)
        if geometry is not None:
            keys = geometry.unrotate(keys if keys.dtype == torch.float64 else keys.float(), positions)
        self.sums[layer_idx].observe(keys, values, self.draws)

    def follow(self, outputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Measure the gradients of a loss at keys and values.

        Args:
            outputs: What the pass at hand ended in.
            gradient: Of the loss at these.
        """
        inputs = [leaf for leaves in self.leaves.values() for leaf in leaves.tensors()]
        gradients = iter(torch.autograd.grad(outputs, inputs, gradient))
        with torch.no_grad():
            for layer_idx, leaves in self.leaves.items():
                positions = torch.arange(leaves.keys[0].shape[2], device=outputs.device)
                at_keys = [before_rotation(self.geometries[layer_idx], next(gradients), positions) for _ in leaves.keys]
                self.sums[layer_idx].observe_gradients(at_keys, [next(gradients) for _ in leaves.values])
        self.leaves = {}


class _MeterLayer(PassingLayer):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen += key_states.shape[-2]
        view = _MeterView(self.cache, self.layer_idx, key_states, value_states)
        return view, view


class _MeterView(LayerView):
    """Keys and values of one forward pass; the first attention call is measured, and not those of layers that share them."""

    def __init__(self, cache: MeterCache, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.cache, self.layer_idx, self.keys, self.values = cache, layer_idx, keys, values

    def attend(
        self, module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache, keys, values = self.cache, self.keys, self.values
        if not self.measured:
            self.measured = True
            cache.observe(self.layer_idx, keys.detach(), values.detach())
            if torch.is_grad_enabled():
                cache.leaves[self.layer_idx] = Leaves.of(keys, values, 2 if cache.reading.recent else 1)
        if not torch.is_grad_enabled():
            return previous_attention(module, query, keys, values, mask, **kwargs)
        leaves = cache.leaves[self.layer_idx]
        if not cache.reading.recent:
            return previous_attention(module, query, keys + leaves.keys[0], values + leaves.values[0], mask, **kwargs)
        call = Call(module, mask, kwargs)
        call.check("KVCodec.calibrate(recent=...)", sinks=True)
        # Of a short sequence the second half has queries that are far from something.
        recent = min(cache.reading.recent, keys.shape[2] // 2)
        return attend_apart(query, keys, values, leaves.keys, leaves.values, call, recent), None

    measured = False

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(f"This model reads {name!r} from the keys or values of its cache, so its attention can't be measured.")
