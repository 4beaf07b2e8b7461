"""Fitting a translator: both models read the same texts, maps are solved for, layers to run and to patch are chosen by measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch

from hf_kvcaches import compat
from hf_kvcaches.core.calibrating import sequences
from hf_kvcaches.core.fingerprint import ModelFingerprint
from hf_kvcaches.core.verify import evaluating
from hf_kvcaches.errors import ConfigError, is_number, whole_number
from hf_kvcaches.translate.config import TranslatorConfig, TranslatorSettings
from hf_kvcaches.translate.maps import Maps
from hf_kvcaches.translate.pair import Pair
from hf_kvcaches.translate.paper.routing import Route
from hf_kvcaches.translate.reading import Clock, TextSums
from hf_kvcaches.translate.solving import Solver
from hf_kvcaches.translate.trial import Score, Trial, closeness, mean_score

# One text in so many is kept apart to try layers on, and no more than so many texts.
_APART, _MOST_APART = 8, 8
# Tokens that layers of both models are compared on.
_COMPARED = 4096


@dataclass(frozen=True)
class FitOptions:
    """The arguments of `CacheTranslator.fit` beside models and texts. Checked when made."""

    payload: float
    recompute_layers: int | Literal["auto"]
    patch_layers: Literal["auto"] | Sequence[int] | None
    score: Score | None
    config: TranslatorConfig
    max_length: int
    progress: bool

    def __post_init__(self) -> None:
        if not isinstance(self.config, TranslatorConfig):
            raise ConfigError.of("config", "a TranslatorConfig", type(self.config).__name__)
        if not is_number(self.payload) or not 0 <= self.payload <= 2:
            raise ConfigError.of("payload", "a share of the bytes of bfloat16 keys and values, 0 to 2", self.payload)
        if self.recompute_layers != "auto":
            expected = "a number of layers, or 'auto'"
            object.__setattr__(self, "recompute_layers", whole_number("recompute_layers", self.recompute_layers, 0, expected))
        if self.patches and self.config.method == "joint" and self.config.layers_per_code != 1:
            if self.config.layers_per_code is not None:
                raise ConfigError("patch_layers: expected codes of one layer each. Pass config=TranslatorConfig(layers_per_code=1).")
            object.__setattr__(self, "config", replace(self.config, layers_per_code=1))
        whole_number("max_length", self.max_length, 8, "at least 8 tokens")

    def run_layers(self, layers: int) -> list[int]:
        """Each number of layers that may be run, of so many."""
        if self.recompute_layers == "auto":
            return list(range(min(layers - 1, int(self.config.prefill_share * layers)) + 1))
        if self.recompute_layers >= layers:
            raise ConfigError.of("recompute_layers", f"fewer than the {layers} layers there are", self.recompute_layers)
        return [self.recompute_layers]

    @property
    def patches(self) -> bool:
        """Whether layers may be patched."""
        return self.patch_layers is not None and self.patch_layers != [] and self.patch_layers != ()


@torch.no_grad()
def fit(
    producer: Any, consumer: Any, tokenizer: Any, texts: Iterable[str | Sequence[int]], options: FitOptions
) -> tuple[Maps, TranslatorSettings, Route, ModelFingerprint, ModelFingerprint]:
    """The fields of a `CacheTranslator`; see its `fit`."""
    config, clock = options.config, Clock()
    pair = Pair(producer, consumer, tokenizer, None if config.layer_map == "fit" else config.layer_map)
    lowest = options.run_layers(pair.layers)
    measured: dict[str, float] = {}
    with evaluating(pair.producer), evaluating(pair.consumer):
        fingerprints = pair.fingerprints()
        prefixes = [ids[: options.max_length] for ids in sequences(texts, pair.tokenizer, pair.consumer) if len(ids) >= 2]
        apart = _kept_apart(prefixes) if len(lowest) > 1 or (options.patches and lowest[0] + 1 < pair.layers) else []
        kept = [ids for number, ids in enumerate(prefixes) if number not in set(apart)]
        if len(kept) < compat.process()[1]:
            expected = f"at least {compat.process()[1]} of at least 2 tokens, one for each process, beside those kept apart"
            raise ConfigError.of("texts", expected, len(kept))
        if config.layer_map == "fit":
            with clock.stage("layers"):
                pair.fit_sources(_beginning(kept))
            config = replace(config, layer_map=pair.sources)
        reading = TextSums(pair, config, lowest, len(kept))
        reading.read(kept, clock, options.progress)
        reading.join_processes()
        trials = []
        with clock.stage("routing"):
            trials = [Trial(pair, prefixes[number]) for number in apart]
        run = _choose_run(reading, options, trials, clock, measured)
        with clock.stage("fit"):
            solver = Solver(reading, run, options.payload)
            maps = solver.solve()
        route = Route(())
        if options.patches and reading.groups(run):
            from hf_kvcaches.translate.paper.patching import patch

            maps, route = patch(solver, maps, options, kept, trials, clock, measured)
        if apart and not route.patched:
            # What was kept apart for a choice counts like the rest.
            reading.read([prefixes[number] for number in apart], clock, options.progress, len(kept), shared=False)
            with clock.stage("fit"):
                maps = Solver(reading, run, options.payload).solve()
        for role, before, after in zip(("producer", "consumer"), fingerprints, pair.fingerprints(), strict=True):
            before.require_same(after, f"The first half of what the {role} made of the texts")
    tokens = sum(map(len, prefixes))
    config = replace(reading.config, layers_per_code=reading.layers_per_code)
    settings = TranslatorSettings(float(options.payload), run, config, pair.layers, len(prefixes), tokens, clock.seconds, measured)
    return maps, settings, route, *fingerprints


def _choose_run(reading: TextSums, options: FitOptions, trials: Sequence[Trial], clock: Clock, measured: dict[str, float]) -> int:
    """How many layers the consumer runs: of those that may be, what diverges least at the same bytes on texts kept apart."""
    if len(reading.lowest) == 1 or not trials:
        return reading.lowest[0]
    with clock.stage("routing"):
        score, scores = options.score or closeness, dict[int, float]()
        for lowest in reading.lowest:
            maps = Solver(reading, lowest, options.payload).solve()
            scores[lowest] = mean_score(trials, [trial.translated(maps, lowest) for trial in trials], score)
            measured[f"{lowest} layers run"] = -scores[lowest]
    return max(scores, key=lambda lowest: (scores[lowest], -lowest))


def _beginning(texts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first texts, of so many tokens that layers can be compared."""
    lengths = list(accumulate(map(len, texts), initial=0))
    return [ids for ids, before in zip(texts, lengths, strict=False) if before < _COMPARED]


def _kept_apart(prefixes: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of the texts to try layers on: every eighth of those that are long enough to ask for something behind a beginning."""
    long = [number for number, ids in enumerate(prefixes) if len(ids) >= 16]
    return long[_APART - 1 :: _APART][:_MOST_APART]
