"""Policies come back as they were saved, refuse what can't work, and have guards that say one thing in both directions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.hub import FILE_NAME
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch
from hf_kvcaches.segments.policy import SegmentPolicy
from tests import tiny

GUARDS = st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(0, 600)), max_size=4).map(lambda pairs: tuple(sorted(pairs)))
POLICIES = st.builds(
    SegmentPolicy,
    guard=GUARDS,
    similarity=st.floats(0, 1),
    probe=st.floats(-1, 1),
    check_layer=st.integers(1, 9),
    repair=st.floats(0, 1),
    repair_by=st.sampled_from(["first", "deviation"]),
    shortest=st.integers(1, 99),
    bound=st.none() | st.floats(0, 9),
    measured=st.sampled_from([(), ({"repair": 0.1, "kl": 0.5, "kept": True}, {"repair": 0.2, "kl": None, "kept": False})]),
)


@given(policy=POLICIES)
def test_a_policy_comes_back_as_it_was_saved(tmp_path_factory: pytest.TempPathFactory, policy: SegmentPolicy) -> None:
    folder = tmp_path_factory.mktemp("policy")
    policy.save_pretrained(folder)
    back = SegmentPolicy.from_pretrained(folder)
    assert back == policy
    assert (back.measured, back.fingerprint) == (policy.measured, None)


def test_a_policy_knows_the_model_that_it_was_made_for_also_with_another_repair(tmp_path) -> None:
    model, policy = tiny.llama(), SegmentPolicy(bound=0.1)
    object.__setattr__(policy, "fingerprint", ModelFingerprint.of(model))
    changed = policy.with_repair(0.5)
    assert (changed.repair, changed.fingerprint, policy.repair) == (0.5, policy.fingerprint, 0.15)
    changed.save_pretrained(tmp_path)
    assert SegmentPolicy.from_pretrained(tmp_path, model=model) == changed
    with pytest.raises(FingerprintMismatch):
        SegmentPolicy.from_pretrained(tmp_path, model=tiny.llama(seed=1))


def test_without_another_repair_a_policy_stays_itself() -> None:
    policy = SegmentPolicy()
    assert policy.with_repair(None) is policy
    assert policy.with_repair(0.0) == replace(policy, repair=0.0)
    with pytest.raises(ConfigError, match=r"^repair: "):
        policy.with_repair(1.5)


def test_lists_are_as_good_as_tuples() -> None:
    policy = SegmentPolicy(guard=[[0.5, 8], [1, 16]], measured=[{"repair": 0.1}])  # type: ignore[arg-type]
    assert policy == SegmentPolicy(guard=((0.5, 8), (1.0, 16)), measured=({"repair": 0.1},))
    assert policy.window(4, 4) == 16


BAD: list[tuple[str, Any]] = [
    *((name, value) for name in ("similarity", "probe", "repair") for value in (-1.5, 1.5, math.nan, math.inf, "0.5", None, True)),
    *((name, value) for name in ("check_layer", "shortest") for value in (0, -1, 1.5, "1", None, True)),
    *(("repair_by", value) for value in ("last", None, 1)),
    *(("bound", value) for value in (-0.1, math.nan, "0.1", True)),
    *(("guard", value) for value in (None, 5, 0.5, "ab", (0.5, 8), ((0.5,),), ((0.5, 8, 9),), (("a", 8),))),
    *(("guard", value) for value in (((0, 8),), ((1.1, 8),), ((math.nan, 8),), ((0.5, -1),), ((0.5, 8.5),), ((0.5, True),))),
    *(("guard", value) for value in (((0.5, None),), ((0.5, 8), (0.25, 8)), ((True, 8),))),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_can_not_work_is_refused_with_a_hint(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: expected .*, got .*\. \S.+\.$"):
        SegmentPolicy(**{name: value})


@given(guard=GUARDS, layers=st.integers(1, 40), same=st.integers(0, 700))
def test_so_many_layers_are_safe_as_have_a_window_that_is_not_longer(guard, layers: int, same: int) -> None:
    policy = SegmentPolicy(guard=guard)
    safe = policy.safe_depth(same, layers)
    assert 0 <= safe <= layers
    windows = [policy.window(depth, layers) for depth in range(layers + 1)]
    for depth, window in enumerate(windows):
        assert (depth <= safe) == (window is not None and window <= same), (depth, safe, window)
    # More layers never need fewer tokens.
    known = [math.inf if window is None else window for window in windows]
    assert known == sorted(known)


def test_the_papers_guards_are_scaled_to_the_depth() -> None:
    policy = SegmentPolicy()
    assert [policy.safe_depth(same, 32) for same in (0, 127, 128, 511, 512, 10**6)] == [0, 0, 1, 1, 8, 8]
    assert [policy.window(depth, 32) for depth in (0, 1, 2, 8, 9, 32)] == [0, 128, 512, 512, None, None]
    # 0.29 * 100 is a little less than 29.
    rounded = SegmentPolicy(guard=((0.29, 5),))
    assert (rounded.safe_depth(5, 100), rounded.window(29, 100)) == (29, 5)


def test_damaged_policies_are_refused(tmp_path) -> None:
    SegmentPolicy().save_pretrained(tmp_path)
    content = (tmp_path / FILE_NAME).read_bytes()
    assert content.count(b": 0.15,") == 1
    (tmp_path / FILE_NAME).write_bytes(content.replace(b": 0.15,", b": 0.95,"))
    with pytest.raises(ArtifactError):
        SegmentPolicy.from_pretrained(tmp_path)


def test_its_card_tells_what_was_measured_or_that_nothing_was() -> None:
    assert "Not calibrated" in SegmentPolicy().describe_calibration()
    text = SegmentPolicy(bound=0.05, measured=({"repair": 0.15, "kl": 0.0123456},)).describe_calibration()
    assert text.splitlines()[2:] == ["| repair | kl |", "|---|---|", "| 0.15 | 0.01235 |"]
    assert "0.05 nats" in text
