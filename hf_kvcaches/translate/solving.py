"""From sums to maps: codes, and how a consumer's keys and values follow from them."""

from __future__ import annotations

import torch

from hf_kvcaches.translate.maps import LayerDecoder, Maps, PartEncoder
from hf_kvcaches.translate.quantizing import fit_quantizers
from hf_kvcaches.translate.reading import TextSums
from hf_kvcaches.translate.reuse import ReducedRank, reduced_rank


def part_name(layers: tuple[int, ...]) -> str:
    """Of the part that some layers are sent in."""
    return f"layer.{layers[0]}" if len(layers) == 1 else f"layers.{layers[0]}-{layers[-1]}"


class Solver:
    """Makes maps of sums.

    Args:
        lowest: How many layers the consumer runs.
        payload: Bytes that may be sent, as a share of bfloat16 keys and values of all layers.

    Attributes:
        metrics: What errors of each layer's keys and values cost.
    """

    def __init__(self, reading: TextSums, lowest: int, payload: float) -> None:
        self.reading, self.lowest = reading, lowest
        self.budget = payload * 2 * reading.numbers
        self.metrics: dict[int, torch.Tensor] = {}

    def solve(self) -> Maps:
        """The maps of the method that was asked for, without patched layers."""
        if self.reading.config.method == "paper":
            from hf_kvcaches.translate.paper.joint_svd import paper_maps

            return paper_maps(self.reading, self.lowest, self.budget)
        groups = self.reading.groups(self.lowest)
        if not groups:
            return Maps((), ())
        fits = [self._fit(layers) for layers in groups]
        quantized = fit_quantizers(
            [self._sample(layers, fit) for layers, fit in zip(groups, fits, strict=True)],
            [fit.strengths for fit in fits],
            self.budget,
            self.reading.config.all_widths,
        )
        encoders, decoders, sources = [], [], self.reading.pair.sources
        for layers, fit, chosen in zip(groups, fits, quantized, strict=True):
            kept, part = (None, None) if chosen is None else (chosen[0], part_name(layers))
            if chosen is not None:
                used, own = tuple(dict.fromkeys(sources[layer] for layer in layers)), sources[self.lowest]
                encoders.append(PartEncoder(part_name(layers), "states", used, own, *fit.encoder(chosen[0]), chosen[1]))
            for layer, columns in self.reading.columns(layers).items():
                decoders.append(LayerDecoder(layer, part, "states", self.reading.shapes[layer], fit.decoder(kept, columns)))
        return Maps(sorted(encoders, key=lambda encoder: max(encoder.needs)), decoders)

    def _fit(self, layers: tuple[int, ...]) -> ReducedRank:
        """The regression of some layers."""
        moments = self.reading.moments[self.lowest, layers]
        spread = moments.spread("consumer", "consumer")
        for layer, columns in self.reading.columns(layers).items():
            self.metrics[layer] = self.reading.metric(layer, spread[columns, columns]).to(spread.device)
        metric = torch.block_diag(*(self.metrics[layer] for layer in layers))
        return reduced_rank(moments, metric, self.reading.ridge(moments))

    def _sample(self, layers: tuple[int, ...], fit: ReducedRank) -> torch.Tensor:
        """Coefficients of the tokens of the sample."""
        samples, sources = self.reading.samples, self.reading.pair.sources
        own = samples["input", sources[self.lowest]]
        used = dict.fromkeys(sources[layer] for layer in layers)
        return fit.coefficients(torch.cat([samples["states", layer].to(own.device) for layer in used], dim=1), own)
