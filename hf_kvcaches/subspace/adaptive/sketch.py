"""Summaries of a stream of vectors that know its main directions.

Each is a few settings and functions on a state, one float32 tensor with the caller's leading dimensions (batch, heads) first: it can be
put beside a layer's other tensors, reordered, cropped and saved like them. Nothing is changed in place.

**Which one.** `Gram` keeps all of a head's d x d outer products and loses nothing. `FrequentDirections` with `size` rows and as many for
new ones is smaller only while 2 size < d, and pays for that with an eigendecomposition every `size` rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_kvcaches.codec.moments import second_moment
from hf_kvcaches.errors import ConfigError, whole_number

_LARGEST = torch.finfo(torch.float32).max


class Sketch(ABC):
    """What all sketches can do. Energies and sums are taken in float64, where the squares of float32 numbers can't overflow."""

    @abstractmethod
    def start(self, lead: Sequence[int], dim: int, device: torch.device | str | None = None) -> torch.Tensor:
        """The state before the first row.

        Args:
            lead: The leading dimensions, such as (batch, heads).
        """

    @abstractmethod
    def update(self, state: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """The state after more rows.

        Args:
            state: What `start` or the last `update` gave.
            rows: (..., n, d), finite, of any floating-point type.
            valid: Booleans that broadcast to (..., n); rows where it is False change nothing, whatever they hold.
        """

    @abstractmethod
    def gram(self, state: torch.Tensor) -> torch.Tensor:
        """The sum of the rows' outer products, as far as the sketch knows it: (..., d, d), float64."""

    @abstractmethod
    def scaled(self, state: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        """The state with the energy of all past rows multiplied, so that newer ones count for more.

        Args:
            factor: 0 and up, a number or a tensor (...) of the leading dimensions.
        """


@dataclass(frozen=True)
class Gram(Sketch):
    """All outer products, added up: state (..., d, d).

    Entries from 1e-18 to 1e15 are safe: sums beyond the range of float32 stay at its end, or are 0 where products of both signs
    left it, and products below it are 0. The cost of an update is mostly that of touching the state, so blocks of rows are far
    cheaper than single ones.
    """

    def start(self, lead: Sequence[int], dim: int, device: torch.device | str | None = None) -> torch.Tensor:
        return torch.zeros((*lead, dim, dim), device=device)

    def update(self, state: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        rows = _usable(state, rows, valid)
        # Infinite products of both signs in one sum are a NaN, of which no end of the range is nearer than 0.
        return (state + rows.mT @ rows).nan_to_num_(0.0, _LARGEST, -_LARGEST)

    def gram(self, state: torch.Tensor) -> torch.Tensor:
        return state.double()

    def scaled(self, state: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        return _single(state.double() * _factor(state, factor))


@dataclass(frozen=True)
class FrequentDirections(Sketch):
    """A few rows S in place of all rows A, with a bound on what is lost: state (..., size + buffer, d).

    Frequent Directions (Liberty, arXiv 1206.0594; Ghashami et al., arXiv 1501.01711). Rows are put into free slots. When they no longer
    fit, old and new together are turned to their singular directions, and the square of the first singular value that has no slot is
    taken off all squares: `size` rows remain. However the rows came in blocks, for every r <= size:
    `|A'A - S'S|_op <= |A - A_r|_F^2 / (size + 1 - r)`, and S'S is never more than A'A in any direction. With d <= size nothing is lost.

    **The state has no counter.** Free slots are the rows of zeros at its end; a row of zeros has no energy and is never stored.

    **Cost.** A block shrinks once at most, however long it is, so longer blocks are cheaper and lose less. The decomposition is that of
    the smaller Gram matrix, of the rows or of the columns: about twice as fast as an SVD of the rows. It is in float64, a fifth slower
    than float32: squaring halves the digits, and would leave singular values below 3e-4 of the largest to noise. On a GPU, every update
    waits once to learn whether to shrink: collect some rows first.

    Args:
        buffer: How many more fit before the next decomposition. None: as many as remain.
    """

    size: int
    buffer: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("buffer", 1 if self.buffer is None else self.buffer)):
            whole_number(name, value, 1)

    def start(self, lead: Sequence[int], dim: int, device: torch.device | str | None = None) -> torch.Tensor:
        return torch.zeros((*lead, self._slots(dim), dim), device=device)

    def update(self, state: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        slots = self._slots(state.shape[-1])
        if state.shape[-2] != slots:
            raise ConfigError.of("state", f"{slots} rows, from start() of the same settings", tuple(state.shape))
        rows = _usable(state, rows, valid)
        new = (rows != 0).any(-1)
        # The last row that is not zeros, not their number: scaling may have made one between them vanish.
        numbers = torch.arange(1, slots + 1, device=state.device)
        used = ((state != 0).any(-1) * numbers).amax(-1)
        full = used + new.sum(-1) > slots
        shrinking = int(full.sum())
        if shrinking == full.numel():
            return self._shrunk(state, rows)
        stored = new & ~full.unsqueeze(-1)
        # Free slots are zeros, so adding is writing; what is not stored adds zeros to the first.
        slot = (used.unsqueeze(-1) + new.cumsum(-1) - 1).where(stored, 0)
        out = state.scatter_add(-2, slot.unsqueeze(-1).expand(rows.shape), _masked(rows, stored))
        if shrinking:
            out[full] = self._shrunk(state[full], rows[full])
        return out

    def gram(self, state: torch.Tensor) -> torch.Tensor:
        return second_moment(state)

    def scaled(self, state: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        return _single(state.double() * _factor(state, factor).sqrt())

    def _shrunk(self, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The state after one decomposition of all that it holds and all new rows."""
        slots, dim = state.shape[-2:]
        keep = min(self.size, dim)
        if slots + rows.shape[-2] <= dim:
            both = torch.cat((state, rows), dim=-2).double()
            energies, turns = torch.linalg.eigh(both @ both.mT)
            energies, directions = energies.flip(-1).clamp_min(0.0), turns.flip(-1)[..., :keep].mT @ both
            lengths = energies[..., :keep].clamp_min(torch.finfo(torch.float64).tiny)
        else:
            energies, axes = torch.linalg.eigh(second_moment(state) + second_moment(rows))
            energies, directions = energies.flip(-1).clamp_min(0.0), axes.flip(-1)[..., :keep].mT
            lengths = torch.ones_like(energies[..., :keep])
        cut = energies[..., keep : keep + 1] if keep < energies.shape[-1] else torch.zeros_like(energies[..., :1])
        left = ((energies[..., :keep] - cut) / lengths).sqrt().unsqueeze(-1) * directions
        return torch.nn.functional.pad(_single(left), (0, 0, 0, slots - keep))

    def _slots(self, dim: int) -> int:
        keep = min(self.size, dim)
        return keep + (self.buffer or keep)


def _usable(state: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """The rows in float32, with zeros where they don't count."""
    if rows.shape[:-2] != state.shape[:-2] or rows.shape[-1] != state.shape[-1] or rows.ndim != state.ndim:
        lead = ", ".join(map(str, state.shape[:-2]))
        raise ConfigError.of("rows", f"shape ({lead}, n, {state.shape[-1]})", tuple(rows.shape))
    return _masked(_single(rows.detach()), valid)


def _single(x: torch.Tensor) -> torch.Tensor:
    """In float32; beyond its range is its end."""
    return x.clamp(-_LARGEST, _LARGEST).float() if x.dtype == torch.float64 else x.float()


def _factor(state: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """A factor that multiplies a state."""
    if isinstance(factor, torch.Tensor):
        return factor.to(state.device, torch.float64)[..., None, None]
    if not factor >= 0:
        raise ConfigError.of("factor", "a number of at least 0", factor)
    return torch.tensor(float(factor), dtype=torch.float64, device=state.device)


def _masked(rows: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Rows (..., n, d) with zeros where `valid`, booleans that broadcast to (..., n), is False."""
    if valid is None:
        return rows
    if valid.dtype != torch.bool:
        raise ConfigError.of("valid", "booleans", valid.dtype)
    # Not a product: what is not valid may be NaN.
    return rows.masked_fill(~valid.unsqueeze(-1), 0.0)
