"""Convert keys and values to the tensors of a blob, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, ConfigError, require_choice
from hf_kvcaches.kernels.arguments import Packed
from hf_kvcaches.kernels.quantization import quantize
from hf_kvcaches.stores.blobs_format import not_finite


@runtime_checkable
class TokenCodec(Protocol):
    """Packs the tokens of all layers of a model: what is stored in place of keys and values."""

    @property
    def digest(self) -> str:
        """The hash of everything that decoding depends on."""

    @property
    def unrotated(self) -> bool:
        """Whether keys are coded before their rotation."""

    @property
    def exact_tokens(self) -> int:
        """How many of a text's first tokens are kept exact beside their codes, because they are outliers."""

    @property
    def packed_ratio(self) -> float:
        """Bytes of the packed form as a share of exact keys and values in 16 bits."""

    def pack(self, keys: Mapping[int, torch.Tensor], values: Mapping[int, torch.Tensor], left_out: int = 0) -> dict[int, torch.Tensor]:
        """Return the record of each layer, (bytes,) uint8, of (kv_heads, tokens, head_dim) keys and values.

        Args:
            left_out: First tokens that are kept elsewhere.
        """

    def unpack(
        self, spans: Sequence[tuple[int, torch.Tensor, int, int | None]], dtype: torch.dtype = torch.float32
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values of spans: a layer, its record, the first token and the one behind the last."""


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


class BlobSpan(NamedTuple):
    """Tokens of a blob: its tensors, what `encode` returned with them, the first token, and the one behind the last."""

    tensors: Mapping[str, torch.Tensor]
    form: Mapping[str, Any]
    start: int
    stop: int


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
    layers: Sequence[LayerStates], quantization: Quantization, start: int = 0, geometries: Sequence[RotaryGeometry | None] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors to store, one for all layers of a shape and side, and the form to read them with.

    Args:
        quantization: "int8", "int4", a codec or None.
        start: With a codec: the position of the first token.
        geometries: With a codec: how each layer's keys are rotated.
    """
    shapes: dict[tuple[int, int, int], list[int]] = {}
    for index, layer in enumerate(layers):
        shapes.setdefault((layer.keys.shape[0], layer.keys.shape[2], layer.values.shape[2]), []).append(index)
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(quantization, TokenCodec):
        layers, tensors = _coded(layers, quantization, start, geometries)
    for number, members in enumerate(shapes.values()):
        for name in ("keys", "values"):
            # Layers may be on several devices.
            stacked = torch.stack([getattr(layers[index], name).cpu() for index in members])
            tensors |= _quantized(f"{name}.{number}", stacked, None if isinstance(quantization, TokenCodec) else quantization)
    dtype = str(layers[0].keys.dtype).removeprefix("torch.")
    dims = [[heads, keys, values] for heads, keys, values in shapes]
    return tensors, {"quantization": name_of(quantization), "dtype": dtype, "piles": list(shapes.values()), "dims": dims}


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
    codes = {f"codes.{index}": record.cpu() for index, record in codec.pack(keys_of, values_of, exact).items()}
    return [LayerStates(keys[:, :exact], values[:, :exact]) for keys, values in unrotated], codes


def _quantized(name: str, x: torch.Tensor, quantization: Literal["int8", "int4"] | None) -> dict[str, torch.Tensor]:
    """Quantize a (layers, heads, tokens, dim) tensor to be stored. Refuse infinities and NaN, which would spread to later prompts."""
    if quantization is None:
        if not_finite({name: x}) is not None:
            raise ConfigError.of(name, "finite numbers", "infinities or NaN")
        return {name: x}
    quantized = quantize(x, bits=_BITS[quantization], group=_group(quantization, x.shape[-1]))
    return {name: quantized.data, f"{name}.scale": quantized.scale, f"{name}.zero": quantized.zero}


def check_form(form: Mapping[str, Any]) -> None:
    """Raise an `ArtifactError` unless this is a form such as `encode` returns."""
    try:
        if not is_coded(form):
            check_quantization(form["quantization"])
        _DTYPES[form["dtype"]]
        indices = sorted(index for members in form["piles"] for index in members)
        dims = [dim for _, sizes in zip(form["piles"], form["dims"], strict=True) for dim in sizes]
        # `True` and 1.0 are equal to integers, but can't be indices.
        plain = all(type(number) is int for number in (*indices, *dims))
        if not plain or len(indices) > MOST_LAYERS or indices != list(range(len(indices))) or len(dims) != 3 * len(form["dims"]):
            raise ArtifactError(f"its layers are {str(indices)[:100]}, its dimensions {str(dims)[:100]}")
    except (LookupError, TypeError, ValueError) as error:
        raise ArtifactError(f"it is stored in a way that makes no sense: {error!r}") from error


def check(tensors: Mapping[str, torch.Tensor], form: Mapping[str, Any], tokens: int) -> None:
    """Raise an `ArtifactError` unless tensors are finite and such as `encode` returns for a number of tokens, with a checked form."""
    coded = is_coded(form)
    for number, (members, (heads, *_)) in enumerate(zip(form["piles"], form["dims"], strict=True)):
        for name in (f"keys.{number}", f"values.{number}"):
            names = [name] if coded or form["quantization"] is None else [name, f"{name}.scale", f"{name}.zero"]
            shapes = [tuple(tensors[part].shape) if part in tensors else () for part in names]
            fits = all(len(shape) == 4 and shape[:2] == (len(members), heads) for shape in shapes)
            # Coded blobs have exact states of their first tokens only.
            if not fits or any(shape[2] > tokens if coded else shape[2] != tokens for shape in shapes):
                raise ArtifactError(f"its tensor {name!r} has the shapes {shapes}, expected {len(members)} layers of {tokens} tokens")
    for name in (f"codes.{index}" for members in form["piles"] for index in members if coded):
        if name not in tensors or tensors[name].dtype != torch.uint8 or tensors[name].ndim != 1:
            raise ArtifactError(f"its tensor {name!r} is no row of bytes")
    if (spoilt := not_finite(tensors)) is not None:
        raise ArtifactError(f"its tensor {spoilt!r} has infinities or NaN")


def is_coded(form: Mapping[str, Any]) -> bool:
    """Whether keys and values are stored as a codec's codes, of unrotated keys."""
    return isinstance(form["quantization"], str) and codec_digest(form["quantization"]) is not None


def states_of(form: Mapping[str, Any], layers: int) -> tuple[torch.dtype, list[tuple[int, int, int]]]:
    """Return the dtype of the keys before they were stored, and heads, head_dim and value_dim of each layer.

    Layers that are not stored have the sizes of the highest stored one.
    """
    sizes = {index: tuple(dims) for members, dims in zip(form["piles"], form["dims"], strict=True) for index in members}
    return _DTYPES[form["dtype"]], [sizes.get(index, sizes[max(sizes)]) for index in range(layers)]


def bytes_per_token(form: Mapping[str, Any]) -> int:
    """Return the bytes of a token's key and value in a cache, for the layer with the most."""
    return _DTYPES[form["dtype"]].itemsize * max(heads * (keys + values) for heads, keys, values in form["dims"])


def parts(spans: Sequence[BlobSpan], number: int, chosen: slice, codec: TokenCodec | None) -> list[tuple[Packed, Packed]]:
    """Return keys and values of each span, which are of one form, in some layers of a pile.

    Args:
        number: The pile's index.
        chosen: The pile's layers.
        codec: What the spans are the codes of, whose keys are unrotated; None where they are no codes.
    """
    if codec is not None:
        return list(_decoded(spans, number, chosen, codec))
    return [(_packed(span, f"keys.{number}", chosen), _packed(span, f"values.{number}", chosen)) for span in spans]


def _packed(span: BlobSpan, name: str, chosen: slice) -> Packed:
    quantization, tokens = span.form["quantization"], slice(span.start, span.stop)
    data = span.tensors[name][chosen, :, tokens]
    if quantization is None:
        return Packed(data)
    scale, zero = (span.tensors[f"{name}.{part}"][chosen, :, tokens] for part in ("scale", "zero"))
    return Packed(data, scale, zero, _group(quantization, data.shape[-1] * (2 if data.dtype == torch.uint8 else 1)))


def _group(quantization: Literal["int8", "int4"] | None, dim: int) -> int | None:
    group = None if quantization is None else _GROUP[quantization]
    return None if group is None or group >= dim else group


def _decoded(spans: Sequence[BlobSpan], number: int, chosen: slice, codec: TokenCodec) -> Iterator[tuple[Packed, Packed]]:
    form = spans[0].form
    members = form["piles"][number][chosen]
    asked = [(index, span.tensors[f"codes.{index}"], span.start, span.stop) for span in spans for index in members]
    states = codec.unpack(asked, _DTYPES[form["dtype"]])
    for place, span in enumerate(spans):
        pair = []
        for side, name in enumerate(("keys", "values")):
            stacked = torch.stack([layer[side] for layer in states[place * len(members) : (place + 1) * len(members)]])
            if stacked.shape[2] != span.stop - span.start:
                raise ArtifactError(f"its codes are of fewer than {span.stop} tokens")
            exact = span.tensors[f"{name}.{number}"][chosen, :, span.start : span.stop]
            stacked[:, :, : exact.shape[2]] = exact
            pair.append(Packed(stacked))
        yield pair[0], pair[1]
