"""Convert keys and values to the tensors of a blob, and check what was read; `writer.py` converts them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, ConfigError, require_choice
from hf_kvcaches.kernels.quantization import quantize
from hf_kvcaches.stores.blobs_format import not_finite


@runtime_checkable
class TokenCodec(Protocol):
    """Packs the tokens of all layers of a model: what is stored in place of keys and values. See `KVCodec`."""

    @property
    def digest(self) -> str: ...

    @property
    def unrotated(self) -> bool: ...

    @property
    def exact_tokens(self) -> int: ...

    @property
    def packed_ratio(self) -> float: ...

    def pack(self, keys: Mapping[int, torch.Tensor], values: Mapping[int, torch.Tensor], left_out: int = 0) -> dict[int, torch.Tensor]: ...

    def unpack(
        self, spans: Sequence[tuple[int, torch.Tensor, int, int | None]], dtype: torch.dtype = torch.float32
    ) -> list[tuple[torch.Tensor, torch.Tensor]]: ...


Quantization = Literal["int8", "int4"] | TokenCodec | None

_BITS = {"int8": 8, "int4": 4}
_CODED = "codec:"  # stands before the digest of a codec
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class LayerStates(NamedTuple):
    """Rotated keys and values of a span of tokens in one layer, (kv_heads, tokens, head_dim) each."""

    keys: torch.Tensor
    values: torch.Tensor


def check_quantization(quantization: Any) -> Quantization:
    """Refuse what is none of "int8", "int4", a codec of keys before rotation, and None."""
    if isinstance(quantization, TokenCodec):
        if not quantization.unrotated:
            raise ConfigError.of("quantization", "a codec of keys before rotation", quantization, "Calibrate with rotation='aware'.")
        return quantization
    require_choice("quantization", quantization, (*_BITS, None), also=", or a KVCodec")
    plain: Quantization = quantization
    return plain


def name_of(quantization: Quantization) -> str | None:
    """Name a quantization, as forms and scopes do."""
    return _CODED + quantization.digest if isinstance(quantization, TokenCodec) else quantization


def codec_digest(name: str | None) -> str | None:
    """Return the digest of the codec that a quantization's name names; None for other quantizations."""
    return name.removeprefix(_CODED) if name is not None and name.startswith(_CODED) else None


def label_of(quantization: Quantization) -> str:
    """Label a quantization in a table: "int8", "int4", "codec" with its share of the bytes, or "none"."""
    return f"codec {quantization.packed_ratio:.3g}" if isinstance(quantization, TokenCodec) else quantization or "none"


def group_of(quantization: str, dim: int) -> int | None:
    """Return how many channels share a scale; None for all. With 4 bits a whole head would lose too much."""
    return 32 if quantization == "int4" and dim > 32 else None


def encode(
    layers: Sequence[LayerStates], quantization: Quantization, start: int = 0, geometries: Sequence[RotaryGeometry] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors to store, one for all layers of a shape and side, and the form to read them with.

    Args:
        start: With a codec: the position of the first token.
        geometries: With a codec: how each layer's keys are rotated.
    """
    piles: dict[tuple[int, int, int], list[int]] = {}
    for index, layer in enumerate(layers):
        piles.setdefault((layer.keys.shape[0], layer.keys.shape[2], layer.values.shape[2]), []).append(index)
    dtype = str(layers[0].keys.dtype).removeprefix("torch.")
    form = {"quantization": name_of(quantization), "dtype": dtype, "piles": list(piles.values()), "dims": [list(dims) for dims in piles]}
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(quantization, TokenCodec):
        layers, tensors = _coded(layers, quantization, start, geometries)
    for number, members in enumerate(piles.values()):
        for side in ("keys", "values"):
            # Layers may be on several devices.
            name, stacked = f"{side}.{number}", torch.stack([getattr(layers[index], side).cpu() for index in members])
            if isinstance(quantization, str):
                quantized = quantize(stacked, bits=_BITS[quantization], group=group_of(quantization, stacked.shape[-1]))
                tensors |= {name: quantized.data, f"{name}.scale": quantized.scale, f"{name}.zero": quantized.zero}
            elif not_finite({name: stacked}) is None:
                tensors[name] = stacked
            else:  # would spread to later prompts
                raise ConfigError.of(name, "finite numbers", "infinities or NaN")
    return tensors, form


def _coded(
    layers: Sequence[LayerStates], codec: TokenCodec, start: int, geometries: Sequence[RotaryGeometry]
) -> tuple[list[LayerStates], dict[str, torch.Tensor]]:
    """Return the exact states of a text's first tokens, which are outliers, with unrotated keys; and the codes of all tokens."""
    unrotated = []
    for (keys, values), geometry in zip(layers, geometries, strict=True):
        positions = torch.arange(start, start + keys.shape[1], device=keys.device)
        unrotated.append(LayerStates(geometry.unrotate(keys[None].float(), positions)[0].to(keys.dtype), values))
    exact = max(0, codec.exact_tokens - start)
    keys_of, values_of = ({index: layer[side] for index, layer in enumerate(unrotated)} for side in (0, 1))
    codes = {f"codes.{index}": record.cpu() for index, record in codec.pack(keys_of, values_of, exact).items()}
    return [LayerStates(keys[:, :exact], values[:, :exact]) for keys, values in unrotated], codes


def check_form(form: Mapping[str, Any]) -> None:
    """Raise an `ArtifactError` unless this is a form such as `encode` returns."""
    try:
        if not is_coded(form):
            check_quantization(form["quantization"])
        DTYPES[form["dtype"]]
        indices, dims = ([number for part in form[name] for number in part] for name in ("piles", "dims"))
        sound = (
            all(type(number) is int for number in (*indices, *dims)),  # `True` and 1.0 can't be indices
            all(sorted(members) == members for members in form["piles"]),
            len(indices) <= MOST_LAYERS and sorted(indices) == list(range(len(indices))),
            [*map(len, form["dims"])] == [3] * len(form["piles"]),
        )
        if not all(sound):
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
        for name in (f"codes.{index}" for index in members if coded):
            if name not in tensors or tensors[name].dtype != torch.uint8 or tensors[name].ndim != 1:
                raise ArtifactError(f"its tensor {name!r} is no row of bytes")
    if (spoilt := not_finite(tensors)) is not None:
        raise ArtifactError(f"its tensor {spoilt!r} has infinities or NaN")


def is_coded(form: Mapping[str, Any]) -> bool:
    """Whether keys and values are stored as a codec's codes, of unrotated keys."""
    return isinstance(form["quantization"], str) and codec_digest(form["quantization"]) is not None
