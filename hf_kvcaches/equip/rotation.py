"""At which position each kept key is rotated: that of the text, or counted within the cache, as in StreamingLLM.

Angles are taken in float64. The model's own are products in float32: what unrotates a key undoes the rounded angle.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.slots import SlotTable
from hf_kvcaches.kernels.rotation import Layout, RotationTables, rotated_by

# Tokens up to which a rotation streams: further on the model's float32 angles are off by more than 4e-3 radians.
LONGEST = 1 << 16


class Turn(NamedTuple):
    """A rotation of queries or keys, (batch, heads, tokens, head_dim), by tables that have a column for each dimension, float32."""

    cos: torch.Tensor
    sin: torch.Tensor  # negative where a pair's first dimension is made
    layout: Layout

    @classmethod
    def by(cls, angles: torch.Tensor, layout: Layout) -> Turn:
        """The rotation by angles, (..., rotary_dim / 2), float64: one for each pair."""
        cos, sin = angles.cos().float(), angles.sin().float()
        if layout == "interleaved":
            return cls(cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2), layout)
        return cls(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1), layout)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rotated_by(x, *self).to(x.dtype)


class KeyRotation:
    """How a layer's keys are rotated while they are kept.

    Where it is `unrotated`, a query is unrotated, too, and each key is rotated on the way by minus its distance to the newest token, in
    tokens of the cache. For a block there is a frame, one rotation of queries and keys in which they can be multiplied: it puts the newest
    kept token at one less than the number of slots in use, whatever a row or a head keeps.

    Args:
        geometry: The angles by which keys move; None where they stay as the model rotated them.
        otherwise: An unrotated one, which takes its place where a text reaches `window` tokens; None: nothing.
        streams: Whether the oldest token is always evicted next. Then keys stay as the model rotated them, because the distances of recent
            tokens are those of the text, and the sinks alone are rotated forward, by as many positions as tokens were lost behind them.
    """

    def __init__(
        self, geometry: Any = None, *, otherwise: KeyRotation | None = None, window: float = math.inf, streams: bool = False
    ) -> None:
        self.unrotated, self.otherwise, self.window, self.streams = geometry is not None, otherwise, window, streams
        self.geometry: Any = otherwise.geometry if otherwise is not None and streams else geometry
        self._tables: dict[torch.device, RotationTables] = {}
        self._other: KeyRotation | None = None

    @property
    def moves(self) -> bool:
        """Whether keys are rotated to other positions than the model's, now or later."""
        return self.unrotated or self.otherwise is not None

    def by(self, geometry: RotaryGeometry) -> KeyRotation:
        """The same by the other angles of the model, for all layers that share this one."""
        if self.streams and self.otherwise is not None:
            return KeyRotation(otherwise=self.otherwise.by(geometry), window=self.window, streams=True)
        if self._other is None or not self._other.geometry.rotates_like(geometry):
            self._other = KeyRotation(geometry)
        return self._other

    def index_of_slots(self, table: SlotTable, used: int) -> torch.Tensor:
        """To which position the keys of the slots in use are rotated in the frame, (batch, 1 or kv_heads, slots in use)."""
        index = used - 1 - table.distances[..., :used] if self.unrotated else table.positions[..., :used]
        return index.clamp(min=0)

    def index_of_new(self, table: SlotTable, positions: torch.Tensor) -> torch.Tensor:
        """The same of tokens in no slot, by their positions in their rows, (batch or 1, ...); -1 stays."""
        if not self.unrotated or not table.used:
            return positions
        count = table.count
        start = table.used - (count.view(-1, *[1] * (positions.ndim - 1)) if isinstance(count, torch.Tensor) else count)
        return torch.where(positions < 0, -1, positions + start)

    def frame(self, keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Kept keys, rotated to positions of the frame, (batch, 1 or kv_heads, tokens)."""
        return Turn.by(self._exact(index), self.geometry.layout)(keys) if self.unrotated else keys

    def to_frame(self, x: torch.Tensor, positions: torch.Tensor, index: torch.Tensor, table: SlotTable) -> torch.Tensor:
        """Queries or keys, (batch, heads, tokens, head_dim), from the model's positions, (batch or 1, tokens), to those of the frame."""
        if not self.unrotated or not table.used:
            return x
        return Turn.by((self._exact(index.clamp(min=0)) - self._rounded(positions).double())[:, None], self.geometry.layout)(x)

    def undo(self, positions: torch.Tensor) -> Turn:
        """From the model's positions, (batch or 1, tokens) or (batch or 1, heads or 1, tokens), to none."""
        angles = self._rounded(positions)
        return Turn.by(-(angles if positions.ndim == 3 else angles[:, None]), self.geometry.layout)

    def follow(self, positions: torch.Tensor, kept: int | torch.Tensor) -> Turn:
        """From a sink's own position to that from which the newest of `kept` tokens sees it at its distance within the cache."""
        newest = torch.as_tensor(kept, device=positions.device).view(1, 1) - 1
        return Turn.by((self._rounded(positions).double() - self._exact(newest))[:, None], self.geometry.layout)

    def on_read(self, distances: torch.Tensor, length: int) -> RotationTables:
        """What rotates each key back by its distance, (batch or 1, 1 or kv_heads, slots), below `length` where there is a token."""
        device = distances.device
        tables = self._tables.get(device)
        if tables is None or len(tables.cos) < length:
            with torch.inference_mode(False):  # a later backward pass may need it
                angles, layout = self._exact(-torch.arange(max(64, length), device=device)), self.geometry.layout
                full = torch.cat(Turn.by(angles, layout)[:2], -1)
                tables = RotationTables(full[:0], angles.cos().float(), angles.sin().float(), layout, full)
            self._tables[device] = tables
        return tables._replace(positions=distances)

    def _exact(self, positions: torch.Tensor) -> torch.Tensor:
        """Angles of positions: (..., rotary_dim / 2), float64."""
        return positions[..., None].double() * self.geometry.frequencies_on(positions.device)

    def _rounded(self, positions: torch.Tensor) -> torch.Tensor:
        """The model's angles at its positions, (..., rotary_dim / 2), float32."""
        return positions[..., None].float() * self.geometry.frequencies_on(positions.device).float()

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyRotation:
        return self  # nothing in it belongs to a sequence

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}
