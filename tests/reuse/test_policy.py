"""Policies come back as they were saved, refuse what can't work, and admit what they say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.core.files import FILE_NAME
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.errors import ArtifactError, ConfigError, FingerprintMismatch
from hf_kvcaches.reuse.index import Piece, Record, as_ids
from hf_kvcaches.reuse.policy import Admission, Match, SegmentPolicy
from tests import tiny

POLICIES = st.builds(
    SegmentPolicy,
    guard=st.none() | st.integers(0, 600),
    similarity=st.floats(0, 1),
    repair=st.floats(0, 1),
    repair_depth=st.floats(0, 1),
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
    model = tiny.llama()
    policy = SegmentPolicy(bound=0.1, fingerprint=ModelFingerprint.of(model))
    changed = replace(policy, repair=0.5)
    assert (changed.repair, changed.fingerprint, policy.repair) == (0.5, policy.fingerprint, 0.25)
    changed.save_pretrained(tmp_path)
    assert SegmentPolicy.from_pretrained(tmp_path, model=model) == changed
    with pytest.raises(FingerprintMismatch):
        SegmentPolicy.from_pretrained(tmp_path, model=tiny.llama(seed=1))


BAD: list[tuple[str, Any]] = [
    *((name, value) for name in ("similarity", "repair", "repair_depth") for value in (-0.5, 1.5, math.nan, math.inf, "0.5", None, True)),
    *(("shortest", value) for value in (0, -1, 1.5, "1", None, True)),
    *(("bound", value) for value in (-0.1, math.nan, "0.1", True)),
    *(("guard", value) for value in (-1, 0.5, "ab", True, ((0.5, 8),))),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_can_not_work_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: expected .*, got "):
        SegmentPolicy(**{name: value})


def match(before: list[int], stored_before: list[int], tokens: int = 40) -> Match:
    """A match of that many tokens behind some others, which stood behind others when they were stored."""
    ids, context = as_ids([*before, *range(1000, 1000 + tokens), 7]), as_ids(stored_before)
    record = Record("scope", ids[len(before) : -1], "left", "right", len(stored_before), context)
    return Match((Piece(len(before), len(before) + tokens, record, 0),), ids)


def test_a_match_knows_the_text_before_it_here_and_where_it_was_stored() -> None:
    found = match([1, 2, 3, 4], [9, 3, 4])
    assert (found.start, found.stop, len(found), found.same) == (4, 44, 40, 2)
    assert found.before.tolist() == [1, 2, 3, 4]
    assert found.stored_before.tolist() == [9, 3, 4]
    assert found.tokens.tolist() == list(range(1000, 1040))


def test_surroundings_are_as_alike_as_the_shingles_that_they_share() -> None:
    text = list(range(100))
    assert match(text, text).likeness == 1.0
    assert match(text, list(range(500, 600))).likeness == 0.0
    assert 0.2 < match(text, [*range(500, 550), *range(50, 100)]).likeness < 0.6


def test_matches_in_like_surroundings_are_repaired_and_others_say_why_not() -> None:
    text = list(range(100))
    like, unlike = match(text, text), match(text, list(range(500, 600)))
    policy = SegmentPolicy(similarity=0.5, repair=0.1, repair_depth=0.5)
    assert policy.admit(like) == Admission("repaired", 4, 0.5)
    assert policy.admit(unlike) == Admission(reason="Its surroundings have a likeness of 0.00, below 0.5.")
    assert replace(policy, similarity=0.0).admit(unlike).rule == "repaired"


@given(guard=st.integers(0, 130), same=st.integers(0, 120), repair=st.floats(0, 1))
def test_tokens_behind_as_many_equal_ones_as_the_guard_asks_for_are_not_repaired(guard: int, same: int, repair: float) -> None:
    text = list(range(120))
    found = match(text, [*range(500, 620 - same), *text[120 - same :]])
    admission = SegmentPolicy(guard=guard, similarity=0.0, repair=repair).admit(found)
    assert admission.rule == ("guarded" if same >= guard else "repaired")
    assert admission.repair == (0 if same >= guard else min(math.ceil(repair * 40), guard - same))


def test_damaged_policies_are_refused(tmp_path) -> None:
    SegmentPolicy().save_pretrained(tmp_path)
    content = (tmp_path / FILE_NAME).read_bytes()
    assert content.count(b": 0.25,") == 1
    (tmp_path / FILE_NAME).write_bytes(content.replace(b": 0.25,", b": 0.95,"))
    with pytest.raises(ArtifactError):
        SegmentPolicy.from_pretrained(tmp_path)


def test_its_card_tells_what_was_measured_or_that_nothing_was() -> None:
    assert "Not calibrated" in SegmentPolicy().describe_calibration()
    text = SegmentPolicy(bound=0.05, measured=({"repair": 0.15, "kl": 0.0123456},)).describe_calibration()
    assert text.splitlines()[2:] == ["| repair | kl |", "|---|---|", "| 0.15 | 0.01235 |"]
    assert "0.05 nats" in text
