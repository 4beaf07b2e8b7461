"""Digests of what tensors hold, byte by byte, and cheap signatures that tell whether they changed since."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hf_kvcaches.errors import UnsupportedError

# SHA-256 is the fastest digest of hashlib wherever the CPU has SHA instructions (0.5 to 0.6 s per GB), and releases the GIL.
_HASH = hashlib.sha256
# Bytes that are brought from an accelerator at a time.
_CHUNK = 64 << 20
# Hex characters kept per tensor: 128 bits, so that the list of all tensors stays small.
_KEPT_HEX = 32
# Elements read per tensor to notice writes that PyTorch's version counter misses.
_SAMPLES = 64

# A tensor, a deferred one, or what else a module puts in its state dict: tuples of tensors, extra state, dtypes, numbers.
State = Mapping[str, Any]


def digest_of(value: Any, name: str = "value") -> str:
    """The digest of a tensor's dtype, shape and bytes, or of any other state-dict entry.

    Args:
        value: A tensor on any device, of any dtype, contiguous or not, quantised or a wrapper around others; or a
            tuple, list, dict, number, string, bytes, dtype or `None`.
        name: What to call it in an error message.
    """
    hasher = _HASH()
    _feed(hasher, value, name)
    return hasher.hexdigest()[:_KEPT_HEX]


@dataclass(frozen=True, eq=False)
class Deferred:
    """A tensor that lies elsewhere and is fetched only while it is read, so that a model larger than memory can be read.

    Args:
        home: Where it lies, by name.
        name: Its name there.
        placeholder: The tensor without data that stands for it in the model.
    """

    home: Mapping[str, Any]
    name: str
    placeholder: Tensor


class DigestCache:
    """Remembers the digests of a module's tensors for as long as the module lives and its tensors stay as they are."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[nn.Module, dict[str, tuple[list[Any], dict[str, str]]]] = WeakKeyDictionary()

    def digests(self, owner: nn.Module, group: str, state: State, refresh: bool = False) -> dict[str, str]:
        """One digest per entry. A change anywhere in the group reads the whole group anew.

        Args:
            owner: The module whose life bounds the memory.
            group: The part of its state that is meant: the base weights, or one adapter.
            state: The entries.
            refresh: Reads everything even when nothing seems to have changed.
        """
        signatures = [(name, _signature(value)) for name, value in state.items()]
        groups = self._seen.setdefault(owner, {})
        if not refresh and group in groups and groups[group][0] == signatures:
            return groups[group][1]
        # Tied tensors have one signature, and are read once.
        distinct = {signature: (state[name], name) for name, signature in signatures}
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            read = dict(zip(distinct, pool.map(lambda entry: digest_of(*entry), distinct.values()), strict=True))
        digests = {name: read[signature] for name, signature in signatures}
        groups[group] = (signatures, digests)
        return digests


def _signature(value: Any) -> Any:
    if isinstance(value, Deferred):
        return (id(value.home), value.name, tuple(value.placeholder.shape), str(value.placeholder.dtype))
    if not isinstance(value, Tensor):
        return None if value is None else digest_of(value)
    # Tensors made in inference mode have no version counter.
    version = None if value.is_inference() else value._version
    identity = (version, tuple(value.shape), str(value.dtype), str(value.device))
    if not _is_plain(value) or value.is_meta:
        return (*identity, id(value))
    return (*identity, value.data_ptr(), value.stride(), sample_of(value))


def sample_of(value: Tensor) -> bytes | None:
    """Some of a tensor's bytes, or None where it has none to look at. `.data` and NumPy writes and fused optimizers leave the version
    counter as it was.

    Args:
        value: Any tensor.
    """
    if not _is_plain(value) or value.is_meta or not value.numel():
        return None
    flat = value.detach()
    if not value.is_contiguous():
        strides = value.stride()
        flat = flat.permute(sorted(range(value.dim()), key=strides.__getitem__, reverse=True))
    flat = flat.reshape(-1)
    # An odd step, for one that divides the row length would read the same column in every row.
    picked = flat[:: (flat.numel() // _SAMPLES) | 1]
    return _bytes(picked.contiguous()).cpu().numpy().tobytes()


def _is_plain(value: Tensor) -> bool:
    return value.layout == torch.strided and not value.is_quantized and not hasattr(value, "__tensor_flatten__")


def _bytes(value: Tensor) -> Tensor:
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


def _feed(hasher: Any, value: Any, name: str) -> None:
    if isinstance(value, Tensor):
        _feed_tensor(hasher, value, name)
    elif isinstance(value, Deferred):
        _feed_deferred(hasher, value, name)
    elif isinstance(value, Mapping):
        hasher.update(f"dict {len(value)};".encode())
        for key in sorted(value, key=str):
            hasher.update(f"{key}=".encode())
            _feed(hasher, value[key], name)
    elif isinstance(value, tuple | list):
        hasher.update(f"list {len(value)};".encode())
        for item in value:
            _feed(hasher, item, name)
    elif isinstance(value, io.BytesIO):
        _feed(hasher, value.getvalue(), name)
    elif isinstance(value, bytes | bytearray):
        hasher.update(f"bytes {len(value)};".encode() + value)
    elif value is None or isinstance(value, bool | int | float | str | torch.dtype):
        text = f"{type(value).__name__} {value!r};"
        hasher.update(text.encode("utf-8", "surrogatepass"))
    else:
        raise UnsupportedError(
            f"{name}: expected tensors, numbers, strings or bytes in the model's state, got {type(value).__name__}, whose content "
            "can't be read without guessing. Give the module a get_extra_state() that returns bytes."
        )


def _feed_deferred(hasher: Any, value: Deferred, name: str) -> None:
    try:
        tensor = value.home[value.name]
    except (KeyError, OSError) as error:
        raise UnsupportedError(
            f"{name}: expected the offloaded weights where accelerate left them, got {error}. "
            "Load the model again before asking for its fingerprint."
        ) from error
    _feed(hasher, tensor, name)


def _feed_tensor(hasher: Any, value: Tensor, name: str) -> None:
    hasher.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
    if value.is_meta:
        raise UnsupportedError(
            f"{name}: expected a tensor with data, got one on the meta device. "
            "Load the weights first; for offloaded models use accelerate's device_map, whose hooks are understood."
        )
    if hasattr(value, "full_tensor"):
        raise UnsupportedError(
            f"{name}: expected a whole tensor, got one shard of a distributed one, which would give every rank another identity. "
            "Take the fingerprint of the model before it is sharded."
        )
    if hasattr(value, "__tensor_flatten__"):
        inner, context = value.__tensor_flatten__()
        hasher.update(f"{type(value).__qualname__} {context!r};".encode())
        for attribute in inner:
            _feed(hasher, getattr(value, attribute), f"{name}.{attribute}")
    elif value.is_quantized:
        hasher.update(f"{value.qscheme()};".encode())
        if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            _feed(hasher, (value.q_scale(), value.q_zero_point()), name)
        else:
            _feed(hasher, (value.q_per_channel_scales(), value.q_per_channel_zero_points(), value.q_per_channel_axis()), name)
        _feed_tensor(hasher, value.int_repr(), name)
    elif value.layout != torch.strided:
        raise UnsupportedError(f"{name}: expected a dense tensor, got layout {value.layout}. Convert it with to_dense() first.")
    else:
        for chunk in _bytes(value).split(_CHUNK):
            hasher.update(memoryview(chunk.cpu().numpy()))
