"""A catalog of blobs: what is in step with the place, what is evicted, and what is a miss."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch

from hf_kvcaches.errors import ArtifactError, ConfigError
from hf_kvcaches.stores.blobs import Stored, StoreUnavailable
from hf_kvcaches.stores.catalog import Catalog


class Known:
    """Contents that take blobs with a number of tokens in their head."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.old: list[str] = []

    def add(self, blobs: Sequence[Stored]) -> dict[str, int]:
        tokens = {blob.key: blob.head["tokens"] for blob in blobs if "tokens" in blob.head}
        self.keys |= tokens.keys()
        return tokens

    def remove(self, keys: Sequence[str]) -> None:
        self.keys -= set(keys)

    def expired(self) -> Sequence[str]:
        return self.old


def catalog(location: str = "memory", max_bytes: int | str | None = None) -> Catalog:
    return Catalog(location, Known(), "thing", max_bytes=max_bytes)


def put(made: Catalog, *keys: str, tokens: int = 10) -> None:
    for key in keys:
        assert made.put(key, {"tokens": tokens}, {"x": torch.zeros(100)})
    made.refresh()


def fine(tensors: object) -> None:
    pass


def test_two_catalogs_of_one_place_are_in_step_after_a_refresh(tmp_path):
    one, two = (catalog(f"disk:{tmp_path}") for _ in range(2))
    put(one, "a", "b")
    assert one.contents.keys == {"a", "b"}
    two.refresh()
    assert two.contents.keys == {"a", "b"}
    assert two.delete("a")
    one.refresh()
    assert one.contents.keys == {"b"}
    assert one.read("a", fine) is None
    assert (one.counts["written"], two.counts["written"]) == (2, 0)


def test_the_least_worth_goes_first_then_others_in_place_of_pinned_ones():
    made = catalog()
    put(made, "a", "b", "c")
    made.used("a", 1000)
    made.pin("b")
    made.max_bytes = made.worth.total - 1
    made.refresh()
    assert made.contents.keys == {"a", "b"}
    assert made.summary(made.contents.keys)["pinned"] == 1


def test_what_is_expired_goes_without_a_cap_and_what_is_too_large_goes_before_what_is_worth_less():
    made = catalog()
    put(made, "a", "b")
    made.contents.old = ["a"]
    made.refresh()
    assert made.contents.keys == {"b"}
    made.put("c", {"tokens": 10**6}, {"x": torch.zeros(10_000)})
    made.max_bytes = 5000
    made.refresh()
    assert made.contents.keys == {"b"}


def test_tensors_that_are_not_those_of_the_head_are_a_miss_and_are_deleted_with_one_warning():
    made = catalog()
    put(made, "a", "b")

    def wrong(tensors: object) -> None:
        raise ArtifactError("it is another")

    with pytest.warns(RuntimeWarning, match="A damaged thing is made anew") as said:
        assert made.read("a", wrong) is made.read("b", wrong) is None
    assert len(said) == 1
    assert made.contents.keys == set()


def test_a_place_that_fails_is_a_miss_with_one_warning_but_for_what_is_asked_for_explicitly(monkeypatch):
    made = catalog(max_bytes=10**6)
    put(made, "a")

    def fails(*arguments: object) -> None:
        raise StoreUnavailable("It is away.")

    for name in ("tensors", "changes", "put", "pinned", "delete"):
        monkeypatch.setattr(made.blobs, name, fails)

    def use() -> None:
        assert made.read("a", fine) is None
        assert not made.put("b", {"tokens": 1}, {})
        made.refresh()
        made.max_bytes = 1
        made.refresh()

    with pytest.warns(RuntimeWarning, match=r"memory: It is away\. Prompts are computed instead") as said:
        use()
    assert len(said) == 1
    assert made.counts["failures"] >= 5
    with pytest.raises(StoreUnavailable):
        made.delete("a")
    monkeypatch.undo()
    assert made.read("a", fine) is not None


def test_blobs_of_another_kind_are_left_alone_and_are_not_counted():
    made = catalog(max_bytes=10**6)
    made.put("a", {"other": 1}, {"x": torch.zeros(100)})
    with pytest.warns(RuntimeWarning, match="holds something that is no thing, or one of another version; it is left alone"):
        made.refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.refresh()
    assert made.worth.total == 0
    assert made.blobs.tensors("a") is not None


@pytest.mark.parametrize("given", [0, "many", True])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(ConfigError, match="max_bytes: expected a number of bytes, at least 1, or None"):
        catalog(max_bytes=given)
