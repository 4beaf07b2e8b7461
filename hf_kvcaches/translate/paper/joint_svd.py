"""The paper's Reuse: keys and values each for themselves, in closed form on second moments.

"Semantic Cache Distillation", equations 6 and 7. **Departs from the paper**: codes have 16 bits and a calibrated step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvcaches.errors import ConfigError, UnsupportedError
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.translate.maps import LayerDecoder, Maps, PartEncoder
from hf_kvcaches.translate.moments import BlockMoments, fit_ridge
from hf_kvcaches.translate.quantizing import fixed_quantizer
from hf_kvcaches.translate.reading import TextSums
from hf_kvcaches.translate.solving import part_name


class JointSVD(NamedTuple):
    """The paper's translator of keys, or of values.

    Args:
        encode: (producer, rank), float32.
        decode: (rank, consumer), float32.
    """

    encode: torch.Tensor
    decode: torch.Tensor


def paper_maps(reading: TextSums, lowest: int, budget: float) -> Maps:
    """The maps of all layers that are sent.

    Args:
        lowest: How many layers the consumer runs.
        budget: Bytes of a token, shared out equally.
    """
    config, sources, sent = reading.config, reading.pair.sources, reading.sent(lowest)
    [width] = config.all_widths
    encoders, decoders = [], []
    for layer in sent:
        source, (heads, *dims) = sources[layer], reading.shapes[layer]
        widths = [heads * dim for dim in dims]
        if config.heads == "each" and reading.heads[source] != heads:
            raise UnsupportedError(
                f"heads='each': the producer has {reading.heads[source]} heads of keys, the consumer {heads}. Use 'joint'."
            )
        # Gains take a byte.
        rank = max(1, int(4 * (budget / len(sent) - 1) / width))
        ranks = config.ranks or tuple(min(rank, own) for own in widths)
        if any(own > most for own, most in zip(ranks, widths, strict=True)):
            raise ConfigError.of("ranks", f"at most {widths[0]} codes of keys and {widths[1]} of values", ranks)
        moments = reading.moments[lowest, (layer,)]
        keys = moments.places["producer"].stop - moments.places["producer"].start, moments.places["consumer"]
        half = keys[0] * dims[0] // sum(dims)
        columns = ((slice(0, half), slice(0, widths[0])), (slice(half, keys[0]), slice(widths[0], sum(widths))))
        parts = [
            joint_svd(moments, own, rank, reading.ridge(moments), heads if config.heads == "each" else 1)
            for own, rank in zip(columns, ranks, strict=True)
        ]
        encode, decode = (torch.block_diag(*(part[number] for part in parts)) for number in (0, 1))
        quantizer = fixed_quantizer(reading.samples["states", source] @ encode.to(reading.samples["states", source]), width)
        encoders.append(
            PartEncoder(part_name((layer,)), "states", (source,), source, encode, None, encode.new_zeros(sum(ranks)), quantizer)
        )
        decoders.append(LayerDecoder(layer, part_name((layer,)), "states", reading.shapes[layer], Decoder(codes=decode)))
    return Maps(sorted(encoders, key=lambda encoder: max(encoder.needs)), decoders)


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
