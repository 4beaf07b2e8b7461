"""Convert keys and values to the tensors of a blob, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedConfig

from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, ConfigError, require_choice
from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.quantization import quantize
from hf_kvcaches.reuse.codec import TokenCodec
from hf_kvcaches.stores.blobs_format import not_finite

Quantization = Literal["int8", "int4"] | TokenCodec | None

_BITS = {"int8": 8, "int4": 4}
# Channels that share a scale. With 4 bits a whole head would lose too much.
_GROUP = {"int8": None, "int4": 32}
# The prefix of a codec's name, before its digest.
_CODED = "codec:"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class LayerStates(NamedTuple):
    """The states of a span of tokens in one layer.

    Args:
        keys: (kv_heads, tokens, head_dim), rotated.
        values: (kv_heads, tokens, head_dim).
    """

    keys: torch.Tensor
    values: torch.Tensor


class Pile(NamedTuple):
    """Layers whose keys and values have one shape, and are stored as one tensor each."""

    layers: tuple[int, ...]
    keys: Packed
    values: Packed


def check_quantization(quantization: Any) -> Quantization:
    """Refuse what is no quantization.

    Args:
        quantization: "int8", "int4", a codec of keys before rotation, or None.
    """
    if isinstance(quantization, TokenCodec):
        if not quantization.unrotated:
            raise ConfigError.of("quantization", "a codec of keys before rotation", quantization, "Calibrate with rotation='aware'.")
        return quantization
    require_choice("quantization", quantization, (*_BITS, None), also=", or a KVCodec")
    plain: Quantization = quantization
    return plain


def name_of(quantization: Quantization) -> str | None:
    """Name a quantization; other quantizations have other names."""
    return _CODED + quantization.digest if isinstance(quantization, TokenCodec) else quantization


def codec_digest(name: str | None) -> str | None:
    """Return the digest of the codec that a quantization's name names; None for other quantizations."""
    return name.removeprefix(_CODED) if name is not None and name.startswith(_CODED) else None


def label_of(quantization: Quantization) -> str:
    """Label a quantization in a table: "int8", "int4", "codec" with its share of the bytes, or "none"."""
    return f"codec {quantization.packed_ratio:.3g}" if isinstance(quantization, TokenCodec) else quantization or "none"


def encode(
    layers: Sequence[LayerStates],
    hidden: Mapping[int, torch.Tensor],
    quantization: Quantization,
    start: int = 0,
    geometries: Sequence[RotaryGeometry | None] = (),
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors to store, and the metadata to read them with.

    Args:
        hidden: The input of some layers, by layer index: (tokens, hidden). With a codec these are stored in 8 bits.
        quantization: "int8", "int4", a codec or None.
        start: With a codec: the position of the first token.
        geometries: With a codec: how each layer's keys are rotated.
    """
    plain = "int8" if isinstance(quantization, TokenCodec) else quantization
    shapes: dict[tuple[int, int, int], list[int]] = {}
    for index, layer in enumerate(layers):
        shapes.setdefault((layer.keys.shape[0], layer.keys.shape[2], layer.values.shape[2]), []).append(index)
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(quantization, TokenCodec):
        layers, codes = _coded(layers, quantization, start, geometries)
        tensors |= codes
    for number, members in enumerate(shapes.values()):
        for name in ("keys", "values"):
            # Layers may be on several devices.
            stacked = torch.stack([getattr(layers[index], name).cpu() for index in members])
            tensors |= _quantized(f"{name}.{number}", stacked, None if isinstance(quantization, TokenCodec) else quantization)
    for index, states in hidden.items():
        tensors |= _quantized(f"hidden.{index}", states.cpu()[None, None], plain)
    dtype = str(layers[0].keys.dtype).removeprefix("torch.")
    dims = [[keys, values] for _, keys, values in shapes]
    stored = {"quantization": name_of(quantization), "dtype": dtype, "piles": list(shapes.values()), "dims": dims, "cuts": sorted(hidden)}
    return tensors, stored


def _coded(
    layers: Sequence[LayerStates], codec: TokenCodec, start: int, geometries: Sequence[RotaryGeometry | None]
) -> tuple[list[LayerStates], dict[str, torch.Tensor]]:
    """Return the exact states of a text's first tokens, which are outliers, with unrotated keys; and the codes of all tokens."""
    unrotated = []
    for (keys, values), geometry in zip(layers, geometries, strict=False):
        if geometry is not None:
            positions = torch.arange(start, start + keys.shape[1], device=keys.device)
            keys = geometry.unrotate(keys[None].float(), positions)[0].to(keys.dtype)
        unrotated.append(LayerStates(keys, values))
    exact = max(0, codec.exact_tokens - start)
    keys_of, values_of = ({index: layer[side] for index, layer in enumerate(unrotated)} for side in (0, 1))
    records = codec.pack(keys_of, values_of, exact)
    codes = {f"codes.{index}": record.cpu() for index, record in records.items()}
    return [LayerStates(keys[:, :exact], values[:, :exact]) for keys, values in unrotated], codes


def check_stored(stored: Mapping[str, Any]) -> None:
    """Raise an `ArtifactError` unless this is metadata such as `encode` returns."""
    try:
        if not is_coded(stored):
            check_quantization(stored["quantization"])
        dtype_of(stored)
        indices = sorted(index for members in stored["piles"] for index in members)
        dims = [dim for _, pair in zip(stored["piles"], stored["dims"], strict=True) for dim in pair]
        # `True` and 1.0 are equal to integers, but can't be indices.
        plain = all(type(number) is int for number in (*indices, *dims, *stored["cuts"]))
        if not plain or len(indices) > MOST_LAYERS or indices != list(range(len(indices))) or len(dims) != 2 * len(stored["dims"]):
            raise ArtifactError(f"its layers are {str(indices)[:100]}, its dimensions {str(dims)[:100]}")
    except (LookupError, TypeError, ValueError) as error:
        raise ArtifactError(f"it is stored in a way that makes no sense: {error!r}") from error


def check(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Any], tokens: int) -> None:
    """Raise an `ArtifactError` unless tensors are finite and such as `encode` returns for a number of tokens."""
    check_stored(stored)
    coded, uncoded = is_coded(stored), _uncoded(stored)
    counts = {f"{name}.{number}": len(members) for number, members in enumerate(stored["piles"]) for name in ("keys", "values")}
    parts = [(name, count, None if coded else uncoded, tokens) for name, count in counts.items()]
    parts += [(f"hidden.{cut}", 1, uncoded, tokens) for cut in stored["cuts"]]
    for name, count, quantization, length in parts:
        names = [name] if quantization is None else [name, f"{name}.scale", f"{name}.zero"]
        shapes = [tuple(tensors[part].shape) if part in tensors else () for part in names]
        fits = all(len(shape) == 4 and shape[0] == count and shape[1] == shapes[0][1] for shape in shapes)
        # Coded blobs have exact states of their first tokens only.
        if not fits or any(shape[2] > length if coded and name in counts else shape[2] != length for shape in shapes):
            raise ArtifactError(f"its tensor {name!r} has the shapes {shapes}, expected {count} layers of {length} tokens")
    for name in (f"codes.{index}" for members in stored["piles"] for index in members if coded):
        if name not in tensors or tensors[name].dtype != torch.uint8 or tensors[name].ndim != 1:
            raise ArtifactError(f"its tensor {name!r} is no row of bytes")
    if (spoilt := not_finite(tensors)) is not None:
        raise ArtifactError(f"its tensor {spoilt!r} has infinities or NaN")


def _quantized(name: str, x: torch.Tensor, quantization: Literal["int8", "int4"] | None) -> dict[str, torch.Tensor]:
    """Quantize a (layers, heads, tokens, dim) tensor to be stored. Refuse infinities and NaN, which would spread to later prompts."""
    if quantization is None:
        if not bool(x.isfinite().all()):
            raise ConfigError.of(name, "finite numbers", "infinities or NaN")
        return {name: x}
    quantized = quantize(x, bits=_BITS[quantization], group=_group(quantization, x.shape[-1]))
    return {name: quantized.data, f"{name}.scale": quantized.scale, f"{name}.zero": quantized.zero}


def _group(quantization: Literal["int8", "int4"] | None, dim: int) -> int | None:
    group = None if quantization is None else _GROUP[quantization]
    return None if group is None or group >= dim else group


def is_coded(stored: Mapping[str, Any]) -> bool:
    """Whether keys and values are stored as a codec's codes, of unrotated keys."""
    return isinstance(stored["quantization"], str) and codec_digest(stored["quantization"]) is not None


def _uncoded(stored: Mapping[str, Any]) -> Literal["int8", "int4"] | None:
    """Return the quantization of the tensors that are not coded."""
    return "int8" if is_coded(stored) else stored["quantization"]


class BlobSpan(NamedTuple):
    """Tokens of a blob: its tensors, what `encode` returned with them, the first token, and the one behind the last."""

    tensors: Mapping[str, torch.Tensor]
    stored: Mapping[str, Any]
    start: int
    stop: int


def piles(
    spans: Sequence[BlobSpan], below: int | None = None, codec: TokenCodec | None = None, together: int = MOST_LAYERS
) -> Iterator[Pile]:
    """Yield keys and values of spans that are stored in the same way, one behind the other; those of a codec are unrotated keys.

    Args:
        below: Only layers below this one; None: all.
        together: The most layers in a pile.
    """
    stored = spans[0].stored
    for number, members in enumerate(stored["piles"]):
        count = sum(index < below for index in members) if below is not None else len(members)
        for first in range(0, count, together):
            chosen = slice(first, min(first + together, count))
            if is_coded(stored):
                assert codec is not None
                yield _decoded(spans, number, chosen, codec)
            else:
                sides = (
                    [_packed(span.tensors, f"{name}.{number}", stored, *span[2:], chosen) for span in spans] for name in ("keys", "values")
                )
                yield Pile(tuple(members[chosen]), *(_cat(parts) for parts in sides))


def _cat(parts: Sequence[Packed]) -> Packed:
    if len(parts) == 1:
        return parts[0]
    data = torch.cat([part.data for part in parts], 2)
    if parts[0].scale is None:
        return Packed(data)
    scale = torch.cat([part.scale for part in parts if part.scale is not None], 2)
    zero = torch.cat([part.zero for part in parts if part.zero is not None], 2)
    return Packed(data, scale, zero, parts[0].group)


def bytes_per_token(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Any]) -> int:
    """Return the bytes of a token's key and value in a cache, for the layer with the most."""
    heads = (tensors[f"keys.{number}"].shape[1] for number in range(len(stored["dims"])))
    return dtype_of(stored).itemsize * max(count * sum(dims) for count, dims in zip(heads, stored["dims"], strict=True))


def _decoded(spans: Sequence[BlobSpan], number: int, chosen: slice, codec: TokenCodec) -> Pile:
    """Decode spans in some layers of a pile.

    Args:
        number: The pile's index.
        chosen: The pile's layers to decode.
    """
    stored = spans[0].stored
    members = stored["piles"][number][chosen]
    asked = [(index, span.tensors[f"codes.{index}"], span.start, span.stop) for index in members for span in spans]
    found = codec.unpack(asked, dtype_of(stored))
    sides = []
    for side, name in enumerate(("keys", "values")):
        layers = []
        for place in range(len(members)):
            parts = [each[side] for each in found[place * len(spans) : (place + 1) * len(spans)]]
            for part, span in zip(parts, spans, strict=True):
                if part.shape[1] != span.stop - span.start:
                    raise ArtifactError(f"its codes are of fewer than {span.stop} tokens")
                exact = span.tensors[f"{name}.{number}"][chosen.start + place, :, span.start : span.stop]
                part[:, : exact.shape[1]] = exact
            layers.append(torch.cat(parts, 1))
        sides.append(Packed(torch.stack(layers)))
    return Pile(tuple(members), *sides)


def hidden_states(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Any], cut: int, start: int, stop: int) -> Packed:
    """Return the stored input of layer `cut` for a span of tokens, as one layer and one head."""
    return _packed(tensors, f"hidden.{cut}", stored, start, stop, slice(0, 1))


def _packed(tensors: Mapping[str, torch.Tensor], name: str, stored: Mapping[str, Any], start: int, stop: int, layers: slice) -> Packed:
    data, scale, zero = tensors[name], tensors.get(name + ".scale"), tensors.get(name + ".zero")
    # Most blobs are read whole, without indexing.
    if (layers.stop - layers.start, stop - start) != (data.shape[0], data.shape[2]):
        data = data[layers, :, start:stop]
        scale, zero = (part if part is None else part[layers, :, start:stop] for part in (scale, zero))
    width = data.shape[-1] * (2 if data.dtype == torch.uint8 else 1)
    return Packed(data, scale, zero, _group(_uncoded(stored), width))


def dtype_of(stored: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the keys before they were stored."""
    return _DTYPES[stored["dtype"]]


def payload_bytes(config: PreTrainedConfig, quantization: Quantization, *, depth: int | None = None, itemsize: int = 4) -> int:
    """Return the bytes of a token, without scales and names: the bytes of an element times its elements.

    These are `2 * d_kv * L`, or with a depth `2 * d_kv * depth + d_model`.

    Args:
        quantization: "int8", "int4", a codec or None.
        depth: How many layers' keys and values are stored, with the input of the next layer; None: all layers, and no hidden state.
        itemsize: Bytes of an element without quantization.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    elements = 2 * heads * head_dim * (config.num_hidden_layers if depth is None else depth)
    elements += 0 if depth is None else config.hidden_size
    if isinstance(quantization, TokenCodec):
        coded = elements - (0 if depth is None else config.hidden_size)
        return round(2 * coded * quantization.packed_ratio) + elements - coded
    bits = 8 * itemsize if quantization is None else _BITS[quantization]
    return elements * bits // 8
