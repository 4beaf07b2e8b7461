"""Descriptions of state and of values by exact checksums, and sketches of tensors that survive a cast."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import math
import re
import struct
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from hf_kvcaches.core.tensor_checksum import checksum, weights
from hf_kvcaches.errors import UnsupportedError

# Of a sketch: numbers that share a row of weights, and rows at a time: on a CPU, what fits in a core's second-level cache.
_ROW, _ROWS, _ROWS_ON_CPU = 1 << 15, 256, 8
# Hex characters of a digest: 128 bits.
_HEX = 32
# By how much a cast to each type changes a number at most, as a share of it, and the most that float16 makes 0.
_ROUNDING, _UNDERFLOW = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}, 2.0**-25
# Sums in a sketch, and how far estimates from so many may be off.
_SUMS, _SLACK = 32, 1.5


@dataclass(frozen=True, eq=False)
class Deferred:
    """A tensor that lies elsewhere and is fetched only while it is read, so that a model larger than memory can be read.

    Args:
        home: Where it lies, by name.
        placeholder: The tensor without data that the model has in its place.
    """

    home: Mapping[str, Any]
    name: str
    placeholder: Tensor


def digest_of(value: Any, name: str = "value") -> str:
    """The digest of a tensor's dtype, shape and bytes, or of any other entry of a state dict.

    Args:
        value: A tensor on any device, of any dtype, contiguous or not, quantized or a wrapper around others; or a tuple, list, dict,
            number, string, bytes, dtype or `None`.
    """
    return hashlib.sha256(describe({name: value})[name].encode("utf-8", "surrogatepass")).hexdigest()[:_HEX]


def describe(state: Mapping[str, Any]) -> dict[str, str]:
    """One text per entry, equal only for equal entries: dtypes, shapes and checksums for tensors, the values themselves for the rest.

    Args:
        state: Entries of a state dict, by name; see `digest_of`. An entry under two names is read once.
    """
    sums: list[Tensor] = []
    parts: dict[int, list[str | int]] = {}
    for name, value in state.items():
        if id(value) not in parts:
            parts[id(value)] = _parts(value, name, sums)
    numbers = _fetch(sums)
    texts = {key: "".join(part if isinstance(part, str) else numbers[part] for part in entry) for key, entry in parts.items()}
    return {name: texts[id(value)] for name, value in state.items()}


def why_unreadable(value: Any) -> str:
    """What keeps a tensor's numbers from being read here, as a noun; "" where nothing does."""
    if not isinstance(value, Tensor):
        return ""
    return "one on the meta device" if value.is_meta else "one shard of a distributed one" if is_sharded(value) else ""


def is_sharded(value: Any) -> bool:
    """Whether this is a DTensor, of which other processes may have the rest."""
    return hasattr(value, "full_tensor")


def dtype_name(value: Tensor) -> str:
    """A tensor's dtype without the "torch."."""
    return str(value.dtype).removeprefix("torch.")


def head_of(value: Tensor) -> str:
    """What the description of a tensor begins with: its dtype and its whole shape."""
    return f"{dtype_name(value)} {list(value.shape)} "


def _parts(value: Any, name: str, sums: list[Tensor]) -> list[str | int]:
    """The description of an entry: texts, and indices of checksums that are still on their devices, which are added to `sums`."""
    if isinstance(value, Tensor | Deferred):
        return _tensor_parts(_fetched(value, name), name, sums)
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


def _fetched(value: Tensor | Deferred, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        tensor: Tensor = value.home[value.name]
    except (KeyError, OSError) as error:
        raise UnsupportedError(
            f"{name}: expected the offloaded weights where accelerate left them, got {error}. "
            "Load the model again before asking for its fingerprint."
        ) from error
    return tensor


def _tensor_parts(value: Tensor, name: str, sums: list[Tensor]) -> list[str | int]:
    if reason := why_unreadable(value):
        raise UnsupportedError(
            f"{name}: expected a tensor with all of its data, got {reason}. Take ModelFingerprint.of(model) where the weights are whole, "
            "or ModelFingerprint.gathered(model) in all processes together, and give it to set_fingerprint(model, fingerprint) here."
        )
    head = head_of(value)
    if hasattr(value, "__tensor_flatten__"):
        inner, context = value.__tensor_flatten__()
        inside = [part for attribute in inner for part in _parts(getattr(value, attribute), f"{name}.{attribute}", sums)]
        return [f"{head}{type(value).__qualname__} {context!r} ", *inside]
    if value.is_quantized:
        by_tensor = value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        scales: tuple[Any, ...] = (value.q_scale(), value.q_zero_point()) if by_tensor else ()
        if not by_tensor:
            scales = (value.q_per_channel_scales(), value.q_per_channel_zero_points(), value.q_per_channel_axis())
        return [f"{head}{value.qscheme()} ", *_parts([*scales, value.int_repr()], name, sums)]
    if value.layout != torch.strided:
        raise UnsupportedError(f"{name}: expected a dense tensor, got layout {value.layout}. Convert it with to_dense() first.")
    sums.append(checksum(value))
    return [head, len(sums) - 1]


def _fetch(sums: list[Tensor]) -> list[str]:
    """All checksums in hex, with one transfer per device."""
    numbers = [""] * len(sums)
    for device in {pair.device for pair in sums}:
        indices = [index for index, pair in enumerate(sums) if pair.device == device]
        for index, row in zip(indices, torch.stack([sums[index] for index in indices]).tolist(), strict=True):
            numbers[index] = "".join(f"{number % (1 << 64):016x}" for number in row)
    return numbers


def plain(value: Any, leave_out: frozenset[str] = frozenset()) -> Any:
    """A value as JSON, equal in every process. What can't be looked into counts as its type alone.

    Args:
        leave_out: Keys that have no effect, in dicts at any depth. Nor have private ones, and dropout under whichever of its names.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        items = ((str(key), item) for key, item in value.items() if key not in leave_out)
        return {key: plain(item, leave_out) for key, item in items if not key.startswith("_") and "dropout" not in key}
    if isinstance(value, list | tuple):
        return [plain(item, leave_out) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, leave_out) for item in value), key=str)
    if isinstance(value, Tensor):
        return digest_of(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if callable(value):
        return _function(value)
    return plain(value.to_dict(), leave_out) if hasattr(value, "to_dict") else type_name(type(value))


def type_name(kind: type) -> str:
    """A class by its full name; what FSDP puts in its place is the same."""
    kind = next((base for base in kind.__mro__ if not base.__module__.startswith("torch.distributed.fsdp")), kind)
    return f"{kind.__module__}.{kind.__qualname__}"


def _function(value: Any) -> Any:
    """A function's name where the name leads to it, else its code and what it closes over."""
    if isinstance(value, functools.partial):
        return ["partial", _function(value.func), plain(value.args), plain(value.keywords)]
    function = getattr(value, "__func__", value)
    name, home = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if name is None:
        return type_name(type(value))
    named: Any = sys.modules.get(home or "")
    for step in name.split("."):
        named = getattr(named, step, None)
    code = getattr(function, "__code__", None)
    if named is function or not isinstance(code, types.CodeType):
        return f"{home}.{name}"
    cells = [plain(cell.cell_contents) for cell in function.__closure__ or ()]
    return [f"{home}.{name}", _code(code), plain(function.__defaults__), cells]


def _code(code: types.CodeType) -> str:
    constants = [_code(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts]
    return hashlib.sha256(repr((code.co_code.hex(), code.co_names, constants)).encode()).hexdigest()[:32]


def _rows_at_a_time(value: Tensor) -> int:
    return _ROWS_ON_CPU if value.device.type == "cpu" else _ROWS


@dataclass(frozen=True)
class TensorSketch:
    """The size of a tensor's numbers, and sums of them with random signs, which estimate how far another tensor is from it.

    A sum of differences with random signs is, squared, the sum of their squares on average. A cast to another type moves each number by a
    known share at most, so the same tensor in another precision is told from one whose numbers differ by more.

    Args:
        norm: The square root of the sum of squares.
        sums: Of the numbers at every 32nd place.
    """

    dtype: str
    shape: tuple[int, ...]
    norm: float
    sums: tuple[float, ...]

    @classmethod
    def of(cls, value: Any, name: str) -> Self | None:
        """Reads a tensor; None for what no cast makes of another: quantized ones, integers, other layouts."""
        value = _fetched(value, name) if isinstance(value, Deferred) else value
        if not isinstance(value, Tensor) or dtype_name(value) not in _ROUNDING or why_unreadable(value):
            return None
        if value.layout != torch.strided or hasattr(value, "__tensor_flatten__"):
            return None
        squares, sums = 0.0, torch.zeros(_SUMS, dtype=torch.float64)
        columns, most = (weights(value.device, 0, _ROW) >> 63).float() * 2 + 1, _rows_at_a_time(value)
        for number, block in enumerate(value.detach().reshape(-1).split(_ROW * most)):
            rows = torch.nn.functional.pad(block.float(), (0, -len(block) % _ROW)).view(-(-len(block) // _ROW), _ROW)
            signs = (weights(value.device, _ROW + number * most * _SUMS, most * _SUMS)[: len(rows) * _SUMS] >> 63) * 2 + 1
            squares += rows.square().sum(1).cpu().double().sum().item()
            sums += ((rows * columns).view(len(rows), _ROW // _SUMS, _SUMS).sum(1) * signs.view(-1, _SUMS)).cpu().double().sum(0)
        # In the precision of the text that `str` makes.
        return cls(dtype_name(value), tuple(value.shape), float(f"{math.sqrt(squares):.7g}"), tuple(sums.float().tolist()))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} {self.norm} {base64.b64encode(struct.pack(f'<{_SUMS}f', *self.sums)).decode()}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Reads what `str` made of one; anything else is a `ValueError`."""
        fields = re.fullmatch(r"(\w+) (\[[\d, ]*\]) ([^\s_]+) ([\w+/=]+)", text)
        sums = base64.b64decode(fields[4]) if fields else b""
        if fields is None or fields[1] not in _ROUNDING or len(sums) != 4 * _SUMS:
            raise ValueError(f"no sketch: {text[:60]!r}")
        return cls(fields[1], tuple(json.loads(fields[2])), float(fields[3]), struct.unpack(f"<{_SUMS}f", sums))

    def is_cast_of(self, other: TensorSketch) -> bool:
        """Whether both are one tensor in two types."""
        if self.shape != other.shape or self.dtype == other.dtype:
            return False
        dtypes = (self.dtype, other.dtype)
        underflow = _UNDERFLOW * math.sqrt(math.prod(self.shape)) * ("float16" in dtypes)
        most = sum(_ROUNDING[dtype] for dtype in dtypes) * max(self.norm, other.norm) + underflow
        return abs(self.norm - other.norm) <= most * (1 + 1e-5) and math.dist(self.sums, other.sums) <= _SLACK * most
