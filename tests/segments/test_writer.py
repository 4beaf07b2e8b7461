"""Everything that is computed gets written, whoever closes, drops, forks or ends what; and nobody waits forever."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from hf_kvcaches import SegmentReuseCache, SegmentStore
from hf_kvcaches.segments.writer import Writer
from tests.segments.store_helpers import WHOLE, ask, ask_after_fork, blob_files, prompt, right, run_apart, said


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hf_kvcaches-segments"]


def test_a_store_that_is_closed_while_jobs_wait_does_them_first(model, tmp_path):
    begun, go, done = threading.Event(), threading.Event(), []
    store = SegmentStore(f"disk:{tmp_path}", quantization=None)

    def hold() -> None:
        begun.set()
        assert go.wait(30)

    store.later(hold)
    assert begun.wait(30)
    for number in range(5):
        store.later(lambda number=number: done.append(number))
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    assert done == []
    go.set()
    closing.join(30)
    assert not closing.is_alive()
    assert done == list(range(5))
    store.close()


def test_closing_writes_what_the_last_prompt_had_computed(model, tmp_path):
    with SegmentStore(f"disk:{tmp_path}", quantization=None) as store:
        cache = SegmentReuseCache(model, store, mode="exact")
        cache.prefill(prompt(0))
    assert len(blob_files(tmp_path)) > 0
    for thread in writers():  # one that finds no job left
        thread.join(30)
    assert writers() == []


def test_a_store_goes_with_its_last_user_and_its_thread_with_it(model, tmp_path):
    store = SegmentStore(f"disk:{tmp_path}", quantization=None)
    ask(model, prompt(0), store)
    alive = weakref.ref(store)
    del store
    gc.collect()
    for thread in writers():
        thread.join(30)
    assert alive() is None
    assert writers() == []
    # What was computed is written all the same.
    assert right(model, prompt(0), SegmentStore(f"disk:{tmp_path}", quantization=None)).reused == WHOLE


def test_a_job_that_fails_is_said_once_and_the_next_ones_run():
    store, done = SegmentStore(), []
    with said() as sentences:
        for number in range(3):
            store.later(lambda: 1 / 0)
            store.later(lambda number=number: done.append(number))
        store.flush()
    assert sentences == ["Segments were not stored: ZeroDivisionError: division by zero"]
    assert done == [0, 1, 2]


def test_where_warnings_are_errors_nobody_waits_forever(monkeypatch):
    seen, done = [], []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: seen.append(arguments.exc_type))
    writer = Writer()

    def fail() -> None:
        raise RuntimeError("a warning")

    begun = threading.Event()
    writer.add(lambda: begun.wait(30) and None)
    writer.add(fail)
    for number in range(3):
        writer.add(lambda number=number: done.append(number))
    waiting = threading.Thread(target=writer.wait)
    waiting.start()
    begun.set()
    waiting.join(30)
    assert not waiting.is_alive()
    assert (seen, done) == ([RuntimeError], [0, 1, 2])


def test_a_job_may_come_while_another_is_being_added_by_the_same_thread():
    # As when the garbage collector finds a dropped cache just then.
    writer, done = Writer(), []

    def twice() -> None:
        with writer._running:
            writer.add(lambda: done.append(1))
            writer.add(lambda: done.append(2))
        writer.wait()

    thread = threading.Thread(target=twice, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert done == [1, 2]


def test_a_job_that_waits_for_all_jobs_gets_no_deadlock():
    writer, done = Writer(), []
    writer.add(writer.wait)
    writer.add(lambda: done.append(1))
    waiting = threading.Thread(target=writer.wait, daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
    assert done == [1]


def test_many_threads_that_add_and_wait_lose_no_job():
    writer, done = Writer(), []

    def work(mine: int) -> None:
        for step in range(100):
            writer.add(lambda step=step: done.append((mine, step)))
            if step % 7 == 0:
                writer.wait()
                assert (mine, step) in done[-2000:]

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    writer.wait()
    assert sorted(done) == [(mine, step) for mine in range(8) for step in range(100)]
    # Each one's in its order.
    for mine in range(8):
        assert [step for whose, step in done if whose == mine] == list(range(100))


def test_in_a_forked_child_the_store_goes_on(tmp_path):
    assert run_apart(ask_after_fork, f"disk:{tmp_path}") == [WHOLE, 0, WHOLE]


EXIT = """
import sys, time, torch
from hf_kvcaches import SegmentReuseCache, SegmentStore
from tests.segments.store_helpers import ask, prompt, small
torch.set_num_threads(1)
model, folder = small(), sys.argv[1]
busy = SegmentStore(f"disk:{folder}/busy", quantization=None)
busy.later(lambda: time.sleep(0.3))
ask(model, prompt(0), busy)
held = SegmentStore(f"disk:{folder}/held", quantization=None)
cache = SegmentReuseCache(model, held, mode="exact", spans=[[(0, 16), (16, 32), (32, 48)]])
model.generate(prompt(0), past_key_values=cache, max_new_tokens=1, pad_token_id=0)
raise KeyboardInterrupt
"""


def test_an_interpreter_that_ends_writes_what_waits_first(model, tmp_path):
    # Of one store the thread is behind; of the other nobody has asked for what a living cache holds.
    root = Path(__file__).parent.parent.parent
    ended = subprocess.run([sys.executable, "-c", EXIT, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=120)
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt", ended.stderr
    for name in ("busy", "held"):
        assert right(model, prompt(0), SegmentStore(f"disk:{tmp_path / name}", quantization=None)).reused == WHOLE
