"""How all layers of a model rotate their keys, read from its config."""

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
        layers: One geometry a layer; equal ones are one object.
        turns: Whether keys can be moved in all layers.
        refused: Whether not even the start of a text can be reused: keys differ with the length of the whole, or nothing is known of them.
        positions_matter: Whether keys depend on the positions of their tokens.
    """

    layers: tuple[RotaryGeometry, ...]
    turns: bool
    refused: bool
    why: str
    positions_matter: bool


_rotations: dict[int, tuple[weakref.ref[PreTrainedConfig], Rotation]] = {}


def rotation_of(config: PreTrainedConfig) -> Rotation:
    """Read from a decoder's config once, for as long as it lives."""
    key = id(config)
    known = _rotations.get(key)
    if known is None or known[0]() is not config:
        _rotations[key] = known = (weakref.ref(config, lambda _: _rotations.pop(key, None)), _read(config))
    return known[1]


def _read(config: PreTrainedConfig) -> Rotation:
    distinct: list[RotaryGeometry] = []
    layers = []
    for index in range(len(compat.layer_plan(config))):
        geometry = RotaryGeometry.from_config(config, layer_idx=index)
        same = next((other for other in distinct if other.rotates_like(geometry)), None)
        if same is None:
            distinct.append(geometry)
        layers.append(same or geometry)
    why = next((geometry.refusal for geometry in distinct if geometry.refusal), "")
    crossing = bool(getattr(config, "cross_attention_layers", None))
    if crossing:
        why = "some of its layers attend to what is no text"
    immovable = [geometry.kind for geometry in distinct if geometry.kind not in ("rope", "none")]
    if immovable and not why:
        why = f"its keys can't be moved (positions of the kind {immovable[0]!r})"
    matter = any(geometry.refusal or geometry.kind not in ("none", "alibi") for geometry in distinct)
    # Keys of an unknown layout can't be moved, but are those of their position whatever the length of the text.
    refused = crossing or any(geometry.kind == ("rope" if geometry.refusal else "unknown") for geometry in distinct)
    return Rotation(tuple(layers), not why, refused, why, matter)
