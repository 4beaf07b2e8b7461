"""The paper's factorisation of keys, or of values, in closed form on second moments."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvcaches.translate.moments import BlockMoments
from hf_kvcaches.translate.ridge import fit_ridge


class JointSVD(NamedTuple):
    """The paper's translator of keys, or of values.

    Args:
        encode: (producer, rank), float32.
        decode: (rank, consumer), float32.
    """

    encode: torch.Tensor
    decode: torch.Tensor


def joint_svd(moments: BlockMoments, columns: tuple[slice, slice], rank: int, ridge: float, heads: int = 1) -> JointSVD:
    """Latents that both models share, by a truncated SVD of their states side by side, and a ridge encoder (equations 6 and 7).

    Args:
        ridge: As a share of the mean square of the producer's states.
        heads: How many groups of columns are factorised for themselves; 1 for all jointly.
    """
    widths = [(columns[side].stop - columns[side].start) // heads for side in (0, 1)]
    encoders, decoders = [], []
    for head in range(heads):
        own, share = rank // heads + (head < rank % heads), []
        for side, width in enumerate(widths):
            start = columns[side].start + head * width
            share.append(slice(start, start + width))
        aa, ab, bb = (
            moments.of(first, second)[share[0 if first == "producer" else 1], share[0 if second == "producer" else 1]]
            for first, second in (("producer", "producer"), ("producer", "consumer"), ("consumer", "consumer"))
        )
        both = torch.cat([torch.cat([aa, ab], dim=1), torch.cat([ab.T, bb], dim=1)])
        latents = torch.linalg.eigh(both)[1].flip(1)[:, :own]
        encoders.append(fit_ridge(aa, torch.cat([aa, ab], dim=1) @ latents, ridge))
        decoders.append(latents[widths[0] :].T)
    return JointSVD(torch.block_diag(*encoders).float(), torch.block_diag(*decoders).float())
