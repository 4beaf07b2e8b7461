"""How many passes over the texts a fit takes, and what it holds."""

from __future__ import annotations

import pytest

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.translate.plan import FitPlan, Widths
from tests import tiny
from tests.translate.models import filled, fitted
from tests.translate.pairs import models

LARGE = Widths(dict.fromkeys(range(32), 2048), dict.fromkeys(range(32), 2048), 4096, 4096)
GIB = 1 << 30


def plan(memory: int | None, lowest=(0,), shared: int = 1) -> FitPlan:
    return FitPlan.of(LARGE, range(32), lowest, shared, memory)


@pytest.mark.parametrize(("memory", "most"), [(12 * GIB, 12 * GIB), (8 * GIB, 8 * GIB), (None, 16 * GIB)])
def test_a_pair_of_eight_billion_parameters_fits_a_memory_in_passes(memory, most):
    own = plan(memory)
    assert own.bytes <= most
    assert [layer for groups in own.passes for group in groups for layer in group.layers] == list(range(1, 32))
    assert (len(own.passes) == 1) == (memory is None)


def test_less_memory_takes_more_passes():
    counts = [len(plan(memory * GIB).passes) for memory in (6, 8, 12, 24)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_a_memory_that_no_group_fits_is_refused_with_what_it_takes():
    with pytest.raises(ConfigError, match=r"memory: expected [\d,]+ bytes or more for these models"):
        plan(GIB)


def test_all_settings_that_are_compared_share_a_pass():
    assert len(plan(None, lowest=(0, 1, 2, 4, 8)).passes) == 1


def test_a_fit_in_several_passes_gives_the_translator_of_one():
    producer, consumer = models()
    ids, texts = tiny.ids(1, 30, seed=7), [tiny.ids(60, seed=number).tolist() for number in range(6)]
    options = {"metric": "loss", "payload": 2.0}
    whole = fitted(producer, consumer, texts, **options)
    widths = Widths(dict.fromkeys(range(4), 32), dict.fromkeys(range(4), 32), 32, 32)
    memory = FitPlan.of(widths, range(4), [0], 1, None).bytes - 8 * 1000
    assert len(FitPlan.of(widths, range(4), [0], 1, memory).passes) > 1
    parted = fitted(producer, consumer, texts, memory=memory, **options)
    for layer, (keys, values) in filled(whole, producer, consumer, ids).items():
        other = filled(parted, producer, consumer, ids)[layer]
        assert float((keys - other[0]).abs().max()) < 1e-3
        assert float((values - other[1]).abs().max()) < 1e-3
