"""What is evicted, against the policy written down as a list that is sorted each time."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.stores.worth import Worth


class Slow:
    """The same by looking at everything each time: key -> [size, tokens saved, worth, number of its last use]."""

    def __init__(self) -> None:
        self.held: dict[str, list[float]] = {}
        self.clock = 0.0
        self.uses = 0

    def used(self, key: str, tokens: int) -> None:
        if key in self.held:
            self.uses += 1
            size, saved, _, _ = self.held[key]
            self.held[key] = [size, saved + tokens, self.clock + (saved + tokens) / max(size, 1), self.uses]

    def least(self, excess: int, keep: set[str]) -> list[str]:
        found = []
        for key in sorted(set(self.held) - keep, key=lambda key: self.held[key][2:]):
            if excess <= 0:
                break
            found.append(key)
            excess -= int(self.held[key][0])
            self.clock = max(self.clock, self.held[key][2])
        return found


def least(worth: Worth, excess: int, keep: Collection[str]) -> list[str]:
    """What is evicted to free so many bytes."""
    victims = []
    for key in worth.ascending(keep):
        if excess <= 0:
            break
        victims.append(key)
        excess -= worth.blobs[key].size
        worth.evicted(worth.blobs[key].worth)
    return victims


KEYS = st.sampled_from("abcdefgh")
STEP = st.one_of(
    st.tuples(st.just("add"), KEYS, st.integers(0, 50), st.integers(1, 200)),
    st.tuples(st.just("used"), KEYS, st.integers(1, 200), st.none()),
    st.tuples(st.just("remove"), KEYS, st.none(), st.none()),
    st.tuples(st.just("least"), st.sets(KEYS, max_size=3), st.integers(-5, 120), st.booleans()),
)


@given(steps=st.lists(STEP, max_size=30))
def test_totals_and_evictions_are_those_of_the_slow_way(steps) -> None:
    worth, slow = Worth(), Slow()
    for kind, what, number, more in steps:
        if kind == "add":
            worth.add(what, number, more)
            if what not in slow.held:
                slow.held[what] = [number, 0, 0.0, 0]
                slow.used(what, more)
        elif kind == "used":
            worth.used(what, number)
            slow.used(what, number)
        elif kind == "remove":
            worth.remove(what)
            slow.held.pop(what, None)
        else:
            leaving = least(worth, number, keep=what)
            assert leaving == slow.least(number, what)
            assert not set(leaving) & what
            freed = sum(worth.blobs[key].size for key in leaving)
            # Enough, or all that may go; and none more than it takes.
            assert freed >= number or set(leaving) == set(worth.blobs) - what
            assert not leaving or freed - worth.blobs[leaving[-1]].size < number
            for key in leaving if more else []:
                worth.remove(key)
                slow.held.pop(key)
        assert {key: blob.size for key, blob in worth.blobs.items()} == {key: entry[0] for key, entry in slow.held.items()}
        assert worth.total == sum(blob.size for blob in worth.blobs.values())


def test_what_saved_least_work_a_byte_goes_first() -> None:
    worth = Worth()
    worth.add("large", 1000, 100)
    worth.add("small", 10, 100)
    worth.add("middle", 100, 100)
    assert least(worth, 1010, keep=()) == ["large", "middle"]


def test_of_what_is_worth_the_same_the_one_that_was_used_longest_ago_goes_first() -> None:
    worth = Worth()
    for key in "cab":
        worth.add(key, 10, 100)
    assert least(worth, 30, keep=()) == ["c", "a", "b"]
    worth.remove("a")
    worth.add("a", 10, 100)
    worth.add("c", 10, 100)  # it is there: neither new nor used
    assert least(worth, 10, keep=()) == ["c"]


def fill(worth: Worth, keys: list[str], cap: int) -> list[str]:
    """Adds segments of ten bytes, evicting down to the cap after each; returns what went."""
    gone = []
    for key in keys:
        worth.add(key, 10, 10)
        for old in least(worth, worth.total - cap, keep=()):
            worth.remove(old)
            gone.append(old)
    return gone


def test_what_is_used_again_and_again_stays_however_much_comes_by_once() -> None:
    worth = Worth()
    worth.add("system prompt", 10, 10)
    for number in range(200):
        worth.used("system prompt", 10)
        assert "system prompt" not in fill(worth, [f"question {number}"], cap=50)


def test_what_was_used_much_long_ago_goes_in_the_end() -> None:
    worth = Worth()
    worth.add("old", 10, 10)
    for _ in range(9):
        worth.used("old", 10)
    gone = fill(worth, [str(number) for number in range(200)], cap=50)
    # Its ten uses are worth as much as ten generations of what came by once.
    assert 20 < gone.index("old") < 60


def test_uses_of_what_is_gone_are_ignored() -> None:
    worth = Worth()
    worth.used("never", 10)
    worth.remove("never")
    worth.add("a", 10, 10)
    worth.remove("a")
    worth.used("a", 10)
    assert (worth.total, dict(worth.blobs), least(worth, 10, keep=())) == (0, {}, [])


def test_nothing_goes_without_need() -> None:
    worth = Worth()
    worth.add("a", 10, 10)
    assert least(worth, 0, keep=()) == least(worth, -3, keep=()) == least(worth, 10, keep={"a"}) == []
