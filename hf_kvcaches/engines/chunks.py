"""Keys and values in an engine's blocks, and as chunks in a store: the chain of their names, their codes, and a thread that stores them."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.codec.packing import cut, join
from hf_kvcaches.core.rope import RotaryGeometry, rotation_of
from hf_kvcaches.errors import ArtifactError, KVCacheError, UnsupportedError, whole_number
from hf_kvcaches.kernels.rotation import Layout, rotate_
from hf_kvcaches.stores.blobs import BlobStore

_PENDING = 1 << 28  # bytes of keys and values that may wait for the thread; chunks beyond are not stored

States = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, (layers, heads, tokens, dim) each; of one layer without the first dimension."""
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values, (tokens, heads, dim) each, into a cache's slots, (tokens,)."""


def chain(root: bytes, ids: Sequence[int], size: int) -> list[str]:
    """Return the key of each whole chunk of a prompt, which depends on all tokens up to its end.

    Args:
        root: What else the keys and values depend on.
        size: Tokens of a chunk.
    """
    keys, numbers = list[str](), np.asarray(ids, dtype="<i8")
    for start in range(0, len(ids) // size * size, size):
        root = hashlib.blake2b(root + numbers[start : start + size].tobytes(), digest_size=20).digest()
        keys.append(root.hex())
    return keys


class ChunkCoder:
    """Encodes and decodes chunks of all layers, with keys as an engine holds them: rotated to their positions.

    A blob has the `sizes` of the layers' records, the records one behind the other as `codes`, and in the first chunk of a prompt the
    first tokens as they are.

    Args:
        config: The model's.
        size: Tokens of a chunk, a multiple of 64.
    """

    def __init__(self, codec: KVCodec, config: PreTrainedConfig, size: int) -> None:
        self._codec, self._size, geometries = codec, size, rotation_of(config).layers
        self._geometries = {layer: geometries[layer] for layer in range(codec.layer_count) if codec.geometry(config, layer) is not None}

    def encode(self, states: States, first: int) -> list[dict[str, torch.Tensor]]:
        """Return the blobs of chunks, the first of which begins at position `first`."""
        keys, values = states
        exact, unrotated = max(0, self._codec.exact_tokens - first), dict(enumerate(keys))
        for layer, rotation in self._rotations(first, keys.shape[2], keys.device, back=True).items():
            unrotated[layer] = rotate_(keys[layer].to(torch.float32, copy=True), *rotation)
        by_layer = self._codec.pack(unrotated, dict(enumerate(values)), left_out=exact)
        chunks = zip(*(cut(by_layer[layer].cpu(), self._size) for layer in range(len(keys))), strict=True)
        blobs = [{"sizes": torch.tensor([*map(len, records)], dtype=torch.int32), "codes": torch.cat(records)} for records in chunks]
        if exact:
            blobs[0] |= {"first_keys": keys[:, :, :exact].clone(), "first_values": values[:, :, :exact].clone()}
        return blobs

    def decode(self, blobs: Sequence[Mapping[str, torch.Tensor]], first: int, skip: int, device: torch.device) -> Iterator[States]:
        """Yield keys and values of each layer, float32: consecutive chunks from position `first` on, without the first `skip` tokens."""
        chunks, start = list[tuple[torch.Tensor, ...]](), first + skip
        for blob in blobs:
            sizes = blob["sizes"].tolist()
            if len(sizes) != self._codec.layer_count or min(sizes) < 0 or sum(sizes) != len(blob["codes"]):
                raise ArtifactError("The records of a chunk don't fit each other.")
            chunks.append(blob["codes"].split(sizes))
        records = [join(of_layer) for of_layer in zip(*chunks, strict=True)]
        on_device = torch.cat(records).to(device).split([*map(len, records)])
        pairs = self._codec.unpack([(layer, record, skip, None) for layer, record in enumerate(on_device)])
        rotations = self._rotations(start, pairs[0][0].shape[1], device)
        for layer, (keys, values) in enumerate(pairs):
            if layer in rotations:
                rotate_(keys, *rotations[layer])
            if (exact := self._codec.exact_tokens - start) > 0:
                keys[:, :exact], values[:, :exact] = (blobs[0][name][layer, :, skip:] for name in ("first_keys", "first_values"))
            yield keys, values

    def _rotations(self, first: int, tokens: int, device: torch.device, back: bool = False) -> dict[int, tuple[Any, Any, Layout]]:
        """By layer, what rotates keys from position `first` on, or undoes that: arguments of `rotate_`."""
        positions, tables = torch.arange(first, first + tokens, device=device), dict[RotaryGeometry, Any]()
        for geometry in set(self._geometries.values()):
            cos, sin = geometry.cos_sin(positions)
            scaling = 1 / geometry.attention_scaling if back else geometry.attention_scaling
            tables[geometry] = cos * scaling, sin * (-scaling if back else scaling), geometry.layout
        return {layer: tables[geometry] for layer, geometry in self._geometries.items()}


class ChunkWriter:
    """Takes copies of keys and values, and stores their codes when there is time.

    Args:
        cap: The most bytes that the store may hold; the oldest blobs are deleted beyond. None for no limit.
        complain: Called with a sentence where a chunk is not stored.
    """

    def __init__(self, store: BlobStore, coder: ChunkCoder, cap: int | None, complain: Callable[[str], None]) -> None:
        self._store, self._coder, self._complain = store, coder, complain
        self._cap = None if cap is None else whole_number("cap", cap, 1, "a number of bytes")
        self._sizes, self._unchecked, self._waiting, self._lock = dict[str, int](), cap or 0, 0, threading.Lock()
        self._queue: queue.Queue[tuple[list[str], States, int, torch.cuda.Event | None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="hf-kvcaches-writer", daemon=True)
        self._thread.start()

    def submit(self, names: list[str], states: States, first: int) -> None:
        """Store chunks from position `first` on under these names later, if there is room for them. Nobody else writes to their states."""
        size = sum(side.nbytes for side in states)
        if self._waiting + size > _PENDING:
            return self._complain(f"Chunks come faster than they are encoded, and {len(names)} are not stored.")
        with self._lock:
            self._waiting += size
        copied = torch.cuda.current_stream(states[0].device).record_event() if states[0].is_cuda else None
        return self._queue.put((names, states, first, copied))

    def close(self, timeout: float = 30.0) -> None:
        """Store what waits, for so many seconds at most."""
        self._queue.put(None)
        self._thread.join(timeout)

    @torch.inference_mode()
    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            names, (keys, values), first, copied = item
            try:
                if copied is not None:  # this thread has a stream of its own
                    torch.cuda.set_device(keys.device)
                    copied.wait()
                    for side in (keys, values):
                        side.record_stream(torch.cuda.current_stream())
                self._store.begin()
                stored = {blob.key for blob in self._store.heads(names)}
                if not stored.issuperset(names):
                    for name, blob in zip(names, self._coder.encode((keys, values), first), strict=True):
                        if name not in stored:
                            self._make_room(sum(tensor.nbytes for tensor in blob.values()))
                            self._store.put(name, {}, blob)
            except (OSError, KVCacheError, RuntimeError) as error:
                self._complain(f"Chunks are not stored: {error}")
            with self._lock:
                self._waiting -= keys.nbytes + values.nbytes

    def _make_room(self, size: int) -> None:
        """Delete the oldest blobs. The store is looked at after each hundredth of the cap that this process has written."""
        self._unchecked += size
        if self._cap is None or self._unchecked < self._cap // 100:
            return
        self._unchecked, changes = 0, self._store.changes()
        self._sizes = {key: size for key, size in self._sizes.items() if key not in changes.removed}
        self._sizes |= {blob.key: blob.bytes for blob in changes.added}
        excess = sum(self._sizes.values()) + size - self._cap
        while excess > 0 and self._sizes:
            excess -= self._sizes.pop(key := next(iter(self._sizes)))
            self._store.delete(key)


class BlockLayout:
    """Where the numbers of keys and values lie in a block: found by writing some and looking.

    Backends of attention lay out blocks each in their own way, and some in an order that the shape of the cache does not show. All have an
    operation that writes keys and values into slots, and that is what is asked.

    Args:
        cache: Of a layer, (blocks, ...). The first block, which holds no tokens, is written to and restored.
        write: The backend's operation.
        heads: Of keys and values.
        dims: Of a key and of a value.
        block: Tokens of a block as the scheduler counts them, which a backend may divide into several.
    """

    def __init__(self, cache: torch.Tensor, write: Write, heads: int, dims: tuple[int, int], block: int) -> None:
        size, before, device = cache[0].numel(), cache[0].clone(), cache.device
        tokens = size // (heads * sum(dims))
        self._heads, self._dims, self._tokens, self._parts = heads, dims, tokens, block // tokens
        numbers = torch.arange(heads * tokens * sum(dims), device=device).split([heads * tokens * dim for dim in dims])
        order, slots = torch.zeros(size, dtype=torch.long, device=device), torch.arange(tokens, device=device)
        # Each number is told by its bits, which every dtype can hold.
        for bit in range(size.bit_length()):
            keys, values = ((side >> bit & 1).to(cache.dtype).view(heads, tokens, -1).transpose(0, 1).contiguous() for side in numbers)
            write(keys, values, cache, slots)
            order |= (cache[0].flatten() == 1).long() << bit
        cache[0] = before
        if block % tokens or not torch.equal(order.sort().values, torch.arange(size, device=device)):
            raise UnsupportedError(
                f"vLLM: blocks of {tuple(cache.shape[1:])} {cache.dtype} hold other things than plain keys and values of {heads} heads. "
                "Use a backend of attention and a kv_cache_dtype that keep them as they are."
            )
        self._stored, self._plain = order, order.argsort()

    def read(self, cache: torch.Tensor, blocks: Sequence[int]) -> States:
        """Return a copy of keys and values in blocks, (heads, tokens, dim) each."""
        rows = cache[self._rows(blocks, cache)].flatten(1).index_select(1, self._plain)
        sides = rows.split([self._heads * self._tokens * dim for dim in self._dims], 1)
        keys, values = (side.view(len(rows), self._heads, self._tokens, -1).transpose(0, 1).flatten(1, 2) for side in sides)
        return keys, values

    def write(self, cache: torch.Tensor, blocks: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Write keys and values, (heads, tokens, dim) each, into blocks, which they fill."""
        sides = [side.to(cache.dtype).unflatten(1, (-1, self._tokens)).transpose(0, 1).flatten(1) for side in states]
        cache[self._rows(blocks, cache)] = torch.cat(sides, 1).index_select(1, self._stored).view(-1, *cache.shape[1:])

    def _rows(self, blocks: Sequence[int], cache: torch.Tensor) -> torch.Tensor:
        return torch.tensor([block * self._parts + part for block in blocks for part in range(self._parts)], device=cache.device)
