"""A catalog of blobs: what is in step with the place, what is evicted, and what is a miss."""

import os
import warnings
from random import Random
from typing import Any

import pytest
import torch

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs import MemoryBlobs, NewBlob, StoreUnavailable
from tests.helpers.stores import PROCESSES, catalog, fine, put, read


def test_two_catalogs_of_one_place_are_in_step_after_a_refresh(tmp_path):
    one, two = (catalog(f"disk:{tmp_path}") for _ in range(2))
    put(one, "a", "b")
    assert one.contents.keys == {"a", "b"}
    two.refresh()
    assert two.contents.keys == {"a", "b"}
    assert two.delete("a")
    one.refresh()
    assert one.contents.keys == {"b"}
    assert read(one, "a", fine) is None
    assert (one.counts["written"], two.counts["written"]) == (2, 0)


def test_the_least_worth_goes_first_then_others_in_place_of_pinned_ones():
    made = catalog()
    put(made, "a", "b", "c")
    made.used("a", 1000)
    made.pin("b")
    made.max_bytes = made.bytes - 1
    made.refresh()
    assert made.contents.keys == {"a", "b"}
    assert made.summary(made.contents.keys)["pinned"] == 1


def test_tensors_that_are_not_those_of_the_head_are_a_miss_and_are_deleted_with_one_warning():
    made = catalog()
    put(made, "a", "b")

    def wrong(key: str, tensors: object) -> None:
        raise ArtifactError("it is another")

    with pytest.warns(RuntimeWarning, match="A damaged thing is made anew") as said:
        assert read(made, "a", wrong) is read(made, "b", wrong) is None
    assert len(said) == 1
    assert made.contents.keys == set()


def test_a_place_that_fails_is_a_miss_with_one_warning_but_for_what_is_asked_for_explicitly(monkeypatch):
    made = catalog(max_bytes=10**6)
    put(made, "a")

    def fails(*arguments: object) -> None:
        raise StoreUnavailable("It is away.")

    for name in ("changes", "put", "pinned", "delete"):
        monkeypatch.setattr(made.blobs, name, fails)
    monkeypatch.setattr(made.blobs, "tensors", fails)

    def use() -> None:
        assert read(made, "a", fine) is None
        made.put([NewBlob("b", {"tokens": 1}, {})])
        made.refresh()
        made.max_bytes = 1
        made.refresh()

    with pytest.warns(RuntimeWarning, match=r"memory: It is away\. Prompts are computed instead") as said:
        use()
    assert len(said) == 1
    assert made.counts["failures"] >= 5
    with pytest.raises(StoreUnavailable):
        made.delete("a")
    monkeypatch.undo()
    assert read(made, "a", fine) is not None


def test_blobs_of_another_kind_are_left_alone_and_are_not_counted():
    made = catalog(max_bytes=10**6)
    made.put([NewBlob("a", {"other": 1}, {"x": torch.zeros(100)})])
    with pytest.warns(RuntimeWarning, match="holds something that is no thing, or one of another version; it is left alone"):
        made.refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.refresh()
    assert made.bytes == 0
    assert made.blobs.tensors("a") is not None


@pytest.mark.parametrize("given", [0, "many", True])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(ConfigError, match="max_bytes: expected a number of bytes, at least 1, or None"):
        catalog(max_bytes=given)


# Time to live


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_blob_that_is_too_old_is_a_miss_and_is_deleted_by_any_process_that_has_the_setting(tmp_path):
    clock = Clock()
    made, other = (catalog(f"disk:{tmp_path}", time_to_live=60, hot_bytes=1000, clock=clock) for _ in range(2))
    forever = catalog(f"disk:{tmp_path}", clock=clock)
    put(made, "a")
    clock.now += 50
    put(made, "b")
    for each in (other, forever):
        each.refresh()
    assert all(read(each, "a", fine) is not None for each in (made, other, forever))
    clock.now += 11
    assert read(made, "a", fine) is read(other, "a", fine) is None
    assert read(forever, "a", fine) is not None
    forever.refresh()
    assert forever.contents.keys == {"a", "b"}
    other.refresh()
    assert other.contents.keys == {"b"}
    assert other.counts["evicted"] == 1
    made.refresh()
    assert made.contents.keys == {"b"}
    assert read(made, "b", fine) is not None
    # It may be put again, and is as young as any.
    put(made, "a")
    assert read(made, "a", fine) is not None


def test_what_is_too_old_goes_though_it_is_pinned_and_the_pin_stays():
    clock = Clock()
    made = catalog(time_to_live=60, clock=clock)
    put(made, "a")
    made.pin("a")
    clock.now += 61
    made.refresh()
    assert made.contents.keys == set()
    put(made, "a")
    assert made.summary(["a"])["pinned"] == 1


def test_what_does_not_say_when_it_was_made_is_too_old():
    blobs = MemoryBlobs()
    blobs.put("a", {"tokens": 1}, {})
    made = catalog(blobs, time_to_live=60)
    made.refresh()
    assert made.contents.keys == set()


@pytest.mark.parametrize("given", [0, -1, "1h", True])
def test_what_is_no_time_to_live_is_refused(given):
    with pytest.raises(ConfigError, match="time_to_live: expected a number of seconds above 0, or None"):
        catalog(time_to_live=given)


# A back-end of one's own


def test_a_blob_store_serves_one_catalog():
    blobs = MemoryBlobs()
    catalog(blobs)
    with pytest.raises(ConfigError, match="location: expected a BlobStore that serves no other store"):
        catalog(blobs)


@pytest.mark.parametrize("given", [MemoryBlobs, {}, object()])
def test_what_is_no_blob_store_is_refused_with_what_to_pass(given):
    with pytest.raises(ConfigError, match=r"location: expected .*or an object of a BlobStore of your own"):
        catalog(given)


# Handles


def test_files_and_connections_stay_as_few_as_they_were_over_many_reads_and_writes(shared):
    made = catalog(shared, max_bytes=20_000)

    def use(times: int) -> int:
        for number in range(times):
            key = f"{number % 50:x}"
            if read(made, key, fine) is None:
                made.put([NewBlob(key, {"tokens": 1}, {"x": torch.zeros(100)})])
            if number % 10 == 0:
                made.refresh()
        return len(os.listdir("/proc/self/fd"))

    before = use(100)
    assert use(2000) <= before
    made.refresh()
    assert 0 < made.bytes <= 20_000


def ask_on(location: str, out: Any, seed: int, cap: int) -> None:
    """Reads or puts blobs within a cap, and sends how many reads of either half were hits, and the failures."""
    torch.set_num_threads(1)
    made, random, hits = catalog(location, max_bytes=cap, hot_bytes=2000), Random(seed), []
    for _ in range(200):
        made.refresh()
        key = f"{min(random.randrange(30), random.randrange(30)):x}"
        hits.append(read(made, key, fine) is not None)
        if hits[-1]:
            made.used(key, 10)
        else:
            put(made, key)
    out.send((sum(hits[:100]), sum(hits[100:]), made.counts["failures"] + len(made.blobs.complaints)))


def test_four_processes_that_read_and_write_stay_within_the_cap_together_and_their_hits_do_not_decline(shared):
    cap = 15_000
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(4)]
    workers = [PROCESSES.Process(target=ask_on, args=(shared, out, seed, cap)) for seed, (_, out) in enumerate(pipes)]
    for worker in workers:
        worker.start()
    told = [ours.recv() for ours, _ in pipes]
    for worker in workers:
        worker.join()
    first, second, failures = (sum(each) for each in zip(*told, strict=True))
    assert failures == 0
    # Hits are chance where the cap is reached, so a tenth fewer is no decline.
    assert second > 0.9 * first > 0
    after = catalog(shared)
    after.refresh()
    assert cap / 2 < after.bytes <= cap
