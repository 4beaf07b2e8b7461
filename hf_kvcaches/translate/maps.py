"""What a translator is made of: maps from a producer's states to codes, and from codes to a consumer's states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch

from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.translate.paper.aligner import MLPAligner
from hf_kvcaches.translate.quantizing import Quantizer
from hf_kvcaches.translate.states import State

Kind = Literal["states", "input"]
_QUANTIZER = ("steps", "widths", "sizes")


@dataclass(frozen=True, eq=False)
class PartEncoder:
    """The producer's side of one part of the codes.

    Args:
        kind: What it is made of: "states" for keys and values, "input" for the normalised input of the attention.
        layers: The producer's layers that it is made of.
        weights: From these, side by side, to coefficients, (width, rank), float32.
        side: From what the producer itself has in the place of the consumer's side information, (hidden, rank), or None. What follows
            from it need not be sent.
        side_layer: The producer's layer whose attention is given that.
        shift: What is added, (rank,).
    """

    part: str
    kind: Kind
    layers: tuple[int, ...]
    side_layer: int
    weights: torch.Tensor
    side: torch.Tensor | None
    shift: torch.Tensor
    quantizer: Quantizer

    @property
    def inputs(self) -> frozenset[int]:
        """The producer's layers whose attention's inputs are asked for."""
        return frozenset(self.layers if self.kind == "input" else ()) | frozenset(() if self.side is None else (self.side_layer,))

    @property
    def needs(self) -> frozenset[int]:
        """The producer's layers whose states are asked for."""
        return self.inputs | frozenset(self.layers)

    def encode(self, states: Mapping[int, State]) -> torch.Tensor:
        """The packed codes, (bytes of a token, tokens)."""
        given = torch.cat([states[layer].of(self.kind) for layer in self.layers], dim=1).float()
        device = given.device
        coefficients = given @ self.weights.to(device) + self.shift.to(device)
        if self.side is not None:
            coefficients = coefficients + states[self.side_layer].of("input").to(device).float() @ self.side.to(device)
        return self.quantizer.encode(coefficients)


@dataclass(frozen=True, eq=False)
class LayerDecoder:
    """The consumer's side of one layer.

    Args:
        part: The part that it is rebuilt from; None: from what the consumer knows alone.
        kind: What it gives: "states" for keys and values side by side, "input" for the normalised input of the attention.
        shape: KV heads, and the dimensions of a key and a value.
        weights: From what the consumer knows and from coefficients, float32.
        aligner: In place of the weights, from what the consumer knows and the coefficients side by side, or from these alone.
    """

    layer: int
    part: str | None
    kind: Kind
    shape: tuple[int, int, int]
    weights: Decoder
    aligner: MLPAligner | None = None

    def apply(self, side: torch.Tensor, coefficients: torch.Tensor | None) -> torch.Tensor:
        """What it gives, (tokens, width), float32.

        Args:
            side: What the consumer knows of each token, (tokens, hidden).
            coefficients: (tokens, rank), or None where no part is sent.
        """
        if self.aligner is not None:
            given = [] if coefficients is None else [coefficients.float()]
            if len(self.aligner.weight) > sum(part.shape[1] for part in given):
                given = [side.float(), *given]
            made: torch.Tensor = self.aligner.to(side.device)(torch.cat(given, dim=1))
            return made
        width = next(part.shape[-1] for part in self.weights if part is not None)
        out = torch.zeros(len(side), width, device=side.device)
        for given_part, weights in ((side, self.weights.side), (coefficients, self.weights.codes)):
            if given_part is not None and weights is not None:
                out += given_part.to(side.device).float() @ weights.to(side.device)
        return out if self.weights.bias is None else out + self.weights.bias.to(side.device)


class Maps:
    """All maps of a translator.

    Args:
        encoders: In the order in which their parts are sent.
    """

    def __init__(self, encoders: Sequence[PartEncoder], decoders: Sequence[LayerDecoder]) -> None:
        self.encoders, self.decoders = tuple(encoders), tuple(decoders)

    def parts(self) -> list[tuple[str | None, list[LayerDecoder]]]:
        """The decoders of each part, in the order in which parts are sent; those without a part first."""
        names = [None, *(encoder.part for encoder in self.encoders)]
        return [(name, [decoder for decoder in self.decoders if decoder.part == name]) for name in names]

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        found: dict[str, torch.Tensor | None] = {}
        for number, encoder in enumerate(self.encoders):
            found |= {f"encoders.{number}.{name}": getattr(encoder, name) for name in ("weights", "side", "shift")}
            found |= {f"encoders.{number}.{name}": getattr(encoder.quantizer, name) for name in _QUANTIZER}
        for number, decoder in enumerate(self.decoders):
            found |= {f"decoders.{number}.{name}": part for name, part in decoder.weights._asdict().items()}
            if decoder.aligner is not None:
                found |= {f"decoders.{number}.aligner.{name}": part for name, part in decoder.aligner.state_dict().items()}
        return {name: tensor.detach().contiguous().cpu() for name, tensor in found.items() if tensor is not None}

    def metadata(self) -> dict[str, Any]:
        """All but the tensors, as JSON values."""
        return {
            "encoders": [[each.part, each.kind, list(each.layers), each.side_layer] for each in self.encoders],
            "decoders": [[each.layer, each.part, each.kind, list(each.shape), each.aligner is not None] for each in self.decoders],
        }

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> Self:
        """The inverse of `tensors` and `metadata`."""
        encoders, decoders = [], []
        for number, (part, kind, layers, side_layer) in enumerate(metadata["encoders"]):
            own = f"encoders.{number}."
            quantizer = Quantizer(*(tensors[own + name] for name in _QUANTIZER))
            maps = tensors[own + "weights"], tensors.get(own + "side"), tensors[own + "shift"]
            encoders.append(PartEncoder(part, kind, tuple(layers), side_layer, *maps, quantizer))
        for number, (layer, part, kind, shape, aligned) in enumerate(metadata["decoders"]):
            weights = Decoder(*(tensors.get(f"decoders.{number}.{name}") for name in Decoder._fields))
            prefix = f"decoders.{number}.aligner."
            state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            decoders.append(LayerDecoder(layer, part, kind, tuple(shape), weights, MLPAligner.from_state(state) if aligned else None))
        made = cls(encoders, decoders)
        if not made._fit_together():
            raise ArtifactError("The stored maps don't fit each other. Fit the translator anew.")
        return made

    def _fit_together(self) -> bool:
        ranks = {encoder.part: len(encoder.quantizer.steps) for encoder in self.encoders}
        layers = [layer for each in self.encoders for layer in (*each.layers, each.side_layer)] + [each.layer for each in self.decoders]
        sound = len(ranks) == len(self.encoders) and all(type(layer) is int and 0 <= layer < MOST_LAYERS for layer in layers)
        for encoder in self.encoders:
            sound &= encoder.kind in get_args(Kind) and encoder.weights.ndim == 2
            columns = {part.shape[-1] for part in (encoder.weights, encoder.side, encoder.shift) if part is not None}
            sound &= columns == {ranks[encoder.part]}
        for decoder in self.decoders:
            side, codes, bias = decoder.weights
            widths = {each.shape[-1] for each in decoder.weights if each is not None}
            if decoder.kind == "states":
                heads, *dims = decoder.shape
                sound &= widths == {heads * sum(dims)}
            sound &= decoder.kind in get_args(Kind) and len(widths) <= 1 and (bias is None or bias.ndim == 1)
            sound &= all(each is None or each.ndim == 2 for each in (side, codes)) and (decoder.part is None or decoder.part in ranks)
            sound &= codes is None or len(codes) == ranks.get(decoder.part or "")
        return sound
