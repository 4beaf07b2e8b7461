"""`SlotProjector`: a linear map, slot by slot, from the summary of one prompt to that of a similar one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError, require_choice, whole_number
from hf_kvcaches.warmstart.paper.slots import Slots

Structure = Literal["shared", "per_head", "block_diagonal"]
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class LayerReport:
    """The cross-validation of one layer: squared errors on held-out targets, as a share of their sum of squares."""

    layer: int
    kept: bool  # whether the fitted map is used; otherwise the identity is
    identity_error: float  # of the source's slots, the mean of keys and values
    fitted_error: float  # of a map that was fitted to the other pairs


@dataclass(frozen=True, eq=False)
class SlotProjector:
    """For each layer a matrix over the slots, learned from pairs of prompts, or the identity where it does not help.

    "CP-KVP", section 2.3: ridge regression from the slots of one prompt to those of another, with keys relative to the prompts' ends.
    Positions and counts stay the source's.

    **Departs from the paper**: the regulariser is `|M - I|^2` and not `|M|^2`. Keys and values have the same weight in the fit, and gamma
    is a share of the mean square of a slot. A map that does not improve held-out pairs is dropped.

    **What to expect**: slots come closer, and predictions don't (docs/benchmarks/warmstart.md).

    Args:
        maps: For each layer (slots, slots) or, for each head, (kv_heads, slots, slots), float32; None for the identity.
        reports: The cross-validation of each layer.
    """

    maps: tuple[torch.Tensor | None, ...]
    reports: tuple[LayerReport, ...] = ()

    @classmethod
    def fit(
        cls,
        pairs: Iterable[tuple[Slots, Slots]],
        geometries: Sequence[RotaryGeometry],
        *,
        structure: Structure = "shared",
        gamma: float = 1e-3,
        folds: int = 5,
        blocks: int = 4,
    ) -> SlotProjector:
        """Fit maps to pairs.

        Args:
            pairs: (source, target), all with the same number of slots. At least two, since one is held out.
            geometries: How each layer rotates.
            structure: One matrix a layer, for all heads and channels ("shared"); one for each key head ("per_head"); or one that only
                mixes slots of the same block ("block_diagonal").
            gamma: The weight of the distance from the identity, above 0, in units of one slot's mean square over all pairs.
            folds: Folds of the cross-validation. Pair i is held out in fold `i % folds`: put similar pairs `folds` apart.
            blocks: How many blocks of slots, for "block_diagonal".
        """
        require_choice("structure", structure, get_args(Structure))
        if not gamma > 0:
            raise ConfigError.of("gamma", "a number above 0", gamma)
        folds, blocks = whole_number("folds", folds, 2), whole_number("blocks", blocks, 1)
        pairs = list(pairs)
        if len(pairs) < 2:
            raise ConfigError.of("pairs", "at least two, because one is held out", len(pairs))
        shapes = {tuple(layer.keys.shape[:2] for layer in slots.layers) for pair in pairs for slots in pair}
        if len(shapes) > 1:
            raise ConfigError.of("pairs", "as many layers, heads and slots in all sources and targets", shapes)
        slots = pairs[0][0].layers[0].keys.shape[1]
        block = torch.arange(slots) * (min(blocks, slots) if structure == "block_diagonal" else 1) // slots
        allowed = block == block[:, None]  # which slots may be mixed
        fits = []
        for layer, geometry in enumerate(geometries):
            sources, targets = _states(pairs, layer, geometry)
            fits.append(_fit_layer(layer, sources, targets, allowed, structure == "per_head", gamma, folds))
        return cls(tuple(mixing if report.kept else None for mixing, report in fits), tuple(report for _, report in fits))

    def apply(self, slots: Slots, length: int, geometries: Sequence[RotaryGeometry]) -> Slots:
        """Map a prompt's slots to those of a similar one of `length` tokens, in a model that rotates by `geometries`."""
        layers = []
        for index, (layer, mixing) in enumerate(zip(slots.layers, self.maps, strict=True)):
            if mixing is not None:
                if layer.keys.shape[1] != mixing.shape[-1]:
                    hint = "Slots of a prompt too short to fill them can't be projected."
                    raise ConfigError.of("slots", f"{mixing.shape[-1]} slots in layer {index}, as in the fit", layer.keys.shape[1], hint)
                keys, values = ((mixing.to(states.device) @ states.float()).to(states.dtype) for states in (layer.keys, layer.values))
                layer = layer._replace(keys=keys, values=values)
            layers.append(layer)
        # The map mixes slots and the rotation mixes the channels of a key, so their order makes no difference.
        return Slots(layers, slots.length).shifted(length - slots.length, geometries)


def _states(pairs: Sequence[tuple[Slots, Slots]], layer: int, geometry: RotaryGeometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sources and targets, (pairs, kv_heads, slots, channels) in float64: keys relative to the prompts' ends, beside values."""
    sides = []
    for prompts in zip(*pairs, strict=True):
        keys = [geometry.shift(prompt.layers[layer].keys.double()[None], -prompt.length)[0] for prompt in prompts]
        sides.append((torch.stack(keys), torch.stack([prompt.layers[layer].values.double() for prompt in prompts])))
    # Keys may be several times as large as values; both get the same weight.
    weights = [target.norm().clamp_min(_TINY) for target in sides[1]]
    sources, targets = (torch.cat([states / weight for states, weight in zip(side, weights, strict=True)], -1) for side in sides)
    return sources, targets


def _fit_layer(
    layer: int, sources: torch.Tensor, targets: torch.Tensor, allowed: torch.Tensor, per_head: bool, gamma: float, folds: int
) -> tuple[torch.Tensor, LayerReport]:
    grams, crosses = sources @ sources.mT, (targets - sources) @ sources.mT  # [pairs, kv_heads, slots, slots]
    if not per_head:
        grams, crosses = grams.sum(1, keepdim=True), crosses.sum(1, keepdim=True)
    fold, error = torch.arange(len(sources)) % folds, 0.0
    for held_out in (fold == index for index in range(folds)):
        change = _change(grams[~held_out].sum(0), crosses[~held_out].sum(0), allowed, gamma)
        error += float((targets - sources - change @ sources)[held_out].square().sum())
    identity = float((targets - sources).square().sum())
    change = _change(grams.sum(0), crosses.sum(0), allowed, gamma)
    mixing = (torch.eye(len(allowed), dtype=change.dtype, device=change.device) + change).to("cpu", torch.float32)
    return (mixing if per_head else mixing[0]), LayerReport(layer, error < identity, identity / 2, error / 2)


def _change(grams: torch.Tensor, crosses: torch.Tensor, allowed: torch.Tensor, gamma: float) -> torch.Tensor:
    """Solve the ridge regression for M - I, (heads, slots, slots), where a slot is a mix of those that are `allowed`."""
    scale = grams.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(_TINY)
    damping = gamma * scale[:, None, None] * torch.eye(len(allowed), dtype=grams.dtype, device=grams.device)
    # Masking both sides solves each block by itself.
    allowed = allowed.to(grams.device)
    return torch.linalg.solve((grams + damping) * allowed, (crosses * allowed).mT).mT
