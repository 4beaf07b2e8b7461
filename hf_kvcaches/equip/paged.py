"""Where slots lie: pages of a pool, for each row as many as it fills (the paper's figure 16)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from hf_kvcaches.equip.pages import BlockTable, PagePool, provide
from hf_kvcaches.equip.storage import Flat, Raw, Slots, read_decoded
from hf_kvcaches.kernels import slots as kernels
from hf_kvcaches.kernels.arguments import Attended
from hf_kvcaches.kernels.launch import Backend


class Paged(Flat):
    """Slot s of row b is slot s % page_size of its page s // page_size; `keys` and `values` stay None.

    On CUDA, attention reads the pages where they are. Elsewhere they are gathered first, and all numbers are those of the flat layout.
    The block tables of a cache's layers are one list, to which a layer adds its own: a pass takes pages for all of them or for none.
    """

    pooled, parts = True, ("pool", "tables", "table")
    in_graphs = False  # which pages are written to is known in Python only
    no_gradients = "EquipCache on pages has no gradients: run the model under torch.no_grad(), or leave page_size and pool out."
    capacity, heads = 0, 1
    read = read_decoded

    def __init__(self, backend: Backend, pool: PagePool, tables: list[BlockTable], slots_of: Callable[[int], int], size: int = 0) -> None:
        super().__init__(backend)
        self.pool, self.tables, self.layer = pool, tables, len(tables)
        self.table = BlockTable(pool, size or pool.page_size, slots_of)
        tables.append(self.table)

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.table.used), self._slots()[0].shape[1]) if self.table.used else (0, 0)

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().check(keys, values)
        self._open(keys, values)
        self.heads = keys.shape[1]

    @contextmanager
    def space_for(self, rows: int, tokens: int, valid: torch.Tensor | None, block: int, shared: Callable[..., Any]) -> Iterator[None]:
        def reserve() -> list[list[int]]:
            new = [tokens] * rows if valid is None else valid.sum(-1).tolist()
            prompt = block if valid is None or not block else int(valid[:, :block].sum(-1).max())
            before = [(table.slots or table.slots_of(prompt), table.used or [0] * rows) for table in self.tables]
            used = [[min(limit, slots + count) for slots, count in zip(row_slots, new, strict=True)] for limit, row_slots in before]
            # A block may be written to all slots, and a token to another one in each head.
            provide(self.tables[self.layer :], used[self.layer :], None if block else [self.heads * count for count in new])
            return used

        self.table.used, self.table.stream = shared("pages", reserve)[self.layer], None if self.pool.grows else self.pool.stream()
        yield
        self.table.trim(self.table.used)

    def raw(self, used: int) -> Raw:
        # Page 0 is zeros, for a page that a row lacks.
        pages = self._pages()[:, None, : self.table.blocks(used)].long().clamp(min=0)
        heads = torch.arange(self.shape[1], device=pages.device)[:, None]
        return tuple(store[pages, heads].flatten(2, 3)[:, :, :used] for store in self._slots())

    def hold(self, raw: Raw, most: int, start: int = 0, used: list[int] | None = None) -> None:
        """Make these the slots from `start` on; `used` of each row are in use, or as many as in the running pass, or all."""
        table, self.capacity = self.table, start + raw[0].shape[2]
        in_pass = max(table.used, default=0) >= self.capacity
        table.used, table.slots = used or (table.used if in_pass else [self.capacity] * raw[0].shape[0]), most
        provide([table], [table.used])
        if start < self.capacity:
            self.write(torch.arange(start, self.capacity, device=raw[0].device)[None, None], raw)

    def write(self, slots: Slots, raw: Raw) -> None:
        if self.table.shared:
            self.table.separate((slots // self.table.size).expand(self.shape[0], -1, -1).flatten(1).tolist())
        # A row that has no new token may name a page that it has not; nothing is written there.
        stores = self._slots()
        if len(stores) == 2 and stores[0].is_cuda:
            kernels.write_slots(stores[0], stores[1], slots, raw[0], raw[1], tables=self._pages(), backend=self.backend)
        else:
            kernels.put_in_pages(stores, self._pages(), slots, raw)

    def rebuild(self, index: Slots | None, new: Raw | None, used: int, most: int) -> None:
        if index is not None or new is None or not used:
            return super().rebuild(index, new, used, most)
        return self.hold(new, most, used)  # pages of what was there stay shared

    def reserve(self, slots: int, most: int) -> None:
        self.capacity = max(self.capacity, slots)

    def attend(self, query: torch.Tensor, used: int, scaling: float, **options: Any) -> Attended:
        if not (query.is_cuda and self.backend in ("auto", "triton")):
            return super().attend(query, used, scaling, **options)
        if options.get("valid") is None:
            options["valid"] = torch.ones(1, 1, used, dtype=torch.bool, device=query.device)
        keys, values = self._slots()
        return kernels.slot_attention(query, keys, values, scaling, tables=self._pages(), backend=self.backend, **options)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of the pages in use: the pool's memory is not the layer's alone."""
        pages = [*dict.fromkeys(chain(*self.table.rows))]
        return {name: store[self.pool.index(pages)] for name, store in self.pool.stores.items() if pages}

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if rows := len(self.table.used):
            self.table.pick(function(torch.arange(rows)).tolist())

    def clear(self) -> None:
        self.capacity, self.table.slots = 0, 0
        self.table.trim([])

    def trim(self, kept: torch.Tensor) -> None:
        self.table.trim(kept.amax((1, 2)).tolist())

    def export(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, map(torch.Tensor.contiguous, self.raw(self.capacity)), strict=True)) if self.table.used else {}

    def restore(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor, most: int) -> None:
        if not tensors:
            return self.clear()
        self._open(*(raw := tuple(tensors[name] for name in self.names)))
        self.hold(raw, most, used=kept.amax((1, 2)).tolist())
        return self.table.trim(self.table.used)

    def _pages(self) -> torch.Tensor:
        """The block table on the device."""
        table, rows = self.table, self.table.rows
        blocks = max([table.blocks(self.capacity), *map(len, rows)])
        if table.tensor is None or table.tensor.shape[1] < blocks:
            table.tensor = self.pool.index([row + [-1] * (blocks - len(row)) for row in rows]).view(-1, blocks).int()
        return table.tensor

    def _open(self, *states: torch.Tensor) -> None:
        """Have the pool make its stores, or refuse what `encode` gave."""
        shapes = {name: (tensor.shape[1], self.table.size, tensor.shape[3]) for name, tensor in zip(self.names, states, strict=True)}
        self.pool.open("keys and values", shapes, states[0].dtype, states[0].device)

    def _slots(self) -> list[torch.Tensor]:
        """The pages of the whole pool, (pages, kv_heads, page_size, width) each."""
        return [self.pool.stores[name] for name in self.names]
