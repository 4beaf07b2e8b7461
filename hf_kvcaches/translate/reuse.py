"""Reduced-rank regression: which few numbers of a producer's keys and values a consumer's follow from best.

Of all maps of a rank, the one with the least error in a metric, once what the consumer knows of each token for nothing has been taken out:
a closed form on second moments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvcaches.core.moments import roots
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.translate.moments import BlockMoments, fit_ridge

# What is below this share of a variance is made of rounding.
_ROUNDING = 1e-12


class ReducedRank(NamedTuple):
    """Regression at full rank, from which any directions are taken. Coefficients are in the metric's unit, and 0 in the mean.

    Args:
        strengths: What each direction takes off the error in the metric, descending.
        encode: (producer, directions), float64.
        side: From the block "own", (own, directions), or None.
        shift: (directions,).
        decode: (directions, consumer).
        producer: What of the coefficients' source follows from what is known, (1 + known, producer).
        consumer: What follows of the consumer's states, (1 + known, consumer).
    """

    strengths: torch.Tensor
    encode: torch.Tensor
    side: torch.Tensor | None
    shift: torch.Tensor
    decode: torch.Tensor
    producer: torch.Tensor
    consumer: torch.Tensor

    def coefficients(self, states: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
        """Of all directions, (tokens, directions).

        Args:
            states: The producer's, (tokens, producer).
            own: The block "own", (tokens, own).
        """
        made = states.to(self.encode) @ self.encode + self.shift
        return made if self.side is None or own is None else made + own.to(self.side) @ self.side

    def encoder(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Weights, side and shift of some directions, float32."""
        kept = kept.to(self.encode.device)
        return self.encode[:, kept].float(), None if self.side is None else self.side[:, kept].float(), self.shift[kept].float()

    def decoder(self, kept: torch.Tensor | None, columns: slice = slice(None)) -> Decoder:
        """From what is known and some directions; None for none of them."""
        kept = torch.zeros(0, dtype=torch.int64) if kept is None else kept
        kept = kept.to(self.encode.device)
        encode, decode = self.encode[:, kept], self.decode[kept]
        known = self.consumer - self.producer @ encode @ decode
        known[0] -= self.shift[kept] @ decode
        known = known[:, columns].float()
        codes = decode[:, columns].float() if len(kept) else None
        return Decoder(side=known[1:] if len(known) > 1 else None, codes=codes, bias=known[0])


def reduced_rank(moments: BlockMoments, metric: torch.Tensor, ridge: float, known: bool = True) -> ReducedRank:
    """Fits all ranks at once.

    Args:
        moments: Of the blocks "one" (a column of ones), "side" (what the consumer has for nothing), "producer" and "consumer"; and "own",
            if the producer has something like "side", whose part of the producer's states then need not be sent.
        metric: What errors cost, (consumer, consumer), symmetric and not negative.
        ridge: As a share of the mean variance of what is regressed on.
        known: Whether the consumer uses "side".
    """
    own_slopes = None
    if known and "own" in moments.places:
        own_slopes = fit_ridge(moments.spread("own", "own"), moments.spread("own", "producer"), ridge)
        moments = moments.without("producer", "own", own_slopes)
    spread, means = moments.spread, {name: moments.of("one", name) for name in ("side", "producer", "consumer")}
    maps = {}
    for name in ("producer", "consumer"):
        slopes = fit_ridge(spread("side", "side"), spread("side", name), ridge) if known else spread("side", name)[:0]
        maps[name] = torch.cat([means[name] - means["side"] @ slopes if known else means[name], slopes])
    xx, xy = spread("producer", "producer"), spread("producer", "consumer")
    size = float(xx.diagonal().mean())
    if known:
        # What regression leaves: (X - K P)'(X - K P), written out because a ridge leaves a little of K in it.
        of_producer, left, among = maps["producer"][1:], spread("side", "producer"), spread("side", "side")
        xx, xy = (
            product - left.T @ slopes - of_producer.T @ spread("side", name) + of_producer.T @ among @ slopes
            for product, name, slopes in ((xx, "producer", of_producer), (xy, "consumer", maps["consumer"][1:]))
        )
    values, vectors = torch.linalg.eigh((xx + xx.T) / 2)
    # Where states follow from what is known, or from each other, there is nothing left but rounding.
    inverse = torch.where(values > _ROUNDING * size, 1 / (values + ridge * size), 0.0)
    straight, back = roots(metric.to(xx))
    whitened = (vectors * inverse.sqrt()) @ (vectors.T @ xy) @ straight
    _, strengths, directions = torch.linalg.svd(whitened, full_matrices=False)
    encode = (vectors * inverse) @ (vectors.T @ xy) @ straight @ directions.T
    side, shift = None if own_slopes is None else -own_slopes @ encode, -(means["producer"] @ encode)[0]
    return ReducedRank(strengths, encode, side, shift, directions @ back, maps["producer"], maps["consumer"])
