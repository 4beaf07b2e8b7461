"""`SpanStore`: spans of prompts with their keys and values, shared by threads, caches and processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.reuse import layout
from hf_kvcaches.reuse.index import Record
from hf_kvcaches.reuse.layout import LayerStates, Quantization, TokenCodec
from hf_kvcaches.reuse.record import Queue
from hf_kvcaches.stores.blobs import BlobStore, NewBlob, bytes_of
from hf_kvcaches.stores.catalog import TIMEOUT, Catalog, Contents


@dataclass(frozen=True)
class CatalogReport:
    """What the reports of all stores say.

    Args:
        location: Where the spans are stored, without passwords.
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
        dropped: How many prompts this process did not store because too many waited for it.
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
    dropped: int


class NewSpan(NamedTuple):
    """A span to be stored: its record, without `form`, and the states of all layers.

    Args:
        head: What the blob's head has beside the record.
    """

    record: Record
    layers: Sequence[LayerStates]
    head: Mapping[str, Any] = {}


class SpanStore:
    """Spans in a catalog, and the queue that stores them in the background.

    Args:
        contents: The index of what is stored.
        noun: The user's word for a span.
        quantization: How keys and values are stored: None for bit-equal ones, a `KVCodec` of the model, `"int8"` or `"int4"`.
        location: See `stores.catalog.open_blobs`.
    """

    def __init__(
        self,
        contents: Contents,
        noun: str,
        quantization: Quantization,
        location: str | BlobStore,
        *,
        max_bytes: int | str | None = None,
        hot_bytes: int | str | None = None,
        time_to_live: float | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.quantization = layout.check_quantization(quantization)
        limits: dict[str, Any] = {"max_bytes": max_bytes, "hot_bytes": hot_bytes, "time_to_live": time_to_live}
        self.catalog = Catalog(location, contents, noun, timeout=timeout, **limits)
        self.queue = Queue(partial(self.catalog.warn_once, "failed job"))

    @property
    def codec(self) -> TokenCodec | None:
        """The codec of keys and values, if they are codes."""
        return self.quantization if isinstance(self.quantization, TokenCodec) else None

    @property
    def max_bytes(self) -> int | None:
        """The cap on the bytes of all spans, or None."""
        return self.catalog.max_bytes

    def refresh(self) -> None:
        """Begin a request: begin to store computed prompts, and apply changes of other processes."""
        self.queue.settle()
        self.catalog.refresh()

    def load(self, records: Mapping[str, Record], device: torch.device | None = None) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors of spans, by key and read-only, without those that are missing, expired or damaged.

        Args:
            records: The spans by key.
            device: Where the hot tier keeps them, if no earlier call named a device.
        """

        def check(key: str, tensors: dict[str, torch.Tensor]) -> None:
            layout.check(tensors, records[key].form, len(records[key].ids))

        return self.catalog.read(list(records), check, device)

    def put(self, spans: Sequence[NewSpan], geometries: Sequence[RotaryGeometry | None] = ()) -> bool:
        """Store spans that are not stored yet, evict others above the cap, and return whether the back-end took all.

        Args:
            geometries: How each layer's keys are rotated.
        """
        with self.catalog.lock:
            new = [span for span in spans if span.record.key not in self.catalog.entries]
        if not new:
            return True
        # The last first: of two equally useful spans the older one is evicted, and a prompt without its start is a miss.
        stored = self.catalog.put(self._encoded(reversed(new), geometries))
        # Processes that write at the same time keep the cap together: the last one to refresh sees what all have written.
        self.catalog.refresh()
        return stored

    def _encoded(self, spans: Iterable[NewSpan], geometries: Sequence[RotaryGeometry | None]) -> Iterator[NewBlob]:
        for record, layers, head in spans:
            try:
                tensors, form = layout.encode(layers, self.quantization, record.start, geometries)
            except ConfigError as error:  # not finite
                self.catalog.warn_once("unfinite", f"A {self.catalog.noun} was not stored: {error}")
                continue
            if self.max_bytes is not None and bytes_of(tensors) > self.max_bytes:
                sentence = f"A {self.catalog.noun} of {len(record)} tokens takes more than all of the {self.max_bytes} bytes allowed."
                self.catalog.warn_once("large", f"{sentence} It is not stored.")
                continue
            yield NewBlob(record.key, {**replace(record, form=form).to_dict(), **head}, tensors)

    def flush(self) -> None:
        """Wait until all computed prompts are written."""
        self.queue.flush()

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keep a span from eviction above the cap, by any process.

        Args:
            key: Its id, as in reports.
            pinned: False to unpin it.
        """
        self.catalog.pin(key, pinned)

    def delete(self, key: str) -> bool:
        """Delete the span with this id, and return whether it was there."""
        return self.catalog.delete(key)

    def clear(self) -> None:
        """Delete all spans of all models."""
        self.flush()
        self.catalog.clear()

    def summary(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the fields of a `CatalogReport`; `pinned` counts these spans."""
        return {**self.catalog.summary(list(keys)), "dropped": self.queue.dropped}

    def close(self) -> None:
        """Write pending prompts, and close files and connections."""
        self.flush()
        self.catalog.blobs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied cache shares the store
