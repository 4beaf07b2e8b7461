"""The paper's Patch: layers that get their attention's input as a code, and make keys and values with their own weights.

Layers are chosen as the paper chooses them, by what restoring the consumer's own keys and values would gain (`routing`). A translated input
restores only a part of that, so each chosen layer is measured again on held-out texts, and stays a reused one where that is better.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.arguments import Decoder
from hf_kvcaches.translate.aligner import MLPAligner, train_aligner
from hf_kvcaches.translate.config import FitOptions
from hf_kvcaches.translate.maps import LayerDecoder, Maps, PartEncoder
from hf_kvcaches.translate.paper.routing import Route, select
from hf_kvcaches.translate.quantizing import fit_quantizers
from hf_kvcaches.translate.reading import TextSums, timed
from hf_kvcaches.translate.regression import BlockMoments, fit_ridge, reduced_rank
from hf_kvcaches.translate.solving import part_name
from hf_kvcaches.translate.trial import Trial, closeness, mean_score, predictions

# A patch must gain this share of what the layer's own keys and values would gain: it costs time at each prompt.
_LEAST_GAIN = 0.1
_HIDDEN_WIDTH, _STEPS, _MOST_ROWS = 2, 400, 65536

# A token's side information, and both models' inputs of a layer's attention: (tokens, width) each.
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Patch = tuple[PartEncoder | None, LayerDecoder]


def patch(
    sums: TextSums,
    maps: Maps,
    options: FitOptions,
    texts: Sequence[torch.Tensor],
    trials: Sequence[Trial],
    measured: dict[str, float],
) -> tuple[Maps, Route]:
    """Choose layers unless they are given, fit their maps, and keep the chosen ones that are better than reuse.

    Args:
        maps: Of `sums`, with reused layers only.
        texts: Those that `sums` were read from.
    """
    layers, score = sums.sent, options.score or closeness
    if options.patch_layers != "auto":
        route = Route(_checked(options.patch_layers, layers))
        with timed(sums.seconds, "patch"):
            return _with(maps, _fit_patches(sums, maps, route.patched, texts, options.progress)), route
    if not trials:
        return maps, Route(())

    def translated(maps: Maps) -> list[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
        return [trial.translated(maps, sums.lowest) for trial in trials]

    with timed(sums.seconds, "routing"):
        reused = translated(maps)

        def restored(restored_layers: frozenset[int]) -> float:
            left = [{layer: states[layer] for layer in states if layer not in restored_layers} for states in reused]
            return mean_score(trials, predictions(trials, left), score)

        logits = predictions(trials, reused)
        measured["reuse alone"], best = -mean_score(trials, logits), mean_score(trials, logits, score)
        route = select(restored, layers, pool=8, most=6)
    with timed(sums.seconds, "patch"):
        patches = _fit_patches(sums, maps, route.patched, texts, options.progress)
        patched = list[int]()
        for layer in (step.layer for step in route.steps if step.layer in route.patched):
            candidate = _with(maps, {layer: patches[layer]})
            predicted = predictions(trials, translated(candidate))
            gain = mean_score(trials, predicted, score) - best
            if gain >= _LEAST_GAIN * route.sensitivity[layer]:
                maps, best, patched = candidate, best + gain, [*patched, layer]
                measured["with patches"] = -mean_score(trials, predicted)
    return maps, Route(tuple(sorted(patched)), route.sensitivity, route.steps, route.efficiencies)


def _checked(layers: Any, sent: Sequence[int]) -> tuple[int, ...]:
    if isinstance(layers, str) or not isinstance(layers, Sequence) or any(layer not in sent for layer in layers):
        raise ConfigError.of("patch_layers", f"'auto', None or some of the layers that are sent, {list(sent)}", layers)
    return tuple(sorted(set(layers)))


def _with(maps: Maps, patches: Mapping[int, Patch]) -> Maps:
    """Return maps in which some layers are patched."""
    encoders = {part_name((layer,)): encoder for layer, (encoder, _) in patches.items()}
    decoders = [patches[decoder.layer][1] if decoder.layer in patches else decoder for decoder in maps.decoders]
    return Maps([patch for encoder in maps.encoders if (patch := encoders.get(encoder.part, encoder)) is not None], decoders)


def _fit_patches(sums: TextSums, maps: Maps, layers: Sequence[int], texts: Sequence[torch.Tensor], progress: bool) -> dict[int, Patch]:
    """Fit the maps of the patched layers, from one more pass over the texts."""
    if not layers:
        return {}
    moments: dict[int, BlockMoments] = defaultdict(BlockMoments)
    rows: dict[int, list[Rows]] = {layer: [] for layer in layers}
    tokens = 0
    for ids in tqdm(texts, unit=" texts", desc="Reading inputs", disable=not progress or compat.process()[0] > 0):
        producer, consumer = sums.pair.states(ids, {sums.lowest, *layers})
        side = consumer[sums.lowest].of("input")
        for layer in layers:
            source, target = (states.of("input").to(side.device) for states in (producer[sums.pair.sources[layer]], consumer[layer]))
            # The paper's consumer has nothing but the codes.
            known = {} if sums.config.method == "paper" else {"side": side}
            moments[layer].add(**known, producer=source, consumer=target, states=consumer[layer].pair)
            if tokens < _MOST_ROWS:
                rows[layer].append((side, source, target))
        tokens += len(ids)
    budgets = {encoder.part: encoder.quantizer.rows for encoder in maps.encoders}
    return {layer: _fit_patch(sums, layer, moments[layer], rows[layer], budgets.get(part_name((layer,)), 0)) for layer in layers}


def _fit_patch(sums: TextSums, layer: int, moments: BlockMoments, rows: Sequence[Rows], budget: int) -> Patch:
    """Fit the maps of one layer.

    Args:
        budget: Bytes of a token, as many as the layer has without a patch.
    """
    source, shape, part = sums.pair.sources[layer], sums.shapes[layer], part_name((layer,))
    # An error of the input costs what the errors of the keys and values that follow from it cost.
    slopes = fit_ridge(moments.covariance("consumer", "consumer"), moments.covariance("consumer", "states"), sums.ridge(moments))
    metric = sums.metric(layer, sums.moments[layer,].covariance("consumer", "consumer")).to(slopes)
    fit = reduced_rank(moments, slopes @ metric @ slopes.T, sums.ridge(moments))
    sample = torch.cat([fit.coefficients(inputs, None) for _, inputs, _ in rows])
    [(directions, quantizer)] = fit_quantizers([sample], [fit.strengths], budget, sums.config.all_widths)
    encoder = None
    if quantizer is not None:
        encoder = PartEncoder(part, "input", (source,), source, *fit.encoder(directions), quantizer)
    weights, name = fit.decoder(directions), None if encoder is None else part
    if sums.config.aligner == "ridge":
        return encoder, LayerDecoder(layer, name, "input", shape, weights)
    return encoder, LayerDecoder(layer, name, "input", shape, Decoder(), _trained(encoder, weights, rows))


def _trained(encoder: PartEncoder | None, weights: Decoder, rows: Sequence[Rows]) -> MLPAligner:
    """Train an aligner that starts from the linear map."""
    inputs = []
    for side, source, _ in rows:
        parts = [] if weights.side is None else [side.float()]
        if encoder is not None:
            coefficients = source.float() @ encoder.weights.to(source.device) + encoder.shift.to(source.device)
            parts.append(encoder.quantizer.decode(encoder.quantizer.encode(coefficients)).to(side.device))
        inputs.append(torch.cat(parts, dim=1))
    linear = torch.cat([part for part in weights[:2] if part is not None]).to(inputs[0].device)
    aligner = MLPAligner(linear, weights.bias, hidden=_HIDDEN_WIDTH * linear.shape[1])
    with torch.inference_mode(False):
        train_aligner(aligner, torch.cat(inputs), torch.cat([target for _, _, target in rows]).float(), steps=_STEPS)
    return aligner.cpu().eval()
