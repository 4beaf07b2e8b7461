"""A layer of `SubspaceCache` whose bases follow the text."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.codec.fit import unmeasured
from hf_kvcaches.codec.moments import descending, second_moment
from hf_kvcaches.codec.sides import CalibratedLayer
from hf_kvcaches.core.parallel import HeadShard
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.core.step import Pass, Passes
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.subspace.adaptive.following import Follower, Track, merged, part
from hf_kvcaches.subspace.adaptive.settings import AdaptiveSubspace
from hf_kvcaches.subspace.coded import Bases, CodedLayer, CodedSettings
from hf_kvcaches.subspace.placement import Intake

_SIDES = ("key", "value")


class FollowingLayer(CodedLayer):
    """Codes tokens in bases that follow the text, those of each row by itself.

    Without a codec a row's tokens stay exact until it has enough of them for a first basis.

    Attributes:
        key_widths: Without a codec, the bits of each direction, (batch, kv_heads, d), the same in all rows; and `value_widths`.
    """

    row_tensors: ClassVar[tuple[str, ...]] = (
        *CodedLayer.row_tensors,
        *(f"{side}_{name}" for side in _SIDES for name in ("widths", *Track._fields)),
    )
    key_widths: torch.Tensor | None = None
    value_widths: torch.Tensor | None = None

    def __init__(
        self,
        codec: KVCodec | None,
        adaptive: AdaptiveSubspace,
        settings: CodedSettings,
        layer_idx: int,
        geometry: RotaryGeometry | None,
        passes: Passes[Pass],
        shard: HeadShard | None = None,
    ) -> None:
        super().__init__(codec, settings, layer_idx, geometry, passes)
        self.adaptive, self.shard = adaptive, shard
        self._followers: tuple[Follower, Follower] | None = None
        for name in self.row_tensors:
            setattr(self, name, None)

    @property
    def warmup(self) -> int:
        return 0 if self.codec is not None else self.adaptive.warmup

    @property
    def bases(self) -> Bases:
        keys, values = self.tracks
        return Bases(self.followers[0].map(keys), self.followers[1].map(values), keys.basis_of, values.basis_of)

    @property
    def tracks(self) -> tuple[Track, Track]:
        """Where the text has led, of keys and of values."""
        keys, values = (Track(*(getattr(self, f"{side}_{name}") for name in Track._fields)) for side in _SIDES)
        return keys, values

    @property
    def followers(self) -> tuple[Follower, Follower]:
        """What follows the text, of keys and of values."""
        if self._followers is None:
            if self.codec is not None:
                layer = self.codec.layers[self.layer_idx]
                assert layer is not None
                gamma = self.codec.gamma(layer)
            else:
                assert self.key_widths is not None
                assert self.value_widths is not None
                sides = (unmeasured(*each.shape[1:]).with_widths(each[0].cpu()) for each in (self.key_widths, self.value_widths))
                layer = CalibratedLayer(*sides)
                gamma = torch.ones(len(layer.keys.mean))
            own, limits = self.adaptive, (self.adaptive.tau_k, self.adaptive.tau_v)
            keys, values = (
                Follower(side, own, limit, factor, self.dtype, self.device)
                for side, limit, factor in zip(layer, limits, (gamma, torch.ones_like(gamma)), strict=True)
            )
            self._followers = keys, values
        return self._followers

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rank, most = self.adaptive.rank, (key_states.shape[-1], value_states.shape[-1])
        if isinstance(rank, tuple) and (rank[0] > most[0] or rank[1] > most[1]):
            raise ConfigError.of("rank", f"1 to {most[0]} for keys and 1 to {most[1]} for values, the model's head size", rank)
        super().lazy_initialization(key_states, value_states)

    def _widths(self, coefficients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of keys and of values the bits of each direction, (kv_heads, d), for all rows together; the largest direction first."""
        sides = []
        for own in coefficients:
            energies, _ = descending(second_moment(own))
            # Errors of keys and of values count by their share.
            energies = energies.clamp_min(0.0).mean(0)
            if self.shard is not None:  # bits are shared out among all heads of the layer
                energies = self.shard.gather(energies, 0)
            energies = energies / energies.sum().clamp_min(torch.finfo(torch.float64).tiny)
            side = unmeasured(*energies.shape)
            sides.append(replace(side, distortions=side.distortions * energies[..., None].cpu().float()))
        [layer] = self.adaptive.bits.allot([CalibratedLayer(*sides)])
        return [side.widths if self.shard is None else self.shard.own(side.widths) for side in layer]

    def _encode(self, keys: torch.Tensor, values: torch.Tensor, intake: Intake) -> torch.Tensor:
        plain = self._unrotated(keys, intake.positions(keys.shape[2], keys.device))
        begins = [row for row, (start, count) in enumerate(intake.spans) if not start and count]
        if self.codec is None and begins:
            self._begin(plain, values, begins, intake)
        elif self.key_sketch is None:
            for side, follower in zip(_SIDES, self.followers, strict=True):
                self._keep(side, follower.start(len(keys)))
        alike: dict[tuple[int, int], list[int]] = {}
        for row, span in enumerate(intake.spans):
            alike.setdefault(span, []).append(row)
        codes = []
        for side, states, follower, track in zip(_SIDES, (plain, values), self.followers, self.tracks, strict=True):
            made = torch.zeros(len(keys), follower.levels.rows, intake.leaving, dtype=torch.uint8, device=keys.device)
            for (start, count), rows in alike.items():
                if count:
                    own, new = follower.advance(part(track, rows), states[rows][:, :, :count], start, self.warmup)
                    track = merged(track, rows, own)
                    made[rows, :, :count] = new
            self._keep(side, track)
            codes.append(made)
        return torch.cat(codes, 1)

    def _begin(self, keys: torch.Tensor, values: torch.Tensor, rows: list[int], intake: Intake) -> None:
        """Makes the first bases of some rows, of their first tokens."""
        first = []
        for states in (keys, values):
            real = [states[row] if intake.held is None else states[row][:, intake.held[row] >= 0] for row in rows]
            first.append(torch.stack([each[:, : self.warmup] for each in real]).detach().float())
        if self.key_widths is None:
            # What began before and was taken back may have had other bits.
            self._followers = self.codes = None
            for side, widths in zip(_SIDES, self._widths(first), strict=True):
                setattr(self, f"{side}_widths", widths.to(keys.device).expand(len(keys), -1, -1).contiguous())
        for side, own, follower, track in zip(_SIDES, first, self.followers, self.tracks, strict=True):
            track = follower.nothing(len(keys)) if track.sketch is None else track
            self._keep(side, merged(track, rows, follower.begin(own)))

    def _keep(self, side: str, track: Track) -> None:
        for name, tensor in track._asdict().items():
            setattr(self, f"{side}_{name}", tensor)

    def _cut(self, left: int) -> None:
        if self.coded:
            raise UnsupportedError(
                f"crop: {self.seen - left} tokens are to be taken back, and bases have followed them. Call activate_past_recording() "
                "before the tokens that may be taken back, or build the cache anew from the shorter text."
            )
        super()._cut(left)

    def reset(self) -> None:
        super().reset()
        self._followers = None
