"""Where slots lie: pages of a pool, for each row as many as it fills (the paper's figure 16)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from hf_kvcaches.core.adopting import LastQueries
from hf_kvcaches.core.calls import Call
from hf_kvcaches.core.passes import Passes
from hf_kvcaches.equip.frames import Frames, TurningPass
from hf_kvcaches.equip.layer import EquipLayer
from hf_kvcaches.equip.pages import LayerPages, PageBook, PagePool
from hf_kvcaches.equip.settings import EquipSettings
from hf_kvcaches.equip.storage import SlotStorage
from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels import slots as kernels


class PagedStorage(SlotStorage):
    """Slot s of row b is slot s % page_size of the page `rows[b][s // page_size]`; `keys` and `values` stay None.

    On CUDA, attention reads the pages where they are. Elsewhere they are gathered first, and all numbers are those of the flat layout.

    Attributes:
        book: The pages of the layer's cache.
        index: The layer's place in the book.
        room: How many slots there are by now. A page is taken when a row reaches it.
    """

    has_buffer = False

    book: PageBook
    index: int
    room: int

    @property
    def pool(self) -> PagePool:
        """Whose pages these are."""
        return self.book.pool

    @property
    def pages(self) -> LayerPages:
        """The layer's pages."""
        return self.book.layers[self.index]

    @property
    def capacity(self) -> int:
        return self.room

    @property
    def rows(self) -> int:
        return len(self.pages.used)

    @property
    def kv_heads(self) -> int:
        return self.pool.stores["keys"].shape[1] if self.rows else 0

    @property
    def held_on(self) -> torch.device:
        assert self.pool.device is not None
        return self.pool.device

    @property
    def table(self) -> torch.Tensor:
        """The block table, (batch, blocks), int32; -1 where a row has no page."""
        return self.pages.table(self._blocks(self.room), self.pool.device)

    def _blocks(self, slots: int) -> int:
        return -(-slots // self.pool.page_size)

    @property
    def _stores(self) -> dict[str, torch.Tensor]:
        """The stores that the layer uses: one cache on a pool may keep rotated keys, and another not."""
        names = ("keys", "values", "swapped") if self.frames.scheme == "rotated_keys" else ("keys", "values")
        return {name: self.pool.stores[name] for name in names}

    def prepare(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Refuses tokens that the pool has no room for.

        Args:
            keys: (batch, kv_heads, tokens, head_dim).
        """
        geometry = self.frames.geometry
        self.pool.prepare(keys, values, geometry.rotary_dim if geometry is not None and self.frames.scheme == "rotated_keys" else None)

    def install(self, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> None:
        used = kept.amax((1, 2)).tolist()
        self.book.provide([(self.pages, used)])
        self.pages.used = used
        self.room = self._room(keys.shape[2])
        self.fill(keys, values)

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the first slots of all rows, as far as these have pages.

        Args:
            keys: (batch, kv_heads, slots, head_dim).
        """
        self._scatter("keys", keys)
        self._scatter("values", values)
        if self.frames.scheme == "rotated_keys":
            self._scatter("swapped", self._swap(keys))

    def reserve(self, used: int) -> None:
        if used > self.room:
            self.room = self._room(used)
        super().reserve(used)

    def own(self, needs_graph: bool) -> None:
        if needs_graph:
            raise UnsupportedError(
                "EquipCache on pages has no gradients: run the model under torch.no_grad(), or leave page_size and pool out."
            )
        for name in self.row_tensors:
            tensor = getattr(self, name)
            if tensor is not None and tensor.is_inference() and not torch.is_inference_mode_enabled():
                setattr(self, name, tensor.clone())

    def snapshot(self) -> dict[str, Any]:
        index = self.pool.index([page for row in self.pages.rows for page in row])
        content = {name: store[index] for name, store in self._stores.items()} if self.rows else {}
        lengths = [len(row) for row in self.pages.rows]
        return super().snapshot() | {"pages": (content, lengths, list(self.pages.used))}

    def restore(self, before: dict[str, Any]) -> None:
        content, lengths, used = before["pages"]
        super().restore({name: value for name, value in before.items() if name != "pages"})
        # Pages that came since are kept, for the tokens that come once more.
        self.pages.used = list(used)
        if content:
            pages = self.pool.index([page for row, length in zip(self.pages.rows, lengths, strict=True) for page in row[:length]])
            for name, held in content.items():
                self.pool.stores[name][pages] = held

    def held(self, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gather("keys", used), self._gather("values", used)

    def held_swapped(self, used: int) -> torch.Tensor:
        return self._gather("swapped", used)

    def write(self, slot: int | torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        stores, size = self.pool.stores, self.pool.page_size
        if isinstance(slot, int):
            assert slot < size * min(map(len, self.pages.rows))
            pages, within = self.table[:, slot // size].long(), slot % size
            stores["keys"][pages, :, within] = keys[:, :, 0]
            stores["values"][pages, :, within] = values[:, :, 0]
            if self.frames.scheme == "rotated_keys":
                stores["swapped"][pages, :, within] = self._swap(keys)[:, :, 0]
            return
        # A row that has no new token may point to a page that it has not; nothing is written there.
        kernels.write_pages(stores["keys"], stores["values"], self.table, slot, keys, values, backend=self.backend)
        if self.frames.scheme == "rotated_keys":
            self._write_at("swapped", slot, self._swap(keys))

    def keys_at(self, index: torch.Tensor) -> torch.Tensor:
        return self._at("keys", index)

    def values_at(self, index: torch.Tensor) -> torch.Tensor:
        return self._at("values", index)

    def write_keys(self, index: torch.Tensor, keys: torch.Tensor) -> None:
        self._write_at("keys", index, keys)

    def turn_back(self, which: torch.Tensor, start: int = 0) -> None:
        store, size = self.pool.stores["keys"], self.pool.page_size
        row, head, slot = which.expand(self.rows, self.kv_heads, which.shape[-1]).nonzero(as_tuple=True)
        if row.numel():
            slot = slot + start
            at = self.table[row, slot // size].long(), head, slot % size
            store[at] = self.frames.back(store.device)(store[at][None, None])[0, 0]

    def token_at(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        stores, size = self.pool.stores, self.pool.page_size
        pages = self.table[:, slot // size].long()
        return stores["keys"][pages, :, slot % size].unsqueeze(2), stores["values"][pages, :, slot % size].unsqueeze(2)

    def replace_keys(self, keys: torch.Tensor) -> None:
        self._scatter("keys", keys)

    def attend_slots(
        self, query: torch.Tensor, used: int, scaling: float, *, ranks: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        in_place = query.is_cuda and self.backend in ("auto", "triton") and self.frames.scheme != "rotated_keys"
        if not in_place:
            return super().attend_slots(query, used, scaling, ranks=ranks, **options)
        if options.get("valid") is None:
            options["valid"] = torch.ones(1, 1, used, dtype=torch.bool, device=query.device)
        turn = None
        if ranks is not None:
            table = self.frames.table(self.slots, query.device)
            turn = kernels.RotationTables(ranks, *table.halves(), table.layout)
        stores, table_of_pages = self.pool.stores, self.table[:, : self._blocks(used)]
        return kernels.paged_attention(
            query, stores["keys"], stores["values"], table_of_pages, scaling, rotation=turn, backend=self.backend, **options
        )

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        """The declared tensors, and copies of the pages held: the pool's memory is not the layer's alone."""
        held = [page for row in self.pages.rows for page in row]
        index = self.pool.index(held)
        return super().owned_tensors() | ({f"{name}_pages": store[index] for name, store in self._stores.items()} if held else {})

    def _gather(self, name: str, used: int) -> torch.Tensor:
        """The first slots of all rows, a copy, (batch, kv_heads, slots, width). Page 0 is zeros, and stands where there is none."""
        store, blocks = self.pool.stores[name], self._blocks(used)
        _, heads, size, width = store.shape
        pages = self.table[:, None, :blocks].long().clamp(min=0)
        index = pages * heads + torch.arange(heads, device=store.device)[:, None]
        gathered = store.view(-1, size * width).index_select(0, index.flatten())
        return gathered.view(self.rows, heads, blocks * size, width)[:, :, :used]

    def _scatter(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the first slots of all rows, (batch, kv_heads, slots, width), where these have pages."""
        store, size, slots = self.pool.stores[name], self.pool.page_size, tensor.shape[2]
        blocks = self._blocks(slots)
        split = torch.nn.functional.pad(tensor, (0, 0, 0, blocks * size - slots)).unflatten(2, (blocks, size))
        places = [(row, block, page) for row, held in enumerate(self.pages.rows) for block, page in enumerate(held[:blocks])]
        if places:
            row, block, page = self.pool.index([number for place in places for number in place]).view(-1, 3).unbind(1)
            store[page] = split[row, :, block]

    def _places(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots, (batch, 1 or kv_heads, 1), as page, head and slot in the page, each (batch, kv_heads, 1)."""
        index = index.expand(self.rows, self.kv_heads, 1)
        size, heads = self.pool.page_size, torch.arange(self.kv_heads, device=index.device)[None, :, None].expand_as(index)
        pages = self.table.long().clamp(min=0)[:, None].expand(-1, self.kv_heads, -1).gather(2, index // size)
        return pages, heads, index % size

    def _at(self, name: str, index: torch.Tensor) -> torch.Tensor:
        return self.pool.stores[name][self._places(index)]

    def _write_at(self, name: str, index: torch.Tensor, new: torch.Tensor) -> None:
        pages, heads, within = self._places(index)
        store = self.pool.stores[name]
        # Page 0 is nobody's, and stays as it is.
        store[pages, heads, within] = torch.where((pages > 0)[..., None], new, store[pages, heads, within])


class PagedEquipLayer(PagedStorage, EquipLayer):
    """An `EquipLayer` on pages.

    The pages for new tokens are taken before anything is changed, by the first layer of a forward pass for all layers that follow.
    """

    counters: ClassVar[tuple[str, ...]] = (*EquipLayer.counters, "room")
    is_compileable = False  # which pages are written to is known in Python only

    def __init__(self, settings: EquipSettings, frames: Frames, passes: Passes[TurningPass], config: Any, book: PageBook) -> None:
        super().__init__(settings, frames, passes, config)
        self.book, self.index, self.room = book, len(book.layers), 0
        book.layers.append(LayerPages(settings.budget))

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: Call) -> torch.Tensor:
        call.check("EquipCache", sinks=True)
        self.own(torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad))
        rows, tokens = keys.shape[0], keys.shape[-2]
        running = self.enter(call, tokens, keys.device)
        block = self.passes.block_length(tokens, begun=bool(self.fed), recording=self.recording is not None)
        with self._provided(running, rows, tokens, block):
            return super().attend(query, keys, values, call)

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, running: TurningPass, queries: LastQueries | None = None) -> None:
        with self._provided(running, keys.shape[0], running.tokens, running.tokens):
            super().adopt(keys, values, running, queries)

    @contextmanager
    def _provided(self, running: TurningPass, rows: int, tokens: int, block: int) -> Iterator[None]:
        """With pages for new tokens; those that are not used go back."""
        try:
            real, prompt = running.shared(("pages", id(self.book)), lambda: self._provide_all(running, rows, tokens, block))
        except MemoryError:
            self.is_initialized = bool(self.rows)
            raise
        wanted = self.pages.after(real, prompt)
        self.book.provide([(self.pages, wanted)])
        yield
        self._took(wanted)

    def _provide_all(self, running: TurningPass, rows: int, tokens: int, block: int) -> tuple[list[int], int]:
        """Takes the pages that this layer and those behind it need; returns the new tokens of each row, and of the longest prompt."""
        valid = running.valid
        real = [tokens] * rows if valid is None else valid.sum(-1).tolist()
        prompt = block if valid is None else int(valid[:, :block].sum(-1).max()) if block else 0
        self.book.provide([(pages, pages.after(real, prompt)) for pages in self.book.layers[self.index :]])
        return real, prompt

    def _took(self, used: list[int]) -> None:
        self.pages.used, self.pages.slots = used, self.slots
        if self.inserting is None:  # an edit that fails needs its pages again
            self.book.trim(self.pages)

    def recount(self) -> None:
        """Gives back the pages that hold nothing any more."""
        if self.rows:
            self._took([self.filled] * self.rows if self.kept_rows is None else self.kept_rows.amax((1, 2)).tolist())
        else:
            self.book.clear(self.pages)

    def check_new_tokens(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.rows and (self.rows != key_states.size(0) or self.pool.dtype != key_states.dtype):
            raise ConfigError(
                f"The cache holds {self.rows} rows of {self.pool.dtype}, and the model came with {key_states.shape[0]} rows of "
                f"{key_states.dtype}. Use a new cache, or reset() this one; batch_repeat_interleave and batch_select_indices change "
                "its rows."
            )
        self.prepare(key_states, value_states)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.recount()

    def reset(self) -> None:
        super().reset()
        self.book.clear(self.pages)

    def forget_recording(self) -> None:
        super().forget_recording()
        self.recount()

    def offload(self) -> None:
        self._refuse("offload", "Pages stay on their pool's device. Leave page_size and pool out.")

    def prefetch(self) -> None:
        self._refuse("prefetch", "Pages stay on their pool's device. Leave page_size and pool out.")

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, values = super().export_state()
        if self.rows:
            tensors["keys"], tensors["values"] = (held.contiguous() for held in self.held(self.room))
        return tensors, values

    def import_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        keys, held_values = tensors.get("keys"), tensors.get("values")
        super().import_state({name: tensor for name, tensor in tensors.items() if name not in ("keys", "values")}, values)
        if keys is None or held_values is None:
            return
        self.prepare(keys, held_values)
        used = [self.filled] * keys.shape[0] if self.kept_rows is None else self.kept_rows.amax((1, 2)).tolist()
        self.book.provide([(self.pages, used)])
        self.lazy_initialization(keys, held_values)
        self._took(used)
        self.fill(keys, held_values)

    def _map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.book.map_rows(self.index, function)
        super()._map_rows(function)
