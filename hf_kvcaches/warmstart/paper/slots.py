"""`Slots`: the summary of a prompt, a few keys and values for each layer and key head that stand for all its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, whole_number


class LayerSlots(NamedTuple):
    """The slots of one layer."""

    keys: torch.Tensor  # (kv_heads, slots, head_dim), rotated to `positions`
    values: torch.Tensor  # (kv_heads, slots, value_dim)
    positions: torch.Tensor  # (kv_heads, slots), float32: the weighted mean position of the tokens that a slot stands for
    counts: torch.Tensor  # (kv_heads, slots), float32, above 0: how many tokens a slot stands for


@dataclass(frozen=True, eq=False)
class Slots:
    """A prompt's summary: the slots of each layer, in order of position.

    A slot is attended to like a token, with the logarithm of its count added to its logit: as many tokens with its key and value would
    give the same output. A token that has a slot for itself has count 1 and is exact.

    Args:
        length: Tokens of the prompt, including the last ones, which no slot stands for.
    """

    layers: Sequence[LayerSlots]
    length: int

    def __post_init__(self) -> None:
        whole_number("length", self.length, 1)
        for index, layer in enumerate(self.layers):
            _check_layer(index, layer)

    def shifted(self, delta: int, geometries: Sequence[RotaryGeometry]) -> Slots:
        """Move the slots to the end of a prompt that is `delta` tokens longer.

        One rotation is right for all slots, pooled ones too: a mean of rotated keys is the rotated mean, and every slot keeps its distance
        to the prompt's end.
        """
        require_layers("geometries", geometries, len(self.layers))
        layers = [
            layer._replace(keys=geometry.shift(layer.keys[None], delta)[0], positions=layer.positions + delta)
            for layer, geometry in zip(self.layers, geometries, strict=True)
        ]
        return Slots(layers, self.length + delta)


def rotated(keys: torch.Tensor, delta: int, geometry: RotaryGeometry) -> torch.Tensor:
    """Rotate keys of one layer, (kv_heads, n, head_dim), by `delta` positions; keys without rotary positions stay as they are."""
    return geometry.shift(keys[None], delta)[0] if geometry.kind == "rope" else keys


def require_layers(argument: str, values: Sequence[object], layers: int) -> None:
    """Refuse a sequence that has not one element for each layer."""
    if len(values) != layers:
        raise ConfigError.of(argument, f"one for each of {layers} layers", len(values))


def _check_layer(index: int, layer: LayerSlots) -> None:
    shape = layer.keys.shape[:2]
    dimensions = [tensor.ndim for tensor in layer]
    if dimensions != [3, 3, 2, 2] or any(tensor.shape[:2] != shape for tensor in layer):
        expected = "keys and values (kv_heads, slots, size), positions and counts (kv_heads, slots)"
        raise ConfigError.of(f"layer {index}", expected, [tuple(tensor.shape) for tensor in layer])
    if layer.positions.dtype != torch.float32 or layer.counts.dtype != torch.float32:
        raise ConfigError.of(f"layer {index}", "float32 positions and counts", (layer.positions.dtype, layer.counts.dtype))
