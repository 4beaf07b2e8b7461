"""The maps of a translator: from a producer's states to codes, and from codes to a consumer's states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch.func import functional_call

from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.kernels.arguments import Decoder
from hf_kvcaches.translate.aligner import MLPAligner
from hf_kvcaches.translate.quantizing import Quantizer
from hf_kvcaches.translate.states import State

Kind = Literal["states", "input"]
_QUANTIZER = ("steps", "widths", "sizes")
_ENCODER = ("weights", "side", "shift")


@dataclass(frozen=True, eq=False)
class PartEncoder:
    """The producer's side of one part.

    Args:
        kind: What is coded: "states" for keys and values, "input" for the normalised input of the attention.
        layers: The producer's layers that are coded.
        side_layer: The producer's layer whose attention input is the producer's side information.
        weights: From the layers' states, side by side, to coefficients, (width, rank), float32.
        side: From the side information to coefficients, (hidden, rank), or None. What it predicts is not coded.
        shift: Added to coefficients, (rank,).
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
        """The producer's layers whose attention's input is read."""
        return frozenset(self.layers if self.kind == "input" else ()) | frozenset(() if self.side is None else (self.side_layer,))

    @property
    def needs(self) -> frozenset[int]:
        """The producer's layers whose states are read."""
        return self.inputs | frozenset(self.layers)

    def encode(self, states: Mapping[int, State]) -> torch.Tensor:
        """The packed codes, (bytes of a token, tokens)."""
        device = states[self.layers[0]].keys.device
        inputs = torch.cat([states[layer].of(self.kind).to(device) for layer in self.layers], dim=1).float()
        coefficients = inputs @ self.weights.to(inputs.device) + self.shift.to(inputs.device)
        if self.side is not None:
            coefficients += states[self.side_layer].of("input").to(inputs.device).float() @ self.side.to(inputs.device)
        return self.quantizer.encode(coefficients)


@dataclass(frozen=True, eq=False)
class LayerDecoder:
    """The consumer's side of one layer.

    Args:
        part: The part that it is rebuilt from; None where the side information is all.
        kind: What is rebuilt, as in `PartEncoder`.
        shape: KV heads, and the dimensions of a key and a value.
        weights: From side information and coefficients, float32.
        aligner: In place of the weights.
    """

    layer: int
    part: str | None
    kind: Kind
    shape: tuple[int, int, int]
    weights: Decoder
    aligner: MLPAligner | None = None

    def apply(self, side: torch.Tensor, coefficients: torch.Tensor | None) -> torch.Tensor:
        """Return what is rebuilt, (tokens, width), float32, from side information, (tokens, hidden), and coefficients, (tokens, rank)."""
        device, inputs = side.device, [side.float()] if coefficients is None else [side.float(), coefficients.to(side.device).float()]
        if self.aligner is not None:
            # The paper's aligner has the coefficients only.
            together = torch.cat(inputs, dim=1)[:, -len(self.aligner.weight) :]
            # The module stays where it is: other threads may use it on other devices.
            state = {name: part.to(device) for name, part in self.aligner.state_dict().items()}
            return functional_call(self.aligner, state, (together,))
        products = [states @ map_.to(device) for states, map_ in zip(inputs, self.weights[:2], strict=False) if map_ is not None]
        if self.weights.bias is not None:
            products.append(self.weights.bias.to(device).expand(len(side), -1))
        return sum(products[1:], products[0])


@dataclass(frozen=True, eq=False)
class Maps:
    """All maps of a translator; encoders in the order in which their parts are sent."""

    encoders: Sequence[PartEncoder]
    decoders: Sequence[LayerDecoder]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        tensors: dict[str, torch.Tensor | None] = {}
        for number, encoder in enumerate(self.encoders):
            parts = {name: getattr(encoder, name) for name in _ENCODER} | {name: getattr(encoder.quantizer, name) for name in _QUANTIZER}
            tensors |= {f"encoders.{number}.{name}": part for name, part in parts.items()}
        for number, decoder in enumerate(self.decoders):
            aligner = {} if decoder.aligner is None else {f"aligner.{name}": part for name, part in decoder.aligner.state_dict().items()}
            tensors |= {f"decoders.{number}.{name}": part for name, part in {**decoder.weights._asdict(), **aligner}.items()}
        return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items() if tensor is not None}

    def metadata(self) -> dict[str, Any]:
        """All but the tensors, as JSON values."""
        return {
            "encoders": [[encoder.part, encoder.kind, list(encoder.layers), encoder.side_layer] for encoder in self.encoders],
            "decoders": [[layer.layer, layer.part, layer.kind, list(layer.shape), layer.aligner is not None] for layer in self.decoders],
        }

    @classmethod
    def restore(cls, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> Self:
        """The inverse of `tensors` and `metadata`."""
        encoders, decoders = [], []
        for number, (part, kind, layers, side_layer) in enumerate(metadata["encoders"]):
            parts = _below(tensors, f"encoders.{number}.")
            quantizer = Quantizer(*(parts[name] for name in _QUANTIZER))
            encoders.append(
                PartEncoder(part, kind, tuple(layers), side_layer, parts["weights"], parts.get("side"), parts["shift"], quantizer)
            )
        for number, (layer, part, kind, shape, aligned) in enumerate(metadata["decoders"]):
            parts = _below(tensors, f"decoders.{number}.")
            aligner = MLPAligner.from_state(_below(parts, "aligner.")) if aligned else None
            weights = Decoder(*(parts.get(name) for name in Decoder._fields))
            decoders.append(LayerDecoder(layer, part, kind, tuple(shape), weights, aligner))
        maps = cls(tuple(encoders), tuple(decoders))
        if not maps._fit_together():
            raise ArtifactError("The stored maps don't fit each other. Fit the translator anew.")
        return maps

    def _fit_together(self) -> bool:
        ranks = {encoder.part: len(encoder.quantizer.steps) for encoder in self.encoders}
        layers = [layer for encoder in self.encoders for layer in (*encoder.layers, encoder.side_layer)]
        layers += [decoder.layer for decoder in self.decoders]
        sound = len(ranks) == len(self.encoders) and all(type(layer) is int and 0 <= layer < MOST_LAYERS for layer in layers)
        sound &= {part.kind for part in self.encoders} | {layer.kind for layer in self.decoders} <= set(get_args(Kind))
        for encoder in self.encoders:
            columns = {part.shape[-1] for part in (encoder.weights, encoder.side, encoder.shift) if part is not None}
            sound &= encoder.weights.ndim == 2 and columns == {ranks[encoder.part]}
        for decoder in self.decoders:
            side, codes, bias = decoder.weights
            widths = {part.shape[-1] for part in decoder.weights if part is not None}
            heads, *dims = decoder.shape
            sound &= len(widths) <= 1 and (decoder.kind == "input" or widths == {heads * sum(dims)})
            sound &= (bias is None or bias.ndim == 1) and all(part is None or part.ndim == 2 for part in (side, codes))
            sound &= decoder.part is None or decoder.part in ranks
            sound &= codes is None or len(codes) == ranks.get(decoder.part or "")
        return sound


def _below(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
