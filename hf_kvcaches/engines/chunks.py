"""Chunks of prompts as blobs: the chain of their keys in a store, their codes, and a thread that encodes and stores them."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedConfig

from hf_kvcaches.codec.codec import KVCodec
from hf_kvcaches.core.rope import RotaryGeometry, rotation_of
from hf_kvcaches.errors import ArtifactError, KVCacheError, whole_number
from hf_kvcaches.stores.blobs import BlobStore

_PENDING = 1 << 28  # bytes of keys and values that may wait for the thread; chunks beyond are not stored

States = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, (layers, heads, tokens, dim) each; of one layer without the first dimension."""


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
    """

    def __init__(self, codec: KVCodec, config: PreTrainedConfig) -> None:
        self._codec, geometries = codec, rotation_of(config).layers
        self._rotated: dict[int, tuple[RotaryGeometry, list[int]]] = {}
        for layer in range(codec.layer_count):
            if codec.geometry(config, layer) is not None:
                self._rotated.setdefault(id(geometries[layer]), (geometries[layer], []))[1].append(layer)

    def encode(self, states: States, first: int) -> dict[str, torch.Tensor]:
        """Return the blob of a chunk whose first token is at position `first`."""
        keys, values = states
        exact = max(0, self._codec.exact_tokens - first)
        sides = self._moved(keys, first, back=True).unbind(), values.unbind()
        by_layer = self._codec.pack(dict(enumerate(sides[0])), dict(enumerate(sides[1])), left_out=exact)
        records = [by_layer[layer] for layer in range(len(keys))]
        blob = {"sizes": torch.tensor([len(record) for record in records], dtype=torch.int32), "codes": torch.cat(records)}
        return blob | ({"first_keys": keys[:, :, :exact].clone(), "first_values": values[:, :, :exact].clone()} if exact else {})

    def decode(self, blobs: Sequence[Mapping[str, torch.Tensor]], first: int, skip: int, device: torch.device) -> States:
        """Return keys and values of consecutive chunks from position `first` on, without the first `skip` tokens, float32."""
        spans, layers = list[tuple[int, torch.Tensor, int, int | None]](), self._codec.layer_count
        for number, blob in enumerate(blobs):
            sizes = blob["sizes"].tolist()
            if len(sizes) != layers or min(sizes) < 0 or sum(sizes) != len(blob["codes"]):
                raise ArtifactError("The records of a chunk don't fit each other.")
            records = blob["codes"].to(device).split(sizes)
            spans += [(layer, record, 0 if number else skip, None) for layer, record in enumerate(records)]
        pairs = self._codec.unpack(spans)
        keys, values = (
            torch.stack([torch.cat([pair[side] for pair in pairs[layer::layers]], 1) for layer in range(layers)]) for side in range(2)
        )
        keys = self._moved(keys, first + skip)
        if (exact := self._codec.exact_tokens - first - skip) > 0:
            keys[:, :, :exact], values[:, :, :exact] = (blobs[0][name][:, :, skip:] for name in ("first_keys", "first_values"))
        return keys, values

    def _moved(self, keys: torch.Tensor, first: int, back: bool = False) -> torch.Tensor:
        """Keys rotated to their positions, or back; float32."""
        positions, result = torch.arange(first, first + keys.shape[2], device=keys.device), keys.to(torch.float32, copy=True)
        for geometry, layers in self._rotated.values():
            result[layers] = (geometry.unrotate if back else geometry.rotate)(result[layers], positions)
        return result


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
        self._queue: queue.Queue[tuple[str, Sequence[torch.Tensor], int, torch.cuda.Event | None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="hf-kvcaches-writer", daemon=True)
        self._thread.start()

    def submit(self, key: str, states: Sequence[torch.Tensor], first: int) -> None:
        """Store keys and values from position `first` on later, if there is room for them. Nobody else writes to them."""
        size = sum(side.nbytes for side in states)
        if self._waiting + size > _PENDING:
            return self._complain("Chunks come faster than they are encoded, and one is not stored.")
        with self._lock:
            self._waiting += size
        copied = torch.cuda.current_stream(states[0].device).record_event() if states[0].is_cuda else None
        return self._queue.put((key, states, first, copied))

    def close(self, timeout: float = 30.0) -> None:
        """Store what waits, for so many seconds at most."""
        self._queue.put(None)
        self._thread.join(timeout)

    @torch.inference_mode()
    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            key, (keys, values), first, copied = item
            try:
                if copied is not None:  # this thread has a stream of its own
                    torch.cuda.set_device(keys.device)
                    copied.wait()
                    for side in (keys, values):
                        side.record_stream(torch.cuda.current_stream())
                self._store.begin()
                if not any(True for _ in self._store.heads([key])):
                    blob = self._coder.encode((keys, values), first)
                    self._make_room(sum(tensor.nbytes for tensor in blob.values()))
                    self._store.put(key, {"tokens": keys.shape[2]}, blob)
            except (OSError, KVCacheError, RuntimeError) as error:
                self._complain(f"A chunk is not stored: {error}")
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
