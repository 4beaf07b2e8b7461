"""From sums to maps: what each method makes of the second moments of both models' states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.translate.allocation import allocate
from hf_kvcaches.translate.maps import LayerDecoder, Maps, PartEncoder
from hf_kvcaches.translate.paper.joint_svd import joint_svd
from hf_kvcaches.translate.reuse import ReducedRank, reduced_rank

if TYPE_CHECKING:
    from hf_kvcaches.translate.calibration import Sums, Wanted


def part_name(layer: int) -> str:
    """Of the part that a layer is sent in."""
    return f"layer.{layer}"


class Solver:
    """Makes maps of sums.

    Attributes:
        metrics: What errors of each layer's keys and values cost.
        ranks: How many codes each layer has.
    """

    def __init__(self, sums: Sums, wanted: Wanted) -> None:
        self.sums, self.wanted = sums, wanted
        self.metrics: dict[int, torch.Tensor] = {}
        self.ranks: dict[int, int] = {}

    def solve(self) -> Maps:
        """The maps of the method that was asked for, without patched layers."""
        if not self.sums.sent:
            return Maps((), ())
        return {"joint": self._joint, "cross_layer": self._cross_layer, "paper": self._paper}[self.wanted.method]()

    def _spread(self, key: int) -> torch.Tensor:
        """The covariance of a layer's keys and values in the consumer."""
        moments = self.sums.moments[key]
        mean = moments.of("one", "consumer")
        return moments.of("consumer", "consumer") - mean.T @ mean

    def _joint(self) -> Maps:
        fits: dict[int, ReducedRank] = {}
        width = 0
        for layer in self.sums.sent:
            spread = self._spread(layer)
            width += len(spread)
            self.metrics[layer] = self.sums.metric(layer, spread).to(spread.device)
            fits[layer] = reduced_rank(self.sums.moments[layer], self.metrics[layer], self.wanted.ridge_for(self.sums.moments[layer]))
        total = self.wanted.directions(width)
        if total == 0:
            return Maps((), [LayerDecoder(layer, None, "reuse", fit.decoder(0)) for layer, fit in fits.items()])
        # A strength is the root of what a direction takes off the error, and errors add up as squares.
        bought = allocate([fit.strengths.square() for fit in fits.values()], max(total, len(fits)), cost=1)
        self.ranks = dict(zip(fits, bought, strict=True))
        encoders, decoders = [], []
        for layer, fit in fits.items():
            rank = self.ranks[layer]
            encoders.append(PartEncoder(part_name(layer), "reuse", (layer,), {"kv": fit.encoder(rank)}))
            decoders.append(LayerDecoder(layer, part_name(layer), "reuse", fit.decoder(rank)))
        return Maps(encoders, decoders)

    def _cross_layer(self) -> Maps:
        spread, sent = self._spread(-1), self.sums.sent
        width = len(spread) // len(sent)
        places = {layer: slice(number * width, (number + 1) * width) for number, layer in enumerate(sent)}
        for layer, own in places.items():
            self.metrics[layer] = self.sums.metric(layer, spread[own, own]).to(spread.device)
        moments = self.sums.moments[-1]
        fit = reduced_rank(moments, torch.block_diag(*self.metrics.values()), self.wanted.ridge_for(moments))
        rank = self.wanted.directions(len(spread))
        part = "all" if rank else None
        decoders = [LayerDecoder(layer, part, "cross_layer", fit.decoder(rank, own)) for layer, own in places.items()]
        return Maps([PartEncoder("all", "cross_layer", sent, {"all": fit.encoder(rank)})] if rank else (), decoders)

    def _paper(self) -> Maps:
        encoders, decoders = [], []
        for layer in self.sums.sent:
            producer, consumer = self.sums.shapes["producer"], self.sums.shapes["consumer"]
            heads = consumer[2] if self.wanted.heads == "each" else 1
            if heads > 1 and producer[2] != heads:
                raise UnsupportedError(f"heads='each': the producer has {producer[2]} heads of keys, the consumer {heads}. Use 'joint'.")
            ranks = self.wanted.ranks or tuple(max(1, self.wanted.directions(width)) for width in consumer[:2])
            if any(rank > width for rank, width in zip(ranks, consumer, strict=False)):
                raise ConfigError.of("ranks", f"at most {consumer[0]} codes of keys and {consumer[1]} of values", ranks)
            columns = (
                (slice(0, producer[0]), slice(0, consumer[0])),
                (slice(producer[0], sum(producer[:2])), slice(consumer[0], sum(consumer[:2]))),
            )
            moments = self.sums.moments[layer]
            ridge = self.wanted.ridge_for(moments)
            keys, values = (joint_svd(moments, own, rank, ridge, heads) for own, rank in zip(columns, ranks, strict=True))
            encoders.append(PartEncoder(part_name(layer), "reuse", (layer,), {"k": keys.encode, "v": values.encode}))
            weights = Decoder(codes=torch.block_diag(keys.decode, values.decode))
            decoders.append(LayerDecoder(layer, part_name(layer), "reuse", weights))
            self.ranks[layer] = sum(ranks)
        return Maps(encoders, decoders)
