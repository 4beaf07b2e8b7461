"""How a model's keys are turned to other positions, read from its config."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from transformers import PreTrainedConfig

from hf_kvcaches import compat
from hf_kvcaches.core.rope import RotaryGeometry


@dataclass(frozen=True)
class Rotation:
    """How a model's keys are turned to other positions.

    Args:
        layers: One geometry a layer; equal ones are one object.
        turns: Whether keys can be moved in all layers.
        refused: Whether not even the start of a text can be reused: keys differ with the length of the whole, or nothing is known of them.
        why: What stands against turning, or "".
        positions_matter: Whether keys depend on the positions of their tokens.
    """

    layers: tuple[RotaryGeometry, ...]
    turns: bool
    refused: bool
    why: str
    positions_matter: bool


_rotations: dict[int, tuple[weakref.ref[PreTrainedConfig], Rotation]] = {}


def rotation_of(config: PreTrainedConfig) -> Rotation:
    """Read from a config once, for as long as it lives.

    Args:
        config: Of the decoder.
    """
    kept = _rotations.get(id(config))
    if kept is not None and kept[0]() is config:
        return kept[1]
    crossing = bool(getattr(config, "cross_attention_layers", None))
    distinct: list[RotaryGeometry] = []
    layers = []
    for index in range(len(compat.layer_plan(config))):
        geometry = RotaryGeometry.from_config(config, layer_idx=index)
        same = next((other for other in distinct if other.turns_like(geometry)), None)
        if same is None:
            distinct.append(geometry)
        layers.append(same or geometry)
    refusal = next((geometry.refusal for geometry in distinct if geometry.refusal), None)
    still = [geometry.kind for geometry in distinct if geometry.kind not in ("rope", "none")]
    refusal = "some of its layers attend to what is no text" if crossing else refusal
    why = refusal or (f"its keys can't be moved (positions of the kind {still[0]!r})" if still else "")
    matter = any(geometry.refusal or geometry.kind not in ("none", "alibi") for geometry in distinct)
    # Keys of an unknown layout can't be moved, but are those of their position whatever the length of the text.
    unclear = [geometry for geometry in distinct if geometry.kind == "unknown" and geometry.refusal is None]
    refused = crossing or bool(unclear) or any(geometry.refusal and geometry.kind == "rope" for geometry in distinct)
    rotation = Rotation(tuple(layers), not why, refused, why, matter)
    identity = id(config)
    _rotations[identity] = (weakref.ref(config, lambda _: _rotations.pop(identity, None)), rotation)
    return rotation
