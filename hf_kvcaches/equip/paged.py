"""Where slots lie: pages of a pool, for each row as many as it fills (the paper's figure 16)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch

from hf_kvcaches.equip.pages import LayerPages, PageBook, PagePool
from hf_kvcaches.equip.rotation import RotatingPass, SlotRotation
from hf_kvcaches.equip.store import FlatStore, Slots, extended, wrong_rows
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels import slots as kernels
from hf_kvcaches.kernels.launch import Backend


class PagedStore(FlatStore):
    """Slot s of row b is slot s % page_size of the page `rows[b][s // page_size]`; `keys` and `values` stay None.

    On CUDA, attention reads the pages where they are. Elsewhere they are gathered first, and all numbers are those of the flat store.

    Args:
        book: The pages of the layer's cache.
        budget: The layer's slots, or the fraction of the prompt.
        page_size: Slots in a page; None for the pool's.
    """

    in_graphs = False  # which pages are written to is known in Python only

    def __init__(self, rotation: SlotRotation, backend: Backend, book: PageBook, budget: int | float, page_size: int | None = None) -> None:
        super().__init__(rotation, backend)
        self.book, self.index, self.room = book, len(book.layers), 0
        book.layers.append(LayerPages(budget, book.pool.page_size if page_size is None else page_size))

    @property
    def pool(self) -> PagePool:
        """The pool that the pages are from."""
        return self.book.pool

    @property
    def pages(self) -> LayerPages:
        """The layer's pages."""
        return self.book.layers[self.index]

    @property
    def capacity(self) -> int:
        return self.room

    @property
    def shape(self) -> tuple[int, int]:
        rows = len(self.pages.used)
        return rows, self._slots()[0].shape[1] if rows else 0

    @property
    def table(self) -> torch.Tensor:
        """The block table, (batch, blocks), int32; -1 where a row has no page."""
        return self.pages.table(self.pages.pages_for(self.room), self.pool.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of the pages in use: the pool's memory is not the layer's alone."""
        held = self.book.in_use(self.pages)
        return self.pool.read(held) if held else {}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        raise UnsupportedError("EquipCache on pages can't offload: pages stay on their pool's device. Leave page_size and pool out.")

    def own(self, owned: Callable[[torch.Tensor], torch.Tensor], needs_graph: bool) -> None:
        if needs_graph:
            raise UnsupportedError(
                "EquipCache on pages has no gradients: run the model under torch.no_grad(), or leave page_size and pool out."
            )

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        pages = self.pages
        if not pages.used:
            return
        sources = function(torch.arange(len(pages.used))).tolist()
        # The first layer takes the pages that all of them need, so that either all can be mapped or none is.
        layers = [layer for layer in self.book.layers[self.index :] if layer.used]
        self.book.provide([(layer, [layer.used[source] for source in sources]) for layer in layers])
        before = self.book.in_use(pages, sources)
        pages.used = [pages.used[source] for source in sources]
        moves = [(source, target) for source, target in zip(before, self.book.in_use(pages), strict=True) if source != target]
        self.pool.write([target for _, target in moves], self.pool.read([source for source, _ in moves]))

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = self.shape[0]
        if rows and (rows != keys.shape[0] or self.pool.dtype != keys.dtype):
            raise wrong_rows(rows, self.pool.dtype, keys)
        self._prepare(keys, values)

    @contextmanager
    def space_for(self, rows: int, running: RotatingPass, block: int) -> Iterator[None]:
        real, prompt = running.shared("pages", lambda: self._provide_all(rows, running, block))
        used = self.pages.after(real, prompt)
        self.book.provide([(self.pages, used)])
        yield
        self.pages.used = used
        self.book.trim(self.pages)

    def _provide_all(self, rows: int, running: RotatingPass, block: int) -> tuple[list[int], int]:
        """Takes the pages that this layer and those behind it need; returns the new tokens of each row, and of the longest prompt."""
        valid = running.valid
        real = [running.tokens] * rows if valid is None else valid.sum(-1).tolist()
        prompt = block if valid is None else int(valid[:, :block].sum(-1).max()) if block else 0
        self.book.provide([(pages, pages.after(real, prompt)) for pages in self.book.layers[self.index :]])
        return real, prompt

    def clear(self) -> None:
        self.room, self.pages.used, self.pages.slots = 0, [], 0
        self.book.trim(self.pages)

    def fill(self, tensors: Sequence[torch.Tensor], kept: torch.Tensor, most: int) -> None:
        pages, used = self.pages, kept.amax((1, 2)).tolist()
        self.book.provide([(pages, used)])
        pages.used, pages.slots, self.room = used, most, tensors[0].shape[2]
        index, counts = self.book.in_use(pages), [pages.pages_for(count) for count in used]
        for store, states in zip(self._slots(), tensors, strict=True):
            content = _in_pages(states, pages.page_size)
            store[index] = torch.cat([row[:count] for row, count in zip(content, counts, strict=True)])

    def reserve(self, slots: int, most: int) -> None:
        self.room = max(self.room, slots)

    def encoded(self, used: int) -> tuple[torch.Tensor, ...]:
        return tuple(self._gather(store, used) for store in self._slots())

    def at(self, slots: Slots) -> tuple[torch.Tensor, ...]:
        rows, heads = (torch.arange(count, device=slots.device) for count in self.shape)
        index = self._index(rows[:, None, None], heads[:, None], slots)
        return tuple(store[index] for store in self._slots())

    def write(self, slots: Slots, *states: torch.Tensor) -> None:
        # A row that has no new token may name a page that it has not; nothing is written there.
        (key_pages, value_pages), (keys, values) = self._slots(), states
        kernels.write_pages(key_pages, value_pages, self.table, slots, keys, values, backend=self.backend)

    def rotate_down(self, which: torch.Tensor) -> None:
        store = self._slots()[0]
        rows, heads, slots = which.expand(*self.shape, which.shape[-1]).nonzero(as_tuple=True)
        if rows.numel():
            index = self._index(rows, heads, slots)
            store[index] = self.rotation.down_by_one(store.device)(store[index][None, None])[0, 0]

    def attend(
        self, query: torch.Tensor, used: int, scaling: float, *, ranks: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not (query.is_cuda and self.backend in ("auto", "triton")):
            return super().attend(query, used, scaling, ranks=ranks, **options)
        if options.get("valid") is None:
            options["valid"] = torch.ones(1, 1, used, dtype=torch.bool, device=query.device)
        table = self.table[:, : self.pages.pages_for(used)]
        rotation = None if ranks is None else self.tables(ranks)
        keys, values = self._slots()
        return kernels.paged_attention(query, keys, values, table, scaling, rotation=rotation, backend=self.backend, **options)

    def export(self) -> dict[str, torch.Tensor]:
        if not self.shape[0]:
            return {}
        return {name: tensor.contiguous() for name, tensor in zip(self.per_slot, self.encoded(self.room), strict=True)}

    def take(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor | None, most: int) -> None:
        assert kept is not None
        states = [tensors[name] for name in self.per_slot]
        self._prepare(*states)
        self.fill(states, kept, most)

    def snapshot(self) -> Any:
        return self.tensors(), list(self.pages.used), self.room

    def restore(self, snapshot: Any) -> None:
        content, used, self.room = snapshot
        # Pages that came since are kept, for the tokens that come once more.
        self.pages.used = list(used)
        self.book.provide([(self.pages, used)])
        self.pool.write(self.book.in_use(self.pages), content)

    def trim(self, kept: torch.Tensor | None) -> None:
        if kept is not None:
            self.pages.used = kept.amax((1, 2)).tolist()
            self.book.trim(self.pages)

    def _prepare(self, *states: torch.Tensor) -> None:
        """Has the pool make its stores, or refuse what `encode` gave."""
        self.pool.prepare(*states)

    def _slots(self) -> list[torch.Tensor]:
        """The pages of the whole pool, (pages, kv_heads, page_size, width) each."""
        return [self.pool.stores[name] for name in self.per_slot]

    def _gather(self, store: torch.Tensor, used: int) -> torch.Tensor:
        """The first slots of all rows, a copy, (batch, kv_heads, slots, width). Page 0 is zeros, for a page that a row lacks."""
        _, heads, size, width = store.shape
        blocks = self.pages.pages_for(used)
        pages = self.table[:, None, :blocks].long().clamp(min=0)
        index = pages * heads + torch.arange(heads, device=store.device)[:, None]
        gathered = store.view(-1, size * width).index_select(0, index.flatten())
        return gathered.view(-1, heads, blocks * size, width)[:, :, :used]

    def _index(self, rows: torch.Tensor, heads: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots of rows and heads as an index into the stores."""
        size = self.pages.page_size
        return self.table[rows, slots // size].long().clamp(min=0), heads, slots % size

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.book = copy.deepcopy(self.book, memo)
        return copied


def _in_pages(states: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slots page by page, the last one filled up with zeros, (batch, pages, kv_heads, page_size, width).

    Args:
        states: (batch, kv_heads, slots, width).
    """
    pages = -(-states.shape[2] // page_size)
    return extended(states, pages * page_size).unflatten(2, (pages, page_size)).transpose(1, 2)
