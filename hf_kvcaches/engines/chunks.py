"""Chunks of prompts as blobs: the chain of their keys in a store, their codes, and a thread that encodes and stores them."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedConfig

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.codec.packing import cut, join
from hf_kvcaches.core.rope import RotaryGeometry, rotation_of
from hf_kvcaches.errors import ArtifactError, KVCacheError, whole_number
from hf_kvcaches.kernels.rotation import Layout, rotate_
from hf_kvcaches.stores.blobs import BlobStore

_PENDING = 1 << 28  # bytes of keys and values that may wait for the thread; chunks beyond are not stored

States = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, (layers, heads, tokens, dim) each; of one layer without the first dimension."""
RotationTables = tuple[torch.Tensor, torch.Tensor, Layout]
"""Cosines and sines, (tokens, pairs), and which dimensions form a pair."""


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

    def _rotations(self, first: int, tokens: int, device: torch.device, back: bool = False) -> dict[int, RotationTables]:
        """By layer, what rotates keys from position `first` on, or undoes that."""
        positions, tables = torch.arange(first, first + tokens, device=device), dict[RotaryGeometry, RotationTables]()
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
