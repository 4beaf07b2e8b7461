"""What the reports of segment stores and warm-start libraries share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CatalogReport:
    """The state of a catalog of segments or entries, as `Catalog.summary` returns it.

    Args:
        location: Where they are stored, without passwords.
        bytes: The bytes that they take in the back-end.
        max_bytes: The cap, or None.
        hot_bytes: The bytes that the hot tier of this process holds.
        pinned: How many are not evicted above the cap.
        damaged: How many damaged ones this process deleted.
        loads: How often this process read tensors from the back-end.
        hot_hits: How often it read them from the hot tier.
        written: How many this process stored.
        evicted: How many it evicted.
        failures: How often the back-end failed.
    """

    location: str
    bytes: int
    max_bytes: int | None
    hot_bytes: int
    pinned: int
    damaged: int
    loads: int
    hot_hits: int
    written: int
    evicted: int
    failures: int
