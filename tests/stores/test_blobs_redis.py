"""Blobs in Redis: no damage, outage or full server gives wrong tensors, half a blob or a long wait."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_kvcaches.errors import ConfigError, MissingDependencyError
from hf_kvcaches.stores import blobs_redis
from hf_kvcaches.stores.blobs import BlobStore, StoreUnavailable
from hf_kvcaches.stores.catalog import open_blobs
from tests.helpers.stores import HEAD, Follower, blob, header_end, key_of, same

KEY = key_of(7)


def prefix_of(location: str) -> str:
    return location.partition("?prefix=")[2]


def test_all_keys_lie_under_the_prefix_and_stores_with_other_prefixes_are_apart(shared_server):
    server, client = shared_server, shared_server.client()
    client.flushall()
    first, second = open_blobs(f"{server.location}?prefix=one"), open_blobs(f"{server.location}?prefix=two")
    first.put(KEY, HEAD, blob())
    first.pin(KEY)
    assert sorted(client.keys()) == sorted(f"one:{rest}".encode() for rest in (f"body:{KEY}", "headers", "index", "pins", "state"))
    assert second.tensors(KEY) is None
    assert second.changes() == ([], [])
    second.clear()
    assert same(first.tensors(KEY), blob())
    first.clear()
    assert client.keys() == []
    open_blobs(server.location).put(KEY, HEAD, blob())
    assert all(key.startswith(b"hf_kvcaches:") for key in client.keys())  # noqa: SIM118 - not a dict
    client.flushall()


def test_the_bytes_of_a_blob_are_those_that_the_server_holds(shared_server, redis_location):
    store, prefix = open_blobs(redis_location), prefix_of(redis_location)
    client = shared_server.client()
    size = store.put(KEY, HEAD, blob())
    assert size == client.strlen(f"{prefix}:body:{KEY}")
    assert store.put(KEY, HEAD, blob()) == size
    assert store.changes().added[0].bytes == size


@pytest.mark.parametrize("place", [0, 20, 60, -1, None])
def test_a_damaged_body_is_a_miss_and_a_damaged_head_is_never_listed_with_a_complaint(shared_server, redis_location, place):
    store, client, prefix = open_blobs(redis_location), shared_server.client(), prefix_of(redis_location)
    store.put(KEY, HEAD, blob())
    whole = client.get(f"{prefix}:body:{KEY}")
    length = header_end(whole)
    flipped = bytearray(whole[:-1] if place is None else whole)
    flipped[place or 0] ^= place is not None
    client.set(f"{prefix}:body:{KEY}", bytes(flipped))
    client.hset(f"{prefix}:headers", KEY, bytes(flipped[:length]))
    assert place == -1 or store.changes() == ([], [])
    assert store.tensors(KEY) is None
    assert len(store.complaints) == 1
    assert KEY in store.complaints[0]
    assert redis_location in store.complaints[0]
    assert not client.exists(f"{prefix}:index", f"{prefix}:headers", f"{prefix}:body:{KEY}")


@pytest.mark.parametrize("gone", ["body", "headers", "index", "body headers", "body index", "headers index", "body headers index"])
def test_whatever_a_server_lost_of_a_blob_is_not_listed_and_no_damage_and_is_whole_once_it_is_put_again(
    shared_server, redis_location, gone
):
    store, other, client = open_blobs(redis_location), open_blobs(redis_location), shared_server.client()
    store.put(KEY, HEAD, blob())
    assert [stored.key for stored in other.changes().added] == [KEY]
    for table in gone.split():
        name = f"{prefix_of(redis_location)}:{table}"
        client.delete(f"{name}:{KEY}") if table == "body" else client.hdel(name, KEY)
    assert store.tensors(KEY) is None or "body" not in gone
    assert open_blobs(redis_location).changes() == ([], [])
    if gone in ("body", "headers"):  # of which the last reader but one has deleted the rest
        assert other.changes() == ([], [KEY])
    store.put(KEY, HEAD, blob())
    fresh = open_blobs(redis_location)
    assert [stored.key for stored in fresh.changes().added] == [KEY]
    assert same(fresh.tensors(KEY), blob())
    assert [store.complaints, other.complaints, fresh.complaints] == [[], [], []]


@pytest.mark.parametrize("name", [b"", b"x\xff\x80", "größe".encode()])
def test_a_name_in_the_index_that_is_no_key_is_not_listed(shared_server, redis_location, name):
    store, prefix = open_blobs(redis_location), prefix_of(redis_location)
    store.put(KEY, HEAD, blob())
    shared_server.client().hset(f"{prefix}:index", name, b"x" * 16)
    assert [stored.key for stored in store.changes().added] == [KEY]


# Outages


def test_a_server_that_went_away_fails_at_once_and_works_when_it_is_back(server, monkeypatch):
    monkeypatch.setattr(blobs_redis, "_PAUSE", 60.0)
    store = open_blobs(server.location)
    store.put(KEY, HEAD, blob())
    store.changes()
    server.stop()
    calls = (lambda: store.tensors(KEY), lambda: store.put("ab", {}, {}), lambda: store.delete(KEY), store.changes)
    calls += (store.pinned, store.clear, lambda: store.pin(KEY))
    for call in calls:
        with pytest.raises(StoreUnavailable, match=r"redis://127\.0\.0\.1"):
            call()
    server.start()
    # Still within the pause.
    with pytest.raises(StoreUnavailable, match="a moment ago"):
        store.changes()
    store._pause_until = time.monotonic() + 0.2
    time.sleep(0.25)
    # It kept nothing on disk.
    assert store.changes() == ([], [KEY])
    store.put("ab", HEAD, blob())
    assert same(store.tensors("ab"), blob())
    assert [stored.key for stored in store.changes().added] == ["ab"]


def test_a_server_that_hangs_is_waited_for_once(proxy):
    store = open_blobs(proxy.location, timeout=0.3)
    store.put(KEY, HEAD, blob())
    proxy.hangs = True
    with pytest.raises(StoreUnavailable, match="can't be reached"):
        store.tensors(KEY)
    for call in (lambda: store.tensors(KEY), store.changes, store.pinned, lambda: store.put("ab", {}, {}), lambda: store.delete(KEY)) * 20:
        with pytest.raises(StoreUnavailable, match="a moment ago"):
            call()
    assert proxy.waits() == 1
    assert 3 < store._pause_until - time.monotonic() <= 5
    proxy.hangs, store._pause_until = False, 0.0
    # The late answer to the call that was given up is not taken for one to this.
    assert [stored.key for stored in store.changes().added] == [KEY]
    assert same(store.tensors(KEY), blob())


def test_all_calls_of_a_request_share_one_budget_of_time_and_other_requests_and_threads_have_their_own(proxy):
    store = open_blobs(proxy.location, timeout=0.5)
    for number in range(20):
        store.put(key_of(number), HEAD, blob(number))
    proxy.delay = 0.2

    def request() -> tuple[int, str]:
        """How many calls are answered, and why no more."""
        store.begin()
        for number in range(20):
            try:
                assert same(store.tensors(key_of(number)), blob(number))
            except StoreUnavailable as error:
                return number, str(error)
        return 20, ""

    with ThreadPoolExecutor(1) as other:
        # Nothing is wrong with the server, so the next request asks again.
        outcomes = [request(), other.submit(request).result(), request()]
    assert all(1 <= answered <= 3 and "has kept this request waiting for 0.5 s" in reason for answered, reason in outcomes)
    # Who has begun no request has no budget.
    with ThreadPoolExecutor(1) as other:
        assert all(other.submit(store.tensors, key_of(number)).result() is not None for number in range(4))


def test_clear_deletes_all_blobs_though_that_takes_longer_than_a_request_may(proxy):
    store = open_blobs(proxy.location, timeout=0.3)
    for number in range(20):
        store.put(key_of(number), HEAD, blob(number))
    proxy.delay = 0.05
    store.begin()
    store.clear()
    assert store.versions() == {}
    assert all(store.tensors(key_of(number)) is None for number in range(20))


def test_a_list_of_heads_that_takes_longer_than_a_request_is_gone_on_with_by_the_next(proxy, monkeypatch):
    monkeypatch.setattr(blobs_redis, "_HEADS", 10)
    writer, store = open_blobs(proxy.location), open_blobs(proxy.location, timeout=0.3)
    for number in range(1000):
        writer.put(key_of(number), {"number": number}, {})
    proxy.delay = 0.01
    known: set[str] = set()
    requests = 0
    added = [None]
    while added:
        store.begin()
        added, removed = store.changes()
        known = known - set(removed) | {stored.key for stored in added}
        requests += 1
        if requests < 4:
            # What comes and goes meanwhile is told of behind the list.
            writer.put(key_of(2000 + requests), {}, {})
            writer.delete(key_of(requests))
        else:
            proxy.delay = 0
    assert requests > 4
    assert known == {key_of(number) for number in (0, *range(4, 1000), 2001, 2002, 2003)}


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "1", True, None])
def test_a_timeout_that_is_none_is_refused(timeout):
    with pytest.raises(ConfigError, match="timeout: expected a number of seconds above 0"):
        open_blobs("memory", timeout=timeout)


def put_many(store: BlobStore) -> None:
    for number in range(100, 200):
        store.put(key_of(number), {}, {"x": torch.zeros(50_000)})


def test_a_full_server_refuses_a_blob_whole_and_goes_on_giving_the_others(server):
    store = open_blobs(server.location)
    store.put(KEY, HEAD, blob())
    store.changes()
    client = server.client()
    client.config_set("maxmemory", str(client.info("memory")["used_memory"] + 300_000))
    with pytest.raises(StoreUnavailable, match=r"refuses: .*maxmemory"):
        put_many(store)
    stored = {stored.key for stored in store.changes().added}
    assert {key.removeprefix(b"hf_kvcaches:body:").decode() for key in client.keys("hf_kvcaches:body:*")} == stored | {KEY}
    assert same(store.tensors(KEY), blob())
    # A full server still deletes.
    other = open_blobs(server.location)
    other.changes()
    client.config_set("maxmemory", "1")
    assert store.delete(KEY)
    assert store.changes() == ([], [KEY])
    assert other.changes() == ([], [KEY])
    assert other.tensors(KEY) is None
    client.config_set("maxmemory", "0")
    store.put("ab", HEAD, blob())
    assert same(store.tensors("ab"), blob())


def test_a_server_that_forgot_all_is_an_empty_store(server):
    first, second = (Follower(open_blobs(server.location)) for _ in range(2))
    first.store.put(KEY, HEAD, blob())
    second.follow()
    server.client().flushall()
    second.follow()
    assert second.known == {}
    first.store.put(key_of(8), HEAD, blob())
    second.follow()
    first.follow()
    assert set(second.known) == set(first.known) == {key_of(8)}


# Opening


def test_a_server_that_does_not_answer_is_refused_with_a_hint(server):
    server.stop()
    with pytest.raises(ConfigError, match=r"location: expected a Redis server that answers at redis://127.0.0.1.*Start it"):
        open_blobs(server.location)


@pytest.mark.parametrize("rest", ["x:y/0", "127.0.0.1:PORT/db", "127.0.0.1:PORT/0?prefix=", "127.0.0.1:PORT/0?prefix=a*b", "[::1"])
def test_an_address_that_is_none_is_refused(shared_server, rest):
    with pytest.raises(ConfigError, match="location: expected the address of a Redis server"):
        open_blobs(f"redis://{rest.replace('PORT', str(shared_server.port))}")


@pytest.mark.parametrize("option", ["decode_responses=True", "socket_timeout=x", "nonsense=1"])
def test_an_option_that_redis_does_not_know_or_that_would_break_the_store_is_refused(shared_server, option):
    with pytest.raises(ConfigError, match="location: expected"):
        open_blobs(f"{shared_server.location}?{option}")


def test_passwords_are_in_no_message(server):
    location = f"redis://user:secret@127.0.0.1:{server.port}/0"
    with pytest.raises(ConfigError) as raised:
        open_blobs(location)
    assert "secret" not in str(raised.value)
    for wrong in ("redis://user:secret@", "redis://:secret@127.0.0.1:x/0", "http://user:secret@host"):
        with pytest.raises(ConfigError) as raised:
            open_blobs(wrong)
        assert "secret" not in str(raised.value)
    server.client().acl_setuser("user", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"])
    store = open_blobs(location)
    assert "secret" not in store.place
    server.stop()
    with pytest.raises(StoreUnavailable) as unavailable:
        store.changes()
    assert "secret" not in str(unavailable.value)


def test_without_redis_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingDependencyError, match=r"hf-kvcaches\[distributed\]"):
        open_blobs("redis://127.0.0.1:1/0")
