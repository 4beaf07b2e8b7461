"""Blobs on disk: no damage, crash, full disk or other process gives wrong tensors or loses a blob, and files of others stay."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.stores.catalog import open_blobs
from hf_kvcaches.stores.files import TEMPORARY_SUFFIX
from tests.helpers.stores import HEAD, PROCESSES, Follower, blob, header_end, key_of, put_with_little_room, same

KEY = key_of(7)


def file_of(folder: Path, key: str = KEY) -> Path:
    return folder / f"{key}.kvblob"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def listed_though_damaged(folder: Path, content: bytes) -> bool:
    """A store opened on this content lists no wrong head, gives no tensors, and says so once. Returns whether it listed the right head."""
    file_of(folder).write_bytes(content)
    store = open_blobs(f"disk:{folder}")
    added = store.changes().added
    assert [stored.head for stored in added] in ([], [HEAD])
    if added:
        assert store.complaints == []
    assert store.tensors(KEY) is None
    assert len(store.complaints) == 1
    assert KEY in store.complaints[0]
    assert str(folder) in store.complaints[0]
    assert not file_of(folder).exists()
    assert store.changes() == ([], [KEY] if added else [])
    assert store.changes() == ([], [])
    return added != []


def test_a_flipped_bit_in_any_byte_and_a_cut_at_any_length_is_a_miss_and_a_complaint(tmp_path):
    open_blobs(f"disk:{tmp_path}").put(KEY, HEAD, blob())
    whole = file_of(tmp_path).read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        # Heads are checked when they are listed, bodies when they are read.
        assert listed_though_damaged(tmp_path, flipped) == (place >= header_end(whole))
        assert not listed_though_damaged(tmp_path, whole[:place])
    assert not listed_though_damaged(tmp_path, whole + b"\0")


def test_put_and_delete_leave_no_other_files_than_blob_and_pin(tmp_path):
    store = open_blobs(f"disk:{tmp_path}")
    store.put(KEY, HEAD, blob())
    store.pin(KEY)
    assert names(tmp_path) == {f"{KEY}.kvblob", f"{KEY}.kvblob-pin"}
    assert store.put("ab", {}, {}) == file_of(tmp_path, "ab").stat().st_size
    store.delete(KEY)
    store.delete("ab")
    assert names(tmp_path) == {f"{KEY}.kvblob-pin"}


# Changes


def test_a_blob_that_is_replaced_within_a_tick_of_the_kernels_clock_is_reported(tmp_path):
    store, other = (Follower(open_blobs(f"disk:{tmp_path}")) for _ in range(2))
    for number in range(200):
        store.store.delete(KEY)
        store.store.put(KEY, {"n": number % 10}, blob(number))
        other.follow()
        assert other.known == {KEY: {"n": number % 10}}


# Crashes


def test_temporaries_of_killed_writers_are_swept_when_they_are_old(tmp_path):
    old, young = (tmp_path / f".{key_of(n)}.kvblob.{n:016x}{TEMPORARY_SUFFIX}" for n in range(2))
    other = tmp_path / "old.tmp"
    for path in (old, young, other):
        path.write_bytes(b"x" * 1000)
    for path in (old, other):
        os.utime(path, (time.time() - 700, time.time() - 700))
    store = open_blobs(f"disk:{tmp_path}")
    assert names(tmp_path) == {young.name, other.name}
    assert store.changes() == ([], [])


def test_a_full_disk_refuses_a_blob_and_leaves_nothing_half_written(tmp_path):
    told, out = PROCESSES.Pipe(duplex=False)
    counts = [100, 1_000_000, 200, 50_000, 300]
    writer = PROCESSES.Process(target=put_with_little_room, args=(f"disk:{tmp_path}", out, 100_000, counts))
    writer.start()
    outcomes = [told.recv() for _ in counts]
    writer.join()
    assert [outcome.split(":")[0] for outcome in outcomes] == ["stored", "unavailable", "stored", "unavailable", "stored"]
    assert "File too large" in outcomes[1]
    assert names(tmp_path) == {f"{key_of(number)}.kvblob" for number in (0, 2, 4)}
    store = open_blobs(f"disk:{tmp_path}")
    assert sorted(stored.key for stored in store.changes().added) == [key_of(number) for number in (0, 2, 4)]
    assert same(store.tensors(key_of(4)), {"x": torch.arange(300)})


def test_a_folder_that_went_away_is_unavailable_and_works_when_it_is_back(tmp_path):
    folder = tmp_path / "blobs"
    store = open_blobs(f"disk:{folder}")
    store.put(KEY, HEAD, blob())
    store.changes()
    # The removal is reported after the failure.
    file_of(folder).rename(tmp_path / "aside")
    assert store.tensors(KEY) is None
    folder.rename(tmp_path / "away")
    for call in (lambda: store.put("ab", {}, {}), store.changes, store.pinned, store.clear, lambda: store.pin(KEY)):
        with pytest.raises(OSError, match="blobs"):
            call()
    assert store.tensors(KEY) is None
    (tmp_path / "away").rename(folder)
    assert store.changes() == ([], [KEY])
    store.put("ab", {}, {})
    assert [stored.key for stored in store.changes().added] == ["ab"]
    assert store.tensors("ab") == {}


@pytest.mark.parametrize("inside", ["file", "file/deeper"])
def test_a_folder_that_is_a_file_is_refused(tmp_path, inside):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="location: expected a folder that can be written to"):
        open_blobs(f"disk:{tmp_path / inside}")


def test_a_folder_is_made_and_a_tilde_is_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    store = open_blobs("disk:~/deep/blobs")
    store.put(KEY, HEAD, blob())
    assert file_of(tmp_path / "deep" / "blobs").exists()
    assert store.place == f"disk:{tmp_path}/deep/blobs"


# What others put into the folder


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
