"""Bases that follow a text: sketches of what was coded, and when a new basis is made of them.

All is for one side (keys or values) of a layer, each row and head by itself, in the coordinates of a codec's coefficients: there errors
cost alike in all directions, and a new basis is a rotation. A basis has a slot for each direction that has bits, and the bits of a slot
stay, so that all bases have one layout of codes.

Nothing is changed in place, so an older state can be put back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvcaches.codec.coder import Levels
from hf_kvcaches.codec.moments import descending
from hf_kvcaches.codec.sides import CalibratedSide
from hf_kvcaches.kernels.codes import TILE, CodeMap
from hf_kvcaches.subspace.adaptive.settings import AdaptiveSubspace
from hf_kvcaches.subspace.adaptive.sketch import FrequentDirections

# What was calibrated on counts as so many tokens for each dimension.
_KNOWN = 4
# Without a calibration, a tile may lose so many times what its basis lost when it was new.
_SLACK = 1.5
# Losses below this share of the energy are those of rounding.
_LEAST_LOSS = 1e-6
# The least deviation that the step of a direction is made for, as a share of the head's mean.
_LEAST_DEVIATION = 1e-4
# Steps of so many bits and more are so fine that they always reach all of a head.
_WIDE = 16
_TINY = torch.finfo(torch.float32).tiny

Index = torch.Tensor | slice  # of rows or of heads


class Track(NamedTuple):
    """Where a text has led.

    Args:
        sketch: State of the sketch, (batch, heads, n, d).
        tokens: How many it knows, decayed like these, (batch, heads), float64.
        pending: Coefficients of the last tokens, which make no whole tile, (batch, heads, TILE, d); zeros behind them.
        turn: The directions of the basis in use, (batch, heads, slots, d).
        sizes: The energies that their steps are made for, (batch, heads, slots).
        share: Of the energy, what that basis lost when it was looked at last, (batch, heads), float64.
        limit: Of a tile's loss, as a share of its energy, (batch, heads), float64; what a tile lost where no other basis was better.
        current: The number of that basis, (batch, heads), int64.
        decode: What reads the codes of each basis so far, (batch, heads, bases, d, levels).
        offset: What is added to codes read in each basis, (batch, heads, bases, d).
        basis_of: In which basis each tile is, the last one that has begun included, (batch, heads, tiles), int16.
    """

    sketch: torch.Tensor
    tokens: torch.Tensor
    pending: torch.Tensor
    turn: torch.Tensor
    sizes: torch.Tensor
    share: torch.Tensor
    limit: torch.Tensor
    current: torch.Tensor
    decode: torch.Tensor
    offset: torch.Tensor
    basis_of: torch.Tensor


class Follower:
    """One side of a layer.

    Args:
        side: The coordinates, and the bits of each direction.
        limit: Of a tile's loss, as a share of its length; None for what `side` or the first basis says.
        gamma: What decoded vectors are multiplied with, for each head, (kv_heads,).
        dtype: Of what is decoded.
    """

    def __init__(
        self,
        side: CalibratedSide,
        settings: AdaptiveSubspace,
        limit: float | None,
        gamma: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.settings, self.limit, self.dtype = settings, limit, dtype
        self.levels = levels = Levels(side.widths.long(), device)
        self.heads, self.dim = side.shape
        kept = levels.kept.cpu()
        self.slots = kept.shape[1]
        self.sketch = settings.summary(self.slots)
        self._gamma = gamma.to(device, torch.float64)[:, None]
        self._mean, self._encode = side.mean.to(device), side.encode.to(device)
        self._decode = side.decode.to(device)
        self._energies = side.energies.double().to(device)
        wide = (levels.widths >= _WIDE).double()
        self._floor = wide + (1 - wide) * _LEAST_DEVIATION**2
        energies = self._energies.gather(1, levels.kept)
        # As in calibration, steps are made for at least so much energy, however little there was.
        self._sizes = energies.maximum(self._floor * self._energies.mean(1, keepdim=True)).clamp_min(_TINY)
        self._units = side.chosen_steps.double().gather(1, kept).to(device) / self._sizes.sqrt()
        self._losses = side.chosen_distortions.gather(1, kept).to(device) * energies / self._sizes
        self._has_bits = (levels.widths > 0)[..., None]
        # The slots with most bits get the directions with most energy.
        self._order = levels.widths.argsort(dim=1, descending=True, stable=True)
        self._tails = self._expected_tails(side).to(device)

    def _expected_tails(self, side: CalibratedSide) -> torch.Tensor:
        """What one token in twenty of the calibration lost, as a share of its energy, (heads,)."""
        ranks = (side.widths > 0).sum(1, keepdim=True)
        noise = torch.where(side.widths > 0, side.energies.double() * side.chosen_distortions, 0.0).sum(1)
        return side.tails.double().gather(1, ranks)[:, 0] + noise / side.energies.double().sum(1).clamp_min(_TINY)

    def coefficients(self, states: torch.Tensor) -> torch.Tensor:
        """Of all directions, (batch, heads, tokens, d), float32."""
        return (states.detach().float() - self._mean[:, None]) @ self._encode.mT

    def start(self, rows: int) -> Track:
        """Where a text begins that the calibration speaks for."""
        lead, device = (rows, self.heads), self._mean.device
        turn = torch.nn.functional.one_hot(self.levels.kept, self.dim).float().expand(*lead, -1, -1)
        known = _KNOWN * self.dim
        prior = (self._energies * known).sqrt().float().diag_embed().expand(*lead, -1, -1)
        sketch = self.sketch.update(self.sketch.start(lead, self.dim, device), prior)
        sizes = self._sizes.float().expand(*lead, -1)
        tokens = torch.full(lead, float(known), dtype=torch.float64, device=device)
        track = self.nothing(rows)._replace(sketch=sketch, tokens=tokens, turn=turn, sizes=sizes)
        everywhere = slice(None), slice(None)
        share = self._lost_now(track, self._gram(track, *everywhere), *everywhere) / self._energies.sum(-1).clamp_min(_TINY)
        limit = self._tails.expand(lead) if self.limit is None else torch.full_like(tokens, self.limit**2)
        row, head = torch.ones(lead, dtype=torch.bool, device=device).nonzero(as_tuple=True)
        return self._with_basis(track._replace(share=share, limit=limit), row, head)

    def begin(self, states: torch.Tensor) -> Track:
        """The first basis, made of the first tokens.

        Args:
            states: (batch, heads, tokens, d), whole tiles.
        """
        lead = states.shape[:2]
        track = self._fed(self.nothing(lead[0]), self.coefficients(states))
        return self._renewed(track, torch.ones(lead, dtype=torch.bool, device=states.device), at_once=True)

    def nothing(self, rows: int) -> Track:
        """Before the first basis."""
        lead, device = (rows, self.heads), self._mean.device
        return Track(
            sketch=self.sketch.start(lead, self.dim, device),
            tokens=torch.zeros(lead, dtype=torch.float64, device=device),
            pending=torch.zeros(*lead, TILE, self.dim, device=device),
            turn=torch.zeros(*lead, self.slots, self.dim, device=device),
            sizes=torch.ones(*lead, self.slots, device=device),
            share=torch.zeros(lead, dtype=torch.float64, device=device),
            limit=torch.full(lead, torch.inf, dtype=torch.float64, device=device),
            current=torch.full(lead, -1, dtype=torch.int64, device=device),
            decode=torch.zeros(*lead, 0, self.dim, self.levels.index.shape[1], dtype=self.dtype, device=device),
            offset=torch.zeros(*lead, 0, self.dim, dtype=self.dtype, device=device),
            basis_of=torch.zeros(*lead, 0, dtype=torch.int16, device=device),
        )

    def map(self, track: Track) -> CodeMap:
        """How kernels read the codes."""
        return CodeMap(self.levels.counts, self.levels.index, track.decode, track.offset)

    def advance(self, track: Track, states: torch.Tensor, start: int, known: int = 0) -> tuple[Track, torch.Tensor]:
        """Codes tokens one after the other.

        Args:
            states: (batch, heads, tokens, d).
            start: How many were coded before, in each row.
            known: So many of the first tokens are in the sketch already.

        Returns:
            Where that has led, and the codes, (batch, bytes, tokens).
        """
        coefficients = self.coefficients(states)
        at, stop, chunk, made = start, start + states.shape[2], self.settings.chunk, []
        while at < stop:
            end = min(stop, (at // chunk + 1) * chunk)
            behind = at % TILE
            block = torch.cat([track.pending[:, :, :behind], coefficients[:, :, at - start : end - start]], 2)
            steps, lost = self._coded(track, block)
            due = None
            tiles = block.shape[2] // TILE
            if tiles:
                energies = block[:, :, : tiles * TILE].square().sum(-1).unflatten(2, (tiles, TILE)).sum(-1)
                shares = lost[:, :, : tiles * TILE].unflatten(2, (tiles, TILE)).sum(-1) / energies.clamp_min(1e-30)
                over = shares > track.limit[..., None]
                beyond = over.flatten(0, 1).any(0)
                if bool(beyond.any()):
                    tile = int(beyond.to(torch.uint8).argmax())
                    due, share, tiles = over[..., tile], shares[..., tile], tile + 1
                    end = at - behind + tiles * TILE
            taken = end - at
            made.append(self.levels.pack(steps[..., behind : behind + taken]))
            whole, rest = block[:, :, : behind + taken].split([tiles * TILE, behind + taken - tiles * TILE], 2)
            new_tiles = -(-end // TILE) - -(-at // TILE)
            named = track.current[..., None].expand(-1, -1, new_tiles).to(torch.int16)
            rest = torch.nn.functional.pad(rest, (0, 0, 0, TILE - rest.shape[2]))
            track = track._replace(pending=rest, basis_of=torch.cat([track.basis_of[:, :, : -(-at // TILE)], named], 2))
            if tiles and at - behind + tiles * TILE > known:
                track = self._fed(track, whole[:, :, max(0, known - (at - behind)) :])
            if end % chunk == 0:
                track = self._renewed(self._decayed(track), torch.ones_like(track.current, dtype=torch.bool))
            elif due is not None:
                # What another basis does not mend is no reason to look before a tile loses more.
                raised = torch.where(due, share, track.limit)
                track = self._renewed(track._replace(limit=raised), due)
            at = end
        codes = made[0] if len(made) == 1 else torch.cat(made, 2)
        return track, codes

    def _steps(self, track: Track) -> torch.Tensor:
        """The steps of the basis in use, (batch, heads, slots), float64."""
        return self._units * track.sizes.double().sqrt()

    def _coded(self, track: Track, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Coefficients in steps with the middle added, (batch, heads, slots, tokens), and what each token loses, (batch, heads, tokens)."""
        turned = track.turn @ block.mT
        steps = self._steps(track).float()[..., None]
        middle = self.levels.middle.float()[..., None]
        shifted = turned / steps + middle
        nearest = (shifted.floor().clamp(min=torch.zeros_like(middle), max=2 * middle - 1) + 0.5 - middle) * steps
        kept = turned.square() - (turned - nearest).square()
        energies = block.square().sum(-1)
        # Nothing is lost of zeros, whatever their codes stand for.
        return shifted, (energies - kept.masked_fill(~self._has_bits, 0.0).sum(2)).masked_fill(energies == 0, 0.0)

    def _fed(self, track: Track, tokens: torch.Tensor) -> Track:
        """With more tokens in the sketch, (batch, heads, whole tiles, d)."""
        state = track.sketch
        # What Frequent Directions keep depends on the blocks they get; sums of products don't.
        for block in tokens.split(TILE if isinstance(self.sketch, FrequentDirections) else max(1, tokens.shape[2]), 2):
            state = self.sketch.update(state, block)
        return track._replace(sketch=state, tokens=track.tokens + tokens.shape[2])

    def _decayed(self, track: Track) -> Track:
        if self.settings.decay == 1:
            return track
        return track._replace(sketch=self.sketch.scaled(track.sketch, self.settings.decay), tokens=track.tokens * self.settings.decay)

    def _lost(self, found: torch.Tensor, sizes: torch.Tensor, energy: torch.Tensor, head: Index) -> torch.Tensor:
        """What a token loses in the mean with a basis of the chosen heads, float64, as if coefficients were normally distributed.

        Args:
            found: The mean energy in each direction of the basis, (..., slots), float64.
            sizes: The energies that its steps are made for.
            energy: Of the whole token, (...).
        """
        sizes = sizes.double()
        reach = self._units[head] * sizes.sqrt() * self.levels.middle[head]
        clipped = (_beyond(found, reach) - _beyond(sizes, reach)).clamp_min(0.0)
        kept = found * (1 - self._losses[head]) - clipped
        return (energy - kept.masked_fill(~self._has_bits[head, :, 0], 0.0).sum(-1)).clamp_min(0.0)

    def _lost_now(self, track: Track, gram: torch.Tensor, row: Index, head: Index) -> torch.Tensor:
        """`_lost` with the basis in use, for the mean outer product of such tokens."""
        turn = track.turn[row, head].double()
        found = ((turn @ gram) * turn).sum(-1).clamp_min(0.0)
        return self._lost(found, track.sizes[row, head], gram.diagonal(dim1=-2, dim2=-1).sum(-1), head)

    def _gram(self, track: Track, row: Index, head: Index) -> torch.Tensor:
        """The mean outer products of the chosen heads, (..., d, d), float64."""
        return self.sketch.gram(track.sketch[row, head]) / track.tokens[row, head].clamp_min(1)[..., None, None]

    def _renewed(self, track: Track, due: torch.Tensor, at_once: bool = False) -> Track:
        """Looks at the bases of some heads, and replaces those than which another one is better by enough.

        Args:
            due: Which heads, (batch, heads).
            at_once: Whether there is no basis yet.
        """
        row, head = due.nonzero(as_tuple=True)
        gram = self._gram(track, row, head)
        energy = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(_TINY)
        share = self._lost_now(track, gram, row, head) / energy
        spare = 1 + self.settings.agreement
        if not at_once:
            # A basis that does as well as it ever did needs no comparison, which would cost more than all else here.
            worse = share > (track.share[row, head] * spare).clamp_min(_LEAST_LOSS)
            row, head, gram, energy, share = (each[worse] for each in (row, head, gram, energy, share))
        if not len(row):
            return track
        energies, directions = descending(gram)
        places = self._order[head]
        sizes = torch.zeros(len(row), self.slots, dtype=torch.float64, device=gram.device)
        sizes.scatter_(1, places, energies[:, : self.slots].clamp_min(0.0))
        floors = self._floor[head] * (energy / self.dim)[:, None]
        turn = torch.zeros(len(row), self.slots, self.dim, device=gram.device)
        turn.scatter_(1, places[..., None].expand_as(turn), directions[:, : self.slots].float())
        other_sizes = sizes.maximum(floors).clamp_min(_TINY).float()
        found = self._lost(sizes, other_sizes, energy, head) / energy
        better = torch.ones_like(row, dtype=torch.bool) if at_once else found * spare < share
        # What was compared needs no other look before more is lost than now.
        track = track._replace(share=track.share.index_put((row, head), torch.where(better, found, share)))
        row, head, found, turn, other_sizes = (each[better] for each in (row, head, found, turn, other_sizes))
        if not len(row):
            return track
        limit = (_SLACK**2 * found).maximum(self._tails[head]) if self.limit is None else torch.full_like(found, self.limit**2)
        track = track._replace(
            turn=track.turn.index_put((row, head), turn),
            sizes=track.sizes.index_put((row, head), other_sizes),
            limit=track.limit.index_put((row, head), limit),
        )
        return self._with_basis(track, row, head)

    def _with_basis(self, track: Track, row: torch.Tensor, head: torch.Tensor) -> Track:
        """With what reads the codes of the basis in use, for heads that have changed theirs."""
        wide = self._decode[head] @ track.turn[row, head].double().mT
        columns, offset = self.levels.decoding(wide, self._steps(track)[row, head], self._mean[head], head)
        columns, offset = (columns * self._gamma[head, :, None]).to(self.dtype), (offset * self._gamma[head]).to(self.dtype)
        number = track.current[row, head] + 1
        more = max(0, int(number.max()) + 1 - track.decode.shape[2])
        place, pad = (row, head, number), torch.nn.functional.pad  # which copies
        return track._replace(
            current=track.current.index_put((row, head), number),
            decode=pad(track.decode, (0, 0, 0, 0, 0, more)).index_put_(place, columns),
            offset=pad(track.offset, (0, 0, 0, more)).index_put_(place, offset),
        )


def _beyond(energy: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
    """What is lost of normally distributed numbers where those beyond `reach` are clipped to it."""
    deviation = energy.clamp_min(_TINY).sqrt()
    far = reach / deviation
    tail = 0.5 * torch.special.erfc(far / 2**0.5)
    return 2 * ((energy + reach.square()) * tail - reach * deviation * (-far.square() / 2).exp() / (2 * torch.pi) ** 0.5)


def part(track: Track, rows: list[int]) -> Track:
    """Some rows."""
    return track if len(rows) == len(track.current) else Track(*(each[rows] for each in track))


def merged(track: Track, rows: list[int], own: Track) -> Track:
    """All rows, of which some have gone on."""
    if len(rows) == len(track.current):
        return own
    found, place = [], (torch.tensor(rows, device=own.current.device),)
    for name, old, new in zip(Track._fields, track, own, strict=True):
        if name in ("decode", "offset", "basis_of"):
            # Rows have different numbers of bases and of tiles.
            most = max(old.shape[2], new.shape[2])
            old, new = (torch.cat([each, each.new_zeros(*each.shape[:2], most - each.shape[2], *each.shape[3:])], 2) for each in (old, new))
        found.append(old.index_put(place, new))
    return Track(*found)
