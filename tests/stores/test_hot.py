"""The hot tier: what was used last is served from memory, within its bytes, and never after it was deleted."""

import pytest
import torch

from hf_kvcaches.stores.blobs import NewBlob, resident
from hf_kvcaches.stores.catalog import open_blobs
from tests.helpers.stores import HEAD, blob, catalog, fine, key_of, put, read, same

ONE = 400  # bytes of the tensors that `put` stores


def test_a_second_read_asks_the_place_for_nothing(shared, monkeypatch):
    made = catalog(shared, hot_bytes="1 MB")
    put(made, "a")
    first = read(made, "a", fine)
    monkeypatch.setattr(made.blobs, "get_many", lambda keys: pytest.fail("the place was asked"))
    assert same(read(made, "a", fine), first)
    summary = made.summary(["a"])
    assert (summary["loads"], summary["hot_hits"], summary["hot_bytes"]) == (1, 1, ONE)


def test_the_least_recently_used_leave_first():
    made = catalog(hot_bytes=2 * ONE)
    put(made, "a", "b", "c")
    for key in "abacac":
        read(made, key, fine)
    assert (made.counts["loads"], made.counts["hot_hits"]) == (3, 3)
    read(made, "b", fine)
    assert made.counts["loads"] == 4
    assert made.summary([])["hot_bytes"] == 2 * ONE


def test_a_blob_that_is_larger_than_the_tier_is_not_kept_and_drives_nothing_out():
    made = catalog(hot_bytes=ONE)
    put(made, "a")
    made.put([NewBlob("b", {"tokens": 1}, {"x": torch.zeros(1000)})])
    made.refresh()
    for key in "aba":
        read(made, key, fine)
    assert (made.counts["loads"], made.counts["hot_hits"]) == (2, 1)


def test_what_another_process_deleted_or_replaced_is_not_served_after_a_refresh(shared):
    made, other = catalog(shared, hot_bytes="1 MB"), open_blobs(shared)
    put(made, "a", "b")
    for key in "ab":
        read(made, key, fine)
    other.delete("a")
    other.delete("b")
    other.put("b", {"tokens": 10}, {"x": torch.ones(100)})
    made.refresh()
    assert read(made, "a", fine) is None
    assert bool((read(made, "b", fine)["x"] == 1).all())


def test_what_is_deleted_while_it_is_read_is_not_kept(monkeypatch):
    made = catalog(hot_bytes="1 MB")
    put(made, "a")
    made.read(["a"], lambda key, tensors: made.delete("a"))
    assert read(made, "a", fine) is None
    assert made.summary([])["hot_bytes"] == 0


def test_the_tier_is_on_the_device_of_its_first_reader():
    made = catalog(hot_bytes="1 MB")
    put(made, "a", "b")
    for key, device in (("a", torch.device("meta")), ("b", None), ("a", None)):
        assert made.read([key], fine, device)[key]["x"].device.type == "meta"


def test_reshaping_what_was_handed_out_leaves_the_tier_alone():
    made = catalog(hot_bytes="1 MB")
    made.put([NewBlob("a", {"tokens": 1}, blob())])
    made.refresh()
    for _ in range(3):
        handed = read(made, "a", fine)
        assert same(handed, blob())
        handed["scale"].unsqueeze_(0)
    assert made.counts["hot_hits"] == 2


# Pinned memory


@pytest.fixture
def pinned_sizes(monkeypatch):
    """As if there were CUDA; the bytes of each allocation that was pinned."""
    sizes = []

    def pin_memory(tensor):
        sizes.append(tensor.nbytes)
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return sizes


def test_with_cuda_a_blob_in_memory_is_pinned_when_it_is_written_and_not_when_it_is_read(pinned_sizes):
    store = open_blobs("memory")
    store.put(key_of(1), HEAD, blob())
    assert sorted(pinned_sizes) == sorted(tensor.nbytes for tensor in blob().values())
    assert same(store.tensors(key_of(1)), blob())
    assert len(pinned_sizes) == len(blob())


def test_where_no_more_memory_can_be_pinned_it_stays_pageable(pinned_sizes, monkeypatch):
    def fails(tensor):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fails)
    assert same(resident(blob()), blob())
