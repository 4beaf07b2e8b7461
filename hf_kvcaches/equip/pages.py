"""Pages: memory for slots that rows and caches share, and which rows hold which of it."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_kvcaches.compat import decoder_config, split_model
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.errors import ConfigError, PoolExhausted, UnsupportedError, whole_number

_lock = threading.Lock()


class PagePool:
    """Pages of slots that layers, rows and caches share. A page with several holders is copied before one of them writes to it.

    Several threads and CUDA streams may use it. Caches give pages back with `reset()` and when they are deleted. Memory is taken with the
    first token, for `pages` + 1 pages: page 0 is zeros, for rows without one. Pages hold keys and values, or a `KVCodec`'s codes: then a
    page has more slots of layers with fewer bytes. **Refuses** layers with other heads, dtype, device or codec than the first one.

    Args:
        model: A transformers model or its config; its caches are the ones that fit.
        pages: How many.
        page_size: Slots in each.
        grows: Whether there are twice as many when they run out, in a pool of one cache alone.
    """

    def __init__(self, model: Any, pages: int = 1024, page_size: int = 16, *, grows: bool = False) -> None:
        self.page_size = whole_number("page_size", page_size, 1, "a number of slots, 1 or more")
        self.pages = whole_number("pages", pages, 1, "a number of pages, 1 or more")
        self.grows, self.heads, self.content = grows, _head_shape(split_model(model)[1]), ""
        self.stores: dict[str, torch.Tensor] = {}
        self.device: torch.device | None = None
        self._free = deque(range(self.pages, 0, -1))
        self._holders: dict[int, int] = {}  # of pages with more than one
        self._returned: deque[list[int]] = deque()
        self._events: dict[Any, Any] = {}  # for each CUDA stream, when it was done with the pages that it gave back

    @property
    def free_pages(self) -> int:
        """How many belong to nobody."""
        self.holders(())
        return len(self._free)

    @property
    def bytes(self) -> int:
        """Of all pages, free ones included; 0 before the first token."""
        return sum(store.untyped_storage().nbytes() for store in self.stores.values())

    def open(self, kind: str, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        """Make the stores, (pages, *shape) each, if there are none, and refuse a layer with pages of another kind."""
        content = f"{kind}, {shapes} in {dtype} on {device}"
        with _lock, torch.inference_mode(False):  # may be written to in any mode
            if not self.stores:
                self.content, self.device = content, device
                self.stores = {name: torch.zeros(self.pages + 1, *shape, dtype=dtype, device=device) for name, shape in shapes.items()}
                if (stream := self.stream()) is not None:
                    stream.synchronize()  # before another one writes to them
        if content != self.content:
            raise ConfigError.of("pool", f"pages of {content}", f"one with pages of {self.content}", "Make a pool for each.")

    def take(self, count: int) -> list[int]:
        """Pages of zeros with one holder, the caller; all of them or none."""
        with _lock:
            self._settle()
            if count > len(self._free):
                self._make_room(count)
            pages = [self._free.pop() for _ in range(count)]
        for store in self.stores.values() if pages else ():
            store.index_fill_(0, self.index(pages), 0)  # what was there may be no number, and masked values are multiplied by zero
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Count another holder of each page."""
        with _lock:
            for page in pages:
                self._holders[page] = self._holders.get(page, 1) + 1

    def give(self, pages: list[int], stream: Any = None) -> None:
        """Take pages back from a holder, which used them on a CUDA stream; None: the current one."""
        if pages:  # no lock: a cache may be collected while this thread has it
            if (stream := stream or self.stream()) is not None:
                self._events[stream] = stream.record_event()
            self._returned.append(pages)

    def holders(self, pages: Iterable[int]) -> dict[int, int]:
        """How many holders pages have, of those with more than one. The others may be written to."""
        with _lock:
            self._settle()
            return {page: self._holders[page] for page in pages if page in self._holders}

    def index(self, pages: Any) -> torch.Tensor:
        """Numbers as a tensor for the stores; a GPU is not waited for."""
        index = torch.tensor(pages, dtype=torch.long)
        return index.to(self.device) if self.stream() is None else index.pin_memory().to(self.device, non_blocking=True)

    def stream(self) -> Any:
        """The CUDA stream that this thread uses, or None."""
        return torch.cuda.current_stream(self.device) if self.device is not None and self.device.type == "cuda" else None

    def _settle(self) -> None:
        """Count what was given back, and have this thread's stream wait until others are done with it."""
        while self._returned:
            for page in self._returned.popleft():
                if (holders := self._holders.pop(page, 1)) > 2:
                    self._holders[page] = holders - 1
                elif holders == 1:
                    self._free.append(page)
        if (stream := self.stream()) is not None:
            for event in list(self._events.values()):
                stream.wait_event(event)
            for store in self.stores.values():
                store.record_stream(stream)

    def _make_room(self, count: int) -> None:
        if not self.grows:
            raise PoolExhausted(
                f"The page pool is exhausted: {count} more pages are needed, and {len(self._free)} of {self.pages} are free. "
                "Reset or delete another cache on it, or make a PagePool with more pages."
            )
        more = max(self.pages, count - len(self._free))
        with torch.inference_mode(False):
            self.stores = {name: torch.cat([store, store.new_zeros(more, *store.shape[1:])]) for name, store in self.stores.items()}
        self._free.extendleft(range(self.pages + 1, self.pages + more + 1))
        self.pages += more

    def __getstate__(self) -> dict[str, Any]:
        if not self.grows:
            raise UnsupportedError("A PagePool that caches share can't be pickled. Save each cache with cache.save(path).")
        self.holders(())
        return vars(self) | {"_free": self._free.copy(), "_holders": dict(self._holders), "_returned": deque(), "_events": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> PagePool:
        copied = copy.copy(self) if self.grows else self
        if self.grows:
            copied.stores = {name: store.clone() for name, store in self.stores.items()}
        return copied

    def __repr__(self) -> str:
        return f"PagePool(pages={self.pages}, free_pages={self.free_pages}, page_size={self.page_size}, {self.bytes / 2**20:.2f} MiB)"


@dataclass(eq=False)
class LayerPages:
    """The pages of one layer: slot s of row b is in page `rows[b][s // page_size]`.

    Args:
        slots_of: How many slots the layer has with a prompt of so many tokens; `slots`, once that is known.
        used: How many slots of each row hold a token.
        shared: Whether a page may have another holder.
        table: `rows` as a tensor, (rows, pages of the longest), int32; -1 where a row has none. None after a change.
    """

    slots_of: Callable[[int], int]
    page_size: int
    slots: int = 0
    rows: list[list[int]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    shared: bool = False
    table: torch.Tensor | None = None

    def pages_for(self, slots: int) -> int:
        """How many pages hold so many slots."""
        return -(-slots // self.page_size)

    def all(self) -> list[int]:
        """The pages of all rows; one that rows share is there several times."""
        return [page for row in self.rows for page in row]

    def after(self, new: Sequence[int], prompt: int) -> list[int]:
        """How many slots of rows will be in use after new tokens, of which so many are a prompt if they are the first."""
        slots = self.slots or self.slots_of(prompt)
        return [min(slots, used + count) for used, count in zip(self.used or [0] * len(new), new, strict=True)]


class PageBook:
    """Which pages a cache holds, layer by layer, and spare ones for a pass. They go back when it is collected."""

    def __init__(self, pool: PagePool) -> None:
        self.pool, self.stream = pool, [None]
        self.layers: list[LayerPages] = []
        self.spare: list[int] = []
        weakref.finalize(self, _give_all, pool, self.layers, self.spare, self.stream).atexit = False

    def reserve(self, layers: Sequence[LayerPages], new: Sequence[int], prompt: int) -> None:
        """Provide for new tokens in layers, and for the copies of pages that they may need; arguments as in `LayerPages.after`."""
        self.stream[0] = self.pool.stream()
        copies = [sum(map(self.pool.holders(pages.all()).__contains__, pages.all())) if pages.shared else 0 for pages in layers]
        spare = sum(count if prompt else min(count, sum(new)) for count in copies)
        self.provide([(pages, pages.after(new, prompt)) for pages in layers], spare)

    def provide(self, wanted: Sequence[tuple[LayerPages, list[int]]], spare: int = 0) -> None:
        """Give rows of layers the pages that they lack for so many slots in use, and have spare ones besides; all or none."""
        layers = [[*pages.rows, *([] for _ in used[len(pages.rows) :])] for pages, used in wanted]
        counts = [map(pages.pages_for, used) for pages, used in wanted]
        lacking = [
            row for rows, need in zip(layers, counts, strict=True) for row, n in zip(rows, need, strict=False) for _ in range(n - len(row))
        ]
        taken = self.pool.take(len(lacking) + max(0, spare - len(self.spare)))
        for row in lacking:
            row.append(taken.pop())
        self.spare += taken
        for (pages, _), rows in zip(wanted, layers, strict=True):
            pages.rows, pages.table = rows, None if lacking else pages.table

    def separate(self, pages: LayerPages, blocks: Sequence[Iterable[int]] | None = None) -> None:
        """Replace pages with other holders before they are written to, in the blocks of each row, or all of them wholly."""
        holders, places = self.pool.holders(pages.all()) if pages.shared else {}, []
        for row, written in zip(pages.rows, blocks or [range(len(row)) for row in pages.rows], strict=True) if holders else ():
            for block in written:
                if block < len(row) and holders.get(row[block], 1) > 1:
                    holders[row[block]] -= 1
                    places.append((row, block))
        self.provide([], len(places))
        old, new = [row[block] for row, block in places], [self.spare.pop() for _ in places]
        for store in self.pool.stores.values() if places and blocks else ():
            store.index_copy_(0, self.pool.index(new), store.index_select(0, self.pool.index(old)))
        for (row, block), page in zip(places, new, strict=True):
            row[block], pages.table = page, None
        pages.shared = any(count > 1 for count in holders.values())
        self.pool.give(old)

    def trim(self, pages: LayerPages) -> None:
        """Give back what rows hold beyond the slots in use, and after the last layer spare pages."""
        surplus: list[int] = []
        for row, need in zip(pages.rows, [*map(pages.pages_for, pages.used), *(0 for _ in pages.rows)], strict=False):
            surplus += row[need:]
            del row[need:]
        del pages.rows[len(pages.used) :]
        pages.table = None if surplus else pages.table
        if pages is self.layers[-1]:
            surplus += self.spare
            self.spare.clear()
        self.pool.give(surplus)

    def __deepcopy__(self, memo: dict[int, Any]) -> PageBook:
        copied, shared = PageBook(copy.deepcopy(self.pool, memo)), not self.pool.grows
        self.pool.share(page for pages in self.layers for page in pages.all() if shared)
        copied.spare += () if shared else self.spare
        for pages in self.layers:
            pages.shared = pages.shared or shared
            copied.layers.append(replace(pages, rows=[list(row) for row in pages.rows], used=list(pages.used)))
        return copied


def open_book(config: Any, page_size: int | None, pool: PagePool | None) -> PageBook | None:
    """The pages of a new cache, on a pool that it shares or one of its own; None where it has none."""
    if pool is None:
        return None if page_size is None else PageBook(PagePool(config, 64, page_size, grows=True))
    if page_size not in (None, pool.page_size):
        raise ConfigError.of("page_size", f"that of the pool, {pool.page_size}, or None", page_size)
    heads = _head_shape(config)
    if None not in (*pool.heads, *heads) and pool.heads != heads:
        raise ConfigError.of("pool", f"one made for {heads[0]} key heads of size {heads[1]}", pool, "Make a pool with this model.")
    return PageBook(pool)


def _give_all(pool: PagePool, layers: list[LayerPages], spare: list[int], stream: list[Any]) -> None:
    pool.give([*spare, *(page for pages in layers for page in pages.all())], stream[0])


def _head_shape(config: Any) -> tuple[int | None, int | None]:
    """Key heads and their size as far as the config tells."""
    config = decoder_config(config)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    return heads, (head_sizes(config, 0) or (None,))[0]
