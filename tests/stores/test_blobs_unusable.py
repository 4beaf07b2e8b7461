"""One thing in a folder that can't be used costs itself and nothing else, and what others put there is never touched."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_kvcaches.stores import blobs_disk
from hf_kvcaches.stores.catalog import open_blobs
from hf_kvcaches.stores.files import TEMPORARY_SUFFIX
from tests.helpers.stores import HEAD, Follower, blob, key_of, same

KEY = key_of(7)


def forbidden(path: Path) -> None:
    path.write_bytes(b"secret")
    path.chmod(0)
    with contextlib.suppress(PermissionError), open(path, "rb"):
        pytest.skip("root may read it")


IN_THE_WAY = {
    "folder": lambda path: path.mkdir(),
    "full folder": lambda path: (path / "inside").mkdir(parents=True),
    "FIFO": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a folder": lambda path: path.symlink_to("/proc"),
    "file without permission": forbidden,
}


@pytest.fixture(params=list(IN_THE_WAY))
def in_the_way(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return IN_THE_WAY[request.param]


def test_what_stands_in_a_blobs_place_and_is_none_is_left_out_and_the_rest_works(tmp_path, in_the_way):
    first = Follower(open_blobs(f"disk:{tmp_path}"))
    first.store.put("ab", HEAD, blob())
    in_the_way(tmp_path / f"{KEY}.kvblob")
    second = Follower(open_blobs(f"disk:{tmp_path}"))
    for follower in (first, second):
        follower.follow()
        assert set(follower.known) == {"ab"}
        with pytest.raises(OSError, match=KEY):
            follower.store.tensors(KEY)
        follower.store.put(KEY, HEAD, blob(1))
        assert KEY in follower.store.unreadable
        assert "It is left alone" in follower.store.unreadable
        assert follower.store.complaints == []
        assert same(follower.store.tensors("ab"), blob())
    first.store.put("cd", HEAD, blob(2))
    second.follow()
    assert set(second.known) == {"ab", "cd"}
    assert os.path.lexists(tmp_path / f"{KEY}.kvblob")


def test_clear_deletes_all_but_a_folder(tmp_path):
    store = open_blobs(f"disk:{tmp_path}")
    store.put("ab", HEAD, blob())
    (tmp_path / f"{KEY}.kvblob" / "mine").mkdir(parents=True)
    store.clear()
    assert store.changes() == ([], [])
    assert {path.name for path in tmp_path.iterdir()} == {f"{KEY}.kvblob"}


def test_what_was_in_the_way_is_a_blob_again_when_it_has_gone(tmp_path):
    store = open_blobs(f"disk:{tmp_path}")
    store.put(KEY, HEAD, blob())
    content = (tmp_path / f"{KEY}.kvblob").rename(tmp_path / "aside")
    (tmp_path / f"{KEY}.kvblob").mkdir()
    assert store.changes() == ([], [])
    (tmp_path / f"{KEY}.kvblob").rmdir()
    content.rename(tmp_path / f"{KEY}.kvblob")
    assert [stored.key for stored in store.changes().added] == [KEY]
    assert same(store.tensors(KEY), blob())


def test_an_error_of_the_disk_costs_the_one_file(tmp_path, monkeypatch):
    """As a bad sector does."""
    store = open_blobs(f"disk:{tmp_path}")
    for key in ("ab", KEY):
        store.put(key, HEAD, blob())
    inside = blobs_disk.opened

    def failing(path):
        if path.name.startswith(KEY):
            raise OSError(5, "Input/output error", str(path))
        return inside(path)

    monkeypatch.setattr(blobs_disk, "opened", failing)
    assert [stored.key for stored in store.changes().added] == ["ab"]
    with pytest.raises(OSError, match="Input/output error"):
        store.tensors(KEY)
    assert same(store.tensors("ab"), blob())
    assert "Input/output error" in store.unreadable


def test_a_blob_behind_a_link_is_a_blob_and_a_link_to_nothing_is_none(tmp_path):
    store = open_blobs(f"disk:{tmp_path}")
    store.put(KEY, HEAD, blob())
    (tmp_path / f"{KEY}.kvblob").rename(tmp_path / "elsewhere")
    (tmp_path / f"{KEY}.kvblob").symlink_to("elsewhere")
    assert same(store.tensors(KEY), blob())
    assert [stored.key for stored in store.changes().added] == [KEY]
    (tmp_path / "elsewhere").unlink()
    assert store.tensors(KEY) is None
    assert store.changes() == ([], [KEY])
    assert store.put(KEY, HEAD, blob(1)) > 0
    assert same(store.tensors(KEY), blob(1))


def test_safetensors_files_and_all_else_that_others_have_put_there_stay_as_they_are(tmp_path):
    names = [f"{KEY}.safetensors", "ab.safetensors", "model.safetensors", f"{KEY}.pin", "changes.journal", KEY]
    for name in names:
        save_file({"weight": torch.ones(3)}, tmp_path / name)
    (tmp_path / f"old{TEMPORARY_SUFFIX}").mkdir()
    os.utime(tmp_path / f"old{TEMPORARY_SUFFIX}", (0, 0))
    before = {name: (tmp_path / name).read_bytes() for name in names}
    store = open_blobs(f"disk:{tmp_path}")
    assert store.changes() == ([], [])
    assert store.tensors(KEY) is None
    assert not store.delete(KEY)
    store.put(KEY, HEAD, blob())
    assert same(store.tensors(KEY), blob())
    store.clear()
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
    assert (store.complaints, store.unreadable) == ([], "")


def test_a_file_that_is_cut_or_changed_after_it_was_read_changes_nothing(tmp_path):
    store = open_blobs(f"disk:{tmp_path}")
    big = {"x": torch.arange(1 << 16)}
    store.put(KEY, HEAD, big)
    cut, changed = store.tensors(KEY), store.tensors(KEY)
    path = tmp_path / f"{KEY}.kvblob"
    with open(path, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"\1" * 1000)
    assert same(changed, big)
    os.truncate(path, 100)
    # With a mapped file the process would end here.
    assert same(cut, big)
