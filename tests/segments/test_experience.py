"""What probes found is asked before another probe is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import SegmentPolicy, SegmentReuseCache, SegmentStore
from hf_kvcaches.segments import experience
from hf_kvcaches.segments.experience import KNOWN_BY, Experience
from tests import tiny

IDS = np.arange(40, dtype=np.uint32)
FOUND = st.lists(st.tuples(st.floats(0, 1), st.floats(-1, 1)), max_size=6)


def learned(found, scope: str = "a", layer: int = 1) -> Experience:
    known = Experience()
    for similarity, score in found:
        known.learn(scope, layer, IDS, similarity, score)
    return known


def test_a_pass_counts_for_surroundings_that_are_as_alike_and_a_failure_for_those_that_are_as_unlike():
    passed, failed = learned([(0.4, 0.99)]), learned([(0.4, 0.2)])
    assert passed.verdict("a", 1, IDS, 0.4, 0.9) is True
    assert passed.verdict("a", 1, IDS, 0.9, 0.9) is True
    assert passed.verdict("a", 1, IDS, 0.1, 0.9) is None
    assert failed.verdict("a", 1, IDS, 0.4, 0.9) is False
    assert failed.verdict("a", 1, IDS, 0.1, 0.9) is False
    assert failed.verdict("a", 1, IDS, 0.9, 0.9) is None


def test_contradictions_want_a_probe():
    assert learned([(0.4, 0.99), (0.4, 0.2)]).verdict("a", 1, IDS, 0.4, 0.9) is None


def test_nothing_is_known_of_other_segments_scopes_and_layers():
    known = learned([(0.0, 0.99)])
    assert known.verdict("b", 1, IDS, 0.5, 0.9) is None
    assert known.verdict("a", 2, IDS, 0.5, 0.9) is None
    assert known.verdict("a", 1, IDS[1:], 0.5, 0.9) is None
    assert known.verdict("a", 1, IDS[:KNOWN_BY], 0.5, 0.9) is True


def test_scores_are_kept_and_not_verdicts():
    known = learned([(0.0, 0.95)])
    assert known.verdict("a", 1, IDS, 0.5, 0.9) is True
    assert known.verdict("a", 1, IDS, 0.5, 0.96) is None


@given(FOUND, st.floats(0, 1), st.floats(0, 1))
def test_what_passes_would_pass_in_more_familiar_surroundings_unless_something_failed_there(found, low, high):
    known = learned(found)
    low, high = sorted((low, high))
    if known.verdict("a", 1, IDS, low, 0.5):
        assert known.verdict("a", 1, IDS, high, 0.5)


def test_the_oldest_segments_are_forgotten(monkeypatch):
    monkeypatch.setattr(experience, "_SEGMENTS", 3)
    known = Experience()
    for number in range(5):
        known.learn("a", 1, np.full(8, number, np.uint32), 0.0, 1.0)
    verdicts = [known.verdict("a", 1, np.full(8, number, np.uint32), 0.5, 0.9) for number in range(5)]
    assert verdicts == [None, None, True, True, True]


@pytest.mark.parametrize(("threshold", "tier"), [(-1.0, "probed"), (1.0, "computed")])
def test_a_segment_is_probed_once_in_surroundings_like_these(threshold, tier):
    model, store = tiny.llama(), SegmentStore("memory", quantization=None)
    policy = SegmentPolicy(probe=threshold, similarity=1.01, probing=1.0, shortest=8, guard=())
    one, two, three, page = (tiny.ids(1, length, seed=seed) for length, seed in ((20, 1), (20, 2), (20, 3), (40, 4)))
    probes = []
    for before in (one, two, three):
        cache = SegmentReuseCache(model, store, policy=policy)
        prompt = np.concatenate([before, page, before[:, :3]], 1)
        model.generate(model.dummy_inputs["input_ids"].new_tensor(prompt), past_key_values=cache, max_new_tokens=1, do_sample=False)
        probes.append(len(cache.probes))
        tiers = cache.report().tiers
    assert probes == [0, 1, 0]
    assert tier in tiers
    assert ("probed" in tiers) == (tier == "probed")
