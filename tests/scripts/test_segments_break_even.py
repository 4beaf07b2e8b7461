"""How often a segment must come again to pay."""

from __future__ import annotations

import math

import pytest

from hf_kvcaches.errors import ConfigError
from tests import tiny
from tests.scripts.running import import_script

script = import_script("_segments_break_even")


def test_break_even_is_the_cost_of_storing_over_what_a_reuse_saves():
    assert script.break_even(storing=3.0, reusing=0.5, computing=2.0) == 2.0
    assert script.break_even(storing=0.0, reusing=0.5, computing=2.0) == 0.0
    assert script.break_even(storing=1.0, reusing=2.0, computing=2.0) == math.inf


def test_break_even_is_measured_for_each_length():
    model = tiny.llama()
    rows = script.measure_break_even(model, None, tiny.ids(1, 120)[0].tolist(), lengths=(20, 40), repeats=2)
    assert [row.tokens for row in rows] == [20, 40]
    for row in rows:
        assert min(row.storing, row.reusing, row.computing) > 0
        assert row.times == script.break_even(row.storing, row.reusing, row.computing)
    with pytest.raises(ConfigError, match="at least 120 tokens"):
        script.measure_break_even(model, None, tiny.ids(1, 119)[0].tolist(), lengths=(20, 40), repeats=2)
