"""Fitting a translator: both models read the same texts, maps are solved for, layers to run and to patch are chosen on held-out texts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.identity import require_identity
from hf_kvcaches.errors import ConfigError
from hf_kvcaches.evaluate.runner import evaluating
from hf_kvcaches.evaluate.texts import sequences
from hf_kvcaches.translate.config import FitOptions, TranslatorSettings
from hf_kvcaches.translate.maps import Maps
from hf_kvcaches.translate.pair import Pair
from hf_kvcaches.translate.paper.joint_svd import paper_maps
from hf_kvcaches.translate.paper.patching import patch
from hf_kvcaches.translate.paper.routing import Route
from hf_kvcaches.translate.reading import TextSums, timed
from hf_kvcaches.translate.solving import joint_maps
from hf_kvcaches.translate.trial import Trial, closeness, mean_score, predictions

# Every eighth text is held out to choose layers on, up to eight texts.
_HELD_OUT = 8


@torch.no_grad()
def fit(
    producer: Any, consumer: Any, tokenizer: Any, texts: Iterable[str | Sequence[int]], options: FitOptions
) -> tuple[Maps, TranslatorSettings, Route, ModelFingerprint, ModelFingerprint]:
    """Return the fields of a `CacheTranslator`; see its `fit`."""
    config, seconds, measured = options.config, dict[str, float](), dict[str, float]()
    pair = Pair(producer, consumer, tokenizer, None if config.layer_map == "fit" else config.layer_map)
    run_layers = options.run_layers(pair.layers)
    with evaluating(pair.producer), evaluating(pair.consumer):
        producer_identity = require_identity(pair.producer, "producer: the translator").fingerprint
        consumer_identity = require_identity(pair.consumer, "consumer: the translator").fingerprint
        prefixes = [ids[: options.max_length] for ids in sequences(texts, pair.tokenizer, pair.consumer) if len(ids) >= 2]
        choice = len(run_layers) > 1 or (options.patch_layers == "auto" and run_layers[0] + 1 < pair.layers)
        # A short text has no continuation to predict.
        long = [number for number, ids in enumerate(prefixes) if choice and len(ids) >= 16]
        held_out = long[_HELD_OUT - 1 :: _HELD_OUT][:_HELD_OUT]
        if choice and not held_out:
            warnings.warn("'auto' needs 8 texts of 16 tokens or more to choose on: no layers are run or patched.", stacklevel=4)
        fitted = [ids for number, ids in enumerate(prefixes) if number not in held_out]
        if len(fitted) < compat.process()[1]:
            expected = f"at least {compat.process()[1]} texts of 2 or more tokens besides the held-out ones, one for each process"
            raise ConfigError.of("texts", expected, len(fitted))
        if config.layer_map == "fit":
            with timed(seconds, "layers"):
                pair.fit_sources(fitted)
            config = replace(config, layer_map=pair.sources)
        with timed(seconds, "routing"):
            trials = [Trial(pair, prefixes[number]) for number in held_out]

        def solve(lowest: int) -> tuple[TextSums, Maps]:
            sums = TextSums(pair, config, lowest, seconds)
            sums.read(fitted, options.progress)
            with timed(seconds, "fit"):
                budget = options.payload * 2 * sum(sums.widths.values())
                return sums, (paper_maps if config.method == "paper" else joint_maps)(sums, budget)

        def measure(fit: tuple[TextSums, Maps]) -> float:
            sums, maps = fit
            with timed(seconds, "routing"):
                logits = predictions(trials, [trial.translated(maps, sums.lowest) for trial in trials])
                measured[f"{sums.lowest} layers run"] = -mean_score(trials, logits)
                return mean_score(trials, logits, options.score or closeness)

        sums, maps = max(map(solve, run_layers), key=measure) if trials and len(run_layers) > 1 else solve(run_layers[0])
        route = Route(())
        if options.patches and sums.groups:
            maps, route = patch(sums, maps, options, fitted, trials, measured)
    tokens = sum(map(len, prefixes))
    config = replace(sums.config, layers_per_code=sums.layers_per_code)
    settings = TranslatorSettings(float(options.payload), sums.lowest, config, pair.layers, len(prefixes), tokens, seconds, measured)
    return maps, settings, route, producer_identity, consumer_identity
