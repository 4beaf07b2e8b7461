"""A back-end of one's own: that of the guide does as the others do."""

import re
from pathlib import Path
from typing import Any

import pytest

from hf_kvcaches.stores.blobs import StoreUnavailable
from tests.helpers.stores import HEAD, Follower, blob, catalog, fine, key_of, put, read, same

GUIDE = (Path(__file__).parents[2] / "docs" / "writing-a-store.md").read_text(encoding="utf-8")
KEY = key_of(7)


@pytest.fixture
def own(tmp_path: Path) -> Any:
    """Makes objects of the guide's back-end, of one file."""
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL) if "BlobStore):" in code]
    names: dict[str, Any] = {"__name__": __name__}
    exec(example.partition("with SegmentStore")[0], names)
    return lambda: names["SqliteBlobs"](tmp_path / "blobs.db")


def test_blobs_come_back_and_changes_are_told_to_all(own):
    one, two = Follower(own()), Follower(own())
    one.store.put(KEY, HEAD, blob())
    two.follow()
    assert two.known == {KEY: HEAD}
    assert same(two.store.tensors(KEY), blob())
    one.store.put(KEY, {}, blob(1))
    assert same(one.store.tensors(KEY), blob())
    two.store.delete(KEY)
    two.store.put(KEY, {"n": 2}, blob(2))
    one.follow()
    two.follow()
    assert one.known == two.known == {KEY: {"n": 2}}
    assert one.store.tensors("ab") is None
    assert not one.store.delete("ab")


def test_a_cap_pins_and_clear_work_as_with_others(own):
    made = catalog(own())
    put(made, "a", "b", "c")
    made.pin("a")
    made.max_bytes = made.bytes - 1
    made.refresh()
    assert made.contents.keys == {"a", "c"}
    assert read(made, "a", fine) is not None
    made.clear()
    made.refresh()
    assert (made.contents.keys, made.blobs.pinned()) == (set(), frozenset())


def test_a_flipped_bit_is_a_miss_that_is_said_once(own):
    blobs = own()
    made = catalog(blobs)
    put(made, "a", "b")
    blobs.db.execute("UPDATE blobs SET content = CAST(substr(content, 1, length(content) - 1) || x'01' AS BLOB)")
    with pytest.warns(RuntimeWarning, match="A damaged thing is made anew") as said:
        assert read(made, "a", fine) is read(made, "b", fine) is None
    assert len(said) == 1
    assert made.contents.keys == set()


@pytest.mark.parametrize("away", [StoreUnavailable("away"), ConnectionRefusedError("away"), TimeoutError("away")])
def test_a_failed_read_costs_its_own_blob_and_a_server_that_is_away_is_asked_once(own, away):
    blobs, errors = own(), {"a": OSError("broken"), "c": away}
    for key in "abcd":
        blobs.put(key, HEAD, blob())
    read_one, asked = blobs.read, []

    def failing(key):
        asked.append(key)
        if key in errors:
            raise errors[key]
        return read_one(key)

    blobs.read = failing
    found, error = blobs.get_many("abcd")
    assert (list(found), error, asked) == (["b"], errors["a"], ["a", "b", "c"])
