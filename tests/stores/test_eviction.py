"""Which blobs are evicted, against the policy written down as a list that is sorted each time."""

from collections.abc import Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st

from hf_kvcaches.stores.blobs import BlobHead, MemoryBlobs, NewBlob
from hf_kvcaches.stores.catalog import Catalog
from tests.helpers.stores import catalog as catalog_of


class Sized(MemoryBlobs):
    """Blobs that take as many bytes as their heads say."""

    def heads(self, keys: list[str]) -> list[BlobHead]:
        return [blob._replace(bytes=blob.head["size"]) for blob in super().heads(keys)]


def catalog() -> Catalog:
    return catalog_of(Sized())


def add(blobs: Catalog, key: str, size: int, tokens: int) -> None:
    blobs.put([NewBlob(key, {"size": size, "tokens": tokens}, {})])
    blobs.follow()


def evict(blobs: Catalog, excess: int, keep: Collection[str] = ()) -> set[str]:
    """The blobs that are evicted to free so many bytes, some others being pinned."""
    before = set(blobs.entries)
    for key in before:
        blobs.pin(key, key in keep)
    blobs.max_bytes = max(blobs.bytes - excess, 0)
    blobs.evict()
    return before - set(blobs.entries)


class Slow:
    """The same by looking at everything each time: key -> [size, tokens saved, worth, number of its last use]."""

    def __init__(self) -> None:
        self.blobs: dict[str, list[float]] = {}
        self.clock = 0.0
        self.uses = 0

    def add(self, key: str, size: int, tokens: int) -> None:
        if key not in self.blobs:
            self.blobs[key] = [size, 0, 0.0, 0]
            self.used(key, tokens)

    def used(self, key: str, tokens: int) -> None:
        if key in self.blobs:
            self.uses += 1
            size, saved, _, _ = self.blobs[key]
            self.blobs[key] = [size, saved + tokens, self.clock + (saved + tokens) / max(size, 1), self.uses]

    def evict(self, excess: int, keep: Collection[str]) -> Sequence[str]:
        victims = []
        total = self.total()
        cap = max(total - excess, 0)
        # A blob that is larger than the cap first.
        for key in sorted(set(self.blobs) - set(keep), key=lambda key: (self.blobs[key][0] <= cap, *self.blobs[key][2:])):
            if total <= cap:
                break
            size, _, worth, _ = self.blobs.pop(key)
            victims.append(key)
            total -= size
            self.clock = max(self.clock, worth)
        return victims

    def total(self) -> float:
        return sum(size for size, *_ in self.blobs.values())


KEYS = st.sampled_from("abcdef01")
STEP = st.one_of(
    st.tuples(st.just("add"), KEYS, st.integers(0, 50), st.integers(1, 200)),
    st.tuples(st.just("used"), KEYS, st.integers(1, 200), st.none()),
    st.tuples(st.just("remove"), KEYS, st.none(), st.none()),
    st.tuples(st.just("evict"), st.sets(KEYS, max_size=3), st.integers(-5, 120), st.none()),
)


@given(steps=st.lists(STEP, max_size=30))
def test_totals_and_evictions_are_those_of_the_slow_way(steps) -> None:
    blobs, slow = catalog(), Slow()
    for kind, what, number, more in steps:
        if kind == "add":
            add(blobs, what, number, more)
            slow.add(what, number, more)
        elif kind == "used":
            blobs.used(what, number)
            slow.used(what, number)
        elif kind == "remove":
            blobs.delete(what)
            slow.blobs.pop(what, None)
        else:
            sizes, cap = {key: entry.size for key, entry in blobs.entries.items()}, max(blobs.bytes - number, 0)
            victims = slow.evict(number, what)
            assert evict(blobs, number, keep=what) == set(victims)
            assert not set(victims) & what
            # Enough, or all that may go; and none more than it takes.
            assert blobs.bytes <= cap or set(blobs.entries) <= what
            assert not victims or blobs.bytes + sizes[victims[-1]] > cap
        assert {key: entry.size for key, entry in blobs.entries.items()} == {key: values[0] for key, values in slow.blobs.items()}
        assert blobs.bytes == slow.total()


def fill(blobs: Catalog, keys: list[str], cap: int) -> list[str]:
    """Adds blobs of ten bytes, evicting down to the cap after each; returns what went."""
    gone: list[str] = []
    for key in keys:
        add(blobs, key, 10, 10)
        gone += evict(blobs, blobs.bytes - cap)
    return gone


def test_a_blob_that_is_used_again_and_again_stays_however_much_comes_by_once() -> None:
    blobs = catalog()
    add(blobs, "aaaa", 10, 10)
    for number in range(200):
        blobs.used("aaaa", 10)
        assert "aaaa" not in fill(blobs, [f"{number:x}"], cap=50)


def test_a_blob_that_was_used_much_long_ago_goes_in_the_end() -> None:
    blobs = catalog()
    add(blobs, "aaaa", 10, 10)
    for _ in range(9):
        blobs.used("aaaa", 10)
    gone = fill(blobs, [f"{number:x}" for number in range(200)], cap=50)
    # Its ten uses are worth as much as ten generations of what came by once.
    assert 20 < gone.index("aaaa") < 60
