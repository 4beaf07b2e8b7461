"""Bases that follow a text: sketches of what came by, and when a new basis is made of them.

Everything here is for one side (keys or values) of heads with one rank, each row and head by itself, in three steps that alternate:
tokens are projected on the basis in use (`encode`), whole tiles are added to the sketch (`feed`), and after each tile a head may change to
a basis of what its sketch has seen (`renew`): when the tile lost more than its limit, or the chunk is as long as it may be. All happens
after numbers of tokens that do not depend on how many came at a time.

**Coordinates.** With a metric M, vectors are summarised as `M^(1/2) x`: there the distance is the metric's, the best basis is orthonormal,
and what a token loses is the length of what its coefficients leave. The bound of Frequent Directions holds there, too.

Nothing is changed in place, so an older state can be put back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_kvcaches.kernels.coefficients import TILE
from hf_kvcaches.subspace.projections import Projection, principal
from hf_kvcaches.subspace.sketch import FrequentDirections, Sketch

# The least energy of a direction that coefficients in 8 bits are evened by, as a share of the largest.
_LEAST = 1e-4


class Track(NamedTuple):
    """Where a text has led, of all rows and heads.

    Args:
        sketch: State of the sketch, (batch, heads, n, d).
        root: M^(1/2), (batch, heads, d, d); None for a metric that is the identity.
        encode: The basis in use, (batch, heads, rank, d).
        bank: What reads the coefficients of each basis so far, (batch, heads, bases, d, rank).
        current: Which of these is in use, (batch, heads), int64.
        begun: Which coefficient began the chunk, (batch, heads), int64.
        limit: Of a tile's loss, (batch, heads), float64.
        share: Of the energy that it was made of, what the basis in use lost, (batch, heads), float64.
        energy: Of all that Frequent Directions were given, forgotten or not, (batch, heads), float64; of other sketches 0.
    """

    sketch: torch.Tensor
    root: torch.Tensor | None
    encode: torch.Tensor
    bank: torch.Tensor
    current: torch.Tensor
    begun: torch.Tensor
    limit: torch.Tensor
    share: torch.Tensor
    energy: torch.Tensor


@dataclass(frozen=True)
class Follower:
    """How a text is followed.

    Args:
        chunk: The most tokens until a basis is looked at again.
        limit: The largest loss of a tile, as a share of its length; None: `slack` times what the basis lost when it was new.
        decay: What the energy of older tokens is multiplied with after a chunk.
        agreement: A basis stays while it loses no more than when it was made and this share of the energy, or than the best one and that.
        even: Whether coefficients are to be equally large in all directions, so that one scale fits them.
    """

    sketch: Sketch
    rank: int
    chunk: int
    limit: float | None
    decay: float
    agreement: float
    even: bool
    dtype: torch.dtype

    slack = 1.5

    def start(self, rows: torch.Tensor, root: torch.Tensor | None) -> Track:
        """The first basis.

        Args:
            rows: The vectors that it is made of, (batch, heads, tokens, d).
            root: M^(1/2), (batch, heads, d, d), or None.
        """
        batch, heads, _, dim = rows.shape
        lead, device = (batch, heads), rows.device
        zeros = torch.zeros(lead, dtype=torch.int64, device=device)
        limit = torch.full(lead, float("inf"), dtype=torch.float64, device=device)
        none = torch.zeros_like(limit)
        if self.rank == dim:
            # Nothing is left out, and this is the way without rounding.
            whole = torch.eye(dim, dtype=self.dtype, device=device).expand(*lead, dim, dim).clone()
            return Track(rows.new_zeros(*lead, 0, 0), None, whole, whole[:, :, None].clone(), zeros, zeros, limit, none, none)
        empty = self.sketch.start(lead, dim, device)
        nothing = torch.zeros(*lead, self.rank, dim, dtype=self.dtype, device=device)
        bank = nothing.mT[:, :, None].contiguous()
        track = Track(empty, root, nothing, bank, zeros - 1, zeros, limit, none, none)
        track = self.feed(track, in_metric(track, rows))
        return self.renew(track, 0, torch.ones(lead, dtype=torch.bool, device=device))

    def encode(self, track: Track, rows: torch.Tensor) -> torch.Tensor:
        """Coefficients in the basis in use, (batch, heads, tokens, rank).

        Args:
            rows: (batch, heads, tokens, d).
        """
        return torch.matmul(rows.to(track.encode.dtype), track.encode.mT)

    def feed(self, track: Track, rooted: torch.Tensor) -> Track:
        """With more tokens in the sketch.

        Args:
            rooted: (batch, heads, tokens, d), as `in_metric` gives them.
        """
        if not rooted.shape[2] or not track.sketch.shape[2]:
            return track
        if not isinstance(self.sketch, FrequentDirections):
            return track._replace(sketch=self.sketch.update(track.sketch, rooted))
        state = track.sketch
        # What Frequent Directions keep depends on the blocks they get; sums of products don't.
        for block in rooted.split(TILE, 2):
            state = self.sketch.update(state, block)
        return track._replace(sketch=state, energy=track.energy + rooted.square().sum((-1, -2), dtype=torch.float64))

    def losses(self, track: Track, rooted: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        """What each tile loses in the basis in use, as a share of its length, (batch, heads, tiles), float32 or float64.

        What an orthonormal basis leaves of a vector has the length that its coefficients lack, so nothing is decoded.

        Args:
            rooted: Whole tiles, (batch, heads, tokens, d), as `in_metric` gives them.
            coefficients: Theirs, (batch, heads, tokens, rank).
        """
        decode = reading(track).to(rooted.dtype)
        # How much longer each direction is than its coefficient.
        sizes = (decode if track.root is None else track.root.to(rooted.dtype) @ decode).square().sum(-2)
        kept = (coefficients.detach().to(rooted.dtype).square() @ sizes.unsqueeze(-1)).squeeze(-1)
        kept, whole = (each.unflatten(2, (-1, TILE)).sum(-1) for each in (kept, rooted.square().sum(-1)))
        return torch.where(whole > 0, 1 - kept / whole.clamp_min(torch.finfo(whole.dtype).tiny), 0.0).clamp_min(0.0).sqrt()

    def advance(
        self, track: Track, rows: torch.Tensor, first: int, start: int, stop: int, fed: int, ahead: int
    ) -> tuple[Track, torch.Tensor, torch.Tensor]:
        """Takes tokens in.

        Args:
            rows: (batch, heads, tokens, d): tokens from coefficient `first` on, to the last one that came.
            first: Where the rows begin: not behind `start`'s tile, nor behind what is to be fed.
            ahead: How many tokens have come behind a token when its coefficients are made.

        Returns:
            Where that has led, the coefficients, (batch, heads, stop - start, rank), and of each tile that begins behind `start`, up to
            `stop`, in which basis it is, (batch, heads, tiles).
        """
        made, bases, at = [], [], start
        rooted = in_metric(track, rows) if track.sketch.shape[2] else rows
        while at < stop:
            end, due = self._next(track, rows, rooted, first, at, stop)
            made.append(self.encode(track, rows[:, :, at - first : end - first]))
            tiles = end // TILE - at // TILE
            if tiles:
                bases.append(track.current[..., None].expand(-1, -1, tiles - 1))
                if due is not None:
                    track, fed = self._fed_to(track, rooted, first, fed, (end + ahead) // TILE)
                    track = self.renew(track, end, due)
                bases.append(track.current[..., None])
            at = end
        track, _ = self._fed_to(track, rooted, first, fed, (first + rows.shape[2]) // TILE)
        lead = rows.shape[:2]
        coefficients = torch.cat(made, 2) if made else rows.new_zeros(*lead, 0, self.rank)
        return track, coefficients, torch.cat(bases, 2) if bases else track.current.new_zeros(*lead, 0)

    def _next(
        self, track: Track, rows: torch.Tensor, rooted: torch.Tensor, first: int, at: int, stop: int
    ) -> tuple[int, torch.Tensor | None]:
        """How far the bases in use go from here, and for which heads they end there."""
        if not track.sketch.shape[2]:
            return stop, None
        full = int(track.begun.min()) + self.chunk
        end = min(stop, full)
        begin, tiles = at // TILE * TILE, end // TILE - at // TILE
        if not tiles:
            return end, None
        ends = begin + TILE * torch.arange(1, tiles + 1, device=rows.device)
        long = ends - track.begun[..., None]
        here = slice(begin - first, begin - first + tiles * TILE)
        losses = self.losses(track, rooted[:, :, here], self.encode(track, rows[:, :, here]))
        # A basis gets a quarter of a chunk before it can be given up.
        over = (long >= self.chunk) | ((losses > track.limit[..., None]) & (long >= max(TILE, self.chunk // 4)))
        any_over = over.flatten(0, 1).any(0)
        if not bool(any_over.any()):
            return end, None
        tile = int(any_over.int().argmax())
        return begin + (tile + 1) * TILE, over[..., tile]

    def _fed_to(self, track: Track, rooted: torch.Tensor, first: int, fed: int, tiles: int) -> tuple[Track, int]:
        if tiles <= fed:
            return track, fed
        return self.feed(track, rooted[:, :, fed * TILE - first : tiles * TILE - first]), tiles

    def renew(self, track: Track, at: int, due: torch.Tensor) -> Track:
        """Looks at the basis of some heads, and replaces it where another one is better by enough.

        Args:
            due: Which heads, (batch, heads).
        """
        row, head = due.nonzero(as_tuple=True)
        gram = self.sketch.gram(track.sketch[row, head])
        root = None if track.root is None else track.root[row, head].double()
        current = track.current[row, head]
        total = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        kept = _kept(gram, track.bank[row, head, current.clamp(min=0)].double(), root)
        lost = torch.where(total > 0, 1 - kept / total.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
        # A basis that does as well as it ever did needs no comparison, which would cost more than all else here.
        fresh = (current < 0) | (lost - track.share[row, head] > self.agreement)
        index, bank, encode, share = current, track.bank, track.encode, track.share
        if bool(fresh.any()):
            best = principal(gram[fresh], self.rank)
            better = 1 - best.kept
            taken = (current[fresh] < 0) | (lost[fresh] - better > self.agreement)
            fresh = fresh.index_put((fresh.nonzero()[:, 0],), taken)
            index, at_fresh = current + fresh.long(), (row[fresh], head[fresh])
            made = self._maps(Projection(*(each[taken] for each in best)), None if root is None else root[fresh])
            if int(index.max()) >= bank.shape[2]:
                bank = torch.cat([bank, torch.zeros_like(bank[:, :, :1])], 2)
            encode = encode.index_put(at_fresh, made[0].to(self.dtype))
            bank = bank.index_put((*at_fresh, index[fresh]), made[1].to(self.dtype))
            share = share.index_put(at_fresh, better[taken])
            lost = lost.index_put((fresh,), better[taken])
        limit = self.slack * lost.clamp_min(0.0).sqrt() if self.limit is None else torch.full_like(lost, self.limit)
        # Who was looked at for its loss, and has no better basis, is looked at again when its chunk is over.
        again = (at - track.begun[row, head] < self.chunk) & ~fresh
        limit = limit.masked_fill(again, float("inf"))
        due = due.index_put((row[again], head[again]), torch.zeros_like(again[again]))
        sketch, energy = self._decayed(track, due, at)
        return track._replace(
            sketch=sketch,
            encode=encode,
            bank=bank,
            current=track.current.index_put((row, head), index),
            begun=torch.where(due, at, track.begun),
            limit=track.limit.index_put((row, head), limit),
            share=share,
            energy=energy,
        )

    def _decayed(self, track: Track, due: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sketch and its energy when a chunk is over."""
        if self.decay == 1:
            return track.sketch, track.energy
        factor = torch.where(due, self.decay ** ((at - track.begun).double() / self.chunk), 1.0)
        return self.sketch.scaled(track.sketch, factor), track.energy * factor

    def _maps(self, best: Projection, root: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Both ways of an orthonormal basis."""
        encode, decode = best.encode, best.decode
        if self.even:
            kept = best.energies[..., : self.rank]
            share = kept / kept[..., :1].clamp_min(torch.finfo(torch.float64).tiny)
            # A direction in which next to nothing was seen may turn out to matter, and must not fill the tiles then.
            size = torch.where(share > _LEAST, share, 1.0).sqrt()
            encode, decode = encode / size[..., None], decode * size[..., None, :]
        if root is not None:
            encode, decode = encode @ root, torch.linalg.solve(root, decode)
        return encode, decode


def in_metric(track: Track, rows: torch.Tensor) -> torch.Tensor:
    """Vectors in coordinates in which the metric is the identity, at least in float32, without gradients.

    Args:
        rows: (batch, heads, tokens, d).
    """
    rows = rows.detach().to(torch.promote_types(rows.dtype, torch.float32))
    return rows if track.root is None else rows @ track.root.to(rows.dtype)


def reading(track: Track) -> torch.Tensor:
    """What reads coefficients in the basis in use, (batch, heads, d, rank)."""
    pick = track.current.clamp(min=0)[..., None, None, None].expand(-1, -1, 1, *track.bank.shape[3:])
    return track.bank.gather(2, pick).squeeze(2)


def _kept(gram: torch.Tensor, decode: torch.Tensor, root: torch.Tensor | None) -> torch.Tensor:
    """The energy that a basis keeps of what a sketch has seen, (...)."""
    basis = decode if root is None else root @ decode
    sizes = basis.square().sum(-2).clamp_min(torch.finfo(torch.float64).tiny)
    return (((gram @ basis) * basis).sum(-2) / sizes).sum(-1)
