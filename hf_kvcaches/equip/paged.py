"""Where slots lie: pages of a pool, for each row as many as it fills (the paper's figure 16)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from hf_kvcaches.equip.pages import LayerPages, PageBook
from hf_kvcaches.equip.storage import Flat, Raw, Slots, read_decoded, wrong_rows
from hf_kvcaches.kernels import slots as kernels
from hf_kvcaches.kernels.arguments import Attended
from hf_kvcaches.kernels.launch import Backend


class Paged(Flat):
    """Slot s of row b is slot s % page_size of its page s // page_size; `keys` and `values` stay None.

    On CUDA, attention reads the pages where they are. Elsewhere they are gathered first, and all numbers are those of the flat layout.
    """

    pooled = True
    in_graphs = False  # which pages are written to is known in Python only
    no_gradients = "EquipCache on pages has no gradients: run the model under torch.no_grad(), or leave page_size and pool out."

    read = read_decoded

    def __init__(self, backend: Backend, book: PageBook, slots_of: Callable[[int], int], page_size: int | None = None) -> None:
        super().__init__(backend)
        self.book, self.layer, self.room = book, len(book.layers), 0
        book.layers.append(LayerPages(slots_of, page_size or book.pool.page_size))

    @property
    def pages(self) -> LayerPages:
        """The layer's pages."""
        return self.book.layers[self.layer]

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
        pages = self.pages
        blocks = max([pages.pages_for(self.room), *map(len, pages.rows)])
        if pages.table is None or pages.table.shape != (len(pages.rows), blocks):
            pages.table = self.book.pool.index([row + [-1] * (blocks - len(row)) for row in pages.rows]).view(-1, blocks).int()
        return pages.table

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.pages.used and len(self.pages.used) != keys.shape[0]:
            raise wrong_rows(len(self.pages.used), keys.dtype, keys)
        self._open(keys, values)

    @contextmanager
    def space_for(
        self, rows: int, tokens: int, valid: torch.Tensor | None, block: int, shared: Callable[[str, Callable[[], Any]], Any]
    ) -> Iterator[None]:
        def reserve() -> tuple[list[int], int]:
            new = [tokens] * rows if valid is None else valid.sum(-1).tolist()
            prompt = block if valid is None or not block else int(valid[:, :block].sum(-1).max())
            self.book.reserve(self.book.layers[self.layer :], new, prompt)
            return new, prompt

        self.pages.used = self.pages.after(*shared("pages", reserve))
        yield
        self.book.trim(self.pages)

    def raw(self, used: int) -> Raw:
        # Page 0 is zeros, for a page that a row lacks.
        pages = self.table[:, None, : self.pages.pages_for(used)].long().clamp(min=0)
        heads = torch.arange(self.shape[1], device=pages.device)[:, None]
        return tuple(store[pages, heads].flatten(2, 3)[:, :, :used] for store in self._slots())

    def hold(self, raw: Raw, most: int) -> None:
        self._claim(raw[0].shape[0], raw[0].shape[2], most)
        self.book.separate(self.pages)
        if raw[0].shape[2]:
            self.write(torch.arange(raw[0].shape[2], device=raw[0].device)[None, None], raw)

    def write(self, slots: Slots, raw: Raw) -> None:
        if self.pages.shared:
            blocks = (slots // self.pages.page_size).expand(self.shape[0], -1, -1).flatten(1).tolist()
            self.book.separate(self.pages, [set(row) for row in blocks])
        # A row that has no new token may name a page that it has not; nothing is written there.
        stores = self._slots()
        if len(stores) == 2 and stores[0].is_cuda:
            kernels.write_pages(stores[0], stores[1], self.table, slots, raw[0], raw[1], backend=self.backend, check=False)
        else:
            kernels.put_in_pages(stores, self.table, slots, raw)

    def rebuild(self, index: Slots | None, new: Raw | None, used: int, most: int) -> None:
        if index is not None or new is None or not used:
            return super().rebuild(index, new, used, most)
        slots = torch.arange(used, used + new[0].shape[2], device=new[0].device)[None, None]
        self._claim(new[0].shape[0], used + slots.shape[2], most)
        return self.write(slots, new)  # pages of what was there stay shared

    def reserve(self, slots: int, most: int) -> None:
        self.room = max(self.room, slots)

    def attend(self, query: torch.Tensor, used: int, scaling: float, **options: Any) -> Attended:
        if not (query.is_cuda and self.backend in ("auto", "triton")):
            return super().attend(query, used, scaling, **options)
        if options.get("valid") is None:
            options["valid"] = torch.ones(1, 1, used, dtype=torch.bool, device=query.device)
        keys, values = self._slots()
        return kernels.paged_attention(query, keys, values, self.table, scaling, backend=self.backend, check=False, **options)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of the pages in use: the pool's memory is not the layer's alone."""
        pool, pages = self.book.pool, list(dict.fromkeys(self.pages.all()))
        return {name: store[pool.index(pages)] for name, store in pool.stores.items()} if pages else {}

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        pages, before = self.pages, self.pages.all()
        if pages.used:
            sources = function(torch.arange(len(pages.used))).tolist()
            rows = [list(pages.rows[source]) for source in sources]
            self.book.pool.share(page for row in rows for page in row)
            pages.rows[:], pages.used, pages.shared, pages.table = rows, [pages.used[source] for source in sources], True, None
            self.book.pool.give(before)

    def clear(self) -> None:
        self.room, self.pages.used, self.pages.slots = 0, [], 0
        self.book.trim(self.pages)

    def trim(self, kept: torch.Tensor | None) -> None:
        if kept is not None:
            self.pages.used = kept.amax((1, 2)).tolist()
            self.book.trim(self.pages)

    def snapshot(self) -> Any:
        return self.export(), list(self.pages.used), self.pages.slots

    def restore(self, snapshot: Any) -> None:
        self._put(*snapshot)

    def export(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, map(torch.Tensor.contiguous, self.raw(self.room)), strict=True)) if self.pages.used else {}

    def take(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor | None, most: int) -> None:
        assert kept is not None
        self._put(tensors, kept.amax((1, 2)).tolist(), most)

    def _put(self, tensors: dict[str, torch.Tensor], used: list[int], most: int) -> None:
        """Have what `export` gave, of which so many slots of each row are in use."""
        if not tensors:
            return self.clear()
        raw = tuple(tensors[name] for name in self.names)
        self._open(*raw)
        self.pages.used = used
        return self.hold(raw, most)

    def _claim(self, rows: int, slots: int, most: int) -> None:
        """Have pages for the first slots of rows: in a pass for each row's tokens, else for all slots, and `trim` gives back the rest."""
        pages = self.pages
        pages.used = [slots] * rows if max(pages.used, default=0) < slots else pages.used
        pages.slots, self.room = most, slots
        self.book.provide([(pages, pages.used)])

    def _open(self, *states: torch.Tensor) -> None:
        """Have the pool make its stores, or refuse what `encode` gave."""
        shapes = {name: (tensor.shape[1], self.pages.page_size, tensor.shape[3]) for name, tensor in zip(self.names, states, strict=True)}
        self.book.pool.open("keys and values", shapes, states[0].dtype, states[0].device)

    def _slots(self) -> list[torch.Tensor]:
        """The pages of the whole pool, (pages, kv_heads, page_size, width) each."""
        return [self.book.pool.stores[name] for name in self.names]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.book = copy.deepcopy(self.book, memo)
        return copied
