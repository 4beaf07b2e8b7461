"""Reduced-rank regression: which few numbers of a producer's keys and values a consumer's follow from best.

Of all maps of a rank, the one with the least error in a metric, once what the consumer knows of each token for nothing has been taken out:
a closed form on second moments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvcaches.core.moments import roots
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.translate.moments import BlockMoments
from hf_kvcaches.translate.ridge import fit_ridge

# What is below this share of a variance is made of rounding.
_ROUNDING = 1e-12


class ReducedRank(NamedTuple):
    """Regression at full rank, from which any rank is cut.

    Args:
        strengths: What each direction takes off the error in the metric, descending.
        encode: (producer, directions).
        decode: (directions, consumer).
        producer: What of the producer's states follows from what is known, (1 + known, producer).
        consumer: Likewise of the consumer's, (1 + known, consumer).
    """

    strengths: torch.Tensor
    encode: torch.Tensor
    decode: torch.Tensor
    producer: torch.Tensor
    consumer: torch.Tensor

    def encoder(self, rank: int) -> torch.Tensor:
        """(producer, rank), float32."""
        return self.encode[:, :rank].float()

    def decoder(self, rank: int, columns: slice = slice(None)) -> Decoder:
        """From what is known and that many codes."""
        known = self.consumer - self.producer @ self.encode[:, :rank] @ self.decode[:rank]
        known = known[:, columns].float()
        codes = self.decode[:rank, columns].float() if rank else None
        return Decoder(side=known[1:] if len(known) > 1 else None, codes=codes, bias=known[0])


def reduced_rank(moments: BlockMoments, metric: torch.Tensor, ridge: float, known: tuple[str, ...] = ("one", "side")) -> ReducedRank:
    """Fits all ranks at once.

    Args:
        moments: Of the blocks in `known`, "producer" and "consumer".
        metric: What errors cost, (consumer, consumer), symmetric and not negative.
        ridge: As a share of the mean variance of what is regressed on.
        known: The blocks that the consumer has for nothing; the first is a column of ones.
    """
    one, *blocks = known

    def mean(name: str) -> torch.Tensor:
        return moments.of(one, name)

    def spread(first: str, second: str) -> torch.Tensor:
        # Around the means: regularisation is not to pull those towards 0, nor to grow with them.
        return moments.of(first, second) - mean(first).T @ mean(second)

    among = torch.cat([torch.cat([spread(a, b) for b in blocks], dim=1) for a in blocks]) if blocks else mean(one)[:0, :0]
    maps, left = {}, {}
    for name in ("producer", "consumer"):
        left[name] = torch.cat([mean(name)[:0], *(spread(block, name) for block in blocks)])
        slopes = fit_ridge(among, left[name], ridge) if blocks else left[name]
        means = torch.cat([mean(one)[:, :0], *map(mean, blocks)], dim=1)
        maps[name] = torch.cat([mean(name) - means @ slopes, slopes])
    of_producer, of_consumer = maps["producer"][1:], maps["consumer"][1:]
    # What regression leaves: (X - K P)'(X - K P), written out because a ridge leaves a little of K in it.
    xx, xy = (
        spread("producer", name) - left["producer"].T @ slopes - of_producer.T @ left[name] + of_producer.T @ among @ slopes
        for name, slopes in (("producer", of_producer), ("consumer", of_consumer))
    )
    size = float(spread("producer", "producer").diagonal().mean())
    values, vectors = torch.linalg.eigh((xx + xx.T) / 2)
    # Where states follow from what is known, or from each other, there is nothing left but rounding.
    inverse = torch.where(values > _ROUNDING * size, 1 / (values + ridge * size), 0.0)
    straight, back = roots(metric.to(xx))
    whitened = (vectors * inverse.sqrt()) @ (vectors.T @ xy) @ straight
    _, strengths, directions = torch.linalg.svd(whitened, full_matrices=False)
    encode = (vectors * inverse) @ (vectors.T @ xy) @ straight @ directions.T
    # Codes of about the size 1, what follows from what is known included: half precision has to hold them.
    norms = (encode * (moments.of("producer", "producer") @ encode)).sum(0).clamp_min(1e-300).sqrt()
    return ReducedRank(strengths, encode / norms, norms[:, None] * (directions @ back), maps["producer"], maps["consumer"])
