"""Several blobs at once: one exchange with a server, reads side by side, and the same answers as one by one."""

import torch

from hf_kvcaches.stores.catalog import open_blobs
from tests.helpers.stores import blob, key_of

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
