"""A gate comes back as it was saved, refuses what can't work, and says why a prompt has too little in common."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import SegmentPolicy, WarmStartGate
from hf_kvcaches.errors import ConfigError

SHARES = st.floats(0, 1)


@given(
    gate=st.builds(
        WarmStartGate,
        tau=st.floats(-1, 1),
        reusable=SHARES,
        similarity=SHARES,
        repair=SHARES,
        repair_depth=SHARES,
        encoder=st.none() | st.just("mine"),
        measured=st.just(({"value": 0.5, "kl": 0.1},)),
    )
)
def test_a_gate_comes_back_as_it_was_saved(tmp_path_factory, gate):
    folder = tmp_path_factory.mktemp("gate")
    gate.save_pretrained(folder)
    assert WarmStartGate.from_pretrained(folder) == gate


@given(reused=st.integers(0, 200), share=SHARES)
def test_as_many_tokens_are_enough_as_the_limit_says_and_fewer_are_refused_with_the_share(reused, share):
    refusal = WarmStartGate(reusable=share).refusal(reused, 200)
    assert (refusal is None) == (reused >= share * 200)
    assert refusal is None or f"below {share:.0%}" in str(refusal)


@pytest.mark.parametrize("name", ["tau", "reusable", "similarity", "repair", "repair_depth"])
@pytest.mark.parametrize("value", [-1.5, 1.5, math.nan, "0.5", None, True])
def test_limits_that_can_not_work_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        WarmStartGate(**{name: value})


def test_spans_are_admitted_by_the_policy_of_segments():
    assert WarmStartGate(similarity=0.3, repair=0.2, repair_depth=0.5).policy == SegmentPolicy(similarity=0.3, repair=0.2, repair_depth=0.5)
