"""Where slots lie: pages of a pool, for each row as many as it fills (the paper's figure 16)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from hf_kvcaches.core.adopting import LastQueries
from hf_kvcaches.core.calls import Call
from hf_kvcaches.core.passes import Passes
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.equip.layer import EquipLayer
from hf_kvcaches.equip.pages import LayerPages, PageBook, PagePool
from hf_kvcaches.equip.rotation import RotatingPass, SlotRotation
from hf_kvcaches.equip.settings import EquipSettings
from hf_kvcaches.equip.store import FlatStore, Slots, wrong_rows
from hf_kvcaches.errors import UnsupportedError
from hf_kvcaches.kernels import slots as kernels
from hf_kvcaches.kernels.launch import Backend


class PagedStore(FlatStore):
    """Slot s of row b is slot s % page_size of the page `rows[b][s // page_size]`; `keys` and `values` stay None.

    On CUDA, attention reads the pages where they are. Elsewhere they are gathered first, and all numbers are those of the flat store.

    Args:
        book: The pages of the layer's cache.
        budget: The layer's slots, or the fraction of the prompt.
    """

    in_graphs = False  # which pages are written to is known in Python only

    def __init__(self, rotation: SlotRotation, backend: Backend, book: PageBook, budget: int | float) -> None:
        super().__init__(rotation, backend)
        self.book, self.index, self.room = book, len(book.layers), 0
        book.layers.append(LayerPages(budget))

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
        return rows, self.pool.stores["keys"].shape[1] if rows else 0

    @property
    def table(self) -> torch.Tensor:
        """The block table, (batch, blocks), int32; -1 where a row has no page."""
        return self.pages.table(self._blocks(self.room), self.pool.device)

    def _blocks(self, slots: int) -> int:
        return -(-slots // self.pool.page_size)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of the pages held: the pool's memory is not the layer's alone."""
        held = [page for row in self.pages.rows for page in row]
        return {f"{name}_pages": store[self.pool.index(held)] for name, store in self.pool.stores.items()} if held else {}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        raise UnsupportedError("EquipLayer does not support offload. Pages stay on their pool's device. Leave page_size and pool out.")

    def own(self, owned: Callable[[torch.Tensor], torch.Tensor], needs_graph: bool) -> None:
        if needs_graph:
            raise UnsupportedError(
                "EquipCache on pages has no gradients: run the model under torch.no_grad(), or leave page_size and pool out."
            )

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.book.map_rows(self.index, function)

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = self.shape[0]
        if rows and (rows != keys.shape[0] or self.pool.dtype != keys.dtype):
            raise wrong_rows(rows, self.pool.dtype, keys)
        self.pool.prepare(keys, values)

    def clear(self) -> None:
        self.room = 0
        self.book.clear(self.pages)

    def install(self, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, most: int, source: torch.Tensor | None = None) -> None:
        self._provide(kept)
        self.room = keys.shape[2]
        self._scatter("keys", keys)
        self._scatter("values", values)

    def _provide(self, kept: torch.Tensor) -> None:
        """Takes pages for the first slots of each row."""
        used = kept.amax((1, 2)).tolist()
        self.book.provide([(self.pages, used)])
        self.pages.used = used

    def reserve(self, slots: int, most: int) -> None:
        self.room = max(self.room, slots)

    def read(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gather("keys", used), self._gather("values", used)

    def at(self, slots: Slots) -> tuple[torch.Tensor, ...]:
        places = self._places(slots)
        return self.pool.stores["keys"][places], self.pool.stores["values"][places]

    def write(self, slots: Slots, *states: torch.Tensor) -> None:
        # A row that has no new token may name a page that it has not; nothing is written there.
        stores, (keys, values) = self.pool.stores, states
        kernels.write_pages(stores["keys"], stores["values"], self.table, slots, keys, values, backend=self.backend)

    def rotate_down(self, which: torch.Tensor) -> None:
        store, size = self.pool.stores["keys"], self.pool.page_size
        row, head, slot = which.expand(*self.shape, which.shape[-1]).nonzero(as_tuple=True)
        if row.numel():
            at = self.table[row, slot // size].long(), head, slot % size
            store[at] = self.rotation.down_by_one(store.device)(store[at][None, None])[0, 0]

    def attend(
        self, query: torch.Tensor, used: int, scaling: float, *, ranks: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not (query.is_cuda and self.backend in ("auto", "triton")):
            return super().attend(query, used, scaling, ranks=ranks, **options)
        if options.get("valid") is None:
            options["valid"] = torch.ones(1, 1, used, dtype=torch.bool, device=query.device)
        stores, table = self.pool.stores, self.table[:, : self._blocks(used)]
        rotation = None if ranks is None else self.tables(ranks)
        return kernels.paged_attention(
            query, stores["keys"], stores["values"], table, scaling, rotation=rotation, backend=self.backend, **options
        )

    def export(self) -> dict[str, torch.Tensor]:
        return {name: self._gather(name, self.room).contiguous() for name in self.exported} if self.shape[0] else {}

    def take(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor | None) -> None:
        assert kept is not None
        self.pool.prepare(tensors["keys"], tensors["values"])
        self.install(tensors["keys"], tensors["values"], kept, tensors["keys"].shape[2])

    def snapshot(self) -> Any:
        index = self.pool.index([page for row in self.pages.rows for page in row])
        content = {name: store[index] for name, store in self.pool.stores.items()} if self.shape[0] else {}
        return content, [len(row) for row in self.pages.rows], list(self.pages.used), self.room

    def restore(self, snapshot: Any) -> None:
        content, lengths, used, self.room = snapshot
        # Pages that came since are kept, for the tokens that come once more.
        self.pages.used = list(used)
        pages = self.pool.index([page for row, length in zip(self.pages.rows, lengths, strict=False) for page in row[:length]])
        for name, tensor in content.items():
            self.pool.stores[name][pages] = tensor

    def trim(self, kept: torch.Tensor | None) -> None:
        if kept is not None:
            self.pages.used = kept.amax((1, 2)).tolist()
            self.book.trim(self.pages)

    def _gather(self, name: str, used: int) -> torch.Tensor:
        """The first slots of all rows, a copy, (batch, kv_heads, slots, width). Page 0 is zeros, and stands for a page that a row lacks."""
        store, blocks = self.pool.stores[name], self._blocks(used)
        _, heads, size, width = store.shape
        pages = self.table[:, None, :blocks].long().clamp(min=0)
        index = pages * heads + torch.arange(heads, device=store.device)[:, None]
        gathered = store.view(-1, size * width).index_select(0, index.flatten())
        return gathered.view(-1, heads, blocks * size, width)[:, :, :used]

    def _scatter(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the first slots of all rows, (batch, kv_heads, slots, width), where these have pages."""
        store, size, slots = self.pool.stores[name], self.pool.page_size, tensor.shape[2]
        blocks = self._blocks(slots)
        split = torch.nn.functional.pad(tensor, (0, 0, 0, blocks * size - slots)).unflatten(2, (blocks, size))
        places = [(row, block, page) for row, held in enumerate(self.pages.rows) for block, page in enumerate(held[:blocks])]
        if places:
            row, block, page = self.pool.index([number for place in places for number in place]).view(-1, 3).unbind(1)
            store[page] = split[row, :, block]

    def _places(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots as page, head and slot in the page, each (batch, kv_heads, tokens)."""
        slots = slots.expand(*self.shape, -1)
        size, heads = self.pool.page_size, torch.arange(self.shape[1], device=slots.device)[None, :, None].expand_as(slots)
        pages = self.table.long().clamp(min=0)[:, None].expand(-1, self.shape[1], -1).gather(2, slots // size)
        return pages, heads, slots % size

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.book = copy.deepcopy(self.book, memo)
        return copied


class PagedEquipLayer(EquipLayer):
    """An `EquipLayer` on pages.

    The pages for new tokens are taken before anything is changed, by the first layer of a forward pass for all layers that follow.
    """

    store: PagedStore

    def __init__(
        self, settings: EquipSettings, geometry: RotaryGeometry, rotation: SlotRotation, passes: Passes[RotatingPass], book: PageBook
    ) -> None:
        super().__init__(settings, geometry, rotation, passes, PagedStore(rotation, settings.backend, book, settings.budget))

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
        call.check("EquipCache", sinks=True)
        self.own(torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad))
        rows, tokens = keys.shape[0], keys.shape[-2]
        running = self.enter(call, tokens, keys.device)
        block = self.passes.block_length(tokens, begun=bool(self.state.seen), recording=self.recording is not None)
        with self._provided(running, rows, tokens, block):
            return super().attend(query, keys, values, call)

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, running: RotatingPass, queries: LastQueries | None = None) -> None:
        with self._provided(running, keys.shape[0], running.tokens, running.tokens):
            super().adopt(keys, values, running, queries)

    @contextmanager
    def _provided(self, running: RotatingPass, rows: int, tokens: int, block: int) -> Iterator[None]:
        """With pages for new tokens; those that are not used go back."""
        book, pages = self.store.book, self.store.pages
        try:
            real, prompt = running.shared(("pages", id(book)), lambda: self._provide_all(running, rows, tokens, block))
        except MemoryError:
            self.is_initialized = bool(self.store.shape[0])
            raise
        used = pages.after(real, prompt)
        book.provide([(pages, used)])
        yield
        pages.used, pages.slots = used, self.state.slots
        if self.detour is None:  # an edit that fails needs its pages again
            book.trim(pages)

    def _provide_all(self, running: RotatingPass, rows: int, tokens: int, block: int) -> tuple[list[int], int]:
        """Takes the pages that this layer and those behind it need; returns the new tokens of each row, and of the longest prompt."""
        valid, book = running.valid, self.store.book
        real = [tokens] * rows if valid is None else valid.sum(-1).tolist()
        prompt = block if valid is None else int(valid[:, :block].sum(-1).max()) if block else 0
        book.provide([(pages, pages.after(real, prompt)) for pages in book.layers[self.store.index :]])
        return real, prompt

    def _move(self, device: torch.device | str) -> None:
        self._refuse("offload", "Pages stay on their pool's device. Leave page_size and pool out.")
