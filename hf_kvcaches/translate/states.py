"""What a model computes for prompts, read while it runs, and the maps of a translator: from such states to codes, and back.

Positions and padding are left out: keys are unrotated, and the real tokens of all rows are concatenated, (tokens, width), with the heads
side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from hf_kvcaches import compat
from hf_kvcaches.codec.entropy import Tables
from hf_kvcaches.codec.packing import CoefficientPacker, Span, pack, unpack
from hf_kvcaches.codec.plan import TABLES, Plan
from hf_kvcaches.core.decoder import attention_module, decoder_layers
from hf_kvcaches.core.files import MOST_LAYERS, part_of
from hf_kvcaches.core.rope import Rotation, rotation_of
from hf_kvcaches.core.source import SourceCache
from hf_kvcaches.errors import ArtifactError, ConfigError, UnsupportedError
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.reuse.partial import Arguments, PassEnded, ToldModule, name_of, run_module, twin_of, with_layers

_LARGEST = float(2**15 - 1)  # steps of a coefficient


class LayerState(NamedTuple):
    """What a layer computes for some tokens."""

    states: Tensor  # unrotated keys and values side by side, (tokens, width)
    shape: tuple[int, int, int]  # KV heads, and the dimensions of a key and a value
    hidden: Tensor = torch.empty(0)  # the normalised input of the attention, (tokens, hidden), where that is read

    def sides(self) -> list[Tensor]:
        """Keys and values, (kv_heads, tokens, head_dim) each."""
        heads, *dims = self.shape
        return [side.unflatten(1, (heads, -1)).transpose(0, 1) for side in self.states.split([heads * dim for dim in dims], dim=1)]


class PromptTokens(NamedTuple):
    """Prompts as a model reads them."""

    ids: Tensor  # (batch, tokens)
    padding: tuple[int, ...]  # slots without a token at the start of each row
    starts: tuple[int, ...]  # the slot of each row from which on states are read

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any = None) -> Self:
        """Check a batch, (batch, tokens) or (tokens,), a tensor or lists, which may be padded on the left only."""
        ids = _batch("input_ids", input_ids)
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool or not ids.numel():
            raise ConfigError.of("input_ids", "token ids, (batch, tokens)", (tuple(ids.shape), ids.dtype))
        mask = torch.ones_like(ids) if attention_mask is None else _batch("attention_mask", attention_mask)
        padding = (mask == 0).sum(-1)
        real = torch.arange(ids.shape[1], device=mask.device) >= padding[..., None]
        # An additive mask has 0 where this one has 1.
        if mask.shape != ids.shape or not torch.equal(mask, real.to(mask)) or not bool(real[:, -1].all()):
            expected = f"1 and 0 of the shape {tuple(ids.shape)}, with 0 on the left only"
            raise ConfigError.of("attention_mask", expected, (tuple(mask.shape), mask.dtype))
        starts = tuple(padding.tolist())
        return cls(ids.long(), starts, starts)

    def inputs(self, seen: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what `run_module` takes for the slots from `seen` on: ids, positions counted without padding, and the mask."""
        positions = torch.arange(self.ids.shape[1], device=self.ids.device) - torch.tensor(self.padding, device=self.ids.device)[:, None]
        mask = (positions >= 0).long() if any(self.padding) else None
        return self.ids[:, seen:], positions.clamp_min(0)[:, seen:], mask

    def rows(self) -> list[Tensor]:
        """The real ids of each row, on the CPU."""
        return [ids[before:] for ids, before in zip(self.ids.cpu(), self.padding, strict=True)]

    def read_of(self, states: Tensor) -> Tensor:
        """Return the states of all tokens that are read, (tokens, width), of (batch, tokens, width)."""
        return torch.cat([row[start:] for row, start in zip(states, self.starts, strict=True)])


def _batch(argument: str, values: Any) -> Tensor:
    """Return numbers as a tensor; a single row is a batch of one."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "Tokenize texts, and pad rows on the left."
        raise ConfigError.of(argument, "a tensor or lists of numbers, (batch, tokens)", type(values).__name__, hint) from error
    return tensor[None] if tensor.ndim == 1 else tensor


def rotation_of_model(model: PreTrainedModel) -> Rotation:
    """Return how a model's keys are rotated; refuse a model with layers whose keys and values can't be translated."""
    config = compat.decoder_config(model.config)
    foreign = sorted({kind for kind, _ in compat.layer_plan(config) if kind not in SourceCache.own_layer_types})
    if foreign:
        raise UnsupportedError(f"model: layers of the types {foreign} keep no keys and values that could be translated. Use another cache.")
    rotation = rotation_of(config)
    if rotation.refused or {geometry.kind for geometry in rotation.layers} - {"rope", "none", "learned"}:
        raise UnsupportedError(f"model: {rotation.why}, so its keys can't be translated. Use another cache.")
    return rotation


@torch.no_grad()
def read(
    model: PreTrainedModel,
    tokens: PromptTokens,
    on_state: Callable[[int, LayerState], None],
    *,
    hidden: Collection[int] = (),
    last: int | None = None,
) -> None:
    """Run a model up to the attention of the last layer, and pass on each state, some with the attention's input, as it is computed."""
    rotation, layers, cache = rotation_of_model(model), list(decoder_layers(model)[2]), DynamicCache()
    tokens = tokens._replace(ids=tokens.ids.to(compat.input_device(model)))
    (ids, positions, mask), inputs = tokens.inputs(), dict[int, Tensor]()

    def update(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer >= len(rotation.layers):
            raise UnsupportedError("model: it runs layers in loops, with keys of each loop, which can't be translated. Use another cache.")
        geometry = rotation.layers[layer]
        content = geometry.unrotate(keys, positions.to(keys.device)) if geometry.kind == "rope" else keys  # learned positions stay in keys
        sides = [tokens.read_of(states.transpose(1, 2).flatten(2)) for states in (content, values)]
        state = LayerState(torch.cat(sides, dim=1), (keys.shape[1], keys.shape[3], values.shape[3]))
        on_state(layer, state._replace(hidden=tokens.read_of(inputs.pop(layer))) if layer in inputs else state)
        if layer == last:
            raise PassEnded
        return keys, values

    cache.update = update  # it holds nothing
    for layer in hidden:
        layers[layer] = with_watched_input(layers[layer], partial(inputs.__setitem__, layer))
    with suppress(PassEnded):
        run_module(with_layers(model, layers), cache, ids, positions, mask)


def with_watched_input(layer: nn.Module, watch: Callable[[Tensor], Any]) -> nn.Module:
    """Return a twin of a decoder layer that passes its attention's input, (batch, tokens, hidden), to `watch`."""

    def on_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        watch(args[0] if args else kwargs["hidden_states"])
        return args, kwargs

    attention = attention_module(layer)
    return twin_of(layer, {name_of(layer, attention): ToldModule(attention, on_call)})


class CodeWeights(NamedTuple):
    """An affine map to the coefficients of a code, in steps where these are entropy coded; float32."""

    states: Tensor  # from the states of the producer's layers, side by side, (width, directions)
    hidden: Tensor  # from the input of one layer's attention, which takes out what follows from it, (hidden, directions)
    shift: Tensor  # (directions,)


class CodeEncoder(NamedTuple):
    """The producer's side of one code."""

    name: str  # of the part that is sent
    sources: tuple[int, ...]  # the producer's layers whose states are coded
    weights: CodeWeights
    coding: tuple[Plan, Tensor] | None = None  # and the coefficients' deviations, in steps; None where float32 numbers are sent


class LayerDecoder(NamedTuple):
    """The consumer's side of one layer."""

    layer: int
    code: int | None  # the number of the code that it is rebuilt from
    shape: tuple[int, int, int]  # KV heads, and the dimensions of a key and a value
    weights: Decoder  # from the attention input of the lowest layer that is not run, and from coefficients, float32


@dataclass(frozen=True, eq=False)
class Maps:
    """All maps of a translator."""

    encoders: tuple[CodeEncoder, ...]  # in the order in which codes are sent
    decoders: tuple[LayerDecoder, ...]  # of all layers that are rebuilt
    side_layer: int  # the producer's layer whose attention input is given to encoders
    tables: Tables | None = None  # by which all coefficients are coded, in one step, as their errors cost the same
    bits: float | None = None  # of a token in all codes, expected
    _placed: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(encoder.name for encoder in self.encoders)

    def placed(self, weights: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
        """Return weights of an encoder or a decoder on a device; they are kept for later prompts."""
        key = id(weights), device, dtype
        if key not in self._placed:
            self._placed[key] = type(weights)(*(None if part is None else part.to(device, dtype) for part in weights))
        return self._placed[key]

    def coefficients(self, code: int, states: Mapping[int, Tensor], hidden: Tensor) -> Tensor:
        """Return the coefficients of a code, (tokens, directions), float32, of the producer's states and of the attention's input."""
        sources = self.encoders[code].sources
        device, start = states[sources[-1]].device, 0
        weights = self.placed(self.encoders[code].weights, device)
        numbers = torch.addmm(weights.shift, hidden.to(device).float(), weights.hidden)
        for source in sources:
            rows = states[source].to(device).float()
            numbers.addmm_(rows, weights.states[start : start + rows.shape[1]])
            start += rows.shape[1]
        return numbers

    def pack(self, coefficients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the record of each code, (bytes,), uint8, on the device of its coefficients; what is no number counts as 0."""
        if self.tables is None:
            return {code: own.flatten().view(torch.uint8) for code, own in coefficients.items()}
        records: dict[int, Tensor] = {}
        bounded = {code: own.nan_to_num(0.0).clamp_(-_LARGEST, _LARGEST) for code, own in coefficients.items()}
        for device in {own.device for own in bounded.values()}:
            tokens = {code: len(own) for code, own in bounded.items() if own.device == device}
            records |= pack(self._packers(device), tokens, lambda code, block: bounded[code][block].T)
        return records

    def decode(self, records: Mapping[int, Tensor], tokens: int) -> dict[int, Tensor]:
        """Return the coefficients of codes, (tokens, directions), float32, of their records, (bytes,), all on one device."""
        found: dict[int, Tensor] = {}
        if self.tables is None:
            for code, record in records.items():
                rank = len(self.encoders[code].weights.shift)
                numbers = record.view(torch.float32).view(-1, rank) if len(record) == 4 * rank * tokens else record[:0]
                found[code] = numbers if bool(numbers.isfinite().all()) else record[:0]
        elif records:
            packers = self._packers(next(iter(records.values())).device)
            for part, digits in unpack(packers, [Span(*record) for record in records.items()]):
                found[part.layer] = packers[part.layer].coefficients(digits).T
        if any(len(numbers) != tokens for numbers in found.values()):
            raise ArtifactError(f"Codes are of other tokens than the {tokens} that their head says, or are damaged. Have them sent again.")
        return found

    def _packers(self, device: torch.device) -> dict[int, CoefficientPacker]:
        if device not in self._placed:
            assert self.tables is not None
            with torch.inference_mode(False), torch.no_grad():
                tables, coded = self.tables.to(device), enumerate(encoder.coding for encoder in self.encoders)
                self._placed[device] = {code: CoefficientPacker(*coding, tables) for code, coding in coded if coding is not None}
        packers: dict[int, CoefficientPacker] = self._placed[device]
        return packers

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_placed": {}}

    def tensors(self) -> dict[str, Tensor]:
        parts: dict[str, Mapping[str, Tensor | None]] = {"coding.tables": {} if self.tables is None else self.tables.tensors()}
        parts |= {f"decoders.{decoder.layer}": decoder.weights._asdict() for decoder in self.decoders}
        for code, encoder in enumerate(self.encoders):
            parts[f"encoders.{code}"] = encoder.weights._asdict()
            if encoder.coding is not None:
                parts[f"coding.{code}"] = encoder.coding[0].tensors() | {"deviations": encoder.coding[1]}
        named = ((f"{part}.{name}", tensor) for part, tensors in parts.items() for name, tensor in tensors.items())
        return {name: tensor.detach().contiguous().cpu() for name, tensor in named if tensor is not None}

    def metadata(self) -> dict[str, Any]:
        return {
            "encoders": [[encoder.name, list(encoder.sources)] for encoder in self.encoders],
            "decoders": [[decoder.layer, decoder.code, list(decoder.shape)] for decoder in self.decoders],
            "side_layer": self.side_layer,
            "coding_bits": self.bits,
        }

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Self:
        bits, tables, encoders = metadata["coding_bits"], None, list[CodeEncoder]()
        if bits is not None:
            tables, bits = Tables(**part_of(tensors, "coding.tables")), float(bits)
            tables.require_valid(TABLES)
        for code, (name, sources) in enumerate(metadata["encoders"]):
            stored, coding = part_of(tensors, f"coding.{code}"), None
            if bits is not None:
                coding = Plan.of(stored, len(stored["deviations"])), stored["deviations"]
            encoders.append(CodeEncoder(name, tuple(sources), CodeWeights(**part_of(tensors, f"encoders.{code}")), coding))
        decoders = list[LayerDecoder]()
        for layer, code, shape in metadata["decoders"]:
            stored = part_of(tensors, f"decoders.{layer}")
            decoders.append(LayerDecoder(layer, code, tuple(shape), Decoder(stored["side"], stored.get("codes"), stored["bias"])))
        maps = cls(tuple(encoders), tuple(decoders), metadata["side_layer"], tables, bits)
        if not maps._fit_together():
            raise ArtifactError("The stored maps don't fit each other. Fit the translator anew.")
        return maps

    def _fit_together(self) -> bool:
        layers = [self.side_layer, *(decoder.layer for decoder in self.decoders)]
        layers += chain.from_iterable(encoder.sources for encoder in self.encoders)
        sound = len({*self.names}) == len(self.encoders) and all(type(layer) is int and 0 <= layer < MOST_LAYERS for layer in layers)
        last = [max(encoder.sources) for encoder in self.encoders]
        sound &= last == sorted(last)  # codes are sent as soon as there is the last of their layers
        for encoder in self.encoders:
            states, hidden, shift = encoder.weights
            coded = [] if encoder.coding is None else [encoder.coding[0].order.shape, encoder.coding[1].shape]
            sound &= shift.ndim == 1 and all(shape == shift.shape for shape in (states.shape[1:], hidden.shape[1:], *coded))
        for decoder in self.decoders:
            (side, coefficients, bias), (heads, *dims) = decoder.weights, decoder.shape
            width, sent = (heads * sum(dims),), None if decoder.code is None else self.encoders[decoder.code].weights.shift.shape
            sound &= side.shape[1:] == bias.shape == width
            sound &= coefficients is None if sent is None else coefficients is not None and coefficients.shape == (*sent, *width)
        return sound
