"""The paper's Reuse: keys and values each for themselves, in closed form on second moments.

"Semantic Cache Distillation", equations 6 and 7. **Departs from the paper**: codes have 16 bits and a calibrated step.
"""

from __future__ import annotations

import math

import torch

from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.translate.maps import Maps
from hf_kvcaches.translate.reading import TextSums
from hf_kvcaches.translate.regression import BlockMoments, ReducedRank, fit_ridge
from hf_kvcaches.translate.solving import quantized_maps


def paper_maps(sums: TextSums, budget: float) -> Maps:
    """Fit the maps of all layers that are sent; each has the same share of a budget of bytes of a token."""
    # What is within the ranks has bits at any price.
    return quantized_maps(sums, [_fit(sums, layer, budget / len(sums.sent)) for layer in sums.sent], math.inf)


def _fit(sums: TextSums, layer: int, budget: float) -> ReducedRank:
    config, moments = sums.config, sums.moments[layer,]
    producer_heads, *producer_dims = sums.producer_shapes[sums.pair.sources[layer]]
    heads, *dims = sums.shapes[layer]
    if config.heads == "each" and producer_heads != heads:
        raise UnsupportedError(f"heads='each': the producer has {producer_heads} heads of keys, the consumer {heads}. Use 'joint'.")
    # The gain takes at most a byte.
    rank = max(1, int(4 * (budget - 1) / config.all_widths[0]))
    ranks = config.ranks or [min(rank, heads * dim) for dim in dims]
    if any(rank > heads * dim for rank, dim in zip(ranks, dims, strict=True)):
        raise ConfigError.of("ranks", f"at most {heads * dims[0]} codes of keys and {heads * dims[1]} of values", ranks)
    groups, producer_stop, stop, factors = heads if config.heads == "each" else 1, 0, 0, []
    for rank, producer_dim, dim in zip(ranks, producer_dims, dims, strict=True):
        for group in range(groups):
            producer = slice(producer_stop, producer_stop := producer_stop + producer_heads * producer_dim // groups)
            consumer = slice(stop, stop := stop + heads * dim // groups)
            share = rank // groups + (group < rank % groups)
            factors.append(joint_svd(moments, producer, consumer, share, sums.ridge(moments)))
    encode, decode = (torch.block_diag(*parts) for parts in zip(*factors, strict=True))
    nothing = torch.zeros_like(encode[:1])
    return ReducedRank(torch.full_like(encode[0], math.inf), encode, None, nothing[0], decode, nothing, torch.zeros_like(decode[:1]))


def joint_svd(moments: BlockMoments, producer: slice, consumer: slice, rank: int, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Factorise both models' states side by side by a truncated SVD, with a ridge encoder (equations 6 and 7).

    Args:
        producer: Columns of the producer's states.
        consumer: Columns of the consumer's.
        ridge: As a share of the mean square of the producer's states.

    Returns:
        The weights to the codes, (producer, rank), and from them, (rank, consumer).
    """
    xx, xy = moments.of("producer", "producer")[producer, producer], moments.of("producer", "consumer")[producer, consumer]
    yy = moments.of("consumer", "consumer")[consumer, consumer]
    both = torch.cat([torch.cat([xx, xy], dim=1), torch.cat([xy.T, yy], dim=1)])
    latents = torch.linalg.eigh(both)[1].flip(1)[:, :rank]
    return fit_ridge(xx, both[: len(xx)] @ latents, ridge), latents[len(xx) :].T
