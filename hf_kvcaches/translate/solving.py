"""From sums over texts to maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvcaches.translate.maps import LayerDecoder, Maps, PartEncoder
from hf_kvcaches.translate.quantizing import fit_quantizers
from hf_kvcaches.translate.reading import TextSums
from hf_kvcaches.translate.regression import ReducedRank, reduced_rank


def part_name(layers: tuple[int, ...]) -> str:
    """Return the name of the part that carries some layers."""
    return f"layer.{layers[0]}" if len(layers) == 1 else f"layers.{layers[0]}-{layers[-1]}"


def joint_maps(sums: TextSums, budget: float) -> Maps:
    """Fit the maps of all layers that are sent, within a budget of bytes of a token."""
    fits = []
    for layers in sums.groups:
        moments = sums.moments[layers]
        covariance = moments.covariance("consumer", "consumer")
        metrics = [sums.metric(layer, covariance[columns, columns]) for layer, columns in sums.columns(layers).items()]
        fits.append(reduced_rank(moments, torch.block_diag(*metrics), sums.ridge(moments)))
    return quantized_maps(sums, fits, budget)


def quantized_maps(sums: TextSums, fits: Sequence[ReducedRank], budget: float) -> Maps:
    """Allot a budget of bytes of a token to the directions of some fits, one for each group of layers, and return their maps."""
    samples = [fit.coefficients(sums.samples[layers], sums.samples["producer_side"]) for layers, fit in zip(sums.groups, fits, strict=True)]
    quantized = fit_quantizers(samples, [fit.strengths for fit in fits], budget, sums.config.all_widths)
    encoders, decoders = [], []
    for layers, fit, (directions, quantizer) in zip(sums.groups, fits, quantized, strict=True):
        part = None
        if quantizer is not None:
            part, sources = part_name(layers), sums.pair.sources_of(layers)
            encoders.append(PartEncoder(part, "states", sources, sums.pair.sources[sums.lowest], *fit.encoder(directions), quantizer))
        for layer, columns in sums.columns(layers).items():
            decoders.append(LayerDecoder(layer, part, "states", sums.shapes[layer], fit.decoder(directions, columns)))
    return Maps(sorted(encoders, key=lambda encoder: max(encoder.needs)), decoders)
