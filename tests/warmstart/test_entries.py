"""The store of entries: what is put is found by tokens and by likeness, in any process, within the cap, and damage is a miss."""

from __future__ import annotations

import contextlib
import copy
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError, MissingDependencyError
from hf_kvcaches.stores.blobs import StoreUnavailable
from hf_kvcaches.stores.location import open_blobs
from hf_kvcaches.warmstart.entries import Entry, EntryStore
from tests.stores.blob_helpers import PROCESSES

pytest.importorskip("faiss", reason="faiss-cpu is not installed")


def tokens(seed: int, count: int = 20) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, count).tolist()


def embedding(seed: int, dim: int = 8) -> np.ndarray:
    vector = np.random.default_rng(seed).standard_normal(dim).astype(np.float32)
    return vector / np.linalg.norm(vector)


def entry(seed: int, size: int = 100, count: int = 20) -> Entry:
    made = torch.Generator().manual_seed(seed)
    tensors = {"keys": torch.randn(2, size, generator=made).to(torch.bfloat16), "slots": torch.arange(seed, seed + 3)}
    return Entry(f"prompt {seed} mit größe", tokens(seed, count), embedding(seed), tensors, {"seed": seed, "how": ["made", None]})


def same(found: Entry | None, expected: Entry) -> bool:
    return (
        found is not None
        and (found.text, found.ids, found.provenance) == (expected.text, expected.ids, expected.provenance)
        and np.array_equal(found.embedding, expected.embedding)
        and found.tensors.keys() == expected.tensors.keys()
        and all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
    )


@pytest.fixture
def quiet() -> Iterator[None]:
    """Any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """What was warned of meanwhile, once the context is left."""
    sentences: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield sentences
    sentences += [str(warning.message) for warning in caught]


@pytest.fixture(params=["disk", "redis"])
def shared(request, tmp_path):
    """An empty place of each kind that processes can share."""
    return request.getfixturevalue("redis_location") if request.param == "redis" else f"disk:{tmp_path / 'entries'}"


# One process


@pytest.mark.usefixtures("quiet")
def test_an_entry_comes_back_as_it_was_put_and_is_found_by_tokens_and_by_likeness(location):
    store = EntryStore(location, "scope")
    before = time.time()
    keys = [store.put(entry(seed)) for seed in range(5)]
    assert len(set(keys)) == len(store) == 5
    assert set(store.ids()) == set(keys)
    for seed, key in enumerate(keys):
        assert same(store.get(key), entry(seed))
        assert store.exact(tokens(seed)) == key
        assert store.near(embedding(seed))[0] == (key, pytest.approx(1, abs=1e-5))
        head = store.head(key)
        assert (head.text, head.ids.tolist(), head.provenance) == (entry(seed).text, tokens(seed), entry(seed).provenance)
        assert head.sizes == {"keys": 400, "slots": 24}
        assert int(before) <= head.created <= time.time()
    cosines = [embedding(seed) @ embedding(9) for seed in range(5)]
    assert [key for key, _ in store.near(embedding(9), 10)] == [keys[place] for place in np.argsort(cosines)[::-1]]
    assert store.exact(tokens(0)[:-1]) is None
    assert store.exact([*tokens(0), 1]) is None
    assert store.get("ab") is store.head("ab") is None
    report = store.report()
    assert report.bytes == sum(store.head(key).bytes for key in keys)
    assert (report.entries, report.written, report.loads, report.foreign, report.failures, report.damaged) == (5, 5, 5, 0, 0, 0)


@pytest.mark.usefixtures("quiet")
def test_the_same_tokens_are_one_entry_and_the_first_is_kept(location):
    store = EntryStore(location, "scope")
    key = store.put(entry(1))
    assert store.put(Entry("other", tokens(1), embedding(2), {})) == key
    assert len(store) == 1
    assert same(store.get(key), entry(1))
    assert store.report().written == 1


@pytest.mark.usefixtures("quiet")
def test_a_deleted_entry_is_gone_and_can_be_put_again(location):
    store = EntryStore(location, "scope")
    first, second = store.put(entry(1)), store.put(entry(2))
    assert store.delete(first)
    assert not store.delete(first)
    assert store.get(first) is store.head(first) is store.exact(tokens(1)) is None
    assert store.near(embedding(1), 5) == [(second, pytest.approx(embedding(1) @ embedding(2), abs=1e-5))]
    assert store.put(entry(1)) == first
    assert same(store.get(first), entry(1))


def test_an_empty_store_finds_nothing():
    store = EntryStore("memory", "scope")
    assert store.near(embedding(1), 5) == store.ids() == []
    assert store.exact([1]) is None
    assert not store.delete("ab")


def test_writing_to_what_was_got_does_not_reach_the_store(tmp_path):
    store = EntryStore(f"disk:{tmp_path}", "scope")
    key = store.put(entry(1))
    got = store.get(key)
    got.tensors["keys"].zero_()
    assert same(store.get(key), entry(1))


@given(st.lists(st.tuples(st.sampled_from("put delete used pin unpin".split()), st.integers(0, 7)), max_size=30))
def test_any_sequence_of_changes_leaves_a_store_that_agrees_with_a_dict_and_stays_in_its_cap(steps):
    size = EntryStore("memory", "scope")
    one = size.head(size.put(entry(0))).bytes
    store, known, pinned = EntryStore("memory", "scope", max_bytes=4 * one + 40), set(), set()
    for what, seed in steps:
        key = store.exact(tokens(seed))
        if what == "put":
            key = store.put(entry(seed))
            known = (known | {seed}) & {number for number in range(8) if store.exact(tokens(number))}
            assert pinned <= known or len(known) >= 4
        elif key is not None and what == "delete":
            assert store.delete(key)
            known.discard(seed)
            pinned.discard(seed)
            store.pin(key, False)
        elif key is not None and what in ("pin", "unpin") and len(pinned) < 3:
            store.pin(key, what == "pin")
            (pinned.add if what == "pin" else pinned.discard)(seed)
        elif key is not None and what == "used":
            store.used(key)
        assert {seed for seed in range(8) if store.exact(tokens(seed))} == known
        assert pinned <= known
        assert len(store) == len(known) <= 4
        assert store.report().bytes <= store.catalog.max_bytes
        assert {name for name, _ in store.near(embedding(3), 20)} == {store.exact(tokens(seed)) for seed in known}


# The cap


def one_takes(location: str) -> int:
    with contextlib.closing(EntryStore(location, "probe")) as store:
        key = store.put(entry(0))
        size = store.head(key).bytes
        store.delete(key)
    return size


@pytest.mark.usefixtures("quiet")
def test_the_least_useful_go_and_what_is_used_again_and_again_stays(location):
    store = EntryStore(location, "scope", max_bytes=3 * one_takes(location) + 200)
    useful = store.put(entry(0))
    for seed in range(1, 10):
        store.used(useful)
        store.put(entry(seed))
        assert store.report().bytes <= store.catalog.max_bytes
    assert useful in store
    report = store.report()
    assert (report.entries, report.evicted, report.hits, report.saved_tokens) == (3, 7, 9, 180)
    assert store.exact(tokens(9)) is not None


def test_what_was_useful_long_ago_goes_in_the_end():
    store = EntryStore("memory", "scope", max_bytes=3 * one_takes("memory") + 200)
    once = store.put(entry(0))
    for _ in range(3):
        store.used(once)
    for seed in range(1, 5):
        store.put(entry(seed))
    assert once in store
    for seed in range(5, 20):
        store.put(entry(seed))
    assert once not in store


def test_an_entry_that_saves_more_tokens_a_byte_outlives_a_larger_one():
    store = EntryStore("memory", "scope", max_bytes=40_000)
    small, large = store.put(entry(0)), store.put(entry(1, size=9000))
    store.used(small, 100)
    store.used(large, 100)
    store.put(entry(2, size=1000))
    assert small in store
    assert large not in store


@pytest.mark.parametrize("whose", ["this", "another"])
def test_pinned_entries_stay_until_they_are_let_go(whose, shared):
    store = EntryStore(shared, "scope", max_bytes=3 * one_takes(shared) + 200)
    pinning = store if whose == "this" else EntryStore(shared, "scope")
    pinned = store.put(entry(0))
    pinning.pin(pinned)
    for seed in range(1, 8):
        store.put(entry(seed))
    assert pinned in store
    assert store.report().pinned == 1
    pinning.pin(pinned, False)
    for seed in range(8, 12):
        store.put(entry(seed))
    assert pinned not in store


def test_what_is_larger_than_the_cap_is_not_stored_and_drives_nothing_out():
    store = EntryStore("memory", "scope", max_bytes=10_000)
    small = store.put(entry(1))
    with pytest.warns(RuntimeWarning, match="20 tokens takes more than all of the 10000 bytes"):
        assert store.put(entry(2, size=10_000)) is None
    assert store.ids() == [small]


def test_a_store_that_is_full_of_pinned_entries_takes_no_more_and_says_so_with_none():
    store = EntryStore("memory", "scope", max_bytes=2 * one_takes("memory") + 200)
    keys = [store.put(entry(seed)) for seed in range(2)]
    for key in keys:
        store.pin(key)
    assert store.put(entry(2)) is None
    assert store.ids() == keys


def test_nothing_is_evicted_while_pins_can_not_be_read(monkeypatch):
    store = EntryStore("memory", "scope", max_bytes=2 * one_takes("memory") + 200)

    def fails() -> frozenset[str]:
        raise StoreUnavailable("It is away.")

    monkeypatch.setattr(store.catalog.blobs, "pinned", fails)
    with said() as sentences:
        keys = [store.put(entry(seed)) for seed in range(3)]
    assert store.ids() == keys
    assert ["It is away" in sentence for sentence in sentences] == [True]
    monkeypatch.undo()
    store.refresh()
    assert len(store) == 2


# Others' and damage


def test_entries_of_another_scope_are_no_hit_and_are_told_of_once(shared):
    theirs = EntryStore(shared, "model B")
    foreign = [theirs.put(entry(seed)) for seed in range(3)]
    with said() as sentences:
        store = EntryStore(shared, "model A")
        mine = store.put(entry(1))
        theirs.put(entry(4))
        store.refresh()
    # Once by each.
    assert ["also holds entries of another model" in sentence for sentence in sentences] == [True] * 2
    assert mine not in foreign
    assert store.ids() == [mine]
    assert [store.get(key) for key in foreign] == [None] * 3
    assert store.near(embedding(0), 5) == [(mine, pytest.approx(embedding(0) @ embedding(1), abs=1e-5))]
    assert not store.delete(foreign[0])
    assert store.report().foreign == 4
    theirs.refresh()
    assert all(same(theirs.get(key), entry(seed)) for seed, key in enumerate(foreign))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "something else"},
        {"length": "20"},
        {"embedding": "%%%"},
        {"ids": "%%%"},
        {"embedding": "AAAA"},
        {"embedding": "AAAAAAAAAAA="},
        {"text": None},
    ],
)
def test_blobs_that_are_no_entries_are_left_alone_and_told_of_once(tmp_path, change):
    with contextlib.closing(EntryStore(f"disk:{tmp_path}", "scope")) as first:
        key = first.put(entry(1))
    blobs = open_blobs(f"disk:{tmp_path}")
    head = blobs.changes().added[0].head
    for name in ("ab", "cd"):
        blobs.put(name, head | change, {})
    with pytest.warns(RuntimeWarning, match="left alone") as said:
        store = EntryStore(f"disk:{tmp_path}", "scope")
    assert len(said) == 1
    assert store.ids() == [key]
    assert same(store.get(key), entry(1))
    assert blobs.tensors("ab") == {}


def test_a_flipped_bit_anywhere_is_a_miss_that_is_told_of_and_can_be_put_again(tmp_path):
    whole = tmp_path / "whole"
    with contextlib.closing(EntryStore(f"disk:{whole}", "scope")) as store:
        key = store.put(entry(1))
    size = (whole / f"{key}.kvblob").stat().st_size
    for number, place in enumerate(range(0, size, size // 25)):
        folder = Path(shutil.copytree(whole, tmp_path / str(number)))
        content = bytearray((folder / f"{key}.kvblob").read_bytes())
        content[place] ^= 1
        (folder / f"{key}.kvblob").write_bytes(content)
        with said() as sentences:
            store = EntryStore(f"disk:{folder}", "scope")
            assert store.get(key) is None
            assert store.get(key) is store.exact(tokens(1)) is None
        assert ["A damaged entry is made anew" in sentence for sentence in sentences] == [True]
        assert store.near(embedding(1)) == []
        assert store.report().damaged == 1
        assert store.put(entry(1)) == key
        assert same(store.get(key), entry(1))


def test_a_file_that_another_deleted_is_a_miss_and_then_forgotten(shared):
    store = EntryStore(shared, "scope")
    key = store.put(entry(1))
    EntryStore(shared, "scope").delete(key)
    assert store.exact(tokens(1)) == key
    assert store.get(key) is None
    assert store.exact(tokens(1)) is None
    assert store.near(embedding(1)) == []


def test_a_server_that_is_gone_is_a_miss_that_is_told_of_once(server):
    store = EntryStore(server.location, "scope", max_bytes=10**6)
    key = store.put(entry(1))
    server.stop()
    with said() as sentences:
        assert store.get(key) is None
        assert store.put(entry(2)) is None
        store.refresh()
    assert ["Prompts are computed instead" in sentence for sentence in sentences] == [True]
    assert store.report().failures >= 3
    assert store.near(embedding(1)) != []


# The hot tier, time to live, and other indices


def test_a_hot_entry_is_read_once_and_an_old_one_is_a_miss(shared):
    store = EntryStore(shared, "scope", hot_bytes=10**6, time_to_live=60)
    key = store.put(entry(1))
    assert same(store.get(key), entry(1))
    assert same(store.get(key), entry(1))
    report = store.report()
    assert (report.loads, report.hot_hits) == (1, 1)
    now = store.catalog.clock()
    store.catalog.clock = lambda: now + 100
    assert store.get(key) is None
    store.refresh()
    assert store.exact(tokens(1)) is None
    assert store.near(embedding(1)) == []
    assert store.put(entry(1)) == key


@pytest.mark.parametrize("index", ["HNSW16", "IVF4,Flat"])
def test_entries_are_found_and_forgotten_with_any_index(index):
    store = EntryStore("memory", "scope", index=index, dim=8)
    keys = [store.put(entry(seed)) for seed in range(10)]
    assert [store.near(embedding(seed))[0][0] for seed in range(10)] == keys
    store.delete(keys[3])
    assert keys[3] not in {name for name, _ in store.near(embedding(3), 10)}


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": ""}, "scope: expected a string that names the model"),
        ({"scope": None}, "scope"),
        ({"max_bytes": 0}, "max_bytes: expected a number of bytes, at least 1, or None, got 0"),
        ({"max_bytes": "4 GiBs"}, "max_bytes"),
        ({"max_bytes": True}, "max_bytes"),
        ({"location": "/folder"}, "location: .*For a folder write disk: before it"),
        ({"location": {}}, "location: .*an object of a BlobStore of your own"),
        ({"hot_bytes": 0}, "hot_bytes: expected a number of bytes"),
        ({"time_to_live": 0}, "time_to_live: expected a number of seconds above 0"),
        ({"index": "Nonsense", "dim": 8}, "index: expected a string of faiss.index_factory for 8 elements"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EntryStore(**{"location": "memory", "scope": "scope", **options})


def test_without_faiss_a_store_is_refused_when_it_is_made(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hf-kvcaches\[retrieval\]'"):
        EntryStore(f"disk:{tmp_path / 'entries'}", "scope")
    assert not (tmp_path / "entries").exists()


def test_a_server_that_hangs_is_waited_for_once_and_others_do_not_wait_with_it(proxy):
    store = EntryStore(proxy.location, "scope", max_bytes=10**6, timeout=1.0)
    key = store.put(entry(1))
    proxy.hangs = True
    with ThreadPoolExecutor(1) as other, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        waiting = other.submit(store.refresh)
        assert proxy.unanswered.acquire(timeout=30)
        # All of it is known.
        assert store.near(embedding(1))[0][0] == key
        assert len(store.head(key).ids) == 20
        store.used(key)
        assert not waiting.done()
        waiting.result()
        assert store.get(key) is None
        assert store.put(entry(2)) is None
    assert proxy.waits() == 0
    assert len(said) == 1


def forged(tensors):
    yield {**tensors, "keys": torch.full((2, 100), float("nan"), dtype=torch.bfloat16)}


def test_an_entry_with_right_checksums_that_is_none_is_a_miss_and_is_deleted(tmp_path):
    store, blobs = EntryStore(f"disk:{tmp_path}", "scope"), open_blobs(f"disk:{tmp_path}")
    key = store.put(entry(1))
    head, tensors = blobs.changes().added[0].head, blobs.tensors(key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for content in forged(tensors):
            blobs.delete(key)
            blobs.put(key, head, content)
            store.refresh()
            assert store.get(key) is None
            assert key not in store
    store.put(entry(1))
    assert same(store.get(key), entry(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": []}, "ids: expected a row of token ids"),
        ({"ids": [[1]]}, "ids"),
        ({"ids": [1.5]}, "ids"),
        ({"ids": [-1]}, "ids"),
        ({"ids": [1 << 31]}, "ids"),
        ({"embedding": np.zeros(8)}, "entry.embedding: expected a vector of 8 elements and of length 1"),
        ({"embedding": embedding(1, 9)}, "entry.embedding: expected a vector of 8 elements"),
        ({"embedding": np.full(8, np.nan)}, "entry.embedding"),
        ({"embedding": embedding(1)[None]}, "entry.embedding"),
        ({"tensors": {"x": [1]}}, "tensors"),
        ({"tensors": {"x": torch.tensor([1.0, float("nan")])}}, "entry.tensors.*finite numbers"),
        ({"provenance": {"x": float("inf")}}, "head: expected a dict that comes back from JSON"),
        ({"provenance": {"x": {1, 2}}}, "head: expected a dict that comes back from JSON"),
    ],
)
def test_entries_that_can_not_be_stored_are_refused_and_leave_nothing(changes, message):
    store = EntryStore("memory", "scope")
    key = store.put(entry(0))
    with pytest.raises(ConfigError, match=message):
        store.put(Entry(**{**vars(entry(1)), **changes}))
    assert store.ids() == [key]


def test_a_copied_cache_goes_on_with_the_same_store():
    store = EntryStore("memory", "scope")
    assert copy.deepcopy({"store": store})["store"] is store


# Threads and processes


def test_threads_that_put_use_and_delete_at_the_same_time_lose_nothing(location):
    store, failures = EntryStore(location, "scope"), []

    def work(start: int) -> None:
        try:
            for seed in range(start, start + 15):
                key = store.put(entry(seed))
                store.used(key)
                assert same(store.get(key), entry(seed))
                assert store.near(embedding(seed))[0][0] == key
                if seed % 3 == 0:
                    assert store.delete(key)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 15, 30, 10)]
    threads[-1]._args = (60,)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    seeds = [*range(45), *range(60, 75)]
    assert {seed for seed in seeds if store.exact(tokens(seed))} == {seed for seed in seeds if seed % 3}


def put_these(location: str, out: Connection, seeds: list[int], cap: int | None) -> None:
    """Puts entries one by one, and sends the store's report."""
    torch.set_num_threads(1)
    store = EntryStore(location, "scope", cap)
    for seed in seeds:
        store.put(entry(seed))
    out.send(store.report())


def put_on_and_on(location: str, out: Connection) -> None:
    """Puts entries and tells of each that is stored, until it is killed."""
    torch.set_num_threads(1)
    store = EntryStore(location, "scope")
    out.send(-1)
    for seed in range(100_000):
        store.put(entry(seed, size=20_000))
        out.send(seed)


def started(function, *arguments) -> tuple[Connection, object]:
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=function, args=(arguments[0], theirs, *arguments[1:]), daemon=True)
    process.start()
    theirs.close()
    return ours, process


@pytest.mark.usefixtures("quiet")
def test_two_processes_that_put_at_the_same_time_lose_nothing(shared):
    here = EntryStore(shared, "scope")
    # Some prompts are put by both.
    writers = [started(put_these, shared, seeds, None) for seeds in ([*range(30)], [*range(45, 19, -1)])]
    for seed in range(40, 60):
        here.put(entry(seed))
    for out, process in writers:
        assert out.poll(60)
        out.recv()
        process.join()
    here.refresh()
    for store in (here, EntryStore(shared, "scope")):
        assert len(store) == 60
        for seed in range(60):
            key = store.exact(tokens(seed))
            assert same(store.get(key), entry(seed))
            assert store.near(embedding(seed))[0][0] == key
        assert store.report().damaged == 0


def test_two_processes_that_evict_stay_within_the_cap_and_leave_something(shared):
    cap = 5 * one_takes(shared) + 500
    writers = [started(put_these, shared, [*range(start, start + 20)], cap) for start in (0, 100)]
    reports = []
    for out, process in writers:
        assert out.poll(60)
        reports.append(out.recv())
        process.join()
    store = EntryStore(shared, "scope", cap)
    report = store.report()
    assert cap / 2 < report.bytes <= cap
    # Each was evicted by one of them.
    assert sum(each.written - each.evicted for each in reports) == report.entries
    assert all(store.get(key) is not None for key in store.ids())


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("count", "delay"), [(1, 0.0), (2, 0.002), (3, 0.005), (4, 0.01)])
def test_a_process_that_is_killed_while_it_writes_leaves_a_store_that_opens(shared, count, delay):
    out, process = started(put_on_and_on, shared)
    stored = []
    for _ in range(count + 1):
        assert out.poll(60)
        stored.append(out.recv())
    time.sleep(delay)
    process.kill()
    process.join()
    while out.poll():
        try:
            stored.append(out.recv())
        except EOFError:
            break
    store = EntryStore(shared, "scope")
    for seed in stored[1:]:
        assert same(store.get(store.exact(tokens(seed))), entry(seed, size=20_000))
    assert len(store) - (len(stored) - 1) in (0, 1)
    # What it was at may be there in whole or not at all, and can be put.
    unfinished = entry(stored[-1] + 1, size=20_000)
    assert same(store.get(store.put(unfinished)), unfinished)
    assert store.report().damaged == 0
