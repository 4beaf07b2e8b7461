"""The map from one prompt's slots to a similar one's, against an explicit regression."""

from __future__ import annotations

import pytest
import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.warmstart.paper.maps import SlotProjector
from hf_kvcaches.warmstart.paper.slots import LayerSlots, Slots

GEOMETRY = RotaryGeometry(1e4 ** -(torch.arange(4, dtype=torch.float64) / 4), 8)
WHERE = [GEOMETRY, GEOMETRY]
HEADS, SLOTS = 2, 6

Pairs = list[tuple[Slots, Slots]]


def draw(generator: torch.Generator, length: int, layers: int = 2) -> Slots:
    made = []
    for _ in range(layers):
        # Keys larger than values, as in real models, so that it matters who weighs what.
        keys, values = (size * torch.randn(HEADS, SLOTS, 8, generator=generator) for size in (4.0, 0.5))
        positions = torch.rand(HEADS, SLOTS, generator=generator).sort(-1).values * (length - 1)
        made.append(LayerSlots(keys, values, positions, torch.ones(HEADS, SLOTS)))
    return Slots(made, length)


def mixed(slots: Slots, maps: list[torch.Tensor], length: int) -> Slots:
    layers = [own._replace(keys=mixing @ own.keys, values=mixing @ own.values) for own, mixing in zip(slots.layers, maps, strict=True)]
    return Slots(layers, slots.length).shifted(length - slots.length, WHERE)


def pairs_of(maps: list[torch.Tensor], count: int = 12, noise: float = 0.0) -> Pairs:
    """Targets made of their sources by known maps, at other lengths."""
    generator = torch.Generator().manual_seed(4)
    made = []
    for index in range(count):
        source = draw(generator, 30 + index)
        target = mixed(source, maps, 70 - 2 * index)
        other = draw(generator, target.length)
        layers = [
            own._replace(keys=own.keys + noise * extra.keys, values=own.values + noise * extra.values)
            for own, extra in zip(target.layers, other.layers, strict=True)
        ]
        made.append((source, Slots(layers, target.length)))
    return made


def structured(structure: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    maps = [torch.eye(SLOTS) + 0.5 * torch.randn(HEADS, SLOTS, SLOTS, generator=generator) for _ in range(2)]
    if structure != "per_head":
        maps = [own[:1].expand(HEADS, -1, -1) for own in maps]
    if structure == "block_diagonal":
        allowed = torch.block_diag(*[torch.ones(2, 2)] * 3)
        maps = [own * allowed for own in maps]
    return maps


def rows(pairs: Pairs, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each pair, source and target (kv_heads, slots, channels), keys seen from the end and parts of equal energy."""
    totals = [sum(float(getattr(target.layers[layer], name).double().square().sum()) for _, target in pairs) for name in ("keys", "values")]
    made = []
    for pair in pairs:
        both = []
        for slots in pair:
            keys = GEOMETRY.shift(slots.layers[layer].keys.double()[None], -slots.length)[0]
            parts = (keys, slots.layers[layer].values.double())
            both.append(torch.cat([part / total**0.5 for part, total in zip(parts, totals, strict=True)], -1))
        made.append((both[0], both[1]))
    return made


def slow_fit(data: list[tuple[torch.Tensor, torch.Tensor]], gamma: float, allowed: torch.Tensor) -> torch.Tensor:
    """M by least squares with the ridge as more equations, one row of M after the other."""
    source = torch.cat([each.movedim(0, 1).flatten(1) for each, _ in data], 1)
    target = torch.cat([each.movedim(0, 1).flatten(1) for _, each in data], 1)
    damping = (gamma * source.square().sum() / SLOTS) ** 0.5
    made = torch.zeros(SLOTS, SLOTS, dtype=torch.float64)
    for row in range(SLOTS):
        own = allowed[row].nonzero()[:, 0]
        equations = torch.cat([source[own].mT, damping * torch.eye(len(own), dtype=torch.float64)])
        wanted = torch.cat([target[row], damping * (own == row).double()])
        made[row, own] = torch.linalg.lstsq(equations, wanted[:, None]).solution[:, 0]
    return made


@pytest.mark.parametrize("structure", ["shared", "per_head", "block_diagonal"])
def test_maps_are_those_of_an_explicit_regression_and_errors_those_of_held_out_pairs(structure: str) -> None:
    gamma, folds = 0.05, 3
    pairs = pairs_of(structured(structure), noise=0.3)
    projector = SlotProjector.fit(pairs, WHERE, structure=structure, gamma=gamma, folds=folds, blocks=3)
    allowed = torch.block_diag(*[torch.ones(2, 2)] * 3) if structure == "block_diagonal" else torch.ones(SLOTS, SLOTS)
    for layer in range(2):
        data = rows(pairs, layer)
        cases = [slice(None)] if structure != "per_head" else [slice(head, head + 1) for head in range(HEADS)]
        cut = [[(source[case], target[case]) for source, target in data] for case in cases]
        slow = [slow_fit(each, gamma, allowed) for each in cut]
        mine = projector.maps[layer]
        assert mine is not None
        torch.testing.assert_close(mine.double().view(len(cases), SLOTS, SLOTS), torch.stack(slow), atol=1e-5, rtol=1e-5)
        held_out = identity = 0.0
        for each in cut:
            for fold in range(folds):
                mixing = slow_fit([pair for index, pair in enumerate(each) if index % folds != fold], gamma, allowed)
                for source, target in each[fold::folds]:
                    held_out += float((mixing @ source - target).square().sum()) / 2
                    identity += float((source - target).square().sum()) / 2
        report = projector.reports[layer]
        assert (report.layer, report.kept) == (layer, True)
        assert report.fitted_error == pytest.approx(held_out, rel=1e-6)
        assert report.identity_error == pytest.approx(identity, rel=1e-6)


@pytest.mark.parametrize("structure", ["shared", "per_head", "block_diagonal"])
def test_a_map_that_made_all_targets_is_found_and_projects_a_new_source(structure: str) -> None:
    maps = structured(structure)
    projector = SlotProjector.fit(pairs_of(maps), WHERE, structure=structure, gamma=1e-9, blocks=3)
    source = draw(torch.Generator().manual_seed(77), 44)
    projected, true = projector.apply(source, 90, WHERE), mixed(source, maps, 90)
    assert projected.length == 90
    for mine, theirs, own in zip(projected.layers, true.layers, source.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.positions, own.positions + 46)
        torch.testing.assert_close(mine.counts, own.counts)


def test_a_map_that_does_not_help_held_out_pairs_is_the_identity_and_the_reports_say_so() -> None:
    eye = torch.eye(SLOTS).expand(HEADS, -1, -1)
    pairs = pairs_of([structured("shared")[0], eye], count=5, noise=0.4)
    projector = SlotProjector.fit(pairs, WHERE, structure="shared")
    assert projector.maps[0] is not None
    assert projector.maps[1] is None
    assert [each.kept for each in projector.reports] == [True, False]
    assert projector.reports[1].identity_error < projector.reports[1].fitted_error
    source = pairs[0][0]
    assert torch.equal(projector.apply(source, 55, WHERE).layers[1].keys, source.shifted(55 - source.length, WHERE).layers[1].keys)


def test_what_can_not_work_is_refused_by_name() -> None:
    pairs = pairs_of(structured("shared"), count=3)
    with pytest.raises(ConfigError, match="structure"):
        SlotProjector.fit(pairs, WHERE, structure="dense")
    with pytest.raises(ConfigError, match="gamma"):
        SlotProjector.fit(pairs, WHERE, gamma=0)
    with pytest.raises(ConfigError, match="folds"):
        SlotProjector.fit(pairs, WHERE, folds=1)
    with pytest.raises(ConfigError, match="pairs: expected at least two"):
        SlotProjector.fit(pairs[:1], WHERE)
    short = Slots([LayerSlots(*(part[:, :4] for part in own)) for own in pairs[0][0].layers], 30)
    with pytest.raises(ConfigError, match="pairs: expected as many layers, heads and slots"):
        SlotProjector.fit([pairs[0], (short, short)], WHERE)
    with pytest.raises(ConfigError, match="too short"):
        SlotProjector.fit(pairs, WHERE).apply(short, 30, WHERE)
