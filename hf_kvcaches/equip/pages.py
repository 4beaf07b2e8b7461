"""Pages: memory for slots that sequences and caches share, and which rows hold which of it."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hf_kvcaches.compat import decoder_config, split_model
from hf_kvcaches.core.rope_families import head_sizes
from hf_kvcaches.equip.budgets import slots_for
from hf_kvcaches.errors import ConfigError, PoolExhausted, UnsupportedError, whole_number

if TYPE_CHECKING:
    from hf_kvcaches.codec.codec import KVCodec

_LAYOUT = "{} heads of size {} in {} on {}"
_lock = threading.Lock()


class PagePool:
    """Physical pages of slots that layers, rows and caches share; each page belongs to one row of one layer at a time.

    Pages may be taken and given back by several threads; each cache is used by one at a time. Memory is taken with the first token,
    when dtype, device and the shape of heads are known for sure: `pages` + 1 pages (page 0 is zeros, for rows that have none).

    Pages hold keys and values, or the codes of one `KVCodec`, as the first cache does. Layers differ in the bytes of a slot's codes: a page
    has `page_size` slots of the layer with the most, and more slots of another.

    A cache gives its pages back with `reset()` and when it is deleted.

    **Refuses**: layers whose heads have another shape, dtype or device than those that came first; a cache with another codec than
    the first cache, with a codec where the first has none, or without one.

    Args:
        model: A transformers model or its config; its caches are the ones that fit.
        pages: How many.
        page_size: Slots in each.
        dtype: Of keys and values; None for that of the first token.
        device: Where they lie; None for the device of the first token.
    """

    def __init__(
        self,
        model: Any,
        pages: int = 1024,
        page_size: int = 16,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.page_size = check_page_size(page_size)
        self.pages = whole_number("pages", pages, 1, "a number of pages, 1 or more")
        self.dtype = dtype
        self.device = None if device is None else torch.empty(0, device=device).device  # "cuda" as "cuda:0"
        self.stores: dict[str, torch.Tensor] = {}
        self.codec = ""  # the digest of the codec whose codes the pages hold
        self._heads = _head_shape(split_model(model)[1])
        self._free = deque(range(self.pages, 0, -1))

    @property
    def free_pages(self) -> int:
        """How many belong to nobody."""
        return len(self._free)

    @property
    def bytes(self) -> int:
        """Of all pages, free ones included; 0 before the first token."""
        return sum(store.untyped_storage().nbytes() for store in self.stores.values())

    def check_model(self, config: Any) -> None:
        """Refuses a model whose heads have another shape, as far as its config tells."""
        other = _head_shape(config)
        if None not in (*self._heads, *other) and self._heads != other:
            raise ConfigError.of("pool", f"one made for {other[0]} key heads of size {other[1]}", self, "Make a pool with this model.")

    def prepare(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Makes the stores if there are none, and refuses tokens that don't fit into them.

        Args:
            keys: (batch, kv_heads, tokens, head_dim).
            values: (batch, kv_heads, tokens, value_dim).
        """
        shapes = {name: (states.shape[1], self.page_size, states.shape[3]) for name, states in (("keys", keys), ("values", values))}
        self._open("", shapes, self.dtype or keys.dtype, keys.device)
        self.dtype = self.stores["keys"].dtype
        for store, states in ((self.stores["keys"], keys), (self.stores["values"], values)):
            if _layout(store) != _layout(states):
                room, new = (_LAYOUT.format(*_layout(tensor)) for tensor in (store, states))
                raise ConfigError(
                    f"The page pool has room for {room}, and a layer came with {new}. Make a pool for each, or leave pages out."
                )

    def prepare_codes(self, codec: KVCodec, page_bytes: int, device: torch.device) -> None:
        """Makes the store of a codec's codes if there is none, and refuses what doesn't fit into it.

        Args:
            page_bytes: Bytes of a page.
            device: Of the codes.
        """
        self._open(codec.digest, {"codes": (page_bytes,)}, torch.uint8, device)
        if device != self.device:
            raise ConfigError(f"The page pool lies on {self.device}, and a layer came with codes on {device}. Make a pool for each.")

    def _open(self, codec: str, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        """Makes the stores if there are none, and refuses a cache whose pages hold something else.

        Args:
            codec: The digest of the cache's codec, or "".
            shapes: Of a page in each store.
        """
        with _lock:
            if not self.stores:
                self.codec, self.device = codec, self.device or device
                with torch.inference_mode(False):  # may be written to in any mode
                    self.stores = {
                        name: torch.zeros(self.pages + 1, *shape, dtype=dtype, device=self.device) for name, shape in shapes.items()
                    }
        if codec != self.codec:
            expected, content = (f"codes of the codec {digest[:8]}" if digest else "keys and values" for digest in (codec, self.codec))
            raise ConfigError.of("pool", f"one with pages of {expected}", f"one with pages of {content}", "Make a pool for each.")

    def take(self, count: int) -> list[int]:
        """Pages of zeros, which belong to the caller from now on; all of them or none."""
        with _lock:
            if count > len(self._free):
                self._make_room(count)
            taken = [self._free.pop() for _ in range(count)]
        for store in self.stores.values():
            store[taken] = 0  # what a former owner left may be no number, and masked values are multiplied by zero
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Takes pages back. Waits for no lock: it is called when a cache is collected, at any moment."""
        self._free.extend(pages)

    def read(self, pages: list[int]) -> dict[str, torch.Tensor]:
        """Copies of what pages hold, (pages, ...) each."""
        return {name: store[pages] for name, store in self.stores.items()}

    def write(self, pages: list[int], content: dict[str, torch.Tensor]) -> None:
        """Overwrites pages with what `read` gave for as many."""
        for name, tensor in content.items():
            self.stores[name][pages] = tensor

    def _make_room(self, count: int) -> None:
        raise PoolExhausted(
            f"The page pool is exhausted: {count} more pages are needed, and {len(self._free)} of {self.pages} are free. "
            "Reset or delete another cache on it, or make a PagePool with more pages."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PagePool:
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError("A PagePool that caches share can't be pickled. Save each cache with cache.save(path).")

    def __repr__(self) -> str:
        size = f"page_size={self.page_size}, {self.bytes / 2**20:.2f} MiB"
        return f"{type(self).__name__}(pages={self.pages}, free_pages={self.free_pages}, {size})"


class GrowingPool(PagePool):
    """The pages of one cache alone; twice as many when they run out."""

    def _make_room(self, count: int) -> None:
        more = max(self.pages, count - len(self._free))
        with torch.inference_mode(False):
            for name, store in self.stores.items():
                self.stores[name] = torch.cat([store, store.new_zeros(more, *store.shape[1:])])
        self._free.extendleft(range(self.pages + 1, self.pages + more + 1))
        self.pages += more

    def __deepcopy__(self, memo: dict[int, Any]) -> PagePool:
        # Another one, all free: what grows for one cache moves, and another thread may be writing for the other.
        copied = copy.copy(self)
        copied._free = deque(range(self.pages, 0, -1))
        copied.stores = {name: torch.zeros_like(store) for name, store in self.stores.items()}
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(eq=False)
class LayerPages:
    """The pages of one layer.

    Args:
        budget: The layer's slots, or the fraction of the prompt.
        page_size: Slots in a page.
        slots: How many there may be, once that is known.
        rows: The pages of each row; slot s is in page s // page_size of these.
        used: How many slots of each row hold a token.
    """

    budget: int | float
    page_size: int
    slots: int = 0
    rows: list[list[int]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    _table: torch.Tensor | None = field(default=None, repr=False)

    def pages_for(self, slots: int) -> int:
        """How many pages hold so many slots."""
        return -(-slots // self.page_size)

    def table(self, blocks: int, device: torch.device | None) -> torch.Tensor:
        """The block table: the pages of each row, (rows, at least `blocks`), int32; -1 where it has none."""
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


class PageBook:
    """Which pages a cache holds, layer by layer. They go back when it is collected."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.layers: list[LayerPages] = []
        weakref.finalize(self, _give_all, pool, self.layers).atexit = False

    def provide(self, wanted: Sequence[tuple[LayerPages, Sequence[int]]]) -> None:
        """Gives rows the pages that they lack, all of them or none.

        Args:
            wanted: Layers, and how many slots of each row are to have a page.
        """
        lacking, grown = [], []
        for pages, slots in wanted:
            rows = [*pages.rows, *([] for _ in range(len(slots) - len(pages.rows)))]
            grown.append(rows)
            for row, count in zip(rows, slots, strict=False):
                lacking += [row] * (pages.pages_for(count) - len(row))
        taken = self.pool.take(len(lacking)) if lacking else []
        for row, page in zip(lacking, taken, strict=True):
            row.append(page)
        for (pages, _), rows in zip(wanted, grown, strict=True):
            pages.rows, pages._table = rows, None if taken else pages._table

    def trim(self, pages: LayerPages) -> None:
        """Gives back what rows hold beyond the slots in use."""
        needs = [pages.pages_for(used) for used in pages.used] + [0] * (len(pages.rows) - len(pages.used))
        for row, need in zip(pages.rows, needs, strict=True):
            if surplus := row[need:]:
                row[need:], pages._table = [], None
                self.pool.give(surplus)
        del pages.rows[len(pages.used) :]

    def in_use(self, pages: LayerPages, rows: Sequence[int] | None = None) -> list[int]:
        """The pages with the tokens of some rows of a layer, or of all."""
        rows = range(len(pages.used)) if rows is None else rows
        return [page for row in rows for page in pages.rows[row][: pages.pages_for(pages.used[row])]]

    def __deepcopy__(self, memo: dict[int, Any]) -> PageBook:
        copied = PageBook(copy.deepcopy(self.pool, memo))
        copied.layers.extend(LayerPages(pages.budget, pages.page_size, pages.slots, used=list(pages.used)) for pages in self.layers)
        copied.provide([(pages, pages.used) for pages in copied.layers])
        for pages, source in zip(copied.layers, self.layers, strict=True):
            copied.pool.write(copied.in_use(pages), self.pool.read(self.in_use(source)))
        return copied


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


def _give_all(pool: PagePool, layers: list[LayerPages]) -> None:
    for pages in layers:
        for row in pages.rows:
            pool.give(row)


def _layout(states: torch.Tensor) -> tuple[int, int, torch.dtype, torch.device]:
    """What tokens and the store that they are kept in have in common."""
    return states.shape[1], states.shape[3], states.dtype, states.device


def _head_shape(config: Any) -> tuple[int | None, int | None]:
    """Key heads and their size as far as the config tells."""
    config = decoder_config(config)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    sizes = head_sizes(config, 0)
    return heads, None if sizes is None else sizes[0]
