"""At which position each kept key is rotated.

StreamingLLM counts positions inside the cache: n kept tokens have the ranks 0 .. n-1 whatever was evicted between them, while the model
rotates queries and keys to the index in the text. Distances are all that attention sees, so either end may be moved:

- `"frames"`: keys are kept rotated. Where the oldest token is evicted, one behind the sinks is rotated to its rank plus the number of
  tokens that its row has lost, which evictions don't change, and the newest keeps its index; sinks are rotated to their ranks and scored
  with a second query. Where a policy's scores choose, each token is rotated to its rank, and an eviction rotates those behind it down.
- `"on_read"`: keys are kept unrotated, and rotated to their ranks for each query.
- `"rotated_keys"`: so too, with the pairs of each key swapped kept beside it (the paper's way).
- `"given"`: keys stay as the model rotated them.

Angles are taken in float64. The model's own angles are products in float32, off by tenths of a radian at position 5,000,000: what a key
is rotated by undoes the rounded angle and applies the exact one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.step import Pass
from hf_kvcaches.kernels.rotation import Layout

Scheme = Literal["given", "frames", "on_read", "rotated_keys"]
# Up to this position the model's float32 angles are exact enough (5e-4 radians).
EXACT_UP_TO = 8192


@dataclass(frozen=True)
class PairRotation:
    """A rotation of queries or keys, as tables.

    Args:
        cos: (batch or 1, heads or 1, tokens, rotary_dim), float32: both dimensions of a pair have the same.
        sin: Like `cos`; negative where a pair's first dimension is made.
        layout: Which dimensions form a pair, as in `RotaryGeometry`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    layout: Layout

    @classmethod
    def by(cls, angles: torch.Tensor, layout: Layout) -> PairRotation:
        """The rotation by angles, (..., rotary_dim / 2), float64: one for each pair."""
        signed = torch.stack([-angles, angles], -1).flatten(-2) if layout == "interleaved" else torch.cat([-angles, angles], -1)
        return cls(signed.cos().float(), signed.sin().float(), layout)

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine once a pair, (..., rotary_dim / 2)."""
        if self.layout == "interleaved":
            return self.cos[..., ::2], self.sin[..., 1::2]
        half = self.cos.shape[-1] // 2
        return self.cos[..., :half], self.sin[..., half:]

    def __getitem__(self, index: torch.Tensor) -> PairRotation:
        """The rotations at some rows of a table."""
        return PairRotation(self.cos[index], self.sin[index], self.layout)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates queries or keys, (batch, heads, tokens, head_dim); dimensions beyond the rotary ones pass."""
        cos, sin, rotary = self.cos, self.sin, self.cos.shape[-1]
        heads = cos.shape[1] if cos.ndim == 4 else 1
        if heads not in (1, x.shape[1]):  # one angle a key head, and queries of several heads
            cos, sin = (table.repeat_interleave(x.shape[1] // heads, 1) for table in (cos, sin))
        pairs = x if rotary == x.shape[-1] else x[..., :rotary]
        rotated = torch.addcmul(pairs * cos, swap_pairs(pairs, self.layout), sin).to(x.dtype)
        return rotated if rotary == x.shape[-1] else torch.cat([rotated, x[..., rotary:]], -1)


def swap_pairs(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Exchanges the dimensions of each pair, (..., rotary_dim)."""
    if layout == "interleaved":
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x.roll(x.shape[-1] // 2, -1)


class RotatingPass(Pass):
    """A pass whose layers share rotations."""

    def rotation(self, geometry: RotaryGeometry, target: int | torch.Tensor, *, still: bool = False) -> PairRotation | None:
        """The rotation from the model's positions of the new tokens to others; None where nothing changes.

        Args:
            target: The position of the first new token, and the others follow; or (batch or 1, heads or 1, tokens).
            still: Whether all tokens get the position `target`.
        """
        if isinstance(target, torch.Tensor):
            return self._make(geometry, target)
        if self.start == target and not still and target + self.tokens <= EXACT_UP_TO:
            return None
        return self.shared((id(geometry), target, still), lambda: self._make_shared(geometry, target, still))

    def _make_shared(self, geometry: RotaryGeometry, target: int, still: bool) -> PairRotation:
        if self.tokens == 1 and self.start is not None and self.device.type == "cpu":
            return _rotation_of_one(geometry, self.start, target)
        steps = torch.zeros(self.tokens, dtype=torch.long) if still else torch.arange(self.tokens)
        return self._make(geometry, (steps + target).to(self.device)[None, None])

    def _make(self, geometry: RotaryGeometry, target: torch.Tensor) -> PairRotation:
        return rotation_between(geometry, self.positions(), target)


def rotation_between(geometry: RotaryGeometry, positions: torch.Tensor, target: torch.Tensor) -> PairRotation:
    """The rotation from the model's positions to others.

    Args:
        positions: (batch or 1, tokens).
        target: (batch or 1, heads or 1, tokens).
    """
    exact = geometry.frequencies_on(target.device)
    rounded = positions.to(target.device)[:, None, :, None].float() * exact.float()
    return PairRotation.by(torch.addcmul(-rounded.double(), target[..., None].double(), exact), geometry.layout)


def _rotation_of_one(geometry: RotaryGeometry, start: int, target: int) -> PairRotation:
    """`rotation_between` for one token: for so few numbers NumPy takes a third of the time."""
    exact = geometry.inv_freq.numpy()
    angles = exact * target - (exact.astype(np.float32) * np.float32(start)).astype(np.float64)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    if geometry.layout == "interleaved":
        tables = np.repeat(cos, 2), np.stack([-sin, sin], -1).ravel()
    else:
        tables = np.concatenate([cos, cos]), np.concatenate([-sin, sin])
    cosine, sine = (torch.from_numpy(table).view(1, 1, 1, -1) for table in tables)
    return PairRotation(cosine, sine, geometry.layout)


@dataclass(eq=False)
class SlotRotation:
    """How the keys of layers that share their angles are rotated.

    Args:
        scheme: See the module.
        geometry: The model's angles; None for `"given"`.
    """

    scheme: Scheme
    geometry: RotaryGeometry | None = None
    _tables: dict[Any, PairRotation] = field(default_factory=dict, repr=False)

    @property
    def compact(self) -> bool:
        """Whether positions are counted within the cache."""
        return self.scheme != "given"

    @property
    def kept_rotated(self) -> bool:
        """Whether keys are kept as this package rotated them."""
        return self.scheme == "frames"

    @property
    def unrotated(self) -> bool:
        """Whether keys are kept without rotation."""
        return self.scheme in ("on_read", "rotated_keys")

    def by(self, delta: torch.Tensor) -> PairRotation:
        """The rotation by a number of positions, (batch or 1, heads or 1, tokens), or fewer dimensions."""
        assert self.geometry is not None
        return PairRotation.by(delta[..., None].double() * self.geometry.frequencies_on(delta.device), self.geometry.layout)

    def table(self, length: int, device: torch.device) -> PairRotation:
        """The rotations to 0 .. length-1, (length, rotary_dim) each; grows by doubling."""
        table = self._tables.get(device)
        if table is None or table.cos.shape[0] < length:
            with torch.inference_mode(False):  # a later backward pass may need it
                table = self._tables[device] = self.by(torch.arange(max(64, 2 * length), device=device))
        return table

    def down_by_one(self, device: torch.device) -> PairRotation:
        """The rotation back by one position."""
        if ("down", device) not in self._tables:
            with torch.inference_mode(False):
                self._tables["down", device] = self.by(torch.full((1,), -1, device=device))
        return self._tables["down", device]

    def __deepcopy__(self, memo: dict[int, Any]) -> SlotRotation:
        return self  # nothing in it belongs to a sequence

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}
