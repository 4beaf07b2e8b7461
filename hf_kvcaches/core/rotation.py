"""Read from a model's config how its layers rotate keys."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from transformers import PreTrainedConfig

from hf_kvcaches import compat
from hf_kvcaches.core.rope import RotaryGeometry


@dataclass(frozen=True)
class Rotation:
    """How a model's keys are rotated to other positions.

    Args:
        layers: The geometry of each layer; equal ones are one object.
        turns: Whether the keys of all layers can be rotated to other positions.
        refused: Whether not even a prefix can be reused: keys depend on the length of the text, or their positions are unknown.
        why: Why keys can't be rotated to other positions, as the end of a sentence; "" if they can.
        positions_matter: Whether keys depend on the positions of their tokens.
    """

    layers: tuple[RotaryGeometry, ...]
    turns: bool
    refused: bool
    why: str
    positions_matter: bool


_rotations: dict[int, tuple[weakref.ref[PreTrainedConfig], Rotation]] = {}


def rotation_of(config: PreTrainedConfig) -> Rotation:
    """Return the rotation of a decoder, read from its config once."""
    key = id(config)
    entry = _rotations.get(key)
    if entry is None or entry[0]() is not config:
        _rotations[key] = entry = (weakref.ref(config, lambda _: _rotations.pop(key, None)), _read(config))
    return entry[1]


def _read(config: PreTrainedConfig) -> Rotation:
    distinct: list[RotaryGeometry] = []
    layers = []
    for index in range(len(compat.layer_plan(config))):
        geometry = RotaryGeometry.from_config(config, layer_idx=index)
        equal = next((other for other in distinct if other.rotates_like(geometry)), None)
        if equal is None:
            distinct.append(geometry)
        layers.append(equal or geometry)
    why = next((geometry.refusal for geometry in distinct if geometry.refusal), "")
    crossing = bool(getattr(config, "cross_attention_layers", None))
    if crossing:
        why = "some of its layers attend to what is no text"
    immovable = [geometry.kind for geometry in distinct if geometry.kind not in ("rope", "none")]
    if immovable and not why:
        why = f"its keys can't be moved (positions of the kind {immovable[0]!r})"
    positions_matter = any(geometry.refusal or geometry.kind not in ("none", "alibi") for geometry in distinct)
    # Keys of an unknown layout can't be moved, but do not depend on the length of the text, so prefixes can be reused.
    refused = crossing or any(geometry.kind == ("rope" if geometry.refusal else "unknown") for geometry in distinct)
    return Rotation(tuple(layers), not why, refused, why, positions_matter)
