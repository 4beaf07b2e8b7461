"""`Slots`: the summary of a prompt, a few keys and values a head that stand for all of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, ConfigError, whole_number

_PARTS = ("keys", "values", "positions", "counts")


class LayerSlots(NamedTuple):
    """The slots of one layer.

    Args:
        keys: (kv_heads, slots, head_dim), rotated for where they stood in their prompt.
        values: (kv_heads, slots, value_dim).
        positions: (kv_heads, slots), float32: the weighted mean position, from 0, of the tokens that a slot stands for.
        counts: (kv_heads, slots), float32: how many tokens a slot stands for.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, eq=False)
class Slots:
    """A prompt's summary: for each layer and key head some slots, in order of position.

    A slot is attended to like a token, with the logarithm of its count added to its logit: as many tokens with its key and value would
    give the same output. What stood alone in its slot has count 1 and is exact.

    Args:
        keys: For each layer (kv_heads, slots, head_dim), rotated for where they stood in their prompt.
        values: For each layer (kv_heads, slots, value_dim).
        positions: For each layer (kv_heads, slots), float32: the weighted mean position, from 0, of the tokens that a slot stands for.
        counts: For each layer (kv_heads, slots), float32: how many tokens a slot stands for; above 0.
        length: Tokens of the prompt, those included that no slot stands for because they are run again.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    positions: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...]
    length: int

    def __post_init__(self) -> None:
        for name in _PARTS:
            object.__setattr__(self, name, tuple(getattr(self, name)))
        layers = {name: len(getattr(self, name)) for name in _PARTS}
        if len(set(layers.values())) > 1:
            raise ConfigError.of("keys, values, positions, counts", "as many layers in each", layers)
        whole_number("length", self.length, 1)
        for index, layer in enumerate(self.layers()):
            _check_layer(index, layer)

    @classmethod
    def from_layers(cls, layers: Sequence[LayerSlots], length: int) -> Slots:
        """Slots from those of each layer."""
        keys, values, positions, counts = (tuple(layer[part] for layer in layers) for part in range(len(_PARTS)))
        return cls(keys, values, positions, counts, length)

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], length: int) -> Slots:
        """Slots from what `tensors` gave."""
        found: dict[int, LayerSlots] = {}
        try:
            for stack in range(sum(name.startswith("layers.") for name in tensors)):
                indices = tensors[f"layers.{stack}"].tolist()
                parts = [tensors[f"{name}.{stack}"].unbind(0) for name in _PARTS]
                found.update(zip(indices, (LayerSlots(*each) for each in zip(*parts, strict=True)), strict=True))
            if sorted(found) != list(range(len(found))):
                raise ArtifactError(f"The stored slots are of layers {sorted(found)}, and some are missing.")
            return cls.from_layers([found[index] for index in range(len(found))], length)
        except (KeyError, RuntimeError, TypeError, ConfigError) as error:
            raise ArtifactError(f"The stored slots don't fit together: {error}") from error
        except ValueError as error:
            if isinstance(error, ArtifactError):
                raise
            raise ArtifactError(f"The stored slots don't fit together: {error}") from error

    def tensors(self) -> dict[str, torch.Tensor]:
        """All there is but `length`, for storing; layers of the same shapes lie in one tensor, (layers, kv_heads, slots, ...)."""
        alike: dict[tuple[object, ...], list[int]] = {}
        layers = list(self.layers())
        for index, layer in enumerate(layers):
            alike.setdefault(tuple((part.shape, part.dtype, part.device) for part in layer), []).append(index)
        stored = {}
        for stack, indices in enumerate(alike.values()):
            stored[f"layers.{stack}"] = torch.tensor(indices)
            for part, name in enumerate(_PARTS):
                stored[f"{name}.{stack}"] = torch.stack([layers[index][part] for index in indices])
        return stored

    def layers(self) -> Iterator[LayerSlots]:
        """The slots of each layer."""
        return (LayerSlots(*parts) for parts in zip(self.keys, self.values, self.positions, self.counts, strict=True))

    @property
    def offsets(self) -> tuple[torch.Tensor, ...]:
        """For each layer (kv_heads, slots): how far before the prompt's end a slot stands. A shift leaves them as they are."""
        return tuple(self.length - positions for positions in self.positions)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.numel() * part.element_size() for layer in self.layers() for part in layer)

    def shifted(self, delta: int, geometries: Sequence[RotaryGeometry]) -> Slots:
        """The same slots at the end of a prompt that is `delta` tokens longer.

        One turn is right for all slots, pooled ones too: a mean of turned keys is the turned mean, and every slot keeps its distance to
        the prompt's end.

        Args:
            delta: Length of the other prompt minus `length`.
        """
        require_layers("geometries", geometries, len(self.keys))
        keys = tuple(geometry.shift(own[None], delta)[0] for own, geometry in zip(self.keys, geometries, strict=True))
        return replace(self, keys=keys, positions=tuple(own + delta for own in self.positions), length=self.length + delta)

    def to(self, device: torch.device | str) -> Slots:
        """The same on a device."""
        return Slots.from_layers([LayerSlots(*(part.to(device) for part in layer)) for layer in self.layers()], self.length)


def turned(keys: torch.Tensor, delta: int, geometry: RotaryGeometry) -> torch.Tensor:
    """Keys of one layer, turned on by `delta` where the layer rotates; as they are where positions are not in the keys' angles.

    Args:
        keys: (kv_heads, n, head_dim), rotated.
    """
    return geometry.shift(keys[None], delta)[0] if geometry.kind == "rope" else keys


def require_layers(argument: str, given: Sequence[object], layers: int) -> None:
    """Refuses a sequence that has not one element for each layer."""
    if len(given) != layers:
        raise ConfigError.of(argument, f"one for each of {layers} layers", len(given))


def _check_layer(index: int, layer: LayerSlots) -> None:
    shape = layer.keys.shape[:2]
    got = {name: tuple(part.shape) for name, part in zip(_PARTS, layer, strict=True)}
    if (
        layer.keys.ndim != 3
        or layer.values.ndim != 3
        or layer.values.shape[:2] != shape
        or layer.positions.shape != shape
        or layer.counts.shape != shape
    ):
        expected = "keys and values (kv_heads, slots, size), positions and counts (kv_heads, slots)"
        raise ConfigError.of(f"layer {index}", expected, got)
    if layer.positions.dtype != torch.float32 or layer.counts.dtype != torch.float32:
        raise ConfigError.of(f"layer {index}", "float32 positions and counts", (layer.positions.dtype, layer.counts.dtype))
