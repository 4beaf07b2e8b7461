"""Blobs on disk: no damage, crash, full disk or other process gives wrong tensors or loses a blob."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from hf_kvcaches.errors import ConfigError
from hf_kvcaches.stores.blobs import StoreUnavailable, open_blobs
from hf_kvcaches.stores.blobs_disk import _LONGEST_JOURNAL, JOURNAL
from hf_kvcaches.stores.files import TEMPORARY_SUFFIX
from tests.stores.blob_helpers import HEAD, PROCESSES, Follower, blob, key_of, put_on_and_on, put_with_little_room, same

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
        assert store.damaged == 0
    assert store.tensors(KEY) is None
    assert store.damaged == len(store.complaints) == 1
    assert KEY in store.complaints[0]
    assert str(folder) in store.complaints[0]
    assert not file_of(folder).exists()
    assert store.changes() == ([], [KEY] if added else [])
    assert store.changes() == ([], [])
    return added != []


def test_a_flipped_bit_in_any_byte_of_a_file_is_a_miss_and_a_complaint(tmp_path):
    open_blobs(f"disk:{tmp_path}").put(KEY, HEAD, blob())
    whole = file_of(tmp_path).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        # Heads are checked when they are listed, bodies when they are read.
        assert listed_though_damaged(tmp_path, content) == (place >= header)


def test_a_file_cut_at_any_length_or_longer_is_a_miss_and_a_complaint(tmp_path):
    open_blobs(f"disk:{tmp_path}").put(KEY, HEAD, blob())
    whole = file_of(tmp_path).read_bytes()
    for length in range(len(whole)):
        assert not listed_though_damaged(tmp_path, whole[:length])
    assert not listed_though_damaged(tmp_path, whole + b"\0")


def test_a_file_damaged_after_it_was_listed_is_found_when_it_is_read(tmp_path):
    store = open_blobs(f"disk:{tmp_path}")
    store.put(KEY, HEAD, blob())
    store.changes()
    content = file_of(tmp_path).read_bytes()
    flipped_header, flipped_body = (
        bytes([*content[:place], content[place] ^ 1, *content[place + 1 :]]) for place in (30, len(content) - 1)
    )
    cases = [(flipped_header, "header's checksum"), (flipped_body, "checksum of its tensors"), (content[:-1], "bytes of")]
    cases += [(content[:200], "its header should take"), (content[:5], "in its header"), (b"", "in its header")]
    for count, (damaged, reason) in enumerate(cases, 1):
        file_of(tmp_path).write_bytes(damaged)
        assert store.tensors(KEY) is None
        assert reason in store.complaints[-1]
        assert store.damaged == count


def test_a_file_renamed_to_another_key_is_damaged(tmp_path):
    store = open_blobs(f"disk:{tmp_path}")
    store.put(KEY, HEAD, blob())
    file_of(tmp_path).rename(file_of(tmp_path, key_of(8)))
    assert store.tensors(KEY) is None
    assert store.tensors(key_of(8)) is None
    assert store.damaged == 1
    assert store.changes() == ([], [])


def test_files_of_others_in_the_folder_are_left_alone(tmp_path):
    others = ["model.safetensors", "ABC.safetensors", "notes.txt", ".safetensors", ".hidden"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    store = open_blobs(f"disk:{tmp_path}")
    store.put(KEY, HEAD, blob())
    assert [stored.key for stored in store.changes().added] == [KEY]
    store.clear()
    assert names(tmp_path) == {*others, JOURNAL}
    assert store.damaged == 0


def test_put_and_delete_leave_no_other_files_than_blob_pin_and_journal(tmp_path):
    store = open_blobs(f"disk:{tmp_path}")
    store.put(KEY, HEAD, blob())
    store.pin(KEY)
    assert names(tmp_path) == {f"{KEY}.kvblob", f"{KEY}.kvblob-pin", JOURNAL}
    assert store.put("ab", {}, {}) == file_of(tmp_path, "ab").stat().st_size
    store.delete(KEY)
    store.delete("ab")
    assert names(tmp_path) == {f"{KEY}.kvblob-pin", JOURNAL}


# Changes


def test_a_file_that_vanished_without_a_word_is_a_miss_and_told_of_then(tmp_path):
    store = open_blobs(f"disk:{tmp_path}")
    store.put(KEY, HEAD, blob())
    store.changes()
    file_of(tmp_path).unlink()
    assert store.tensors(KEY) is None
    assert store.damaged == 0
    assert store.changes() == ([], [KEY])


def test_a_blob_that_came_without_a_word_is_told_of_to_who_puts_it_again(tmp_path):
    # As when its writer was killed before it could tell.
    store = open_blobs(f"disk:{tmp_path}")
    store.put(KEY, HEAD, blob())
    content = file_of(tmp_path).read_bytes()
    store.delete(KEY)
    other = open_blobs(f"disk:{tmp_path}")
    other.changes()
    file_of(tmp_path).write_bytes(content)
    assert other.changes() == ([], [])
    other.put(KEY, HEAD, blob())
    assert [stored.key for stored in other.changes().added] == [KEY]
    assert other.changes() == ([], [])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda journal: journal.unlink(),
        lambda journal: journal.write_bytes(b""),
        lambda journal: journal.write_bytes(journal.read_bytes()[:60]),
        lambda journal: journal.write_bytes(b"0" * 31 + b"\n"),
        lambda journal: journal.write_bytes(b"0" * 31 + b"\n" + f"-{KEY}\n".encode() * 20),
        lambda journal: journal.write_bytes(journal.read_bytes() + b"nonsense\n"),
        lambda journal: journal.write_bytes(os.urandom(5000)),
    ],
)
def test_whatever_happens_to_the_journal_the_folder_is_the_truth(tmp_path, spoil):
    first, second = (Follower(open_blobs(f"disk:{tmp_path}")) for _ in range(2))
    for number in range(3):
        first.store.put(key_of(number), {"n": number}, blob(number))
    second.follow()
    first.store.put(key_of(3), {"n": 3}, blob(3))
    file_of(tmp_path, key_of(0)).unlink()
    spoil(tmp_path / JOURNAL)
    first.follow()
    second.follow()
    assert first.known == second.known == {key_of(number): {"n": number} for number in (1, 2, 3)}
    first.store.put(key_of(4), {"n": 4}, blob(4))
    second.follow()
    assert key_of(4) in second.known
    assert second.store.changes() == ([], [])


def test_a_journal_that_was_deleted_is_begun_anew_by_the_next_put(tmp_path):
    store, other = open_blobs(f"disk:{tmp_path}"), open_blobs(f"disk:{tmp_path}")
    other.changes()
    (tmp_path / JOURNAL).unlink()
    store.put(KEY, HEAD, blob())
    assert [stored.key for stored in other.changes().added] == [KEY]


def test_a_line_of_a_killed_writer_spoils_no_later_change(tmp_path):
    first, second = (Follower(open_blobs(f"disk:{tmp_path}")) for _ in range(2))
    second.follow()
    with open(tmp_path / JOURNAL, "ab") as journal:
        journal.write(b"+abc")
    second.follow()
    first.store.put(KEY, HEAD, blob())
    second.follow()
    assert set(second.known) == {KEY}


def test_a_line_that_is_written_in_two_parts_is_read_when_it_is_whole(tmp_path):
    store = open_blobs(f"disk:{tmp_path}")
    store.changes()
    other = open_blobs(f"disk:{tmp_path}")
    other.put(KEY, HEAD, blob())
    line = f"+{KEY}\n".encode()
    content = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(content[:-5])
    assert content.endswith(line)
    assert store.changes() == ([], [])
    with open(tmp_path / JOURNAL, "ab") as journal:
        journal.write(content[-5:])
    assert [stored.key for stored in store.changes().added] == [KEY]


def test_a_long_journal_is_replaced_when_the_store_is_opened_and_who_reads_it_misses_nothing(tmp_path):
    first, second = (Follower(open_blobs(f"disk:{tmp_path}")) for _ in range(2))
    for number in range(3):
        first.store.put(key_of(number), {"n": number}, blob(number))
    second.follow()
    with open(tmp_path / JOURNAL, "ab") as journal:
        journal.write(f"-{KEY}\n".encode() * (_LONGEST_JOURNAL // 32))
    first.store.put(key_of(3), {"n": 3}, blob(3))
    first.store.delete(key_of(0))
    third = Follower(open_blobs(f"disk:{tmp_path}"))
    assert (tmp_path / JOURNAL).stat().st_size < 100
    third.store.put(key_of(4), {"n": 4}, blob(4))
    for follower in (first, second, third):
        follower.follow()
        assert follower.known == {key_of(number): {"n": number} for number in (1, 2, 3, 4)}
        assert follower.store.changes() == ([], [])


def test_a_long_head_is_told_in_full(tmp_path):
    store = open_blobs(f"disk:{tmp_path}")
    head = {"tokens": list(range(5000))}
    store.put(KEY, head, {f"tensor {n}": torch.zeros(1) for n in range(300)})
    assert store.changes().added[0].head == head


# Crashes


def test_a_writer_killed_at_any_moment_leaves_all_that_it_had_put_and_no_damage(tmp_path):
    count = 0
    for trial, delay in enumerate([0.0, 0.001, 0.003, 0.006, 0.01, 0.017, 0.03, 0.05, 0.08, 0.12]):
        location = f"disk:{tmp_path / str(trial)}"
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
        while told.poll():
            try:
                returned.append(told.recv())
            except EOFError:
                break
        follower.follow()
        fresh = Follower(open_blobs(location))
        fresh.follow()
        assert len(returned) <= len(fresh.known) <= len(returned) + 1
        for number in returned:
            assert follower.known[key_of(number)] == fresh.known[key_of(number)] == {"number": number}
            assert bool((fresh.store.tensors(key_of(number))["x"] == number).all())
        assert (fresh.store.damaged, follower.store.damaged) == (0, 0)
        count += len(returned)
    assert count > 0


def test_temporaries_of_killed_writers_are_swept_when_they_are_old(tmp_path):
    old, young = (tmp_path / f".{key_of(n)}.kvblob.{n:016x}{TEMPORARY_SUFFIX}" for n in range(2))
    other = tmp_path / "old.tmp"
    for path in (old, young, other):
        path.write_bytes(b"x" * 1000)
    for path in (old, other):
        os.utime(path, (time.time() - 700, time.time() - 700))
    store = open_blobs(f"disk:{tmp_path}")
    assert names(tmp_path) == {young.name, other.name, JOURNAL}
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
    assert names(tmp_path) == {JOURNAL, *(f"{key_of(number)}.kvblob" for number in (0, 2, 4))}
    store = open_blobs(f"disk:{tmp_path}")
    assert sorted(stored.key for stored in store.changes().added) == [key_of(number) for number in (0, 2, 4)]
    assert same(store.tensors(key_of(4)), {"x": torch.arange(300)})


@pytest.mark.parametrize("room", [0, 5])
def test_a_blob_that_others_could_not_be_told_of_is_not_stored(tmp_path, room):
    store = open_blobs(f"disk:{tmp_path}")
    with open(tmp_path / JOURNAL, "ab") as journal:
        journal.write(f"-{KEY}\n".encode() * 200)
    told, out = PROCESSES.Pipe(duplex=False)
    limit = (tmp_path / JOURNAL).stat().st_size + room
    writer = PROCESSES.Process(target=put_with_little_room, args=(f"disk:{tmp_path}", out, limit, [10]))
    writer.start()
    assert told.recv().startswith("unavailable")
    writer.join()
    assert names(tmp_path) == {JOURNAL}
    assert store.changes() == ([], [])
    store.put(KEY, HEAD, blob())
    assert [stored.key for stored in store.changes().added] == [KEY]


def test_a_folder_that_went_away_is_unavailable_and_works_when_it_is_back(tmp_path):
    folder = tmp_path / "blobs"
    store = open_blobs(f"disk:{folder}")
    store.put(KEY, HEAD, blob())
    store.changes()
    # No line tells of this one, so it has to be remembered through the failure.
    file_of(folder).rename(tmp_path / "aside")
    assert store.tensors(KEY) is None
    folder.rename(tmp_path / "away")
    for call in (lambda: store.put("ab", {}, {}), store.changes, store.pinned, store.clear, lambda: store.pin(KEY)):
        with pytest.raises(StoreUnavailable, match="blobs can't be used"):
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
