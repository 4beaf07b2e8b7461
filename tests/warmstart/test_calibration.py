"""The gate that calibration chooses keeps its bounds on the pairs, and reuses most of those that do."""

from __future__ import annotations

import pytest
import torch

from hf_kvcaches import WarmStartGate, WarmStartLibrary
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.warmstart.calibration import CLOSED, calibrate_gate, measure_pair
from tests import tiny
from tests.warmstart.warm import OPEN, words

EARLIER = tiny.ids(1, 160, seed=1)


def changed(start: int, stop: int) -> list[int]:
    """The earlier prompt with other tokens from one index to another."""
    return torch.cat([EARLIER[:, :start], tiny.ids(1, stop - start, seed=7), EARLIER[:, stop:]], 1)[0].tolist()


PAIRS = [(EARLIER[0].tolist(), changed(start, start + length)) for start, length in ((20, 5), (60, 20), (30, 70), (100, 10))]
OPTIONS = {"following": 3, "progress": False}


@pytest.fixture(scope="module")
def model():
    return tiny.llama(initializer_range=0.05)


@pytest.mark.parametrize("bound", [0.0, 1e-4, 1e-2, 100.0])
def test_the_bounds_are_kept_and_no_other_setting_saves_more(model, bound):
    gate = calibrate_gate(model, words(), None, PAIRS, bound=bound, worst=2 * bound, **OPTIONS)
    kept = [row for row in gate.measured if row["kept"]]
    assert all(row["kl"] <= bound and row["worst"] <= 2 * bound for row in kept)
    chosen = [row for row in gate.measured if row["chosen"]]
    if gate.reusable == CLOSED:
        assert not kept
    else:
        assert [(row["value"], row["repair"]) for row in chosen] == [(gate.reusable, gate.repair)]
    assert gate.encoder == WarmStartLibrary(model, words()).encoder.name
    assert gate.bound == bound


def test_a_pair_is_measured_as_the_cache_serves_it(model):
    library = WarmStartLibrary(model, words())
    served = measure_pair(library, *PAIRS[0], [OPEN, WarmStartGate(reusable=1.0)], following=3)
    assert served[0] is not None
    reused, diverged = served[0]
    assert 0.5 < reused < 1
    assert diverged > 0
    assert served[1] is None
    assert len(library) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pairs": []}, "pairs: expected at least one"),
        ({"bound": -1}, "bound"),
        ({"worst": "much"}, "worst"),
        ({"library_options": {"location": "memory"}}, "location and max_bytes do not matter"),
    ],
)
def test_bad_arguments_are_refused(model, arguments, message):
    with pytest.raises(ConfigError, match=message):
        calibrate_gate(model, words(), **{"library_options": None, "pairs": PAIRS, **OPTIONS, **arguments})
