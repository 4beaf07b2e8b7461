"""Exact checksums and samples of tensors, on their own device, and plain values, whose hash is the same in every process."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_kvcaches.errors import UnsupportedError

# Words of 8 bytes in a row, and rows that are added up at a time: what fits in a core's second-level cache, and enough work for a GPU.
_ROW, _CPU_ROWS, _GPU_ROWS = 1 << 15, 1, 64
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15
# What is sampled of a large tensor: runs of so many bytes.
_RUNS, _RUN_BYTES = 32, 512


@torch.no_grad()
def checksum(value: Tensor) -> int:
    """Return the 64-bit checksum of a dense tensor's bytes: the sum of its words, each times an odd number of its position, modulo 2^64.

    Equal on every device. A change of one element always changes it; of several with a probability of 1 - 2^-32: no guard against intent.
    """
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    data = value.detach().resolve_neg().contiguous().view(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -len(data) % 8)) if len(data) % 8 else data
    words = (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)
    rows = -(-len(words) // _ROW)
    factors, row_factors = _factors(_ROW, words.device), _factors(1 << rows.bit_length(), words.device)
    total, count = torch.zeros((), dtype=torch.int64, device=words.device), _CPU_ROWS if words.device.type == "cpu" else _GPU_ROWS
    for start in range(0, rows, count):
        block = words[start * _ROW : (start + count) * _ROW]
        block = torch.nn.functional.pad(block, (0, -len(block) % _ROW)).view(-1, _ROW) if count > 1 else block[None]
        # Upper bits join lower ones: the top bit of a word changes nothing but the top bit of a product, and two of these would cancel.
        sums = (block >> 29).bitwise_and_((1 << 35) - 1).bitwise_xor_(block).mul_(factors[: block.shape[1]]).sum(1)
        total += (sums * row_factors[start : start + len(sums)]).sum()
    return int(total)


@functools.cache
def _factors(count: int, device: torch.device) -> Tensor:
    """An odd number for each position, as good as random: the finalizer of splitmix64."""
    mixed = torch.arange(1, count + 1) * _ODD
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift) & ((1 << (64 - shift)) - 1)) * factor
    return (mixed | 1).to(device)


def describe(value: Any, name: str = "value") -> str:
    """Return a text that is equal only for equal values: dtype, shape and checksum of a tensor, the value itself of the rest."""
    if isinstance(value, Tensor):
        head = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} "
        if not is_readable(value):
            raise UnsupportedError(f"{name}: expected a dense tensor with all of its data, got {value.layout} on {value.device}.")
        if hasattr(value, "__tensor_flatten__"):
            inner, context = value.__tensor_flatten__()
            return head + describe([type(value).__qualname__, repr(context), *(getattr(value, attribute) for attribute in inner)], name)
        if value.is_quantized:
            by_channel = value.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric)
            names = (
                ("q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis") if by_channel else ("q_scale", "q_zero_point")
            )
            return head + describe([str(value.qscheme()), *(getattr(value, scale)() for scale in names), value.int_repr()], name)
        return f"{head}{checksum(value) % (1 << 64):016x}"
    if isinstance(value, Mapping):
        return "{" + "".join(f"{key!r}:{describe(value[key], name)}," for key in sorted(value, key=repr)) + "}"
    if isinstance(value, tuple | list):
        return "[" + "".join(f"{describe(item, name)}," for item in value) + "]"
    if isinstance(value, bytes | bytearray | io.BytesIO):
        return f"bytes {hashlib.sha256(value.getvalue() if isinstance(value, io.BytesIO) else value).hexdigest()}"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    raise UnsupportedError(f"{name}: expected tensors, numbers, strings or bytes, got {type(value).__name__}, whose content can't be read.")


def digest_of(value: Any, name: str = "value") -> str:
    """Return 128 bits of a hash of what `describe` says, in hex."""
    return hashlib.sha256(describe(value, name).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def is_readable(value: Tensor) -> bool:
    """Whether a tensor is dense, and all of its data is here."""
    return not value.is_meta and value.layout == torch.strided and not hasattr(value, "full_tensor")


def sample(tensor: Tensor) -> Tensor:
    """Return a view of a part of a dense tensor, as bytes, since NaN is not equal to itself: all of a small one, runs of a large one."""
    dense = tensor.detach().resolve_conj()
    flat = (dense if dense.is_contiguous() else dense.select(-1, 0)).flatten().view(torch.uint8)
    return flat if len(flat) <= _RUNS * _RUN_BYTES else flat.unfold(0, _RUN_BYTES, (len(flat) - _RUN_BYTES) // (_RUNS - 1) | 1)


def plain(value: Any, counts: Callable[[str, Any], bool] = lambda key, value: True) -> Any:
    """Return a value as JSON, equal in every process, with the entries of mappings that count. Of what can't be read there is the type."""
    if isinstance(value, Mapping):
        return {str(key): plain(item, counts) for key, item in value.items() if counts(str(key), item)}
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(item, counts) for item in value]
        return items if isinstance(value, list | tuple) else sorted(items, key=str)
    if isinstance(value, torch.dtype) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    if isinstance(value, Tensor) or hasattr(value, "to_dict"):
        return digest_of(value) if isinstance(value, Tensor) else plain(value.to_dict(), counts)
    return value if value is None or isinstance(value, bool | int | float | str) else name_of(value)


def name_of(value: Any) -> str:
    """Return the full name of a function or class, or of a value's class; of a class that FSDP puts in place of another, the other's."""
    value = getattr(value, "__func__", value)
    value = value if hasattr(value, "__qualname__") else type(value)
    value = next((base for base in getattr(value, "__mro__", ()) if not base.__module__.startswith("torch.distributed.fsdp")), value)
    # Wrappers carry the name of what they wrap, but not its globals.
    return f"{getattr(value, '__globals__', {}).get('__name__') or getattr(value, '__module__', '')}.{value.__qualname__}"


def hash_of(value: Any) -> str:
    """Return the SHA-256 of JSON values, the same in every process and after a round trip through JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
