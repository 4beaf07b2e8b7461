"""The caches in the matrix. A new cache is one line in `ENTRIES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_kvcaches import GrowingCache, KVCache

# Rows that stand or fall together, for caches that refuse the whole of it.
BEAMS = frozenset({"reorder_cache", "beam_search", "beam_sampling"})
CROPPING = frozenset({"crop", "assisted_by_a_model", "assisted_sampling", "prompt_lookup"})
ROW_CHANGES = frozenset({"batch_select_indices", "batch_repeat_interleave", "repeated_prompt_cache"})


@dataclass(frozen=True)
class Entry:
    """A cache with one setting.

    Args:
        name: In the names of the tests.
        make: Builds the cache for a model (also a PEFT or compiled wrapper of one).
        lossless: Whether it must equal `DynamicCache`; otherwise it is held to what it must share with itself.
        refuses: Rows that must raise `UnsupportedError`, each for all models ("crop") or for one family ("crop@gemma2").
    """

    name: str
    make: Callable[[Any], KVCache]
    lossless: bool
    refuses: frozenset[str] = frozenset()

    def refuses_row(self, row: str, family: str) -> bool:
        """Whether a row must raise.

        Args:
            row: The row's name.
            family: Of the model.
        """
        return row in self.refuses or f"{row}@{family}" in self.refuses


class KernelCache(GrowingCache):
    """Uses the kernel for single tokens however short the text is."""

    kernel_from = 0


ENTRIES = [
    Entry("growing", GrowingCache, lossless=True),
    Entry("growing_kernel", KernelCache, lossless=True),
]
