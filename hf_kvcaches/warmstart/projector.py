"""`SlotProjector`: a linear map, slot by slot, from the summary of one prompt to that of a similar one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, ConfigError, require_choice, whole_number
from hf_kvcaches.stores.reading import checked_layers, not_finite
from hf_kvcaches.warmstart.slots import LayerSlots, Slots, require_layers, turned

Structure = Literal["shared", "per_head", "block_diagonal", "identity"]


@dataclass(frozen=True)
class LayerReport:
    """What cross-validation found out about one layer.

    Args:
        layer: Its index.
        kept: Whether the fitted map is used; the identity is where this is False.
        identity_error: What remains of held-out targets when the source's slots are taken for them: the sum of squared differences, as a
            share of the sum of squares, the mean of that for keys and that for values.
        fitted_error: Likewise with a map that was fitted to the other pairs.
    """

    layer: int
    kept: bool
    identity_error: float
    fitted_error: float


class _Sums(NamedTuple):
    """What a fit needs of pairs of source slots S and target slots T, (2, folds, kv_heads, ...); keys first, then values. float64.

    Args:
        sources: S S', (..., slots, slots).
        crosses: (T - S) S', (..., slots, slots).
        changes: |T - S|^2, (...).
        targets: |T|^2, (...).
    """

    sources: torch.Tensor
    crosses: torch.Tensor
    changes: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, eq=False)
class SlotProjector:
    """For each layer a matrix over the slots, learned from pairs of prompts, or the identity where it would do no good.

    "CP-KVP", section 2.3: ridge regression from the slots of one prompt to those of another, with keys seen from the prompts' ends.

    **Departs from the paper**: what is kept small is `|M - I|^2` and not `|M|^2`: a prompt's own slots are the better guess when pairs
    say little. Keys and values weigh the same in the fit, whatever their sizes. Gamma is a share of the mean square of a slot. A map that
    does not make held-out pairs better is thrown away (`report`).

    **What to expect**: squared errors of slots are not divergences. On the testbed, between documents that differ in their preambles, maps
    fitted to 24 pairs bring slots closer, and predictions by means (the paper's layout) hardly; where slots are exact tokens, predictions
    get worse (0.008 to 0.02, from less than 0.0001 with the source's own slots).

    Positions and counts stay the source's.

    Args:
        maps: For each layer (slots, slots) or, with the structure "per_head", (kv_heads, slots, slots), float32; None for the identity.
        structure: What the maps share: "shared", "per_head", "block_diagonal" or "identity".
        reports: What cross-validation found, for each layer; nothing with the structure "identity".
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
        """Learns from pairs, which are looked at once and not kept.

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
        for name, value, least in (("folds", folds, 2), ("blocks", blocks, 1)):
            whole_number(name, value, least)
        if structure == "identity":
            return cls((None,) * len(geometries), structure)
        maps, reports = [], []
        for layer, sums in enumerate(_collect(pairs, geometries, folds)):
            fitted, report = _fit_layer(layer, sums, structure, gamma, blocks)
            maps.append(fitted if report.kept else None)
            reports.append(report)
        return cls(tuple(maps), structure, tuple(reports))

    def apply(self, slots: Slots, length: int, geometries: Sequence[RotaryGeometry]) -> Slots:
        """A prompt's slots, turned into those of a similar one.

        The map mixes slots and the turn mixes the channels of a key, so the order of the two makes no difference.

        Args:
            slots: The source's.
            length: Tokens of the target.
            geometries: How each layer rotates.
        """
        require_layers("slots", slots.keys, len(self.maps))
        layers: list[LayerSlots] = []
        for index, (own, mixing) in enumerate(zip(slots.layers(), self.maps, strict=True)):
            if mixing is not None:
                if own.keys.shape[1] != mixing.shape[-1]:
                    hint = "Slots of a prompt too short to fill them can't be projected."
                    raise ConfigError.of("slots", f"{mixing.shape[-1]} slots in layer {index}, as in the fit", own.keys.shape[1], hint)
                on_device = mixing.to(own.keys.device)
                own = own._replace(**{name: (on_device @ getattr(own, name).float()).to(own.keys.dtype) for name in ("keys", "values")})
            layers.append(own)
        return Slots.from_layers(layers, slots.length).shifted(length - slots.length, geometries)

    def report(self) -> str:
        """What cross-validation found: a line for each layer."""
        if not self.reports:
            return "No map was fitted: slots are taken as they are."
        lines = ["layer  identity  fitted  used"]
        for each in self.reports:
            used = self.structure if each.kept else "identity: the map does not help on held-out pairs"
            lines.append(f"{each.layer:5d}  {each.identity_error:8.4f}  {each.fitted_error:6.4f}  {used}")
        return "\n".join(lines)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The maps by name, for storing."""
        return {f"maps.{layer}": each for layer, each in enumerate(self.maps) if each is not None}

    def metadata(self) -> dict[str, Any]:
        """All else, as JSON can hold it."""
        return {"layers": len(self.maps), "structure": self.structure, "reports": [asdict(each) for each in self.reports]}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> SlotProjector:
        """A projector from what `tensors` and `metadata` gave.

        Args:
            tensors: The maps by name.
            metadata: All else.
        """
        try:
            maps = tuple(tensors.get(f"maps.{layer}") for layer in range(checked_layers(metadata["layers"])))
            reports = tuple(LayerReport(**each) for each in metadata["reports"])
            structure = metadata["structure"]
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"The stored projector makes no sense: {error!r}.") from error
        if name := not_finite(tensors):
            raise ArtifactError(f"The stored projector makes no sense: {name!r} has infinities or NaN.")
        if structure not in get_args(Structure) or sum(each is not None for each in maps) != len(tensors):
            raise ArtifactError(f"The stored projector makes no sense: {structure!r} with {sorted(tensors)[:10]}.")
        if any(each.ndim != (3 if structure == "per_head" else 2) or each.shape[-1] != each.shape[-2] for each in tensors.values()):
            raise ArtifactError(f"The stored projector has maps of the shapes {[tuple(each.shape) for each in tensors.values()][:10]}.")
        return cls(maps, structure, reports)


def _collect(pairs: Iterable[tuple[Slots, Slots]], geometries: Sequence[RotaryGeometry], folds: int) -> list[_Sums]:
    sums: list[_Sums] = []
    count = 0
    for source, target in pairs:
        for name, each in (("source", source), ("target", target)):
            require_layers(f"pairs[{count}], {name}", each.keys, len(geometries))
        for layer, geometry in enumerate(geometries):
            seen = [(turned(each.keys[layer].double(), -each.length, geometry), each.values[layer].double()) for each in (source, target)]
            if seen[0][0].shape != seen[1][0].shape or (count and seen[0][0].shape[:2] != sums[layer].sources.shape[2:4]):
                shapes = tuple(tuple(keys.shape) for keys, _ in seen)
                raise ConfigError.of(f"pairs[{count}]", "as many heads and slots in all sources and targets", shapes)
            if not count:
                sums.append(_empty(seen[0][0], folds))
            for part, (own, wanted) in enumerate(zip(*seen, strict=True)):
                change, place = wanted - own, (part, count % folds)
                sums[layer].sources[place] += own @ own.mT
                sums[layer].crosses[place] += change @ own.mT
                sums[layer].changes[place] += change.square().sum((-2, -1))
                sums[layer].targets[place] += wanted.square().sum((-2, -1))
        count += 1
    if count < 2:
        raise ConfigError.of("pairs", "at least two, for one is held out", count)
    return sums


def _empty(keys: torch.Tensor, folds: int) -> _Sums:
    heads, slots = keys.shape[:2]
    square, plain = (2, folds, heads, slots, slots), (2, folds, heads)
    return _Sums(*(torch.zeros(shape, dtype=torch.float64, device=keys.device) for shape in (square, square, plain, plain)))


def _fit_layer(layer: int, sums: _Sums, structure: Structure, gamma: float, blocks: int) -> tuple[torch.Tensor, LayerReport]:
    # Keys are several times as large as values, or the other way round, for no reason of interest here.
    whole = sums.targets.sum((1, 2)).clamp_min(torch.finfo(torch.float64).tiny)
    sums = _Sums(*(part / whole.view(2, *[1] * (part.ndim - 1)) for part in sums))
    sources, crosses = sums.sources.sum(0), sums.crosses.sum(0)
    if structure != "per_head":
        sources, crosses = sources.sum(1, keepdim=True), crosses.sum(1, keepdim=True)
    slots = sources.shape[-1]
    block = torch.arange(slots, device=sources.device) * (min(blocks, slots) if structure == "block_diagonal" else 1) // slots
    error = 0.0
    for fold in range(sources.shape[0]):
        # Folds without pairs hold nothing out, and change nothing.
        change = _change(sources.sum(0) - sources[fold], crosses.sum(0) - crosses[fold], block, gamma)
        # |(I + D) S - T|^2 = |D S|^2 - 2 <D S, T - S> + |T - S|^2.
        error += float((change @ sources[fold] * change).sum() - 2 * (change * crosses[fold]).sum() + sums.changes[:, fold].sum())
    identity = float(sums.changes.sum())
    change = _change(sources.sum(0), crosses.sum(0), block, gamma)
    fitted = (torch.eye(slots, dtype=change.dtype, device=change.device) + change).to("cpu", torch.float32)
    report = LayerReport(layer, error < identity, identity / 2, error / 2)
    return (fitted if structure == "per_head" else fitted[0]), report


def _change(sources: torch.Tensor, crosses: torch.Tensor, block: torch.Tensor, gamma: float) -> torch.Tensor:
    """M - I, (heads, slots, slots), of the ridge regression.

    Args:
        sources: S S' over all pairs, (heads, slots, slots).
        crosses: (T - S) S'.
        block: For each slot the block it belongs to, (slots,): a slot is made of those of its block.
    """
    scale = sources.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
    damping = gamma * scale[:, None, None] * torch.eye(len(block), dtype=sources.dtype, device=sources.device)
    change = torch.zeros_like(crosses)
    for index in range(int(block[-1]) + 1):
        own = (block == index).nonzero()[:, 0]
        rows, columns = own[:, None], own
        solved = torch.linalg.solve((sources + damping)[:, rows, columns], crosses[:, rows, columns].mT)
        change[:, rows, columns] = solved.mT
    return change
