"""The bases of one layer as its cache uses them: by groups of heads with the same ranks, on one device, in one precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_kvcaches.subspace.bases import LayerBases


class Ranks(NamedTuple):
    """How many coefficients a head keeps of a token."""

    keys: int
    values: int


@dataclass(frozen=True, eq=False)
class Grouping:
    """Key heads of a layer by their ranks: those of one group lie in one tensor.

    Args:
        back: For each head its place among the groups' heads, one group after the other; None where these are in order already.
    """

    heads: tuple[tuple[int, ...], ...]
    ranks: tuple[Ranks, ...]
    back: torch.Tensor | None

    @classmethod
    def of(cls, ranks: Sequence[Ranks], device: torch.device) -> Grouping:
        """The groups of heads with these ranks."""
        own = sorted(set(ranks))
        heads = tuple(tuple(head for head, each in enumerate(ranks) if each == one) for one in own)
        order = torch.tensor([head for group in heads for head in group], device=device)
        return cls(heads, tuple(own), None if bool((order.diff() > 0).all()) else order.argsort())


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """The maps of a group of heads.

    Args:
        key_encode: (heads, r_k, d).
        key_decode: (heads, d, r_k), with the head's gamma in it: what it gives is scored as a key.
        value_encode: (heads, r_v, d_v).
        value_decode: (heads, d_v, r_v).
    """

    key_encode: torch.Tensor
    key_decode: torch.Tensor
    value_encode: torch.Tensor
    value_decode: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by name."""
        names = ("key_encode", "key_decode", "value_encode", "value_decode")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """All heads of a layer."""

    grouping: Grouping
    groups: tuple[HeadGroup, ...]

    @classmethod
    def of(cls, bases: LayerBases, dtype: torch.dtype, device: torch.device, even: bool = False) -> LayerMaps:
        """The maps of a layer.

        Args:
            even: Whether all coefficients of a head are to be equally large over the calibration texts, so that one scale fits them all.
        """
        ranks = [Ranks(key.shape[0], value.shape[0]) for key, value in zip(bases.key_encode, bases.value_encode, strict=True)]
        grouping, groups = Grouping.of(ranks, device), []
        for heads in grouping.heads:
            keys = [(bases.key_encode[h], bases.key_decode[h] * bases.gamma[h], bases.key_energies[h]) for h in heads]
            values = [(bases.value_encode[h], bases.value_decode[h], bases.value_energies[h]) for h in heads]
            pairs = [[_scaled(*each) if even else each[:2] for each in side] for side in (keys, values)]
            parts = (torch.stack([pair[way] for pair in side]).to(device, dtype) for side in pairs for way in (0, 1))
            groups.append(HeadGroup(*parts))
        return cls(grouping, tuple(groups))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of all groups by name."""
        return {f"group_{index}.{name}": tensor for index, group in enumerate(self.groups) for name, tensor in group.tensors().items()}


def of_heads(states: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
    """What belongs to a group of heads, without a copy where that is all.

    Args:
        states: (batch, heads, ...).
    """
    return states if len(heads) == states.shape[1] else states[:, list(heads)]


class LayerSource:
    """Where the caches of one model get a layer's maps from: made once for each device and precision."""

    def __init__(self, bases: LayerBases) -> None:
        self.bases = bases
        self.groups = len({(len(key), len(value)) for key, value in zip(bases.key_encode, bases.value_encode, strict=True)})
        self._made: dict[tuple[torch.dtype, torch.device, bool], LayerMaps] = {}

    def on(self, dtype: torch.dtype, device: torch.device, even: bool) -> LayerMaps:
        """The maps there."""
        if (dtype, device, even) not in self._made:
            # A later pass may need gradients, which tensors of the caller's inference mode refuse.
            with torch.inference_mode(False):
                self._made[dtype, device, even] = LayerMaps.of(self.bases, dtype, device, even)
        return self._made[dtype, device, even]

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerSource:
        return self  # nothing in it belongs to a sequence

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}


def _scaled(encode: torch.Tensor, decode: torch.Tensor, energies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both maps, with coefficients as large as the first one."""
    kept = energies[: encode.shape[0]].double()
    share = kept / kept[:1].clamp(min=torch.finfo(torch.float64).tiny)
    # A direction in which next to nothing was seen stays as it is.
    size = torch.where(share > 1e-12, share, 1.0).sqrt()
    return encode.double() / size[:, None], decode.double() * size
