"""What probes found is asked before another probe is."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches import SegmentPolicy, SegmentReuseCache, SegmentStore
from hf_kvcaches.segments import contents, experience
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
        prompt = torch.cat([before, page, before[:, :3]], 1)
        model.generate(prompt, past_key_values=cache, max_new_tokens=1, do_sample=False)
        probes.append(len(cache.probes))
        tiers = cache.report().tiers
    assert probes == [0, 1, 0]
    assert tier in tiers
    assert ("probed" in tiers) == (tier == "probed")


@pytest.mark.parametrize("repair", [1.0, 0.9])
def test_a_policy_that_leaves_too_few_tokens_to_probe_teaches_others_nothing(repair):
    model, store = tiny.llama(), SegmentStore("memory", quantization=None)
    policy = SegmentPolicy(probe=-1.0, similarity=1.01, probing=1.0, shortest=8, guard=())
    one, two, three, page = (tiny.ids(1, length, seed=seed) for length, seed in ((20, 1), (20, 2), (20, 3), (40, 4)))
    caches = [SegmentReuseCache(model, store, policy=policy, repair=share) for share in (None, repair, None)]
    for cache, before in zip(caches, (one, two, three), strict=True):
        model.generate(torch.cat([before, page, before[:, :3]], 1), past_key_values=cache, max_new_tokens=1, do_sample=False)
    assert [len(cache.probes) for cache in caches] == [0, 0, 1]
    assert "probed" not in caches[1].report().tiers
    assert "probed" in caches[2].report().tiers


def test_probes_behind_another_share_of_recomputed_tokens_tell_nothing():
    known = Experience()
    known.learn("a", 1, IDS, 0.4, 0.2, 0.1)
    assert known.verdict("a", 1, IDS, 0.4, 0.9, 0.1) is False
    assert known.verdict("a", 1, IDS, 0.4, 0.9, 0.5) is None


def test_what_is_told_is_heard_by_another_and_told_once():
    one, other = learned([(0.4, 0.99), (0.1, 0.2)]), Experience()
    told = one.unstored()
    assert one.unstored() == []
    other.hear(json.loads(json.dumps(told)))
    other.hear(told)
    assert other.unstored() == []
    for similarity in (0.0, 0.1, 0.4, 0.9):
        assert other.verdict("a", 1, IDS, similarity, 0.9) == one.verdict("a", 1, IDS, similarity, 0.9)


@pytest.mark.parametrize("rows", [[["a", 1]], [["a", "x", "b", 0.1, 0.2]], 5, [None], [["", 1, "", "nan", 0.2]], [["", 1, "", 0.1, "inf"]]])
def test_nonsense_is_not_heard(rows):
    with pytest.raises((TypeError, ValueError)):
        Experience().hear(rows)


@pytest.mark.parametrize("place", ["disk", "redis"])
def test_stores_of_one_place_share_what_probes_found(place, tmp_path, redis_location):
    model = tiny.llama()
    location = f"disk:{tmp_path}" if place == "disk" else redis_location
    policy = SegmentPolicy(probe=-1.0, similarity=1.01, probing=1.0, shortest=8, guard=())
    one, two, three, page = (tiny.ids(1, length, seed=seed) for length, seed in ((20, 1), (20, 2), (20, 3), (40, 4)))
    probes = []
    for before in (one, two, three):
        with SegmentStore(location, quantization=None) as store:
            cache = SegmentReuseCache(model, store, policy=policy)
            model.generate(torch.cat([before, page, before[:, :3]], 1), past_key_values=cache, max_new_tokens=1, do_sample=False)
            probes.append(len(cache.probes))
            assert store.report().segments == sum(len(index.records) for index in store.contents.indices.values())
    assert probes == [0, 1, 0]


def test_blobs_that_tell_of_probes_are_bounded_in_number_and_bytes_and_the_oldest_go(location, monkeypatch):
    monkeypatch.setattr(contents, "_MOST_BLOBS", 5)
    store = SegmentStore(location, quantization=None)
    heads = 0
    for number in range(20):
        store.experience.learn("scope", 1, np.full(8, number, np.uint32), 0.0, 1.0)
        store.put([])
        heads = max(heads, len(store.catalog.entries))
    assert heads <= 6
    assert len(store.catalog.entries) == 5
    if location == "memory":
        return
    other = SegmentStore(location, quantization=None)
    other.refresh()
    known = [other.experience.verdict("scope", 1, np.full(8, number, np.uint32), 0.5, 0.9) for number in range(20)]
    assert known == [None] * 15 + [True] * 5
    monkeypatch.setattr(contents, "_MOST_BYTES", store.catalog.bytes - 1)
    other.refresh()
    store.refresh()
    assert len(store.catalog.entries) == len(other.catalog.entries) == 4


def test_no_more_findings_than_a_blob_is_to_hold_wait_to_be_told(monkeypatch):
    monkeypatch.setattr(experience, "_UNSTORED", 3)
    known = learned([(number / 10, 1.0) for number in range(10)])
    assert [row[3] for row in known.unstored()] == [0.7, 0.8, 0.9]


def test_experience_is_evicted_before_segments():
    model = tiny.llama()
    policy = SegmentPolicy(probe=-1.0, similarity=1.01, probing=1.0, shortest=8, guard=())
    one, two, page = (tiny.ids(1, length, seed=seed) for length, seed in ((20, 1), (20, 2), (40, 4)))
    store = SegmentStore("memory", quantization=None)
    for before in (one, two):
        cache = SegmentReuseCache(model, store, policy=policy)
        model.generate(torch.cat([before, page, before[:, :3]], 1), past_key_values=cache, max_new_tokens=1, do_sample=False)
    segments = store.report().segments
    assert len(store.catalog.entries) == segments + 1
    store.catalog.max_bytes = store.catalog.bytes - 1
    assert store.report().segments == segments
    assert len(store.catalog.entries) == segments
