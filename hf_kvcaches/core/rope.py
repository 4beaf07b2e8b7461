"""Turning cached keys to other positions.

A model with rotary positions turns each pair of a key's dimensions by `position * frequency` before the key reaches the cache. A cache that
moves, merges or stores keys has to turn them on (`shift`), back (`unrotate`) or anew (`rotate`); the geometry knows the angles from the
config alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hf_kvcaches.core.rope_families import Kind, Layout, read_rotary_facts
from hf_kvcaches.errors import ConfigError, UnsupportedError

_NO_ROTATION = {
    "learned": "its positions are added to the embeddings, and can't be changed in a key",
    "alibi": "its positions are a bias on the attention scores by the key's place, not a part of the key",
    "unknown": "its config has no rotary parameters, and does not say what else tells its keys apart",
}


@dataclass(frozen=True, eq=False)
class RotaryGeometry:
    """The angles by which one model's keys (of one kind of layer) are turned.

    **Frequencies.** A model multiplies positions by its frequencies in *float32*, so these exact numbers are kept here, converted to
    float64. Recomputing them in float64 would look better and be wrong: the difference, up to 6e-8 of the angle, is a third of a radian at
    position 5,000,000. The models round the product to float32 too, which blurs their own angles by as much there; that depends on the
    absolute position, so no shift can follow it, and it is not repeated here. A model that was cast with `model.to(torch.bfloat16)` has
    cast its frequencies too (loading it with `dtype=` does not): give those with
    `dataclasses.replace(geometry, inv_freq=model.model.rotary_emb.inv_freq.double().cpu())`.

    **Precision.** Angles and their cosines are taken in float64, where a position below 2**29 times a float32 is exact, and only the
    cosines are cast: a shift at position 5,000,000 is as exact as at 5. Keys are turned in float32 (float64 ones in float64) and cast once.

    **Shapes.** Keys are `(batch, heads, seq, head_dim)`. Positions and deltas are an `int`, or an integer tensor: `()`, `(seq,)`,
    `(batch, seq)` or `(batch, heads, seq)`; any of these dimensions may be 1, so `(batch, 1)` is one delta per row.

    **Image tokens.** In models with a position per axis (Qwen2-VL and the like), `shift` moves all axes together and is right for every
    token; `rotate` and `unrotate` are right for text tokens, whose axes agree.

    Args:
        inv_freq: Angle per position of each turned pair: `(rotary_dim / 2,)`, float64, on the CPU.
        head_dim: Size of a key. Dimensions from `rotary_dim` on pass unchanged.
        attention_scaling: What the model multiplies cosines and sines with (yarn).
        layout: Which dimensions form a pair: `"half"`: i and i + rotary_dim / 2; `"interleaved"`: 2i and 2i + 1.
        rope_type: The config's `rope_type`, or `"none"`.
        kind: `"rope"`; `"none"` for a layer that leaves positions out in a model that rotates elsewhere, whose keys are right anywhere;
            `"learned"` and `"alibi"`, whose keys carry no rotation and can't be moved; `"unknown"`.
        refusal: Why keys can't be turned although the model rotates them; None if they can.
    """

    inv_freq: torch.Tensor
    head_dim: int
    attention_scaling: float = 1.0
    layout: Layout = "half"
    rope_type: str = "default"
    kind: Kind = "rope"
    refusal: str | None = None
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.inv_freq.ndim != 1 or self.inv_freq.dtype != torch.float64 or self.inv_freq.device.type != "cpu":
            got = (tuple(self.inv_freq.shape), self.inv_freq.dtype, self.inv_freq.device.type)
            raise ConfigError.of("inv_freq", "one dimension of float64 on the CPU", got)
        if self.layout not in ("half", "interleaved"):
            raise ConfigError.of("layout", "'half' or 'interleaved'", self.layout)
        if self.rotary_dim > self.head_dim and self.refusal is None:
            raise ConfigError.of("inv_freq", f"at most head_dim / 2 = {self.head_dim // 2} frequencies", self.inv_freq.numel())
        if not self.attention_scaling > 0:
            raise ConfigError.of("attention_scaling", "a number above 0", self.attention_scaling)

    @classmethod
    def from_config(cls, config: Any, layer_type: str | None = None, *, layer_idx: int | None = None) -> RotaryGeometry:
        """Reads the geometry from a model's config.

        Any rotary model gives a geometry to look at; one whose keys can't be turned refuses when asked to.

        Args:
            config: `model.config`; of a multimodal model, its text decoder's part is read.
            layer_type: One of `config.layer_types`, where these rotate differently (Gemma 3, Cohere 2).
            layer_idx: The layer, which also decides its type. Needed where layers of one type differ (SmolLM3).
        """
        facts = read_rotary_facts(config, layer_type, layer_idx)
        return cls(facts.inv_freq, facts.head_dim, facts.attention_scaling, facts.layout, facts.rope_type, facts.kind, facts.refusal)

    @property
    def rotary_dim(self) -> int:
        """How many of the head's dimensions are turned."""
        return 2 * self.inv_freq.numel()

    def turns_like(self, other: RotaryGeometry) -> bool:
        """Whether both turn keys alike.

        Args:
            other: Another geometry.
        """
        plain = (self.kind, self.layout, self.head_dim, self.attention_scaling, self.refusal)
        return plain == (other.kind, other.layout, other.head_dim, other.attention_scaling, other.refusal) and torch.equal(
            self.inv_freq, other.inv_freq
        )

    def rotate(self, x: torch.Tensor, positions: int | torch.Tensor) -> torch.Tensor:
        """Does to fresh keys what the model does at these positions, `attention_scaling` included.

        Args:
            x: Keys (or queries) without rotation, `(batch, heads, seq, head_dim)`.
            positions: Where to put them; shapes as in the class's docstring.
        """
        return self._turn(x, positions, "positions", "rotate", self.attention_scaling, 1.0)

    def unrotate(self, x: torch.Tensor, positions: int | torch.Tensor) -> torch.Tensor:
        """Undoes `rotate`: the keys as they were before they had positions.

        Args:
            x: Rotated keys, `(batch, heads, seq, head_dim)`.
            positions: Where they are now; shapes as in the class's docstring.
        """
        return self._turn(x, positions, "positions", "unrotate", 1.0 / self.attention_scaling, -1.0)

    def shift(self, x: torch.Tensor, delta: int | torch.Tensor) -> torch.Tensor:
        """Turns rotated keys from position p to p + delta. No scaling: rotated keys have it already.

        Args:
            x: Rotated keys, `(batch, heads, seq, head_dim)`.
            delta: How far, negative for towards the start; shapes as in the class's docstring.
        """
        return self._turn(x, delta, "delta", "shift", 1.0, 1.0)

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
        if isinstance(positions, int):
            angles = self._frequencies_on(torch.device(device or "cpu")) * positions
        else:
            where = torch.device(device) if device is not None else positions.device
            angles = positions.to(where, torch.float64).unsqueeze(-1) * self._frequencies_on(where)
        # Cosine and sine reduce a float64 argument exactly; a remainder by a rounded 2 pi would add its error once per turn.
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _turn(self, x: torch.Tensor, by: int | torch.Tensor, argument: str, verb: str, scaling: float, direction: float) -> torch.Tensor:
        if self.kind == "rope":
            self._require_angles(verb)
        self._require_keys(x)
        by = _per_slot(by, argument, x.shape)
        if self.kind != "rope":
            self._require_possible(by, verb)
            return x
        if verb == "shift" and isinstance(by, int) and by == 0:
            return x
        cos, sin = self.cos_sin(by, torch.float64 if x.dtype == torch.float64 else torch.float32, x.device)
        if scaling != 1.0:
            cos, sin = cos * scaling, sin * scaling
        if direction < 0:
            sin = -sin
        return self._apply(x, cos, sin)

    def _apply(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = x[..., : self.rotary_dim].to(cos.dtype)
        first, second = (turned[..., ::2], turned[..., 1::2]) if self.layout == "interleaved" else turned.chunk(2, dim=-1)
        new_first = (first * cos - second * sin).to(x.dtype)
        new_second = (second * cos + first * sin).to(x.dtype)
        parts = [new_first, new_second]
        if self.layout == "interleaved":
            parts = [torch.stack(parts, dim=-1).flatten(-2)]
        if self.rotary_dim < self.head_dim:
            parts.append(x[..., self.rotary_dim :])
        return torch.cat(parts, dim=-1)

    def _frequencies_on(self, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return self.inv_freq
        # Kept per device: a copy from the CPU at every decoding step would wait for the device.
        kept = self._on_device.get(device)
        if kept is None:
            with torch.inference_mode(mode=False):
                kept = self._on_device[device] = self.inv_freq.to(device)
        return kept

    def _require_keys(self, x: torch.Tensor) -> None:
        # Where nothing is turned, a config's head size may be another's: that of the encoder, say.
        if x.ndim != 4 or (x.shape[-1] != self.head_dim and self.kind == "rope"):
            raise ConfigError.of("x", f"shape (batch, heads, seq, {self.head_dim})", tuple(x.shape))
        if not x.is_floating_point():
            raise ConfigError.of("x", "a floating-point tensor", x.dtype)

    def _require_angles(self, verb: str) -> None:
        if self.kind != "rope":
            raise UnsupportedError(f"{verb}: this layer has no rotary positions (kind {self.kind!r}), so there are no angles.")
        if self.refusal is not None:
            raise UnsupportedError(f"{verb}: {self.refusal}. Use a cache that leaves keys where they are.")

    def _require_possible(self, by: int | torch.Tensor, verb: str) -> None:
        """Without rotation nothing is done to a key; this makes sure that nothing is also the right thing to do."""
        if self.kind == "none" or (verb != "shift" and self.kind != "unknown"):
            return
        still = by == 0 if isinstance(by, int) else not bool(by.any())
        if not (verb == "shift" and still):
            why = self.refusal or f"a model of kind {self.kind!r} can't move its keys: {_NO_ROTATION[self.kind]}"
            raise UnsupportedError(f"{verb}: {why}. Use a cache that leaves keys where they are.")

    def __getstate__(self) -> dict[str, Any]:
        # What is kept per device stays behind: the other side may not have that device.
        return {**self.__dict__, "_on_device": {}}


def _require_integers(positions: int | torch.Tensor, argument: str) -> None:
    if isinstance(positions, torch.Tensor):
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise ConfigError.of(argument, "an int or an integer tensor", positions.dtype)
    elif not isinstance(positions, int) or isinstance(positions, bool):
        raise ConfigError.of(argument, "an int or an integer tensor", type(positions).__name__)


def _per_slot(by: int | torch.Tensor, argument: str, keys: torch.Size) -> int | torch.Tensor:
    """Positions of any accepted shape, made to broadcast over `(batch, heads, seq)`."""
    _require_integers(by, argument)
    if isinstance(by, int):
        return by
    batch, heads, seq = keys[:3]
    wanted = {0: (), 1: (seq,), 2: (batch, seq), 3: (batch, heads, seq)}.get(by.ndim)
    if wanted is None or any(have not in (1, want) for have, want in zip(by.shape, wanted, strict=True)):
        raise ConfigError.of(
            argument,
            f"an int or a shape of (), ({seq},), ({batch}, {seq}) or ({batch}, {heads}, {seq}), with 1 for any of these",
            tuple(by.shape),
            "One delta per row is (batch, 1).",
        )
    return by.unsqueeze(1) if by.ndim == 2 else by
