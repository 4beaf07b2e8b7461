"""From the keys and values of a segment to the tensors of a blob, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedConfig

from hf_kvcaches.core.quantize import quantize
from hf_kvcaches.errors import ArtifactError, ConfigError, require_choice
from hf_kvcaches.kernels.splice import Packed
from hf_kvcaches.stores.reading import MOST_LAYERS, not_finite

Quantization = Literal["int8", "int4"] | None

_BITS = {"int8": 8, "int4": 4}
# Channels that share a scale. With 4 bits a whole head would lose too much.
_GROUP = {"int8": None, "int4": 32}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class LayerStates(NamedTuple):
    """What is stored of one layer's tokens.

    Args:
        keys: (kv_heads, tokens, head_dim), rotated.
        values: (kv_heads, tokens, head_dim).
    """

    keys: torch.Tensor
    values: torch.Tensor


class Pile(NamedTuple):
    """Layers whose keys and values have one shape, and are stored as one."""

    layers: tuple[int, ...]
    keys: Packed
    values: Packed


def check_quantization(quantization: Any) -> Quantization:
    """Refuses what is no way to store.

    Args:
        quantization: "int8", "int4" or None.
    """
    require_choice("quantization", quantization, (*_BITS, None))
    found: Quantization = quantization
    return found


def encode(
    layers: Sequence[LayerStates], hidden: Mapping[int, torch.Tensor], quantization: Quantization
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors to store, and what is needed to read them.

    Args:
        hidden: What entered a layer, by its index: (tokens, hidden).
        quantization: "int8", "int4" or None.
    """
    shapes: dict[tuple[int, int, int], list[int]] = {}
    for index, layer in enumerate(layers):
        shapes.setdefault((layer.keys.shape[0], layer.keys.shape[2], layer.values.shape[2]), []).append(index)
    tensors: dict[str, torch.Tensor] = {}
    for number, members in enumerate(shapes.values()):
        for name in ("keys", "values"):
            # Layers may be on several devices.
            stacked = torch.stack([getattr(layers[index], name).cpu() for index in members])
            tensors |= _stored(f"{name}.{number}", stacked, quantization)
    for index, states in hidden.items():
        tensors |= _stored(f"hidden.{index}", states.cpu()[None, None], quantization)
    dtype = str(layers[0].keys.dtype).removeprefix("torch.")
    dims = [[keys, values] for _, keys, values in shapes]
    stored = {"quantization": quantization, "dtype": dtype, "piles": list(shapes.values()), "dims": dims, "cuts": sorted(hidden)}
    return tensors, stored


def check_stored(stored: Mapping[str, Any]) -> None:
    """Raises an `ArtifactError` unless this is such as `encode` gives with tensors."""
    try:
        check_quantization(stored["quantization"])
        dtype_of(stored)
        indices = sorted(index for members in stored["piles"] for index in members)
        dims = [dim for _, pair in zip(stored["piles"], stored["dims"], strict=True) for dim in pair]
        # Compared with integers: `True` and 1.0 are equal to some, and are none.
        plain = all(type(number) is int for number in (*indices, *dims, *stored["cuts"]))
        if not plain or len(indices) > MOST_LAYERS or indices != list(range(len(indices))) or len(dims) != 2 * len(stored["dims"]):
            raise ArtifactError(f"its layers are {str(indices)[:100]}, its dimensions {str(dims)[:100]}")
    except (LookupError, TypeError, ValueError) as error:
        raise ArtifactError(f"it is stored in a way that makes no sense: {error!r}") from error


def check(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Any], tokens: int) -> None:
    """Raises an `ArtifactError` unless tensors are finite and what `encode` makes of so many tokens."""
    check_stored(stored)
    counts = {f"{name}.{number}": len(members) for number, members in enumerate(stored["piles"]) for name in ("keys", "values")}
    for name, count in (counts | {f"hidden.{cut}": 1 for cut in stored["cuts"]}).items():
        names = [name] if stored["quantization"] is None else [name, f"{name}.scale", f"{name}.zero"]
        shapes = [tuple(tensors[part].shape) if part in tensors else () for part in names]
        if any(len(shape) != 4 or shape[0] != count or shape[2] != tokens or shape[1] != shapes[0][1] for shape in shapes):
            raise ArtifactError(f"its tensor {name!r} has the shapes {shapes}, expected {count} layers of {tokens} tokens")
    if (spoilt := not_finite(tensors)) is not None:
        raise ArtifactError(f"its tensor {spoilt!r} has infinities or NaN")


def _stored(name: str, x: torch.Tensor, quantization: Quantization) -> dict[str, torch.Tensor]:
    """One (layers, heads, tokens, dim) tensor as it is stored. What is not finite is refused: it must not come back elsewhere."""
    if quantization is None:
        if not bool(x.isfinite().all()):
            raise ConfigError.of(name, "finite numbers", "infinities or NaN")
        return {name: x}
    made = quantize(x, bits=_BITS[quantization], group=_group(quantization, x.shape[-1]), axis=-1)
    return {name: made.data, f"{name}.scale": made.scale, f"{name}.zero": made.zero}


def _group(quantization: Quantization, dim: int) -> int | None:
    group = None if quantization is None else _GROUP[quantization]
    return None if group is None or group >= dim else group


def piles(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Any], start: int, stop: int, below: int | None = None) -> list[Pile]:
    """The keys and values of some of a segment's tokens.

    Args:
        stored: What `encode` gave with them.
        below: Only of layers below this one; None: of all.
    """
    found = []
    for number, members in enumerate(stored["piles"]):
        count = sum(index < below for index in members) if below is not None else len(members)
        if count:
            parts = (_packed(tensors, f"{name}.{number}", stored, start, stop, count) for name in ("keys", "values"))
            found.append(Pile(tuple(members[:count]), *parts))
    return found


def hidden_states(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Any], cut: int, start: int, stop: int) -> Packed:
    """What entered a layer, as one layer and one head.

    Args:
        stored: What `encode` gave with them.
    """
    return _packed(tensors, f"hidden.{cut}", stored, start, stop, 1)


def _packed(tensors: Mapping[str, torch.Tensor], name: str, stored: Mapping[str, Any], start: int, stop: int, count: int) -> Packed:
    data, scale, zero = tensors[name], tensors.get(name + ".scale"), tensors.get(name + ".zero")
    # Most segments are taken whole.
    if (count, stop - start) != (data.shape[0], data.shape[2]):
        data = data[:count, :, start:stop]
        scale, zero = (part if part is None else part[:count, :, start:stop] for part in (scale, zero))
    width = data.shape[-1] * (2 if data.dtype == torch.uint8 else 1)
    return Packed(data, scale, zero, _group(stored["quantization"], width))


def dtype_of(stored: Mapping[str, Any]) -> torch.dtype:
    """The type that the stored keys had."""
    return _DTYPES[stored["dtype"]]


def payload_bytes(config: PreTrainedConfig, quantization: Quantization, *, depth: int | None = None, itemsize: int = 4) -> int:
    """Bytes a token without scales and names: `2 * d_kv * L`, or with a depth `2 * d_kv * depth + d_model`, times those of an element.

    Args:
        quantization: "int8", "int4" or None.
        depth: How many layers' keys and values are stored, with the hidden state that enters the next; None: of all, and no hidden state.
        itemsize: Bytes of an element where nothing is quantised.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    elements = 2 * heads * head_dim * (config.num_hidden_layers if depth is None else depth)
    elements += 0 if depth is None else config.hidden_size
    bits = 8 * itemsize if quantization is None else _BITS[quantization]
    return elements * bits // 8
