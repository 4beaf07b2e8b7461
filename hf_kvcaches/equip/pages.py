"""Where slots lie in pages of a pool, which rows, layers and caches share: for each row as many as it fills (the paper's figure 16)."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

import torch

from hf_kvcaches.compat import split_model
from hf_kvcaches.equip.storage import Flat, Raw, Slots, read_decoded
from hf_kvcaches.errors import ConfigError, PoolExhausted, UnsupportedError, whole_number
from hf_kvcaches.kernels import slots as kernels
from hf_kvcaches.kernels.launch import Backend
from hf_kvcaches.kernels.slots import Attended
from hf_kvcaches.reuse.store import Event, wait_for

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
        self.config, self.grows, self.content = split_model(model)[1], grows, ""
        self.stores, self.device = dict[str, torch.Tensor](), torch.device("cpu")
        self._free, self._holders = list(range(self.pages, 0, -1)), Counter[int]()
        self._changes: deque[tuple[Iterable[int], Iterable[int]]] = deque()  # of holders, which are still to be counted
        self._events: dict[Any, Event] = {}  # for each CUDA stream, when it was done with the pages that it gave back

    @property
    def free_pages(self) -> int:
        """How many belong to nobody."""
        self.shared(())
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
        """Pages of zeros, for a holder to come; all of them or none."""
        with _lock:
            self._settle()
            if count > len(self._free) and not self.grows:
                raise PoolExhausted(
                    f"The page pool is exhausted: {count} more pages are needed, and {len(self._free)} of {self.pages} are free. "
                    "Reset or delete another cache on it, or make a PagePool with more pages."
                )
            if count > len(self._free):
                more, before = max(self.pages, count - len(self._free)), self.pages
                with torch.inference_mode(False):
                    self.stores = {name: torch.cat([store, store.new_zeros(more, *store.shape[1:])]) for name, store in self.stores.items()}
                self.pages, self._free = before + more, [*range(before + more, before, -1), *self._free]
            pages = [self._free.pop() for _ in range(count)]
        for store in self.stores.values() if pages else ():
            store.index_fill_(0, self.index(pages), 0)  # what was there may be no number, and masked values are multiplied by zero
        return pages

    def count(self, new: Sequence[int], old: Sequence[int] = (), stream: Any = None) -> None:
        """Count one holder more of new pages, and one less of old ones, which it used on a CUDA stream; None: the current one."""
        if old and (stream := stream or self.stream()) is not None:
            self._events[stream] = self.device, stream.record_event()
        self._changes.append((new, old))  # no lock: a cache may be collected while this thread has it

    def shared(self, pages: Iterable[int]) -> set[int]:
        """Pages with several holders. The others may be written to by theirs."""
        with _lock:
            self._settle()
            return {page for page in pages if self._holders[page] > 1}

    def index(self, pages: Any) -> torch.Tensor:
        """Numbers as a tensor for the stores; a GPU is not waited for."""
        index = torch.tensor(pages, dtype=torch.long, device="cpu")
        return (index if self.stream() is None else index.pin_memory()).to(self.device, non_blocking=True)

    def stream(self) -> Any:
        """The CUDA stream that this thread uses, or None."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _settle(self) -> None:
        """Count holders, and have this thread's stream wait until others are done with what they gave back."""
        while self._changes:
            new, old = self._changes.popleft()
            self._holders.update(new)
            self._holders.subtract(old)
            self._free += [page for page in {*old} if not self._holders[page]]
        wait_for([*self._events.values()], self.stores.values())

    def __getstate__(self) -> dict[str, Any]:
        if not self.grows:
            raise UnsupportedError("A PagePool that caches share can't be pickled. Save each cache with cache.save(path).")
        self.shared(())
        with torch.inference_mode(False):
            stores = {name: store.clone() for name, store in self.stores.items()}
        return vars(self) | {"stores": stores, "_free": [*self._free], "_holders": self._holders.copy(), "_changes": deque(), "_events": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> PagePool:
        return copy.copy(self) if self.grows else self

    def __repr__(self) -> str:
        return f"PagePool(pages={self.pages}, free_pages={self.free_pages}, page_size={self.page_size}, {self.bytes / 2**20:.2f} MiB)"


@dataclass(eq=False)
class BlockTable:
    """The pages of one layer: slot s of row b is in `rows[b][s // size]`. They go back to the pool when it is collected."""

    pool: PagePool
    size: int
    slots_of: Callable[[int], int]  # how many slots a row may use with a prompt of so many tokens
    slots: int = 0  # the same once the prompt is there
    rows: list[list[int]] = field(default_factory=list)  # in a pass they end with pages for copies of shared ones
    used: list[int] = field(default_factory=list)  # slots of each row in use, or in use after the running pass
    shared: bool = False  # whether a page may have another holder
    stream: Any = None  # of the last pass, where others may use the pool
    tensor: torch.Tensor | None = None  # `rows` on the device, (rows, blocks), int32; -1 where a row has no page

    def __post_init__(self) -> None:
        weakref.finalize(self, lambda state: state["pool"].count((), [*chain(*state["rows"])], state["stream"]), vars(self)).atexit = False

    def blocks(self, slots: int) -> int:
        return -(-slots // self.size)

    def hold(self, rows: list[list[int]]) -> None:
        """Hold these pages in place of all before."""
        if rows != self.rows:
            before, self.rows, self.tensor = self.rows, rows, None
            self.pool.count([*chain(*rows)], [*chain(*before)])

    def separate(self, blocks: Sequence[Iterable[int]]) -> None:
        """Copy shared pages before they are written to, in some blocks of each row."""
        shared, moves = self.pool.shared(chain(*self.rows)), list[tuple[int, int]]()
        places = [[block for block in {*some} if {*row[block : block + 1]} & shared] for row, some in zip(self.rows, blocks, strict=True)]
        provide([self], [self.used], [*map(len, places)])
        rows = [[*row] for row in self.rows]
        for row, block in ((row, block) for row, found in zip(rows, places, strict=True) for block in found):
            moves.append((row[block], row[-1]))
            row[block] = row.pop()
        for store in self.pool.stores.values() if moves else ():
            old, new = (self.pool.index(pages) for pages in zip(*moves, strict=True))
            store.index_copy_(0, new, store.index_select(0, old))
        self.hold(rows)
        self.shared = bool(self.pool.shared(chain(*rows)))

    def trim(self, used: list[int]) -> None:
        """Give back what rows hold beyond so many slots in use."""
        self.used = used
        self.hold([row[: self.blocks(slots)] for row, slots in zip(self.rows, used, strict=False)])

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockTable:
        self.trim(self.used)
        pool = copy.deepcopy(self.pool, memo)
        if pool is self.pool:
            pool.count([*chain(*self.rows)])
            self.shared = True
        return replace(self, pool=pool)


def provide(tables: Sequence[BlockTable], used: Sequence[Sequence[int]], written: Sequence[int] | None = None) -> None:
    """Have rows hold pages for so many slots in use, and to copy shared ones that are `written` to, or all: in all tables or in none."""
    wanted = []
    for table, slots in zip(tables, used, strict=True):
        shared = table.pool.shared(chain(*table.rows)) if table.shared else ()
        copies = [sum(page in shared for page in row) for row in table.rows] if shared else [0] * len(slots)
        copies = copies if written is None else [*map(min, copies, written)]
        rows = [*table.rows, *([] for _ in slots[len(table.rows) :])]
        wanted.append([(row, table.blocks(n) + more - len(row)) for row, n, more in zip(rows, slots, copies, strict=True)])
    pages = tables[0].pool.take(sum(max(0, count) for lacking in wanted for _, count in lacking))
    for table, lacking in zip(tables, wanted, strict=True):
        table.hold([[*row, *(pages.pop() for _ in range(count))] for row, count in lacking])


class Paged(Flat):
    """Slot s of row b is slot s % page_size of its page s // page_size; `keys` and `values` stay None.

    On CUDA, attention reads the pages where they are. Elsewhere they are gathered first, and all numbers are those of the flat layout.
    The block tables of a cache's layers are one list, to which a layer adds its own: a pass takes pages for all of them or for none.
    """

    pooled = True
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

    def held(self, used: int) -> Raw:
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
            Paged.write(self, torch.arange(start, self.capacity, device=raw[0].device)[None, None], raw)

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
        if not (query.is_cuda and self.backend in ("auto", "triton") and self.names == Flat.names):
            return super().attend(query, used, scaling, **options)
        if options.get("valid") is None:
            options["valid"] = torch.ones(1, 1, used, dtype=torch.bool, device=query.device)
        keys, values = self._slots()
        return kernels.slot_attention(query, keys, values, scaling, tables=self._pages(), backend=self.backend, **options)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of the pages in use: the pool's memory is not the layer's alone."""
        pages = [*dict.fromkeys(chain(*self.table.rows))]
        return super().tensors() | {name: store[self.pool.index(pages)] for name, store in self.pool.stores.items() if pages}

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        table = self.table
        if table.used:
            table.trim(table.used)
            order = function(torch.arange(len(table.used))).tolist()
            table.hold([table.rows[row] for row in order])
            table.used, table.shared = [table.used[row] for row in order], True
        super().map_rows(function)

    def clear(self) -> None:
        self.capacity, self.table.slots = 0, 0
        self.table.trim([])
        super().clear()

    def trim(self, kept: torch.Tensor) -> None:
        self.table.trim(kept.amax((1, 2)).tolist())

    def export(self) -> dict[str, torch.Tensor]:
        held = self.held(self.capacity) if self.table.used else ()
        return super().tensors() | {name: tensor.contiguous() for name, tensor in zip(self.names, held, strict=False)}

    def restore(self, tensors: dict[str, torch.Tensor], kept: torch.Tensor, most: int) -> None:
        if not tensors:
            return self.clear()
        for name in self.beside:
            setattr(self, name, tensors[name])
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = super().__deepcopy__(memo)
        copied.pool, copied.tables, copied.table = copy.deepcopy((self.pool, self.tables, self.table), memo)
        return copied
