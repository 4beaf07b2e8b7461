"""`SegmentStore`: its cap, its pins, and what it says of itself."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from hf_kvcaches import SegmentReuseCache, SegmentStore
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.stores.blobs import MemoryBlobs
from hf_kvcaches.stores.catalog import open_blobs
from tests import tiny
from tests.helpers.warned import said
from tests.segments.store_helpers import LENGTH, PART, WHOLE, ask, blob_files, prompt, real_bytes, right


def size_of_a_prompt(model) -> int:
    """Bytes that a prompt's segments take on disk, about."""
    with SegmentStore() as store:
        ask(model, prompt(0), store)
        report = store.report()
        return report.bytes + report.segments * 800  # in memory there are no headers


# Arguments


def test_sizes_are_numbers_or_written_with_a_unit():
    sizes = {"4GiB": 4 * 2**30, "500 MB": 500 * 10**6, " 1.5kb ": 1500, "12 KiB": 12 * 1024, "77": 77, "3b": 3, "2tib": 2 * 2**40}
    for given, expected in (sizes | {1000: 1000, 2.5e6: 2_500_000, None: None}).items():
        assert SegmentStore(max_bytes=given).max_bytes == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int2"}, "quantization: expected one of 'int8', 'int4', None, or a KVCodec, got 'int2'"),
        ({"location": "/some/folder"}, "location: .*For a folder write disk: before it"),
        ({"hot_bytes": "much"}, "hot_bytes: expected a number of bytes"),
        ({"time_to_live": -1}, "time_to_live: expected a number of seconds above 0"),
    ],
)
def test_other_bad_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SegmentStore(**options)


# The cap


def test_after_each_flush_the_segments_take_no_more_than_the_cap(model, shared_location):
    cap = int(2.4 * size_of_a_prompt(model))
    store = SegmentStore(shared_location, max_bytes=cap)
    for seed in range(8):
        ask(model, prompt(seed), store)
        store.flush()
        assert real_bytes(shared_location) <= cap  # before anything else that might evict
        report = store.report()
        assert report.bytes == real_bytes(shared_location)
        assert report.segments == report.written - report.evicted > 0
    assert report.evicted > 0
    # Nor is everything thrown out: about as much stays as there is room for.
    assert report.bytes > cap / 2


def test_a_prompt_that_is_used_again_and_again_outlives_others(model, tmp_path):
    store = SegmentStore(f"disk:{tmp_path}", max_bytes=int(2.4 * size_of_a_prompt(model)))
    ask(model, prompt(0), store)
    for seed in range(1, 7):
        assert right(model, prompt(0), store).reused == WHOLE
        ask(model, prompt(seed), store)
    assert right(model, prompt(0), store).reused == WHOLE
    assert right(model, prompt(1), store).reused == 0


def test_of_a_prompt_that_does_not_fit_the_start_is_kept(model, tmp_path):
    store = SegmentStore(f"disk:{tmp_path}", max_bytes=int(0.6 * size_of_a_prompt(model)))
    ask(model, prompt(0), store)
    assert store.report().evicted > 0
    assert PART <= right(model, prompt(0), store).reused < WHOLE


def test_segments_that_another_handle_pins_stay_until_they_are_let_go(model, tmp_path):
    cap = int(1.4 * size_of_a_prompt(model))
    store, pinning = SegmentStore(f"disk:{tmp_path}", max_bytes=cap), SegmentStore(f"disk:{tmp_path}")
    ask(model, prompt(0), store)
    keys = ask(model, prompt(0), store).keys
    for key in keys:
        pinning.pin(key)
    for seed in range(1, 5):
        ask(model, prompt(seed), store)
    report = store.report()
    assert report.pinned == len(keys) > 0
    assert report.bytes <= cap
    assert right(model, prompt(0), store).reused == WHOLE
    for key in keys:
        pinning.pin(key, False)
    for seed in range(5, 15):
        ask(model, prompt(seed), store)
    assert ask(model, prompt(0), store).reused == 0
    assert store.report().pinned == 0


def test_pins_of_keys_that_hold_no_segment_are_not_counted(model, tmp_path):
    store = SegmentStore(f"disk:{tmp_path}")
    store.pin("ab")
    ask(model, prompt(0), store)
    assert store.report().pinned == 0


@pytest.mark.parametrize("cap", [1, "100 B"])
def test_where_no_segment_fits_nothing_is_stored_and_answers_are_right(model, location, cap):
    store = SegmentStore(location, max_bytes=cap)
    for _ in range(2):
        assert right(model, prompt(0), store).reused == 0
        store.flush()
    report = store.report()
    assert (report.segments, report.bytes) == (0, 0)
    if location != "memory":
        assert real_bytes(location) == 0


def test_a_segment_that_is_larger_than_the_cap_drives_out_no_other(model, tmp_path):
    cap = int(1.5 * size_of_a_prompt(model))
    store = SegmentStore(f"disk:{tmp_path}", max_bytes=cap)
    ask(model, prompt(0), store)
    before = store.report()
    long = torch.cat([prompt(seed) for seed in range(1, 5)], dim=1)
    cache = SegmentReuseCache(model, store, mode="exact", spans=[[(0, long.shape[1])]])
    cache.prefill(long)
    store.flush()
    after = store.report()
    # Of the long one there may be its last token, which is a segment of its own.
    assert (after.evicted, after.written - before.written) in ((0, 0), (0, 1))
    assert right(model, prompt(0), store).reused == WHOLE


def test_the_callers_spans_are_stored_and_wrong_ones_refused_at_once(model):
    store, whole = SegmentStore("memory"), prompt(0)
    cache = SegmentReuseCache(model, store, mode="exact", spans=[[(0, 40), (40, whole.shape[1])]])
    cache.prefill(whole)
    store.flush()
    assert right(model, whole, store).reused > 40
    for spans in ([(5, 3)], [(-1, 4)], [(0, 5), (4, 9)]):
        with pytest.raises(ConfigError, match="spans"):
            SegmentReuseCache(model, store, spans=[spans])


# Deleting


def test_what_is_deleted_by_its_id_is_computed_and_stored_again(model, location):
    store = SegmentStore(location)
    ask(model, prompt(0), store)
    keys = ask(model, prompt(0), store).keys
    segments = store.report().segments
    assert store.delete(keys[1])
    assert not store.delete(keys[1])
    assert store.report().segments == segments - 1
    assert right(model, prompt(0), store).reused == PART
    assert store.report().segments == segments
    assert right(model, prompt(0), store).reused == WHOLE


def test_a_cleared_store_is_empty_for_all(model, shared_location):
    store, other = (SegmentStore(shared_location) for _ in range(2))
    ask(model, prompt(0), store)
    store.flush()  # It does not look again before the others clear it.
    store.pin(ask(model, prompt(0), other).keys[0])
    other.clear()
    for each in (store, other):
        report = each.report()
        assert (report.segments, report.tokens, report.bytes, report.pinned) == (0, 0, 0, 0)
    assert real_bytes(shared_location) == 0
    for each, reused in ((store, 0), (other, WHOLE)):
        assert right(model, prompt(0), each).reused == reused
        each.flush()


# What it says of itself


def test_the_report_counts_what_happened(model, shared_location):
    store = SegmentStore(shared_location, max_bytes="1 GiB")
    ask(model, prompt(0), store)
    ask(model, prompt(0), store)
    ask(model, prompt(1), store)
    report = store.report()
    if shared_location.startswith("disk"):
        assert report.segments == len(blob_files(Path(shared_location.removeprefix("disk:"))))
    assert report.segments == report.written >= 6
    assert (report.evicted, report.damaged, report.failures) == (0, 0, 0)
    assert report.tokens == 2 * LENGTH
    assert report.loads == 3
    assert report.bytes == real_bytes(shared_location)
    assert (report.location, report.max_bytes) == (shared_location, 2**30)
    # Another handle finds the same, and has done nothing.
    other = SegmentStore(shared_location).report()
    assert (other.segments, other.tokens, other.bytes) == (report.segments, 2 * LENGTH, report.bytes)
    assert (other.written, other.loads, other.max_bytes) == (0, 0, None)


def test_a_copied_store_is_the_same_one():
    store = SegmentStore()
    assert copy.deepcopy([store])[0] is store


HEAD = {"scope": "s", "left": "l", "right": "r", "start": 0, "origin": "exact", "fresh": True, "stored": {}}
HEAD |= {"ids": "AAAAAA==", "context": "", "signature": None, "surroundings": None}


@pytest.mark.parametrize("head", [{}, {"something": "else"}, HEAD, HEAD | {"ids": None}, HEAD | {"scope": 5}, HEAD | {"origin": ["exact"]}])
def test_a_blob_that_is_no_segment_is_left_alone_and_said_once(model, tmp_path, head):
    blobs = open_blobs(f"disk:{tmp_path}")
    for key in ("ab", "ac"):
        blobs.put(key, head, {"x": torch.zeros(1)})
    store = SegmentStore(f"disk:{tmp_path}")
    with said() as sentences:
        for reused in (0, WHOLE):
            assert right(model, prompt(0), store).reused == reused
    assert len(sentences) == 1
    assert "is no segment" in sentences[0]
    assert len(blob_files(tmp_path)) == store.report().segments + 2


# The hot tier, and time to live


def test_what_is_hot_is_reused_without_reading_a_file(model, tmp_path):
    store = SegmentStore(f"disk:{tmp_path}", hot_bytes="1 MiB")
    ask(model, prompt(0), store)
    ask(model, prompt(0), store)
    loads = store.report().loads
    assert right(model, prompt(0), store).reused == WHOLE
    report = store.report()
    assert (report.loads, report.hot_hits) == (loads, 3)
    assert report.hot_bytes > 0


def test_segments_that_are_too_old_are_computed_and_stored_again(model, shared_location):
    store = SegmentStore(shared_location, time_to_live=3600)
    ask(model, prompt(0), store)
    assert right(model, prompt(0), store).reused == WHOLE
    now = store.catalog.clock()
    store.catalog.clock = lambda: now + 4000
    assert right(model, prompt(0), store).reused == 0
    assert right(model, prompt(0), store).reused == WHOLE
    report = store.report()
    assert (report.evicted, report.segments) == (report.written // 2, report.written // 2)


def test_a_store_of_a_blob_store_of_ones_own_is_one_like_others(model):
    blobs = MemoryBlobs()
    store = SegmentStore(blobs)
    ask(model, prompt(0), store)
    assert right(model, prompt(0), store).reused == WHOLE
    with pytest.raises(ConfigError, match="location: expected a BlobStore that serves no other store"):
        SegmentStore(blobs)


def test_a_store_that_was_not_read_yet_says_so(tmp_path):
    model = tiny.llama()
    with SegmentStore(f"disk:{tmp_path}") as store:
        model.generate(tiny.ids(1, 80), past_key_values=SegmentReuseCache(model, store), max_new_tokens=1, do_sample=False)
    store = SegmentStore(f"disk:{tmp_path}")
    assert repr(store).endswith("not yet read)")
    store.refresh()
    assert f"{store.report().segments} segments" in repr(store)
    assert "0 segments" in repr(SegmentStore("memory"))


def test_reports_are_short_enough_to_read():
    model, store = tiny.llama(), SegmentStore("memory")
    for _ in range(2):
        cache = SegmentReuseCache(model, store)
        model.generate(tiny.ids(1, 300), past_key_values=cache, max_new_tokens=1, do_sample=False)
    report = cache.report()
    ids = [key for span in report.spans for key in span.segments]
    assert ids
    assert not any(key in str(report) or key in repr(report) for key in ids)
    assert all(key[:8] in str(report) for key in ids[:3])
    assert f"{report.flops_saved:.1%}" in str(report)
    assert str(report.flops_saved) not in str(report)


def test_a_cache_without_a_store_is_refused_with_what_to_pass():
    with pytest.raises(ConfigError, match=r"store: expected a SegmentStore.*SegmentStore\(\"memory\"\)"):
        SegmentReuseCache(tiny.llama())
