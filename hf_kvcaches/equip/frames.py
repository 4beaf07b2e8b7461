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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from hf_kvcaches.core.attention import MaskRecipe
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.rope_families import Layout
from hf_kvcaches.errors import UnsupportedError

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
            layout: Which dimensions form a pair.
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
        layout: Which dimensions form a pair.
    """
    if layout == "interleaved":
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x.roll(x.shape[-1] // 2, -1)


class Pass:
    """What all layers of one forward pass share: which new tokens are real, where the model put them, and the rotations made so far.

    Args:
        mask: What the model gave its attention.
        position_ids: The model's positions of the new tokens, (batch or 1, tokens), or None where it does not tell.
        seen: Tokens fed in before.
        tokens: New ones.
        device: Of keys and queries.
    """

    def __init__(
        self, mask: MaskRecipe | torch.Tensor | None, position_ids: torch.Tensor | None, seen: int, tokens: int, device: torch.device
    ) -> None:
        self.key = (mask, position_ids, seen, tokens, device)
        self.seen, self.tokens, self.device = seen, tokens, device
        self.first, self.whole = 0, True  # where it begins in the model's call, and whether it is all of it
        padding = mask.padding if isinstance(mask, MaskRecipe) else None
        valid = None if padding is None else padding[:, seen : seen + tokens].to(device).bool()
        self.valid = None if valid is None or bool(valid.all()) else valid
        self.real_before = None if padding is None else padding[:, :seen].sum(-1, keepdim=True).to(device)
        self.position_ids = _text_positions(position_ids)
        self._turns: dict[Any, Any] = {}
        self._parts: dict[tuple[int, int], Pass] = {}
        self._start: int | Literal[False] | None = False

    def part(self, start: int, stop: int) -> Pass:
        """The pass of some of the new tokens alone.

        Args:
            start: The first.
            stop: The one after the last.
        """
        if (start, stop) == (0, self.tokens):
            return self
        if (start, stop) not in self._parts:
            mask, ids, seen, _, device = self.key
            own = None if ids is None else ids[..., start:stop]
            part = self._parts[start, stop] = Pass(mask, own, seen + start, stop - start, device)
            part.first, part.whole = self.first + start, False
        return self._parts[start, stop]

    def matches(self, mask: Any, position_ids: torch.Tensor | None, seen: int, tokens: int, device: torch.device) -> bool:
        """Whether this is the pass that a layer is in."""
        own = self.key
        # By identity: a recipe and its positions are made anew for each forward pass, and are kept alive here.
        return mask is not None and own[0] is mask and own[1] is position_ids and own[2:] == (seen, tokens, device)

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """What another layer has made under that key already, or what `make` gives.

        Args:
            key: Anything hashable.
            make: Called once a pass.
        """
        if key not in self._turns:
            self._turns[key] = make()
        return self._turns[key]

    @property
    def start(self) -> int | None:
        """The first token's position where all rows count on from the same one, else None."""
        if self._start is False:
            self._start = self._find_start()
        return self._start

    def _find_start(self) -> int | None:
        ids = self.position_ids
        if ids is None:
            return self.seen if self.real_before is None and self.valid is None else None
        first = int(ids[0, 0])
        if ids.numel() == 1:
            return first
        expected = torch.arange(first, first + self.tokens, device=ids.device)
        return first if bool((ids == expected).all()) else None

    def positions(self) -> torch.Tensor:
        """The model's positions of the new tokens, (batch or 1, tokens)."""
        if self.position_ids is not None:
            return self.position_ids.to(self.device)
        steps = torch.arange(self.tokens, device=self.device)[None]
        if self.real_before is None:
            return steps + self.seen
        valid = torch.ones_like(steps) if self.valid is None else self.valid
        return (self.real_before + valid.cumsum(-1) - 1).clamp(min=0)

    def turn(self, geometry: RotaryGeometry, target: int | torch.Tensor, *, still: bool = False) -> Turn | None:
        """The rotation from the model's positions to others; None where these are the same.

        Args:
            geometry: The model's angles.
            target: Where the first new token is to stand, the others behind it; or (batch or 1, heads or 1, tokens).
            still: Put all tokens at the one target.
        """
        if isinstance(target, torch.Tensor):
            return self._make(geometry, target)
        key = (id(geometry), target, still)
        if key not in self._turns:
            if self.start == target and not still:
                self._turns[key] = None
            elif self.tokens == 1 and self.start is not None and self.device.type == "cpu":
                self._turns[key] = _turn_one(geometry, self.start, target)
            else:
                steps = torch.zeros(self.tokens, dtype=torch.long) if still else torch.arange(self.tokens)
                self._turns[key] = self._make(geometry, (steps + target).to(self.device)[None, None])
        return self._turns[key]

    def _make(self, geometry: RotaryGeometry, target: torch.Tensor) -> Turn:
        exact = geometry.inv_freq.to(self.device)
        # The model multiplies in float32: undoing its angle needs the rounded one.
        rounded = self.positions()[:, None, :, None].float() * exact.float()
        return Turn.by(torch.addcmul(-rounded.double(), target[..., None].double(), exact), geometry.layout)


def _turn_one(geometry: RotaryGeometry, start: int, target: int) -> Turn:
    """As `Pass._make` for one token: for so few numbers NumPy takes a third of the time."""
    exact = geometry.inv_freq.numpy()
    angles = exact * target - (exact.astype(np.float32) * np.float32(start)).astype(np.float64)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    if geometry.layout == "interleaved":
        tables = np.repeat(cos, 2), np.stack([-sin, sin], -1).ravel()
    else:
        tables = np.concatenate([cos, cos]), np.concatenate([-sin, sin])
    cosine, sine = (torch.from_numpy(table).view(1, 1, 1, -1) for table in tables)
    return Turn(cosine, sine, geometry.layout)


def _text_positions(ids: torch.Tensor | None) -> torch.Tensor | None:
    """Positions of text, (batch or 1, tokens), also where a model has one for each axis of an image."""
    if ids is None or ids.ndim == 2:
        return ids
    if ids.ndim == 3 and bool((ids == ids[:1]).all()):
        return ids[0]
    raise UnsupportedError(
        "position_ids: image tokens with a position for each axis have no place in compact positions. Use positions='original'."
    )


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
        """The rotations to 0 .. length-1, (length, rotary_dim) each; grows by doubling.

        Args:
            length: How many are needed.
            device: Of the result.
        """
        held = self._tables.get(device)
        if held is None or held.cos.shape[0] < length:
            held = self._tables[device] = self.by(torch.arange(max(64, 2 * length), device=device))
        return held

    def numbers(self, rows: int, capacity: int, start: int, slots: int, device: torch.device) -> torch.Tensor:
        """Which slots of all rows and heads the ones from `start` on are, if all are counted one behind the other, (rows * slots,).

        Args:
            rows: Rows times heads.
            capacity: Slots that each has.
            start: The first one wanted.
            slots: How many of each are wanted.
            device: Of the result.
        """
        key = ("numbers", rows, capacity, start, slots, device)
        if key not in self._tables:
            for old in [each for each in self._tables if isinstance(each, tuple) and each[0] == "numbers" and each[1] != rows]:
                del self._tables[old]  # of another batch
            places = torch.arange(start, start + slots, device=device)
            self._tables[key] = (torch.arange(rows, device=device)[:, None] * capacity + places).flatten()
        numbers: torch.Tensor = self._tables[key]
        return numbers

    def back(self, device: torch.device) -> Turn:
        """The rotation by one position back: what an eviction does to the far keys behind it.

        Args:
            device: Of the result.
        """
        if ("back", device) not in self._tables:
            self._tables["back", device] = self.by(torch.tensor([-1], device=device))
        turn: Turn = self._tables["back", device]
        return turn

    def __deepcopy__(self, memo: dict[int, Any]) -> Frames:
        return self  # nothing in it belongs to a sequence

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}


class Passes:
    """The forward pass that is going on, shared by the layers of one cache.

    Attributes:
        drafts: How many of the call's last tokens are drafts that may be taken back, where the caller is known to draft; else None.
    """

    def __init__(self) -> None:
        self.drafts: int | None = None
        self._current: Pass | None = None

    def enter(self, mask: Any, position_ids: torch.Tensor | None, seen: int, tokens: int, device: torch.device) -> Pass:
        """The pass with these arguments: the running one, or a new one.

        Args:
            mask: What the model gave its attention.
            position_ids: Of the new tokens.
            seen: Tokens fed in before.
            tokens: New ones.
            device: Of keys and queries.
        """
        if self._current is None or not self._current.matches(mask, position_ids, seen, tokens, device):
            self._current = Pass(mask, position_ids, seen, tokens, device)
        return self._current

    def __deepcopy__(self, memo: dict[int, Any]) -> Passes:
        return Passes()

    def __reduce__(self) -> tuple[type[Passes], tuple[()]]:
        return Passes, ()
