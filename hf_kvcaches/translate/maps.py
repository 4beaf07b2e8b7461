"""The maps of a translator: from a producer's states to codes, and from codes to a consumer's states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import torch

from hf_kvcaches.core.files import MOST_LAYERS, part_of
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.kernels.arguments import Decoder
from hf_kvcaches.translate.coding import Coding

_ENCODER = ("states", "hidden", "shift")


@dataclass(frozen=True, eq=False)
class CodeEncoder:
    """The producer's side of one code: an affine map to coefficients, in steps where these are entropy coded; float32.

    Args:
        name: Of the part that is sent.
        sources: The producer's layers whose states are coded.
        states: From these states, side by side, (width, directions).
        hidden: From the input of one layer's attention, which takes out what follows from it, (hidden, directions).
        shift: (directions,).
    """

    name: str
    sources: tuple[int, ...]
    states: torch.Tensor
    hidden: torch.Tensor
    shift: torch.Tensor

    def to(self, device: torch.device) -> CodeEncoder:
        return replace(self, **{name: getattr(self, name).to(device) for name in _ENCODER})

    def coefficients(self, states: Mapping[int, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Return the coefficients, (tokens, directions), float32, on the encoder's device.

        Args:
            states: Of the producer's layers, (tokens, width) each.
            hidden: The input of the attention, (tokens, hidden).
        """
        device, start = self.shift.device, 0
        numbers = torch.addmm(self.shift, hidden.to(device).float(), self.hidden)
        for source in self.sources:
            rows = states[source].to(device).float()
            numbers.addmm_(rows, self.states[start : start + rows.shape[1]])
            start += rows.shape[1]
        return numbers


@dataclass(frozen=True, eq=False)
class LayerDecoder:
    """The consumer's side of one layer.

    Args:
        code: The number of the code that it is rebuilt from, or None for a layer without one.
        shape: KV heads, and the dimensions of a key and a value.
        weights: From the attention input of the lowest layer that is not run, and from coefficients, float32.
    """

    layer: int
    code: int | None
    shape: tuple[int, int, int]
    weights: Decoder


@dataclass(frozen=True, eq=False)
class Maps:
    """All maps of a translator.

    Args:
        encoders: In the order in which codes are sent.
        decoders: Of all layers that are rebuilt.
        side_layer: The producer's layer whose attention input is given to encoders.
        coding: Of all codes; None where coefficients are sent as float32 numbers.
    """

    encoders: Sequence[CodeEncoder]
    decoders: Sequence[LayerDecoder]
    side_layer: int
    coding: Coding | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(encoder.name for encoder in self.encoders)

    def decode(self, records: Mapping[int, torch.Tensor], tokens: int) -> dict[int, torch.Tensor]:
        """Return the coefficients of codes, (tokens, directions), float32, of their records, (bytes,), all on one device."""
        if self.coding is not None:
            found, sound = self.coding.unpack(records), True
        else:
            shapes = {code: (tokens, len(self.encoders[code].shift)) for code in records}
            found = {
                code: own.view(torch.float32).view(shapes[code]) for code, own in records.items() if len(own) == 4 * prod(shapes[code])
            }
            sound = len(found) == len(records) and all(bool(own.isfinite().all()) for own in found.values())
        if not sound or any(len(own) != tokens for own in found.values()):
            raise ArtifactError(f"Codes are of other tokens than the {tokens} that their head says, or are damaged. Have them sent again.")
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor | None] = {}
        for number, encoder in enumerate(self.encoders):
            tensors |= {f"encoders.{number}.{name}": getattr(encoder, name) for name in _ENCODER}
        for decoder in self.decoders:
            tensors |= {f"decoders.{decoder.layer}.{name}": part for name, part in decoder.weights._asdict().items()}
        if self.coding is not None:
            tensors |= {f"coding.{name}": part for name, part in self.coding.tensors().items()}
        return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items() if tensor is not None}

    def metadata(self) -> dict[str, Any]:
        return {
            "encoders": [[encoder.name, list(encoder.sources)] for encoder in self.encoders],
            "decoders": [[decoder.layer, decoder.code, list(decoder.shape)] for decoder in self.decoders],
            "side_layer": self.side_layer,
            "coding_bits": None if self.coding is None else self.coding.bits,
        }

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> Self:
        encoders = [
            CodeEncoder(name, tuple(sources), *(tensors[f"encoders.{number}.{part}"] for part in _ENCODER))
            for number, (name, sources) in enumerate(metadata["encoders"])
        ]
        decoders = [
            LayerDecoder(layer, code, tuple(shape), Decoder(*(tensors.get(f"decoders.{layer}.{part}") for part in Decoder._fields)))
            for layer, code, shape in metadata["decoders"]
        ]
        bits = metadata["coding_bits"]
        coding = None if bits is None else Coding.restore(part_of(tensors, "coding"), len(encoders), float(bits))
        maps = cls(tuple(encoders), tuple(decoders), metadata["side_layer"], coding)
        if not maps._fit_together():
            raise ArtifactError("The stored maps don't fit each other. Fit the translator anew.")
        return maps

    def _fit_together(self) -> bool:
        layers = [
            self.side_layer,
            *(source for encoder in self.encoders for source in encoder.sources),
            *(own.layer for own in self.decoders),
        ]
        sound = len({*self.names}) == len(self.encoders) and all(type(layer) is int and 0 <= layer < MOST_LAYERS for layer in layers)
        ranks: dict[int | None, int | None] = {None: None}  # directions by code
        for code, encoder in enumerate(self.encoders):
            rank = ranks[code] = len(encoder.shift)
            sound &= encoder.shift.ndim == 1 and all(part.ndim == 2 and part.shape[1] == rank for part in (encoder.states, encoder.hidden))
            sound &= self.coding is None or len(self.coding.deviations[code]) == rank
        for decoder in self.decoders:
            side, coefficients, bias = decoder.weights
            heads, *dims = decoder.shape
            sound &= decoder.code in ranks and (None if coefficients is None else len(coefficients)) == ranks[decoder.code]
            sound &= side is not None and side.ndim == 2 and bias is not None and bias.ndim == 1
            sound &= {part.shape[-1] for part in decoder.weights if part is not None} == {heads * sum(dims)}
        return sound
