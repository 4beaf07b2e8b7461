"""Rotating cached keys to other positions.

A model with rotary positions rotates each pair of a key's dimensions by `position * frequency` before the key reaches the cache. A cache
that moves, merges or stores keys rotates them further (`shift`), back (`unrotate`) or anew (`rotate`), by angles read from the config.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_kvcaches import compat
from hf_kvcaches.core.rope_families import Kind, read_rotary_facts
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.rotation import Layout, check_layout, cos_sin, rotate_


@dataclass(frozen=True, eq=False)
class RotaryGeometry:
    """The angles by which one model's keys (of one kind of layer) are rotated.

    **Precision.** Frequencies are the model's own float32 numbers, kept as float64; keys are rotated in float32 (or float64) and cast once.
    `model.to(torch.bfloat16)` casts a model's frequencies (loading it with `dtype=` does not): give those with
    `dataclasses.replace(geometry, inv_freq=model.model.rotary_emb.inv_freq.double().cpu())`.

    **Shapes.** Keys are `(batch, heads, seq, head_dim)`. Positions and deltas are an `int`, or an integer tensor, `()`, `(seq,)`,
    `(batch, seq)` or `(batch, heads, seq)`; any dimension may be 1. For image tokens with one position per axis, use `shift` alone.

    **Text length.** With longrope and dynamic rope, a geometry refuses to rotate, and `at` gives the one that a pass rotates by.

    Args:
        inv_freq: Angle per position of each rotated pair: `(rotary_dim / 2,)`, float64, on the CPU.
        head_dim: Size of a key. Dimensions from `rotary_dim` on pass unchanged.
        attention_scaling: What the model multiplies cosines and sines with (yarn).
        layout: Which dimensions form a pair: `"half"`: i and i + rotary_dim / 2; `"interleaved"`: 2i and 2i + 1.
        rope_type: The config's `rope_type`, or `"none"`.
        kind: `"rope"`; `"none"` for a layer that leaves positions out, whose keys are right anywhere; `"learned"` and `"alibi"`, whose keys
            carry no rotation; `"unknown"`, of which at most `inv_freq` is known.
        refusal: Why keys can't be moved to other positions, as the end of a sentence; None if they can.
        changes_at: Forward passes that reach this position rotate by other frequencies than `inv_freq`; None if none do.
        inv_freq_beyond: By these frequencies; None where they change with every further position.
        axes: Whether the model rotates image tokens by a position for each axis.
    """

    inv_freq: Tensor
    head_dim: int
    attention_scaling: float = 1.0
    layout: Layout = "half"
    rope_type: str = "default"
    kind: Kind = "rope"
    refusal: str | None = None
    changes_at: int | None = None
    inv_freq_beyond: Tensor | None = None
    axes: bool = False
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.inv_freq.ndim != 1 or self.inv_freq.dtype != torch.float64 or self.inv_freq.device.type != "cpu":
            got = (tuple(self.inv_freq.shape), self.inv_freq.dtype, self.inv_freq.device.type)
            raise ConfigError.of("inv_freq", "one dimension of float64 on the CPU", got)
        check_layout("layout", self.layout)
        if self.rotary_dim > self.head_dim and self.refusal is None:
            raise ConfigError.of("inv_freq", f"at most head_dim / 2 = {self.head_dim // 2} frequencies", self.inv_freq.numel())
        if not self.attention_scaling > 0:
            raise ConfigError.of("attention_scaling", "a number above 0", self.attention_scaling)

    @classmethod
    def from_config(
        cls, config: Any, layer_type: str | None = None, *, layer_idx: int | None = None, latents: bool = False
    ) -> RotaryGeometry:
        """Read the geometry from a model's config; one whose keys can't be rotated refuses when asked to.

        Args:
            config: `model.config`; of a multimodal model, its text decoder's part is read.
            layer_type: One of `config.layer_types`, where these rotate differently (Gemma 3, Cohere 2).
            layer_idx: The layer. Needed where layers of one type differ (SmolLM3).
            latents: Whether a key of multi-head latent attention is its rotated part with the latent behind it; without, it is refused.
        """
        if not hasattr(config, "get_text_config"):
            raise ConfigError.of("config", "a transformers config", type(config).__name__, "Pass model.config.")
        text = compat.decoder_config(config)
        types = getattr(text, "layer_types", None) or [layer_type] * text.num_hidden_layers
        indices = [index for index, own in enumerate(types) if layer_idx in (None, index) and layer_type in (None, own)]
        known = sorted(set(filter(None, types)))
        expected = f"0 to {len(types) - 1}" + (f", or a layer_type of {known}" if known else "")
        if not indices:
            raise ConfigError.of("layer_idx", expected, layer_idx, f"The layer_type was {layer_type!r}.")
        with torch.device("cpu"), torch.no_grad():  # also where the caller builds a model under torch.device("meta")
            geometries = [cls(**read_rotary_facts(text, types[index], index, latents)) for index in indices]
        if not all(geometries[0].rotates_like(other) for other in geometries):
            raise ConfigError.of("layer_idx", expected, layer_idx, f"{text.model_type} rotates its layers differently.")
        return geometries[0]

    @property
    def rotary_dim(self) -> int:
        """How many of the head's dimensions are rotated."""
        return 2 * self.inv_freq.numel()

    def rotates_like(self, other: RotaryGeometry) -> bool:
        """Whether both rotate keys in the same way."""
        names = ("kind", "layout", "head_dim", "attention_scaling", "refusal", "changes_at")
        same = all(getattr(self, name) == getattr(other, name) for name in names) and torch.equal(self.inv_freq, other.inv_freq)
        one, two = self.inv_freq_beyond, other.inv_freq_beyond
        return same and (one is two if one is None or two is None else torch.equal(one, two))

    def at(self, positions: int | Tensor, held: RotaryGeometry | None = None) -> RotaryGeometry:
        """Return the geometry by which a forward pass rotates: this one, unless its frequencies depend on the length of the text.

        Args:
            positions: Of all tokens of the forward pass, padding included, or the largest; anything where `changes_at` is None.
            held: That of the keys in the cache, if it holds any; refused where this pass does not rotate by it.
        """
        if self.changes_at is None:
            return self
        largest = positions if isinstance(positions, int) else int(positions.max())
        inv_freq = self.inv_freq if largest < self.changes_at else self.inv_freq_beyond
        reach = f"forward passes that reach position {self.changes_at} rotate by other frequencies (rope_type {self.rope_type!r})"
        if inv_freq is None:
            raise UnsupportedError(f"position_ids: {reach} at every position, so keys have no fixed angles. Pass positions='original'.")
        if held is None:
            return replace(self, inv_freq=inv_freq, refusal=None, changes_at=None, inv_freq_beyond=None)
        if not torch.equal(held.inv_freq, inv_freq):
            raise UnsupportedError(
                f"position_ids: {reach} than those that don't, and this cache has keys of the other kind. Call reset() and feed the whole "
                "text in one forward pass, or pass positions='original'."
            )
        return held

    def rotate(self, x: Tensor, positions: int | Tensor) -> Tensor:
        """Do to fresh keys (or queries) what the model does at these positions, `attention_scaling` included."""
        return self._rotate_by(x, positions, "rotate", self.attention_scaling)

    def unrotate(self, x: Tensor, positions: int | Tensor) -> Tensor:
        """Undo `rotate`: return keys at these positions as they were before they had any."""
        return self._rotate_by(x, positions, "unrotate", 1.0 / self.attention_scaling)

    def shift(self, x: Tensor, delta: int | Tensor) -> Tensor:
        """Move rotated keys from position p to p + delta. No scaling: rotated keys have it already."""
        return self._rotate_by(x, delta, "shift", 1.0)

    def cos_sin(
        self, positions: int | Tensor, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of each pair's angle, without `attention_scaling`, `positions.shape + (rotary_dim / 2,)`."""
        self._require_angles("cos_sin")
        where = torch.device(device or ("cpu" if isinstance(positions, int) else positions.device))
        return cos_sin(self.frequencies_on(where), positions if isinstance(positions, int) else positions.to(where), dtype)

    def _rotate_by(self, x: Tensor, by: int | Tensor, verb: str, scaling: float) -> Tensor:
        if self.kind == "rope":
            self._require_angles(verb)
        # Where nothing is rotated, a config's head size may be another's: that of the encoder, say.
        if x.ndim != 4 or (x.shape[-1] != self.head_dim and self.kind == "rope"):
            raise ConfigError.of("x", f"shape (batch, heads, seq, {self.head_dim})", tuple(x.shape))
        if not x.is_floating_point():
            raise ConfigError.of("x", "a floating-point tensor", x.dtype)
        by = _per_slot(by, "delta" if verb == "shift" else "positions", x.shape)
        if self.kind == "rope":
            exact = torch.promote_types(x.dtype, torch.float32)
            cos, sin = (table * scaling for table in self.cos_sin(by, exact, x.device))
            return rotate_(x.to(exact, copy=True), cos, -sin if verb == "unrotate" else sin, self.layout).to(x.dtype)
        if self.refusal is not None:  # keys without rotation may stay where they are; of others nothing is known at any position
            moves = bool(by if isinstance(by, int) else by.any()) if verb == "shift" else self.kind == "unknown"
            if moves:
                self._require_angles(verb)
        return x

    def frequencies_on(self, device: torch.device) -> Tensor:
        """Return `inv_freq` on a device, where a copy stays: to copy it at every decoding step would wait for the device."""
        if device.type == "cpu":
            return self.inv_freq
        if device not in self._on_device:
            with torch.inference_mode(mode=False):
                self._on_device[device] = self.inv_freq.to(device)
        return self._on_device[device]

    def _require_angles(self, verb: str) -> None:
        if self.kind != "rope" or self.refusal is not None:
            why = self.refusal or "this layer has no rotation, so there are no angles"
            raise UnsupportedError(f"{verb}: {why}. Use a cache that leaves keys where they are.")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on_device": {}}  # The other side may not have that device.


def undoable_rotation(config: Any, layer_idx: int, argument: str, hint: str) -> RotaryGeometry | None:
    """Return how a layer rotates its keys, where that can be undone for each key; None if it does not rotate them."""
    geometry = RotaryGeometry.from_config(config, layer_idx=layer_idx)
    if geometry.kind in ("learned", "none", "alibi"):
        return None
    if geometry.refusal is not None:
        raise UnsupportedError(f"{argument}: {geometry.refusal}. {hint}")
    return geometry


class Rotation(NamedTuple):
    """How a model's keys are rotated to other positions."""

    layers: tuple[RotaryGeometry, ...]  # equal ones are one object
    refused: bool  # not even a prefix can be reused: keys depend on the length of the text, or their positions are unknown
    why: str  # keys can't be rotated to other positions, as the end of a sentence; "" if they can
    positions_matter: bool


_rotations: dict[int, tuple[weakref.ref[PreTrainedConfig], Rotation]] = {}  # by the id of the config, while it lives


def rotation_of(config: PreTrainedConfig) -> Rotation:
    """Return the rotation of a decoder, read from its config once."""
    key = id(config)
    entry = _rotations.get(key)
    if entry is None or entry[0]() is not config:
        _rotations[key] = entry = (weakref.ref(config, lambda _: _rotations.pop(key, None)), _read(config))
    return entry[1]


def _read(config: PreTrainedConfig) -> Rotation:
    layers: list[RotaryGeometry] = []
    for layer_idx in range(len(compat.layer_plan(config))):
        geometry = RotaryGeometry.from_config(config, layer_idx=layer_idx)
        layers.append(next((other for other in layers if other.rotates_like(geometry)), geometry))
    crossing = bool(getattr(config, "cross_attention_layers", None))
    why = "some of its layers attend to what is no text" if crossing else next(filter(None, (layer.refusal for layer in layers)), "")
    # A prefix keeps its keys where all frequencies are known and fixed, even if it is not known which dimensions they rotate.
    opaque = (layer.kind == "rope" or (layer.kind == "unknown" and not layer.rotary_dim) for layer in layers if layer.refusal)
    return Rotation(tuple(layers), crossing or any(opaque), why, any(layer.kind not in ("none", "alibi") for layer in layers))


def _per_slot(by: int | Tensor, argument: str, keys: torch.Size) -> int | Tensor:
    if type(by) is int:
        return by
    if not isinstance(by, Tensor) or by.is_floating_point() or by.is_complex() or by.dtype == torch.bool:
        raise ConfigError.of(argument, "an int or an integer tensor", getattr(by, "dtype", type(by).__name__))
    batch, heads, seq = keys[:3]
    sizes = {0: (), 1: (seq,), 2: (batch, seq), 3: (batch, heads, seq)}.get(by.ndim)
    if sizes is None or any(have not in (1, size) for have, size in zip(by.shape, sizes, strict=True)):
        expected = f"an int or a shape of (), ({seq},), ({batch}, {seq}) or ({batch}, {heads}, {seq}), with 1 for any of these"
        raise ConfigError.of(argument, expected, tuple(by.shape), "One delta per row is (batch, 1).")
    return by.unsqueeze(1) if by.ndim == 2 else by
