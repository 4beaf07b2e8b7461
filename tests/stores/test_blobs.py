"""A store of blobs does as a dict does, wherever the blobs lie and whoever looks."""

import contextlib
import itertools
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.stores.catalog import open_blobs
from tests.helpers.stores import HEAD, PROCESSES, Follower, blob, key_of, put_on_and_on, put_some, same

KEY = key_of(7)
_numbers = itertools.count()


def handles(location: str) -> list[Follower]:
    """Two handles on one store; in memory there is only one."""
    first = Follower(open_blobs(location))
    return [first] if location == "memory" else [first, Follower(open_blobs(location))]


def test_a_head_is_a_copy(location):
    store, head = open_blobs(location), {"list": [1]}
    store.put(KEY, head, blob())
    head["list"].append(2)
    ((_, told, _),) = store.changes().added
    assert told == {"list": [1]}


def test_who_writes_into_what_was_handed_out_spoils_no_later_reader(shared):
    store = open_blobs(shared)
    store.put(KEY, HEAD, blob())
    store.tensors(KEY)["scale"][3] += 1
    assert same(store.tensors(KEY), blob())
    assert store.complaints == []


def test_reshaping_what_was_handed_out_in_place_leaves_the_store_alone(location):
    store = open_blobs(location)
    store.put(KEY, HEAD, blob())
    store.tensors(KEY)["scale"].unsqueeze_(0)
    assert same(store.tensors(KEY), blob())


OPERATION = st.tuples(
    st.sampled_from(["put", "put", "put", "delete", "pin", "unpin", "changes", "changes", "read", "clear", "open"]),
    st.integers(0, 1),
    st.integers(0, 3),
    st.integers(0, 2),
)


@given(operations=st.lists(OPERATION, max_size=25), kind=st.sampled_from(["memory", "disk", "redis"]))
def test_any_order_of_calls_by_two_handles_does_as_a_dict_does(shared_server, operations, kind):
    with tempfile.TemporaryDirectory() as folder:
        location = {"memory": "memory", "disk": f"disk:{folder}", "redis": f"{shared_server.location}?prefix=any{next(_numbers)}"}[kind]
        users = handles(location)
        expected, pins = {}, set()
        for what, who, number, content in operations:
            user, key = users[who % len(users)], key_of(number)
            if what == "put":
                user.store.put(key, {"content": content}, blob(content))
                expected.setdefault(key, content)
            elif what == "delete":
                assert user.store.delete(key) == (expected.pop(key, None) is not None)
            elif what in ("pin", "unpin"):
                user.store.pin(key, what == "pin")
                (pins.add if what == "pin" else pins.discard)(key)
            elif what == "changes":
                user.follow()
                assert user.known == {k: {"content": c} for k, c in expected.items()}
            elif what == "read":
                read = user.store.tensors(key)
                assert same(read, blob(expected[key])) if key in expected else read is None
                assert user.store.pinned() == pins
            elif what == "clear":
                user.store.clear()
                expected, pins = {}, set()
            elif kind != "memory":
                users[who % len(users)] = Follower(open_blobs(location))
        for user in users:
            user.follow()
            assert user.known == {k: {"content": c} for k, c in expected.items()}
            assert user.store.changes() == ([], [])
            assert user.store.complaints == []
            user.store.close()


@pytest.fixture
def threads_that_take_turns_often() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_threads_that_put_read_and_delete_see_whole_blobs(location):
    store = open_blobs(location)

    def work(mine: int) -> None:
        for step in range(12):
            shared, own = step % 4, 100 + mine * 100 + step
            store.put(key_of(shared), {"n": shared}, blob(shared))
            store.put(key_of(own), {"n": own}, blob(own))
            assert same(store.tensors(key_of(own)), blob(own))
            read = store.tensors(key_of(shared))
            assert read is None or same(read, blob(shared))
            store.pin(key_of(own), step % 2 == 0)
            if step % 3 == 0:
                store.delete(key_of(shared))
                assert store.delete(key_of(own))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert store.complaints == []
    left = {stored.key for stored in store.changes().added} - {key_of(shared) for shared in range(4)}
    assert left == {key_of(100 + mine * 100 + step) for mine in range(8) for step in range(12) if step % 3}
    assert store.pinned() == {key_of(100 + mine * 100 + step) for mine in range(8) for step in range(0, 12, 2)}


def test_of_threads_that_read_a_damaged_blob_at_once_one_complains(shared):
    store = open_blobs(shared)
    store.put(KEY, HEAD, {"x": torch.zeros(300_000)})
    damage(shared, KEY)
    together = threading.Barrier(8)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: (together.wait(), store.tensors(KEY))[1], range(8))) == [None] * 8
    assert len(store.complaints) == 1


def test_what_a_server_damaged_after_it_was_verified_is_found_by_the_next_object(redis_location):
    store = open_blobs(redis_location)
    tensors = {"x": torch.zeros(300_000)}
    store.put(KEY, HEAD, tensors)
    assert same(store.tensors(KEY), tensors)
    damage(redis_location, KEY)
    assert open_blobs(redis_location).tensors(KEY) is None
    assert store.tensors(KEY) is None
    assert store.changes() == ([], [])


def damage(location: str, key: str) -> None:
    """Flips a bit in the tensors of a blob."""
    if location.startswith("disk:"):
        path = Path(location.removeprefix("disk:")) / f"{key}.kvblob"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        import redis

        address, _, prefix = location.partition("?prefix=")
        redis.Redis.from_url(address).setrange(f"{prefix}:body:{key}", 500_000, b"\1")


def test_what_threads_that_ask_for_changes_at_once_are_told_adds_up_to_what_there_is(location, threads_that_take_turns_often):
    store = open_blobs(location)
    told, rounds = [], 1000 if location == "memory" else 100
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            told.append(store.changes())

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask) for _ in range(4)]
        for number in range(rounds):
            store.put(key_of(number), {}, {})
            if number % 2:
                store.delete(key_of(number))
        done.set()
        for each in asking:
            each.result()
    told.append(store.changes())
    balance = Counter(stored.key for news in told for stored in news.added)
    balance.subtract(key for news in told for key in news.removed)
    assert +balance == {key_of(number): 1 for number in range(0, rounds, 2)}
    assert -balance == {}


def test_processes_that_put_the_same_blobs_at_once_all_see_each_once(shared):
    here = Follower(open_blobs(shared))
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(3)]
    workers = [PROCESSES.Process(target=put_some, args=(shared, out, list(range(n * 10, n * 10 + 20)))) for n, (_, out) in enumerate(pipes)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        here.follow()
    for n, ((told, _), worker) in enumerate(zip(pipes, workers, strict=True)):
        worker.join()
        assert set(told.recv()) >= {key_of(number) for number in range(n * 10, n * 10 + 20)}
    here.follow()
    assert here.known == {key_of(number): {"number": number} for number in range(40)}
    assert all(same(here.store.tensors(key_of(number)), blob(number)) for number in range(40))
    assert here.store.complaints == []


def test_a_writer_killed_at_any_moment_leaves_all_that_it_had_put_and_no_damage(shared):
    count = 0
    for trial, delay in enumerate([0.0, 0.001, 0.003, 0.006, 0.01, 0.017, 0.03, 0.05, 0.08, 0.12]):
        location = f"{shared}{trial}"
        told, out = PROCESSES.Pipe(duplex=False)
        writer = PROCESSES.Process(target=put_on_and_on, args=(location, out, 200_000))
        writer.start()
        out.close()
        assert told.recv() == -1
        follower = Follower(open_blobs(location))
        follower.follow()
        time.sleep(delay)
        writer.kill()
        writer.join()
        returned = []
        with contextlib.suppress(EOFError):
            while told.poll():
                returned.append(told.recv())
        fresh = Follower(open_blobs(location))
        for each in (follower, fresh):
            each.follow()
            assert each.store.complaints == []
        assert {key_of(number) for number in returned} <= set(fresh.known)
        assert len(fresh.known) <= len(returned) + 1
        assert follower.known == fresh.known
        for key, head in fresh.known.items():
            assert bool((fresh.store.tensors(key)["x"] == head["number"]).all())
        fresh.store.clear()
        count += len(returned)
    assert count > 0


@pytest.mark.parametrize(
    "location",
    ["", "disk", "disk:", "folder", "/tmp/x", "file:///tmp", "Memory", "memory:", "redis", "redis:", "redis://", None, 3, Path("/tmp")],
)
def test_a_location_that_is_none_is_refused_with_a_hint(location):
    with pytest.raises(ConfigError, match=r"location: expected .*redis://host:port/db"):
        open_blobs(location)


@pytest.mark.parametrize("call", ["put", "tensors", "delete", "pin"])
def test_a_key_that_is_none_is_refused_by_every_method(location, call):
    store = open_blobs(location)
    with pytest.raises(ConfigError, match="key: expected"):
        getattr(store, call)("../x", *([{}, {}] if call == "put" else []))


def test_what_can_not_be_stored_is_refused_and_leaves_nothing(location):
    store = open_blobs(location)
    with pytest.raises(ConfigError, match="head: expected"):
        store.put(KEY, {"a": (1,)}, blob())
    with pytest.raises(ConfigError, match=r"tensors\['x'\]: expected"):
        store.put(KEY, {}, {"x": [1]})
    assert store.changes() == ([], [])
    assert store.tensors(KEY) is None


def test_a_blob_that_is_replaced_while_it_is_read_is_a_miss_or_whole_and_never_damage(location):
    reader = open_blobs(location)
    writer, over = reader if location == "memory" else open_blobs(location), threading.Event()
    contents = [{"x": torch.full((300_000,), number, dtype=torch.int32)} for number in range(2)]
    wrong: list[object] = []

    def replace() -> None:
        for number in itertools.cycle(range(2)):
            writer.delete(KEY)
            writer.put(KEY, {"number": number}, contents[number])
            if over.is_set():
                return

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(60):
            for found in (reader.tensors(KEY), reader.get_many([KEY]).blobs.get(KEY)):
                wrong += [found] if found is not None and len(found["x"].unique()) != 1 else []
            wrong += [head for head in reader.heads([KEY]) if head.head.get("number") not in (0, 1)]
    finally:
        over.set()
        thread.join()
    assert list(reader.complaints) == []
    assert wrong == []


# Several at once


KEYS = [key_of(number) for number in range(12)]


def filled(location: str):
    store = open_blobs(location)
    for number, key in enumerate(KEYS):
        store.put(key, {"number": number}, blob(number))
    return store


def test_many_blobs_are_what_each_is_alone_without_those_that_are_missing(location):
    store = filled(location)
    store.delete(KEYS[3])
    found, error = store.get_many([*KEYS, key_of(99)])
    assert error is None
    assert list(found) == [key for key in KEYS if key != KEYS[3]]
    for key in found:
        alone = store.tensors(key)
        assert found[key].keys() == alone.keys()
        assert all(torch.equal(found[key][name], alone[name]) for name in alone)


def test_a_damaged_blob_among_many_costs_itself_alone(tmp_path):
    store = filled(f"disk:{tmp_path}")
    path = tmp_path / f"{KEYS[5]}.kvblob"
    path.write_bytes(path.read_bytes()[:-1])
    found, _ = store.get_many(KEYS)
    assert ["damaged" in complaint for complaint in store.complaints] == [True]
    assert list(found) == [key for key in KEYS if key != KEYS[5]]
    assert not path.exists()


def test_a_server_is_asked_once_for_all(proxy):
    store = filled(proxy.location)
    before = proxy.asked
    assert len(store.get_many(KEYS).blobs) == len(KEYS)
    assert proxy.asked - before <= 2  # a long message may come in two parts


def test_a_body_that_takes_longer_than_an_answer_may_arrives_as_long_as_it_comes(proxy):
    store = open_blobs(proxy.location, timeout=0.5)
    large = {"x": torch.arange(3 * 2**20, dtype=torch.int32)}
    store.put(KEYS[0], {}, large)
    proxy.delay = 0.2  # for what is asked
    store.begin()
    assert torch.equal(store.get_many([KEYS[0]]).blobs[KEYS[0]]["x"], large["x"])
