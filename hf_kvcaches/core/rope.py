"""Rotating cached keys to other positions.

A model with rotary positions rotates each pair of a key's dimensions by `position * frequency` before the key reaches the cache. A cache
that moves, merges or stores keys has to rotate them further (`shift`), back (`unrotate`) or anew (`rotate`); the geometry knows the angles
from the config alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from hf_kvcaches.core.rope_families import Kind, read_rotary_facts
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.checks import check_layout
from hf_kvcaches.kernels.rotation import Layout, cos_sin, rotate_

_NO_ROTATION = {
    "learned": "its positions are added to the embeddings, and can't be changed in a key",
    "alibi": "its positions are a bias on the attention scores by the key's position, not a part of the key",
    "unknown": "its config has no rotary parameters, and does not say what else tells its keys apart",
}


@dataclass(frozen=True, eq=False)
class RotaryGeometry:
    """The angles by which one model's keys (of one kind of layer) are rotated.

    **Frequencies.** A model multiplies positions by its frequencies in *float32*, so these exact numbers are kept here, converted to
    float64. Recomputing them in float64 would look better and be wrong: the difference, up to 6e-8 of the angle, is a third of a radian at
    position 5,000,000. The models round the product to float32 too, which blurs their own angles by as much there; that depends on the
    absolute position, so no shift can follow it, and it is not repeated here. A model that was cast with `model.to(torch.bfloat16)` has
    cast its frequencies too (loading it with `dtype=` does not): give those with
    `dataclasses.replace(geometry, inv_freq=model.model.rotary_emb.inv_freq.double().cpu())`.

    **Precision.** Angles and their cosines are taken in float64, where a position below 2**29 times a float32 is exact, and only the
    cosines are cast: a shift at position 5,000,000 is as exact as at 5. Keys are rotated in float32 (or float64) and cast once.

    **Shapes.** Keys are `(batch, heads, seq, head_dim)`. Positions and deltas are an `int`, or an integer tensor: `()`, `(seq,)`,
    `(batch, seq)` or `(batch, heads, seq)`; any of these dimensions may be 1, so `(batch, 1)` is one delta per row.

    **Text length.** With longrope a forward pass rotates by one of two sets of frequencies, with dynamic rope by ever others from some
    length on. Such a geometry refuses to rotate; `at` gives the one that a pass rotates by.

    **Image tokens.** In models with a position per axis (Qwen2-VL and the like), `shift` moves all axes together and is right for every
    token; `rotate` and `unrotate` are right for text tokens, whose axes agree. `equip/axes.py` refuses image tokens.

    Args:
        inv_freq: Angle per position of each rotated pair: `(rotary_dim / 2,)`, float64, on the CPU.
        head_dim: Size of a key. Dimensions from `rotary_dim` on pass unchanged.
        attention_scaling: What the model multiplies cosines and sines with (yarn).
        layout: Which dimensions form a pair: `"half"`: i and i + rotary_dim / 2; `"interleaved"`: 2i and 2i + 1.
        rope_type: The config's `rope_type`, or `"none"`.
        kind: `"rope"`; `"none"` for a layer that leaves positions out in a model that rotates elsewhere, whose keys are right anywhere;
            `"learned"` and `"alibi"`, whose keys carry no rotation and can't be moved; `"unknown"`.
        refusal: Why keys can't be rotated although the model does; None if they can.
        changes_at: Forward passes that reach this position rotate by other frequencies than `inv_freq`; None if none do.
        inv_freq_beyond: By these frequencies; None where they change with every further position.
        axes: Whether the model rotates image tokens by a position for each axis.
    """

    inv_freq: torch.Tensor
    head_dim: int
    attention_scaling: float = 1.0
    layout: Layout = "half"
    rope_type: str = "default"
    kind: Kind = "rope"
    refusal: str | None = None
    changes_at: int | None = None
    inv_freq_beyond: torch.Tensor | None = None
    axes: bool = False
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

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
        """Reads the geometry from a model's config.

        Any rotary model gives a geometry to look at; one whose keys can't be rotated refuses when asked to.

        Args:
            config: `model.config`; of a multimodal model, its text decoder's part is read.
            layer_type: One of `config.layer_types`, where these rotate differently (Gemma 3, Cohere 2).
            layer_idx: The layer, which also decides its type. Needed where layers of one type differ (SmolLM3).
            latents: Whether a key of multi-head latent attention is its rotated part with the latent behind it; without, it is refused.
        """
        return cls(**read_rotary_facts(config, layer_type, layer_idx, latents))

    @property
    def rotary_dim(self) -> int:
        """How many of the head's dimensions are rotated."""
        return 2 * self.inv_freq.numel()

    def rotates_like(self, other: RotaryGeometry) -> bool:
        """Whether both rotate keys in the same way."""
        names = ("kind", "layout", "head_dim", "attention_scaling", "refusal", "changes_at")
        if any(getattr(self, name) != getattr(other, name) for name in names) or not torch.equal(self.inv_freq, other.inv_freq):
            return False
        if self.inv_freq_beyond is None or other.inv_freq_beyond is None:
            return self.inv_freq_beyond is other.inv_freq_beyond
        return torch.equal(self.inv_freq_beyond, other.inv_freq_beyond)

    def at(self, positions: int | torch.Tensor, held: RotaryGeometry | None = None) -> RotaryGeometry:
        """The geometry by which a forward pass rotates: this one, unless its frequencies depend on the length of the text.

        Args:
            positions: Of all tokens of the forward pass, padding included, or the largest; anything where `changes_at` is None.
            held: By which the keys in the cache are rotated; None for an empty cache. One that this pass does not rotate by is refused.
        """
        if self.changes_at is None:
            return self
        largest = positions if isinstance(positions, int) else int(positions.max())
        current = self._below if largest < self.changes_at else self._beyond
        reach = f"forward passes that reach position {self.changes_at} rotate by other frequencies (rope_type {self.rope_type!r})"
        if current is None:
            raise UnsupportedError(f"position_ids: {reach} at every position, so keys have no fixed angles. Pass positions='original'.")
        if held is not None and not held.rotates_like(current):
            raise UnsupportedError(
                f"position_ids: {reach} than those that don't, and this cache has keys of the other kind. Call reset() and feed the whole "
                "text in one forward pass, or pass positions='original'."
            )
        return current

    @cached_property
    def _below(self) -> RotaryGeometry:
        return replace(self, refusal=None, changes_at=None, inv_freq_beyond=None)

    @cached_property
    def _beyond(self) -> RotaryGeometry | None:
        return None if self.inv_freq_beyond is None else replace(self._below, inv_freq=self.inv_freq_beyond)

    def rotate(self, x: torch.Tensor, positions: int | torch.Tensor) -> torch.Tensor:
        """Does to fresh keys what the model does at these positions, `attention_scaling` included.

        Args:
            x: Keys (or queries) without rotation, `(batch, heads, seq, head_dim)`.
            positions: Where to put them; shapes as in the class's docstring.
        """
        return self._rotate_by(x, positions, "rotate", self.attention_scaling)

    def unrotate(self, x: torch.Tensor, positions: int | torch.Tensor) -> torch.Tensor:
        """Undoes `rotate`: the keys as they were before they had positions.

        Args:
            x: Rotated keys, `(batch, heads, seq, head_dim)`.
            positions: Where they are now; shapes as in the class's docstring.
        """
        return self._rotate_by(x, positions, "unrotate", 1.0 / self.attention_scaling)

    def shift(self, x: torch.Tensor, delta: int | torch.Tensor) -> torch.Tensor:
        """Moves rotated keys from position p to p + delta. No scaling: rotated keys have it already.

        Args:
            x: Rotated keys, `(batch, heads, seq, head_dim)`.
            delta: How far, negative for towards the start; shapes as in the class's docstring.
        """
        return self._rotate_by(x, delta, "shift", 1.0)

    def cos_sin(
        self, positions: int | torch.Tensor, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of each pair's angle, without `attention_scaling`.

        Args:
            positions: An int, or an integer tensor of any shape.
            dtype: Of the result.
            device: Of the result; that of `positions` if None.

        Returns:
            Two tensors of shape `positions.shape + (rotary_dim / 2,)`.
        """
        self._require_angles("cos_sin")
        _require_integers(positions, "positions")
        where = torch.device(device) if device is not None else torch.device("cpu") if isinstance(positions, int) else positions.device
        return cos_sin(self.frequencies_on(where), positions if isinstance(positions, int) else positions.to(where), dtype)

    def _rotate_by(self, x: torch.Tensor, by: int | torch.Tensor, verb: str, scaling: float) -> torch.Tensor:
        if self.kind == "rope":
            self._require_angles(verb)
        # Where nothing is rotated, a config's head size may be another's: that of the encoder, say.
        if x.ndim != 4 or (x.shape[-1] != self.head_dim and self.kind == "rope"):
            raise ConfigError.of("x", f"shape (batch, heads, seq, {self.head_dim})", tuple(x.shape))
        if not x.is_floating_point():
            raise ConfigError.of("x", "a floating-point tensor", x.dtype)
        by = _per_slot(by, "delta" if verb == "shift" else "positions", x.shape)
        if self.kind != "rope":
            self._require_still(by, verb)
            return x
        if verb == "shift" and isinstance(by, int) and by == 0:
            return x
        exact = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (table * scaling for table in self.cos_sin(by, exact, x.device))
        return rotate_(x.to(exact, copy=True), cos, -sin if verb == "unrotate" else sin, self.layout).to(x.dtype)

    def frequencies_on(self, device: torch.device) -> torch.Tensor:
        """`inv_freq` on a device, where a copy stays."""
        if device.type == "cpu":
            return self.inv_freq
        # Kept per device: a copy from the CPU at every decoding step would wait for the device.
        kept = self._on_device.get(device)
        if kept is None:
            with torch.inference_mode(mode=False):
                kept = self._on_device[device] = self.inv_freq.to(device)
        return kept

    def _require_angles(self, verb: str) -> None:
        if self.kind != "rope":
            raise UnsupportedError(f"{verb}: this layer has no rotary positions (kind {self.kind!r}), so there are no angles.")
        if self.refusal is not None:
            raise UnsupportedError(f"{verb}: {self.refusal}. Use a cache that leaves keys where they are.")

    def _require_still(self, by: int | torch.Tensor, verb: str) -> None:
        """Without rotation nothing is done to a key; this makes sure that nothing is also the right thing to do."""
        if self.kind == "none" or (verb != "shift" and self.kind != "unknown"):
            return
        if verb != "shift" or bool(by if isinstance(by, int) else by.any()):
            why = self.refusal or f"a model of kind {self.kind!r} can't move its keys: {_NO_ROTATION[self.kind]}"
            raise UnsupportedError(f"{verb}: {why}. Use a cache that leaves keys where they are.")

    def __getstate__(self) -> dict[str, Any]:
        # What is kept per device stays behind: the other side may not have that device.
        return {**self.__dict__, "_on_device": {}}


def undoable_rotation(config: Any, layer_idx: int, argument: str, hint: str) -> RotaryGeometry | None:
    """How a layer rotates its keys, where that can be undone for each key; None if it does not rotate them.

    Args:
        argument: What asks for keys before rotation, for the error.
        hint: What to do instead.
    """
    geometry = RotaryGeometry.from_config(config, layer_idx=layer_idx)
    if geometry.kind in ("learned", "none", "alibi"):
        return None
    if geometry.kind != "rope" or geometry.refusal is not None:
        why = geometry.refusal or f"the config does not say how keys carry positions (kind {geometry.kind!r})"
        raise UnsupportedError(f"{argument}: {why}. {hint}")
    return geometry


def _require_integers(positions: int | torch.Tensor, argument: str) -> None:
    if isinstance(positions, torch.Tensor):
        kind = positions.dtype
        if not (kind.is_floating_point or kind.is_complex or kind == torch.bool):
            return
    elif type(positions) is int:
        return
    raise ConfigError.of(argument, "an int or an integer tensor", getattr(positions, "dtype", type(positions).__name__))


def _per_slot(by: int | torch.Tensor, argument: str, keys: torch.Size) -> int | torch.Tensor:
    """Positions of any accepted shape, made to broadcast over `(batch, heads, seq)`."""
    _require_integers(by, argument)
    if isinstance(by, int):
        return by
    batch, heads, seq = keys[:3]
    sizes = {0: (), 1: (seq,), 2: (batch, seq), 3: (batch, heads, seq)}.get(by.ndim)
    if sizes is None or any(have not in (1, size) for have, size in zip(by.shape, sizes, strict=True)):
        expected = f"an int or a shape of (), ({seq},), ({batch}, {seq}) or ({batch}, {heads}, {seq}), with 1 for any of these"
        raise ConfigError.of(argument, expected, tuple(by.shape), "One delta per row is (batch, 1).")
    return by.unsqueeze(1) if by.ndim == 2 else by
