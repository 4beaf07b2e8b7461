"""Exact checksums of tensors, computed where the tensors are, and descriptions of state that rest on them.

A tensor's bytes are read as 64-bit integers. The checksum is their sum, and a sum weighted by position, both modulo 2^64. It is the same
on every device and in every order of summation. Two states that differ in one integer never have one checksum, because the plain sums
differ. Two that differ in several have one with a probability below 2^-32, which is enough against accidents and nothing against intent.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from hf_kvcaches.errors import UnsupportedError

# Integers that share a row of weights: with their weights and a scratch row they fit in a core's second-level cache.
_ROW = 1 << 15
# Rows that an accelerator sums at a time.
_ROWS = 256
# Hex characters of a digest: 128 bits.
_HEX = 32
# By how much a cast to each type changes a number at most, as a share of it.
_ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# The least that is left of a number in float16.
_UNDERFLOW = 2.0**-25
# Sums in a sketch, and how far estimates from so many may be off.
_SUMS, _SLACK = 32, 1.5


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


@dataclass(frozen=True)
class Sketch:
    """The size of a tensor's numbers, and sums of them with random signs, which estimate how far another tensor is from it.

    A sum of differences with random signs is, squared, the sum of their squares on average. A cast to another type moves each number by a
    known share at most, so the same tensor in another precision is told from one whose numbers differ by more.

    Args:
        dtype: Of the tensor.
        shape: Likewise.
        norm: The square root of the sum of squares.
        sums: Of the numbers at every 32nd place.
    """

    dtype: str
    shape: tuple[int, ...]
    norm: float
    sums: tuple[float, ...]

    @classmethod
    def of(cls, value: Any, name: str) -> Self | None:
        """Reads a tensor; None for what no cast makes of another: quantized ones, integers, other layouts.

        Args:
            value: An entry of a state dict.
            name: What to call it in an error message.
        """
        value = _fetched(value, name) if isinstance(value, Deferred) else value
        if not isinstance(value, Tensor) or str(value.dtype).removeprefix("torch.") not in _ROUNDING:
            return None
        if value.layout != torch.strided or hasattr(value, "__tensor_flatten__") or why_unreadable(value):
            return None
        flat, squares, sums = value.detach().reshape(-1), [], []
        columns = _signs(value.device, 0, _ROW)
        for start in range(0, len(flat), _ROW * _ROWS):
            numbers = flat[start : start + _ROW * _ROWS].float()
            rows = torch.nn.functional.pad(numbers, (0, -len(numbers) % _ROW)).view(-1, _ROW)
            squares.append(rows.square().sum(1))
            signs = _signs(value.device, _ROW + start // _ROW * _SUMS, len(rows) * _SUMS).view(-1, _SUMS)
            sums.append((rows * columns).view(len(rows), -1, _SUMS).sum(1) * signs)
        if not sums:
            return cls(str(value.dtype).removeprefix("torch."), tuple(value.shape), 0.0, (0.0,) * _SUMS)
        norm = math.sqrt(torch.cat(squares).cpu().double().sum().item())
        totals = torch.cat(sums).cpu().double().sum(0).tolist()
        return cls(str(value.dtype).removeprefix("torch."), tuple(value.shape), _short(norm), tuple(map(_short, totals)))

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Reads what JSON made of one.

        Args:
            value: A list of the fields.
        """
        dtype, shape, norm, sums = value
        sketch = cls(dtype, tuple(map(int, shape)), float(norm), tuple(map(float, sums)))
        if dtype not in _ROUNDING or len(sketch.sums) != _SUMS:
            raise ValueError(f"a sketch of {str(dtype)[:40]} with {len(sketch.sums)} sums")
        return sketch

    def is_cast_of(self, other: Sketch) -> bool:
        """Whether both are one tensor in two types.

        Args:
            other: Of the other one.
        """
        if self.shape != other.shape or self.dtype == other.dtype:
            return False
        kinds = (self.dtype, other.dtype)
        underflow = _UNDERFLOW * math.sqrt(math.prod(self.shape)) * ("float16" in kinds)
        most = sum(map(_ROUNDING.__getitem__, kinds)) * max(self.norm, other.norm) + underflow
        distance = math.dist(self.sums, other.sums)
        return abs(self.norm - other.norm) <= most * (1 + 1e-5) and distance <= _SLACK * most


def _short(number: float) -> float:
    return float(f"{number:.7g}")


def digest_of(value: Any, name: str = "value") -> str:
    """The digest of a tensor's dtype, shape and bytes, or of any other entry of a state dict.

    Args:
        value: A tensor on any device, of any dtype, contiguous or not, quantized or a wrapper around others; or a tuple, list, dict,
            number, string, bytes, dtype or `None`.
        name: What to call it in an error message.
    """
    return hashlib.sha256(describe({name: value})[name].encode("utf-8", "surrogatepass")).hexdigest()[:_HEX]


def describe(state: Mapping[str, Any]) -> dict[str, str]:
    """One text per entry, equal only for equal entries: dtypes, shapes and checksums for tensors, the values themselves for the rest.

    Args:
        state: Entries of a state dict, by name; see `digest_of`.
    """
    sums: dict[tuple[Any, ...], Tensor] = {}
    parts = {name: _parts(value, name, sums) for name, value in state.items()}
    numbers = _fetch(sums)
    return {name: "".join(part if isinstance(part, str) else numbers[part] for part in entry) for name, entry in parts.items()}


# A text, or the key of a checksum that is still on its device.
_Part = str | tuple[Any, ...]


def _parts(value: Any, name: str, sums: dict[tuple[Any, ...], Tensor]) -> list[_Part]:
    if isinstance(value, Tensor):
        return _tensor_parts(value, name, sums)
    if isinstance(value, Deferred):
        fetched = _fetched(value, name)
        # Fetched tensors are not kept, so another one may take the same memory.
        return _tensor_parts(fetched, name, sums, key=(id(value.home), value.name))
    if isinstance(value, Mapping):
        items = [(f"{key!r}:", value[key]) for key in sorted(value, key=repr)]
        return ["{", *(part for key, item in items for part in (key, *_parts(item, name, sums), ",")), "}"]
    if isinstance(value, tuple | list):
        return ["[", *(part for item in value for part in (*_parts(item, name, sums), ",")), "]"]
    if isinstance(value, io.BytesIO):
        value = value.getvalue()
    if isinstance(value, bytes | bytearray):
        return [f"bytes {hashlib.sha256(value).hexdigest()}"]
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return [repr(value)]
    raise UnsupportedError(
        f"{name}: expected tensors, numbers, strings or bytes in the model's state, got {type(value).__name__}, whose content "
        "can't be read without guessing. Give the module a get_extra_state() that returns bytes."
    )


def _fetched(value: Deferred, name: str) -> Tensor:
    try:
        tensor: Tensor = value.home[value.name]
    except (KeyError, OSError) as error:
        raise UnsupportedError(
            f"{name}: expected the offloaded weights where accelerate left them, got {error}. "
            "Load the model again before asking for its fingerprint."
        ) from error
    return tensor


def why_unreadable(value: Any) -> str:
    """What keeps a tensor's numbers from being read here, as a noun; "" where nothing does."""
    if not isinstance(value, Tensor):
        return ""
    return "one on the meta device" if value.is_meta else "one shard of a distributed one" if hasattr(value, "full_tensor") else ""


def head_of(value: Tensor) -> str:
    """What the description of a tensor begins with: its dtype and its whole shape."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} "


def _tensor_parts(value: Tensor, name: str, sums: dict[tuple[Any, ...], Tensor], key: tuple[Any, ...] | None = None) -> list[_Part]:
    if reason := why_unreadable(value):
        raise UnsupportedError(
            f"{name}: expected a tensor with all of its data, got {reason}. Take ModelFingerprint.of(model) where the weights are whole, "
            "and give it to set_fingerprint(model, fingerprint) here."
        )
    head = head_of(value)
    if hasattr(value, "__tensor_flatten__"):
        inner, context = value.__tensor_flatten__()
        inside = [part for attribute in inner for part in _parts(getattr(value, attribute), f"{name}.{attribute}", sums)]
        return [f"{head}{type(value).__qualname__} {context!r} ", *inside]
    if value.is_quantized:
        # At once: these are copies, whose memory others may take.
        return [f"{head}{value.qscheme()} ", describe({name: [*_scales(value), value.int_repr()]})[name]]
    if value.layout != torch.strided:
        raise UnsupportedError(f"{name}: expected a dense tensor, got layout {value.layout}. Convert it with to_dense() first.")
    # Tied tensors have one key, and are read once.
    key = key or (value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg(), value.device, id(value))
    if key not in sums:
        sums[key] = checksum(value)
    return [head, key]


def _scales(value: Tensor) -> tuple[Any, ...]:
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return value.q_scale(), value.q_zero_point()
    return value.q_per_channel_scales(), value.q_per_channel_zero_points(), value.q_per_channel_axis()


def _fetch(sums: Mapping[tuple[Any, ...], Tensor]) -> dict[tuple[Any, ...], str]:
    """All checksums in hex, with one transfer per device."""
    keys: dict[torch.device, list[tuple[Any, ...]]] = {}
    for key, pair in sums.items():
        keys.setdefault(pair.device, []).append(key)
    rows = {key: row for group in keys.values() for key, row in zip(group, torch.stack([sums[key] for key in group]).tolist(), strict=True)}
    return {key: "".join(f"{number % (1 << 64):016x}" for number in row) for key, row in rows.items()}


def checksum(value: Tensor) -> Tensor:
    """The plain and the weighted sum of a dense tensor's bytes, (2,) int64, on its device.

    Args:
        value: Of any dtype and size.
    """
    words = _words(value.detach())
    # Integer products of vectors are fast on CPUs, and there are none elsewhere.
    sums = (row_dots if words.device.type == "cpu" else row_products)(words)
    weights = _weights(words.device, _ROW, max(_ROW, len(sums)))[: len(sums)]
    return torch.stack([words.sum(), (sums * weights).sum()])


def row_dots(words: Tensor) -> Tensor:
    """The weighted sum of each row, one by one.

    Args:
        words: Integers; all rows but the last are full.
    """
    weights, folded = _weights(words.device, 0, _ROW), torch.empty_like(words[:_ROW])
    sums = [torch.dot(_fold(row, folded[: len(row)]), weights[: len(row)]) for row in words.split(_ROW)]
    return torch.stack(sums)


def row_products(words: Tensor) -> Tensor:
    """The same as `row_dots`, of many rows at a time.

    Args:
        words: Likewise.
    """
    weights, whole = _weights(words.device, 0, _ROW), len(words) - len(words) % _ROW
    blocks = [*words[:whole].view(-1, _ROW).split(_ROWS), words[None, whole:]]
    return torch.cat([_fold(block, torch.empty_like(block)).mul_(weights[: block.shape[1]]).sum(1) for block in blocks])


def _words(value: Tensor) -> Tensor:
    """A tensor's bytes as integers, filled up with zeros; a copy only where they can't be read in place."""
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    flat = value.resolve_neg().contiguous().view(-1)
    size = flat.element_size()
    if len(flat) * size % 8:
        flat = flat.view(torch.uint8)
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
    elif flat.storage_offset() * size % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def _fold(words: Tensor, out: Tensor) -> Tensor:
    """Brings high bits down: modulo 2^64, a product knows little of them."""
    return torch.bitwise_right_shift(words, 32, out=out).bitwise_xor_(words)


@cache
def _weights(device: torch.device, start: int, count: int) -> Tensor:
    return _mixed(torch.arange(start, start + count, device=device))


def _signs(device: torch.device, start: int, count: int) -> Tensor:
    return (_mixed(torch.arange(start, start + count, device=device)) >> 63).float() * 2 + 1


def _mixed(numbers: Tensor) -> Tensor:
    """An odd integer for each number, as good as random, by the finalizer of splitmix64. Products wrap alike on every device."""
    mixed = numbers * -7046029254386353131  # 0x9E3779B97F4A7C15
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ _right(mixed, shift)) * factor
    return (mixed ^ _right(mixed, 31)) | 1


def _right(numbers: Tensor, shift: int) -> Tensor:
    """Shifts zeros in from the left."""
    return (numbers >> shift) & ((1 << (64 - shift)) - 1)
