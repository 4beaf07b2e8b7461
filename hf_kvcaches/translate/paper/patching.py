"""Patched layers: which, and the maps that give a consumer its attention's input there.

Layers are chosen as the paper chooses them, by what restoring the consumer's own states would gain (`routing`). What is then really put in
is a translated input, so each chosen layer is measured again on texts kept apart, and stays a reused one where that is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.translate.maps import LayerDecoder, Maps, PartEncoder
from hf_kvcaches.translate.moments import BlockMoments, fit_ridge
from hf_kvcaches.translate.paper.aligner import MLPAligner, train_aligner
from hf_kvcaches.translate.paper.routing import Route, select
from hf_kvcaches.translate.quantizing import fit_quantizers
from hf_kvcaches.translate.reading import Clock
from hf_kvcaches.translate.reuse import reduced_rank
from hf_kvcaches.translate.solving import Solver, part_name
from hf_kvcaches.translate.trial import Trial, closeness, mean_score

if TYPE_CHECKING:
    from hf_kvcaches.translate.calibration import FitOptions

# Of what a layer's own states would gain, a patch has to bring this share: it costs time at each prompt.
_WORTH = 0.1
_HIDDEN_WIDTH, _STEPS, _MOST_ROWS = 2, 400, 65536

# A token's side information, and both models' inputs of a layer's attention: (tokens, width) each.
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Patch = tuple[PartEncoder | None, LayerDecoder]


def patch(
    solver: Solver,
    maps: Maps,
    options: FitOptions,
    kept: Sequence[torch.Tensor],
    trials: Sequence[Trial],
    clock: Clock,
    measured: dict[str, float],
) -> tuple[Maps, Route]:
    """Chooses layers, fits their maps, and keeps those that are better than reuse."""
    automatic, score = options.patch_layers == "auto", options.score or closeness
    named = () if automatic else tuple(_named(options.patch_layers, solver.reading.sent(solver.lowest)))
    if automatic and not trials:
        return maps, Route(())

    def scored(tried: Maps) -> float:
        return mean_score(trials, [trial.translated(tried, solver.lowest) for trial in trials], score)

    with clock.stage("routing"):
        reused = [trial.translated(maps, solver.lowest) for trial in trials]

        def restored(layers: frozenset[int]) -> float:
            left = [{layer: states for layer, states in own.items() if layer not in layers} for own in reused]
            return mean_score(trials, left, score)

        if trials:
            measured["reuse alone"] = -mean_score(trials, reused)
        route = select(restored, solver.reading.sent(solver.lowest), pool=8, most=6) if automatic else Route(named)
    with clock.stage("patch"):
        made = _fit_patches(solver, maps, route.patched, kept, options.progress)
        if not automatic:
            return _with(maps, made, named), route
        chosen, best, taken = maps, scored(maps), list[int]()
        for layer in (step.layer for step in route.steps if step.layer in route.patched):
            found = scored(tried := _with(chosen, made, (layer,)))
            if found - best >= _WORTH * route.sensitivity[layer]:
                chosen, best, taken = tried, found, [*taken, layer]
        if taken:
            measured["with patches"] = -mean_score(trials, [trial.translated(chosen, solver.lowest) for trial in trials])
    return chosen, Route(tuple(sorted(taken)), route.sensitivity, route.steps, route.efficiencies)


def _named(layers: Any, sent: Sequence[int]) -> list[int]:
    if isinstance(layers, str) or not isinstance(layers, Sequence) or any(layer not in sent for layer in layers):
        raise ConfigError.of("patch_layers", f"'auto', None or some of the layers that are sent, {list(sent)}", layers)
    return sorted(set(layers))


def _with(maps: Maps, made: Mapping[int, Patch], layers: Sequence[int]) -> Maps:
    """Maps in which some layers are patched."""
    own = {part_name((layer,)): made[layer][0] for layer in layers}
    encoders = [own.get(encoder.part) or encoder for encoder in maps.encoders]
    return Maps(encoders, [made[each.layer][1] if each.layer in layers else each for each in maps.decoders])


def _fit_patches(solver: Solver, maps: Maps, layers: Sequence[int], kept: Sequence[torch.Tensor], progress: bool) -> dict[int, Patch]:
    """Maps of the patched layers, from one more pass over the texts."""
    pair, lowest = solver.reading.pair, solver.lowest
    moments: dict[int, BlockMoments] = {}
    rows: dict[int, list[Rows]] = {layer: [] for layer in layers}
    count = 0
    for ids in tqdm(kept, unit=" texts", desc="Reading inputs", disable=not progress or compat.process()[0] > 0):
        producer, consumer = pair.states(ids, {lowest, *layers})
        side = consumer[lowest].of("input")
        for layer in layers:
            given, target = producer[pair.sources[layer]].of("input").to(side.device), consumer[layer].of("input").to(side.device)
            states = consumer[layer].pair.to(side.device)
            blocks = {"one": side.new_ones(len(side), 1), "side": side, "producer": given, "consumer": target, "pair": states}
            if layer not in moments:
                moments[layer] = BlockMoments({name: block.shape[1] for name, block in blocks.items()}, side.device)
            moments[layer].add(**blocks)
            if count < _MOST_ROWS:
                rows[layer].append((side, given, target))
        count += len(ids)
    room = {encoder.part: encoder.quantizer.rows for encoder in maps.encoders}
    return {layer: _fit_patch(layer, moments[layer], solver, room.get(part_name((layer,)), 0), rows[layer]) for layer in layers}


def _fit_patch(layer: int, moments: BlockMoments, solver: Solver, budget: int, rows: Sequence[Rows]) -> Patch:
    """The maps of one layer.

    Args:
        budget: Bytes of a token, as many as the layer has without a patch; where nothing is sent, none.
    """
    reading = solver.reading
    config, ridge = reading.config, reading.ridge(moments)
    # What errors of the input cost: those of the keys and values that follow from it.
    follows = fit_ridge(moments.spread("consumer", "consumer"), moments.spread("consumer", "pair"), ridge)
    inner = solver.metrics.get(layer)
    metric = follows @ follows.T if inner is None else follows @ inner.to(follows.device) @ follows.T
    # The paper's consumer has nothing but the codes.
    fit = reduced_rank(moments, metric, ridge, config.method != "paper")
    sample = torch.cat([fit.coefficients(given, None) for _, given, _ in rows]) if budget else None
    [quantized] = [None] if sample is None else fit_quantizers([sample], [fit.strengths], budget, config.all_widths)
    kept, encoder, part, source = None, None, None, reading.pair.sources[layer]
    if quantized is not None:
        kept, part = quantized[0], part_name((layer,))
        encoder = PartEncoder(part, "input", (source,), source, *fit.encoder(kept), quantized[1])
    weights, shape = fit.decoder(kept), reading.shapes[layer]
    if config.aligner == "ridge":
        return encoder, LayerDecoder(layer, part, "input", shape, weights)
    return encoder, LayerDecoder(layer, part, "input", shape, Decoder(), _trained(encoder, weights, rows))


def _trained(encoder: PartEncoder | None, weights: Decoder, rows: Sequence[Rows]) -> MLPAligner:
    """An aligner that starts from the linear map."""
    inputs = []
    for side, given, _ in rows:
        parts = [] if weights.side is None else [side.float()]
        if encoder is not None:
            coefficients = given.float() @ encoder.weights.to(given.device) + encoder.shift.to(given.device)
            parts.append(encoder.quantizer.decode(encoder.quantizer.encode(coefficients)).to(side.device))
        inputs.append(torch.cat(parts, dim=1))
    linear = torch.cat([part for part in weights[:2] if part is not None]).to(inputs[0].device)
    aligner = MLPAligner(linear, weights.bias, hidden=_HIDDEN_WIDTH * linear.shape[1])
    with torch.inference_mode(False):
        train_aligner(aligner, torch.cat(inputs), torch.cat([target for _, _, target in rows]).float(), steps=_STEPS)
    return aligner.cpu().eval()
