"""`Slots`: the summary of a prompt, a few keys and values per layer and key head that stand for all of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, ConfigError, whole_number


class LayerSlots(NamedTuple):
    """The slots of one layer.

    Args:
        keys: (kv_heads, slots, head_dim), rotated to `positions`.
        values: (kv_heads, slots, value_dim).
        positions: (kv_heads, slots), float32: the weighted mean position of the tokens that a slot stands for.
        counts: (kv_heads, slots), float32, above 0: how many tokens a slot stands for.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor


_NAMES = LayerSlots._fields


@dataclass(frozen=True, eq=False)
class Slots:
    """A prompt's summary: the tensors of `LayerSlots` for each layer, in order of position.

    A slot is attended to like a token, with the logarithm of its count added to its logit: as many tokens with its key and value would
    give the same output. A token that has a slot for itself has count 1 and is exact.

    Args:
        length: Tokens of the prompt, including the last ones, which no slot stands for.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    positions: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...]
    length: int

    def __post_init__(self) -> None:
        layers = {name: len(getattr(self, name)) for name in _NAMES}
        if len(set(layers.values())) > 1:
            raise ConfigError.of("keys, values, positions, counts", "as many layers in each", layers)
        whole_number("length", self.length, 1)
        for index, layer in enumerate(self.layers()):
            _check_layer(index, layer)

    @classmethod
    def from_layers(cls, layers: Sequence[LayerSlots], length: int) -> Slots:
        """Build a summary from the slots of each layer."""
        keys, values, positions, counts = (tuple(getattr(layer, name) for layer in layers) for name in _NAMES)
        return cls(keys, values, positions, counts, length)

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], length: int) -> Slots:
        """Restore what `tensors` returned."""
        layers: dict[int, LayerSlots] = {}
        try:
            for stack in range(sum(name.startswith("layers.") for name in tensors)):
                rows = zip(*(tensors[f"{name}.{stack}"].unbind(0) for name in _NAMES), strict=True)
                layers |= zip(tensors[f"layers.{stack}"].tolist(), (LayerSlots(*row) for row in rows), strict=True)
            return cls.from_layers([layers[index] for index in range(len(layers))], length)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ArtifactError(f"The stored slots don't fit together: {error!r}") from error

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all but `length`, for storing; layers of the same shapes share a tensor, (layers, kv_heads, slots, ...)."""
        alike: dict[tuple[object, ...], list[int]] = {}
        layers = list(self.layers())
        for index, layer in enumerate(layers):
            alike.setdefault(tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in layer), []).append(index)
        stored = {}
        for stack, indices in enumerate(alike.values()):
            stored[f"layers.{stack}"] = torch.tensor(indices)
            stored |= {f"{name}.{stack}": torch.stack([getattr(layers[index], name) for index in indices]) for name in _NAMES}
        return stored

    def layers(self) -> Iterator[LayerSlots]:
        """Yield the slots of each layer."""
        return (LayerSlots(*tensors) for tensors in zip(self.keys, self.values, self.positions, self.counts, strict=True))

    def shifted(self, delta: int, geometries: Sequence[RotaryGeometry]) -> Slots:
        """Move the slots to the end of a prompt that is `delta` tokens longer.

        One rotation is right for all slots, pooled ones too: a mean of rotated keys is the rotated mean, and every slot keeps its distance
        to the prompt's end.
        """
        require_layers("geometries", geometries, len(self.keys))
        keys = tuple(geometry.shift(tensor[None], delta)[0] for tensor, geometry in zip(self.keys, geometries, strict=True))
        return replace(self, keys=keys, positions=tuple(layer + delta for layer in self.positions), length=self.length + delta)

    def to(self, device: torch.device | str) -> Slots:
        """Return the same slots on a device."""
        return Slots.from_layers([LayerSlots(*(tensor.to(device) for tensor in layer)) for layer in self.layers()], self.length)


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
