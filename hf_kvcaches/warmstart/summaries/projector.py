"""`SlotProjector`: a linear map, slot by slot, from the summary of one prompt to that of a similar one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, ConfigError, require_choice, whole_number
from hf_kvcaches.stores.reading import checked_layers, not_finite
from hf_kvcaches.warmstart.summaries.slots import LayerSlots, Slots, require_layers, rotated

Structure = Literal["shared", "per_head", "block_diagonal", "identity"]
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class LayerReport:
    """The cross-validation of one layer.

    Args:
        layer: Its index.
        kept: Whether the fitted map is used; otherwise the identity is.
        identity_error: Squared error of the source's slots on held-out targets, as a share of the targets' sum of squares; the mean for
            keys and values.
        fitted_error: The same of a map that was fitted to the other pairs.
    """

    layer: int
    kept: bool
    identity_error: float
    fitted_error: float


class _Sums(NamedTuple):
    """Sums over pairs of source slots S and target slots T, (2, folds, kv_heads, ...); keys first, then values. float64."""

    sources: torch.Tensor  # S S', (..., slots, slots)
    crosses: torch.Tensor  # (T - S) S', (..., slots, slots)
    changes: torch.Tensor  # |T - S|^2, (...)
    targets: torch.Tensor  # |T|^2, (...)


@dataclass(frozen=True, eq=False)
class SlotProjector:
    """For each layer a matrix over the slots, learned from pairs of prompts, or the identity where it would do no good.

    "CP-KVP", section 2.3: ridge regression from the slots of one prompt to those of another, with keys relative to the prompts' ends.
    Positions and counts stay the source's.

    **Departs from the paper**: the regulariser is `|M - I|^2` and not `|M|^2`. Keys and values have the same weight in the fit, and gamma
    is a share of the mean square of a slot. A map that does not improve held-out pairs is dropped (`report`).

    **What to expect**: squared errors of slots are not divergences. On the testbed, between documents that differ in their preambles, maps
    fitted to 24 pairs bring slots closer, and predictions by means (the paper's layout) hardly; where slots are exact tokens, predictions
    get worse (0.008 to 0.02, from less than 0.0001 with the source's slots).

    Args:
        maps: For each layer (slots, slots) or, with the structure "per_head", (kv_heads, slots, slots), float32; None for the identity.
        structure: What the maps share: "shared", "per_head", "block_diagonal" or "identity".
        reports: The cross-validation of each layer; nothing with the structure "identity".
    """

    maps: tuple[torch.Tensor | None, ...]
    structure: Structure
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
        """Fit maps to pairs, which are read once and not kept.

        Args:
            pairs: (source, target), all with the same number of slots. At least two, for one has to be held out.
            geometries: How each layer rotates.
            structure: One matrix a layer, for all heads and channels ("shared"); one for each key head ("per_head"); one that only mixes
                slots of the same block ("block_diagonal"); or none ("identity").
            gamma: The weight of staying with the identity, above 0; 1 is as much as one slot's mean square over all pairs.
            folds: Of the cross-validation. Pair i is held out in fold `i % folds`: put similar pairs `folds` apart.
            blocks: How many blocks of slots, for "block_diagonal".
        """
        require_choice("structure", structure, get_args(Structure))
        if not gamma > 0:
            raise ConfigError.of("gamma", "a number above 0", gamma)
        folds, blocks = whole_number("folds", folds, 2), whole_number("blocks", blocks, 1)
        if structure == "identity":
            return cls((None,) * len(geometries), structure)
        fits = [_fit_layer(layer, sums, structure, gamma, blocks) for layer, sums in enumerate(_collect(pairs, geometries, folds))]
        return cls(tuple(mixing if report.kept else None for mixing, report in fits), structure, tuple(report for _, report in fits))

    def apply(self, slots: Slots, length: int, geometries: Sequence[RotaryGeometry]) -> Slots:
        """Map a prompt's slots to those of a similar one of `length` tokens, in a model that rotates by `geometries`."""
        require_layers("slots", slots.layers, len(self.maps))
        layers: list[LayerSlots] = []
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

    def report(self) -> str:
        """Return the cross-validation as text: a line for each layer."""
        if not self.reports:
            return "No map was fitted: slots are taken as they are."
        lines = ["layer  identity  fitted  used"]
        for layer in self.reports:
            used = self.structure if layer.kept else "identity: the map does not help on held-out pairs"
            lines.append(f"{layer.layer:5d}  {layer.identity_error:8.4f}  {layer.fitted_error:6.4f}  {used}")
        return "\n".join(lines)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the maps by name, for storing."""
        return {f"maps.{layer}": mixing for layer, mixing in enumerate(self.maps) if mixing is not None}

    def metadata(self) -> dict[str, Any]:
        """Return all else, as JSON can hold it."""
        return {"layers": len(self.maps), "structure": self.structure, "reports": [asdict(layer) for layer in self.reports]}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> SlotProjector:
        """Restore what `tensors` and `metadata` returned."""
        try:
            maps = tuple(tensors.get(f"maps.{layer}") for layer in range(checked_layers(metadata["layers"])))
            reports = tuple(LayerReport(**layer) for layer in metadata["reports"])
            structure = metadata["structure"]
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"The stored projector makes no sense: {error!r}.") from error
        if name := not_finite(tensors):
            raise ArtifactError(f"The stored projector makes no sense: {name!r} has infinities or NaN.")
        if structure not in get_args(Structure) or sum(mixing is not None for mixing in maps) != len(tensors):
            raise ArtifactError(f"The stored projector makes no sense: {structure!r} with {sorted(tensors)[:10]}.")
        shapes = [tuple(mixing.shape) for mixing in tensors.values()]
        if any(len(shape) != (3 if structure == "per_head" else 2) or shape[-1] != shape[-2] for shape in shapes):
            raise ArtifactError(f"The stored projector has maps of the shapes {shapes[:10]}.")
        return cls(maps, structure, reports)


def _collect(pairs: Iterable[tuple[Slots, Slots]], geometries: Sequence[RotaryGeometry], folds: int) -> list[_Sums]:
    sums: list[_Sums] = []
    count = 0
    for source, target in pairs:
        for name, slots in (("source", source), ("target", target)):
            require_layers(f"pairs[{count}], {name}", slots.layers, len(geometries))
        for layer, geometry in enumerate(geometries):
            before, after = (_states(slots, layer, geometry) for slots in (source, target))
            heads, size = before[0].shape[:2]
            if not count:
                shapes = ((2, folds, heads, size, size),) * 2 + ((2, folds, heads),) * 2
                sums.append(_Sums(*(torch.zeros(shape, dtype=torch.float64, device=before[0].device) for shape in shapes)))
            if before[0].shape != after[0].shape or (heads, size) != sums[layer].sources.shape[2:4]:
                got = (tuple(before[0].shape), tuple(after[0].shape))
                raise ConfigError.of(f"pairs[{count}]", "as many heads and slots in all sources and targets", got)
            for index, (states, goal) in enumerate(zip(before, after, strict=True)):
                change, fold = goal - states, (index, count % folds)
                sums[layer].sources[fold] += states @ states.mT
                sums[layer].crosses[fold] += change @ states.mT
                sums[layer].changes[fold] += change.square().sum((-2, -1))
                sums[layer].targets[fold] += goal.square().sum((-2, -1))
        count += 1
    if count < 2:
        raise ConfigError.of("pairs", "at least two, for one is held out", count)
    return sums


def _states(slots: Slots, layer: int, geometry: RotaryGeometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's keys, relative to the prompt's end, and values."""
    keys, values, *_ = slots.layers[layer]
    return rotated(keys.double(), -slots.length, geometry), values.double()


def _fit_layer(layer: int, sums: _Sums, structure: Structure, gamma: float, blocks: int) -> tuple[torch.Tensor, LayerReport]:
    # Keys may be several times as large as values; both get the same weight.
    whole = sums.targets.sum((1, 2)).clamp_min(_TINY)
    sums = _Sums(*(tensor / whole.view(2, *[1] * (tensor.ndim - 1)) for tensor in sums))
    sources, crosses = sums.sources.sum(0), sums.crosses.sum(0)
    if structure != "per_head":
        sources, crosses = sources.sum(1, keepdim=True), crosses.sum(1, keepdim=True)
    slots = sources.shape[-1]
    block = torch.arange(slots, device=sources.device) * (min(blocks, slots) if structure == "block_diagonal" else 1) // slots
    error = 0.0
    for fold in range(sources.shape[0]):
        change = _change(sources.sum(0) - sources[fold], crosses.sum(0) - crosses[fold], block, gamma)
        # |(I + D) S - T|^2 = |D S|^2 - 2 <D S, T - S> + |T - S|^2.
        error += float((change @ sources[fold] * change).sum() - 2 * (change * crosses[fold]).sum() + sums.changes[:, fold].sum())
    identity = float(sums.changes.sum())
    change = _change(sources.sum(0), crosses.sum(0), block, gamma)
    mixing = (torch.eye(slots, dtype=change.dtype, device=change.device) + change).to("cpu", torch.float32)
    return (mixing if structure == "per_head" else mixing[0]), LayerReport(layer, error < identity, identity / 2, error / 2)


def _change(sources: torch.Tensor, crosses: torch.Tensor, block: torch.Tensor, gamma: float) -> torch.Tensor:
    """Solve the ridge regression for M - I, (heads, slots, slots), where a slot is a mix of those of its `block`, (slots,)."""
    scale = sources.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(_TINY)
    damping = gamma * scale[:, None, None] * torch.eye(len(block), dtype=sources.dtype, device=sources.device)
    change = torch.zeros_like(crosses)
    for index in range(int(block[-1]) + 1):
        columns = (block == index).nonzero()[:, 0]
        rows = columns[:, None]
        change[:, rows, columns] = torch.linalg.solve((sources + damping)[:, rows, columns], crosses[:, rows, columns].mT).mT
    return change
