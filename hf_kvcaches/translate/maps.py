"""The maps of a translator: from a producer's states to codes, and from codes to a consumer's states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from hf_kvcaches.core.files import MOST_LAYERS, part_of
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.kernels.arguments import Decoder
from hf_kvcaches.translate.coding import Coding

_ENCODER = ("states", "hidden", "shift")


@dataclass(frozen=True, eq=False)
class CodeEncoder:
    """The producer's side of one code. Coefficients are in steps of the coding, or as they are where there is none.

    Args:
        name: Of the part that is sent.
        sources: The producer's layers whose states are coded.
        states: From these states, side by side, (width, directions), float32.
        hidden: From the input of one layer's attention, (hidden, directions), float32. What it predicts is not coded.
        shift: Added to coefficients, (directions,), float32.
    """

    name: str
    sources: tuple[int, ...]
    states: torch.Tensor
    hidden: torch.Tensor
    shift: torch.Tensor

    def to(self, device: torch.device) -> CodeEncoder:
        """The same on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in _ENCODER})

    def coefficients(self, states: Mapping[int, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Return the coefficients, (tokens, directions), float32, on the encoder's device; nothing waits for it.

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
        code: The number of the code that it is rebuilt from; None where the input of the lowest layer's attention is all.
        shape: KV heads, and the dimensions of a key and a value.
        weights: From that input and from coefficients, float32.
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
        """Of the parts of a message."""
        return tuple(encoder.name for encoder in self.encoders)

    def directions(self, code: int) -> int:
        """How many coefficients a code has."""
        return len(self.encoders[code].shift)

    def decode(self, records: Mapping[int, torch.Tensor], tokens: int) -> dict[int, torch.Tensor]:
        """Return the coefficients of codes, (tokens, directions), float32, of their records, (bytes,), all on one device."""
        if self.coding is None:
            sizes = {code: 4 * tokens * self.directions(code) for code in records}
            found = {code: record.view(torch.float32).view(tokens, -1) for code, record in records.items() if len(record) == sizes[code]}
        else:
            found = self.coding.unpack(records)
        if len(found) < len(records) or any(len(each) != tokens or not bool(each.isfinite().all()) for each in found.values()):
            raise ArtifactError(f"Codes are of other tokens than the {tokens} that their head says, or are damaged. Have them sent again.")
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        tensors: dict[str, torch.Tensor | None] = {}
        for number, encoder in enumerate(self.encoders):
            tensors |= {f"encoders.{number}.{name}": getattr(encoder, name) for name in _ENCODER}
        for decoder in self.decoders:
            tensors |= {f"decoders.{decoder.layer}.{name}": part for name, part in decoder.weights._asdict().items()}
        if self.coding is not None:
            tensors |= {f"coding.{name}": part for name, part in self.coding.tensors().items()}
        return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items() if tensor is not None}

    def metadata(self) -> dict[str, Any]:
        """All but the tensors, as JSON values."""
        return {
            "encoders": [[encoder.name, list(encoder.sources)] for encoder in self.encoders],
            "decoders": [[decoder.layer, decoder.code, list(decoder.shape)] for decoder in self.decoders],
            "side_layer": self.side_layer,
            "coding": None if self.coding is None else self.coding.metadata(),
        }

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> Self:
        """The inverse of `tensors` and `metadata`."""
        encoders = [
            CodeEncoder(name, tuple(sources), *(tensors[f"encoders.{number}.{part}"] for part in _ENCODER))
            for number, (name, sources) in enumerate(metadata["encoders"])
        ]
        decoders = [
            LayerDecoder(layer, code, tuple(shape), Decoder(*(tensors.get(f"decoders.{layer}.{part}") for part in Decoder._fields)))
            for layer, code, shape in metadata["decoders"]
        ]
        coding = None if metadata["coding"] is None else Coding.restore(part_of(tensors, "coding"), metadata["coding"])
        maps = cls(tuple(encoders), tuple(decoders), metadata["side_layer"], coding)
        if not maps._fit_together():
            raise ArtifactError("The stored maps don't fit each other. Fit the translator anew.")
        return maps

    def _fit_together(self) -> bool:
        codes = range(len(self.encoders))
        layers = [self.side_layer, *(layer for encoder in self.encoders for layer in encoder.sources)]
        layers += [decoder.layer for decoder in self.decoders]
        sound = len({*self.names}) == len(codes) and all(type(layer) is int and 0 <= layer < MOST_LAYERS for layer in layers)
        for code, encoder in enumerate(self.encoders):
            rank = len(encoder.shift)
            sound &= encoder.shift.ndim == 1 and all(part.ndim == 2 and part.shape[1] == rank for part in (encoder.states, encoder.hidden))
            sound &= self.coding is None or len(self.coding.directions(code)) == rank
        for decoder in self.decoders:
            side, coefficients, bias = decoder.weights
            heads, *dims = decoder.shape
            sound &= decoder.code is None or decoder.code in codes
            expected = None if decoder.code is None or not sound else self.directions(decoder.code)
            sound &= (None if coefficients is None else len(coefficients)) == expected
            sound &= side is not None and side.ndim == 2 and bias is not None and bias.ndim == 1
            widths = {part.shape[-1] for part in decoder.weights if part is not None}
            sound &= widths == {heads * sum(dims)}
        return sound and (self.coding is None or len(self.coding.orders) == len(codes))
