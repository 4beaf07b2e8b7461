"""Patched layers: which, and the maps that give a consumer its attention's input there.

Layers are chosen as the paper chooses them, by what restoring the consumer's own states would gain (`routing`). What is then really put in
is a translated input, so each chosen layer is measured again on texts kept apart, and stays a reused one where that is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from hf_kvcaches import compat
from hf_kvcaches.core.calibrating import divergence
from hf_kvcaches.core.growing import GrowingCache
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.kernels.rebuild import Decoder
from hf_kvcaches.translate.calibration import Clock, Pair, Wanted
from hf_kvcaches.translate.codes import Part, pack
from hf_kvcaches.translate.maps import LayerDecoder, Maps, PartEncoder
from hf_kvcaches.translate.moments import BlockMoments
from hf_kvcaches.translate.paper.aligner import MLPAligner, train_aligner
from hf_kvcaches.translate.paper.routing import Route, select
from hf_kvcaches.translate.reuse import reduced_rank
from hf_kvcaches.translate.ridge import fit_ridge
from hf_kvcaches.translate.solving import Solver, part_name
from hf_kvcaches.translate.states import PromptTokens, ReadingCache, state_of_input

# Of a text kept apart, so much is asked for behind the rest: a quarter, and no more than so many tokens.
_ASKED = 32
# Of what a layer's own states would gain, a patch has to bring this share: it costs time at each prompt.
_WORTH = 0.1
_HIDDEN_WIDTH, _STEPS, _MOST_ROWS = 2, 400, 65536

Pairs = dict[int, tuple[torch.Tensor, torch.Tensor]]


class _TrialCache(GrowingCache):
    """Holds all keys and values of layers with a window, too: their masks look no further."""

    own_layer_types = ReadingCache.own_layer_types


class Trial:
    """One text kept apart: what the consumer says behind its beginning, with this or that in the place of its own keys and values.

    Args:
        lowest: The highest layer that the consumer has for itself.
    """

    def __init__(self, pair: Pair, ids: torch.Tensor, lowest: int) -> None:
        self.pair = pair
        asked = max(2, min(_ASKED, len(ids) // 4))
        self.begun, self.asked = ids[:-asked], ids[-asked:]
        self.producer, self.consumer = pair.states(self.begun, lowest, hidden=range(lowest + 1, pair.layers))
        known = self.consumer[lowest].hidden
        assert known is not None
        self.known = known
        self.alone = self.answer({})

    def answer(self, exchanged: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Logits, (places, vocabulary).

        Args:
            exchanged: Keys without rotation and values of some layers, (tokens, width) each; others are the consumer's own.
        """
        model, tokens = self.pair.consumer, len(self.begun)
        cache = _TrialCache(model.config)
        positions = torch.arange(tokens)
        for index, layer in enumerate(cache.layers):
            state = self.consumer[index]
            keys, values = exchanged.get(index, (state.keys, state.values))
            keys, values = (part.to(state.keys).unflatten(1, (state.heads, -1)).transpose(0, 1)[None] for part in (keys, values))
            geometry = self.pair.rotation.layers[index]
            layer.update(geometry.rotate(keys, positions.to(keys.device)) if geometry.kind == "rope" else keys, values)
        ids = self.asked[None].to(compat.input_device(model))
        where = torch.arange(tokens, tokens + ids.shape[1], device=ids.device)[None]
        logits: torch.Tensor = model(input_ids=ids, position_ids=where, past_key_values=cache, use_cache=True).logits[0]
        return logits

    def translated(self, maps: Maps, wanted: Wanted) -> Pairs:
        """Keys and values of all layers that are sent."""
        codes: dict[str | None, torch.Tensor] = {}
        for encoder in maps.encoders:
            part = encoder.part_of([self.producer[layer] for layer in encoder.layers], wanted.code_dtype, wanted.group)
            codes[encoder.part] = part.joined().to(self.known.device)
        found = {}
        for decoder in maps.decoders:
            given = decoder.apply(self.known, codes.get(decoder.part))
            if decoder.kind == "patch":
                state = state_of_input(self.pair.consumer, decoder.layer, given, PromptTokens.of(self.begun).to(given.device))
                found[decoder.layer] = state.keys, state.values
            else:
                width = self.consumer[decoder.layer].keys.shape[1]
                found[decoder.layer] = given[:, :width], given[:, width:]
        return found


def patch(
    pair: Pair,
    solver: Solver,
    maps: Maps,
    wanted: Wanted,
    kept: Sequence[torch.Tensor],
    apart: Sequence[torch.Tensor],
    clock: Clock,
    progress: bool,
) -> tuple[Maps, Route, dict[str, float]]:
    """Chooses layers, fits their maps, and keeps those that are better than reuse."""
    named = None if wanted.patch_layers in ("auto", None) else _named(wanted.patch_layers, solver.sums.sent)
    if named == [] or (named is None and not apart):
        return maps, Route(()), {}
    with clock.stage("routing"):
        trials = [Trial(pair, ids, wanted.recompute_layers) for ids in apart]
        judge = _Judge(trials, wanted)
        reused = [trial.translated(maps, wanted) for trial in trials]

        def score(restored: frozenset[int]) -> float:
            return judge.of([{layer: states for layer, states in own.items() if layer not in restored} for own in reused])

        measured = {"reuse alone": judge.divergence(reused)} if trials else {}
        route = Route(tuple(named)) if named else select(score, solver.sums.sent, pool=8, most=6)
    if not route.patched:
        return maps, route, measured
    with clock.stage("patch"):
        made = _fit_patches(pair, solver, route.patched, wanted, kept, progress)
        if named:
            chosen = _with(maps, made, route.patched)
        else:
            chosen, best, taken = maps, judge.of(reused), list[int]()
            for layer in (step.layer for step in route.steps if step.layer in route.patched):
                tried = _with(chosen, made, (layer,))
                found = judge.of([trial.translated(tried, wanted) for trial in trials])
                if found - best >= _WORTH * route.sensitivity[layer]:
                    chosen, best, taken = tried, found, [*taken, layer]
            route = Route(tuple(sorted(taken)), route.sensitivity, route.steps, route.efficiencies)
        if trials and route.patched:
            measured["with patches"] = judge.divergence([trial.translated(chosen, wanted) for trial in trials])
    return chosen, route, measured


class _Judge:
    """The score of what is put in the place of the consumer's own keys and values."""

    def __init__(self, trials: Sequence[Trial], wanted: Wanted) -> None:
        self.trials = trials
        self.score: Callable[[torch.Tensor, torch.Tensor], float] = wanted.score or _closeness

    def of(self, exchanged: Sequence[Mapping[int, Any]]) -> float:
        """The mean over all texts."""
        scores = [self.score(trial.alone, trial.answer(own)) for trial, own in zip(self.trials, exchanged, strict=True)]
        return math.fsum(map(float, scores)) / len(scores)

    def divergence(self, exchanged: Sequence[Mapping[int, Any]]) -> float:
        """The mean KL over all texts."""
        found = [float(divergence(t.alone, t.answer(own)).mean()) for t, own in zip(self.trials, exchanged, strict=True)]
        return math.fsum(found) / len(found)


def _closeness(alone: torch.Tensor, found: torch.Tensor) -> float:
    return -float(divergence(alone, found).mean())


def _named(layers: Any, sent: Sequence[int]) -> list[int]:
    if isinstance(layers, str) or not isinstance(layers, Sequence) or any(layer not in sent for layer in layers):
        raise ConfigError.of("patch_layers", f"'auto', None or some of the layers that are sent, {list(sent)}", layers)
    return sorted(set(layers))


def _with(maps: Maps, made: Mapping[int, tuple[PartEncoder | None, LayerDecoder]], layers: Sequence[int]) -> Maps:
    """Maps in which some layers are patched."""
    own = {part_name(layer): made[layer][0] for layer in layers}
    encoders = [own.get(encoder.part) or encoder for encoder in maps.encoders]
    return Maps(encoders, [made[each.layer][1] if each.layer in layers else each for each in maps.decoders])


def _fit_patches(
    pair: Pair, solver: Solver, layers: Sequence[int], wanted: Wanted, kept: Sequence[torch.Tensor], progress: bool
) -> dict[int, tuple[PartEncoder | None, LayerDecoder]]:
    """Maps of the patched layers, from one more pass over the texts."""
    moments: dict[int, BlockMoments] = {}
    rows: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {layer: [] for layer in layers}
    count = 0
    for ids in tqdm(kept, unit=" texts", desc="Reading inputs", disable=not progress or compat.process()[0] > 0):
        producer, consumer = pair.states(ids, wanted.recompute_layers, hidden=layers)
        known = consumer[wanted.recompute_layers].hidden
        assert known is not None
        for layer in layers:
            given, target = producer[layer].hidden, consumer[layer].hidden
            assert given is not None
            assert target is not None
            if layer not in moments:
                widths = {"one": 1, "side": known.shape[1], "producer": given.shape[1], "consumer": target.shape[1]}
                moments[layer] = BlockMoments(widths | {"pair": consumer[layer].pair.shape[1]}, known.device)
            given, target = given.to(known.device), target.to(known.device)
            moments[layer].add(
                one=known.new_ones(len(known), 1), side=known, producer=given, consumer=target, pair=consumer[layer].pair.to(known.device)
            )
            if wanted.aligner == "mlp" and count < _MOST_ROWS:
                rows[layer].append((known, given, target))
        count += len(ids)
    return {layer: _fit_patch(layer, moments[layer], solver, wanted, rows[layer]) for layer in layers}


def _fit_patch(
    layer: int, moments: BlockMoments, solver: Solver, wanted: Wanted, rows: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
) -> tuple[PartEncoder | None, LayerDecoder]:
    # What errors of the input cost: those of the keys and values that follow from it.
    mean = moments.of("one", "consumer")
    spread, with_pair = (moments.of("consumer", name) - mean.T @ moments.of("one", name) for name in ("consumer", "pair"))
    ridge = wanted.ridge_for(moments)
    follows = fit_ridge(spread, with_pair, ridge)
    inner = solver.metrics.get(layer)
    metric = follows @ follows.T if inner is None else follows @ inner.to(follows.device) @ follows.T
    # The paper's consumer has nothing but the codes.
    fit = reduced_rank(moments, metric, ridge, ("one",) if wanted.method == "paper" else ("one", "side"))
    # As many codes as the layer has without a patch; where nothing is sent, none.
    rank = min(solver.ranks.get(layer, 0), fit.encode.shape[1])
    encoder = PartEncoder(part_name(layer), "patch", (layer,), {"h": fit.encoder(rank)}) if rank else None
    part, weights = part_name(layer) if rank else None, fit.decoder(rank)
    if wanted.aligner == "ridge":
        return encoder, LayerDecoder(layer, part, "patch", weights)
    return encoder, LayerDecoder(layer, part, "patch", Decoder(), _trained(layer, encoder, weights, wanted, rows))


def _trained(
    layer: int,
    encoder: PartEncoder | None,
    weights: Decoder,
    wanted: Wanted,
    rows: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> MLPAligner:
    """An aligner that starts from the linear map."""
    inputs, targets = [], []
    for known, given, target in rows:
        parts = [] if weights.side is None else [known.float()]
        if encoder is not None:
            coded = pack((given.float() @ encoder.weights["h"].to(given.device)).cpu(), wanted.code_dtype, wanted.group)
            parts.append(Part(encoder.part, {"h": coded}).decoded("h", torch.float32).to(known.device))
        inputs.append(torch.cat(parts, dim=1))
        targets.append(target.float())
    linear = torch.cat([part for part in weights[:2] if part is not None]).to(inputs[0].device)
    aligner = MLPAligner(linear, weights.bias, hidden=_HIDDEN_WIDTH * linear.shape[1])
    with torch.inference_mode(False):
        train_aligner(aligner, torch.cat(inputs), torch.cat(targets), steps=_STEPS)
    return aligner.cpu().eval()
