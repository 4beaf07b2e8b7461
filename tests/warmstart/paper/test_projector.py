"""The map from one prompt's slots to a similar one's, against an explicit regression."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.reuse.layout import LayerStates
from hf_kvcaches.warmstart.paper.maps import SlotProjector
from hf_kvcaches.warmstart.paper.slots import Slots

GEOMETRY = RotaryGeometry(1e4 ** -(torch.arange(4, dtype=torch.float64) / 4), 8)
WHERE = [GEOMETRY, GEOMETRY]
HEADS, SLOTS = 2, 6

Pairs = list[tuple[Slots, Slots]]


def draw(generator: torch.Generator, length: int) -> Slots:
    # Keys larger than values, as in real models, so that it matters who weighs what.
    layers = [LayerStates(*(size * torch.randn(HEADS, SLOTS, 8, generator=generator) for size in (4.0, 0.5))) for _ in range(2)]
    return Slots(layers, torch.rand(SLOTS, generator=generator).sort().values * (length - 1), length)


def mixed(slots: Slots, maps: list[torch.Tensor], length: int) -> Slots:
    layers = [LayerStates(mixing @ own.keys, mixing @ own.values) for own, mixing in zip(slots.layers, maps, strict=True)]
    return replace(slots, layers=layers).shifted(length - slots.length, WHERE)


def pairs_of(maps: list[torch.Tensor], count: int = 12, noise: float = 0.0) -> Pairs:
    """Targets made of their sources by known maps, at other lengths."""
    generator = torch.Generator().manual_seed(4)
    made = []
    for index in range(count):
        source = draw(generator, 30 + index)
        target = mixed(source, maps, 70 - 2 * index)
        other = draw(generator, target.length)
        layers = [
            LayerStates(own.keys + noise * extra.keys, own.values + noise * extra.values)
            for own, extra in zip(target.layers, other.layers, strict=True)
        ]
        made.append((source, replace(target, layers=layers)))
    return made


def drawn_maps() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.eye(SLOTS) + 0.5 * torch.randn(SLOTS, SLOTS, generator=generator) for _ in range(2)]


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


def slow_fit(data: list[tuple[torch.Tensor, torch.Tensor]], gamma: float) -> torch.Tensor:
    """M by least squares with the ridge as more equations, one row of M after the other."""
    source, target = (torch.cat([pair[side].movedim(0, 1).flatten(1) for pair in data], 1) for side in (0, 1))
    damping = (gamma * source.square().sum() / SLOTS) ** 0.5 * torch.eye(SLOTS, dtype=torch.float64)
    equations = torch.cat([source.mT, damping])
    return torch.stack(
        [torch.linalg.lstsq(equations, torch.cat(both)[:, None]).solution[:, 0] for both in zip(target, damping, strict=True)]
    )


def test_maps_are_those_of_an_explicit_regression_and_errors_those_of_held_out_pairs() -> None:
    gamma, folds = 0.05, 3
    pairs = pairs_of(drawn_maps(), noise=0.3)
    projector = SlotProjector.fit(pairs, WHERE, gamma=gamma, folds=folds)
    for layer in range(2):
        data, found = rows(pairs, layer), projector.maps[layer]
        assert found is not None
        torch.testing.assert_close(found.double(), slow_fit(data, gamma), atol=1e-5, rtol=1e-5)
        held_out = identity = 0.0
        for fold in range(folds):
            mixing = slow_fit([pair for index, pair in enumerate(data) if index % folds != fold], gamma)
            for source, target in data[fold::folds]:
                held_out += float((mixing @ source - target).square().sum()) / 2
                identity += float((source - target).square().sum()) / 2
        report = projector.reports[layer]
        assert (report.layer, report.kept) == (layer, True)
        assert report.fitted_error == pytest.approx(held_out, rel=1e-6)
        assert report.identity_error == pytest.approx(identity, rel=1e-6)


def test_a_map_that_made_all_targets_is_found_and_projects_a_new_source() -> None:
    maps = drawn_maps()
    projector = SlotProjector.fit(pairs_of(maps), WHERE, gamma=1e-9)
    source = draw(torch.Generator().manual_seed(77), 44)
    projected, true = projector.apply(source, 90, WHERE), mixed(source, maps, 90)
    assert projected.length == 90
    torch.testing.assert_close(projected.positions, source.positions + 46)
    for found, expected in zip(projected.layers, true.layers, strict=True):
        torch.testing.assert_close(found.keys, expected.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.values, expected.values, atol=1e-4, rtol=1e-4)


def test_a_map_that_does_not_help_held_out_pairs_is_the_identity_and_the_reports_say_so() -> None:
    pairs = pairs_of([drawn_maps()[0], torch.eye(SLOTS)], count=5, noise=0.4)
    projector = SlotProjector.fit(pairs, WHERE)
    assert projector.maps[0] is not None
    assert projector.maps[1] is None
    assert [each.kept for each in projector.reports] == [True, False]
    assert projector.reports[1].identity_error < projector.reports[1].fitted_error
    source = pairs[0][0]
    assert torch.equal(projector.apply(source, 55, WHERE).layers[1].keys, source.shifted(55 - source.length, WHERE).layers[1].keys)


def test_what_can_not_work_is_refused_by_name() -> None:
    pairs = pairs_of(drawn_maps(), count=3)
    with pytest.raises(ConfigError, match="gamma"):
        SlotProjector.fit(pairs, WHERE, gamma=0)
    with pytest.raises(ConfigError, match="folds"):
        SlotProjector.fit(pairs, WHERE, folds=1)
    with pytest.raises(ConfigError, match="pairs: expected at least two"):
        SlotProjector.fit(pairs[:1], WHERE)
    short = Slots([LayerStates(*(part[:, :4] for part in own)) for own in pairs[0][0].layers], torch.arange(4.0), 30)
    with pytest.raises(ConfigError, match="pairs: expected as many layers, heads and slots"):
        SlotProjector.fit([pairs[0], (short, short)], WHERE)
    with pytest.raises(ConfigError, match="too short"):
        SlotProjector.fit(pairs, WHERE).apply(short, 30, WHERE)
