"""Convert keys and values to the tensors of a blob, check what was read, and write it into the slots where a prompt has it.

On a GPU the layers are written in order on a stream of their own, with one copy for each layer and side, and the model's pass waits for
each layer when it gets there: the next ones are sent while it runs. On a CPU all layers of a blob are written at once.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from hf_kvcaches import compat
from hf_kvcaches.core.decoder import decoder_layers
from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.core.rope import RotaryGeometry
from hf_kvcaches.errors import ArtifactError, ConfigError, require_choice
from hf_kvcaches.kernels.quantization import Packed, quantize
from hf_kvcaches.kernels.splice import splice
from hf_kvcaches.reuse.index import Piece
from hf_kvcaches.reuse.layer import SplicedLayer, SplicingCache
from hf_kvcaches.reuse.plan import PromptPlan, PromptRow
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
Blobs = Mapping[str, Mapping[str, torch.Tensor]]

_BITS = {"int8": 8, "int4": 4}
_CODED = "codec:"  # stands before the digest of a codec
PORTION = 2**25  # bytes in a cache that are decoded at a time on a CPU
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


def codec_digest(name: object) -> str | None:
    """Return the digest of the codec that a quantization's name names; None for other quantizations."""
    return name.removeprefix(_CODED) if isinstance(name, str) and name.startswith(_CODED) else None


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

    A codec unrotates keys by `start`, the position of the first token, with the geometry of each layer.
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
        if codec_digest(form["quantization"]) is None:
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
    coded = codec_digest(form["quantization"]) is not None
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


def write_plan(cache: SplicingCache, plan: PromptPlan, blobs: Blobs, codec: TokenCodec | None) -> None:
    """Make room for a prompt, and write the tokens that its plan reuses into a cache's layers; none counts as seen."""
    form = next(iter(plan.records.values())).form
    shapes = dict(sorted((index, dims) for members, dims in zip(form["piles"], form["dims"], strict=True) for index in members))
    padding = max(plan.padding)
    for layer, module, (heads, *dims) in zip(cache.layers, decoder_layers(cache.model)[2], shapes.values(), strict=True):
        device = compat.layer_device(module)
        keys, values = (torch.empty(1, heads, 0, dim, dtype=DTYPES[form["dtype"]], device=device) for dim in dims)
        layer.open(len(plan.rows), plan.total, keys, values, padding)
    write_rows(cache.layers, plan.rows, blobs, cache.rotation.layers, codec)


def write_rows(
    layers: Sequence[SplicedLayer],
    rows: Iterable[PromptRow],
    blobs: Blobs,
    geometries: Sequence[RotaryGeometry],
    codec: TokenCodec | None,
) -> None:
    """Write the tokens that rows reuse, all of them codes of a codec or none, into the layers' buffers."""
    buffers: list[tuple[Any, Any]] = [(layer.key_buffer, layer.value_buffer) for layer in layers]
    devices = {keys.device for keys, _ in buffers}
    on_cpu = {device.type for device in devices} == {"cpu"}
    groups = list[_Group]()
    for row in rows:
        pieces = list(row.sources)
        # A GPU gets all pieces of a row in one copy, and a codec decodes them together.
        together = [[piece] for piece in pieces] if on_cpu and codec is None else [pieces]
        groups += [_Group(row, some, blobs, geometries, codec) for some in together if some]
    streams = {device: _stream(device) for device in devices if device.type == "cuda"}
    for device, stream in streams.items():
        stream.wait_stream(torch.cuda.current_stream(device))
        for tensor in (tensor for tensors in blobs.values() for tensor in tensors.values() if tensor.device == device):
            tensor.record_stream(stream)  # the hot tier may evict it before it is read
    step = len(layers) if on_cpu else 1
    if on_cpu and codec is not None and groups:
        largest = max(keys[0, :, 0].nbytes + values[0, :, 0].nbytes for keys, values in buffers)
        step = max(1, PORTION // (largest * max(len(group.indices) for group in groups)))
    for first in range(0, len(layers), step):
        own = streams.get(buffers[first][0].device)
        with torch.cuda.stream(own):  # None changes nothing
            for group in groups:
                group.write(buffers, first, first + step)
        if own is not None:
            for buffer in buffers[first]:
                buffer.record_stream(own)
            layers[first].arrived = own.record_event()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Group:
    """Tokens of one row that are written together."""

    def __init__(
        self, row: PromptRow, pieces: Sequence[Piece], blobs: Blobs, geometries: Sequence[RotaryGeometry], codec: TokenCodec | None
    ) -> None:
        self.row, self.geometries, self.codec, self.form = row, geometries, codec, pieces[0].record.form
        # The tensors of each piece, and its tokens in them.
        self.spans = [(blobs[piece.record.key], slice(piece.offset, piece.offset + piece.stop - piece.start)) for piece in pieces]
        self.indices = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
        before = np.concatenate([np.arange(piece.stop - piece.start) + piece.position for piece in pieces])
        # By how many positions keys are rotated: codes are of unrotated ones.
        moves = self.indices if codec is not None else self.indices - before
        self.rotates = codec is not None or bool(moves.any())
        self.rotation_on = functools.cache(functools.partial(_rotation, torch.from_numpy(moves), codec is not None))
        self.slots_on = functools.cache(functools.partial(_to_device, torch.from_numpy(self.indices + row.padding)))

    def write(self, buffers: Sequence[Sequence[torch.Tensor]], first: int, last: int) -> None:
        """Write the layers from `first` to before `last`."""
        for number, pile in enumerate(self.form["piles"]):
            chosen = slice(bisect_left(pile, first), bisect_left(pile, last))
            if not (members := pile[chosen]):
                continue
            key_outs, value_outs = zip(*([side[self.row.number] for side in buffers[index]] for index in members), strict=True)
            device = key_outs[0].device
            sides = zip(*self._states(number, chosen), strict=True)
            keys, values = (parts[0] if len(parts) == 1 and parts[0].data.device == device else _joined(parts, device) for parts in sides)
            slots, start = self.slots_on(device), 0
            # Layers that are rotated alike are written together.
            for _, alike in groupby([id(self.geometries[index]) if self.rotates else 0 for index in members]):
                stop = start + len(list(alike))
                rotation = self.rotation_on(self.geometries[members[start]], device) if self.rotates else {}
                parts = [None if part is None else part[start:stop] for part in keys[:3]]
                splice(Packed._make([*parts, keys.group]), key_outs[start:stop], slots, **rotation)
                start = stop
            splice(values, value_outs, slots)

    def _states(self, number: int, chosen: slice) -> Iterator[tuple[Packed, Packed]]:
        """Yield keys and values of each piece in some layers of a pile, as they are stored; codes are decoded."""
        if self.codec is None:
            for tensors, tokens in self.spans:
                yield self._stored(tensors, f"keys.{number}", chosen, tokens), self._stored(tensors, f"values.{number}", chosen, tokens)
            return
        members = self.form["piles"][number][chosen]
        asked = [(index, tensors[f"codes.{index}"], tokens.start, tokens.stop) for tensors, tokens in self.spans for index in members]
        states = self.codec.unpack(asked, DTYPES[self.form["dtype"]])
        for place, (tensors, tokens) in enumerate(self.spans):
            keys, values = map(torch.stack, zip(*states[place * len(members) : (place + 1) * len(members)], strict=True))
            for stacked, name in ((keys, f"keys.{number}"), (values, f"values.{number}")):
                exact = tensors[name][chosen, :, tokens]
                stacked[:, :, : exact.shape[2]] = exact
            yield Packed(keys), Packed(values)

    def _stored(self, tensors: Mapping[str, torch.Tensor], name: str, chosen: slice, tokens: slice) -> Packed:
        data, quantization = tensors[name][chosen, :, tokens], self.form["quantization"]
        if quantization is None:
            return Packed(data)
        scale, zero = (tensors[f"{name}.{part}"][chosen, :, tokens] for part in ("scale", "zero"))
        return Packed(data, scale, zero, group_of(quantization, data.shape[-1] * (2 if data.dtype == torch.uint8 else 1)))


def _rotation(moves: torch.Tensor, scaled: bool, geometry: RotaryGeometry, device: torch.device) -> dict[str, Any]:
    """Return by which angles keys are rotated, as arguments of `splice`; nothing for no rotation."""
    if geometry.kind != "rope":
        return {}
    tables = geometry.cos_sin(moves, torch.float32)
    cos, sin = (_to_device(table * geometry.attention_scaling if scaled else table, device) for table in tables)
    return {"cos": cos, "sin": sin, "layout": geometry.layout}


def _joined(parts: Sequence[Packed], device: torch.device) -> Packed:
    """The tokens of several pieces on a device, one behind the other, in one copy for each tensor."""
    sides = [[side for side in sides if side is not None] for sides in zip(*(part[:3] for part in parts), strict=True)]
    joined = [_to_device(torch.cat(side, 2) if len(side) > 1 else side[0], device) if side else None for side in sides]
    return Packed._make([*joined, parts[0].group])


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device; to a GPU from pinned memory, without waiting."""
    if tensor.device == device or device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    tensor = tensor.contiguous()
    if not tensor.is_pinned():
        with contextlib.suppress(RuntimeError):  # no more memory can be pinned: the copy is waited for
            tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
