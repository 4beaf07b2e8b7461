"""The maps of a translator: from a producer's states to coefficients, to records and back, and from these to a consumer's states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch

from hf_kvcaches.codec.coefficients import CoefficientPacker, pack, unpack
from hf_kvcaches.codec.entropy import Tables
from hf_kvcaches.codec.packing import Span
from hf_kvcaches.codec.plan import TABLES, Plan
from hf_kvcaches.core.files import MOST_LAYERS, part_of
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.kernels.rebuild import Decoder

_LARGEST = float(2**15 - 1)  # steps of a coefficient


class CodeWeights(NamedTuple):
    """An affine map to the coefficients of a code, in steps where these are entropy coded; float32."""

    states: torch.Tensor  # from the states of the producer's layers, side by side, (width, directions)
    hidden: torch.Tensor  # from the input of one layer's attention, which takes out what follows from it, (hidden, directions)
    shift: torch.Tensor  # (directions,)


@dataclass(frozen=True, eq=False)
class CodeEncoder:
    """The producer's side of one code."""

    name: str  # of the part that is sent
    sources: tuple[int, ...]  # the producer's layers whose states are coded
    weights: CodeWeights
    plan: Plan | None = None  # how coefficients become records; None where they are sent as float32 numbers
    deviations: torch.Tensor | None = None  # of the coefficients, in steps, in the order of the plan


@dataclass(frozen=True, eq=False)
class LayerDecoder:
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
    tables: Tables | None = (
        None  # by which all coefficients are coded, in one step, as their errors cost the same; None for float32 numbers
    )
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

    def coefficients(self, code: int, states: Mapping[int, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
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

    def pack(self, coefficients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the record of each code, (bytes,), uint8, on the device of its coefficients; what is no number counts as 0."""
        if self.tables is None:
            return {code: own.flatten().view(torch.uint8) for code, own in coefficients.items()}
        records: dict[int, torch.Tensor] = {}
        bounded = {code: own.nan_to_num(0.0).clamp_(-_LARGEST, _LARGEST) for code, own in coefficients.items()}
        for device in {own.device for own in bounded.values()}:
            tokens = {code: len(own) for code, own in bounded.items() if own.device == device}
            records |= pack(self._packers(device), tokens, lambda code, block: bounded[code][block].T)
        return records

    def decode(self, records: Mapping[int, torch.Tensor], tokens: int) -> dict[int, torch.Tensor]:
        """Return the coefficients of codes, (tokens, directions), float32, of their records, (bytes,), all on one device."""
        found: dict[int, torch.Tensor] = {}
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
                tables, coded = self.tables.to(device), enumerate(self.encoders)
                self._placed[device] = {code: CoefficientPacker(own.plan, own.deviations, tables) for code, own in coded}  # type: ignore[arg-type]
        packers: dict[int, CoefficientPacker] = self._placed[device]
        return packers

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_placed": {}}

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor | None] = {}
        for code, encoder in enumerate(self.encoders):
            tensors |= {f"encoders.{code}.{name}": part for name, part in encoder.weights._asdict().items()}
            if encoder.plan is not None:
                parts = encoder.plan.tensors() | {"deviations": encoder.deviations}
                tensors |= {f"coding.{code}.{name}": part for name, part in parts.items()}
        for decoder in self.decoders:
            tensors |= {f"decoders.{decoder.layer}.{name}": part for name, part in decoder.weights._asdict().items()}
        if self.tables is not None:
            tensors |= {f"coding.tables.{name}": part for name, part in self.tables.tensors().items()}
        return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items() if tensor is not None}

    def metadata(self) -> dict[str, Any]:
        return {
            "encoders": [[encoder.name, list(encoder.sources)] for encoder in self.encoders],
            "decoders": [[decoder.layer, decoder.code, list(decoder.shape)] for decoder in self.decoders],
            "side_layer": self.side_layer,
            "coding_bits": self.bits,
        }

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> Self:
        bits, tables, encoders = metadata["coding_bits"], None, list[CodeEncoder]()
        if bits is not None:
            tables, bits = Tables(**part_of(tensors, "coding.tables")), float(bits)
            tables.require_valid(TABLES)
        for code, (name, sources) in enumerate(metadata["encoders"]):
            weights, coding = CodeWeights(**part_of(tensors, f"encoders.{code}")), part_of(tensors, f"coding.{code}")
            deviations = None if tables is None else coding["deviations"]
            plan = None if deviations is None else Plan.of(coding, len(deviations))
            encoders.append(CodeEncoder(name, tuple(sources), weights, plan, deviations))
        decoders = (
            LayerDecoder(layer, code, tuple(shape), Decoder(**dict[str, Any](codes=None) | part_of(tensors, f"decoders.{layer}")))
            for layer, code, shape in metadata["decoders"]
        )
        maps = cls(tuple(encoders), tuple(decoders), metadata["side_layer"], tables, bits)
        if not maps._fit_together():
            raise ArtifactError("The stored maps don't fit each other. Fit the translator anew.")
        return maps

    def _fit_together(self) -> bool:
        layers = [
            self.side_layer,
            *(layer for encoder in self.encoders for layer in encoder.sources),
            *(own.layer for own in self.decoders),
        ]
        sound = len({*self.names}) == len(self.encoders) and all(type(layer) is int and 0 <= layer < MOST_LAYERS for layer in layers)
        for encoder in self.encoders:
            states, hidden, shift = encoder.weights
            coded = shift if encoder.plan is None or encoder.deviations is None else encoder.deviations
            sound &= shift.ndim == 1 and states.shape[1:] == hidden.shape[1:] == shift.shape == coded.shape
            sound &= encoder.plan is None or encoder.plan.order.shape == shift.shape
        for decoder in self.decoders:
            (side, coefficients, bias), (heads, *dims) = decoder.weights, decoder.shape
            width, sent = (heads * sum(dims),), None if decoder.code is None else self.encoders[decoder.code].weights.shift.shape
            sound &= side.shape[1:] == bias.shape == width
            sound &= coefficients is None if sent is None else coefficients is not None and coefficients.shape == (*sent, *width)
        return sound
