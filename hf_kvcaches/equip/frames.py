"""Where a kept token stands, and the rotations that put it there without moving keys.

StreamingLLM counts positions inside the cache: n kept tokens stand at 0 .. n-1 whatever was evicted between them. `generate` counts
all tokens seen, and rotates queries and keys accordingly. The two agree on the newest tokens, among which nothing was evicted:
shift both ends by the number of evicted tokens, and all distances are right. They disagree on the tokens before the gap. So there are two
*frames*: **near** keys keep the rotation they came with, **far** keys (sinks, and what a score keeps) have that of their place in the
cache. A query is turned into both and each key is scored with the right one, so evicting and inserting turn no key at all.

The distance between the frames is the number of evicted tokens. It is brought back to zero now and then by turning the near keys
(`Frames.limit`), and what comes in is turned by the difference between its own position and its place, both known exactly, so that
angles stay small and exact at any number of tokens seen, where the model's own float32 angles are off by tenths of a radian.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from hf_kvcaches.core.passes import Pass
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.kernels.rotation import Layout

Scheme = Literal["given", "frames", "on_read", "rotated_keys"]


@dataclass(frozen=True)
class Turn:
    """A rotation, ready to be applied.

    Args:
        cos: (batch or 1, heads or 1, tokens, rotary_dim), float32: both dimensions of a pair have the same.
        sin: Like `cos`; negative where a pair's first dimension is made.
        layout: Which dimensions form a pair, as in `RotaryGeometry`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    layout: Layout

    @classmethod
    def by(cls, angles: torch.Tensor, layout: Layout) -> Turn:
        """The rotation by given angles.

        Args:
            angles: (..., rotary_dim / 2), float64: one for each pair.
        """
        signed = torch.stack([-angles, angles], -1).flatten(-2) if layout == "interleaved" else torch.cat([-angles, angles], -1)
        return cls(signed.cos().float(), signed.sin().float(), layout)

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine once a pair, (..., rotary_dim / 2)."""
        if self.layout == "interleaved":
            return self.cos[..., ::2], self.sin[..., 1::2]
        half = self.cos.shape[-1] // 2
        return self.cos[..., :half], self.sin[..., half:]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Turns queries or keys, (batch, heads, tokens, head_dim); dimensions beyond the rotary ones pass."""
        cos = self.cos
        if cos.shape[-1] == x.shape[-1] and cos.shape[:-2].numel() == 1 and x.dtype == cos.dtype and self.layout == "half":
            return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), self.sin)  # the usual case, without its questions
        rotary, heads = cos.shape[-1], cos.shape[1] if cos.ndim == 4 else 1
        if heads not in (1, x.shape[1]):  # one angle a key head, and queries of several heads
            shared = x.shape[1] // heads
            return Turn(self.cos.repeat_interleave(shared, 1), self.sin.repeat_interleave(shared, 1), self.layout)(x)
        turned = x if rotary == x.shape[-1] else x[..., :rotary]
        swapped = swap_pairs(turned, self.layout)
        result = torch.addcmul(turned * self.cos, swapped, self.sin).to(x.dtype)
        return result if rotary == x.shape[-1] else torch.cat([result, x[..., rotary:]], -1)


def swap_pairs(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Exchanges the dimensions of each pair.

    Args:
        x: (..., rotary_dim).
    """
    if layout == "interleaved":
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x.roll(x.shape[-1] // 2, -1)


class TurningPass(Pass):
    """A pass that remembers the rotations made so far."""

    def turn(self, geometry: RotaryGeometry, target: int | torch.Tensor, *, still: bool = False) -> Turn | None:
        """The rotation from the model's positions to others; None where these are the same.

        Args:
            target: Where the first new token is to stand, the others behind it; or (batch or 1, heads or 1, tokens).
        """
        if isinstance(target, torch.Tensor):
            return self._make(geometry, target)
        key = (id(geometry), target, still)
        if key not in self._shared:
            if self.start == target and not still:
                self._shared[key] = None
            elif self.tokens == 1 and self.start is not None and self.device.type == "cpu":
                self._shared[key] = _turn_one(geometry, self.start, target)
            else:
                steps = torch.zeros(self.tokens, dtype=torch.long) if still else torch.arange(self.tokens)
                self._shared[key] = self._make(geometry, (steps + target).to(self.device)[None, None])
        return self._shared[key]

    def _make(self, geometry: RotaryGeometry, target: torch.Tensor) -> Turn:
        exact = geometry.inv_freq.to(self.device)
        # The model multiplies in float32: undoing its angle needs the rounded one.
        rounded = self.positions()[:, None, :, None].float() * exact.float()
        return Turn.by(torch.addcmul(-rounded.double(), target[..., None].double(), exact), geometry.layout)


def _turn_one(geometry: RotaryGeometry, start: int, target: int) -> Turn:
    """As `TurningPass._make` for one token: for so few numbers NumPy takes a third of the time."""
    exact = geometry.inv_freq.numpy()
    angles = exact * target - (exact.astype(np.float32) * np.float32(start)).astype(np.float64)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    if geometry.layout == "interleaved":
        tables = np.repeat(cos, 2), np.stack([-sin, sin], -1).ravel()
    else:
        tables = np.concatenate([cos, cos]), np.concatenate([-sin, sin])
    cosine, sine = (torch.from_numpy(table).view(1, 1, 1, -1) for table in tables)
    return Turn(cosine, sine, geometry.layout)


@dataclass(eq=False)
class Frames:
    """How one layer's keys are rotated.

    Args:
        scheme: `"given"`: as the model rotated them. `"frames"`: near and far, as this module explains. `"on_read"`: kept without
            rotation, and rotated to their places for each query. `"rotated_keys"`: so too, with the other half of the product (each key
            with its pairs swapped) kept beside them, as in the paper.
        geometry: The model's angles; None for `"given"`.
    """

    scheme: Scheme
    geometry: RotaryGeometry | None = None
    limit: int = 8192
    """How far the frames may be apart before the near keys are turned, in tokens."""
    _tables: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def turns(self) -> bool:
        """Whether keys have a rotation of this package's choice."""
        return self.scheme != "given"

    @property
    def two(self) -> bool:
        """Whether there are near and far keys."""
        return self.scheme == "frames"

    @property
    def unrotated(self) -> bool:
        """Whether keys are kept without rotation."""
        return self.scheme in ("on_read", "rotated_keys")

    def by(self, delta: torch.Tensor) -> Turn:
        """The rotation by a number of positions.

        Args:
            delta: (batch or 1, heads or 1, tokens), or fewer dimensions.
        """
        assert self.geometry is not None
        return Turn.by(delta[..., None].double() * self.geometry.inv_freq.to(delta.device), self.geometry.layout)

    def table(self, length: int, device: torch.device) -> Turn:
        """The rotations to 0 .. length-1, (length, rotary_dim) each; grows by doubling."""
        held = self._tables.get(device)
        if held is None or held.cos.shape[0] < length:
            with torch.inference_mode(mode=False):  # a later backward pass may need it
                held = self._tables[device] = self.by(torch.arange(max(64, 2 * length), device=device))
        return held

    def numbers(self, rows: int, capacity: int, start: int, slots: int, device: torch.device) -> torch.Tensor:
        """Which slots of all rows and heads the ones from `start` on are, if all are counted one behind the other, (rows * slots,)."""
        key = ("numbers", rows, capacity, start, slots, device)
        if key not in self._tables:
            for old in [each for each in self._tables if isinstance(each, tuple) and each[0] == "numbers" and each[1] != rows]:
                del self._tables[old]  # of another batch
            with torch.inference_mode(mode=False):
                places = torch.arange(start, start + slots, device=device)
                self._tables[key] = (torch.arange(rows, device=device)[:, None] * capacity + places).flatten()
        numbers: torch.Tensor = self._tables[key]
        return numbers

    def back(self, device: torch.device) -> Turn:
        """The rotation by one position back: what an eviction does to the far keys behind it."""
        if ("back", device) not in self._tables:
            with torch.inference_mode(mode=False):
                self._tables["back", device] = self.by(torch.tensor([-1], device=device))
        turn: Turn = self._tables["back", device]
        return turn

    def __deepcopy__(self, memo: dict[int, Any]) -> Frames:
        return self  # nothing in it belongs to a sequence

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}
