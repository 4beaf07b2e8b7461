"""Pages: memory for slots that sequences and caches share, and which rows hold which of it."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_kvcaches.compat import decoder_config, split_model
from hf_kvcaches.equip.budgets import slots_for
from hf_kvcaches.errors import ConfigError, PoolExhausted, UnsupportedError, whole_number


class PagePool:
    """Physical pages of keys and values that layers, rows and caches share; each page belongs to one row of one layer at a time.

    Pages may be taken and given back by several threads; each cache is used by one at a time. Memory is taken with the first token,
    when dtype, device and the shape of heads are known for sure: `pages` + 1 pages (page 0 stays empty, and stands where a row has none).

    A cache gives its pages back with `reset()` and when it is deleted.

    **Refuses**: layers whose heads have another shape, dtype or device than those that came first.

    Args:
        model: A transformers model or its config; its caches are the ones that fit.
        pages: How many.
        page_size: Slots in each.
        dtype: Of keys and values; None for that of the first token.
        device: Where they lie; None for the device of the first token.
    """

    grows = False

    def __init__(
        self,
        model: Any,
        pages: int = 1024,
        page_size: int = 16,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        page_size, pages = check_page_size(page_size), whole_number("pages", pages, 1, "a number of pages, 1 or more")
        self.pages, self.page_size = pages, page_size
        self.dtype, self.device = dtype, None if device is None else torch.device(device)
        self._heads = _head_shape(split_model(model)[1])
        self.stores: dict[str, torch.Tensor] = {}
        self._free = list(range(pages, 0, -1))
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def free_pages(self) -> int:
        """How many belong to nobody."""
        with self._lock:
            return len(self._free) + len(self._returned)

    @property
    def bytes(self) -> int:
        """Of all pages, free ones included; 0 before the first token."""
        return sum(store.untyped_storage().nbytes() for store in self.stores.values())

    def check_model(self, config: Any) -> None:
        """Refuses a model whose heads have another shape.

        Args:
            config: The model's.
        """
        other = _head_shape(config)
        if None not in (*self._heads, *other) and self._heads != other:
            raise ConfigError.of("pool", f"one made for {other[0]} key heads of size {other[1]}", self, "Make a pool with this model.")

    def prepare(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Makes the stores if there are none, and refuses tokens that don't fit into them.

        Args:
            keys: (batch, kv_heads, tokens, head_dim).
            values: (batch, kv_heads, tokens, value_dim).
        """
        wanted = {"keys": keys.shape[-1], "values": values.shape[-1]}
        with self._lock:
            held = self.stores.get("keys")
            dtype, device = self.dtype or keys.dtype, _indexed(self.device or keys.device)
            heads = keys.shape[1] if held is None else held.shape[1]
            sizes = {name: self.stores[name].shape[-1] if name in self.stores else size for name, size in wanted.items()}
            if (keys.dtype, keys.device, keys.shape[1], wanted) != (dtype, device, heads, sizes) or values.dtype != dtype:
                have = f"{heads} heads of size {sizes['keys']} (values: {sizes['values']}) in {dtype} on {device}"
                got = f"{keys.shape[1]} heads of size {wanted['keys']} (values: {wanted['values']}) in {keys.dtype} on {keys.device}"
                raise ConfigError(
                    f"The page pool has room for {have}, and a layer came with {got}. Make a pool for each, or leave pages out."
                )
            self.dtype, self.device = dtype, device
            for name, size in wanted.items():
                if name not in self.stores:
                    self.stores[name] = self._make_store(heads, size)

    def take(self, count: int) -> list[int]:
        """Pages of zeros, which belong to the caller from now on; all of them or none.

        Args:
            count: How many, 1 or more.
        """
        with self._lock:
            # What is given back while this runs, by a cache that is collected right now, waits for the next time.
            while self._returned:
                self._free.append(self._returned.popleft())
            if count > len(self._free):
                self._make_room(count)
            taken = self._free[-count:][::-1]
            del self._free[-count:]
        index = self.index(taken)
        for store in self.stores.values():
            store[index] = 0  # what a former owner left may be no number, and masked values are multiplied by zero
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Takes pages back. Waits for no lock: it is called when a cache is collected, at any moment.

        Args:
            pages: Of nobody any more.
        """
        self._returned.extend(pages)

    def index(self, pages: Sequence[int]) -> torch.Tensor:
        """Pages as an index into the stores.

        Args:
            pages: Which.
        """
        return torch.tensor(pages, dtype=torch.long, device=self.device)

    def copy_pages(self, source: PagePool, pages: Sequence[int], to: Sequence[int]) -> None:
        """Copies what pages hold.

        Args:
            source: The pool that they are in; this one or one with as large heads.
            pages: Which.
            to: Pages of this pool.
        """
        if pages:
            for name, store in source.stores.items():
                self.stores[name][self.index(to)] = store[source.index(pages)]

    def _make_room(self, count: int) -> None:
        raise PoolExhausted(
            f"The page pool is exhausted: {count} more pages are needed, and {len(self._free)} of {self.pages} are free. "
            "Reset or delete another cache on it, or make a PagePool with more pages."
        )

    def _make_store(self, heads: int, size: int) -> torch.Tensor:
        with torch.inference_mode(False):  # may be written to in any mode
            return torch.zeros(self.pages + 1, heads, self.page_size, size, dtype=self.dtype, device=self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagePool:
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError("A PagePool that caches share can't be pickled. Save each cache with cache.save(path).")

    def __repr__(self) -> str:
        size = f"page_size={self.page_size}, {self.bytes / 2**20:.2f} MiB"
        return f"{type(self).__name__}(pages={self.pages}, free_pages={self.free_pages}, {size})"


class GrowingPool(PagePool):
    """The pages of one cache alone; twice as many when they run out."""

    grows = True

    def _make_room(self, count: int) -> None:
        more = max(self.pages, count - len(self._free))
        with torch.inference_mode(False):
            for name, store in self.stores.items():
                self.stores[name] = torch.cat([store, store.new_zeros(more, *store.shape[1:])])
        self._free = [*range(self.pages + more, self.pages, -1), *self._free]
        self.pages += more

    def __deepcopy__(self, memo: dict[int, Any]) -> PagePool:
        # Its own: what grows for one cache moves, and another thread may be writing for the other.
        copied = copy.copy(self)
        copied._free, copied._returned, copied.pages = list(range(self.pages, 0, -1)), deque(), self.pages
        copied.stores = {name: torch.zeros_like(store) for name, store in self.stores.items()}
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()


@dataclass(eq=False)
class LayerPages:
    """The pages of one layer.

    Args:
        budget: The layer's slots, or the fraction of the prompt.
        slots: How many there may be, once that is known.
        rows: The pages of each row; slot s is in page s // page_size of these.
        used: How many slots of each row hold a token.
    """

    budget: int | float
    slots: int = 0
    rows: list[list[int]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    _table: torch.Tensor | None = field(default=None, repr=False)

    def table(self, blocks: int, device: torch.device | None) -> torch.Tensor:
        """The block table: the pages of each row, (rows, blocks or more), int32; -1 where it has none.

        Args:
            blocks: At least so many.
        """
        blocks = max([blocks, *map(len, self.rows)])
        if self._table is None or self._table.shape != (len(self.rows), blocks):
            padded = [row + [-1] * (blocks - len(row)) for row in self.rows]
            with torch.inference_mode(False):
                self._table = torch.tensor(padded, dtype=torch.int32, device=device).view(len(self.rows), blocks)
        return self._table

    def after(self, real: Sequence[int], prompt: int) -> list[int]:
        """How many slots of each row will be in use when new tokens have come.

        Args:
            real: New tokens of each row, without padding.
            prompt: Those of the longest row that are prompt, where these are the first tokens.
        """
        slots = self.slots or slots_for(self.budget, prompt)
        used = self.used or [0] * len(real)
        return [min(slots, have + new) for have, new in zip(used, real, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_table": None}


class PageBook:
    """Which pages a cache holds, layer by layer. They go back when it is collected."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.layers: list[LayerPages] = []
        self._spare: list[int] = []
        self._watch()

    def _watch(self) -> None:
        weakref.finalize(self, _give_all, self.pool, self.layers, self._spare).atexit = False

    @property
    def held(self) -> int:
        """How many pages the cache holds."""
        return len(self._spare) + sum(len(row) for pages in self.layers for row in pages.rows)

    def provide(self, wanted: Sequence[tuple[LayerPages, Sequence[int]]]) -> None:
        """Gives rows the pages that they lack, all of them or none.

        Args:
            wanted: Layers, and how many slots of each row are to have a page.
        """
        size, lacking = self.pool.page_size, []
        for pages, slots in wanted:
            for row, count in enumerate(slots):
                held = len(pages.rows[row]) if row < len(pages.rows) else 0
                lacking.append(max(0, -(-count // size) - held))
        fresh = iter(self.pool.take(sum(lacking))) if any(lacking) else iter(())
        counts = iter(lacking)
        for pages, slots in wanted:
            pages.rows.extend([] for _ in range(len(slots) - len(pages.rows)))
            for held_pages, more in zip(pages.rows, counts, strict=False):
                if more:
                    held_pages.extend(next(fresh) for _ in range(more))
                    pages._table = None

    def trim(self, pages: LayerPages) -> None:
        """Gives back what rows hold beyond the slots in use."""
        size = self.pool.page_size
        needs = [-(-used // size) for used in pages.used] + [0] * (len(pages.rows) - len(pages.used))
        if all(len(row) == need for row, need in zip(pages.rows, needs, strict=True)):
            return
        for row, need in zip(pages.rows, needs, strict=True):
            row[need:], surplus = [], row[need:]
            self.pool.give(surplus)
        del pages.rows[len(pages.used) :]
        pages._table = None

    def clear(self, pages: LayerPages) -> None:
        """Gives back all that a layer holds."""
        pages.used, pages.slots = [], 0
        self.trim(pages)
        self._give_spare()

    def map_rows(self, index: int, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Makes a layer's rows those that a function picks: kept where they are as far as possible, else copied page by page.

        The first layer takes the pages that all layers need for that, so that either all can be mapped or none is.

        Args:
            function: From (rows, ...) to (new rows, ...).
        """
        if index == 0 or not self._spare:
            self._claim(sum(self._copies(pages, function) for pages in self.layers[index:]))
        pages = self.layers[index]
        if pages.rows:
            sources = _sources(len(pages.rows), function)
            # A row that stays in its place is not the one to be copied.
            firsts = {source: new for new, source in reversed(list(enumerate(sources)))}
            firsts |= {source: new for new, source in enumerate(sources) if new == source}
            old = list(pages.rows)
            self._spare += [page for row, held in enumerate(old) if row not in firsts for page in held]
            rows, source_pages, target_pages = [], [], []
            for new, source in enumerate(sources):
                if firsts[source] == new:
                    rows.append(old[source])
                    continue
                count = len(self._spare) - len(old[source])
                self._spare[count:], own = [], self._spare[count:]
                rows.append(own)
                source_pages += old[source]
                target_pages += own
            pages.rows[:], pages._table = rows, None
            pages.used = [pages.used[source] for source in sources] if pages.used else []
            self.pool.copy_pages(self.pool, source_pages, target_pages)
        if index == len(self.layers) - 1:
            self._give_spare()

    def _give_spare(self) -> None:
        spare, self._spare[:] = list(self._spare), []
        self.pool.give(spare)

    def _claim(self, count: int) -> None:
        if count > len(self._spare):
            self._spare.extend(self.pool.take(count - len(self._spare)))

    def _copies(self, pages: LayerPages, function: Callable[[torch.Tensor], torch.Tensor]) -> int:
        """How many pages a layer lacks for new rows."""
        if not pages.rows:
            return 0
        return max(0, sum(len(pages.rows[source]) for source in _sources(len(pages.rows), function)) - sum(map(len, pages.rows)))

    def __deepcopy__(self, memo: dict[int, Any]) -> PageBook:
        copied = PageBook(copy.deepcopy(self.pool, memo))
        old = [page for pages in self.layers for row in pages.rows for page in row]
        new = copied.pool.take(len(old)) if old else []
        fresh = iter(new)
        for pages in self.layers:
            rows = [[next(fresh) for _ in row] for row in pages.rows]
            copied.layers.append(LayerPages(pages.budget, pages.slots, rows, list(pages.used)))
        copied.pool.copy_pages(self.pool, old, new)
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._watch()


def check_page_size(page_size: int) -> int:
    """A plain number of slots, or a refusal."""
    return whole_number("page_size", page_size, 1, "a number of slots, 1 or more")


def open_book(config: Any, page_size: int | None, pool: PagePool | None) -> PageBook | None:
    """The pages of a new cache; None where it has none.

    Args:
        page_size: Slots in a page, or None for the pool's.
        pool: The pool to share, or None for one of the cache's own.
    """
    if pool is None:
        return None if page_size is None else PageBook(GrowingPool(config, 64, page_size))
    if page_size is not None and page_size != pool.page_size:
        raise ConfigError.of("page_size", f"that of the pool, {pool.page_size}, or None", page_size)
    pool.check_model(config)
    return PageBook(pool)


def _give_all(pool: PagePool, layers: list[LayerPages], spare: list[int]) -> None:
    pool.give(spare)
    for pages in layers:
        for row in pages.rows:
            pool.give(row)


def _sources(rows: int, function: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    found: list[int] = function(torch.arange(rows)).tolist()
    return found


def _head_shape(config: Any) -> tuple[int | None, int | None]:
    """Key heads and their size as far as the config tells."""
    config = decoder_config(config)
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    size = getattr(config, "head_dim", None) or (width // heads if width and heads else None)
    return getattr(config, "num_key_value_heads", None) or heads, size


def _indexed(device: torch.device) -> torch.device:
    """`cuda` as `cuda:0`, or whichever is current: tensors say so too."""
    return torch.device(device.type, torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
