"""What a translator is made of: linear maps from a producer's states to codes, and from codes to a consumer's states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch

from hf_kvcaches.core.files import MOST_LAYERS
from hf_kvcaches.errors import ArtifactError
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.translate.codes import Part, pack
from hf_kvcaches.translate.paper.aligner import MLPAligner
from hf_kvcaches.translate.states import State

Kind = Literal["reuse", "patch", "cross_layer"]
# What a code is made of, by its name.
_KEYS, _VALUES, _PAIR, _HIDDEN, _ALL = "k", "v", "kv", "h", "all"


@dataclass(frozen=True, eq=False)
class PartEncoder:
    """The producer's side of one part of the codes.

    Args:
        layers: The layers whose states it is made of.
        weights: For each code (width, rank), float32. The code's name says what it is made of: "k", "v", "kv", "h" for the normalised input
            of the attention, "all" for keys and values of all layers.
    """

    part: str
    kind: Kind
    layers: tuple[int, ...]
    weights: dict[str, torch.Tensor]

    @property
    def ranks(self) -> dict[str, int]:
        """The width of each code."""
        return {name: weights.shape[1] for name, weights in self.weights.items()}

    @property
    def needs_hidden(self) -> bool:
        """Whether the normalised inputs of its layers are asked for."""
        return _HIDDEN in self.weights

    def part_of(self, states: Sequence[State], dtype: str, group: int | None) -> Part:
        """The codes as they are sent.

        Args:
            group: How many tokens of a channel share a scale.
        """
        return Part(self.part, {name: pack(code.cpu(), dtype, group) for name, code in self.encode(states).items()})

    def encode(self, states: Sequence[State]) -> dict[str, torch.Tensor]:
        """The codes, (tokens, rank) each, float32."""
        made = {}
        for name, weights in self.weights.items():
            given = torch.cat([_of(state, name) for state in states], dim=1)
            made[name] = given.float() @ weights.to(given.device)
        return made


def _of(state: State, name: str) -> torch.Tensor:
    if name == _HIDDEN:
        assert state.hidden is not None
        return state.hidden
    return {_KEYS: state.keys, _VALUES: state.values}.get(name, state.pair if name in (_PAIR, _ALL) else state.keys)


@dataclass(frozen=True, eq=False)
class LayerDecoder:
    """The consumer's side of one layer.

    Args:
        part: The part that it is rebuilt from; None: from what the consumer knows alone.
        kind: "patch" gives the normalised input of the attention, the others keys and values side by side.
        weights: From what the consumer knows and from codes, float32.
        aligner: In place of the weights, from what the consumer knows and the codes side by side, or from the codes alone.
    """

    layer: int
    part: str | None
    kind: Kind
    weights: Decoder
    aligner: MLPAligner | None = None

    def apply(self, side: torch.Tensor, codes: torch.Tensor | None) -> torch.Tensor:
        """The normalised input of a patched layer, (tokens, hidden), float32.

        Args:
            side: What the consumer knows of each token, (tokens, hidden).
            codes: (tokens, rank), or None where no part is sent.
        """
        if self.aligner is not None:
            given = [] if codes is None else [codes.float()]
            if len(self.aligner.weight) > sum(part.shape[1] for part in given):
                given = [side.float(), *given]
            made: torch.Tensor = self.aligner.to(side.device)(torch.cat(given, dim=1))
            return made
        out: torch.Tensor | float = 0.0 if self.weights.bias is None else self.weights.bias.to(side.device)
        for given_part, weights in ((side, self.weights.side), (codes, self.weights.codes)):
            if given_part is not None and weights is not None:
                out = out + given_part.float() @ weights.to(side.device)
        assert isinstance(out, torch.Tensor)
        return out


def to_tensors(encoders: Sequence[PartEncoder], decoders: Sequence[LayerDecoder]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Maps as tensors by name, and the rest as JSON values."""
    tensors: dict[str, torch.Tensor] = {}
    for number, encoder in enumerate(encoders):
        tensors |= {f"encoders.{number}.{name}": weights for name, weights in encoder.weights.items()}
    for number, decoder in enumerate(decoders):
        tensors |= {f"decoders.{number}.{name}": part for name, part in decoder.weights._asdict().items() if part is not None}
        if decoder.aligner is not None:
            tensors |= {f"decoders.{number}.aligner.{name}": part for name, part in decoder.aligner.state_dict().items()}
    rest = {
        "encoders": [[each.part, each.kind, list(each.layers), list(each.weights)] for each in encoders],
        "decoders": [[each.layer, each.part, each.kind, each.aligner is not None] for each in decoders],
    }
    return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, rest


class Maps:
    """All maps of a translator.

    Args:
        encoders: In the order in which their parts are sent.
    """

    def __init__(self, encoders: Sequence[PartEncoder], decoders: Sequence[LayerDecoder]) -> None:
        self.encoders, self.decoders = tuple(encoders), tuple(decoders)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], rest: Mapping[str, Any]) -> Self:
        """The inverse of `to_tensors`."""
        encoders = [
            PartEncoder(part, kind, tuple(layers), {name: tensors[f"encoders.{number}.{name}"] for name in names})
            for number, (part, kind, layers, names) in enumerate(rest["encoders"])
        ]
        decoders = []
        for number, (layer, part, kind, aligned) in enumerate(rest["decoders"]):
            own = {name: tensors.get(f"decoders.{number}.{name}") for name in Decoder._fields}
            prefix = f"decoders.{number}.aligner."
            state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            decoders.append(LayerDecoder(layer, part, kind, Decoder(**own), MLPAligner.from_state(state) if aligned else None))
        made = cls(encoders, decoders)
        made._check()
        return made

    def _check(self) -> None:
        """Raises an `ArtifactError` unless all maps fit each other."""
        ranks = {encoder.part: sum(encoder.ranks.values()) for encoder in self.encoders}
        layers = [layer for each in self.encoders for layer in each.layers] + [each.layer for each in self.decoders]
        sound = len(ranks) == len(self.encoders) and all(type(layer) is int and 0 <= layer < MOST_LAYERS for layer in layers)
        for encoder in self.encoders:
            sound &= encoder.kind in get_args(Kind) and bool(encoder.weights) and all(each.ndim == 2 for each in encoder.weights.values())
        for decoder in self.decoders:
            side, codes, bias = decoder.weights
            widths = {each.shape[-1] for each in decoder.weights if each is not None}
            sound &= decoder.kind in get_args(Kind) and len(widths) <= 1 and (bias is None or bias.ndim == 1)
            sound &= all(each is None or each.ndim == 2 for each in (side, codes)) and (decoder.part is None or decoder.part in ranks)
            sound &= codes is None or len(codes) == ranks.get(decoder.part or "")
        if not sound:
            raise ArtifactError("The stored maps don't fit each other. Fit the translator anew.")
